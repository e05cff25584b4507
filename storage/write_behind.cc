#include "storage/write_behind.h"

#include <numeric>
#include <utility>

#include "absl/strings/str_cat.h"
#include "storage/core/log.h"
#include "storage/core/status_macros.h"

namespace kvmill {
namespace {

constexpr std::size_t kFailuresRememberedMax = 65536;
constexpr int kDurableRoundsMax = 8;
constexpr std::int64_t kWarningEveryNanos = 10'000'000'000;

}  // namespace

WriteBehind::WriteBehind(DiskStore& disk, PagePool& pool, BlockIndex& index, MemoryTiers& tiers,
                         GpuTier* gpu, NamespaceTable& namespaces, const Clock& clock,
                         StoreCounters& counters)
    : disk_(disk),
      pool_(pool),
      index_(index),
      tiers_(tiers),
      gpu_(gpu),
      namespaces_(namespaces),
      clock_(clock),
      counters_(counters),
      thread_([this] { Run(); }) {}

WriteBehind::~WriteBehind() {
  {
    MutexLock lock(mu_);
    stopping_ = true;
  }
  work_.NotifyAll();
  thread_.join();
  absl::Status flushed = disk_.Flush();
  if (!flushed.ok())
    LogError(absl::StrCat("the last flush of the disk tier failed: ", flushed.message()));
}

void WriteBehind::Enqueue(const BlockId& id, const BlockKey& parent, const RunLink& link) {
  {
    MutexLock lock(mu_);
    queue_.push_back({id, parent, link, clock_.MonotonicNanos()});
    ++pending_[id].jobs;
    ++jobs_enqueued_;
    failed_.erase(id);
  }
  work_.NotifyOne();
}

std::uint64_t WriteBehind::pending() const {
  MutexLock lock(mu_);
  return pending_.size();
}

void WriteBehind::WaitWritten() {
  MutexLock lock(mu_);
  const std::uint64_t enqueued = jobs_enqueued_;
  while (jobs_ended_ < enqueued) written_.Wait(mu_);  // Jobs run in the order of the queue.
}

WriteBehind::Removal::Removal(WriteBehind* writer, absl::Span<const BlockId> ids)
    : writer_(writer), ids_(ids) {
  if (writer_ == nullptr) return;
  MutexLock lock(writer_->mu_);
  for (const BlockId& id : ids_) ++writer_->removing_[id];
}

WriteBehind::Removal::~Removal() {
  if (writer_ == nullptr) return;
  {
    MutexLock lock(writer_->mu_);
    for (const BlockId& id : ids_) {
      const auto it = writer_->removing_.find(id);
      if (--it->second == 0) writer_->removing_.erase(it);
    }
  }
  writer_->removed_.NotifyAll();
}

DiskBlockId WriteBehind::DiskIdOf(const BlockId& id) const {
  return DiskBlockId{namespaces_.Find(id.namespace_id)->fingerprint, id.group, id.key};
}

void WriteBehind::Run() {
  for (;;) {
    Job job;
    {
      MutexLock lock(mu_);
      while (queue_.empty() && !stopping_) work_.Wait(mu_);
      if (queue_.empty()) return;
      job = queue_.front();
      queue_.pop_front();
      while (removing_.contains(job.id)) removed_.Wait(mu_);
    }
    Write(job);
    {
      MutexLock lock(mu_);
      auto it = pending_.find(job.id);
      if (--it->second.jobs == 0) pending_.erase(it);
      ++jobs_ended_;
    }
    written_.NotifyAll();
    tiers_.RoomMayHaveComeFree();
    tiers_.Pressed();
  }
}

absl::Status WriteBehind::WriteToDisk(const DiskBlockMeta& meta,
                                      absl::Span<const absl::Span<const std::byte>> pages) {
  absl::Status written = disk_.Write(meta, pages);
  if (!absl::IsAlreadyExists(written)) return written;
  KVMILL_RETURN_IF_ERROR(disk_.Remove({meta.id}));
  return disk_.Write(meta, pages);
}

absl::Status WriteBehind::WritePages(const DiskBlockMeta& meta, const BlockId& id, Tier tier,
                                     absl::Span<const SlotRef> slots) {
  std::vector<SlotRef> copies;
  if (tier == Tier::kGpu) {
    // Without waiting for room: what would make some is this thread.
    KVMILL_RETURN_IF_ERROR(gpu_->ReadToHost(*namespaces_.Find(id.namespace_id), id,
                                            meta.token_count, slots, meta.page_bytes,
                                            absl::ZeroDuration(), &copies));
    slots = copies;
  }
  std::vector<absl::Span<const std::byte>> pages;
  for (std::size_t i = 0; i < slots.size(); ++i) {
    pages.push_back(pool_.Bytes(slots[i]).first(meta.page_bytes[i]));
  }
  absl::Status written = WriteToDisk(meta, pages);
  for (SlotRef slot : copies) pool_.Release(slot);
  return written;
}

void WriteBehind::Write(const Job& job) {
  EntryId entry = kNoEntry;
  Tier tier = Tier::kHost;
  DiskBlockMeta meta;
  RunLink link;
  std::vector<SlotRef> slots;
  index_.Find(job.id, [&](EntryId found, BlockEntry& e) {
    if (!InMemory(e.flags) || (e.flags & kOnDisk) != 0) return;
    entry = found;
    tier = TierOf(e.flags);
    ++e.references;
    link = index_.LinkOf(found);
    meta.token_count = e.token_count;
    for (const PagePlace& place : e.pages()) {
      meta.page_bytes.push_back(place.page_bytes);
      slots.push_back(place.slot);
    }
  });
  if (entry == kNoEntry) return;  // Removed, or written before.

  meta.id = DiskIdOf(job.id);
  meta.parent = job.parent;
  // The job may be of a block of that name that was removed, and this one have come otherwise.
  const bool index_knows = link.kind != RunLink::Kind::kNone &&
                           (link.kind != RunLink::Kind::kParent || !job.parent.empty());
  meta.link = index_knows ? link : job.link;
  const std::int64_t start_nanos = clock_.MonotonicNanos();
  counters_.ObserveStage(Stage::kStoreQueue,
                         static_cast<double>(start_nanos - job.enqueued_nanos) * 1e-9);
  absl::Status written = WritePages(meta, job.id, tier, slots);
  const std::int64_t end_nanos = clock_.MonotonicNanos();
  counters_.ObserveStage(Stage::kStoreDisk, static_cast<double>(end_nanos - start_nanos) * 1e-9);

  if (!written.ok()) {
    counters_.disk_write_failures.Add();
    {
      MutexLock lock(mu_);
      if (failed_.size() < kFailuresRememberedMax) failed_[job.id] = written;
    }
    if (last_warning_nanos_ == 0 || end_nanos - last_warning_nanos_ > kWarningEveryNanos) {
      last_warning_nanos_ = end_nanos;
      LogWarning(absl::StrCat("a block could not be written to disk and stays in memory only: ",
                              written.message()));
    }
  }
  bool removed = false;
  index_.With(entry, [&](BlockEntry& e) {
    removed = (e.flags & kDetached) != 0;
    e.flags = static_cast<std::uint8_t>(e.flags & ~kUnwritten);
    if (written.ok() && !removed) tiers_.Written(e);
  });
  if (written.ok() && !removed) counters_.tier_blocks[static_cast<std::size_t>(Tier::kDisk)].Add();
  if (written.ok() && removed) {
    // Removed while it was written: the removal looked at the disk too early.
    disk_.Remove({meta.id})
        .IgnoreError();  // A failing disk loses the block anyway or serves valid bytes again.
  }
  tiers_.Release(entry);
  // Written or not: a block that cannot be written is in memory only, wherever it is.
  if (gpu_ != nullptr && tier == Tier::kHost && !removed) gpu_->Enqueue(job.id, job.parent);
}

void WriteBehind::RequeueUnwritten(absl::Span<const BlockId> ids) {
  for (const BlockId& id : ids) {
    {
      MutexLock lock(mu_);
      if (pending_.contains(id)) continue;
    }
    bool requeue = false;
    RunLink link;
    index_.Find(id, [&](EntryId entry, BlockEntry& e) {
      requeue = InMemory(e.flags) && (e.flags & (kOnDisk | kUnwritten)) == 0;
      link = index_.LinkOf(entry);
      if (requeue) e.flags |= kUnwritten;
    });
    // The parent of a block that failed before is not known any more; it is a hint for the order of
    // eviction, and a restart will not find the block's run.
    if (requeue) Enqueue(id, BlockKey{}, link);
  }
}

absl::Status WriteBehind::MakeDurable(absl::Span<const BlockId> ids,
                                      absl::Span<absl::Status> results) {
  std::vector<std::size_t> open(ids.size());
  std::iota(open.begin(), open.end(), std::size_t{0});
  // While others are waited for, a block may leave the disk, or be removed and stored anew: then it
  // has to be written again. Not for ever: who does that does not want it durable.
  // At least once, even for no blocks: what is written already has to be flushed, too.
  int round = 0;
  absl::Status flushed;
  do {
    std::vector<BlockId> now;
    now.reserve(open.size());
    for (const std::size_t i : open) now.push_back(ids[i]);
    RequeueUnwritten(now);
    {
      MutexLock lock(mu_);
      for (const BlockId& id : now) {
        while (pending_.contains(id)) written_.Wait(mu_);
      }
    }
    flushed = disk_.Flush();
    std::vector<std::size_t> again;
    for (const std::size_t i : open) {
      std::uint8_t flags = 0;
      if (!index_.Find(ids[i], [&](EntryId, BlockEntry& e) { flags = e.flags; })) {
        results[i] = absl::NotFoundError("the block is not in the store any more");
      } else if (!flushed.ok()) {
        results[i] = flushed;
      } else if ((flags & kOnDisk) != 0) {
        results[i] = absl::OkStatus();
      } else {
        MutexLock lock(mu_);
        const auto it = failed_.find(ids[i]);
        if (it != failed_.end()) {
          results[i] = it->second;
          continue;
        }
        results[i] = absl::UnavailableError("the block leaves the disk tier again and again");
        again.push_back(i);
      }
    }
    open = std::move(again);
  } while (++round < kDurableRoundsMax && !open.empty());
  return flushed;
}

}  // namespace kvmill
