#include "client/cli/block_keys.h"

#include <cstdint>
#include <string>

#include "absl/strings/str_cat.h"
#include "storage/core/check.h"
#include "storage/core/sha256.h"

namespace kvmill::cli {
namespace {

void AppendU64(std::string& out, std::uint64_t value) {
  for (int shift = 0; shift < 64; shift += 8) out.push_back(static_cast<char>(value >> shift));
}

}  // namespace

std::vector<BlockKey> SequenceKeys(absl::string_view sequence, std::size_t block_count) {
  std::vector<BlockKey> keys;
  keys.reserve(block_count);
  std::string prefix(kHashScheme);
  prefix.push_back('\0');
  AppendU64(prefix, sequence.size());
  absl::StrAppend(&prefix, sequence);
  for (std::size_t n = 0; n < block_count; ++n) {
    std::string input = prefix;
    if (n > 0) absl::StrAppend(&input, keys.back().view());
    AppendU64(input, n);
    const Sha256Digest digest = Sha256(input);
    absl::StatusOr<BlockKey> key = BlockKey::FromBytes(
        absl::string_view(reinterpret_cast<const char*>(digest.data()), digest.size()));
    KVMILL_CHECK(key.ok());
    keys.push_back(*key);
  }
  return keys;
}

}  // namespace kvmill::cli
