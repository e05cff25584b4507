#include "client/data_link.h"

#include <grpcpp/alarm.h>
#include <sys/random.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/transport/host_filter.h"
#include "client/transport/own_hosts.h"
#include "client/transport/ucx_transport.h"
#include "storage/core/log.h"
#include "storage/core/status_macros.h"

namespace kvmill {
namespace {

constexpr std::chrono::milliseconds kBackoffMin{50};
constexpr std::chrono::milliseconds kBackoffMax{2000};
// After a failure that time does not heal: no data plane, or another encryption.
constexpr std::chrono::milliseconds kBackoffHopeless{30'000};
constexpr std::chrono::seconds kOfferTimeout{5};
constexpr std::uint32_t kWaitingCallsMax = 16384;  // A few of each Fetch and Store that runs.

NodeIdentity RandomIdentity() {
  NodeIdentity identity;
  // A failure leaves zeros: the identity is a name, not a secret.
  static_cast<void>(getrandom(identity.id.data(), identity.id.size(), 0));
  static_cast<void>(getrandom(&identity.incarnation, sizeof(identity.incarnation), 0));
  return identity;
}

template <typename Bytes>
bool CopyExactly(const std::string& from, Bytes* to) {
  if (from.size() != to->size()) return false;
  std::memcpy(to->data(), from.data(), from.size());
  return true;
}

absl::StatusOr<Offer> OfferFromProto(const v1::ConnectReply& reply) {
  Offer offer;
  offer.addresses.assign(reply.addresses().begin(), reply.addresses().end());
  offer.node.incarnation = reply.incarnation();
  if (offer.addresses.empty() || !CopyExactly(reply.node_id(), &offer.node.id) ||
      !CopyExactly(reply.key_id(), &offer.key_id) || !CopyExactly(reply.key(), &offer.key)) {
    return absl::InternalError("malformed reply to Connect");
  }
  return offer;
}

}  // namespace

// Somebody who waits for the connection, and the alarm that ends the wait.
class DataLink::Waiter final : public Completion {
 public:
  Waiter(DataLink* link, Use use) : link_(link), use_(std::move(use)) {}

  void Set(Deadline deadline) { alarm_.Set(link_->grpc_.queue(), deadline, this); }
  // Once, by whoever took it out of `waiters_`.
  void Finish(const absl::StatusOr<ConnectionPtr>& result) {
    use_(result);
    alarm_.Cancel();
    Release();
  }

  void OnEvent(bool) override {
    bool mine = false;
    {
      MutexLock lock(link_->mu_);
      mine = link_->waiters_.erase(this) > 0;
    }
    if (mine) {
      use_(absl::DeadlineExceededError("no connection to the data plane in time"));
      Release();
    }
    Release();
  }

 private:
  void Release() {
    if (holders_.fetch_sub(1, std::memory_order_acq_rel) > 1) return;
    DataLink* const link = link_;
    delete this;
    link->End();
  }

  DataLink* const link_;
  const Use use_;
  std::atomic<int> holders_{2};  // The alarm, and whoever finishes it.
  grpc::Alarm alarm_;
};

DataLink::DataLink(Connection& connection, WorkerPool& workers, const Options& options,
                   AskForOffer ask)
    : grpc_(connection),
      workers_(workers),
      options_(options),
      ask_(std::move(ask)),
      self_(RandomIdentity()) {}

DataLink::~DataLink() = default;

bool DataLink::Begin() {
  MutexLock lock(mu_);
  if (stopping_) return false;
  ++operations_;
  return true;
}

void DataLink::End() {
  MutexLock lock(mu_);
  --operations_;
  changed_.NotifyAll();
}

bool DataLink::stopping() const {
  MutexLock lock(mu_);
  return stopping_;
}

std::string DataLink::transport() const {
  MutexLock lock(mu_);
  return connection_ == nullptr ? "" : connection_->info().transport;
}

void DataLink::Stop() {
  ConnectionPtr connection;
  {
    MutexLock lock(mu_);
    stopping_ = true;
    while (dialing_) changed_.Wait(mu_);
    connection = connection_;
  }
  Finish(absl::CancelledError("the client is being destroyed"));
  // Every call ends, and those that start now end at once. Then nobody uses the transport.
  if (connection != nullptr) connection->Close();
  {
    MutexLock lock(mu_);
    while (operations_ > 0) changed_.Wait(mu_);
  }
  transport_.reset();
}

void DataLink::Connect(Deadline deadline, Use use) {
  absl::StatusOr<ConnectionPtr> known = absl::CancelledError("the client is being destroyed");
  bool waits = false;
  bool attempt = false;
  {
    MutexLock lock(mu_);
    if (connection_ != nullptr) {
      known = connection_;
    } else if (!stopping_ && !connecting_ && std::chrono::steady_clock::now() < retry_at_) {
      known = last_error_;
    } else if (!stopping_) {
      waits = true;
      attempt = !std::exchange(connecting_, true);
      if (attempt) second_try_ = false;
      ++operations_;
      auto* const waiter = new Waiter(this, std::move(use));  // Deletes itself.
      waiters_.insert(waiter);
      waiter->Set(deadline);
    }
  }
  if (!waits) return use(known);
  if (attempt) Attempt();
}

void DataLink::Attempt() {
  v1::ConnectRequest request;
  request.set_node_id(std::string(reinterpret_cast<const char*>(self_.id.data()), self_.id.size()));
  {
    MutexLock lock(mu_);
    for (const std::string& source : sources_) request.add_sources(source);
  }
  ask_(request, std::chrono::system_clock::now() + kOfferTimeout,
       [this](const absl::StatusOr<v1::ConnectReply>& reply) { OnOffer(reply); });
}

void DataLink::OnOffer(const absl::StatusOr<v1::ConnectReply>& reply) {
  const absl::Status& answer = reply.status();
  daemon_has_none_.store(absl::IsUnimplemented(answer) || absl::IsFailedPrecondition(answer),
                         std::memory_order_relaxed);
  if (!reply.ok()) {
    // A daemon of before there was a data plane does not know the call.
    return Finish(absl::IsUnimplemented(reply.status())
                      ? absl::FailedPreconditionError("this daemon has no data plane")
                      : reply.status());
  }
  {
    MutexLock lock(mu_);
    if (stopping_) return;
    dialing_ = true;
  }
  // The first time takes long: UCX looks at the network devices.
  workers_.Post([this, offer = *reply] {
    Dial(offer);
    MutexLock lock(mu_);
    dialing_ = false;
    changed_.NotifyAll();
  });
}

bool DataLink::ComesFromElsewhere(const v1::ConnectReply& reply, const Offer& offer) {
  // A daemon of before does not say whom it admits: everybody.
  if (reply.admitted().empty()) return false;
  std::vector<HostAddress> admitted;
  for (const std::string& host : reply.admitted()) {
    const absl::StatusOr<HostAddress> address = ParseHost(host);
    if (address.ok()) admitted.push_back(*address);
  }
  bool all = true;
  for (const std::string& address : offer.addresses) {
    const absl::StatusOr<HostAddress> source = ParseHost(SourceTowards(address));
    if (!source.ok()) continue;  // There is no way: connecting says so.
    all &= std::find(admitted.begin(), admitted.end(), *source) != admitted.end();
  }
  MutexLock lock(mu_);
  if (all || stopping_) return false;
  std::vector<std::string> sources = SourcesTowards(offer.addresses);
  // Asked in vain: then the daemon says no to connecting, too.
  if (sources == sources_) return false;
  sources_ = std::move(sources);
  return true;
}

void DataLink::Dial(const v1::ConnectReply& reply) {
  absl::StatusOr<Offer> offer = OfferFromProto(reply);
  if (!offer.ok()) return Finish(offer.status());
  if (reply.plaintext() != options_.plaintext) {
    return Finish(absl::FailedPreconditionError(
        reply.plaintext()
            ? "the daemon does not encrypt its data plane, and this client wants to: give "
              "--data-plane-plaintext (plaintext, data_plane_plaintext)"
            : "the daemon encrypts its data plane, and this client does not want to: leave out "
              "--data-plane-plaintext (plaintext, data_plane_plaintext)"));
  }
  const bool ipv6 = offer->addresses.front().front() == '[';
  if (transport_ != nullptr && transport_ipv6_ != ipv6) {
    // Operations may still hold the old transport's connection.
    return Finish(absl::FailedPreconditionError(
        "the daemon's data plane moved to another address family: make a new client"));
  }
  if (ComesFromElsewhere(reply, *offer)) return Attempt();
  if (transport_ == nullptr) {
    TransportOptions options;
    options.self = self_;
    options.plaintext = options_.plaintext;
    options.limits.waiting_calls_max = kWaitingCallsMax;
    UcxOptions ucx;
    ucx.family = ipv6 ? AddressFamily::kIpv6 : AddressFamily::kIpv4;
    ucx.dial = offer->addresses;
    ucx.only_admitted = true;
    ucx.rdma = options_.rdma;
    absl::StatusOr<std::unique_ptr<Transport>> made = MakeUcxTransport(options, ucx);
    if (!made.ok()) {
      return Finish(absl::FailedPreconditionError(
          absl::StrCat("UCX cannot be had here: ", made.status().message())));
    }
    transport_ = *std::move(made);
    transport_ipv6_ = ipv6;
  }
  std::vector<std::string> hosts(reply.sources().begin(), reply.sources().end());
  if (hosts.size() > kSourcesMax) hosts.resize(kSourcesMax);
  for (const std::string& address : offer->addresses) hosts.push_back(HostOf(address));
  if (const absl::Status admitted = transport_->Admit(hosts); !admitted.ok()) {
    return Finish(admitted);
  }
  Transport::Connecting connecting;
  connecting.done = [this](const absl::StatusOr<ConnectionPtr>& result) { OnConnected(result); };
  connecting.closed = [this](const absl::Status& why) {
    MutexLock lock(mu_);
    connection_ = nullptr;
    if (!stopping_) LogDebug(absl::StrCat("data plane: the connection ended: ", why.message()));
  };
  transport_->Connect(*std::move(offer), std::move(connecting));
}

void DataLink::OnConnected(const absl::StatusOr<ConnectionPtr>& connection) {
  bool again = false;
  {
    MutexLock lock(mu_);
    // The daemon was restarted since it made the offer, or the offer was too old.
    again = !stopping_ && !second_try_ &&
            (absl::IsAborted(connection.status()) || absl::IsUnauthenticated(connection.status()));
    if (again) second_try_ = true;
  }
  if (again) return Attempt();
  Finish(connection);
}

void DataLink::Finish(const absl::StatusOr<ConnectionPtr>& result) {
  absl::StatusOr<ConnectionPtr> told = result;
  if (absl::IsUnauthenticated(result.status()) || absl::IsAborted(result.status())) {
    told = absl::UnavailableError(result.status().message());
  }
  std::set<Waiter*> waiters;
  {
    MutexLock lock(mu_);
    connecting_ = false;
    waiters.swap(waiters_);
    if (told.ok() && !stopping_) {
      connection_ = *told;
      backoff_ = std::chrono::milliseconds(0);
    } else if (!told.ok()) {
      const bool hopeless = absl::IsFailedPrecondition(told.status());
      backoff_ = hopeless ? kBackoffHopeless : std::clamp(2 * backoff_, kBackoffMin, kBackoffMax);
      retry_at_ = std::chrono::steady_clock::now() + backoff_;
      last_error_ = told.status();
    }
    if (told.ok() && stopping_) {
      (*told)->Close();
      told = absl::CancelledError("the client is being destroyed");
    }
  }
  for (Waiter* const waiter : waiters) waiter->Finish(told);
}

}  // namespace kvmill
