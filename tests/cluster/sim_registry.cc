#include "tests/cluster/sim_registry.h"

#include <utility>

#include "absl/strings/str_cat.h"

namespace kvmill {

namespace {

absl::Status CheckKey(const std::string& key) {
  if (!key.empty() && key.size() <= Registry::kKeyBytesMax) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("a key of ", key.size(), " bytes: want 1 to ", Registry::kKeyBytesMax));
}

}  // namespace

SimRegistry::~SimRegistry() {
  *alive_ = false;
  for (auto& [id, call] : calls_) loop_.Cancel(call.timer);
  for (auto& [id, watch] : watches_) {
    loop_.Cancel(watch.timer);
    etcd_.CloseWatch(watch.remote);
  }
}

std::function<void()> SimRegistry::OnLoop(std::function<void()> task) {
  return [this, alive = alive_, task = std::move(task)] {
    if (!*alive) return;
    loop_.Post([alive, task] {
      if (*alive) task();
    });
  };
}

template <typename Answer>
Registry::CallId SimRegistry::Start(absl::Status bounds, std::int64_t deadline_nanos,
                                    Done<Answer> done,
                                    std::function<absl::StatusOr<Answer>(SimEtcd&)> run) {
  const CallId id = next_++;
  Call call;
  // Shared by the answer and the failure, of which one runs it.
  auto shared = std::make_shared<Done<Answer>>(std::move(done));
  call.fail = [shared](const absl::Status& status) { (*shared)(status); };
  if (!bounds.ok()) {
    call.timer = loop_.After(0, [this, id, bounds] { Fail(id, bounds); });
    calls_.emplace(id, std::move(call));
    return id;
  }
  call.timer = loop_.At(deadline_nanos, [this, id] {
    Fail(id, absl::DeadlineExceededError("etcd did not answer in time"));
  });
  calls_.emplace(id, std::move(call));
  // A server does not begin what nobody waits for any more.
  const std::int64_t ends = etcd_.now() + deadline_nanos - loop_.clock().MonotonicNanos();
  auto request = [this, id, shared, run = std::move(run), ends, alive = alive_, etcd = &etcd_,
                  network = &network_, machine = machine_] {
    if (etcd->now() > ends) return;
    absl::StatusOr<Answer> answer = run(*etcd);
    if (!*alive) return;
    network->Send(etcd->machine(), machine, OnLoop([this, id, shared, answer] {
                    const auto found = calls_.find(id);
                    if (found == calls_.end()) return;
                    loop_.Cancel(found->second.timer);
                    calls_.erase(found);
                    (*shared)(answer);
                  }));
  };
  etcd_.Receive(machine_, std::move(request), OnLoop([this, id] {
                  Fail(id, absl::UnavailableError("etcd refuses connections"));
                }));
  return id;
}

void SimRegistry::Fail(CallId id, const absl::Status& status) {
  auto node = calls_.extract(id);
  if (node.empty()) return;
  loop_.Cancel(node.mapped().timer);
  node.mapped().fail(status);
}

Registry::CallId SimRegistry::Grant(std::int64_t seconds, std::int64_t deadline_nanos,
                                    Done<Lease> done) {
  absl::Status bounds;
  if (seconds < kLeaseSecondsMin || seconds > kLeaseSecondsMax) {
    bounds = absl::InvalidArgumentError(absl::StrCat("a lease of ", seconds, " s: want ",
                                                     kLeaseSecondsMin, " to ", kLeaseSecondsMax));
  }
  return Start<Lease>(bounds, deadline_nanos, std::move(done),
                      [seconds](SimEtcd& etcd) { return etcd.Grant(seconds); });
}

Registry::CallId SimRegistry::KeepAlive(LeaseId lease, std::int64_t deadline_nanos,
                                        Done<Lease> done) {
  return Start<Lease>(absl::OkStatus(), deadline_nanos, std::move(done),
                      [lease](SimEtcd& etcd) { return etcd.KeepAlive(lease); });
}

Registry::CallId SimRegistry::Revoke(LeaseId lease, std::int64_t deadline_nanos,
                                     Done<Header> done) {
  return Start<Header>(absl::OkStatus(), deadline_nanos, std::move(done),
                       [lease](SimEtcd& etcd) { return etcd.Revoke(lease); });
}

Registry::CallId SimRegistry::Put(PutRequest request, std::int64_t deadline_nanos,
                                  Done<Written> done) {
  absl::Status bounds = CheckKey(request.key);
  if (bounds.ok() && request.value.size() > kValueBytesMax) {
    bounds = absl::InvalidArgumentError(
        absl::StrCat("a value of ", request.value.size(), " bytes: at most ", kValueBytesMax));
  }
  if (bounds.ok() && request.lease == 0) bounds = absl::InvalidArgumentError("no lease");
  return Start<Written>(
      bounds, deadline_nanos, std::move(done),
      [request = std::move(request)](SimEtcd& etcd) { return etcd.Put(request); });
}

Registry::CallId SimRegistry::Delete(std::string key, Revision expected,
                                     std::int64_t deadline_nanos, Done<Written> done) {
  absl::Status bounds = CheckKey(key);
  if (bounds.ok() && expected == 0) bounds = absl::InvalidArgumentError("no revision expected");
  return Start<Written>(
      bounds, deadline_nanos, std::move(done),
      [key = std::move(key), expected](SimEtcd& etcd) { return etcd.Delete(key, expected); });
}

Registry::CallId SimRegistry::List(std::string prefix, std::int64_t deadline_nanos,
                                   Done<Listing> done) {
  const absl::Status bounds = CheckKey(prefix);
  return Start<Listing>(bounds, deadline_nanos, std::move(done),
                        [prefix = std::move(prefix)](SimEtcd& etcd) -> absl::StatusOr<Listing> {
                          return etcd.List(prefix);
                        });
}

Registry::CallId SimRegistry::Watch(std::string prefix, Revision from_revision,
                                    std::int64_t silence_nanos, WatchCalls calls) {
  const CallId id = next_++;
  OpenWatch& watch = watches_[id];
  watch.calls = std::move(calls);
  watch.silence = silence_nanos;
  watch.heard = loop_.clock().MonotonicNanos();
  watch.timer = loop_.After(silence_nanos / 3, [this, id] { AskWatch(id); });
  auto on_message = [this, id, alive = alive_](const SimEtcd::WatchMessage& message) {
    if (*alive) OnLoop([this, id, message] { OnMessage(id, message); })();
  };
  auto request = [this, id, prefix = std::move(prefix), from_revision, on_message, alive = alive_] {
    if (!*alive) return;
    const auto found = watches_.find(id);
    if (found == watches_.end()) return;  // Cancelled on the way.
    found->second.remote = etcd_.OpenWatch(machine_, prefix, from_revision, on_message);
  };
  etcd_.Receive(machine_, std::move(request), OnLoop([this, id] {
                  Break(id, absl::UnavailableError("etcd refuses connections"));
                }));
  return id;
}

void SimRegistry::AskWatch(CallId id) {
  OpenWatch& watch = watches_.at(id);
  const std::int64_t now = loop_.clock().MonotonicNanos();
  if (now - watch.heard >= watch.silence) {
    return Break(id, absl::DeadlineExceededError("etcd was silent for too long"));
  }
  watch.timer = loop_.After(watch.silence / 3, [this, id] { AskWatch(id); });
  if (watch.remote == 0) return;
  auto on_message = [this, id, alive = alive_](const SimEtcd::WatchMessage& message) {
    if (*alive) OnLoop([this, id, message] { OnMessage(id, message); })();
  };
  etcd_.Receive(
      machine_,
      [etcd = &etcd_, remote = watch.remote, to = machine_, on_message] {
        etcd->Ping(remote, to, on_message);
      },
      OnLoop([this, id] { Break(id, absl::UnavailableError("etcd refuses connections")); }));
}

void SimRegistry::OnMessage(CallId id, const SimEtcd::WatchMessage& message) {
  const auto found = watches_.find(id);
  if (found == watches_.end()) return;
  found->second.heard = loop_.clock().MonotonicNanos();
  using Kind = SimEtcd::WatchMessage::Kind;
  switch (message.kind) {
    case Kind::kAlive:
      return;
    // Copied: what runs may cancel this watch.
    case Kind::kStarted: {
      const auto started = found->second.calls.started;
      return started(message.header);
    }
    case Kind::kEvents: {
      const auto events = found->second.calls.events;
      return events(message.events);
    }
    case Kind::kCompacted: {
      auto node = watches_.extract(found);
      loop_.Cancel(node.mapped().timer);
      return node.mapped().calls.compacted(message.compacted);
    }
    case Kind::kBroken:
      return Break(id, absl::UnavailableError("etcd closed the connection"));
  }
}

void SimRegistry::Break(CallId id, const absl::Status& status) {
  auto node = watches_.extract(id);
  if (node.empty()) return;
  loop_.Cancel(node.mapped().timer);
  etcd_.CloseWatch(node.mapped().remote);
  node.mapped().calls.broken(status);
}

void SimRegistry::Cancel(CallId id) {
  if (auto call = calls_.extract(id); !call.empty()) loop_.Cancel(call.mapped().timer);
  if (auto watch = watches_.extract(id); !watch.empty()) {
    loop_.Cancel(watch.mapped().timer);
    etcd_.CloseWatch(watch.mapped().remote);
  }
}

}  // namespace kvmill
