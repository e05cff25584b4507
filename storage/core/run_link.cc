#include "storage/core/run_link.h"

#include <array>
#include <cstring>

#include "storage/core/checksum.h"

namespace kvmill {

std::uint64_t KeyHash(const Fingerprint& fingerprint, const BlockKey& key) {
  std::array<std::byte, sizeof(Fingerprint) + kBlockKeyBytesMax> bytes;
  std::memcpy(bytes.data(), fingerprint.data(), fingerprint.size());
  std::memcpy(bytes.data() + fingerprint.size(), key.data(), key.size());
  return Checksum(absl::MakeConstSpan(bytes.data(), fingerprint.size() + key.size()));
}

}  // namespace kvmill
