// Locks on single blocks of the disk tier, held while their meta entry is read and changed. They
// are held across I/O, which a mutex never is: a second writer of one key has nothing else to do.
#ifndef KVMILL_STORAGE_DISK_ID_LOCKS_H_
#define KVMILL_STORAGE_DISK_ID_LOCKS_H_

#include <algorithm>
#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_set.h"
#include "storage/core/mutex.h"

namespace kvmill {

// Thread-safe. A thread holds at most one Held at a time, so there is no order to keep.
class DiskIdLocks {
 public:
  // Releases its keys when destroyed.
  class Held {
   public:
    Held(Held&& other) noexcept : locks_(other.locks_), keys_(std::move(other.keys_)) {
      other.keys_.clear();
    }
    Held& operator=(Held&&) = delete;
    ~Held() {
      if (!keys_.empty()) locks_.Release(keys_);
    }

   private:
    friend class DiskIdLocks;
    Held(DiskIdLocks& locks, std::vector<std::string> keys)
        : locks_(locks), keys_(std::move(keys)) {}
    DiskIdLocks& locks_;
    std::vector<std::string> keys_;
  };

  // Waits until none of the keys is held, then takes all of them. Repeated keys count once.
  Held Lock(std::vector<std::string> keys) {
    std::sort(keys.begin(), keys.end());
    keys.erase(std::unique(keys.begin(), keys.end()), keys.end());
    {
      MutexLock lock(mutex_);
      while (AnyHeld(keys)) released_.Wait(mutex_);
      held_.insert(keys.begin(), keys.end());
    }
    return Held(*this, std::move(keys));
  }

 private:
  bool AnyHeld(const std::vector<std::string>& keys) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    for (const std::string& key : keys) {
      if (held_.contains(key)) return true;
    }
    return false;
  }

  void Release(const std::vector<std::string>& keys) {
    MutexLock lock(mutex_);
    for (const std::string& key : keys) held_.erase(key);
    released_.NotifyAll();
  }

  Mutex mutex_;
  CondVar released_;
  absl::flat_hash_set<std::string> held_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace kvmill

#endif  // KVMILL_STORAGE_DISK_ID_LOCKS_H_
