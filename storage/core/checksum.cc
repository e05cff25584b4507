#include "storage/core/checksum.h"

#include <xxhash.h>

namespace kvmill {

std::uint64_t Checksum(absl::Span<const std::byte> bytes) {
  return XXH3_64bits(bytes.data(), bytes.size());
}

}  // namespace kvmill
