#include "tests/cluster/sim_etcd.h"

#include <algorithm>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"

namespace kvmill {

void SimEtcd::Begin() {
  cluster_id_ = static_cast<std::uint64_t>(events_.Uniform(1, INT64_MAX));
  revision_ = 1;
  compacted_ = 0;
  data_ = {};
  history_.clear();
  backup_ = {cluster_id_, revision_, {}};
}

void SimEtcd::Receive(Machine from, std::function<void()> request, std::function<void()> refused) {
  network_.Send(from, machine_,
                [this, from, request = std::move(request), refused = std::move(refused)]() mutable {
                  if (state_ == State::kRunning) {
                    ExpireDue();
                    request();
                  } else if (state_ == State::kStopped) {
                    waiting_.push_back(std::move(request));
                  } else {
                    network_.Send(machine_, from, std::move(refused));
                  }
                });
}

void SimEtcd::EndConnections() {
  waiting_.clear();
  for (auto& [id, watch] : std::exchange(watches_, {})) {
    // What was on its way never comes. The connection is reset, which nobody hears where the
    // network is parted.
    const bool scheduled = !watch->under_way.empty();
    watch->under_way.clear();
    if (scheduled) {
      // The event that would have delivered it delivers this.
      watch->under_way.emplace_back(events_.now(), WatchMessage{WatchMessage::Kind::kBroken});
    } else {
      SendTo(watch, {WatchMessage::Kind::kBroken}, 0);
    }
  }
}

void SimEtcd::Kill() {
  if (state_ == State::kDead) return;
  state_ = State::kDead;
  EndConnections();
  events_.Cancel(std::exchange(expiry_, 0));
}

void SimEtcd::RenewAll() {
  for (auto& [id, lease] : data_.leases) lease.ends = events_.now() + lease.seconds * kSimSecond;
  ScheduleExpiry();
}

void SimEtcd::Start() {
  if (state_ != State::kDead) return;
  state_ = State::kRunning;
  RenewAll();
}

void SimEtcd::Stop() {
  if (state_ == State::kRunning) state_ = State::kStopped;
}

void SimEtcd::Continue() {
  if (state_ != State::kStopped) return;
  state_ = State::kRunning;
  ExpireDue();
  for (const auto& request : std::exchange(waiting_, {})) request();
}

void SimEtcd::Compact(Revision keep) {
  compacted_ = std::max(compacted_, revision_ - keep);
  while (!history_.empty() && history_.front().revision <= compacted_) history_.pop_front();
}

void SimEtcd::Wipe() {
  Kill();
  Begin();
  Start();
}

void SimEtcd::Backup() { backup_ = {cluster_id_, revision_, data_}; }

void SimEtcd::Restore(bool same_cluster) {
  Kill();
  const Saved saved = backup_;
  Begin();
  if (same_cluster) cluster_id_ = saved.cluster_id;
  revision_ = saved.revision;
  compacted_ = revision_;
  data_ = saved.data;
  Backup();
  Start();
}

void SimEtcd::ExpireAll() {
  for (auto& [id, lease] : data_.leases) lease.ends = events_.now();
  if (state_ == State::kRunning) ExpireDue();
}

void SimEtcd::ScheduleExpiry() {
  events_.Cancel(std::exchange(expiry_, 0));
  if (state_ != State::kRunning || data_.leases.empty()) return;
  std::int64_t first = INT64_MAX;
  for (const auto& [id, lease] : data_.leases) first = std::min(first, lease.ends);
  expiry_ = events_.At(first, [this] {
    expiry_ = 0;
    if (state_ == State::kRunning) ExpireDue();
  });
}

void SimEtcd::ExpireDue() {
  std::vector<LeaseId> due;
  for (const auto& [id, lease] : data_.leases) {
    if (lease.ends <= events_.now()) due.push_back(id);
  }
  for (const LeaseId id : due) EndLease(id);
  if (!due.empty() || expiry_ == 0) ScheduleExpiry();
}

void SimEtcd::EndLease(LeaseId id) {
  const auto node = data_.leases.extract(id);
  std::vector<Registry::Event> events;
  for (const std::string& key : node.mapped().keys) {
    data_.entries.erase(key);
    events.push_back({.deleted = true, .entry = {.key = key}});
  }
  if (!events.empty()) Commit(std::move(events));
}

absl::StatusOr<Registry::Lease> SimEtcd::Grant(std::int64_t seconds) {
  const LeaseId id = next_lease_++;
  data_.leases[id] = {.seconds = seconds, .ends = events_.now() + seconds * kSimSecond};
  ScheduleExpiry();
  return Registry::Lease{header(), id, seconds};
}

absl::StatusOr<Registry::Lease> SimEtcd::KeepAlive(LeaseId id) {
  const auto found = data_.leases.find(id);
  if (found == data_.leases.end()) {
    return absl::NotFoundError(absl::StrCat("lease ", id, " has ended"));
  }
  Lease& lease = found->second;
  lease.ends = events_.now() + lease.seconds * kSimSecond;
  ScheduleExpiry();
  return Registry::Lease{header(), id, lease.seconds};
}

absl::StatusOr<Registry::Header> SimEtcd::Revoke(LeaseId id) {
  if (!data_.leases.contains(id)) {
    return absl::NotFoundError(absl::StrCat("lease ", id, " has ended"));
  }
  EndLease(id);
  ScheduleExpiry();
  return header();
}

Registry::Written SimEtcd::Conflict(const std::string& key) const {
  const auto found = data_.entries.find(key);
  Registry::Written written{.header = header()};
  if (found != data_.entries.end()) written.current = found->second;
  return written;
}

absl::StatusOr<Registry::Written> SimEtcd::Put(const Registry::PutRequest& request) {
  const auto lease = data_.leases.find(request.lease);
  if (lease == data_.leases.end()) {
    return absl::NotFoundError(absl::StrCat("lease ", request.lease, " has ended"));
  }
  const auto found = data_.entries.find(request.key);
  const Revision current = found == data_.entries.end() ? 0 : found->second.mod_revision;
  if (current != request.expected) return Conflict(request.key);
  if (found != data_.entries.end()) data_.leases[found->second.lease].keys.erase(request.key);
  lease->second.keys.insert(request.key);
  const Registry::Entry entry{request.key, request.value, revision_ + 1, request.lease};
  data_.entries[request.key] = entry;
  Commit({{.deleted = false, .entry = entry}});
  return Registry::Written{header(), true, entry};
}

absl::StatusOr<Registry::Written> SimEtcd::Delete(const std::string& key, Revision expected) {
  const auto found = data_.entries.find(key);
  if (found == data_.entries.end() || found->second.mod_revision != expected) return Conflict(key);
  data_.leases[found->second.lease].keys.erase(key);
  data_.entries.erase(found);
  Commit({{.deleted = true, .entry = {.key = key}}});
  return Registry::Written{.header = header(), .done = true};
}

Registry::Listing SimEtcd::List(const std::string& prefix) const {
  Registry::Listing listing{.header = header()};
  for (auto at = data_.entries.lower_bound(prefix);
       at != data_.entries.end() && absl::StartsWith(at->first, prefix); ++at) {
    listing.entries.push_back(at->second);
  }
  return listing;
}

void SimEtcd::Commit(std::vector<Registry::Event> events) {
  ++revision_;
  for (Registry::Event& event : events) event.entry.mod_revision = revision_;
  history_.push_back({revision_, events_.now(), std::move(events)});
  for (auto& [id, watch] : watches_) Feed(watch);
}

SimEtcd::WatchId SimEtcd::OpenWatch(Machine to, const std::string& prefix, Revision from_revision,
                                    std::function<void(WatchMessage)> message) {
  const WatchId id = next_watch_++;
  auto watch = std::make_shared<Watch>(
      Watch{.to = to, .prefix = prefix, .next = from_revision, .message = std::move(message)});
  // Some watches are served by a follower that is behind.
  if (events_.Chance(0.2)) watch->lag = events_.Uniform(0, 200 * kSimMs);
  if (from_revision <= compacted_) {
    SendTo(watch, {.kind = WatchMessage::Kind::kCompacted, .compacted = compacted_}, 0);
    return id;
  }
  Registry::Header seen = header();
  for (auto change = history_.rbegin(); change != history_.rend(); ++change) {
    if (change->time <= events_.now() - watch->lag) break;
    seen.revision = change->revision - 1;
  }
  watches_.emplace(id, watch);
  SendTo(watch, {.kind = WatchMessage::Kind::kStarted, .header = seen}, 0);
  Feed(watch);
  return id;
}

void SimEtcd::Feed(const std::shared_ptr<Watch>& watch) {
  std::vector<Registry::Event> batch;
  auto change = std::lower_bound(
      history_.begin(), history_.end(), watch->next,
      [](const Change& known, Revision revision) { return known.revision < revision; });
  for (; change != history_.end(); ++change) {
    watch->next = change->revision + 1;
    for (const Registry::Event& event : change->events) {
      if (absl::StartsWith(event.entry.key, watch->prefix)) batch.push_back(event);
    }
  }
  if (batch.empty()) return;
  SendTo(watch,
         {.kind = WatchMessage::Kind::kEvents, .header = header(), .events = std::move(batch)},
         watch->lag);
}

void SimEtcd::SendTo(const std::shared_ptr<Watch>& watch, WatchMessage message,
                     std::int64_t delay) {
  const std::int64_t arrival = events_.now() + delay + network_.Delay(machine_, watch->to);
  watch->under_way.emplace_back(arrival, std::move(message));
  if (watch->under_way.size() == 1) events_.At(arrival, [this, watch] { Deliver(watch); });
}

void SimEtcd::Deliver(const std::shared_ptr<Watch>& watch) {
  if (watch->closed) return;
  if (!network_.Reaches(machine_, watch->to)) {
    // Sent again until it passes; a reset is sent once.
    if (watch->under_way.front().second.kind == WatchMessage::Kind::kBroken) return;
    events_.After(200 * kSimMs, [this, watch] { Deliver(watch); });
    return;
  }
  const WatchMessage message = std::move(watch->under_way.front().second);
  watch->under_way.pop_front();
  if (!watch->under_way.empty()) {
    events_.At(watch->under_way.front().first, [this, watch] { Deliver(watch); });
  }
  watch->message(message);
}

void SimEtcd::CloseWatch(WatchId watch) {
  const auto node = watches_.extract(watch);
  if (!node.empty()) node.mapped()->closed = true;
}

void SimEtcd::Ping(WatchId id, Machine to, std::function<void(WatchMessage)> message) {
  const auto found = watches_.find(id);
  if (found != watches_.end()) {
    SendTo(found->second, {.kind = WatchMessage::Kind::kAlive, .header = header()}, 0);
    return;
  }
  network_.Send(machine_, to,
                [message = std::move(message)] { message({WatchMessage::Kind::kBroken}); });
}

}  // namespace kvmill
