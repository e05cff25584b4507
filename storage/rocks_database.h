// RocksDB as the disk tier configures it: the `meta`, `namespaces` and epoch column families of one
// directory. Private to storage/rocks_*.cc: the only header that shows RocksDB's types.
#ifndef KVMILL_STORAGE_ROCKS_DATABASE_H_
#define KVMILL_STORAGE_ROCKS_DATABASE_H_

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "rocksdb/db.h"
#include "rocksdb/env.h"
#include "rocksdb/write_batch.h"
#include "storage/core/mutex.h"
#include "storage/encrypted_files.h"
#include "storage/rocks_disk_store.h"
#include "storage/rocks_health.h"
#include "storage/rocks_mender.h"

namespace kvmill {

// RESOURCE_EXHAUSTED: no space (or a file size limit). UNAVAILABLE: any other I/O error. DATA_LOSS:
// corruption. NOT_FOUND stays.
absl::Status ToStatus(const rocksdb::Status& status, absl::string_view what);

// A column family; its handle is released with the last owner, and after a drop its files go then.
using ColumnFamily = std::shared_ptr<rocksdb::ColumnFamilyHandle>;

// Thread-safe. Must outlive every ColumnFamily it handed out.
class RocksDatabase {
 public:
  // `memtable_bytes` and `direct_io` are resolved values. FAILED_PRECONDITION, and nothing is
  // changed, when the keys in `options` are not those of the directory.
  static absl::StatusOr<std::unique_ptr<RocksDatabase>> Open(const RocksDiskStoreOptions& options,
                                                             std::uint64_t memtable_bytes,
                                                             bool direct_io);
  // Gives up on a RocksDB that does not close, after a minute: it stays as it is, its directory
  // locked, until the process ends.
  ~RocksDatabase();

  rocksdb::DB* db() const { return db_.get(); }
  rocksdb::ColumnFamilyHandle* meta() const { return meta_.get(); }
  rocksdb::ColumnFamilyHandle* namespaces() const { return namespaces_.get(); }
  // The epochs that were there at Open, by number; hands them over.
  std::map<std::uint64_t, ColumnFamily> TakeEpochs() { return std::move(epochs_); }

  absl::StatusOr<ColumnFamily> CreateEpoch(std::uint64_t epoch);
  // The files go when the last owner of the handle does.
  absl::Status DropEpoch(const ColumnFamily& epoch);

  // The batch must end with a change of `meta` or `namespaces`: Flush() knows what is durable by
  // the last entry that is. Refused since a flush failed, until one does not. Waits for a flush
  // when too much is in memory, at most write_wait_ms.
  absl::Status Write(rocksdb::WriteBatch* batch);
  // Empty batches that keep the memory of an earlier block: touching fresh memory costs more than
  // copying a block.
  std::unique_ptr<rocksdb::WriteBatch> TakeBatch();
  void GiveBatch(std::unique_ptr<rocksdb::WriteBatch> batch);
  // Makes meta, namespaces and these epochs durable together. Fails within a minute or so, and may
  // be called again: what it could not write is still in memory.
  absl::Status Flush(absl::Span<const ColumnFamily> epochs);
  // Flushes that failed since Open, whoever asked for them.
  std::uint64_t failed_flushes() const { return health_->failures(); }

  // Files of one column family, without memtables.
  std::uint64_t FileBytes(rocksdb::ColumnFamilyHandle* family) const;
  // Empty without keys.
  std::vector<EncryptionKeyUsage> KeyUsage() const;
  std::uint64_t page_file_bytes_read() const;

 private:
  RocksDatabase() = default;
  ColumnFamily Own(rocksdb::ColumnFamilyHandle* handle) const;
  // Of files that live on from start to start: writes them again with the current key.
  void LeaveOldKeys();
  absl::Status WaitForMemory();

  rocksdb::ColumnFamilyOptions epoch_options_;
  Mutex batches_mutex_;
  std::vector<std::unique_ptr<rocksdb::WriteBatch>> batches_ ABSL_GUARDED_BY(batches_mutex_);
  std::shared_ptr<EncryptedFiles> files_;  // Null without keys. Shared with the file system.
  std::unique_ptr<rocksdb::Env> env_;
  std::shared_ptr<RocksHealth> health_ = std::make_shared<RocksHealth>();
  std::shared_ptr<rocksdb::Statistics> statistics_;
  std::unique_ptr<rocksdb::DB> db_;
  std::unique_ptr<RocksMender> mender_;
  std::chrono::milliseconds write_wait_{0};
  ColumnFamily default_;
  ColumnFamily meta_;
  ColumnFamily namespaces_;
  std::map<std::uint64_t, ColumnFamily> epochs_;
};

}  // namespace kvmill

#endif  // KVMILL_STORAGE_ROCKS_DATABASE_H_
