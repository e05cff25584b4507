// Runs CUDA kernels (kernels/cuda/*.cu, compiled with g++) on the CPU and finds what a GPU would
// leave unseen.
//
//   Harness harness(seed);
//   DeviceBuffer<float> x = harness.Allocate<float>(n, "x");
//   absl::Status done = SomethingCuda(x.data(), ..., /*stream=*/nullptr);
//
// A launch runs block after block in seeded order; all threads of a block are fibers on the calling
// thread, resumed in seeded order whenever they wait. The first fault ends the launch: its status
// is INTERNAL and faults() has it. What is found:
// - accesses outside the allocations of Allocate and outside the shared memory of the block, and
//   accesses that are not aligned to their size;
// - races: two accesses to a byte, one of them a write, neither ordered by a barrier of the block,
// a
//   SyncWarp, or fences around atomics on the same word;
// - barriers that not all threads of the block reach, or reach at different places;
// - warp operations whose lanes do not all arrive, or disagree in mask or place;
// - shared memory read before it was written, or while an asynchronous copy to it is pending.
// Ordering by a SyncWarp is per warp. Blocks order by atomics only in the pattern: write, barrier,
// then one thread fences and adds atomically; the block that sees the last arrival fences, has a
// barrier, and reads.
//
// One Harness at a time; not thread-safe.
#ifndef KVMILL_TESTS_CUDA_HARNESS_HARNESS_H_
#define KVMILL_TESTS_CUDA_HARNESS_HARNESS_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"

namespace kvmill {
namespace cuda_harness {

class Executor;

enum class FaultKind : std::uint8_t {
  kRace,
  kDivergentBarrier,
  kWarpMask,
  kSharedOutOfBounds,
  kGlobalOutOfBounds,
  kMisaligned,
  kSharedUninitialized,
  kAsyncCopyPending,
  kBadLaunch,
};
std::string ToString(FaultKind kind);

struct Fault {
  FaultKind kind;
  std::string what;  // Address, thread, block, and the last barrier or warp operation before it.
};

// Memory that kernels may touch. Aligned to 256 bytes, as cudaMalloc gives it, with red zones on
// both sides. Ends with the Harness that made it, not with this view.
template <typename T>
class DeviceBuffer {
 public:
  DeviceBuffer() = default;
  DeviceBuffer(T* data, std::size_t size) : data_(data), size_(size) {}
  T* data() const { return data_; }
  std::size_t size() const { return size_; }
  T& operator[](std::size_t i) const { return data_[i]; }
  T* begin() const { return data_; }
  T* end() const { return data_ + size_; }

 private:
  T* data_ = nullptr;
  std::size_t size_ = 0;
};

class Harness {
 public:
  explicit Harness(std::uint32_t seed = 1);
  ~Harness();
  Harness(const Harness&) = delete;
  Harness& operator=(const Harness&) = delete;

  // Zeroed. `name` is for reports.
  template <typename T>
  DeviceBuffer<T> Allocate(std::size_t count, const std::string& name) {
    return {static_cast<T*>(AllocateBytes(count * sizeof(T), name)), count};
  }
  template <typename T>
  DeviceBuffer<T> Copy(absl::Span<const T> values, const std::string& name) {
    DeviceBuffer<T> buffer = Allocate<T>(values.size(), name);
    for (std::size_t i = 0; i < values.size(); ++i) buffer[i] = values[i];
    return buffer;
  }
  void* AllocateBytes(std::size_t bytes, const std::string& name);

  // Shared memory that a block may have: from now on, instead of the 99 KiB of sm_86 and sm_89. A
  // launch that wants more is a fault. False, and nothing changes, on a real device.
  bool LimitSharedBytes(std::size_t bytes_max);

  // Waits for what was launched: before the host looks at results. A launch under the simulation is
  // over when it returns; the same tests on a device (device_memory.cc) have to wait.
  absl::Status Finish();

  const std::vector<Fault>& faults() const;

 private:
  std::unique_ptr<Executor> executor_;
};

}  // namespace cuda_harness
}  // namespace kvmill

#endif  // KVMILL_TESTS_CUDA_HARNESS_HARNESS_H_
