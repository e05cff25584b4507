// Gets a RocksDB to write again whose manifest could not be written. Private to storage/rocks_*.cc.
#ifndef KVMILL_STORAGE_ROCKS_MENDER_H_
#define KVMILL_STORAGE_ROCKS_MENDER_H_

#include <chrono>
#include <memory>
#include <string>
#include <thread>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "rocksdb/db.h"
#include "storage/core/mutex.h"
#include "storage/rocks_health.h"

namespace kvmill {

// Thread-safe but for Stop(). `db` and `meta` must outlive it, or Stop().
class RocksMender {
 public:
  RocksMender(rocksdb::DB* db, rocksdb::ColumnFamilyHandle* meta, std::string directory,
              std::shared_ptr<RocksHealth> health);
  ~RocksMender() { Stop(); }

  // OK at once while nothing is wrong. Otherwise one thread works on it, which all callers wait
  // for, each until its deadline: RocksDB flushes everything meanwhile, and that may have no end.
  // `ask` asks for a flush of all families, without waiting for it, and is called now and then: one
  // that RocksDB forgot to begin is begun so.
  absl::Status Mend(absl::FunctionRef<rocksdb::Status()> ask,
                    std::chrono::steady_clock::time_point deadline);

  // The database is about to be closed. Waits for the thread; nothing may be called after it.
  void Stop();

 private:
  absl::Status MendNow();

  rocksdb::DB* const db_;
  rocksdb::ColumnFamilyHandle* const meta_;
  const std::string directory_;
  const std::shared_ptr<RocksHealth> health_;
  Mutex mutex_;
  CondVar ended_;
  bool running_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Status result_ ABSL_GUARDED_BY(mutex_);
  std::thread thread_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace kvmill

#endif  // KVMILL_STORAGE_ROCKS_MENDER_H_
