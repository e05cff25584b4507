// Registrations of memory that outlive the daemon (WhenAway::kMiss): each has a number of the
// client's own, and is made anew with every session. Internal to client/.
#ifndef KVMILL_CLIENT_STANDING_MEMORY_H_
#define KVMILL_CLIENT_STANDING_MEMORY_H_

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "client/away.h"
#include "client/connection.h"
#include "client/door_client.h"
#include "client/page_store_stream.h"
#include "storage/core/mutex.h"

namespace kvmill {

// Thread-safe. Has no threads and no timers: memory is registered again when something is stored
// from it, and when any call finds that a daemon answers.
class StandingMemory {
 public:
  using Deadline = Connection::Deadline;
  // Registers `memory` with the daemon: fills in session and registration, and calls the last
  // argument once, on whatever thread.
  using Register =
      std::function<void(const ClientNamespace& ns, const std::shared_ptr<RegisteredMemory>& memory,
                         Deadline deadline, std::function<void(absl::Status)> done)>;

  // `timeout`: of registering again. `away` outlives it.
  StandingMemory(const Away& away, absl::Duration timeout, Register register_memory)
      : away_(away), timeout_(timeout), register_(std::move(register_memory)) {}

  // `done` once, with the number; also while the daemon is away. What it refuses is an error, and
  // there is no number.
  void Add(const ClientNamespace& ns, const EngineGeometry& geometry, Deadline deadline,
           Client::Done<std::uint64_t> done);
  // As the session that lives has it. UNAVAILABLE: none has; it is being registered, or will be.
  // NOT_FOUND: there is no such number.
  absl::StatusOr<RegisteredMemoryPtr> Find(std::uint64_t number);
  // The daemon does not know it, as it turned out.
  void Lost(const RegisteredMemoryPtr& memory);
  // Some of it may have gone with a session.
  void SessionEnded() { check_.store(true); }
  // A daemon answers: what it does not know is registered.
  void Restore();

  // It will not be registered again. `done` once, when it is not being registered right now, with
  // what the session that lives has of it, or null. NOT_FOUND: there is no such number. To be
  // followed by Forget, or by another Remove.
  void Remove(std::uint64_t number, std::function<void(absl::StatusOr<RegisteredMemoryPtr>)> done);
  void Forget(std::uint64_t number);

 private:
  struct Entry {
    std::uint64_t number = 0;
    ClientNamespace ns;
    EngineGeometry geometry;           // With the descriptors below.
    std::vector<OwnedFd> descriptors;  // Duplicates: the caller may close its own.
    // Guarded by mu_:
    RegisteredMemoryPtr memory;  // Of the last session that had it; null: none has.
    bool busy = false;           // Being registered.
    bool removed = false;
    std::chrono::milliseconds pause{0};
    std::chrono::steady_clock::time_point not_before;
    std::vector<std::function<void()>> when_idle;
    std::string said;  // Why it was refused, in the log.
  };
  // Shared with the calls that register it.
  using EntryPtr = std::shared_ptr<Entry>;

  static bool Lives(const Entry& entry);
  // Whether the caller is to register it, which is then busy.
  bool Due(Entry& entry) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void RegisterNow(const EntryPtr& entry, Deadline deadline,
                   std::function<void(absl::Status)> done);
  Deadline NewDeadline() const;

  const Away& away_;
  const absl::Duration timeout_;
  const Register register_;
  std::atomic<bool> check_{false};  // Restore has something to do, perhaps.
  Mutex mu_;
  std::map<std::uint64_t, EntryPtr> entries_ ABSL_GUARDED_BY(mu_);
  std::uint64_t next_number_ ABSL_GUARDED_BY(mu_) = 1;
};

}  // namespace kvmill

#endif  // KVMILL_CLIENT_STANDING_MEMORY_H_
