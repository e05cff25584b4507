// The second half of a reader's protocol for mapped slots, on a device: whether the slots that the
// work before it on the stream has read still hold what they held when that work was enqueued.
//
// A slot's generation word is odd while the slot is written and even after; every reuse makes it
// larger. A reader loads the word before it reads and must find the same even value after. On a
// device the second look is this kernel, behind the readers on their stream: work on a stream is
// over before the next begins. A changed generation means that the bytes read were not the block's,
// and that everything made of them must be thrown away.
//
// Thread-safe, no allocation.
#ifndef KVMILL_KERNELS_GENERATION_CHECK_H_
#define KVMILL_KERNELS_GENERATION_CHECK_H_

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"

struct CUstream_st;  // What a cudaStream_t points to.

namespace kvmill {

struct GenerationCheck {
  const std::uint64_t* word = nullptr;  // Of the slot, in mapped memory; aligned to 8.
  std::uint64_t expected = 0;           // What the reader saw before it read.
};

// Adds to *changed the number of checks whose word is not `expected`, or is odd.
void CheckGenerationsReference(const GenerationCheck* checks, std::size_t check_count,
                               std::uint32_t* changed);

// The same at the stream's place. `checks`, the words and `changed` must be readable (and writable)
// by the device; the caller zeroes *changed before, on the stream. Enqueues one kernel. INTERNAL
// when the launch fails, UNIMPLEMENTED in builds without CUDA.
absl::Status CheckGenerationsCuda(const GenerationCheck* checks, std::size_t check_count,
                                  std::uint32_t* changed, CUstream_st* stream);

}  // namespace kvmill

#endif  // KVMILL_KERNELS_GENERATION_CHECK_H_
