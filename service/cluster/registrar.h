// A node's own entry: keeps it in the registry for as long as the node lives, and never has two
// processes hold one id.
//
// The entry lives by a lease, which is renewed at a third of its time. A lease that ended, for
// whatever reason, is replaced by another one and the entry written again; the node serves on
// meanwhile. An id that another incarnation holds is refused until that entry goes, with one
// exception: a process that has not been registered before takes over from an entry with its own
// holder (Registration), because that one's process is dead. So a node that was killed is back at
// once, and two that were copied from one another do not take the id from each other for ever.
// Every write compares with the entry that it replaces. On the loop.
#ifndef KVMILL_SERVICE_CLUSTER_REGISTRAR_H_
#define KVMILL_SERVICE_CLUSTER_REGISTRAR_H_

#include <cstdint>
#include <functional>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "service/cluster/back_off.h"
#include "service/cluster/loop.h"
#include "service/cluster/registration.h"
#include "service/cluster/registry.h"

namespace kvmill {

class Registrar {
 public:
  enum class State : std::uint8_t {
    kJoining,     // Not there yet, or not there any more.
    kRegistered,  // As far as is known: the lease may have ended a moment ago.
    kRefused,     // Another incarnation holds the id: `problem` says which.
    kLeft,
  };
  struct Options {
    std::string key;
    Registration registration;  // One that EncodeRegistration takes.
    std::int64_t lease_seconds = 0;
    std::int64_t call_nanos = 0;
    std::int64_t back_off_nanos_max = 0;
    std::uint64_t seed = 0;
  };
  struct Calls {
    std::function<void()> changed;  // `state` or `problem`.
    // Of every answer. `exact`: its revision is none of those that may be old.
    std::function<void(const Registry::Header&, bool exact)> saw;
    std::function<void()> lost_lease;  // It ended early, or is of another history.
  };

  Registrar(Loop& loop, Registry& registry, Options options, Calls calls);
  ~Registrar();
  Registrar(const Registrar&) = delete;
  Registrar& operator=(const Registrar&) = delete;

  void Start() { Step(); }
  // Writes the entry again.
  void SetState(MemberState state);
  // Ends the lease, and the entry with it. `done` once, by the deadline. Nothing else is called
  // after this; start nothing else.
  void Leave(std::int64_t deadline_nanos, std::function<void(const absl::Status&)> done);

  // What the roster sees of the own key.
  void Seen(const Registry::Entry& entry, const Registration& registration);
  void SeenGone(Registry::Revision revision);
  // What was granted and written was in another history.
  void Forget();

  State state() const { return state_; }
  const absl::Status& problem() const { return problem_; }

 private:
  void Step();
  void Grant();
  void Write();
  void Conflict(const std::optional<Registry::Entry>& current, const std::string& written);
  void Refuse(const Registry::Entry& entry, const absl::StatusOr<Registration>& holder);
  void Registered(Registry::Revision revision);
  void Failed(const absl::Status& why);
  void KeepAliveAt(std::int64_t nanos);
  void KeepAlive();
  void LoseLease();
  void DropLease();  // And whatever is in progress.
  void Become(State state, const absl::Status& problem);
  void WaitFor(std::int64_t nanos);
  void StopWaiting();

  std::int64_t Now() const { return loop_.clock().MonotonicNanos(); }
  std::int64_t LeaseNanos() const { return seconds_ * 1'000'000'000; }
  bool IsOwn(const Registration& other) const {
    return other.member.incarnation == own_.member.incarnation;
  }

  Loop& loop_;
  Registry& registry_;
  const Options options_;
  const Calls calls_;
  Registration own_;
  BackOff back_off_;
  BackOff keep_alive_back_off_;

  State state_ = State::kJoining;
  absl::Status problem_;
  Registry::LeaseId lease_ = 0;
  std::int64_t seconds_;             // Of the lease, as it was granted.
  Registry::Revision revision_ = 0;  // Of the entry to replace; 0: there is none.
  bool unwritten_ = true;            // The entry does not say what it should.
  bool was_registered_ = false;
  Registry::CallId call_ = 0;  // Grant, Put or, in the end, Revoke.
  Registry::CallId keep_alive_call_ = 0;
  Loop::TimerId timer_ = 0;  // Until the next attempt.
  Loop::TimerId keep_alive_timer_ = 0;
};

}  // namespace kvmill

#endif  // KVMILL_SERVICE_CLUSTER_REGISTRAR_H_
