// The client's session: opened when something needs one, kept alive by heartbeats, resumed when its
// stream broke, and known to be over as soon as that can be known.
//
// Internal to client/. Thread-safe. Uses the threads of its Connection, which must be destroyed
// first.
#ifndef KVMILL_CLIENT_CLIENT_SESSION_H_
#define KVMILL_CLIENT_CLIENT_SESSION_H_

#include <grpcpp/support/async_stream.h>

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
#include "client/connection.h"
#include "kvmill/v1/engine.pb.h"
#include "storage/core/mutex.h"

namespace kvmill {

// A session as the daemon knows it. Shared with what it owns: a mapping asks it whether its leases
// can still be there.
struct SessionHandle {
  std::string id;
  std::uint64_t pass = 0;  // Of the local door; 0 over TCP.
  std::uint32_t lease_ms_max = 0;
  std::string boot_id;                    // Of the daemon that opened it.
  std::shared_ptr<const DoorPass> entry;  // Shared with the door; null over TCP.
  // The daemon holds nothing for it any more. Never cleared; a reader that sees false a moment too
  // long has the generations and headers of its pages.
  std::atomic<bool> ended{false};
};
using SessionPtr = std::shared_ptr<SessionHandle>;

// What the daemon says about a session without being asked. From a thread of the client.
struct SessionNotices {
  std::function<void()> draining;
  std::function<void(std::uint64_t leases)> leases_expired;
  std::function<void()> ended;
};

class ClientSession {
 public:
  using Deadline = Connection::Deadline;
  using Opened = std::function<void(absl::StatusOr<SessionPtr> session)>;

  ClientSession(Connection& connection, SessionNotices notices)
      : connection_(connection), notices_(std::move(notices)) {}

  // Calls `done` once with a session that has not ended, as far as is known.
  void Ensure(Deadline deadline, Opened done);
  // Stores of pages of `of`, which may have ended, read no more and nobody is in the middle of a
  // read: `done` is called once with OK when the daemon said so, or is known to have died.
  // DEADLINE_EXCEEDED: it may be reading.
  void CancelStores(const SessionPtr& of, std::vector<std::uint64_t> stores, Deadline deadline,
                    std::function<void(absl::Status)> done);
  // The daemon does not know it (any more).
  void Ended(const SessionPtr& session);
  // The connection with that pass of the local door is gone, and with it its session.
  void PassLost(std::uint64_t pass);
  // Closes a session over TCP, so that the daemon need not wait for it to be resumed; waits for the
  // daemon up to `wait`. A local one ends with the connection. No Ensure afterwards.
  void Close(std::chrono::milliseconds wait);

 private:
  class Stream;
  friend class Stream;
  struct Waiter {
    Deadline deadline;
    Opened done;
  };

  struct Cancel {
    SessionPtr of;
    std::vector<std::uint64_t> stores;
    Deadline deadline;
    std::function<void(absl::Status)> done;
    bool sent = false;  // On the stream that is open.
  };
  using Answered = std::vector<std::pair<std::function<void(absl::Status)>, absl::Status>>;

  // Sends what was not sent; those whose daemon has gone are answered.
  void SendCancels(Answered* answered) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Completed(std::uint64_t number);
  void StartStream() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Of the stream: it is open, or over.
  void StreamOpened(const SessionPtr& session);
  void StreamEnded(const absl::Status& status, bool opened);
  SessionPtr current();
  void SetTimer(std::chrono::steady_clock::time_point when) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void OnTimer();

  Connection& connection_;
  const SessionNotices notices_;

  Mutex mu_;
  CondVar changed_;
  SessionPtr session_ ABSL_GUARDED_BY(mu_);  // Null before the first and after the end of one.
  Stream* stream_ ABSL_GUARDED_BY(mu_) = nullptr;  // Deletes itself; null when there is none.
  bool stream_open_ ABSL_GUARDED_BY(mu_) = false;
  bool stream_is_fresh_ ABSL_GUARDED_BY(mu_) = false;  // It opens a session, resumes none.
  std::chrono::steady_clock::time_point opening_since_ ABSL_GUARDED_BY(mu_);
  std::chrono::milliseconds pause_ ABSL_GUARDED_BY(mu_){0};  // Before the next attempt to resume.
  std::chrono::steady_clock::time_point next_attempt_ ABSL_GUARDED_BY(mu_);
  std::chrono::milliseconds heartbeat_ ABSL_GUARDED_BY(mu_){5000};
  std::chrono::steady_clock::time_point next_heartbeat_ ABSL_GUARDED_BY(mu_);
  std::chrono::milliseconds resume_grace_ ABSL_GUARDED_BY(mu_){30000};
  std::chrono::steady_clock::time_point broken_since_ ABSL_GUARDED_BY(mu_);
  std::vector<Waiter> waiters_ ABSL_GUARDED_BY(mu_);
  std::map<std::uint64_t, Cancel> cancels_ ABSL_GUARDED_BY(mu_);  // That are not answered.
  std::uint64_t next_cancel_ ABSL_GUARDED_BY(mu_) = 1;
  bool timer_set_ ABSL_GUARDED_BY(mu_) = false;
  std::chrono::steady_clock::time_point timer_at_ ABSL_GUARDED_BY(mu_);
  bool closed_ ABSL_GUARDED_BY(mu_) = false;
};

}  // namespace kvmill

#endif  // KVMILL_CLIENT_CLIENT_SESSION_H_
