#include "storage/rocks_evictor.h"

#include <algorithm>
#include <cstddef>
#include <limits>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "storage/core/log.h"
#include "storage/core/status_macros.h"

namespace kvmill {
namespace {

constexpr std::size_t kEvictedAtOnce = 256;    // Blocks per batch and callback.
constexpr std::uint32_t kRetryAfterMs = 1000;  // After a drop that failed.
constexpr std::uint32_t kNotRead = std::numeric_limits<std::uint32_t>::max();

}  // namespace

RocksEvictor::RocksEvictor(RocksDatabase& database, RocksEpochs& epochs, DiskIdLocks& locks,
                           RocksCounters& counters, Options options)
    : database_(database),
      epochs_(epochs),
      locks_(locks),
      counters_(counters),
      options_(std::move(options)),
      thread_([this] { Run(); }) {}

RocksEvictor::~RocksEvictor() {
  epochs_.Stop();
  thread_.join();
}

void RocksEvictor::Run() {
  bool failed = false;
  while (const auto doomed = epochs_.WaitForDoomed()) {
    const absl::Status status = Drop(*doomed);
    if (status.ok()) {
      failed = false;
      continue;
    }
    if (epochs_.stopped()) return;
    // Once per series of failures: writers wait meanwhile and answer RESOURCE_EXHAUSTED.
    if (!failed)
      LogWarning(absl::StrCat("disk tier: drop of epoch ", doomed->epoch, ": ", status.ToString()));
    failed = true;
    epochs_.Pause(kRetryAfterMs);
  }
}

absl::Status RocksEvictor::Drop(const RocksEpochs::Doomed& doomed) {
  std::vector<Candidate> candidates;
  std::vector<std::string> cold;
  absl::Status evicted;
  KVMILL_RETURN_IF_ERROR(
      ScanMeta(database_, [&](absl::string_view meta_key, absl::StatusOr<DecodedMeta> entry) {
        if (!entry.ok() || entry->meta.epoch != doomed.epoch) return !epochs_.stopped();
        const DiskStore::KeepAdvice advice = options_.advice(entry->meta.id);
        const auto since_read = epochs_.EpochsSinceRead(doomed.epoch, entry->block_number);
        if (advice == DiskStore::KeepAdvice::kKeep ||
            (since_read && advice != DiskStore::KeepAdvice::kDrop)) {
          candidates.push_back({.meta_key = std::string(meta_key),
                                .block_number = entry->block_number,
                                .epochs_since_read = since_read.value_or(kNotRead)});
          return true;
        }
        cold.emplace_back(meta_key);
        if (cold.size() == kEvictedAtOnce) {
          evicted = Evict(doomed.epoch, std::exchange(cold, {}));
          if (!evicted.ok()) return false;
        }
        return !epochs_.stopped();
      }));
  KVMILL_RETURN_IF_ERROR(evicted);
  KVMILL_RETURN_IF_ERROR(Evict(doomed.epoch, std::move(cold)));

  // Most recently read first; among equals the later written, whose neighbours live longer too.
  std::sort(candidates.begin(), candidates.end(), [](const Candidate& a, const Candidate& b) {
    if (a.epochs_since_read != b.epochs_since_read) {
      return a.epochs_since_read < b.epochs_since_read;
    }
    return a.block_number > b.block_number;
  });
  std::vector<std::string> left;
  std::uint64_t reinserted = 0;
  for (const Candidate& candidate : candidates) {
    if (epochs_.stopped()) return absl::UnavailableError("closing");
    KVMILL_ASSIGN_OR_RETURN(const bool kept, Reinsert(doomed, candidate));
    if (kept) {
      ++reinserted;
    } else {
      left.push_back(candidate.meta_key);
    }
  }
  // Before the old pages go the new ones must be durable: they may have been acknowledged.
  if (reinserted > 0) KVMILL_RETURN_IF_ERROR(options_.flush());
  for (std::size_t i = 0; i < left.size(); i += kEvictedAtOnce) {
    const auto end =
        left.begin() + static_cast<std::ptrdiff_t>(std::min(left.size(), i + kEvictedAtOnce));
    KVMILL_RETURN_IF_ERROR(
        Evict(doomed.epoch, {left.begin() + static_cast<std::ptrdiff_t>(i), end}));
  }
  if (epochs_.stopped()) return absl::UnavailableError("closing");
  KVMILL_RETURN_IF_ERROR(database_.DropEpoch(doomed.family));
  epochs_.Dropped(doomed.epoch);
  return absl::OkStatus();
}

absl::Status RocksEvictor::Evict(std::uint64_t epoch, std::vector<std::string> meta_keys) {
  std::vector<std::string> gone;
  std::vector<DiskBlockId> ids;
  {
    const DiskIdLocks::Held held = locks_.Lock(meta_keys);
    for (const std::string& meta_key : meta_keys) {
      const absl::StatusOr<DecodedMeta> entry = FindBlock(database_, meta_key);
      // Removed, or written again to another epoch, since it was scanned.
      if (!entry.ok() || entry->meta.epoch != epoch) continue;
      gone.push_back(meta_key);
      ids.push_back(entry->meta.id);
    }
    KVMILL_RETURN_IF_ERROR(EraseMeta(database_, gone));
    for (std::size_t i = 0; i < gone.size(); ++i) epochs_.Removed(epoch);
  }
  counters_.block_count.fetch_sub(gone.size(), std::memory_order_relaxed);
  counters_.evicted_blocks.fetch_add(gone.size(), std::memory_order_relaxed);
  if (!ids.empty()) options_.evicted(ids);
  return absl::OkStatus();
}

absl::StatusOr<bool> RocksEvictor::Reinsert(const RocksEpochs::Doomed& doomed,
                                            const Candidate& candidate) {
  const DiskIdLocks::Held held = locks_.Lock({candidate.meta_key});
  absl::StatusOr<DecodedMeta> entry = FindBlock(database_, candidate.meta_key);
  if (!entry.ok() || entry->block_number != candidate.block_number) return false;
  DiskBlockMeta& meta = entry->meta;

  absl::StatusOr<RocksEpochs::Place> place = epochs_.Acquire(DiskBytesOf(meta), /*reinsert=*/true);
  if (!place.ok()) return false;
  std::vector<std::vector<std::byte>> bytes;
  std::vector<absl::Span<std::byte>> targets;
  std::vector<absl::Span<const std::byte>> pages;
  bytes.reserve(meta.page_bytes.size());
  for (const std::uint32_t page_bytes : meta.page_bytes) {
    bytes.emplace_back(page_bytes);
    targets.push_back(absl::MakeSpan(bytes.back()));
    pages.push_back(bytes.back());
  }
  absl::Status status = ReadPages(database_, doomed.family, entry->block_number, 0, targets);
  if (!status.ok()) {
    epochs_.Complete(*place, /*written=*/false);
    return false;
  }
  meta.epoch = place->epoch;
  status = PutBlock(database_, place->family, candidate.meta_key, meta, place->block_number, pages);
  epochs_.Complete(*place, status.ok());
  KVMILL_RETURN_IF_ERROR(status);
  epochs_.Removed(doomed.epoch);
  counters_.reinserted_blocks.fetch_add(1, std::memory_order_relaxed);
  return true;
}

}  // namespace kvmill
