// Scratch of encoders, one for each thread.
#ifndef KVMILL_STORAGE_CORE_ENCODE_SCRATCH_H_
#define KVMILL_STORAGE_CORE_ENCODE_SCRATCH_H_

#include <cstddef>

#include "absl/types/span.h"
#include "kernels/tile_format.h"

namespace kvmill {

// The calling thread's scratch, EncodeScratchBytes(format) aligned to 64 bytes: kept from call to
// call, so that nothing is allocated per head, and freed with the thread.
absl::Span<std::byte> EncodeScratch(const TileFormat& format);

}  // namespace kvmill

#endif  // KVMILL_STORAGE_CORE_ENCODE_SCRATCH_H_
