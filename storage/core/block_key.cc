#include "storage/core/block_key.h"

#include <xxhash.h>

#include <algorithm>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "storage/core/sha256.h"

namespace kvmill {

absl::StatusOr<BlockKey> BlockKey::FromBytes(absl::string_view bytes) {
  if (bytes.empty() || bytes.size() > kBlockKeyBytesMax) {
    return absl::InvalidArgumentError(
        absl::StrCat("block key of ", bytes.size(), " bytes: want 1 to ", kBlockKeyBytesMax));
  }
  BlockKey key;
  std::memcpy(key.bytes_.data(), bytes.data(), bytes.size());
  key.size_ = static_cast<std::uint8_t>(bytes.size());
  return key;
}

absl::StatusOr<BlockKey> BlockKey::FromHex(absl::string_view hex) {
  const bool hexadecimal = std::all_of(hex.begin(), hex.end(), [](char c) {
    return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f') || (c >= 'A' && c <= 'F');
  });
  if (!hexadecimal || hex.size() % 2 != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("block key \"", hex, "\": want an even number of hexadecimal digits"));
  }
  return FromBytes(absl::HexStringToBytes(hex));
}

std::string BlockKey::ToHex() const { return absl::BytesToHexString(view()); }

BlockKey TailKey(const BlockKey& parent, std::uint32_t token_count, const BlockKey& key) {
  std::string input("kvmill-tail-2\0", 14);
  // Lengths in front: keys may hold any bytes, so no separator could tell where one ends.
  for (const BlockKey* part : {&parent, &key}) {
    input.push_back(static_cast<char>(part->size()));
    absl::StrAppend(&input, part->view());
  }
  for (int shift = 0; shift < 32; shift += 8)
    input.push_back(static_cast<char>(token_count >> shift));
  const Sha256Digest digest = Sha256(input);
  return *BlockKey::FromBytes(
      absl::string_view(reinterpret_cast<const char*>(digest.data()), digest.size()));
}

BlockKey StoredKey(std::uint32_t block_tokens, const BlockKey& parent, std::uint32_t token_count,
                   const BlockKey& key) {
  return token_count < block_tokens ? TailKey(parent, token_count, key) : key;
}

absl::Status CheckTailCandidates(absl::Span<const TailCandidate> tails,
                                 std::uint32_t block_tokens) {
  if (tails.size() > kTailCandidatesMax) {
    return absl::InvalidArgumentError(absl::StrCat(
        tails.size(), " tail candidates in one lookup: ", "at most ", kTailCandidatesMax));
  }
  for (std::size_t i = 0; i < tails.size(); ++i) {
    if (tails[i].key.empty()) {
      return absl::InvalidArgumentError(
          absl::StrCat("tail candidate ", i, ": key of 0 bytes: want 1 to ", kBlockKeyBytesMax));
    }
    if (tails[i].token_count == 0 || tails[i].token_count >= block_tokens) {
      return absl::InvalidArgumentError(absl::StrCat("tail candidate ", i, ": token_count ",
                                                     tails[i].token_count, ", want 1 to ",
                                                     block_tokens - 1));
    }
  }
  return absl::OkStatus();
}

std::uint64_t HashOf(NamespaceId namespace_id, std::uint8_t group, const BlockKey& key) {
  const std::uint64_t seed = (std::uint64_t{namespace_id} << 8) | group;
  return XXH3_64bits_withSeed(key.data(), key.size(), seed);
}

}  // namespace kvmill
