#include "storage/room_keeper.h"

#include <algorithm>

namespace kvmill {
namespace {

// Of each tier in turn, so that neither waits long for the other: readers of the GPU wait for what
// is on its thread.
constexpr std::uint64_t kStepBytes = std::uint64_t{8} << 20;
// Leases end without a word.
constexpr std::chrono::seconds kLookEvery{1};

static_assert(std::atomic<Watermarks>::is_always_lock_free);

}  // namespace

RoomKeeper::RoomKeeper(MemoryTiers& tiers, GpuTier* gpu, bool has_disk)
    : tiers_(tiers), gpu_(gpu), has_disk_(has_disk) {
  for (const Tier tier : {Tier::kGpu, Tier::kHost}) {
    if (tier == Tier::kHost || gpu_ != nullptr)
      capacity_bytes_[Index(tier)] = tiers_.pool(tier).stats().capacity_bytes;
    marks_[Index(tier)].store(Watermarks(), std::memory_order_relaxed);
  }
  thread_ = std::thread([this] { Run(); });
  tiers_.SetPressed([this] { Look(); });
}

void RoomKeeper::Set(Tier tier, Watermarks marks) {
  marks_[Index(tier)].store(marks, std::memory_order_relaxed);
  Look();
}

void RoomKeeper::Stop() {
  {
    MutexLock lock(mu_);
    stopping_.store(true, std::memory_order_relaxed);
  }
  wake_.NotifyAll();
  if (thread_.joinable()) thread_.join();
}

std::uint64_t RoomKeeper::BytesAt(Tier tier, std::uint32_t percent) const {
  // No capacity comes near 2^57 bytes, where this would overflow.
  return capacity_bytes_[Index(tier)] * percent / 100;
}

bool RoomKeeper::IsAboveHigh(Tier tier) const {
  const Watermarks marks = marks_[Index(tier)].load(std::memory_order_relaxed);
  return Keeps(tier) && tiers_.pool(tier).used_bytes() > BytesAt(tier, marks.high_percent);
}

void RoomKeeper::Look() {
  if (!IsAboveHigh(Tier::kHost) && !IsAboveHigh(Tier::kGpu)) return;
  if (asked_.load(std::memory_order_relaxed)) return;
  {
    MutexLock lock(mu_);
    asked_.store(true, std::memory_order_relaxed);
  }
  wake_.NotifyOne();
}

bool RoomKeeper::Step(Tier tier) {
  const Watermarks marks = marks_[Index(tier)].load(std::memory_order_relaxed);
  if (marks.high_percent == 100) {  // Switched off on the way.
    begun_[Index(tier)] = false;
    return false;
  }
  const std::uint64_t used = tiers_.pool(tier).used_bytes();
  const std::uint64_t low = BytesAt(tier, marks.low_percent);
  const std::uint64_t bytes = std::min(used - std::min(used, low), kStepBytes);
  if (tier == Tier::kGpu && !has_disk_) {
    // They need free host memory: none is asked about in vain.
    const std::uint64_t host = tiers_.pool(Tier::kHost).used_bytes();
    if (capacity_bytes_[Index(Tier::kHost)] - host < bytes) return false;
  }
  const MemoryTiers::Evicted evicted =
      bytes == 0           ? MemoryTiers::Evicted()
      : tier == Tier::kGpu ? gpu_->Demote(bytes, EvictReason::kWatermark, GpuTier::kOnlyFree)
                           : tiers_.Evict(bytes, EvictReason::kWatermark, /*may_lose=*/false);
  if (evicted.blocks > 0) tiers_.room(tier).MayHaveComeFree();
  begun_[Index(tier)] = tiers_.pool(tier).used_bytes() > low;
  return evicted.blocks > 0;
}

void RoomKeeper::Run() {
  using Time = std::chrono::steady_clock;
  std::array<Time::time_point, kTiers> rest{};  // Until when a tier is left alone.
  while (!stopping()) {
    bool some = false;
    for (const Tier tier : {Tier::kHost, Tier::kGpu}) {
      const std::size_t i = Index(tier);
      if (IsAboveHigh(tier)) begun_[i] = true;
      if (!begun_[i] || stopping() || Time::now() < rest[i]) continue;
      if (Step(tier)) {
        some = true;
      } else if (begun_[i]) {
        rest[i] = Time::now() + kRest;
      }
    }
    if (some) continue;
    // Whoever was asked in vain is not asked again for each block that comes.
    const Time::time_point end = std::max(rest[0], rest[1]);
    MutexLock lock(mu_);
    for (auto now = Time::now(); !stopping() && now < end; now = Time::now()) {
      wake_.WaitFor(mu_, end - now);
    }
    while (!asked_.load(std::memory_order_relaxed) && !stopping()) {
      if (!wake_.WaitFor(mu_, kLookEvery)) break;
    }
    asked_.store(false, std::memory_order_relaxed);
  }
}

}  // namespace kvmill
