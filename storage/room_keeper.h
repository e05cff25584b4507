// Makes room in the memory tiers ahead of stores, by their watermarks: a thread of its own, which
// begins above a tier's high mark and goes on to its low one.
//
// It loses nothing: from host memory only what is on disk leaves, and from the GPU what finds free
// host memory or is on disk. What somebody refers to, or waits to be written, stays. So without a
// disk tier host memory has no marks. When nothing may leave it looks again once a second, and when
// a block was written or memory taken, kRest apart at least: each look asks a policy about blocks,
// and those that it asks about in vain count as just used.
//
// Internal to storage/. Thread-safe.
#ifndef KVMILL_STORAGE_ROOM_KEEPER_H_
#define KVMILL_STORAGE_ROOM_KEEPER_H_

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <thread>

#include "storage/core/mutex.h"
#include "storage/core/tier.h"
#include "storage/gpu_tier.h"
#include "storage/memory_tiers.h"
#include "storage/watermarks.h"

namespace kvmill {

class RoomKeeper {
 public:
  static constexpr std::chrono::milliseconds kRest{50};

  // Is told of pressure by `tiers` from now on. `gpu` may be null. Both outlive Stop().
  RoomKeeper(MemoryTiers& tiers, GpuTier* gpu, bool has_disk);
  ~RoomKeeper() { Stop(); }

  // `tier` is kGpu or kHost; `marks` were checked.
  void Set(Tier tier, Watermarks marks);
  void Stop();  // Nothing leaves any more.

 private:
  static constexpr std::size_t kTiers = 2;
  static constexpr std::size_t Index(Tier tier) { return static_cast<std::size_t>(tier); }

  void Look();
  void Run();
  bool stopping() const { return stopping_.load(std::memory_order_relaxed); }
  bool Keeps(Tier tier) const { return tier == Tier::kHost ? has_disk_ : gpu_ != nullptr; }
  std::uint64_t BytesAt(Tier tier, std::uint32_t percent) const;
  bool IsAboveHigh(Tier tier) const;
  // A piece of the way to the low mark, for a tier that is on it. False: nothing may leave now.
  bool Step(Tier tier);

  MemoryTiers& tiers_;
  GpuTier* const gpu_;
  const bool has_disk_;
  std::array<std::uint64_t, kTiers> capacity_bytes_{};
  std::array<std::atomic<Watermarks>, kTiers> marks_{};
  std::array<bool, kTiers> begun_{};  // Of the thread: on the way to the low mark.

  Mutex mu_;
  CondVar wake_;
  std::atomic<bool> asked_{false};  // Set under mu_.
  std::atomic<bool> stopping_{false};
  std::thread thread_;
};

}  // namespace kvmill

#endif  // KVMILL_STORAGE_ROOM_KEEPER_H_
