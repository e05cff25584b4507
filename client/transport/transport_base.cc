#include "client/transport/transport_base.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "storage/core/log.h"
#include "storage/core/sha256.h"
#include "storage/core/status_macros.h"

namespace kvmill {

NodeIdentity::Id NodeIdentity::IdOf(absl::string_view name) {
  const Sha256Digest digest = Sha256(name);
  Id id;
  std::copy(digest.begin(), digest.begin() + id.size(), id.begin());
  return id;
}

std::string NodeIdentity::ToString() const {
  const absl::string_view bytes(reinterpret_cast<const char*>(id.data()), id.size());
  return absl::StrCat(absl::BytesToHexString(bytes), "/", incarnation);
}

absl::Status CheckTransportOptions(const TransportOptions& options) {
  const TransportLimits& limits = options.limits;
  const auto bad = [](absl::string_view name, std::uint64_t value, absl::string_view want) {
    return absl::InvalidArgumentError(absl::StrCat(name, " is ", value, ", want ", want));
  };
  if (limits.calls_max == 0) return bad("calls_max", 0, "at least 1");
  if (limits.request_bytes_max == 0) return bad("request_bytes_max", 0, "at least 1");
  if (limits.segments_in_flight_max == 0) return bad("segments_in_flight_max", 0, "at least 1");
  if (limits.segments_in_flight_max > CounterWindow::kWindow / 4) {
    return bad("segments_in_flight_max", limits.segments_in_flight_max, "at most 1024");
  }
  if (limits.segment_bytes_max < kSegmentBytesMin || limits.segment_bytes_max > kSegmentBytesMax) {
    return bad("segment_bytes_max", limits.segment_bytes_max, "64 KiB to 8 MiB");
  }
  if (options.handshake_nanos <= 0 || options.offer_nanos <= 0 || options.grace_nanos <= 0) {
    return absl::InvalidArgumentError("handshake_nanos, offer_nanos and grace_nanos are positive");
  }
  if (options.version_min == 0 || options.version_min > options.version) {
    return bad("version_min", options.version_min, "1 to version");
  }
  return absl::OkStatus();
}

TransportBase::TransportBase(const TransportOptions& options, const Clock* clock)
    : options_(options), clock_(clock), book_(options.limits.offers_max) {
  settings_.side = {.self = options.self,
                    .encrypted = !options.plaintext,
                    .version = options.version,
                    .version_min = options.version_min,
                    .calls_max = options.limits.calls_max,
                    .segment_bytes_max = options.limits.segment_bytes_max,
                    .request_bytes_max = options.limits.request_bytes_max};
  settings_.limits = options.limits;
  settings_.handshake_nanos = options.handshake_nanos;
  settings_.grace_nanos = options.grace_nanos;
}

absl::StatusOr<Offer> TransportBase::MakeOffer(std::uint64_t owner_tag,
                                               std::optional<NodeIdentity::Id> only_for) {
  Offer offer;
  offer.addresses = addresses();
  if (offer.addresses.empty()) {
    return absl::FailedPreconditionError("this process does not listen for connections");
  }
  offer.node = options_.self;
  RandomBytes(absl::MakeSpan(offer.key_id));
  RandomBytes(absl::MakeSpan(offer.key));
  const std::int64_t now_nanos = NowNanos();
  KVMILL_RETURN_IF_ERROR(book_.Add(offer.key_id,
                                   {.key = offer.key,
                                    .owner_tag = owner_tag,
                                    .only_for = only_for,
                                    .expires_nanos = now_nanos + options_.offer_nanos},
                                   now_nanos));
  return offer;
}

void TransportBase::Connect(Offer offer, Connecting connecting) {
  auto dialing = std::make_shared<Dialing>();
  dialing->offer = std::move(offer);
  dialing->connecting = std::move(connecting);
  Post([this, dialing = std::move(dialing)]() mutable {
    dialing->deadline_nanos = NowNanos() + options_.handshake_nanos;
    DialNext(std::move(dialing), absl::InvalidArgumentError("the offer has no address"));
  });
}

void TransportBase::DialNext(std::shared_ptr<Dialing> dialing, absl::Status last) {
  while (!stopping_ && dialing->next_address < dialing->offer.addresses.size()) {
    if (connections_.size() >= options_.limits.connections_max) {
      last = absl::ResourceExhaustedError(
          absl::StrCat("there are ", connections_.size(), " connections already"));
      break;
    }
    const std::int64_t left_nanos = dialing->deadline_nanos - NowNanos();
    if (left_nanos <= 0) {
      last = absl::DeadlineExceededError("nobody answered in time");
      break;
    }
    const std::string& address = dialing->offer.addresses[dialing->next_address++];
    ConnectionSettings settings = settings_;
    settings.handshake_nanos = left_nanos;
    auto core = std::make_shared<ConnectionCore>(settings, this, this, &counters_, &book_);
    absl::StatusOr<std::unique_ptr<Wire>> wire = DialWire(address, core.get());
    if (!wire.ok()) {
      last = wire.status();
      continue;
    }
    connections_[core.get()] = {.core = core, .dialing = dialing};
    connection_count_.store(connections_.size(), std::memory_order_relaxed);
    core->Dial(*std::move(wire), dialing->offer);
    return;
  }
  if (stopping_) last = absl::CancelledError("the transport is being destroyed");
  EraseSecret(absl::MakeSpan(dialing->offer.key));
  dialing->connecting.done(last);
}

bool TransportBase::AcceptWire(
    const std::function<absl::StatusOr<std::unique_ptr<Wire>>(WireEvents*)>& make) {
  if (stopping_ || connections_.size() >= options_.limits.connections_max ||
      accepted_handshakes_ >= options_.limits.handshakes_max) {
    handshakes_refused_.fetch_add(1, std::memory_order_relaxed);
    return false;
  }
  auto core = std::make_shared<ConnectionCore>(settings_, this, this, &counters_, &book_);
  absl::StatusOr<std::unique_ptr<Wire>> wire = make(core.get());
  if (!wire.ok()) return true;  // It went as fast as it came.
  ++accepted_handshakes_;
  connections_[core.get()] = {.core = core, .dialing = nullptr};
  connection_count_.store(connections_.size(), std::memory_order_relaxed);
  core->Accept(*std::move(wire));
  return true;
}

void TransportBase::OnOpen(const std::shared_ptr<ConnectionCore>& core) {
  Entry& entry = connections_.at(core.get());
  entry.in_handshake = false;
  if (entry.dialing == nullptr) {
    --accepted_handshakes_;
    if (options_.handler != nullptr) options_.handler->OnConnection(core);
    return;
  }
  EraseSecret(absl::MakeSpan(entry.dialing->offer.key));
  const std::shared_ptr<Dialing> dialing = entry.dialing;
  dialing->connecting.done(ConnectionPtr(core));
}

void TransportBase::OnEnded(const std::shared_ptr<ConnectionCore>& core, bool was_open,
                            const absl::Status& why) {
  const auto found = connections_.find(core.get());
  const std::shared_ptr<Dialing> dialing = std::move(found->second.dialing);
  const bool in_handshake = found->second.in_handshake;
  connections_.erase(found);
  connection_count_.store(connections_.size(), std::memory_order_relaxed);
  if (was_open && !absl::IsCancelled(why)) {
    connections_broken_.fetch_add(1, std::memory_order_relaxed);
  }
  if (dialing == nullptr) {
    if (in_handshake) --accepted_handshakes_;
    if (was_open) {
      if (options_.handler != nullptr) options_.handler->OnClosed(core, why);
      return;
    }
    handshakes_refused_.fetch_add(1, std::memory_order_relaxed);
    // Anybody can cause this: not worth more than a line for who looks.
    LogDebug(absl::StrCat("transport: a peer was not let in: ", why.message()));
    return;
  }
  if (was_open) {
    if (dialing->connecting.closed) dialing->connecting.closed(why);
    return;
  }
  // Silence there says nothing about the node's other addresses; an answer does.
  if (absl::IsUnavailable(why) && !core->heard()) return DialNext(dialing, why);
  EraseSecret(absl::MakeSpan(dialing->offer.key));
  dialing->connecting.done(why);
}

void TransportBase::OnCall(const std::shared_ptr<ConnectionCore>& core,
                           std::unique_ptr<IncomingCall> call) {
  if (options_.handler != nullptr) return options_.handler->OnCall(core, std::move(call));
  call->Respond({.status = absl::UnimplementedError("this process serves no calls")});
}

TransportStats TransportBase::stats() const {
  const auto read = [](const std::atomic<std::uint64_t>& value) {
    return value.load(std::memory_order_relaxed);
  };
  TransportStats stats;
  stats.connections = read(connection_count_);
  stats.offers = book_.usable(NowNanos());
  stats.calls_started = read(counters_.calls_started);
  stats.calls_served = read(counters_.calls_served);
  stats.operations = read(counters_.operations);
  stats.held_bytes = read(counters_.held_bytes);
  stats.handshakes_refused = read(handshakes_refused_);
  stats.connections_broken = read(connections_broken_);
  stats.bytes_sent = read(counters_.bytes_sent);
  stats.bytes_received = read(counters_.bytes_received);
  return stats;
}

void TransportBase::Post(absl::AnyInvocable<void()> task) {
  {
    const MutexLock lock(mu_);
    tasks_.push_back(std::move(task));
    if (InLoop() || !EndsSleep(INT64_MAX)) return;
  }
  Wake();
}

void TransportBase::RunAt(std::int64_t nanos, absl::AnyInvocable<void()> task) {
  {
    const MutexLock lock(mu_);
    timers_.emplace(nanos, std::move(task));
    if (InLoop() || !EndsSleep(nanos)) return;
  }
  Wake();
}

bool TransportBase::EndsSleep(std::int64_t due_nanos) {
  if (!asleep_ || (tasks_.empty() && due_nanos >= sleeps_until_)) return false;
  asleep_ = false;
  return true;
}

void TransportBase::EndSleepIfDue(std::int64_t due_nanos) {
  {
    const MutexLock lock(mu_);
    if (!EndsSleep(due_nanos)) return;
  }
  Wake();
}

std::int64_t TransportBase::FallAsleep() {
  const std::int64_t next_nanos = NextDueNanos();
  const std::int64_t now_nanos = NowNanos();
  const MutexLock lock(mu_);
  if (!tasks_.empty()) return INT64_MIN;
  // Never later than it meant to before. Most calls end long before their deadlines, and those that
  // follow have later ones: so only the first of many has to wake the loop for its deadline.
  if (sleeps_until_ <= now_nanos) sleeps_until_ = INT64_MAX;
  sleeps_until_ = std::min(sleeps_until_, next_nanos);
  asleep_ = true;
  return sleeps_until_;
}

bool TransportBase::StandInFallsAsleep() {
  const std::int64_t next_nanos = NextDueNanos();
  {
    const MutexLock lock(mu_);
    if (!tasks_.empty()) return false;
    asleep_ = true;
    if (!EndsSleep(next_nanos)) return true;
  }
  Wake();
  return true;
}

void TransportBase::WakeUp() {
  const MutexLock lock(mu_);
  asleep_ = false;
}

bool TransportBase::RunTasks() {
  {
    const MutexLock lock(mu_);
    running_.swap(tasks_);
  }
  for (auto& task : running_) task();
  const bool any = !running_.empty();
  running_.clear();
  return any;
}

bool TransportBase::RunDue() {
  const std::int64_t now_nanos = NowNanos();
  std::vector<absl::AnyInvocable<void()>> due;
  {
    const MutexLock lock(mu_);
    while (!stopping_ && !timers_.empty() && timers_.begin()->first <= now_nanos) {
      due.push_back(std::move(timers_.begin()->second));
      timers_.erase(timers_.begin());
    }
  }
  for (auto& task : due) task();
  bool any = !due.empty();
  for (auto& [core, entry] : connections_) {  // OnTime posts what changes the table.
    if (core->next_nanos() > now_nanos) continue;
    core->OnTime(now_nanos);
    any = true;
  }
  return any;
}

std::int64_t TransportBase::NextDueNanos() {
  std::int64_t next = INT64_MAX;
  {
    const MutexLock lock(mu_);
    if (!tasks_.empty()) return INT64_MIN;
    if (!timers_.empty()) next = timers_.begin()->first;
  }
  for (const auto& [core, entry] : connections_) next = std::min(next, core->next_nanos());
  return next;
}

void TransportBase::Shutdown() {
  stopping_ = true;
  {
    const MutexLock lock(mu_);
    timers_.clear();
  }
  for (auto& [core, entry] : connections_) {
    core->Break(absl::CancelledError("the transport is being destroyed"));
  }
}

}  // namespace kvmill
