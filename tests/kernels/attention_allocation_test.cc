// Attention never allocates: every use of the heap in this program is counted.
#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <new>

#include "kernels/simd.h"
#include "tests/kernels/attention_problem.h"

namespace {
std::atomic<std::size_t> allocations{0};
}  // namespace

void* operator new(std::size_t bytes) {
  ++allocations;
  void* p = std::malloc(bytes == 0 ? 1 : bytes);
  if (p == nullptr) throw std::bad_alloc();
  return p;
}
void operator delete(void* p) noexcept { std::free(p); }
void operator delete(void* p, std::size_t) noexcept { std::free(p); }

namespace kvmill {
namespace {

TEST(AttentionAllocationTest, NoMethodTouchesTheHeap) {
  ProblemSpec spec;
  spec.format = {4, 2, 64, 64};
  spec.kv_heads = 2;
  spec.sharing = 4;
  spec.raw_fraction = 0.2;
  spec.sequences = {{1000, 1}, {70, 3}};
  AttentionProblem problem(spec);
  for (const std::string_view simd : CpuSimdNames()) {
    if (simd == "SCALAR") continue;  // The reference, which may.
    ForceCpuSimd(simd);
    for (const std::string_view method : CpuAttentionNames()) {
      ASSERT_TRUE(ForceCpuAttention(method));
      for (const std::uint32_t workers : {1u, 3u}) {
        SCOPED_TRACE(testing::Message() << simd << " " << method << ", " << workers);
        RunAttention(problem, [&](const AttentionArgs& args) {
          Scratch scratch(AttentionScratchBytes(args, workers));
          const absl::Span<std::byte> span = scratch.span();
          const std::size_t before = allocations;
          AttentionCpu(args, {workers, nullptr, nullptr}, span);
          EXPECT_EQ(allocations, before);
        });
      }
    }
  }
  EXPECT_GT(allocations, 0u);  // They are counted.
  ForceCpuSimd("");
  ForceCpuAttention("");
}

}  // namespace
}  // namespace kvmill
