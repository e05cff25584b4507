// XXH3-64, the checksum of records and page headers. Detects accidents, not attackers.
#ifndef KVMILL_STORAGE_CORE_CHECKSUM_H_
#define KVMILL_STORAGE_CORE_CHECKSUM_H_

#include <cstddef>
#include <cstdint>

#include "absl/types/span.h"

namespace kvmill {

std::uint64_t Checksum(absl::Span<const std::byte> bytes);

}  // namespace kvmill

#endif  // KVMILL_STORAGE_CORE_CHECKSUM_H_
