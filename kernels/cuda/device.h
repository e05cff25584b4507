// Everything of CUDA that kernels use: indices, barriers, shuffles and votes, 16-bit conversions
// and math, atomics, and each PTX instruction, in two forms. The device form is what nvcc compiles.
// The host form is declared here and defined by the test harness (tests/cuda_harness), which runs
// the same kernel source on the CPU, one fiber per CUDA thread, and checks what a GPU leaves
// unchecked: masks, arrival at barriers, races, bounds.
//
// Files in kernels/cuda use nothing of CUDA but this header and launch.h: no raw intrinsics, no
// `asm`, no `threadIdx` (ctest `device_code`). Grids and blocks have one dimension. Compiled
// without contraction of multiplication and addition (--fmad=false, -ffp-contract=off): with Fma()
// written out, both forms compute the same bits.
//
// A mask names the lanes that take part; each of them must arrive, with the same mask. Shuffles,
// votes and mma order no memory; SyncWarp and SyncThreads do.
#ifndef KVMILL_KERNELS_CUDA_DEVICE_H_
#define KVMILL_KERNELS_CUDA_DEVICE_H_

#include <cstddef>
#include <cstdint>

#ifdef __CUDACC__
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#define KVMILL_DEVICE __device__ __forceinline__
// Of a kernel: `threads_max` of a block, and how many blocks a multiprocessor must be able to hold.
#define KVMILL_KERNEL(threads_max, blocks_min) \
  __global__ void __launch_bounds__(threads_max, blocks_min)
#define KVMILL_UNROLL _Pragma("unroll")
#define KVMILL_NO_UNROLL _Pragma("unroll 1")
// The dynamic shared memory of the block as a T*, aligned to 16 bytes.
#define KVMILL_DYNAMIC_SHARED(T, name)                                   \
  extern __shared__ __align__(16) unsigned char kvmill_dynamic_shared[]; \
  T* const name = reinterpret_cast<T*>(kvmill_dynamic_shared)
#else
#define KVMILL_DEVICE inline __attribute__((always_inline))
#define KVMILL_KERNEL(threads_max, blocks_min) void
#define KVMILL_UNROLL
#define KVMILL_NO_UNROLL
#define KVMILL_DYNAMIC_SHARED(T, name) \
  T* const name = reinterpret_cast<T*>(::kvmill::device::DynamicShared())
// Where a barrier or a warp operation stands in the source, for reports and to tell barriers apart.
#define KVMILL_SITE const char *file = __builtin_FILE(), int line = __builtin_LINE()
#endif

namespace kvmill {
namespace device {

constexpr unsigned kAllLanes = 0xFFFFFFFFu;

// 16 bytes that move in one instruction.
struct alignas(16) Vector16 {
  std::uint32_t word[4];
};

#ifdef __CUDACC__

KVMILL_DEVICE unsigned ThreadIndex() { return threadIdx.x; }
KVMILL_DEVICE unsigned BlockIndex() { return blockIdx.x; }
KVMILL_DEVICE unsigned BlockThreads() { return blockDim.x; }
KVMILL_DEVICE unsigned GridBlocks() { return gridDim.x; }

KVMILL_DEVICE void SyncThreads() { __syncthreads(); }
KVMILL_DEVICE bool SyncThreadsOr(bool value) { return __syncthreads_or(value) != 0; }
KVMILL_DEVICE void SyncWarp() { __syncwarp(); }

template <typename T>
KVMILL_DEVICE T ShuffleXor(unsigned mask, T value, unsigned lane_xor) {
  return __shfl_xor_sync(mask, value, static_cast<int>(lane_xor));
}
template <typename T>
KVMILL_DEVICE T Shuffle(unsigned mask, T value, unsigned lane) {
  return __shfl_sync(mask, value, static_cast<int>(lane));
}
KVMILL_DEVICE unsigned Ballot(unsigned mask, bool value) { return __ballot_sync(mask, value); }
KVMILL_DEVICE unsigned ReduceMax(unsigned mask, unsigned value) {
  return __reduce_max_sync(mask, value);
}
KVMILL_DEVICE unsigned ReduceMin(unsigned mask, unsigned value) {
  return __reduce_min_sync(mask, value);
}

KVMILL_DEVICE float Fma(float a, float b, float c) { return __fmaf_rn(a, b, c); }
KVMILL_DEVICE float Sqrt(float x) { return __fsqrt_rn(x); }
KVMILL_DEVICE float Min(float a, float b) { return fminf(a, b); }
KVMILL_DEVICE float Max(float a, float b) { return fmaxf(a, b); }
// Within 2 ulp; 2^-inf is 0.
KVMILL_DEVICE float Exp2(float x) { return exp2f(x); }
KVMILL_DEVICE float Log2(float x) { return log2f(x); }
KVMILL_DEVICE float Tanh(float x) { return tanhf(x); }
// Ties to even.
KVMILL_DEVICE int RoundToInt(float x) { return __float2int_rn(x); }
KVMILL_DEVICE std::uint32_t BitsOf(float x) { return __float_as_uint(x); }
KVMILL_DEVICE float FromBits(std::uint32_t bits) { return __uint_as_float(bits); }

KVMILL_DEVICE float HalfToFloat(std::uint16_t h) { return __half2float(__ushort_as_half(h)); }
KVMILL_DEVICE std::uint16_t FloatToHalf(float x) { return __half_as_ushort(__float2half_rn(x)); }
KVMILL_DEVICE std::uint16_t FloatToBFloat16(float x) {
  return __bfloat16_as_ushort(__float2bfloat16_rn(x));
}

// Two values of 16 bits in a word, the first in the low half.
KVMILL_DEVICE std::uint32_t HalfFma2(std::uint32_t a, std::uint32_t b, std::uint32_t c) {
  std::uint32_t d;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}
KVMILL_DEVICE std::uint32_t HalfSub2(std::uint32_t a, std::uint32_t b) {
  std::uint32_t d;
  asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}
// Bytes of {high, low}: nibble i of `selector` (0..7, counted from the lowest of `low`) is byte i
// of the result.
KVMILL_DEVICE std::uint32_t PermuteBytes(std::uint32_t low, std::uint32_t high,
                                         std::uint32_t selector) {
  return __byte_perm(low, high, selector);
}
// `low` and `high` rounded to fp16.
KVMILL_DEVICE std::uint32_t PackHalf2(float low, float high) {
  std::uint32_t d;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
  return d;
}

// `address` must be a multiple of 16.
KVMILL_DEVICE Vector16 Load16(const void* address) {
  const uint4 v = *static_cast<const uint4*>(address);
  return {{v.x, v.y, v.z, v.w}};
}
KVMILL_DEVICE void Store16(void* address, const Vector16& v) {
  *static_cast<uint4*>(address) = make_uint4(v.word[0], v.word[1], v.word[2], v.word[3]);
}

KVMILL_DEVICE unsigned AtomicAdd(unsigned* address, unsigned value) {
  return atomicAdd(address, value);
}
KVMILL_DEVICE void ThreadFence() { __threadfence(); }
// A word that the host or another device may write meanwhile: what is read later is not older.
KVMILL_DEVICE std::uint64_t LoadFromSystem(const std::uint64_t* address) {
  std::uint64_t value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(address) : "memory");
  return value;
}

// 16 bytes from global to shared memory, both aligned, behind the thread's back: the destination
// must not be touched by anyone until this thread waited for the group, nor by other threads before
// a barrier after that.
KVMILL_DEVICE void CpAsync16(void* shared, const void* global) {
  const auto to = static_cast<unsigned>(__cvta_generic_to_shared(shared));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(global) : "memory");
}
KVMILL_DEVICE void CpAsyncCommit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// All groups but the newest kPending are complete.
template <int kPending>
KVMILL_DEVICE void CpAsyncWait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Four 8x8 matrices of 16-bit values from shared memory: lane 8*m + r gives the address of row r of
// matrix m (16 bytes, aligned); lane l gets elements 2*(l%4) and 2*(l%4)+1 of row l/4 of each
// matrix; transposed, of column l/4.
KVMILL_DEVICE void LdMatrix4(std::uint32_t (&out)[4], const void* row) {
  const auto from = static_cast<unsigned>(__cvta_generic_to_shared(row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
               : "r"(from)
               : "memory");
}
KVMILL_DEVICE void LdMatrix4Transposed(std::uint32_t (&out)[4], const void* row) {
  const auto from = static_cast<unsigned>(__cvta_generic_to_shared(row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
               : "r"(from)
               : "memory");
}

// c += a * b, a 16x16 by rows, b 16x8 by columns, c 16x8. Fragments as in the PTX manual: lane l
// holds, with g = l/4 and t = l%4, of a the pairs of columns (2t, 2t+1) and (2t+8, 2t+9) of rows g
// and g+8 (order: g, g+8, g right, g+8 right), of b the rows (2t, 2t+1) and (2t+8, 2t+9) of column
// g, of c columns 2t, 2t+1 of row g and of row g+8.
KVMILL_DEVICE void MmaHalf(float (&c)[4], const std::uint32_t (&a)[4],
                           const std::uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
      "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
KVMILL_DEVICE void MmaBFloat16(float (&c)[4], const std::uint32_t (&a)[4],
                               const std::uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

#else  // The host form.

void* DynamicShared();
unsigned ThreadIndex();
unsigned BlockIndex();
unsigned BlockThreads();
unsigned GridBlocks();

void SyncThreads(KVMILL_SITE);
bool SyncThreadsOr(bool value, KVMILL_SITE);
void SyncWarp(KVMILL_SITE);

std::uint32_t ShuffleXorBits(unsigned mask, std::uint32_t value, unsigned lane_xor,
                             const char* file, int line);
std::uint32_t ShuffleBits(unsigned mask, std::uint32_t value, unsigned lane, const char* file,
                          int line);
unsigned Ballot(unsigned mask, bool value, KVMILL_SITE);
unsigned ReduceMax(unsigned mask, unsigned value, KVMILL_SITE);
unsigned ReduceMin(unsigned mask, unsigned value, KVMILL_SITE);

KVMILL_DEVICE float Fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
KVMILL_DEVICE float Sqrt(float x) { return __builtin_sqrtf(x); }
KVMILL_DEVICE float Min(float a, float b) { return b < a || a != a ? b : a; }
KVMILL_DEVICE float Max(float a, float b) { return b > a || a != a ? b : a; }
float Exp2(float x);
float Log2(float x);
float Tanh(float x);
int RoundToInt(float x);
KVMILL_DEVICE std::uint32_t BitsOf(float x) { return __builtin_bit_cast(std::uint32_t, x); }
KVMILL_DEVICE float FromBits(std::uint32_t bits) { return __builtin_bit_cast(float, bits); }

template <typename T>
KVMILL_DEVICE T ShuffleXor(unsigned mask, T value, unsigned lane_xor, KVMILL_SITE) {
  static_assert(sizeof(T) == 4, "shuffles move words");
  return __builtin_bit_cast(
      T, ShuffleXorBits(mask, __builtin_bit_cast(std::uint32_t, value), lane_xor, file, line));
}
template <typename T>
KVMILL_DEVICE T Shuffle(unsigned mask, T value, unsigned lane, KVMILL_SITE) {
  static_assert(sizeof(T) == 4, "shuffles move words");
  return __builtin_bit_cast(
      T, ShuffleBits(mask, __builtin_bit_cast(std::uint32_t, value), lane, file, line));
}

float HalfToFloat(std::uint16_t h);
std::uint16_t FloatToHalf(float x);
std::uint16_t FloatToBFloat16(float x);
std::uint32_t HalfFma2(std::uint32_t a, std::uint32_t b, std::uint32_t c);
std::uint32_t HalfSub2(std::uint32_t a, std::uint32_t b);
std::uint32_t PackHalf2(float low, float high);
KVMILL_DEVICE std::uint32_t PermuteBytes(std::uint32_t low, std::uint32_t high,
                                         std::uint32_t selector) {
  const std::uint64_t bytes = low | std::uint64_t{high} << 32;
  std::uint32_t out = 0;
  for (unsigned i = 0; i < 4; ++i) {
    out |= static_cast<std::uint32_t>(bytes >> (selector >> (4 * i) & 7u) * 8 & 0xFFu) << (8 * i);
  }
  return out;
}

Vector16 Load16(const void* address);
void Store16(void* address, const Vector16& v);

unsigned AtomicAdd(unsigned* address, unsigned value);
void ThreadFence();
std::uint64_t LoadFromSystem(const std::uint64_t* address);

void CpAsync16(void* shared, const void* global);
void CpAsyncCommit();
void CpAsyncWaitAllBut(int pending);
template <int kPending>
KVMILL_DEVICE void CpAsyncWait() {
  CpAsyncWaitAllBut(kPending);
}

void LdMatrix4(std::uint32_t (&out)[4], const void* row, KVMILL_SITE);
void LdMatrix4Transposed(std::uint32_t (&out)[4], const void* row, KVMILL_SITE);
void MmaHalf(float (&c)[4], const std::uint32_t (&a)[4], const std::uint32_t (&b)[2], KVMILL_SITE);
void MmaBFloat16(float (&c)[4], const std::uint32_t (&a)[4], const std::uint32_t (&b)[2],
                 KVMILL_SITE);

#endif  // __CUDACC__

// ---- The same in both forms. ----

KVMILL_DEVICE unsigned LaneIndex() { return ThreadIndex() % 32; }
KVMILL_DEVICE unsigned WarpIndex() { return ThreadIndex() / 32; }
KVMILL_DEVICE float BFloat16ToFloat(std::uint16_t h) { return FromBits(std::uint32_t{h} << 16); }

// x / y, correctly rounded, from the correctly rounded inverse = 1 / y: one step of Newton's method
// on the quotient, whose residual a fused multiply-add computes exactly. For normal results.
KVMILL_DEVICE float Divide(float x, float y, float inverse) {
  const float quotient = x * inverse;
  return Fma(Fma(-quotient, y, x), inverse, quotient);
}

}  // namespace device
}  // namespace kvmill

#endif  // KVMILL_KERNELS_CUDA_DEVICE_H_
