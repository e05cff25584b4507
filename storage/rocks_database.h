// RocksDB as the disk tier configures it: the `meta`, `namespaces` and epoch column families of one
// directory. Private to storage/rocks_*.cc: the only header that shows RocksDB's types.
#ifndef KVMILL_STORAGE_ROCKS_DATABASE_H_
#define KVMILL_STORAGE_ROCKS_DATABASE_H_

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
  // the last entry that is.
  absl::Status Write(rocksdb::WriteBatch* batch);
  // Empty batches that keep the memory of an earlier block: touching fresh memory costs more than
  // copying a block.
  std::unique_ptr<rocksdb::WriteBatch> TakeBatch();
  void GiveBatch(std::unique_ptr<rocksdb::WriteBatch> batch);
  // Makes meta, namespaces and these epochs durable together.
  absl::Status Flush(absl::Span<const ColumnFamily> epochs);
  // Tries to leave the read-only state that RocksDB enters after a failed flush.
  void Resume();

  // Files of one column family, without memtables.
  std::uint64_t FileBytes(rocksdb::ColumnFamilyHandle* family) const;
  // Empty without keys.
  std::vector<EncryptionKeyUsage> KeyUsage() const;
  std::uint64_t page_file_bytes_read() const;

 private:
  class Watcher;

  RocksDatabase() = default;
  ColumnFamily Own(rocksdb::ColumnFamilyHandle* handle) const;
  // Of files that live on from start to start: writes them again with the current key.
  void LeaveOldKeys();

  rocksdb::ColumnFamilyOptions epoch_options_;
  Mutex batches_mutex_;
  std::vector<std::unique_ptr<rocksdb::WriteBatch>> batches_ ABSL_GUARDED_BY(batches_mutex_);
  std::shared_ptr<EncryptedFiles> files_;  // Null without keys. Shared with the file system.
  std::unique_ptr<rocksdb::Env> env_;
  std::shared_ptr<Watcher> watcher_;  // Shared with RocksDB, which notifies it.
  std::shared_ptr<rocksdb::Statistics> statistics_;
  std::unique_ptr<rocksdb::DB> db_;
  ColumnFamily default_;
  ColumnFamily meta_;
  ColumnFamily namespaces_;
  std::map<std::uint64_t, ColumnFamily> epochs_;
};

}  // namespace kvmill

#endif  // KVMILL_STORAGE_ROCKS_DATABASE_H_
