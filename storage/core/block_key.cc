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

BlockKey TailKey(const BlockKey& parent, std::uint32_t token_count) {
  const absl::string_view zero("\0", 1);
  const Sha256Digest digest =
      Sha256(absl::StrCat("kvmill-tail-1", zero, parent.view(), zero, token_count));
  return *BlockKey::FromBytes(
      absl::string_view(reinterpret_cast<const char*>(digest.data()), digest.size()));
}

std::uint64_t HashOf(NamespaceId namespace_id, std::uint8_t group, const BlockKey& key) {
  const std::uint64_t seed = (std::uint64_t{namespace_id} << 8) | group;
  return XXH3_64bits_withSeed(key.data(), key.size(), seed);
}

}  // namespace kvmill
