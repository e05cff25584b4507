#include "storage/rocks_disk_store.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "rocksdb/iterator.h"
#include "rocksdb/write_batch.h"
#include "storage/core/check.h"
#include "storage/core/log.h"
#include "storage/core/mutex.h"
#include "storage/core/status_macros.h"
#include "storage/disk_directory.h"
#include "storage/disk_id_locks.h"
#include "storage/disk_keys.h"
#include "storage/part_workers.h"
#include "storage/rocks_blocks.h"
#include "storage/rocks_database.h"
#include "storage/rocks_epochs.h"
#include "storage/rocks_evictor.h"

namespace kvmill {
namespace {

constexpr std::uint64_t kKiB = 1024;
constexpr std::uint64_t kMiB = 1024 * kKiB;
constexpr std::int64_t kTryAgainEveryMs = 2000;
// Large enough for a disk's full rate, small enough that four of them overlap in a block of 4 MB.
constexpr std::size_t kReadPartBytes = kMiB;
constexpr std::size_t kReadWorkers = 2;
// RocksDB's logs, manifest and options files.
constexpr std::uint64_t kFixedFileBytes = kMiB;

absl::Status CheckOptions(const RocksDiskStoreOptions& options) {
  const auto outside = [](absl::string_view name, auto value, auto low, auto high) {
    return absl::InvalidArgumentError(
        absl::StrCat("disk tier: ", name, " is ", value, ", want ", low, " to ", high));
  };
  if (options.directory.empty()) {
    return absl::InvalidArgumentError("disk tier: directory is empty");
  }
  if (options.capacity_bytes < kDiskCapacityBytesMin) {
    return absl::InvalidArgumentError(absl::StrCat("disk tier: capacity_bytes is ",
                                                   options.capacity_bytes, ", want at least ",
                                                   kDiskCapacityBytesMin));
  }
  if (options.epoch_count < 4 || options.epoch_count > 64) {
    return outside("epoch_count", options.epoch_count, 4, 64);
  }
  if (!(options.reinsert_share >= 0 && options.reinsert_share <= 0.9)) {
    return outside("reinsert_share", options.reinsert_share, 0, 0.9);
  }
  if (options.memtable_bytes != 0 && options.memtable_bytes < 64 * kKiB) {
    return absl::InvalidArgumentError(absl::StrCat("disk tier: memtable_bytes is ",
                                                   options.memtable_bytes, ", want 0 or at least ",
                                                   64 * kKiB));
  }
  return absl::OkStatus();
}

// Small ones stay in the processor's cache and are quickly reused; large caps get larger ones so
// that an epoch is not more than some 256 files.
std::uint64_t DefaultMemtableBytes(std::uint64_t epoch_bytes) {
  const std::uint64_t wanted = std::clamp(epoch_bytes / 256, 32 * kMiB, 64 * kMiB);
  return std::max(std::min(wanted, epoch_bytes / 8), 256 * kKiB);
}

// Lets concurrent calls share one run of `flush`: a call is served by the first run that starts
// after it.
class SharedFlush {
 public:
  explicit SharedFlush(std::function<absl::Status()> flush) : flush_(std::move(flush)) {}

  absl::Status Run() {
    std::uint64_t covered = 0;
    {
      MutexLock lock(mutex_);
      const std::uint64_t ticket = ++requested_;
      while (running_) {
        finished_.Wait(mutex_);
        if (last_covered_ >= ticket) return last_status_;
      }
      running_ = true;
      covered = requested_;
    }
    absl::Status status = flush_();
    MutexLock lock(mutex_);
    running_ = false;
    last_covered_ = covered;
    last_status_ = status;
    finished_.NotifyAll();
    return status;
  }

 private:
  const std::function<absl::Status()> flush_;
  Mutex mutex_;
  CondVar finished_;
  std::uint64_t requested_ ABSL_GUARDED_BY(mutex_) = 0;
  bool running_ ABSL_GUARDED_BY(mutex_) = false;
  std::uint64_t last_covered_ ABSL_GUARDED_BY(mutex_) = 0;
  absl::Status last_status_ ABSL_GUARDED_BY(mutex_);
};

class RocksDiskStoreImpl : public RocksDiskStore {
 public:
  RocksDiskStoreImpl(const RocksDiskStoreOptions& options, DiskDirectory directory)
      : options_(options),
        epoch_bytes_(options.capacity_bytes / options.epoch_count),
        directory_(std::move(directory)),
        flush_([this] { return FlushNow(); }) {}

  ~RocksDiskStoreImpl() override {
    evictor_.reset();
    if (epochs_ != nullptr) {
      const absl::Status status = Flush();
      if (!status.ok()) LogWarning(absl::StrCat("disk tier: last flush: ", status.ToString()));
    }
  }

  absl::Status Open();

  void SetEvictedCallback(EvictedCallback callback) override {
    MutexLock lock(callback_mutex_);
    callback_ = std::move(callback);
  }
  void SetKeepAdvice(KeepAdviceCallback advice) override {
    MutexLock lock(callback_mutex_);
    keep_advice_ = std::move(advice);
  }

  absl::Status Write(const DiskBlockMeta& meta,
                     absl::Span<const absl::Span<const std::byte>> pages) override;
  absl::Status Flush() override { return flush_.Run(); }
  absl::StatusOr<DiskBlockMeta> Find(const DiskBlockId& id) override;
  absl::Status Read(const DiskBlockId& id, std::size_t first_page,
                    absl::Span<const absl::Span<std::byte>> out) override;
  absl::Status Remove(absl::Span<const DiskBlockId> ids) override;
  absl::Status Scan(absl::FunctionRef<bool(const DiskBlockMeta&)> visit) override;
  absl::Status PutNamespace(const NamespaceRecord& record) override;
  absl::StatusOr<std::vector<NamespaceRecord>> Namespaces() override;
  Stats stats() const override;
  std::uint64_t page_file_bytes_read() const override { return database_->page_file_bytes_read(); }
  std::vector<EncryptionKeyUsage> key_usage() const override { return database_->KeyUsage(); }

 private:
  struct Located {
    DecodedMeta entry;
    ColumnFamily family;
  };
  // NOT_FOUND also when the entry's epoch is gone.
  absl::StatusOr<Located> Locate(const DiskBlockId& id);
  // Adds to `status` what the file system says when it is about space.
  absl::Status Explain(absl::Status status) const;
  absl::Status FlushNow();
  // After a failed write: whether everything could be flushed now. Asks at most so often, since a
  // full disk makes every attempt write: the other writes fail at once.
  bool TryAgain();
  absl::Status WriteAt(const std::string& meta_key, DiskBlockMeta meta,
                       const RocksEpochs::Place& place,
                       absl::Span<const absl::Span<const std::byte>> pages);

  const RocksDiskStoreOptions options_;
  const std::uint64_t epoch_bytes_;
  const DiskDirectory directory_;
  std::unique_ptr<RocksDatabase> database_;
  std::unique_ptr<RocksEpochs> epochs_;
  DiskIdLocks locks_;
  RocksCounters counters_;
  PartWorkers read_workers_{kReadWorkers};
  SharedFlush flush_;
  std::atomic<std::int64_t> tried_ms_{0};  // Any stale value only moves a retry.
  Mutex callback_mutex_;
  EvictedCallback callback_ ABSL_GUARDED_BY(callback_mutex_);
  KeepAdviceCallback keep_advice_ ABSL_GUARDED_BY(callback_mutex_);
  std::unique_ptr<RocksEvictor> evictor_;  // Destroyed first: it uses all of the above.
};

absl::Status RocksDiskStoreImpl::Open() {
  const bool direct_io = options_.direct_io && directory_.SupportsDirectIo();
  const std::uint64_t memtable_bytes =
      options_.memtable_bytes != 0 ? options_.memtable_bytes : DefaultMemtableBytes(epoch_bytes_);
  KVMILL_ASSIGN_OR_RETURN(database_, RocksDatabase::Open(options_, memtable_bytes, direct_io));
  std::map<std::uint64_t, ColumnFamily> families = database_->TakeEpochs();

  std::map<std::uint64_t, RocksEpochs::Census> census;
  std::vector<std::string> stale;
  std::uint64_t block_count = 0;
  std::uint64_t damaged = 0;
  KVMILL_RETURN_IF_ERROR(ScanMeta(
      *database_, [&](absl::string_view meta_key, const absl::StatusOr<DecodedMeta>& entry) {
        if (!entry.ok() || !families.contains(entry->meta.epoch)) {
          stale.emplace_back(meta_key);
          if (!entry.ok()) ++damaged;
          return true;
        }
        census[entry->meta.epoch].Add(entry->block_number);
        ++block_count;
        return true;
      }));
  if (damaged > 0) {
    LogWarning(absl::StrCat("disk tier: dropped ", damaged, " damaged meta entries"));
  }
  KVMILL_RETURN_IF_ERROR(Explain(EraseMeta(*database_, stale)));
  counters_.block_count.store(block_count, std::memory_order_relaxed);

  const std::uint64_t reinsert_bytes =
      static_cast<std::uint64_t>(static_cast<double>(epoch_bytes_) * options_.reinsert_share);
  epochs_ = std::make_unique<RocksEpochs>(RocksEpochs::Options{
      .capacity_bytes = options_.capacity_bytes,
      .epoch_bytes = epoch_bytes_,
      .reinsert_bytes = reinsert_bytes,
      .reinsert_window_epochs = options_.reinsert_window_epochs,
      .wait_ms = options_.write_wait_ms,
      .begin = [this](std::uint64_t epoch) { return database_->CreateEpoch(epoch); },
      // Twice: a merge of all of `meta` writes the new files before it deletes the old ones.
      .other_bytes =
          [this] { return 2 * database_->FileBytes(database_->meta()) + kFixedFileBytes; }});
  for (auto& [epoch, family] : families) {
    const std::uint64_t file_bytes = database_->FileBytes(family.get());
    epochs_->AddEpoch(epoch, std::move(family), file_bytes, census[epoch]);
  }
  families.clear();
  KVMILL_RETURN_IF_ERROR(Explain(epochs_->Start()));

  const std::uint64_t available_bytes = directory_.AvailableBytes();
  const std::uint64_t used_bytes = directory_.UsedBytes();
  if (available_bytes + used_bytes < options_.capacity_bytes + epoch_bytes_) {
    LogWarning(absl::StrFormat(
        "disk tier: capacity_bytes %d and one epoch of %d do not fit %s: %d used, %d available",
        options_.capacity_bytes, epoch_bytes_, directory_.path(), used_bytes, available_bytes));
  }
  evictor_ = std::make_unique<RocksEvictor>(
      *database_, *epochs_, locks_, counters_,
      RocksEvictor::Options{.flush = [this] { return Flush(); },
                            .evicted =
                                [this](absl::Span<const DiskBlockId> ids) {
                                  EvictedCallback callback;
                                  {
                                    MutexLock lock(callback_mutex_);
                                    callback = callback_;
                                  }
                                  if (callback) callback(ids);
                                },
                            .advice =
                                [this](const DiskBlockId& id) {
                                  KeepAdviceCallback advice;
                                  {
                                    MutexLock lock(callback_mutex_);
                                    advice = keep_advice_;
                                  }
                                  return advice ? advice(id) : KeepAdvice::kNone;
                                }});
  return absl::OkStatus();
}

absl::Status RocksDiskStoreImpl::Explain(absl::Status status) const {
  if (!absl::IsResourceExhausted(status)) return status;
  return absl::ResourceExhaustedError(
      absl::StrFormat("%s; %s holds %d bytes, cap %d bytes, file system has %d bytes free",
                      status.message(), directory_.path(), directory_.UsedBytes(),
                      options_.capacity_bytes, directory_.AvailableBytes()));
}

absl::Status RocksDiskStoreImpl::FlushNow() {
  return Explain(database_->Flush(epochs_->Families()));
}

bool RocksDiskStoreImpl::TryAgain() {
  const auto now_ms = [] {
    return std::chrono::duration_cast<std::chrono::milliseconds>(
               std::chrono::steady_clock::now().time_since_epoch())
        .count();
  };
  std::int64_t last_ms = tried_ms_.load(std::memory_order_relaxed);
  const std::int64_t begin_ms = now_ms();
  if (begin_ms - last_ms < kTryAgainEveryMs ||
      !tried_ms_.compare_exchange_strong(last_ms, begin_ms, std::memory_order_relaxed)) {
    return false;
  }
  const bool flushed = Flush().ok();
  tried_ms_.store(now_ms(), std::memory_order_relaxed);
  return flushed;
}

absl::Status RocksDiskStoreImpl::Write(const DiskBlockMeta& meta,
                                       absl::Span<const absl::Span<const std::byte>> pages) {
  if (meta.id.key.empty() || pages.empty() || pages.size() > kDiskPagesMax ||
      pages.size() != meta.page_bytes.size()) {
    return absl::InvalidArgumentError(
        absl::StrFormat("block with a key of %d bytes, %d pages and %d page lengths",
                        meta.id.key.size(), pages.size(), meta.page_bytes.size()));
  }
  for (std::size_t i = 0; i < pages.size(); ++i) {
    if (pages[i].empty() || pages[i].size() != meta.page_bytes[i]) {
      return absl::InvalidArgumentError(absl::StrFormat("page %d of %d bytes, meta says %d", i,
                                                        pages[i].size(), meta.page_bytes[i]));
    }
  }
  const std::uint64_t bytes = DiskBytesOf(meta);
  if (bytes > epoch_bytes_) {
    return absl::ResourceExhaustedError(absl::StrFormat(
        "block of %d bytes, an epoch of the disk tier has %d", bytes, epoch_bytes_));
  }
  const std::string meta_key = EncodeMetaKey(meta.id);
  const auto check_absent = [&]() -> absl::Status {
    const absl::Status found = FindBlock(*database_, meta_key).status();
    if (found.ok()) return absl::AlreadyExistsError("block is on disk");
    // A damaged entry is written over; any other failure is the disk's.
    if (!absl::IsNotFound(found) && !absl::IsDataLoss(found)) return found;
    return absl::OkStatus();
  };
  KVMILL_RETURN_IF_ERROR(check_absent());
  // The block is not locked meanwhile: who waits for room waits for the evictor, and that locks
  // every block which it saw in the oldest epoch, also one that was removed and comes again.
  absl::StatusOr<RocksEpochs::Place> place = epochs_->Acquire(bytes, /*reinsert=*/false);
  if (!place.ok() && TryAgain()) place = epochs_->Acquire(bytes, /*reinsert=*/false);
  if (!place.ok()) return Explain(place.status());
  const DiskIdLocks::Held held = locks_.Lock({meta_key});
  if (absl::Status absent = check_absent(); !absent.ok()) {
    epochs_->Complete(*place, /*written=*/false);
    return absent;
  }
  absl::Status status = WriteAt(meta_key, meta, *place, pages);
  if (!status.ok() && TryAgain()) status = WriteAt(meta_key, meta, *place, pages);
  epochs_->Complete(*place, status.ok());
  if (!status.ok()) return Explain(std::move(status));
  counters_.block_count.fetch_add(1, std::memory_order_relaxed);
  return absl::OkStatus();
}

absl::Status RocksDiskStoreImpl::WriteAt(const std::string& meta_key, DiskBlockMeta meta,
                                         const RocksEpochs::Place& place,
                                         absl::Span<const absl::Span<const std::byte>> pages) {
  meta.epoch = place.epoch;
  return PutBlock(*database_, place.family, meta_key, meta, place.block_number, pages);
}

absl::StatusOr<RocksDiskStoreImpl::Located> RocksDiskStoreImpl::Locate(const DiskBlockId& id) {
  const std::string meta_key = EncodeMetaKey(id);
  std::uint64_t last_epoch = 0;
  // An entry whose epoch is gone is a leftover, unless the block was carried over to a newer epoch
  // between our two looks: then the entry has changed.
  while (true) {
    KVMILL_ASSIGN_OR_RETURN(DecodedMeta entry, FindBlock(*database_, meta_key));
    ColumnFamily family = epochs_->Family(entry.meta.epoch);
    if (family != nullptr) return Located{.entry = std::move(entry), .family = std::move(family)};
    if (entry.meta.epoch <= last_epoch) return absl::NotFoundError("epoch is gone");
    last_epoch = entry.meta.epoch;
  }
}

absl::StatusOr<DiskBlockMeta> RocksDiskStoreImpl::Find(const DiskBlockId& id) {
  KVMILL_ASSIGN_OR_RETURN(Located located, Locate(id));
  return std::move(located.entry.meta);
}

absl::Status RocksDiskStoreImpl::Read(const DiskBlockId& id, std::size_t first_page,
                                      absl::Span<const absl::Span<std::byte>> out) {
  KVMILL_ASSIGN_OR_RETURN(const Located located, Locate(id));
  const std::vector<std::uint32_t>& page_bytes = located.entry.meta.page_bytes;
  if (first_page > page_bytes.size() || out.size() > page_bytes.size() - first_page) {
    return absl::DataLossError(absl::StrFormat("pages %d to %d of a block with %d", first_page,
                                               first_page + out.size(), page_bytes.size()));
  }
  for (std::size_t i = 0; i < out.size(); ++i) {
    if (out[i].size() != page_bytes[first_page + i]) {
      return absl::DataLossError(absl::StrFormat("page %d: %d bytes, want %d", first_page + i,
                                                 page_bytes[first_page + i], out[i].size()));
    }
  }
  epochs_->Touch(located.entry.meta.epoch, located.entry.block_number);

  // A large block is read in parts: one is copied while the disk delivers the next.
  std::vector<std::size_t> part_ends;  // Indices into `out`.
  std::size_t part_bytes = 0;
  for (std::size_t i = 0; i < out.size(); ++i) {
    part_bytes += out[i].size();
    if (part_bytes >= kReadPartBytes || i + 1 == out.size()) {
      part_ends.push_back(i + 1);
      part_bytes = 0;
    }
  }
  std::vector<absl::Status> statuses(part_ends.size());
  read_workers_.Run(part_ends.size(), [&](std::size_t part) {
    const std::size_t begin = part == 0 ? 0 : part_ends[part - 1];
    statuses[part] = ReadPages(*database_, located.family, located.entry.block_number,
                               first_page + begin, out.subspan(begin, part_ends[part] - begin));
  });
  for (absl::Status& status : statuses) KVMILL_RETURN_IF_ERROR(std::move(status));
  return absl::OkStatus();
}

absl::Status RocksDiskStoreImpl::Remove(absl::Span<const DiskBlockId> ids) {
  std::vector<std::string> meta_keys;
  meta_keys.reserve(ids.size());
  for (const DiskBlockId& id : ids) meta_keys.push_back(EncodeMetaKey(id));
  std::sort(meta_keys.begin(), meta_keys.end());
  meta_keys.erase(std::unique(meta_keys.begin(), meta_keys.end()), meta_keys.end());

  const DiskIdLocks::Held held = locks_.Lock(meta_keys);
  std::vector<std::string> present;
  std::vector<std::uint64_t> epochs;
  for (const std::string& meta_key : meta_keys) {
    const absl::StatusOr<DecodedMeta> entry = FindBlock(*database_, meta_key);
    if (absl::IsNotFound(entry.status())) continue;
    if (!entry.ok() && !absl::IsDataLoss(entry.status())) return entry.status();
    present.push_back(meta_key);
    if (entry.ok()) epochs.push_back(entry->meta.epoch);
  }
  KVMILL_RETURN_IF_ERROR(Explain(EraseMeta(*database_, present)));
  for (const std::uint64_t epoch : epochs) epochs_->Removed(epoch);
  counters_.block_count.fetch_sub(epochs.size(), std::memory_order_relaxed);
  return absl::OkStatus();
}

absl::Status RocksDiskStoreImpl::Scan(absl::FunctionRef<bool(const DiskBlockMeta&)> visit) {
  const absl::flat_hash_set<std::uint64_t> epochs = epochs_->Numbers();
  return ScanMeta(*database_, [&](absl::string_view, const absl::StatusOr<DecodedMeta>& entry) {
    if (!entry.ok() || !epochs.contains(entry->meta.epoch)) return true;
    return visit(entry->meta);
  });
}

absl::Status RocksDiskStoreImpl::PutNamespace(const NamespaceRecord& record) {
  rocksdb::WriteBatch batch;
  KVMILL_RETURN_IF_ERROR(ToStatus(batch.Put(database_->namespaces(), record.name,
                                            EncodeNamespaceValue(record.name, record.encoding)),
                                  "namespace"));
  KVMILL_RETURN_IF_ERROR(Explain(database_->Write(&batch)));
  return Flush();
}

absl::StatusOr<std::vector<DiskStore::NamespaceRecord>> RocksDiskStoreImpl::Namespaces() {
  std::vector<NamespaceRecord> records;
  const std::unique_ptr<rocksdb::Iterator> it(
      database_->db()->NewIterator(rocksdb::ReadOptions(), database_->namespaces()));
  for (it->SeekToFirst(); it->Valid(); it->Next()) {
    NamespaceRecord record{.name = it->key().ToString(), .encoding = {}};
    KVMILL_ASSIGN_OR_RETURN(
        record.encoding, DecodeNamespaceValue(record.name, absl::string_view(it->value().data(),
                                                                             it->value().size())));
    records.push_back(std::move(record));
  }
  KVMILL_RETURN_IF_ERROR(ToStatus(it->status(), "namespaces"));
  return records;
}

DiskStore::Stats RocksDiskStoreImpl::stats() const {
  return {.used_bytes = directory_.UsedBytes(),
          .capacity_bytes = options_.capacity_bytes,
          .block_count = counters_.block_count.load(std::memory_order_relaxed),
          .evicted_blocks = counters_.evicted_blocks.load(std::memory_order_relaxed),
          .reinserted_blocks = counters_.reinserted_blocks.load(std::memory_order_relaxed),
          .failed_flushes = database_->failed_flushes()};
}

}  // namespace

absl::StatusOr<std::unique_ptr<RocksDiskStore>> RocksDiskStore::Open(
    const RocksDiskStoreOptions& options) {
  KVMILL_RETURN_IF_ERROR(CheckOptions(options));
  KVMILL_ASSIGN_OR_RETURN(DiskDirectory directory, DiskDirectory::Lock(options.directory));
  auto store = std::make_unique<RocksDiskStoreImpl>(options, std::move(directory));
  KVMILL_RETURN_IF_ERROR(store->Open());
  return store;
}

}  // namespace kvmill
