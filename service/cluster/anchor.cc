#include "service/cluster/anchor.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "storage/core/checksum.h"

namespace kvmill {

std::vector<AnchorRun> RunsOf(absl::Span<const BlockKey> keys, std::size_t first_index,
                              const BlockKey& first_anchor) {
  std::vector<AnchorRun> runs;
  runs.reserve(keys.size() / kRunBlocks + 2);
  for (std::size_t first = 0; first < keys.size();) {
    const std::size_t inside = (first_index + first) % kRunBlocks;
    const std::size_t count = std::min(kRunBlocks - inside, keys.size() - first);
    runs.push_back({inside == 0 ? keys[first] : first_anchor, first, count});
    first += count;
  }
  return runs;
}

std::uint64_t AnchorHash(const Fingerprint& fingerprint, const BlockKey& anchor) {
  std::array<std::byte, sizeof(Fingerprint) + kBlockKeyBytesMax> bytes;
  std::memcpy(bytes.data(), fingerprint.data(), fingerprint.size());
  std::memcpy(bytes.data() + fingerprint.size(), anchor.data(), anchor.size());
  return Checksum(absl::MakeConstSpan(bytes.data(), fingerprint.size() + anchor.size()));
}

}  // namespace kvmill
