// Small kernels, each correct in one form and wrong in another: what the harness must find, and
// must not find.
#ifndef KVMILL_TESTS_CUDA_HARNESS_PLANTED_FAULTS_H_
#define KVMILL_TESTS_CUDA_HARNESS_PLANTED_FAULTS_H_

#include <cstdint>

#include "absl/status/status.h"

namespace kvmill {
namespace cuda_harness {

constexpr unsigned kPlantedThreads = 128;  // Of a block; also the values that a block reads.

enum class Planted {
  kNone,
  kRace,                    // All threads write the result.
  kMissingBarrier,          // Between two steps of a tree sum.
  kMissingWarpSync,         // Between a write and another lane's read.
  kDivergentBarrier,        // Half of the warps do not come.
  kTwoBarriers,             // Half of the warps come to another one.
  kSharedOutOfBounds,       // The last thread's neighbour.
  kSharedBelow,             // The first thread's.
  kGlobalOutOfBounds,       // The last thread of the last block.
  kGlobalBelow,             // The first of the first.
  kWildPointer,             // An address nobody allocated.
  kReadBeforeWait,          // Of an asynchronous copy.
  kWaitWithoutBarrier,      // Another thread's asynchronous copy.
  kMaskWithoutSelf,         // A lane that its own mask does not name.
  kMaskOfAbsentLanes,       // A mask that names lanes that have left.
  kMasksThatDisagree,       // Lanes of one operation with two masks.
  kShuffleFromOutsideMask,  // A source lane that the mask does not name.
  kMissingFence,            // Before the atomic that says a block has arrived.
  kUninitialized,           // Shared memory that nobody wrote.
  kMisaligned,              // A word at an odd address.
  kStackOverflow,
};

// Each reads kPlantedThreads values a block and writes one, their sum, through the mechanism that
// the fault belongs to; with kNone they are correct. `out` holds a value a block and, for
// LastBlock, the total after them; `counter` is zero.
absl::Status TreeSum(Planted fault, unsigned blocks, const float* in, float* out);
absl::Status WarpSum(Planted fault, unsigned blocks, const float* in, float* out);
absl::Status AsyncCopySum(Planted fault, unsigned blocks, const float* in, float* out);
absl::Status LastBlockSum(Planted fault, unsigned blocks, const float* in, float* out,
                          unsigned* counter);

// One warp: c[16][8] += a[16][16] * b[16][8], all by rows, by way of shared memory and ldmatrix.
// `kind` 0: fp16; 1: bf16.
absl::Status WarpMatrixProduct(int kind, const std::uint16_t* a, const std::uint16_t* b, float* c);

// One warp: out[lane] = a[lane] * b[lane] + c[lane], and a - b, in pairs of halves.
absl::Status HalfMath(const std::uint32_t* a, const std::uint32_t* b, const std::uint32_t* c,
                      std::uint32_t* fma, std::uint32_t* difference);

}  // namespace cuda_harness
}  // namespace kvmill

#endif  // KVMILL_TESTS_CUDA_HARNESS_PLANTED_FAULTS_H_
