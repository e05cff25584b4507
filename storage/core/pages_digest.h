// One number for all bytes of a block: two nodes whose pages have the same one have the same block,
// bit for bit. Encoders differ in last bits, so a block that is stored twice may have two.
#ifndef KVMILL_STORAGE_CORE_PAGES_DIGEST_H_
#define KVMILL_STORAGE_CORE_PAGES_DIGEST_H_

#include <cstddef>
#include <cstdint>

#include "absl/types/span.h"

namespace kvmill {

// XXH3-64 of the checksums in the headers of the pages, one after the other, little-endian. A
// header's checksum is of those of its slots, so with VerifyPage it stands for everything. The
// pages are complete: at least a header each, sealed.
std::uint64_t PagesDigest(absl::Span<const absl::Span<const std::byte>> pages);

}  // namespace kvmill

#endif  // KVMILL_STORAGE_CORE_PAGES_DIGEST_H_
