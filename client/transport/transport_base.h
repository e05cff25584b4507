// What all transports have in common: offers, connections and their ends, timers and tasks. A
// concrete one brings wires and a thread. Internal to client/transport/.
#ifndef KVMILL_CLIENT_TRANSPORT_TRANSPORT_BASE_H_
#define KVMILL_CLIENT_TRANSPORT_TRANSPORT_BASE_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "client/transport/connection_core.h"
#include "client/transport/handshake.h"
#include "client/transport/transport.h"
#include "client/transport/wire.h"
#include "storage/core/clock.h"
#include "storage/core/mutex.h"

namespace kvmill {

// INVALID_ARGUMENT naming the option.
absl::Status CheckTransportOptions(const TransportOptions& options);

class TransportBase : public Transport, public TransportLoop, public ConnectionOwner {
 public:
  absl::StatusOr<Offer> MakeOffer(std::uint64_t owner_tag,
                                  std::optional<NodeIdentity::Id> only_for) override;
  void Connect(Offer offer, Connecting connecting) override;
  TransportStats stats() const override;
  std::int64_t NowNanos() const override { return clock_->MonotonicNanos(); }
  void RunAt(std::int64_t nanos, absl::AnyInvocable<void()> task) override;
  void Post(absl::AnyInvocable<void()> task) override;

 protected:
  // `clock` outlives it.
  TransportBase(const TransportOptions& options, const Clock* clock);
  ~TransportBase() override = default;

  // Starts to reach a peer; failures may also come as OnBroken. On the loop.
  virtual absl::StatusOr<std::unique_ptr<Wire>> DialWire(const std::string& address,
                                                         WireEvents* events) = 0;
  // Ends the loop's sleep. Any thread; must not call back.
  virtual void Wake() = 0;

  // A peer dials. False: there are too many connections, `make` was not called.
  bool AcceptWire(const std::function<absl::StatusOr<std::unique_ptr<Wire>>(WireEvents*)>& make);

  // All of these on the loop. True: something ran.
  bool RunTasks();
  bool RunDue();
  std::int64_t NextDueNanos();  // INT64_MAX: never.
  // The loop is about to sleep: until when, at most; INT64_MIN: there is something to do. From here
  // to WakeUp whoever posts something calls Wake.
  std::int64_t FallAsleep();
  void WakeUp();
  // Of who entered the loop: ends its sleep if something was posted, or is due before it ends.
  void EndSleepIfDue(std::int64_t due_nanos);
  // As FallAsleep, of a thread beside the sleeping loop.
  bool StandInFallsAsleep();
  bool has_tasks() const {
    const MutexLock lock(mu_);
    return !tasks_.empty();
  }
  // The transport is being destroyed: nothing new, and every connection ends.
  void Shutdown();
  // Here, and not over.
  std::uint64_t calls_started() const {
    return counters_.calls_started.load(std::memory_order_relaxed);
  }
  bool has_connections() const { return !connections_.empty(); }

  void set_rdma(bool expected, bool required) {
    settings_.rdma_expected = expected;
    settings_.rdma_required = required;
  }
  const TransportOptions options_;

 private:
  struct Dialing {
    Offer offer;
    Connecting connecting;
    std::size_t next_address = 0;
    std::int64_t deadline_nanos = 0;
  };
  struct Entry {
    std::shared_ptr<ConnectionCore> core;
    std::shared_ptr<Dialing> dialing;  // Null: accepted. Shared with the next attempt's entry.
    bool in_handshake = true;
  };

  // Whether the loop sleeps and must not: then Wake follows, without the lock.
  bool EndsSleep(std::int64_t due_nanos) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void DialNext(std::shared_ptr<Dialing> dialing, absl::Status last);
  void OnOpen(const std::shared_ptr<ConnectionCore>& core) override;
  void OnEnded(const std::shared_ptr<ConnectionCore>& core, bool was_open,
               const absl::Status& why) override;
  void OnCall(const std::shared_ptr<ConnectionCore>& core,
              std::unique_ptr<IncomingCall> call) override;

  const Clock* const clock_;
  ConnectionSettings settings_;
  OfferBook book_;
  TransportCounters counters_;
  std::unordered_map<ConnectionCore*, Entry> connections_;
  std::size_t accepted_handshakes_ = 0;
  bool stopping_ = false;
  std::atomic<std::uint64_t> connection_count_{0};  // For stats, like those below.
  std::atomic<std::uint64_t> handshakes_refused_{0};
  std::atomic<std::uint64_t> connections_broken_{0};

  mutable Mutex mu_;
  bool asleep_ ABSL_GUARDED_BY(mu_) = false;
  std::int64_t sleeps_until_ ABSL_GUARDED_BY(mu_) = INT64_MAX;
  std::vector<absl::AnyInvocable<void()>> tasks_ ABSL_GUARDED_BY(mu_);
  std::multimap<std::int64_t, absl::AnyInvocable<void()>> timers_ ABSL_GUARDED_BY(mu_);
  std::vector<absl::AnyInvocable<void()>> running_;  // RunTasks's; of the loop.
};

}  // namespace kvmill

#endif  // KVMILL_CLIENT_TRANSPORT_TRANSPORT_BASE_H_
