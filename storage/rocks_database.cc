#include "storage/rocks_database.h"

#include <sys/resource.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <future>
#include <system_error>
#include <thread>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/strip.h"
#include "rocksdb/filter_policy.h"
#include "rocksdb/options.h"
#include "rocksdb/statistics.h"
#include "rocksdb/table.h"
#include "storage/core/log.h"
#include "storage/core/status_macros.h"
#include "storage/disk_keys.h"
#include "storage/rocks_crc32c.h"
#include "storage/rocks_file_system.h"

namespace kvmill {
namespace {

constexpr char kMetaName[] = "meta";
constexpr char kNamespacesName[] = "namespaces";
constexpr std::uint64_t kMiB = std::uint64_t{1} << 20;
constexpr std::size_t kBatchesKept = 2;
constexpr std::uint64_t kMemtablesMax = 5;  // One is written, the others are being flushed.
// RocksDB itself never makes a write wait, which would have no end while flushes fail, and refuses
// to be asked for a flush meanwhile: see WaitForMemory().
constexpr int kNoStop = 1 << 20;
constexpr std::chrono::seconds kFlushWait(60);
// A flush that was asked for and never began is asked for again.
constexpr std::chrono::seconds kAskAgain(5);
constexpr std::chrono::seconds kCloseWait(60);

// Half of what the process may open, at most 4096: a blob file and a table each count as one.
int OpenFilesMax() {
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return 256;
  return static_cast<int>(std::clamp<rlim_t>(limit.rlim_cur / 2, 64, 4096));
}

rocksdb::DBOptions DatabaseOptions() {
  rocksdb::DBOptions options;
  options.create_if_missing = true;
  options.create_missing_column_families = true;
  options.atomic_flush = true;  // Meta and pages of a block survive together or not at all.
  options.avoid_flush_during_shutdown = true;  // The store flushes before it closes.
  options.max_background_flushes = 1;
  options.max_background_compactions = 1;
  options.max_open_files = OpenFilesMax();
  options.skip_stats_update_on_db_open = true;
  // Writers wait for a flush when the memtables are full; the default would first slow them down to
  // 16 MB/s, which only makes the disk idle.
  options.delayed_write_rate = std::uint64_t{1} << 40;
  // Larger appends go straight to the file, and blob files collect them themselves.
  options.writable_file_max_buffer_size = kMiB / 16;
  options.allow_fallocate = false;  // Files occupy what they hold: the cap counts bytes.
  options.max_manifest_file_size = 4 * kMiB;
  options.info_log_level = rocksdb::WARN_LEVEL;
  options.max_log_file_size = kMiB;
  options.keep_log_file_num = 2;
  options.stats_dump_period_sec = 0;
  options.stats_persist_period_sec = 0;
  options.max_bgerror_resume_count = 0;
  return options;
}

rocksdb::ColumnFamilyOptions MetaOptions(std::uint64_t memtable_bytes,
                                         const std::shared_ptr<rocksdb::Cache>& cache) {
  rocksdb::ColumnFamilyOptions options;
  options.write_buffer_size = memtable_bytes;
  options.max_write_buffer_number = kNoStop;
  options.compression = rocksdb::kNoCompression;
  // Every flush of pages adds a small file here. Levels would rewrite all of meta every few flushes
  // since keys are hashes; size-tiered runs rewrite an entry about log(meta / one flush) times.
  options.compaction_style = rocksdb::kCompactionStyleUniversal;
  options.level0_file_num_compaction_trigger = 8;
  options.level0_slowdown_writes_trigger = 64;
  options.level0_stop_writes_trigger = kNoStop;
  rocksdb::BlockBasedTableOptions table;
  table.block_cache = cache;
  table.filter_policy.reset(rocksdb::NewBloomFilterPolicy(10));
  table.format_version = 5;
  options.table_factory.reset(rocksdb::NewBlockBasedTableFactory(table));
  return options;
}

rocksdb::ColumnFamilyOptions EpochOptions(std::uint64_t memtable_bytes,
                                          const std::shared_ptr<rocksdb::Cache>& cache) {
  rocksdb::ColumnFamilyOptions options;
  options.write_buffer_size = memtable_bytes;
  options.max_write_buffer_number = kNoStop;
  options.compression = rocksdb::kNoCompression;  // Codes of tiles are incompressible.
  options.enable_blob_files = true;
  options.min_blob_size = 0;
  options.blob_file_size = 4096 * kMiB;  // One blob file a flush.
  options.blob_compression_type = rocksdb::kNoCompression;
  options.enable_blob_garbage_collection = false;  // An epoch is dropped whole.
  // Tables hold page keys only and never overlap: merging them is cheap and keeps many small
  // flushes from piling up.
  options.compaction_style = rocksdb::kCompactionStyleUniversal;
  options.level0_file_num_compaction_trigger = 64;
  options.level0_slowdown_writes_trigger = 512;
  options.level0_stop_writes_trigger = kNoStop;
  rocksdb::BlockBasedTableOptions table;
  table.block_cache = cache;
  table.format_version = 5;
  options.table_factory.reset(rocksdb::NewBlockBasedTableFactory(table));
  return options;
}

// RocksDB's own logs are not worth an old key, and its name for the database is written once: the
// new key takes it over, by way of a name that RocksDB cleans up after a crash.
absl::Status LeaveOldKeysBehind(const std::string& directory, rocksdb::Env* env,
                                const EncryptedFiles& files) {
  std::vector<std::string> logs;
  std::error_code error;
  for (auto it = std::filesystem::directory_iterator(directory, error);
       !error && it != std::filesystem::directory_iterator(); it.increment(error)) {
    const std::string name = it->path().filename().string();
    if ((name == "LOG" || absl::StartsWith(name, "LOG.old.")) && files.IsOfOldKey(name)) {
      logs.push_back(absl::StrCat(directory, "/", name));
    }
  }
  for (const std::string& log : logs) {
    KVMILL_RETURN_IF_ERROR(ToStatus(env->DeleteFile(log), "log of an old key"));
  }
  const std::string path = absl::StrCat(directory, "/IDENTITY");
  // Nobody needs the name, so that damage of it is no reason not to start: RocksDB makes a new one.
  if (absl::IsDataLoss(files.Open(path, CipherMode::kStream).status())) {
    return ToStatus(env->DeleteFile(path), "damaged IDENTITY");
  }
  if (!files.IsOfOldKey("IDENTITY")) return absl::OkStatus();
  const std::string written = absl::StrCat(directory, "/000000.dbtmp");
  std::string identity;
  KVMILL_RETURN_IF_ERROR(ToStatus(rocksdb::ReadFileToString(env, path, &identity), "IDENTITY"));
  KVMILL_RETURN_IF_ERROR(
      ToStatus(rocksdb::WriteStringToFile(env, identity, written, /*should_sync=*/true),
               "IDENTITY for the new key"));
  return ToStatus(env->RenameFile(written, path), "IDENTITY for the new key");
}

void LogKeys(const std::vector<EncryptionKeyUsage>& usage) {
  std::string line = "disk tier: encrypted with key ";
  for (const EncryptionKeyUsage& key : usage) {
    absl::StrAppend(&line, key.is_current ? "" : "; still with the older key ", key.key, ": ",
                    key.files, " files of ", key.bytes, " bytes");
  }
  LogInfo(line);
}

}  // namespace

absl::Status ToStatus(const rocksdb::Status& status, absl::string_view what) {
  if (status.ok()) return absl::OkStatus();
  std::string text = absl::StrReplaceAll(status.ToString(), {{"\n", " "}});
  absl::StripTrailingAsciiWhitespace(&text);
  const std::string message = absl::StrCat(what, ": ", text);
  if (status.IsNotFound()) return absl::NotFoundError(message);
  if (status.IsCorruption()) return absl::DataLossError(message);
  if (status.IsNoSpace() || status.subcode() == rocksdb::Status::kSpaceLimit ||
      absl::StrContains(message, "File too large") ||
      absl::StrContains(message, "quota exceeded")) {
    return absl::ResourceExhaustedError(message);
  }
  if (status.IsInvalidArgument() || status.IsNotSupported()) return absl::InternalError(message);
  return absl::UnavailableError(message);
}

absl::StatusOr<std::unique_ptr<RocksDatabase>> RocksDatabase::Open(
    const RocksDiskStoreOptions& options, std::uint64_t memtable_bytes, bool direct_io) {
  if (!RocksUsesFastCrc32c()) {
    LogWarning(
        "disk tier: RocksDB computes checksums without the processor's instruction for them");
  }
  std::unique_ptr<RocksDatabase> database(new RocksDatabase());
  database->statistics_ = rocksdb::CreateDBStatistics();
  database->statistics_->set_stats_level(rocksdb::StatsLevel::kExceptHistogramOrTimers);
  const std::shared_ptr<rocksdb::Cache> cache =
      rocksdb::NewLRUCache(static_cast<std::size_t>(options.meta_cache_bytes));
  database->epoch_options_ = EpochOptions(memtable_bytes, cache);
  const rocksdb::ColumnFamilyOptions meta_options = MetaOptions(memtable_bytes, cache);
  rocksdb::DBOptions db_options = DatabaseOptions();
  if (options.keys == nullptr) {
    KVMILL_RETURN_IF_ERROR(CheckNotEncrypted(options.directory));
  } else {
    KVMILL_ASSIGN_OR_RETURN(database->files_,
                            EncryptedFiles::Load(options.directory, options.keys));
  }
  database->env_ = rocksdb::NewCompositeEnv(NewRocksFileSystem(direct_io, database->files_));
  if (database->files_ != nullptr) {
    KVMILL_RETURN_IF_ERROR(
        LeaveOldKeysBehind(options.directory, database->env_.get(), *database->files_));
  }
  db_options.env = database->env_.get();
  db_options.statistics = database->statistics_;
  db_options.listeners.push_back(database->health_);
  database->write_wait_ = std::chrono::milliseconds(options.write_wait_ms);

  std::vector<std::string> names;
  const rocksdb::Status listed =
      rocksdb::DB::ListColumnFamilies(db_options, options.directory, &names);
  // Without a CURRENT file there is no database yet: that is how the first start looks.
  if (!listed.ok()) names.clear();
  for (const char* name : {"default", kMetaName, kNamespacesName}) {
    if (std::find(names.begin(), names.end(), name) == names.end()) names.emplace_back(name);
  }
  std::vector<rocksdb::ColumnFamilyDescriptor> families;
  for (const std::string& name : names) {
    families.emplace_back(name, EpochOfName(name) ? database->epoch_options_ : meta_options);
  }
  std::vector<rocksdb::ColumnFamilyHandle*> handles;
  rocksdb::DB* db = nullptr;
  absl::Status opened =
      ToStatus(rocksdb::DB::Open(db_options, options.directory, families, &handles, &db),
               absl::StrCat("disk tier ", options.directory));
  if (absl::IsDataLoss(opened)) {
    return absl::DataLossError(
        absl::StrCat(opened.message(),
                     "; the index of the disk tier is damaged: move the directory away to start ",
                     "with an empty one"));
  }
  KVMILL_RETURN_IF_ERROR(opened);
  database->db_.reset(db);
  database->health_->SetDurable(db->GetLatestSequenceNumber());
  for (std::size_t i = 0; i < names.size(); ++i) {
    ColumnFamily family = database->Own(handles[i]);
    if (const auto epoch = EpochOfName(names[i])) {
      database->epochs_.emplace(*epoch, std::move(family));
    } else if (names[i] == kMetaName) {
      database->meta_ = std::move(family);
    } else if (names[i] == kNamespacesName) {
      database->namespaces_ = std::move(family);
    } else if (names[i] == "default") {
      database->default_ = std::move(family);
    } else {
      return absl::FailedPreconditionError(absl::StrCat(
          "disk tier ", options.directory, ": unknown column family \"", names[i], "\""));
    }
  }
  database->mender_ = std::make_unique<RocksMender>(db, database->meta_.get(), options.directory,
                                                    database->health_);
  if (database->files_ != nullptr) {
    database->LeaveOldKeys();
    LogKeys(database->KeyUsage());
  }
  return database;
}

void RocksDatabase::LeaveOldKeys() {
  rocksdb::CompactRangeOptions whole;
  whole.bottommost_level_compaction = rocksdb::BottommostLevelCompaction::kForce;
  for (const ColumnFamily& family : {meta_, namespaces_}) {
    rocksdb::ColumnFamilyMetaData metadata;
    db_->GetColumnFamilyMetaData(family.get(), &metadata);
    bool is_old = false;
    for (const rocksdb::LevelMetaData& level : metadata.levels) {
      for (const rocksdb::SstFileMetaData& file : level.files) {
        is_old = is_old || files_->IsOfOldKey(absl::StripPrefix(file.name, "/"));
      }
    }
    if (!is_old) continue;
    // Not worth a start: the next one tries again.
    const absl::Status status =
        ToStatus(db_->CompactRange(whole, family.get(), nullptr, nullptr), family->GetName());
    if (!status.ok()) {
      LogWarning(absl::StrCat("disk tier: index not yet with the new key: ", status.message()));
    }
  }
}

RocksDatabase::~RocksDatabase() {
  epochs_.clear();
  default_.reset();
  namespaces_.reset();
  if (db_ == nullptr) return;
  struct Closing {
    std::unique_ptr<rocksdb::Env> env;
    std::shared_ptr<RocksHealth> health;
    std::unique_ptr<rocksdb::DB> db;
    ColumnFamily meta;
    std::unique_ptr<RocksMender> mender;
  };
  auto closing = std::make_shared<Closing>(Closing{.env = std::move(env_),
                                                   .health = health_,
                                                   .db = std::move(db_),
                                                   .meta = std::move(meta_),
                                                   .mender = std::move(mender_)});
  std::promise<void> closed;
  std::future<void> is_closed = closed.get_future();
  std::thread closer([closing = std::move(closing), closed = std::move(closed)]() mutable {
    if (closing->mender != nullptr) closing->mender->Stop();
    closing.reset();
    closed.set_value();
  });
  if (is_closed.wait_for(kCloseWait) == std::future_status::ready) {
    closer.join();
    return;
  }
  LogError(
      "disk tier: RocksDB does not close after an error; the directory is free again when the "
      "process ends");
  closer.detach();
}

ColumnFamily RocksDatabase::Own(rocksdb::ColumnFamilyHandle* handle) const {
  return ColumnFamily(handle, [db = db_.get()](rocksdb::ColumnFamilyHandle* owned) {
    // Fails only for handles that are not the database's.
    db->DestroyColumnFamilyHandle(owned).PermitUncheckedError();
  });
}

absl::StatusOr<ColumnFamily> RocksDatabase::CreateEpoch(std::uint64_t epoch) {
  rocksdb::ColumnFamilyHandle* handle = nullptr;
  absl::Status created =
      ToStatus(db_->CreateColumnFamily(epoch_options_, EpochName(epoch), &handle),
               absl::StrCat("begin epoch ", epoch));
  if (created.ok()) return Own(handle);
  health_->EditFailed(created);
  return created;
}

absl::Status RocksDatabase::DropEpoch(const ColumnFamily& epoch) {
  absl::Status dropped =
      ToStatus(db_->DropColumnFamily(epoch.get()), absl::StrCat("drop epoch ", epoch->GetName()));
  if (!dropped.ok()) health_->EditFailed(dropped);
  return dropped;
}

std::unique_ptr<rocksdb::WriteBatch> RocksDatabase::TakeBatch() {
  MutexLock lock(batches_mutex_);
  if (batches_.empty()) return std::make_unique<rocksdb::WriteBatch>();
  std::unique_ptr<rocksdb::WriteBatch> batch = std::move(batches_.back());
  batches_.pop_back();
  return batch;
}

void RocksDatabase::GiveBatch(std::unique_ptr<rocksdb::WriteBatch> batch) {
  batch->Clear();
  MutexLock lock(batches_mutex_);
  if (batches_.size() < kBatchesKept) batches_.push_back(std::move(batch));
}

absl::Status RocksDatabase::WaitForMemory() {
  const auto deadline = std::chrono::steady_clock::now() + write_wait_;
  for (;;) {
    const std::uint64_t ended = health_->ended();
    KVMILL_RETURN_IF_ERROR(health_->failure());
    std::uint64_t full = 0;  // All families change memtables together, and every batch has meta.
    if (!db_->GetIntProperty(meta_.get(), rocksdb::DB::Properties::kNumImmutableMemTable, &full) ||
        full < kMemtablesMax - 1) {
      return absl::OkStatus();
    }
    const auto left = deadline - std::chrono::steady_clock::now();
    if (left <= std::chrono::nanoseconds(0)) {
      return absl::ResourceExhaustedError(
          absl::StrCat("write: no flush in ", write_wait_.count(), " ms"));
    }
    health_->WaitForEnd(ended, left);
  }
}

absl::Status RocksDatabase::Write(rocksdb::WriteBatch* batch) {
  KVMILL_RETURN_IF_ERROR(WaitForMemory());
  rocksdb::WriteOptions options;
  options.disableWAL = true;
  return ToStatus(db_->Write(options, batch), "write");
}

absl::Status RocksDatabase::Flush(absl::Span<const ColumnFamily> epochs) {
  std::vector<rocksdb::ColumnFamilyHandle*> families = {meta_.get(), namespaces_.get()};
  for (const ColumnFamily& epoch : epochs) families.push_back(epoch.get());
  rocksdb::FlushOptions options;
  options.wait = false;  // It would wait for ever for a flush that fails, see RocksHealth.
  options.allow_write_stall = true;
  const auto deadline = std::chrono::steady_clock::now() + kFlushWait;
  const rocksdb::SequenceNumber written = db_->GetLatestSequenceNumber();
  const auto ask = [&] { return db_->Flush(options, families); };
  bool stopped = false;
  for (;;) {
    const absl::Status mended = mender_->Mend(ask, deadline);
    if (health_->IsDurable(written)) return absl::OkStatus();
    KVMILL_RETURN_IF_ERROR(mended);
    const std::uint64_t begun = health_->begun();
    KVMILL_RETURN_IF_ERROR(ToStatus(ask(), "flush"));
    const auto left = deadline - std::chrono::steady_clock::now();
    switch (health_->Wait(written, begun, std::min<std::chrono::nanoseconds>(left, kAskAgain))) {
      case RocksHealth::Outcome::kDurable:
        return absl::OkStatus();
      case RocksHealth::Outcome::kFailed:
        if (health_->manifest() == RocksHealth::Manifest::kGood || std::exchange(stopped, true)) {
          KVMILL_RETURN_IF_ERROR(health_->failure());
        }
        break;  // Mended first, it may be another's failure.
      case RocksHealth::Outcome::kTimeout:
        if (left <= kAskAgain) return absl::UnavailableError("flush: no end after a minute");
        break;
    }
  }
}

std::uint64_t RocksDatabase::FileBytes(rocksdb::ColumnFamilyHandle* family) const {
  rocksdb::ColumnFamilyMetaData metadata;
  db_->GetColumnFamilyMetaData(family, &metadata);
  const std::uint64_t headers =
      files_ == nullptr ? 0 : metadata.file_count + metadata.blob_files.size();
  return metadata.size + metadata.blob_file_size + headers * kFileHeaderBytes;
}

std::vector<EncryptionKeyUsage> RocksDatabase::KeyUsage() const {
  return files_ == nullptr ? std::vector<EncryptionKeyUsage>() : files_->Usage();
}

std::uint64_t RocksDatabase::page_file_bytes_read() const {
  return statistics_->getTickerCount(rocksdb::BLOB_DB_BLOB_FILE_BYTES_READ);
}

}  // namespace kvmill
