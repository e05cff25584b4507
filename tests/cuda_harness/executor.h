// The simulated device: one fiber per CUDA thread, all fibers of a block on one OS thread.
#ifndef KVMILL_TESTS_CUDA_HARNESS_EXECUTOR_H_
#define KVMILL_TESTS_CUDA_HARNESS_EXECUTOR_H_

#include <boost/context/detail/fcontext.hpp>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "kernels/cuda/launch.h"
#include "tests/cuda_harness/harness.h"
#include "tests/cuda_harness/memory.h"

namespace kvmill {
namespace cuda_harness {

enum class AccessKind : std::uint8_t { kRead, kWrite, kAtomic };

// Where a barrier or a warp operation stands in the source.
struct Site {
  const char* file = "its start";
  int line = 0;
};

struct AsyncCopy {
  std::byte* to;
  const std::byte* from;
};

// For each other block of the launch, how many of its barriers (exclusive) are known to lie before.
using Knowledge = std::map<std::uint32_t, std::uint32_t>;

struct Thread {
  enum class State : std::uint8_t { kReady, kAtBarrier, kInWarp, kDone };

  unsigned index = 0;
  State state = State::kReady;
  boost::context::detail::fcontext_t context = nullptr;
  std::uintptr_t stack = 0;  // Its lowest byte.
  Site site;                 // Of the last barrier or warp operation.

  const void* barrier_kind = nullptr;  // Which barrier function it waits in.
  bool barrier_value = false;
  unsigned warp_mask = 0;
  const void* warp_kind = nullptr;
  void* warp_payload = nullptr;

  std::vector<AsyncCopy> open_copies;
  std::deque<std::vector<AsyncCopy>> copy_groups;

  bool fenced = false;
  std::uint32_t fence_barriers = 0;  // Everything of the block before these is released.
  Knowledge acquired;                // By atomics; known after the next fence.
  Knowledge known;                   // To this thread alone, until the next barrier.
};

class Executor {
 public:
  explicit Executor(std::uint32_t seed);
  ~Executor();
  Executor(const Executor&) = delete;
  Executor& operator=(const Executor&) = delete;

  // The one that exists, or null.
  static Executor* Current();

  absl::Status Run(const device::LaunchShape& shape, const void* parameters,
                   std::size_t parameter_bytes, void (*body)(const void*));

  // ---- For the thread that runs, from inside the harness. ----
  Thread& thread() { return *running_; }
  const device::LaunchShape& shape() const { return shape_; }
  unsigned block() const { return block_; }
  std::byte* shared() const { return shared_; }

  // An access of the running thread: ends the launch if it must not be. `aligned`: to its size.
  void Access(std::uintptr_t address, std::size_t bytes, AccessKind kind, bool aligned);
  // Waits for all threads of the block; the disjunction of their values.
  bool Barrier(const void* kind, bool value, Site site);
  // Waits for the lanes of `mask`; the last one runs `execute` over the payloads of all, by lane.
  void Rendezvous(const void* kind, unsigned mask, void* payload,
                  void (*execute)(void* const* payloads, unsigned mask), Site site);
  void CountWarpSync() { ++warp_syncs_[running_->index / 32]; }
  void StartCopy(std::byte* to, const std::byte* from);
  void FinishCopies(std::size_t pending_groups_max);
  void Fence();
  void AtomicOn(const void* address);
  [[noreturn]] void Fail(FaultKind kind, const std::string& what);

  Memory& memory() { return memory_; }
  std::size_t shared_bytes_max() const { return shared_bytes_max_; }
  void set_shared_bytes_max(std::size_t bytes) { shared_bytes_max_ = bytes; }
  const std::vector<Fault>& faults() const { return faults_; }

 private:
  static void Enter(boost::context::detail::transfer_t from);
  void RunBlock(unsigned block);
  void Suspend();  // The running thread; returns when it is resumed.
  void Wake(Thread& thread);
  void ReportStuck();
  void CheckCell(Region& region, std::size_t offset, AccessKind kind, const Stamp& now);
  bool IsBefore(const Stamp& stamp, const Stamp& now) const;
  Stamp Now(AccessKind kind) const;
  std::string Describe(const Stamp& stamp) const;
  std::uint64_t Random();

  Memory memory_;
  std::size_t shared_bytes_max_ = std::size_t{99} << 10;  // At most Memory::kSharedBytesMax.
  std::uint64_t random_;
  std::vector<Fault> faults_;
  std::uintptr_t stacks_ = 0;
  std::uint32_t launch_ = 0;

  // Of the launch.
  device::LaunchShape shape_;
  const void* parameters_ = nullptr;
  std::size_t parameter_bytes_ = 0;
  void (*body_)(const void*) = nullptr;
  std::map<const void*, Knowledge> released_;  // By atomics on this address.

  // Of the block.
  unsigned block_ = 0;
  std::byte* shared_ = nullptr;
  std::vector<Thread> threads_;
  std::vector<Thread*> ready_;
  std::size_t at_barrier_ = 0;
  bool barrier_value_ = false;
  std::uint32_t barriers_ = 0;
  std::vector<std::uint32_t> warp_syncs_;  // By warp.
  std::vector<unsigned> warp_waiting_;     // By warp: lanes that wait in a warp operation.
  Knowledge known_;                        // To every thread of the block.
  bool failed_ = false;
  Thread* running_ = nullptr;
  boost::context::detail::fcontext_t scheduler_ = nullptr;
};

// The thread whose kernel code runs; null while the harness itself runs, so that its own memory
// accesses go unchecked.
extern Thread* kernel_thread;

// For the time that a device function spends in the harness.
class InHarness {
 public:
  InHarness() : thread_(kernel_thread) { kernel_thread = nullptr; }
  ~InHarness() { kernel_thread = thread_; }
  InHarness(const InHarness&) = delete;
  InHarness& operator=(const InHarness&) = delete;

 private:
  Thread* thread_;
};

}  // namespace cuda_harness
}  // namespace kvmill

#endif  // KVMILL_TESTS_CUDA_HARNESS_EXECUTOR_H_
