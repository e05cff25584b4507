#include "service/data_plane.h"

#include <algorithm>
#include <iterator>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/convert.h"
#include "client/request_metadata.h"
#include "service/data_plane_calls.h"
#include "service/request.h"
#include "storage/core/log.h"
#include "storage/core/status_macros.h"

namespace kvmill {
namespace {

constexpr std::int64_t kOfferNanos = 30'000'000'000;
constexpr std::int64_t kSweepNanos = 1'000'000'000;
constexpr std::size_t kTransportNamesMax = 16;

// Of a call whose caller wants to find it again: so the others cost nothing.
void LogCall(const PeerConnection& connection, const v1::DataRequest& request) {
  const std::vector<LogField> fields = {{"peer", connection.info().address}};
  switch (request.request_case()) {
    case v1::DataRequest::kFetch:
      return LogDebug(absl::StrCat("data plane: a fetch of ", request.fetch().keys_size(), " keys"),
                      fields);
    case v1::DataRequest::kStore:
      return LogDebug(absl::StrCat("data plane: a chunk of layers ",
                                   request.store().chunk().layer_begin(), " on"),
                      fields);
    case v1::DataRequest::kDurable:
      return LogDebug("data plane: a wait for the disk", fields);
    case v1::DataRequest::kTicket:
      return LogDebug("data plane: pages of a ticket", fields);
    case v1::DataRequest::REQUEST_NOT_SET:
      break;
  }
}

}  // namespace

absl::StatusOr<std::unique_ptr<DataPlane>> DataPlane::Start(ServiceContext& context,
                                                            const Options& options,
                                                            const MakeTransport& make) {
  std::unique_ptr<DataPlane> plane(new DataPlane(context, options));
  TransportOptions transport;
  transport.self = options.self;
  transport.plaintext = options.plaintext;
  transport.offer_nanos = kOfferNanos;
  transport.limits.calls_max = 64;
  transport.limits.request_bytes_max = kStoreWindowBytes;
  transport.handler = plane.get();
  KVMILL_ASSIGN_OR_RETURN(plane->transport_, make(transport));
  plane->sends_gpu_memory_ = options.plaintext && plane->transport_->Supports(MemoryKind::kCuda);
  return plane;
}

DataPlane::DataPlane(ServiceContext& context, const Options& options)
    : context_(context), options_(options) {}

DataPlane::~DataPlane() {
  Stop(std::chrono::steady_clock::now());
  transport_.reset();  // Says goodbye to this object's members.
}

void DataPlane::Stop(std::chrono::steady_clock::time_point deadline) {
  if (transport_ == nullptr) return;
  std::vector<ConnectionPtr> connections;
  std::deque<StoreCallPtr> unserved;  // Answered by being dropped, without the lock.
  {
    MutexLock lock(mu_);
    stopping_ = true;
    while (running_ > 0) {
      const auto left = deadline - std::chrono::steady_clock::now();
      if (left <= std::chrono::nanoseconds(0) || !idle_.WaitFor(mu_, left)) break;
    }
    for (const auto& [tag, peer] : peers_) {
      if (peer->connection != nullptr) connections.push_back(peer->connection);
    }
    unserved.swap(waiting_);
  }
  unserved.clear();
  for (const ConnectionPtr& connection : connections) connection->Close();
  MutexLock lock(mu_);
  while (running_ > 0) idle_.Wait(mu_);
}

DataPlane::Running::~Running() {
  MutexLock lock(plane_->mu_);
  --plane_->running_;
  plane_->idle_.NotifyAll();
}

bool DataPlane::Begin() {
  MutexLock lock(mu_);
  if (stopping_ || running_ >= kDataCallsMax) return false;
  ++running_;
  return true;
}

absl::Status DataPlane::TellTransport() {
  std::vector<std::string> hosts;
  for (const auto& [host, count] : hosts_) hosts.push_back(host);
  return transport_->Admit(hosts);
}

absl::Status DataPlane::Admit(const Peer& peer) {
  bool news = false;
  for (const std::string& host : peer.hosts) news |= ++hosts_[host] == 1;
  return news ? TellTransport() : absl::OkStatus();
}

DataPlane::Peers::iterator DataPlane::Forget(Peers::iterator peer) {
  bool news = false;
  for (const std::string& host : peer->second->hosts) {
    const auto known = hosts_.find(host);
    if (--known->second > 0) continue;
    hosts_.erase(known);
    news = true;
  }
  const auto next = peers_.erase(peer);
  if (news && !stopping_) {  // The end of the transport comes with the ends of connections.
    const absl::Status told = TellTransport();
    if (!told.ok())
      LogError(absl::StrCat("data plane: a host that left is still let in: ", told.message()));
  }
  return next;
}

void DataPlane::ForgetUnused() {
  const std::int64_t now_nanos = transport_->NowNanos();
  for (auto it = peers_.begin(); it != peers_.end();) {
    const bool unused =
        it->second->connection == nullptr && it->second->offer_expires_nanos <= now_nanos;
    it = unused ? Forget(it) : std::next(it);
  }
}

absl::StatusOr<Offer> DataPlane::MakeOffer(const Caller& caller, const std::string& who,
                                           const NodeIdentity::Id& only_for,
                                           std::vector<std::string> hosts) {
  auto peer = std::make_shared<Peer>();
  peer->caller = caller;
  peer->who = who;
  std::sort(hosts.begin(), hosts.end());
  hosts.erase(std::unique(hosts.begin(), hosts.end()), hosts.end());
  peer->hosts = std::move(hosts);
  std::uint64_t tag = 0;
  {
    MutexLock lock(mu_);
    if (stopping_) return absl::UnavailableError("the daemon is stopping");
    ForgetUnused();
    std::uint32_t offers = 0;
    std::uint32_t connections = 0;
    std::set<std::string> own_hosts(peer->hosts.begin(), peer->hosts.end());
    for (const auto& [other_tag, other] : peers_) {
      if (other->who != who) continue;
      ++(other->connection == nullptr ? offers : connections);
      own_hosts.insert(other->hosts.begin(), other->hosts.end());
    }
    if (offers >= kOffersPerCallerMax) {
      return absl::ResourceExhaustedError(
          absl::StrCat(offers, " offers of a connection that nobody used: at most ",
                       kOffersPerCallerMax, " a caller; they end after 30 s"));
    }
    if (offers + connections >= kConnectionsPerCallerMax) {
      return absl::ResourceExhaustedError(absl::StrCat(
          offers + connections, " connections of one caller: at most ", kConnectionsPerCallerMax));
    }
    if (own_hosts.size() > kHostsPerCallerMax) {
      return absl::ResourceExhaustedError(absl::StrCat(
          own_hosts.size(), " hosts to let in for one caller: at most ", kHostsPerCallerMax));
    }
    // Beyond the offer's own end: a handshake may begin in its last moment.
    peer->offer_expires_nanos = transport_->NowNanos() + 2 * kOfferNanos;
    tag = next_tag_++;
    const auto added = peers_.emplace(tag, peer).first;
    const absl::Status admitted = Admit(*peer);
    if (!admitted.ok()) {
      Forget(added);
      return admitted;
    }
  }
  absl::StatusOr<Offer> offer = transport_->MakeOffer(tag, only_for);
  if (!offer.ok()) {
    MutexLock lock(mu_);
    const auto mine = peers_.find(tag);
    if (mine != peers_.end()) Forget(mine);
    return offer;
  }
  transport_->RunAt(peer->offer_expires_nanos, [this] {
    MutexLock lock(mu_);
    if (!stopping_) ForgetUnused();
  });
  return offer;
}

void DataPlane::CallerLeft(DoorClientId client) {
  if (client == 0) return;
  Disconnect([client](const Caller& caller) { return caller.door_client == client; });
}

void DataPlane::Revoke(const std::set<std::string>& tenants) {
  Disconnect([&tenants](const Caller& caller) {
    return caller.door_client == 0 && tenants.contains(caller.tenant);
  });
}

void DataPlane::Disconnect(absl::FunctionRef<bool(const Caller&)> whom) {
  std::vector<ConnectionPtr> connections;
  {
    MutexLock lock(mu_);
    for (auto it = peers_.begin(); it != peers_.end();) {
      if (!whom(it->second->caller)) {
        ++it;
      } else if (it->second->connection != nullptr) {
        connections.push_back(it->second->connection);
        ++it;
      } else {
        it = Forget(it);
      }
    }
  }
  for (const ConnectionPtr& connection : connections) connection->Close();
}

DataPlane::Stats DataPlane::stats() const {
  Stats stats;
  stats.connections = transport_->stats().connections;
  stats.store_seconds = store_seconds_.snapshot();
  stats.fetch_seconds = fetch_seconds_.snapshot();
  stats.gpu_bytes_from_gpu = gpu_bytes_from_gpu_.load(std::memory_order_relaxed);
  stats.gpu_bytes_from_host = gpu_bytes_from_host_.load(std::memory_order_relaxed);
  MutexLock lock(mu_);
  stats.hosts = hosts_.size();
  stats.calls = running_;
  stats.staging_bytes = slabs_used_ * kDataChunkBytesMax;
  for (const auto& [name, counts] : bytes_) {
    stats.bytes[name] = {counts->in.load(std::memory_order_relaxed),
                         counts->out.load(std::memory_order_relaxed)};
    stats.connections_by_transport[name] = 0;
  }
  for (const auto& [tag, peer] : peers_) {
    if (peer->connection == nullptr) continue;
    const auto known = stats.connections_by_transport.find(peer->connection->info().transport);
    ++(known != stats.connections_by_transport.end() ? known->second
                                                     : stats.connections_by_transport["other"]);
  }
  return stats;
}

void DataPlane::OnConnection(const ConnectionPtr& connection) {
  const std::vector<LogField> fields = {{"peer", connection->info().address},
                                        {"transport", connection->info().transport}};
  LogInfo("data plane: a connection", fields);
  bool known = false;
  {
    MutexLock lock(mu_);
    const auto it = peers_.find(connection->info().owner_tag);
    if (it != peers_.end() && !stopping_) {
      known = true;
      const std::string& name = connection->info().transport;
      const bool room = bytes_.size() < kTransportNamesMax || bytes_.count(name) > 0;
      std::unique_ptr<ByteCounts>& counts = bytes_[room ? name : "other"];
      if (counts == nullptr) counts = std::make_unique<ByteCounts>();
      it->second->bytes = counts.get();
      it->second->connection = connection;
    }
  }
  if (!known) connection->Close();  // Its caller left meanwhile.
}

void DataPlane::OnClosed(const ConnectionPtr& connection, const absl::Status&) {
  MutexLock lock(mu_);
  const auto peer = peers_.find(connection->info().owner_tag);
  if (peer != peers_.end()) Forget(peer);
}

absl::StatusOr<TieredStore::NamespaceInfo> DataPlane::Resolve(
    const Peer& peer, const std::string& fingerprint) const {
  KVMILL_ASSIGN_OR_RETURN(const Fingerprint parsed, FingerprintFromBytes(fingerprint));
  return context_.store.FindNamespace(peer.caller.tenant, parsed);
}

void DataPlane::OnCall(const ConnectionPtr& connection, std::unique_ptr<IncomingCall> call) {
  const auto refuse = [&call](const absl::Status& status) { call->Respond({.status = status}); };
  v1::DataRequest request;
  const absl::Span<const std::byte> header = call->header();
  if (!request.ParseFromArray(header.data(), static_cast<int>(header.size()))) {
    return refuse(absl::InvalidArgumentError("the header of a call is no DataRequest"));
  }
  PeerPtr peer;
  {
    MutexLock lock(mu_);
    if (stopping_) return refuse(absl::UnavailableError("the daemon is stopping"));
    const auto it = peers_.find(connection->info().owner_tag);
    if (it != peers_.end()) peer = it->second;
  }
  if (peer == nullptr) return refuse(absl::UnauthenticatedError("nobody's connection"));
  if (!Begin()) {
    return refuse(absl::ResourceExhaustedError(
        absl::StrCat("more than ", kDataCallsMax, " calls on the data plane at once")));
  }
  auto running = std::make_unique<Running>(this);
  const RequestPtr of = RequestOf(request);
  const ServedRequest served(of);
  if (of != nullptr) LogCall(*connection, request);
  switch (request.request_case()) {
    case v1::DataRequest::kFetch:
      return StartFetch(peer, request.fetch(), std::move(call), std::move(running));
    case v1::DataRequest::kStore:
      return StartStore(peer, std::move(*request.mutable_store()), std::move(call),
                        std::move(running));
    case v1::DataRequest::kDurable:
      return StartDurable(peer, request.durable(), std::move(call), std::move(running));
    case v1::DataRequest::kTicket:
      return StartTicketRead(peer, request.ticket(), std::move(call), std::move(running));
    case v1::DataRequest::REQUEST_NOT_SET:
      break;
  }
  refuse(absl::InvalidArgumentError("a DataRequest of a kind that this daemon does not know"));
}

void DataPlane::ScheduleSweep() {
  transport_->RunAt(transport_->NowNanos() + kSweepNanos, [this] {
    std::set<ConnectionPtr> stalled;  // Once, of however many calls.
    std::vector<StoreCallPtr> seen;   // Not to be the last holder of one under the lock.
    {
      MutexLock lock(mu_);
      const std::int64_t began_before = transport_->NowNanos() - options_.receive_timeout.count();
      while (!receiving_.empty()) {
        const auto first = receiving_.begin();
        const StoreCallPtr store = first->second.lock();
        const bool receiving = store != nullptr && store->receiving;
        if (store != nullptr) seen.push_back(store);
        if (receiving && first->first > began_before) break;
        if (receiving) stalled.insert(store->peer->connection);
        receiving_.erase(first);
      }
      sweep_scheduled_ = !receiving_.empty();
      if (sweep_scheduled_) ScheduleSweep();
    }
    for (const ConnectionPtr& connection : stalled) {
      LogWarning(absl::StrCat("data plane: ", connection->info().address,
                              " does not send what it announced: its connection is closed"));
      connection->Close();
    }
  });
}

}  // namespace kvmill
