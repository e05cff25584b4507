#include "service/session_table.h"

#include <sys/random.h>

#include <algorithm>
#include <limits>

#include "absl/strings/str_cat.h"
#include "storage/core/check.h"
#include "storage/core/status_macros.h"

namespace kvmill {
namespace {

constexpr std::size_t kSessionIdBytes = 16;

std::uint64_t BytesOfBlock(const BlockRef& block) {
  std::uint64_t bytes = 0;
  for (const auto& page : block.pages()) bytes += page.size();
  return bytes;
}

std::int64_t Millis(std::int64_t nanos) { return nanos / 1'000'000; }

}  // namespace

void SessionTable::Aftermath::Run() {
  blocks.clear();
  memories.clear();
  for (const auto& [listener, leases] : expired) listener->OnLeasesExpired(leases);
  for (const auto& [listener, why] : ends) listener->OnEnd(why);
  for (const std::string& id : ended) (*tell)(id);
}

SessionTable::~SessionTable() { Stop(absl::UnavailableError("the daemon stops")); }

void SessionTable::ClientEntered(DoorClientId client) {
  MutexLock lock(mu_);
  clients_.insert(client);
}

void SessionTable::ClientLeft(DoorClientId client) {
  Aftermath after;
  {
    MutexLock lock(mu_);
    clients_.erase(client);
    for (auto it = sessions_.begin(); it != sessions_.end();) {
      const auto session = it++;
      if (session->second->client != client) continue;
      End(session, absl::AbortedError("the client left the local door"), &after);
    }
  }
  after.Run();
}

absl::Status SessionTable::CheckRoom(const Caller& caller) const {
  const auto full = [](absl::string_view what, std::uint64_t count, std::uint64_t max) {
    return absl::ResourceExhaustedError(absl::StrCat(count, " ", what, ": at most ", max));
  };
  if (caller.door_client == 0) {
    if (remote_sessions_ >= options_.remote_sessions_max) {
      return full("remote sessions", remote_sessions_, options_.remote_sessions_max);
    }
    return absl::OkStatus();
  }
  const std::uint64_t local_sessions = sessions_.size() - remote_sessions_;
  if (local_sessions >= options_.local_sessions_max) {
    return full("local sessions", local_sessions, options_.local_sessions_max);
  }
  const auto of_client = static_cast<std::uint64_t>(std::count_if(
      sessions_.begin(), sessions_.end(),
      [&](const auto& session) { return session.second->client == caller.door_client; }));
  if (of_client >= options_.sessions_of_client_max) {
    return full("sessions of one client", of_client, options_.sessions_of_client_max);
  }
  return absl::OkStatus();
}

absl::StatusOr<std::string> SessionTable::Open(const Caller& caller, absl::string_view resume_id,
                                               std::shared_ptr<SessionListener> listener) {
  std::string id(resume_id);
  if (id.empty()) {
    id.resize(kSessionIdBytes);
    if (getrandom(id.data(), id.size(), 0) != static_cast<ssize_t>(id.size())) {
      return absl::InternalError("getrandom gave no session id");
    }
  }
  Aftermath after;
  {
    MutexLock lock(mu_);
    KVMILL_RETURN_IF_ERROR(stopped_);
    // The caller was a local client when the call came in; it may have left since.
    if (caller.door_client != 0 && !clients_.contains(caller.door_client)) {
      return absl::AbortedError("the client left the local door");
    }
    const std::int64_t now_nanos = clock_.MonotonicNanos();
    if (!resume_id.empty()) {
      const auto it = sessions_.find(id);
      if (it == sessions_.end() || it->second->tenant != caller.tenant ||
          it->second->client != caller.door_client) {
        return absl::NotFoundError("the session to resume is not known: it ended");
      }
      Session& session = *it->second;
      if (session.listener != nullptr) {
        after.ends.emplace_back(std::move(session.listener),
                                absl::AbortedError("the session was resumed by another stream"));
      }
      session.listener = std::move(listener);
      session.heard_nanos = now_nanos;
    } else {
      KVMILL_RETURN_IF_ERROR(CheckRoom(caller));
      auto session = std::make_unique<Session>();
      session->tenant = caller.tenant;
      session->client = caller.door_client;
      session->listener = std::move(listener);
      session->heard_nanos = now_nanos;
      sessions_.emplace(id, std::move(session));
      if (caller.door_client == 0) ++remote_sessions_;
    }
  }
  after.Run();
  return id;
}

void SessionTable::Heard(const std::string& id, const SessionListener* listener) {
  MutexLock lock(mu_);
  const auto it = sessions_.find(id);
  if (it == sessions_.end() || it->second->listener.get() != listener) return;
  it->second->heard_nanos = clock_.MonotonicNanos();
}

void SessionTable::Detach(const std::string& id, const SessionListener* listener) {
  std::shared_ptr<SessionListener> gone;  // Its end may come with the last reference.
  MutexLock lock(mu_);
  const auto it = sessions_.find(id);
  if (it == sessions_.end() || it->second->listener.get() != listener) return;
  gone = std::move(it->second->listener);
  it->second->listener = nullptr;
  it->second->detached_nanos = clock_.MonotonicNanos();
}

void SessionTable::Close(const std::string& id, const SessionListener* listener) {
  Aftermath after;
  {
    MutexLock lock(mu_);
    const auto it = sessions_.find(id);
    if (it == sessions_.end() || it->second->listener.get() != listener) return;
    End(it, absl::OkStatus(), &after);
  }
  after.Run();
}

void SessionTable::End(Sessions::iterator it, const absl::Status& why, Aftermath* after) {
  Session& session = *it->second;
  while (!session.groups.empty()) {
    const auto group = groups_.find(*session.groups.begin());
    for (Lease& lease : group->second.leases) {
      if (!lease.block.valid()) continue;
      if (!lease.expired) Uncount(session, lease);
      after->blocks.push_back(std::move(lease.block));
    }
    Erase(group);
  }
  page_readers_.CancelSession(it->first);
  for (const std::uint64_t registration : session.registrations) {
    after->memories.push_back(Forget(session, registration));
  }
  if (session.client == 0) --remote_sessions_;
  if (ended_ != nullptr) {
    after->ended.push_back(it->first);
    after->tell = &ended_;
  }
  if (session.listener != nullptr) after->ends.emplace_back(std::move(session.listener), why);
  sessions_.erase(it);
}

absl::StatusOr<SessionTable::Session*> SessionTable::Find(const Caller& caller,
                                                          const std::string& session_id) {
  const auto it = sessions_.find(session_id);
  if (it == sessions_.end() || it->second->tenant != caller.tenant ||
      it->second->client != caller.door_client) {
    return absl::AbortedError("the session is not known: it ended, or the daemon was restarted");
  }
  return it->second.get();
}

absl::Status SessionTable::Check(const Caller& caller, const std::string& session_id) {
  MutexLock lock(mu_);
  return Find(caller, session_id).status();
}

void SessionTable::Uncount(Session& session, const Lease& lease) {
  --session.lease_count;
  session.leased_bytes -= lease.bytes;
  --stats_.leases;
  stats_.leased_bytes -= lease.bytes;
  if (lease.on_gpu) leased_gpu_bytes_ -= lease.bytes;
}

void SessionTable::Erase(Groups::iterator group) {
  due_.erase({group->second.due_nanos, group->first});
  const auto session = sessions_.find(group->second.session);
  KVMILL_CHECK(session != sessions_.end());
  session->second->groups.erase(group->first);
  groups_.erase(group);
}

absl::StatusOr<LeaseId> SessionTable::Grant(const Caller& caller, const std::string& session_id,
                                            std::int64_t lease_nanos,
                                            std::vector<BlockRef> blocks) {
  if (lease_nanos <= 0 || lease_nanos > options_.lease_nanos_max) {
    return absl::InvalidArgumentError(absl::StrCat(
        "lease of ", Millis(lease_nanos), " ms, want 1 to ", Millis(options_.lease_nanos_max)));
  }
  LeaseGroup group;
  group.session = session_id;
  group.held = blocks.size();
  group.leases.reserve(blocks.size());
  std::uint64_t bytes = 0;
  std::uint64_t gpu_bytes = 0;  // Among them.
  for (BlockRef& block : blocks) {
    Lease& lease = group.leases.emplace_back();
    lease.bytes = BytesOfBlock(block);
    lease.on_gpu = block.memory() == Tier::kGpu;
    lease.block = std::move(block);
    bytes += lease.bytes;
    if (lease.on_gpu) gpu_bytes += lease.bytes;
  }
  MutexLock lock(mu_);  // A failure lets the blocks go after it: `group` is older.
  KVMILL_ASSIGN_OR_RETURN(Session * session, Find(caller, session_id));
  if (session->client == 0) {
    return absl::FailedPreconditionError("leases are for local clients: use the daemon's socket");
  }
  if (session->lease_count + blocks.size() > options_.leases_max) {
    return absl::ResourceExhaustedError(absl::StrCat(session->lease_count,
                                                     " leases of one session and ", blocks.size(),
                                                     " more: at most ", options_.leases_max));
  }
  const auto fits = [](absl::string_view where, std::uint64_t held, std::uint64_t more,
                       std::uint64_t max) {
    if (more <= max && held <= max - more) return absl::OkStatus();
    return absl::ResourceExhaustedError(
        absl::StrCat(held, " bytes under lease ", where, " and ", more, " more: at most ", max));
  };
  KVMILL_RETURN_IF_ERROR(fits("in host memory", stats_.leased_bytes - leased_gpu_bytes_,
                              bytes - gpu_bytes, options_.leased_bytes_max));
  KVMILL_RETURN_IF_ERROR(
      fits("on the GPU", leased_gpu_bytes_, gpu_bytes, options_.leased_gpu_bytes_max));
  if (blocks.empty()) return LeaseId{0};
  const std::int64_t deadline_nanos = clock_.MonotonicNanos() + lease_nanos;
  for (Lease& lease : group.leases) lease.deadline_nanos = deadline_nanos;
  group.due_nanos = deadline_nanos;
  const LeaseId first = next_lease_;
  next_lease_ += blocks.size();
  session->groups.insert(first);
  session->lease_count += blocks.size();
  session->leased_bytes += bytes;
  stats_.leases += blocks.size();
  stats_.leased_bytes += bytes;
  leased_gpu_bytes_ += gpu_bytes;
  due_.emplace(deadline_nanos, first);
  groups_.emplace(first, std::move(group));
  return first;
}

SessionTable::Lease* SessionTable::FindLease(const std::string& session_id, LeaseId id,
                                             Groups::iterator* group) {
  auto it = groups_.upper_bound(id);
  if (it == groups_.begin()) return nullptr;
  --it;
  if (it->second.session != session_id || id - it->first >= it->second.leases.size()) {
    return nullptr;
  }
  Lease& lease = it->second.leases[id - it->first];
  if (!lease.block.valid() || lease.expired) return nullptr;
  *group = it;
  return &lease;
}

absl::StatusOr<std::vector<bool>> SessionTable::Renew(const Caller& caller,
                                                      const std::string& session_id,
                                                      absl::Span<const LeaseId> leases,
                                                      std::int64_t lease_nanos) {
  if (lease_nanos <= 0 || lease_nanos > options_.lease_nanos_max) {
    return absl::InvalidArgumentError(absl::StrCat(
        "lease of ", Millis(lease_nanos), " ms, want 1 to ", Millis(options_.lease_nanos_max)));
  }
  std::vector<bool> renewed(leases.size(), false);
  MutexLock lock(mu_);
  KVMILL_RETURN_IF_ERROR(Find(caller, session_id).status());
  const std::int64_t now_nanos = clock_.MonotonicNanos();
  for (std::size_t i = 0; i < leases.size(); ++i) {
    Groups::iterator group;
    Lease* lease = FindLease(session_id, leases[i], &group);
    // Over is over, though Advance was not there yet.
    if (lease == nullptr || lease->deadline_nanos <= now_nanos) continue;
    // Its group is looked at when it would have been, and finds the new time.
    lease->deadline_nanos = std::max(lease->deadline_nanos, now_nanos + lease_nanos);
    renewed[i] = true;
  }
  return renewed;
}

absl::StatusOr<std::uint64_t> SessionTable::Release(const Caller& caller,
                                                    const std::string& session_id,
                                                    absl::Span<const LeaseId> leases) {
  Aftermath after;
  std::uint64_t released = 0;
  {
    MutexLock lock(mu_);
    KVMILL_ASSIGN_OR_RETURN(Session * session, Find(caller, session_id));
    for (const LeaseId id : leases) {
      Groups::iterator group;
      Lease* lease = FindLease(session_id, id, &group);
      if (lease == nullptr) continue;
      Uncount(*session, *lease);
      after.blocks.push_back(std::move(lease->block));
      ++released;
      if (--group->second.held == 0) Erase(group);
    }
  }
  after.Run();
  return released;
}

bool SessionTable::WithLease(DoorClientId client, LeaseId lease_id,
                             absl::FunctionRef<void(const BlockRef&)> use) {
  MutexLock lock(mu_);
  auto it = groups_.upper_bound(lease_id);
  if (it == groups_.begin()) return false;
  --it;
  const auto session = sessions_.find(it->second.session);
  if (session->second->client != client) return false;
  Groups::iterator group;
  const Lease* lease = FindLease(it->second.session, lease_id, &group);
  if (lease == nullptr) return false;
  use(lease->block);
  return true;
}

void SessionTable::AdvanceGroup(Groups::iterator it, std::int64_t now_nanos, Aftermath* after) {
  LeaseGroup& group = it->second;
  Session& session = *sessions_.at(group.session);
  std::vector<LeaseId> expired;
  std::int64_t due_nanos = std::numeric_limits<std::int64_t>::max();
  for (std::size_t i = 0; i < group.leases.size(); ++i) {
    Lease& lease = group.leases[i];
    if (!lease.block.valid()) continue;
    if (!lease.expired && lease.deadline_nanos <= now_nanos) {
      lease.expired = true;
      Uncount(session, lease);
      ++stats_.lease_expirations;
      expired.push_back(it->first + i);
    }
    const std::int64_t next_nanos =
        lease.expired ? lease.deadline_nanos + options_.lease_grace_nanos : lease.deadline_nanos;
    if (next_nanos <= now_nanos) {
      after->blocks.push_back(std::move(lease.block));
      --group.held;
    } else {
      due_nanos = std::min(due_nanos, next_nanos);
    }
  }
  if (!expired.empty() && session.listener != nullptr) {
    after->expired.emplace_back(session.listener, std::move(expired));
  }
  if (group.held == 0) {
    Erase(it);
  } else {
    due_.erase({group.due_nanos, it->first});
    group.due_nanos = due_nanos;
    due_.emplace(due_nanos, it->first);
  }
}

void SessionTable::Advance() {
  Aftermath after;
  {
    MutexLock lock(mu_);
    const std::int64_t now_nanos = clock_.MonotonicNanos();
    while (!due_.empty() && due_.begin()->first <= now_nanos) {
      AdvanceGroup(groups_.find(due_.begin()->second), now_nanos, &after);
    }
    for (auto it = sessions_.begin(); it != sessions_.end();) {
      const auto session = it++;
      Session& s = *session->second;
      if (s.client != 0) continue;  // Lives as long as the client.
      if (s.listener != nullptr && now_nanos - s.heard_nanos >= options_.silence_nanos_max) {
        after.ends.emplace_back(
            std::move(s.listener),
            absl::UnavailableError(
                absl::StrCat("no heartbeat for ", Millis(now_nanos - s.heard_nanos), " ms")));
        s.listener = nullptr;
        s.detached_nanos = now_nanos;
      }
      if (s.listener == nullptr && now_nanos - s.detached_nanos >= resume_grace_nanos()) {
        End(session, absl::OkStatus(), &after);
      }
    }
  }
  after.Run();
}

void SessionTable::Drain() {
  std::vector<std::shared_ptr<SessionListener>> listeners;
  {
    MutexLock lock(mu_);
    for (const auto& [id, session] : sessions_) {
      if (session->listener != nullptr) listeners.push_back(session->listener);
    }
  }
  for (const auto& listener : listeners) listener->OnDrain();
}

void SessionTable::Stop(const absl::Status& why) {
  Aftermath after;
  {
    MutexLock lock(mu_);
    if (stopped_.ok()) stopped_ = why;
    const absl::Status ended = absl::AbortedError(why.message());
    while (!sessions_.empty()) End(sessions_.begin(), ended, &after);
  }
  after.Run();
}

SessionTable::Stats SessionTable::stats() const {
  MutexLock lock(mu_);
  Stats stats = stats_;
  stats.sessions = sessions_.size();
  return stats;
}

SessionTable::Stats SessionTable::StatsOf(const std::string& tenant) const {
  MutexLock lock(mu_);
  Stats stats;
  for (const auto& [id, session] : sessions_) {
    if (session->tenant != tenant) continue;
    ++stats.sessions;
    stats.leases += session->lease_count;
    stats.leased_bytes += session->leased_bytes;
    stats.registrations += session->registrations.size();
  }
  return stats;
}

}  // namespace kvmill
