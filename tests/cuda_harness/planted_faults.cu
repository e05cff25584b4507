#include "kernels/cuda/device.h"
#include "kernels/cuda/launch.h"
#include "tests/cuda_harness/planted_faults.h"

namespace kvmill {
namespace cuda_harness {
namespace {

using namespace device;  // NOLINT(google-build-using-namespace): as the kernels do.

// Recursion with a frame: more stack than a thread has.
#ifndef __CUDACC__
__attribute__((noinline)) float Recurse(int depth, volatile float* keep) {
  volatile float frame[256];
  frame[depth % 256] = *keep;
  if (depth == 0) return frame[0];
  return frame[depth % 256] + Recurse(depth - 1, frame);
}
#endif

KVMILL_KERNEL(kPlantedThreads, 1)
TreeSumKernel(Planted fault, const float* in, float* out) {
  KVMILL_DYNAMIC_SHARED(float, values);
  const unsigned thread = ThreadIndex();
  const unsigned block = BlockIndex();
  const std::size_t at = std::size_t{block} * BlockThreads() + thread;
  float x = in[at];
  if (fault == Planted::kGlobalOutOfBounds && block == GridBlocks() - 1) x = in[at + 1];
  if (fault == Planted::kGlobalBelow && block == 0) x = *(in + at - 1);
  if (fault == Planted::kWildPointer) {
    x = *reinterpret_cast<const float*>(std::uintptr_t{0x10000} + 4 * thread);
  }
  if (fault == Planted::kMisaligned) {
    x = *reinterpret_cast<const float*>(reinterpret_cast<const char*>(in) + 1);
  }
  if (fault == Planted::kUninitialized) x = values[thread];
  values[thread] = x;
  if (fault == Planted::kSharedOutOfBounds && thread == BlockThreads() - 1) values[thread + 1] = x;
  if (fault == Planted::kSharedBelow && thread == 0) *(values + thread - 1) = x;
  SyncThreads();
#ifndef __CUDACC__
  if (fault == Planted::kStackOverflow) values[thread] = Recurse(1000, &x);
#endif
  for (unsigned half = BlockThreads() / 2; half > 0; half /= 2) {
    if (thread < half) values[thread] += values[thread + half];
    if (fault == Planted::kDivergentBarrier) {
      if (WarpIndex() % 2 == 0) SyncThreads();
    } else if (fault == Planted::kTwoBarriers && WarpIndex() % 2 == 0) {
      SyncThreads();
    } else if (fault != Planted::kMissingBarrier || half != BlockThreads() / 4) {
      SyncThreads();
    }
  }
  if (thread == 0 || fault == Planted::kRace) out[block] = values[0];
}

KVMILL_KERNEL(kPlantedThreads, 1)
WarpSumKernel(Planted fault, const float* in, float* out) {
  KVMILL_DYNAMIC_SHARED(float, sums);
  const unsigned lane = LaneIndex();
  const unsigned warp = WarpIndex();
  float x = in[std::size_t{BlockIndex()} * BlockThreads() + ThreadIndex()];
  KVMILL_UNROLL
  for (unsigned step = 16; step > 0; step /= 2) {
    unsigned mask = kAllLanes;
    if (fault == Planted::kMaskWithoutSelf) mask = 0xFFFFu;
    if (fault == Planted::kMasksThatDisagree && lane >= 16) mask = 0xFFFF0000u;
    if (fault == Planted::kMaskOfAbsentLanes && lane == 31) break;
    if (fault == Planted::kShuffleFromOutsideMask) {
      mask = lane < 16 ? 0xFFFFu : 0xFFFF0000u;
    }
    x += ShuffleXor(mask, x, step);
  }
  // Through shared memory once more: the lanes hand the sum to their neighbours.
  sums[ThreadIndex()] = x;
  if (fault != Planted::kMissingWarpSync) SyncWarp();
  x = sums[warp * 32 + (lane + 1) % 32];
  SyncWarp();
  if (lane == 0) sums[warp * 32] = x;
  SyncThreads();
  if (ThreadIndex() == 0) {
    float sum = 0;
    for (unsigned w = 0; w < BlockThreads() / 32; ++w) sum += sums[w * 32];
    out[BlockIndex()] = sum;
  }
}

KVMILL_KERNEL(kPlantedThreads, 1)
AsyncCopySumKernel(Planted fault, const float* in, float* out) {
  KVMILL_DYNAMIC_SHARED(float, values);
  const unsigned thread = ThreadIndex();
  const unsigned half = BlockThreads() / 2;
  const float* const from = in + std::size_t{BlockIndex()} * BlockThreads();
  // Two groups of copies: the halves of the block's values.
  for (unsigned group = 0; group < 2; ++group) {
    if (thread < half / 4) {
      CpAsync16(values + group * half + 4 * thread, from + group * half + 4 * thread);
    }
    CpAsyncCommit();
  }
  CpAsyncWait<1>();  // The first half is there, the second not.
  SyncThreads();
  float sum = 0;
  if (thread == 0) {
    for (unsigned i = 0; i < half; ++i) sum += values[i];
    if (fault == Planted::kReadBeforeWait) sum += values[half];
  }
  CpAsyncWait<0>();
  if (fault != Planted::kWaitWithoutBarrier) SyncThreads();
  if (thread == 0) {
    for (unsigned i = half; i < 2 * half; ++i) sum += values[i];
    out[BlockIndex()] = sum;
  }
}

KVMILL_KERNEL(kPlantedThreads, 1)
LastBlockSumKernel(Planted fault, const float* in, float* out, unsigned* counter) {
  KVMILL_DYNAMIC_SHARED(float, values);
  const unsigned thread = ThreadIndex();
  values[thread] = in[std::size_t{BlockIndex()} * BlockThreads() + thread];
  SyncThreads();
  if (thread == 0) {
    float sum = 0;
    for (unsigned i = 0; i < BlockThreads(); ++i) sum += values[i];
    out[BlockIndex()] = sum;
  }
  SyncThreads();
  bool last = false;
  if (thread == 0) {
    if (fault != Planted::kMissingFence) ThreadFence();
    last = AtomicAdd(counter, 1) == GridBlocks() - 1;
    ThreadFence();
  }
  if (!SyncThreadsOr(last)) return;
  if (thread == 1) {  // Not the one that fenced: the barrier hands its knowledge on.
    float total = 0;
    for (unsigned b = 0; b < GridBlocks(); ++b) total += out[b];
    out[GridBlocks()] = total;
  }
  if (thread == 0) *counter = 0;  // For the next launch.
}

KVMILL_KERNEL(32, 1)
MatrixProductKernel(int kind, const std::uint16_t* a, const std::uint16_t* b, float* c) {
  KVMILL_DYNAMIC_SHARED(std::uint16_t, tiles);
  std::uint16_t* const b_tile = tiles + 256;
  const unsigned lane = LaneIndex();
  for (unsigned i = lane; i < 256; i += 32) tiles[i] = a[i];
  for (unsigned i = lane; i < 128; i += 32) b_tile[i] = b[i];
  SyncWarp();
  std::uint32_t a_words[4];
  LdMatrix4(a_words, tiles + (lane % 8 + lane / 8 % 2 * 8) * 16 + lane / 16 * 8);
  std::uint32_t b_words[4];  // Two of the four matrices; the others are read again.
  LdMatrix4Transposed(b_words, b_tile + lane % 16 * 8);
  const std::uint32_t b_pair[2] = {b_words[0], b_words[1]};
  const unsigned row = lane / 4;
  const unsigned column = 2 * (lane % 4);
  float sums[4] = {c[row * 8 + column], c[row * 8 + column + 1], c[(row + 8) * 8 + column],
                   c[(row + 8) * 8 + column + 1]};
  if (kind == 0) {
    MmaHalf(sums, a_words, b_pair);
  } else {
    MmaBFloat16(sums, a_words, b_pair);
  }
  c[row * 8 + column] = sums[0];
  c[row * 8 + column + 1] = sums[1];
  c[(row + 8) * 8 + column] = sums[2];
  c[(row + 8) * 8 + column + 1] = sums[3];
}

KVMILL_KERNEL(32, 1)
HalfMathKernel(const std::uint32_t* a, const std::uint32_t* b, const std::uint32_t* c,
               std::uint32_t* fma, std::uint32_t* difference) {
  const unsigned lane = LaneIndex();
  fma[lane] = HalfFma2(a[lane], b[lane], c[lane]);
  difference[lane] = HalfSub2(a[lane], b[lane]);
}

LaunchShape Shape(unsigned blocks) {
  return {blocks, kPlantedThreads, kPlantedThreads * sizeof(float)};
}

}  // namespace

absl::Status TreeSum(Planted fault, unsigned blocks, const float* in, float* out) {
  return Launch(TreeSumKernel, Shape(blocks), nullptr, fault, in, out);
}
absl::Status WarpSum(Planted fault, unsigned blocks, const float* in, float* out) {
  return Launch(WarpSumKernel, Shape(blocks), nullptr, fault, in, out);
}
absl::Status AsyncCopySum(Planted fault, unsigned blocks, const float* in, float* out) {
  return Launch(AsyncCopySumKernel, Shape(blocks), nullptr, fault, in, out);
}
absl::Status LastBlockSum(Planted fault, unsigned blocks, const float* in, float* out,
                          unsigned* counter) {
  return Launch(LastBlockSumKernel, Shape(blocks), nullptr, fault, in, out, counter);
}
absl::Status WarpMatrixProduct(int kind, const std::uint16_t* a, const std::uint16_t* b, float* c) {
  return Launch(MatrixProductKernel, LaunchShape{1, 32, 768}, nullptr, kind, a, b, c);
}
absl::Status HalfMath(const std::uint32_t* a, const std::uint32_t* b, const std::uint32_t* c,
                      std::uint32_t* fma, std::uint32_t* difference) {
  return Launch(HalfMathKernel, LaunchShape{1, 32, 0}, nullptr, a, b, c, fma, difference);
}

}  // namespace cuda_harness
}  // namespace kvmill
