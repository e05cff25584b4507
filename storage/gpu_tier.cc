#include "storage/gpu_tier.h"

#include <algorithm>
#include <cstring>
#include <new>

#include "absl/strings/str_cat.h"
#include "storage/core/log.h"
#include "storage/core/status_macros.h"
#include "storage/disk_loader.h"
#include "storage/page_copies.h"

namespace kvmill {
namespace {

constexpr std::size_t kPromotionsMax = 4096;
// One for the thread that moves, the others for readers.
constexpr std::size_t kStreams = 5;
constexpr std::size_t kStagingBytes = std::size_t{2} << 20;
constexpr std::int64_t kWarningEveryNanos = 10'000'000'000;

std::vector<SlotRef> SlotsOf(absl::Span<const PagePlace> places) {
  std::vector<SlotRef> slots;
  for (const PagePlace& place : places) slots.push_back(place.slot);
  return slots;
}

std::vector<std::uint32_t> PageBytesOf(absl::Span<const PagePlace> places) {
  std::vector<std::uint32_t> bytes;
  for (const PagePlace& place : places) bytes.push_back(place.page_bytes);
  return bytes;
}

// The block's places with other slots.
std::vector<PagePlace> PlacesAt(absl::Span<const PagePlace> places,
                                absl::Span<const SlotRef> slots) {
  std::vector<PagePlace> moved(places.begin(), places.end());
  for (std::size_t i = 0; i < moved.size(); ++i) moved[i].slot = slots[i];
  return moved;
}

}  // namespace

void GpuTier::AlignedFree::operator()(std::byte* memory) const {
  ::operator delete (memory, std::align_val_t{4096});
}

absl::StatusOr<std::unique_ptr<GpuTier>> GpuTier::Create(Device& device, MemoryTiers& tiers,
                                                         NamespaceTable& namespaces,
                                                         const Clock& clock,
                                                         StoreCounters& counters) {
  KVMILL_ASSIGN_OR_RETURN(std::unique_ptr<DeviceCopier> copier,
                          DeviceCopier::Create(device, kStreams));
  std::unique_ptr<std::byte, AlignedFree> staging(
      static_cast<std::byte*>(::operator new (kStagingBytes, std::align_val_t{4096})));
  KVMILL_RETURN_IF_ERROR(device.Pin(absl::MakeSpan(staging.get(), kStagingBytes)));
  std::unique_ptr<GpuTier> tier(new GpuTier(device, tiers, namespaces, clock, counters));
  tier->copier_ = std::move(copier);
  tier->staging_ = std::move(staging);
  tier->thread_ = std::thread([gpu = tier.get()] { gpu->Run(); });
  return tier;
}

GpuTier::GpuTier(Device& device, MemoryTiers& tiers, NamespaceTable& namespaces, const Clock& clock,
                 StoreCounters& counters)
    : device_(device), tiers_(tiers), namespaces_(namespaces), clock_(clock), counters_(counters) {}

GpuTier::~GpuTier() {
  {
    MutexLock lock(mu_);
    stopping_ = true;
    promotions_.clear();
  }
  work_.NotifyAll();
  thread_.join();
  device_.Unpin(absl::MakeSpan(staging_.get(), kStagingBytes));
}

void GpuTier::Enqueue(const BlockId& id, const BlockKey& parent) {
  {
    MutexLock lock(mu_);
    if (promotions_.size() >= kPromotionsMax) {
      counters_.skipped_promotions.Add();
      return;
    }
    promotions_.push_back({id, parent});
  }
  work_.NotifyOne();
}

std::uint64_t GpuTier::pending() const {
  MutexLock lock(mu_);
  return promotions_.size() + (promoting_ ? 1 : 0);
}

void GpuTier::OnThread(absl::FunctionRef<void()> work) {
  Task task{work};
  MutexLock lock(mu_);
  tasks_.push_back(&task);
  work_.NotifyOne();
  while (!task.done) ended_.Wait(mu_);
}

void GpuTier::Run() {
  for (;;) {
    Task* task = nullptr;
    Promotion promotion;
    {
      MutexLock lock(mu_);
      promoting_ = false;
      while (tasks_.empty() && promotions_.empty() && !stopping_) work_.Wait(mu_);
      if (!tasks_.empty()) {  // Someone waits.
        task = tasks_.front();
        tasks_.pop_front();
      } else if (!promotions_.empty()) {
        promotion = promotions_.front();
        promotions_.pop_front();
        promoting_ = true;
      } else {
        return;
      }
    }
    if (task == nullptr) {
      Promote(promotion);
      continue;
    }
    task->work();
    {
      MutexLock lock(mu_);
      task->done = true;
    }
    ended_.NotifyAll();
  }
}

void GpuTier::ReleaseAll(Tier tier, absl::Span<const SlotRef> slots) {
  for (SlotRef slot : slots) tiers_.pool(tier).Release(slot);
  tiers_.room(tier).MayHaveComeFree();
}

void GpuTier::Promote(const Promotion& promotion) {
  MemoryTiers::MovingBlock block;
  if (!tiers_.TakeFromHost(promotion.id, /*only_if_free=*/true, &block)) {
    counters_.skipped_promotions.Add();
    return;
  }
  std::vector<SlotRef> slots;
  const absl::Status copied = CopyToGpu(block, /*may_lose=*/false, &slots);
  const bool moved =
      copied.ok() && tiers_.Move(block, Tier::kGpu, promotion.parent, PlacesAt(block.places, slots),
                                 EvictReason::kCapacity);
  if (!moved) {
    if (copied.ok()) ReleaseAll(Tier::kGpu, slots);
    counters_.skipped_promotions.Add();
  }
  tiers_.Release(block.entry);
  tiers_.Pressed();
}

absl::Status GpuTier::Hold(const BlockId& id, Held* held) {
  // Now: while it waits for the thread it must not leave.
  MemoryTiers::MovingBlock block;
  if (!tiers_.TakeFromHost(id, /*only_if_free=*/false, &block)) {
    return absl::NotFoundError("not in host memory");
  }
  held->token_count = block.token_count;
  held->page_bytes = PageBytesOf(block.places);
  absl::Status copied;
  OnThread([&] {
    copied = CopyToGpu(block, /*may_lose=*/true, &held->slots);
    if (copied.ok() && tiers_.Move(block, Tier::kGpu, BlockKey{},
                                   PlacesAt(block.places, held->slots), EvictReason::kCapacity)) {
      held->entry = block.entry;  // With our reference.
    }
  });
  if (held->entry == kNoEntry) {
    tiers_.Release(block.entry);
  } else {
    tiers_.RoomMayHaveComeFree();
  }
  return copied;
}

absl::Status GpuTier::CopyToGpu(const MemoryTiers::MovingBlock& block, bool may_lose,
                                std::vector<SlotRef>* slots) {
  const OpenedNamespace& space = *namespaces_.Find(block.id.namespace_id);
  const std::vector<std::uint32_t> page_bytes = PageBytesOf(block.places);
  KVMILL_RETURN_IF_ERROR(AcquireOnGpu(space.tenant_id, page_bytes, may_lose, slots));
  std::vector<DeviceCopier::Copy> copies;
  AppendPageCopies(tiers_.pool(Tier::kHost), SlotsOf(block.places), tiers_.pool(Tier::kGpu), *slots,
                   page_bytes, &copies);
  absl::Status copied = copier_->Run(copies);
  if (copied.ok()) copied = Compare(copies);
  if (copied.ok()) {
    for (SlotRef slot : *slots) tiers_.pool(Tier::kGpu).Publish(slot);
    return absl::OkStatus();
  }
  ReleaseAll(Tier::kGpu, *slots);
  slots->clear();
  if (absl::IsDataLoss(copied)) counters_.checksum_failures[static_cast<int>(Tier::kGpu)].Add();
  const std::int64_t now_nanos = clock_.MonotonicNanos();
  if (last_warning_nanos_ == 0 || now_nanos - last_warning_nanos_ > kWarningEveryNanos) {
    last_warning_nanos_ = now_nanos;
    LogWarning(absl::StrCat("gpu tier: a block could not be copied to device ", device_.info().name,
                            " and stays in host memory: ", copied.message()));
  }
  return copied;
}

absl::Status GpuTier::AcquireOnGpu(TenantId tenant, absl::Span<const std::uint32_t> page_bytes,
                                   bool may_lose, std::vector<SlotRef>* slots) {
  PagePool& pool = tiers_.pool(Tier::kGpu);
  for (std::size_t begin = 0; begin < page_bytes.size();) {
    std::size_t end = begin + 1;
    while (end < page_bytes.size() && page_bytes[end] == page_bytes[begin]) ++end;
    absl::Status acquired = pool.Acquire(tenant, page_bytes[begin], end - begin, slots);
    if (absl::IsResourceExhausted(acquired) &&
        DemoteOne(tenant, may_lose, EvictReason::kCapacity) > 0) {
      continue;
    }
    if (!acquired.ok()) {
      ReleaseAll(Tier::kGpu, *slots);
      slots->clear();
      if (!absl::IsResourceExhausted(acquired)) return acquired;
      const PagePool::Stats stats = pool.stats();
      return absl::ResourceExhaustedError(
          absl::StrCat("gpu tier is full: ", page_bytes[begin] * (end - begin), " bytes wanted, ",
                       stats.used_bytes, " of ", stats.capacity_bytes,
                       " in use and none of it can leave now; retry in 1s or raise --gpu-bytes"));
    }
    begin = end;
  }
  return absl::OkStatus();
}

absl::Status GpuTier::Compare(absl::Span<const DeviceCopier::Copy> copies) {
  for (const DeviceCopier::Copy& copy : copies) {
    for (std::size_t offset = 0; offset < copy.bytes; offset += kStagingBytes) {
      const std::size_t bytes = std::min(kStagingBytes, copy.bytes - offset);
      KVMILL_RETURN_IF_ERROR(copier_->Run({{staging_.get(), copy.to + offset, bytes}}));
      if (std::memcmp(staging_.get(), copy.from + offset, bytes) != 0) {
        return absl::DataLossError("the copy that came back differs");
      }
    }
  }
  return absl::OkStatus();
}

absl::Status GpuTier::Read(const OpenedNamespace& space, const BlockId& id,
                           std::uint32_t token_count, absl::Span<const SlotRef> from,
                           absl::Span<const absl::Span<std::byte>> to) {
  std::vector<DeviceCopier::Copy> copies;
  for (std::size_t i = 0; i < to.size(); ++i) {
    copies.push_back({to[i].data(), tiers_.pool(Tier::kGpu).Bytes(from[i]).data(), to[i].size()});
  }
  KVMILL_RETURN_IF_ERROR(copier_->Run(copies));
  for (std::size_t i = 0; i < to.size(); ++i) {
    KVMILL_RETURN_IF_ERROR(VerifyPage(IdentityOfPage(space, id, i, token_count), to[i]));
  }
  return absl::OkStatus();
}

absl::Status GpuTier::ReadToHost(const OpenedNamespace& space, const BlockId& id,
                                 std::uint32_t token_count, absl::Span<const SlotRef> from,
                                 absl::Span<const std::uint32_t> page_bytes,
                                 absl::Duration room_wait, std::vector<SlotRef>* slots) {
  PagePool& host = tiers_.pool(Tier::kHost);
  KVMILL_RETURN_IF_ERROR(room_wait == kOnlyFree
                             ? tiers_.AcquireFree(space.tenant_id, page_bytes, slots)
                             : tiers_.AcquirePages(space.tenant_id, page_bytes, room_wait, slots));
  const std::int64_t start_nanos = clock_.MonotonicNanos();
  std::vector<DeviceCopier::Copy> copies;
  AppendPageCopies(tiers_.pool(Tier::kGpu), from, host, *slots, page_bytes, &copies);
  absl::Status read = copier_->Run(copies);
  for (std::size_t i = 0; i < slots->size() && read.ok(); ++i) {
    read = VerifyPage(IdentityOfPage(space, id, i, token_count),
                      host.Bytes((*slots)[i]).first(page_bytes[i]));
  }
  if (!read.ok()) {
    ReleaseAll(Tier::kHost, *slots);
    slots->clear();
    return read;
  }
  for (SlotRef slot : *slots) host.Publish(slot);
  counters_.ObserveStage(Stage::kFetchTransfer,
                         static_cast<double>(clock_.MonotonicNanos() - start_nanos) * 1e-9);
  return absl::OkStatus();
}

std::uint64_t GpuTier::DemoteOne(std::optional<TenantId> for_tenant, bool may_lose,
                                 EvictReason reason, absl::Duration host_wait) {
  // A victim that someone began to use meanwhile, or that must not be lost, stays; the next one is
  // asked for. Where host memory was not free for one and nothing is to leave it for that, only
  // blocks on disk are: who is taken and put back is taken for used.
  bool on_disk_only = false;
  for (int attempt = 0; attempt < EvictionPolicy::kAsksMax; ++attempt) {
    MemoryTiers::MovingBlock block;
    if (!tiers_.TakeGpuVictim(for_tenant, &block, on_disk_only)) return 0;
    const std::vector<std::uint32_t> page_bytes = PageBytesOf(block.places);
    std::vector<SlotRef> slots;
    const absl::Status read =
        ReadToHost(*namespaces_.Find(block.id.namespace_id), block.id, block.token_count,
                   SlotsOf(block.places), page_bytes, host_wait, &slots);
    bool left = false;
    if (read.ok()) {
      left = tiers_.Move(block, Tier::kHost, BlockKey{}, PlacesAt(block.places, slots), reason);
      if (!left) ReleaseAll(Tier::kHost, slots);
    } else if (absl::IsResourceExhausted(read)) {
      left = tiers_.Leave(block, may_lose, reason);
      on_disk_only = host_wait == kOnlyFree;
    } else {
      left = tiers_.Leave(block, /*may_lose=*/true, EvictReason::kCorrupt);
      if (left) {
        counters_.checksum_failures[static_cast<int>(Tier::kGpu)].Add();
        LogError(absl::StrCat("gpu tier: block ", block.id.key.ToHex(),
                              " could not be read back and was dropped: ", read.message()));
      }
    }
    if (!left) tiers_.PutBack(block);
    tiers_.Release(block.entry);
    if (left) {
      std::uint64_t bytes = 0;
      for (std::uint32_t page : page_bytes) bytes += page;
      return bytes;
    }
  }
  return 0;
}

MemoryTiers::Evicted GpuTier::Demote(std::uint64_t bytes, EvictReason reason,
                                     absl::Duration host_wait) {
  MemoryTiers::Evicted evicted;
  OnThread([&] {
    while (evicted.bytes < bytes) {
      const std::uint64_t freed = DemoteOne({}, /*may_lose=*/false, reason, host_wait);
      if (freed == 0) return;
      ++evicted.blocks;
      evicted.bytes += freed;
    }
  });
  return evicted;
}

}  // namespace kvmill
