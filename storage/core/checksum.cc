#include "storage/core/checksum.h"

#include <xxhash.h>
#ifdef __x86_64__
#include <xxh_x86dispatch.h>  // The same values, by the widest vectors that this processor has.
#endif

namespace kvmill {

std::uint64_t Checksum(absl::Span<const std::byte> bytes) {
  return XXH3_64bits(bytes.data(), bytes.size());
}

}  // namespace kvmill
