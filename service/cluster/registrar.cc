#include "service/cluster/registrar.h"

#include <algorithm>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"

namespace kvmill {
namespace {

constexpr std::int64_t kBackOffNanos = 50'000'000;
constexpr std::int64_t kParts = 3;  // Renewed when a third of the lease is over.
// An answer that does not come costs a sixth: the lease survives the loss of three in a row.
constexpr std::int64_t kTryParts = 6;

}  // namespace

Registrar::Registrar(Loop& loop, Registry& registry, Options options, Calls calls)
    : loop_(loop),
      registry_(registry),
      options_(std::move(options)),
      calls_(std::move(calls)),
      own_(options_.registration),
      back_off_(kBackOffNanos, options_.back_off_nanos_max, options_.seed),
      keep_alive_back_off_(
          kBackOffNanos,
          std::min(options_.back_off_nanos_max, options_.lease_seconds * 1'000'000'000 / kTryParts),
          options_.seed + 1),
      seconds_(options_.lease_seconds) {}

Registrar::~Registrar() { DropLease(); }

void Registrar::StopWaiting() {
  if (timer_ != 0) loop_.Cancel(std::exchange(timer_, 0));
}

void Registrar::WaitFor(std::int64_t nanos) {
  StopWaiting();
  timer_ = loop_.After(nanos, [this] {
    timer_ = 0;
    Step();
  });
}

void Registrar::Become(State state, const absl::Status& problem) {
  if (state_ == state && problem_ == problem) return;
  state_ = state;
  problem_ = problem;
  calls_.changed();
}

void Registrar::Failed(const absl::Status& why) {
  Become(state_ == State::kRefused ? state_ : State::kJoining, why);
  WaitFor(back_off_.Next());
}

void Registrar::SetState(MemberState state) {
  if (own_.member.state == state) return;
  own_.member.state = state;
  unwritten_ = true;
  if (state_ == State::kRegistered) StopWaiting();
  Step();
}

void Registrar::Step() {
  if (state_ == State::kLeft || call_ != 0 || timer_ != 0) return;
  if (lease_ == 0) return Grant();
  if (unwritten_) Write();
}

void Registrar::Grant() {
  const std::int64_t sent = Now();
  call_ = registry_.Grant(options_.lease_seconds, sent + options_.call_nanos,
                          [this, sent](absl::StatusOr<Registry::Lease> lease) {
                            call_ = 0;
                            if (!lease.ok()) return Failed(lease.status());
                            lease_ = lease->id;
                            seconds_ = lease->seconds;
                            calls_.saw(lease->header, false);
                            KeepAliveAt(sent + LeaseNanos() / kParts);
                            Step();
                          });
}

void Registrar::Write() {
  const absl::StatusOr<std::string> value = EncodeRegistration(own_);
  if (!value.ok()) return Become(State::kJoining, value.status());
  unwritten_ = false;
  call_ = registry_.Put(
      {options_.key, *value, lease_, revision_}, Now() + options_.call_nanos,
      [this, written = *value, lease = lease_](const absl::StatusOr<Registry::Written>& result) {
        call_ = 0;
        if (lease_ != lease) {  // Lost meanwhile: nobody knows what this did.
          unwritten_ = true;
          return Step();
        }
        if (!result.ok()) {
          unwritten_ = true;
          if (absl::IsNotFound(result.status())) return LoseLease();
          return Failed(result.status());
        }
        calls_.saw(result->header, true);
        if (result->done) return Registered(result->current->mod_revision);
        Conflict(result->current, written);
      });
}

void Registrar::Registered(Registry::Revision revision) {
  revision_ = revision;
  was_registered_ = true;
  back_off_.Reset();
  Become(State::kRegistered, absl::OkStatus());
  Step();
}

void Registrar::Conflict(const std::optional<Registry::Entry>& current,
                         const std::string& written) {
  unwritten_ = true;
  if (!current.has_value()) {
    revision_ = 0;
    return WaitFor(0);
  }
  const absl::StatusOr<Registration> holder = DecodeRegistration(current->value);
  const bool own = holder.ok() && IsOwn(*holder);
  if (own && current->lease == lease_ && current->value == written) {
    unwritten_ = false;  // By an earlier attempt, whose answer was lost.
    return Registered(current->mod_revision);
  }
  const bool predecessor =
      holder.ok() && !was_registered_ && !own_.holder.empty() && holder->holder == own_.holder;
  if (own || predecessor) {
    revision_ = current->mod_revision;
    return WaitFor(0);
  }
  Refuse(*current, holder);
}

void Registrar::Refuse(const Registry::Entry& entry, const absl::StatusOr<Registration>& holder) {
  unwritten_ = true;
  revision_ = 0;
  // Usually the roster says when the entry goes.
  WaitFor(LeaseNanos());
  Become(
      State::kRefused,
      absl::FailedPreconditionError(absl::StrCat(
          "node id \"", own_.member.id, "\" is held by ",
          holder.ok()
              ? absl::StrCat("incarnation ", absl::BytesToHexString(holder->member.incarnation),
                             " at ", holder->member.address)
              : absl::StrCat("an entry that cannot be read (", holder.status().message(), ")"),
          " until its lease ends; if that is another node, one of the two needs another id (key ",
          entry.key, ")")));
}

void Registrar::Seen(const Registry::Entry& entry, const Registration& registration) {
  if (state_ == State::kLeft || entry.mod_revision <= revision_) return;
  if (IsOwn(registration)) {
    revision_ = entry.mod_revision;
  } else if (state_ == State::kRegistered) {
    Refuse(entry, registration);
  }
}

void Registrar::SeenGone(Registry::Revision revision) {
  if (state_ == State::kLeft || revision <= revision_) return;
  if (state_ == State::kJoining) return;
  revision_ = 0;
  unwritten_ = true;
  StopWaiting();
  Become(State::kJoining, absl::OkStatus());
  Step();
}

void Registrar::KeepAliveAt(std::int64_t nanos) {
  if (keep_alive_timer_ != 0) loop_.Cancel(keep_alive_timer_);
  keep_alive_timer_ = loop_.At(nanos, [this] {
    keep_alive_timer_ = 0;
    KeepAlive();
  });
}

void Registrar::KeepAlive() {
  const std::int64_t sent = Now();
  keep_alive_call_ =
      registry_.KeepAlive(lease_, sent + std::min(options_.call_nanos, LeaseNanos() / kTryParts),
                          [this, sent](const absl::StatusOr<Registry::Lease>& lease) {
                            keep_alive_call_ = 0;
                            if (absl::IsNotFound(lease.status())) return LoseLease();
                            if (!lease.ok()) {
                              // Even when its time is over: a new leader gives leases their whole
                              // time again.
                              KeepAliveAt(Now() + keep_alive_back_off_.Next());
                              if (state_ == State::kRegistered) Become(state_, lease.status());
                              return;
                            }
                            keep_alive_back_off_.Reset();
                            KeepAliveAt(sent + LeaseNanos() / kParts);
                            if (state_ == State::kRegistered) Become(state_, absl::OkStatus());
                            calls_.saw(lease->header, false);
                          });
}

void Registrar::LoseLease() {
  Forget();
  calls_.lost_lease();
}

void Registrar::Forget() {
  if (state_ == State::kLeft) return;
  DropLease();
  Become(State::kJoining, absl::OkStatus());
  WaitFor(back_off_.Next());
}

void Registrar::DropLease() {
  StopWaiting();
  if (keep_alive_timer_ != 0) loop_.Cancel(std::exchange(keep_alive_timer_, 0));
  for (Registry::CallId* call : {&call_, &keep_alive_call_}) {
    if (*call != 0) registry_.Cancel(std::exchange(*call, 0));
  }
  lease_ = 0;
  revision_ = 0;
  unwritten_ = true;
}

void Registrar::Leave(std::int64_t deadline_nanos, std::function<void(const absl::Status&)> done) {
  const Registry::LeaseId lease = lease_;
  DropLease();
  Become(State::kLeft, absl::OkStatus());
  if (lease == 0) {
    timer_ = loop_.After(0, [this, done = std::move(done)] {
      timer_ = 0;
      done(absl::OkStatus());
    });
    return;
  }
  // A Put that is still on its way finds no lease, or its entry goes with it.
  call_ = registry_.Revoke(
      lease, deadline_nanos,
      [this, done = std::move(done)](const absl::StatusOr<Registry::Header>& result) {
        call_ = 0;
        done(absl::IsNotFound(result.status()) ? absl::OkStatus() : result.status());
      });
}

}  // namespace kvmill
