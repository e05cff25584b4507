// A reader of events, and what it was told. Internal to client/c_api.
#ifndef KVMILL_CLIENT_C_API_WATCH_H_
#define KVMILL_CLIENT_C_API_WATCH_H_

#include <sys/types.h>
#include <unistd.h>

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "client/events.h"
#include "client/kvmill_events.h"
#include "storage/core/mutex.h"

struct kvmill_result;

namespace kvmill::c_api {

class Queue;

// Hands batches to a queue, one at a time. Thread-safe.
class Watcher : public std::enable_shared_from_this<Watcher> {
 public:
  // `end`: the result of the operation, which has begun at the queue.
  Watcher(std::shared_ptr<Queue> queue, std::uint64_t tag, std::unique_ptr<kvmill_result> end);
  ~Watcher();

  // Once. Until Close the stream calls Pull, when there is something again.
  void Begin(std::unique_ptr<EventStream> stream) noexcept;
  // Ends the operation with CANCELLED, unless it has ended. In a child of fork() what has threads
  // is left alone.
  void Close();
  absl::Status trouble();
  pid_t pid() const { return pid_; }

  // The next batch, unless one is with the caller.
  void Pull();
  // It was freed.
  void Freed();

 private:
  void End(const absl::Status& status) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void LeaveAlone() ABSL_NO_THREAD_SAFETY_ANALYSIS;

  const std::uint64_t tag_;
  const pid_t pid_ = getpid();
  Mutex mu_;                                           // Before the stream's and the queue's.
  std::shared_ptr<Queue> queue_ ABSL_GUARDED_BY(mu_);  // Until it ends.
  std::unique_ptr<kvmill_result> end_ ABSL_GUARDED_BY(mu_);
  std::unique_ptr<EventStream> stream_ ABSL_GUARDED_BY(mu_);
  bool is_out_ ABSL_GUARDED_BY(mu_) = false;  // A batch, in the queue or with the caller.
};

// The value of a KVMILL_WATCH_BATCH.
struct WatchBatch {
  // C's strings of the namespaces that its events name.
  struct Space {
    std::shared_ptr<const WatchedNamespace> of;
    std::string fingerprint_hex;
    kvmill_watched_namespace as_c = {};
  };

  explicit WatchBatch(EventBatch from, std::weak_ptr<Watcher> of);
  ~WatchBatch();
  WatchBatch(const WatchBatch&) = delete;
  WatchBatch& operator=(const WatchBatch&) = delete;

  const EventBatch batch;
  std::string epoch_hex;                                             // Empty: no position.
  std::map<const WatchedNamespace*, std::unique_ptr<Space>> spaces;  // Never null.

 private:
  const std::weak_ptr<Watcher> watcher_;
};

}  // namespace kvmill::c_api

struct kvmill_watch {
  std::shared_ptr<kvmill::c_api::Watcher> watcher;
};

#endif  // KVMILL_CLIENT_C_API_WATCH_H_
