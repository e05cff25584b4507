// The host form of kernels/cuda/device.h.
#include <climits>
#include <cmath>
#include <cstring>

#include "kernels/cuda/device.h"
#include "kernels/float16.h"
#include "tests/cuda_harness/executor.h"

namespace kvmill {
namespace device {
namespace {

using cuda_harness::AccessKind;
using cuda_harness::Executor;
using cuda_harness::FaultKind;
using cuda_harness::InHarness;

Executor& Current() { return *Executor::Current(); }

// The address of one of these says which operation a lane is in.
constexpr char kSyncThreads = 0, kSyncThreadsOr = 0, kSyncWarp = 0, kShuffle = 0, kBallot = 0,
               kReduceMax = 0, kReduceMin = 0, kLdMatrix = 0, kLdMatrixTransposed = 0, kMmaHalf = 0,
               kMmaBFloat16 = 0;

template <typename Function>
void ForEachLane(unsigned mask, Function function) {
  for (; mask != 0; mask &= mask - 1) function(static_cast<unsigned>(__builtin_ctz(mask)));
}

struct ShufflePayload {
  std::uint32_t value, from, result;
};
void ExecuteShuffle(void* const* payloads, unsigned mask) {
  ForEachLane(mask, [&](unsigned lane) {
    auto& self = *static_cast<ShufflePayload*>(payloads[lane]);
    if (self.from >= 32 || (mask >> self.from & 1u) == 0) {
      Current().Fail(FaultKind::kWarpMask, "lane " + std::to_string(lane) + " reads lane " +
                                               std::to_string(self.from) +
                                               ", which is not in the mask");
    }
    self.result = static_cast<const ShufflePayload*>(payloads[self.from])->value;
  });
}

std::uint32_t DoShuffle(unsigned mask, std::uint32_t value, unsigned from, const char* file,
                        int line) {
  ShufflePayload payload{value, from, 0};
  Current().Rendezvous(&kShuffle, mask, &payload, ExecuteShuffle, {file, line});
  return payload.result;
}

// One word in, the combination of all lanes out.
template <typename Combine>
void Reduce(void* const* payloads, unsigned mask, std::uint32_t start, Combine combine) {
  ForEachLane(mask, [&](unsigned lane) {
    start = combine(start, *static_cast<std::uint32_t*>(payloads[lane]), lane);
  });
  ForEachLane(mask, [&](unsigned lane) { *static_cast<std::uint32_t*>(payloads[lane]) = start; });
}

struct LdMatrixPayload {
  const std::byte* row;
  std::uint32_t* out;
};
template <bool kTransposed>
void ExecuteLdMatrix(void* const* payloads, unsigned mask) {
  ForEachLane(mask, [&](unsigned lane) {
    auto& self = *static_cast<LdMatrixPayload*>(payloads[lane]);
    for (unsigned matrix = 0; matrix < 4; ++matrix) {
      std::uint16_t pair[2];
      for (unsigned i = 0; i < 2; ++i) {
        const unsigned row = kTransposed ? 2 * (lane % 4) + i : lane / 4;
        const unsigned column = kTransposed ? lane / 4 : 2 * (lane % 4) + i;
        const auto& source = *static_cast<const LdMatrixPayload*>(payloads[8 * matrix + row]);
        std::memcpy(&pair[i], source.row + 2 * column, 2);
      }
      self.out[matrix] = pair[0] | std::uint32_t{pair[1]} << 16;
    }
  });
}

template <bool kTransposed>
void DoLdMatrix(std::uint32_t (&out)[4], const void* row, const char* file, int line) {
  // The row is read for the whole warp, on behalf of the lane that names it.
  Current().Access(reinterpret_cast<std::uintptr_t>(row), 16, AccessKind::kRead, true);
  LdMatrixPayload payload{static_cast<const std::byte*>(row), out};
  Current().Rendezvous(kTransposed ? &kLdMatrixTransposed : &kLdMatrix, kAllLanes, &payload,
                       ExecuteLdMatrix<kTransposed>, {file, line});
}

struct MmaPayload {
  float* c;
  const std::uint32_t* a;
  const std::uint32_t* b;
};
template <DType kDType>
void ExecuteMma(void* const* payloads, unsigned) {
  const auto half = [](std::uint32_t pair, unsigned i) {
    return ToFloat(static_cast<std::uint16_t>(pair >> (16 * i)), kDType);
  };
  float a[16][16], b[16][8];
  for (unsigned lane = 0; lane < 32; ++lane) {
    const auto& p = *static_cast<const MmaPayload*>(payloads[lane]);
    const unsigned group = lane / 4, pair = 2 * (lane % 4);
    for (unsigned r = 0; r < 4; ++r) {
      for (unsigned i = 0; i < 2; ++i) {
        a[group + r % 2 * 8][pair + r / 2 * 8 + i] = half(p.a[r], i);
        if (r < 2) b[pair + r * 8 + i][group] = half(p.b[r], i);
      }
    }
  }
  for (unsigned lane = 0; lane < 32; ++lane) {
    const auto& p = *static_cast<const MmaPayload*>(payloads[lane]);
    for (unsigned r = 0; r < 4; ++r) {
      const unsigned row = lane / 4 + r / 2 * 8, column = 2 * (lane % 4) + r % 2;
      double sum = static_cast<double>(p.c[r]);  // Tensor cores keep products exact.
      for (unsigned k = 0; k < 16; ++k) {
        sum += static_cast<double>(a[row][k]) * static_cast<double>(b[k][column]);
      }
      p.c[r] = static_cast<float>(sum);
    }
  }
}

template <DType kDType>
void DoMma(float (&c)[4], const std::uint32_t (&a)[4], const std::uint32_t (&b)[2],
           const char* file, int line) {
  MmaPayload payload{c, a, b};
  Current().Rendezvous(kDType == DType::kFloat16 ? &kMmaHalf : &kMmaBFloat16, kAllLanes, &payload,
                       ExecuteMma<kDType>, {file, line});
}

}  // namespace

void* DynamicShared() { return Current().shared(); }
unsigned ThreadIndex() { return Current().thread().index; }
unsigned BlockIndex() { return Current().block(); }
unsigned BlockThreads() { return Current().shape().threads; }
unsigned GridBlocks() { return Current().shape().blocks; }

void SyncThreads(const char* file, int line) {
  const InHarness guard;
  Current().Barrier(&kSyncThreads, false, {file, line});
}
bool SyncThreadsOr(bool value, const char* file, int line) {
  const InHarness guard;
  return Current().Barrier(&kSyncThreadsOr, value, {file, line});
}
void SyncWarp(const char* file, int line) {
  const InHarness guard;
  Current().Rendezvous(&kSyncWarp, kAllLanes, nullptr,
                       [](void* const*, unsigned) { Current().CountWarpSync(); }, {file, line});
}

std::uint32_t ShuffleXorBits(unsigned mask, std::uint32_t value, unsigned lane_xor,
                             const char* file, int line) {
  const InHarness guard;
  return DoShuffle(mask, value, (Current().thread().index % 32) ^ lane_xor, file, line);
}
std::uint32_t ShuffleBits(unsigned mask, std::uint32_t value, unsigned lane, const char* file,
                          int line) {
  const InHarness guard;
  return DoShuffle(mask, value, lane, file, line);
}

unsigned Ballot(unsigned mask, bool value, const char* file, int line) {
  const InHarness guard;
  std::uint32_t word = value ? 1 : 0;
  Current().Rendezvous(&kBallot, mask, &word,
                       [](void* const* payloads, unsigned m) {
                         Reduce(payloads, m, 0,
                                [](std::uint32_t all, std::uint32_t one, unsigned lane) {
                                  return all | one << lane;
                                });
                       },
                       {file, line});
  return word;
}
unsigned ReduceMax(unsigned mask, unsigned value, const char* file, int line) {
  const InHarness guard;
  Current().Rendezvous(&kReduceMax, mask, &value,
                       [](void* const* payloads, unsigned m) {
                         Reduce(payloads, m, 0, [](std::uint32_t all, std::uint32_t one, unsigned) {
                           return all > one ? all : one;
                         });
                       },
                       {file, line});
  return value;
}
unsigned ReduceMin(unsigned mask, unsigned value, const char* file, int line) {
  const InHarness guard;
  Current().Rendezvous(&kReduceMin, mask, &value,
                       [](void* const* payloads, unsigned m) {
                         Reduce(payloads, m, ~0u,
                                [](std::uint32_t all, std::uint32_t one, unsigned) {
                                  return all < one ? all : one;
                                });
                       },
                       {file, line});
  return value;
}

float Exp2(float x) { return std::exp2(x); }
float Log2(float x) { return std::log2(x); }
float Tanh(float x) { return std::tanh(x); }
int RoundToInt(float x) {  // Saturates, as cvt does; NaN is 0.
  if (std::isnan(x)) return 0;
  if (x >= 2147483648.0f) return INT_MAX;
  if (x < -2147483648.0f) return INT_MIN;
  return static_cast<int>(std::nearbyint(x));
}

float HalfToFloat(std::uint16_t h) { return Float16ToFloat(h); }
std::uint16_t FloatToHalf(float x) { return FloatToFloat16(x); }
std::uint16_t FloatToBFloat16(float x) { return kvmill::FloatToBFloat16(x); }

namespace {
template <typename Function>
std::uint32_t ForHalves(Function function) {
  return function(0u) | std::uint32_t{function(16u)} << 16;
}
float Half(std::uint32_t pair, unsigned shift) {
  return Float16ToFloat(static_cast<std::uint16_t>(pair >> shift));
}
// fp64 holds products of halves, and their sums with a third, exactly enough to be rounded once:
// 22 bits of product, and a third half at most 40 binary places away from mattering.
std::uint16_t RoundOnce(double x) {
  const float nearest = static_cast<float>(x);
  if (static_cast<double>(nearest) == x || std::isinf(nearest)) return FloatToFloat16(nearest);
  // To odd: the last bit of the fp32 value says that something was cut off.
  const float down = std::abs(static_cast<double>(nearest)) > std::abs(x)
                         ? std::nextafter(nearest, 0.0f)
                         : nearest;
  return FloatToFloat16(BitsToFloat(FloatToBits(down) | 1u));
}
}  // namespace

std::uint32_t HalfFma2(std::uint32_t a, std::uint32_t b, std::uint32_t c) {
  return ForHalves([&](unsigned shift) {
    return RoundOnce(static_cast<double>(Half(a, shift)) * static_cast<double>(Half(b, shift)) +
                     static_cast<double>(Half(c, shift)));
  });
}
std::uint32_t HalfSub2(std::uint32_t a, std::uint32_t b) {
  return ForHalves([&](unsigned shift) {
    return RoundOnce(static_cast<double>(Half(a, shift)) - static_cast<double>(Half(b, shift)));
  });
}
std::uint32_t PackHalf2(float low, float high) {
  return FloatToFloat16(low) | std::uint32_t{FloatToFloat16(high)} << 16;
}

Vector16 Load16(const void* address) {
  const InHarness guard;
  Current().Access(reinterpret_cast<std::uintptr_t>(address), 16, AccessKind::kRead, true);
  Vector16 v;
  std::memcpy(&v, address, sizeof(v));
  return v;
}
void Store16(void* address, const Vector16& v) {
  const InHarness guard;
  Current().Access(reinterpret_cast<std::uintptr_t>(address), 16, AccessKind::kWrite, true);
  std::memcpy(address, &v, sizeof(v));
}

unsigned AtomicAdd(unsigned* address, unsigned value) {
  const InHarness guard;
  Current().Access(reinterpret_cast<std::uintptr_t>(address), sizeof(*address), AccessKind::kAtomic,
                   true);
  Current().AtomicOn(address);
  const unsigned before = *address;
  *address = before + value;
  return before;
}
void ThreadFence() {
  const InHarness guard;
  Current().Fence();
}

std::uint64_t LoadFromSystem(const std::uint64_t* address) {
  const InHarness guard;
  Current().Access(reinterpret_cast<std::uintptr_t>(address), sizeof(*address), AccessKind::kRead,
                   true);
  return *address;
}

void CpAsync16(void* shared, const void* global) {
  const InHarness guard;
  Current().StartCopy(static_cast<std::byte*>(shared), static_cast<const std::byte*>(global));
}
void CpAsyncCommit() {
  const InHarness guard;
  Current().thread().copy_groups.emplace_back();
  Current().thread().copy_groups.back().swap(Current().thread().open_copies);
}
void CpAsyncWaitAllBut(int pending) {
  const InHarness guard;
  Current().FinishCopies(static_cast<std::size_t>(pending));
}

void LdMatrix4(std::uint32_t (&out)[4], const void* row, const char* file, int line) {
  const InHarness guard;
  DoLdMatrix<false>(out, row, file, line);
}
void LdMatrix4Transposed(std::uint32_t (&out)[4], const void* row, const char* file, int line) {
  const InHarness guard;
  DoLdMatrix<true>(out, row, file, line);
}
void MmaHalf(float (&c)[4], const std::uint32_t (&a)[4], const std::uint32_t (&b)[2],
             const char* file, int line) {
  const InHarness guard;
  DoMma<DType::kFloat16>(c, a, b, file, line);
}
void MmaBFloat16(float (&c)[4], const std::uint32_t (&a)[4], const std::uint32_t (&b)[2],
                 const char* file, int line) {
  const InHarness guard;
  DoMma<DType::kBFloat16>(c, a, b, file, line);
}

std::size_t SharedBytesMax() {
  const cuda_harness::Executor* const executor = cuda_harness::Executor::Current();
  return executor == nullptr ? 0 : executor->shared_bytes_max();
}

absl::Status RunOnHost(const LaunchShape& shape, const void* parameters,
                       std::size_t parameter_bytes, void (*body)(const void*)) {
  return Current().Run(shape, parameters, parameter_bytes, body);
}

}  // namespace device
}  // namespace kvmill
