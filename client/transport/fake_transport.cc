#include "client/transport/fake_transport.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <random>
#include <set>
#include <unordered_map>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/transport/transport_base.h"
#include "storage/core/check.h"
#include "storage/core/status_macros.h"

namespace kvmill {

class FakeTransport;
class FakeWire;

// The two ends of a connection find each other here, as long as they live.
struct FakeLink {
  FakeWire* ends[2] = {nullptr, nullptr};
};

// Bytes that lie at their sender until the receiver says where to.
struct FakeRendezvous {
  FakeWire* sender = nullptr;  // Null: closed, the bytes are not ours to read any more.
  std::vector<WirePiece> pieces;
  MemoryKind memory = MemoryKind::kHost;
  WireOperation* operation = nullptr;
};
using FakeRendezvousPtr = std::shared_ptr<FakeRendezvous>;  // Of both ends and events on the way.

class FakeNetwork::Impl {
 public:
  explicit Impl(std::uint64_t seed) : random(seed) {}

  void At(std::int64_t nanos, FakeTransport* transport, std::function<void()> task) {
    events.emplace(nanos, Event{transport, std::move(task)});
  }
  std::int64_t Now() const { return clock.MonotonicNanos(); }
  bool Chance(double probability) {
    return probability > 0 && std::uniform_real_distribution<>(0, 1)(random) < probability;
  }
  std::int64_t Delay() {
    return std::uniform_int_distribution<std::int64_t>(faults.delay_min_nanos,
                                                       faults.delay_max_nanos)(random);
  }
  void RemoveEventsOf(FakeTransport* transport) {
    for (auto event = events.begin(); event != events.end();) {
      event = event->second.transport == transport ? events.erase(event) : std::next(event);
    }
  }

  struct Event {
    FakeTransport* transport;  // Where it happens: waits while that is stopped.
    std::function<void()> task;
  };

  ManualClock clock;
  std::mt19937_64 random;
  Faults faults;
  Nature nature;
  std::uint64_t device_bytes = 0;
  std::multimap<std::int64_t, Event> events;  // Equal times in the order of insertion.
  std::vector<FakeTransport*> transports;
};

class FakeTransport final : public TransportBase {
 public:
  FakeTransport(const TransportOptions& options, FakeNetwork::Impl* network, std::string address)
      : TransportBase(options, &network->clock),
        network_(network),
        nature_(network->nature),
        address_(std::move(address)) {
    network_->transports.push_back(this);
    set_rdma(nature_.rdma == RdmaUse::kExpected, nature_.rdma == RdmaUse::kRequired);
  }
  ~FakeTransport() override;

  std::vector<std::string> addresses() const override {
    return address_.empty() ? std::vector<std::string>() : std::vector<std::string>{address_};
  }
  bool Supports(MemoryKind memory) const override {
    return memory == MemoryKind::kHost || (options_.plaintext && nature_.copy_device != nullptr);
  }
  void Copy(MemoryKind kind, std::byte* to, const std::byte* from, std::size_t bytes) {
    if (kind == MemoryKind::kHost) {
      std::memcpy(to, from, bytes);
      return;
    }
    KVMILL_CHECK(Supports(kind));
    nature_.copy_device(to, from, bytes);
    network_->device_bytes += bytes;
  }
  const std::string& transport_name() const { return nature_.transport; }
  bool InLoop() const override { return true; }

  FakeNetwork::Impl* network() const { return network_; }
  const std::string& address() const { return address_; }
  bool stopped() const { return stopped_; }
  void set_stopped(bool stopped) { stopped_ = stopped; }
  std::set<FakeWire*>* wires() { return &wires_; }

  // Runs everything that is due now.
  void Run() {
    while (RunTasks() || RunDue()) {
    }
  }
  std::int64_t NextNanos() { return stopped_ ? INT64_MAX : NextDueNanos(); }
  bool AcceptFrom(const std::shared_ptr<FakeLink>& link, const std::string& from);

 private:
  absl::StatusOr<std::unique_ptr<Wire>> DialWire(const std::string& address,
                                                 WireEvents* events) override;
  void Wake() override {}  // The network looks at every transport.

  FakeNetwork::Impl* const network_;
  const FakeNetwork::Nature nature_;
  const std::string address_;
  bool stopped_ = false;
  std::set<FakeWire*> wires_;  // Not closed.
};

class FakeWire final : public Wire {
 public:
  FakeWire(FakeTransport* transport, WireEvents* events, std::shared_ptr<FakeLink> link, int end,
           std::string peer)
      : transport_(transport),
        network_(transport->network()),
        events_(events),
        link_(std::move(link)),
        end_(end),
        peer_(std::move(peer)) {
    link_->ends[end_] = this;
    transport_->wires()->insert(this);
  }
  ~FakeWire() override { KVMILL_CHECK(closed_ && sending_.empty() && receiving_.empty()); }

  void Send(const Outgoing& message, WireOperation* operation) override;
  void Receive(void* token, absl::Span<const WirePiece> pieces, MemoryKind memory,
               WireOperation* operation) override;
  void Drop(void* token) override;
  void Close() override;
  std::string transport_name() const override { return transport_->transport_name(); }
  std::string peer_address() const override { return peer_; }

  void Break(const absl::Status& why) {
    if (!closed_) events_->OnBroken(why);
  }
  // The peer will learn it in a while, unless it is closed by then.
  void BreakLater() {
    const std::shared_ptr<FakeLink> link = link_;
    const int end = end_;
    network_->At(network_->Now() + network_->Delay(), transport_, [link, end] {
      if (link->ends[end] != nullptr) {
        link->ends[end]->Break(absl::UnavailableError("the connection broke"));
      }
    });
  }

 private:
  FakeWire* peer() const { return link_->ends[1 - end_]; }
  void Deliver(WireChannel channel, const std::vector<std::byte>& header,
               const std::vector<std::byte>& data, const FakeRendezvousPtr& rendezvous,
               std::size_t bytes);
  void FinishSend(const FakeRendezvousPtr& rendezvous) {
    if (sending_.erase(rendezvous) == 0) return;
    WireOperation* const operation = rendezvous->operation;
    rendezvous->sender = nullptr;
    operation->OnDone(absl::OkStatus());
  }
  struct Receiving {
    std::vector<WirePiece> pieces;
    MemoryKind memory;
    WireOperation* operation;
  };

  FakeTransport* const transport_;
  FakeNetwork::Impl* const network_;
  WireEvents* const events_;
  const std::shared_ptr<FakeLink> link_;  // Also of events on the way.
  const int end_;
  const std::string peer_;
  std::int64_t arrives_nanos_ = 0;  // The last message, in the order they were sent.
  bool closed_ = false;
  std::set<FakeRendezvousPtr> sending_;
  std::unordered_map<void*, FakeRendezvousPtr> tokens_;  // That arrived.
  std::map<FakeRendezvousPtr, Receiving> receiving_;
};

void FakeWire::Send(const Outgoing& message, WireOperation* operation) {
  if (closed_) {
    operation->OnDone(absl::UnavailableError("the connection is closed"));
    return;
  }
  std::vector<std::byte> header(message.header.begin(), message.header.end());
  std::vector<std::byte> data;
  std::size_t bytes = 0;
  for (const WirePiece& piece : message.pieces) bytes += piece.bytes;
  FakeRendezvousPtr rendezvous;
  if (message.rendezvous) {
    rendezvous = std::make_shared<FakeRendezvous>();
    rendezvous->sender = this;
    rendezvous->pieces.assign(message.pieces.begin(), message.pieces.end());
    rendezvous->memory = message.memory;
    rendezvous->operation = operation;
    sending_.insert(rendezvous);
  } else {
    KVMILL_CHECK(message.memory == MemoryKind::kHost || bytes == 0);
    for (const WirePiece& piece : message.pieces) {
      data.insert(data.end(), piece.data, piece.data + piece.bytes);
    }
  }
  if (network_->Chance(network_->faults.corrupt)) {
    std::vector<std::byte>& victim = !data.empty() && network_->Chance(0.5) ? data : header;
    const std::size_t bit = network_->random() % (8 * victim.size());
    victim[bit / 8] ^= static_cast<std::byte>(1 << (bit % 8));
  }
  if (network_->Chance(network_->faults.cut)) {
    BreakLater();
    if (peer() != nullptr) peer()->BreakLater();
  } else if (peer() != nullptr && !network_->Chance(network_->faults.loss)) {
    const std::shared_ptr<FakeLink> link = link_;
    const int end = 1 - end_;
    std::int64_t nanos = network_->Now() + network_->Delay();
    if (message.channel == WireChannel::kSegments && network_->Chance(network_->faults.reorder)) {
      nanos += 20 * network_->Delay();
    } else {
      arrives_nanos_ = nanos = std::max(nanos, arrives_nanos_);
    }
    network_->At(nanos, peer()->transport_,
                 [link, end, channel = message.channel, header = std::move(header),
                  data = std::move(data), rendezvous, bytes] {
                   FakeWire* const to = link->ends[end];
                   if (to != nullptr && !to->closed_) {
                     to->Deliver(channel, header, data, rendezvous, bytes);
                   }
                 });
  }
  if (!message.rendezvous) operation->OnDone(absl::OkStatus());
}

void FakeWire::Deliver(WireChannel channel, const std::vector<std::byte>& header,
                       const std::vector<std::byte>& data, const FakeRendezvousPtr& rendezvous,
                       std::size_t bytes) {
  WireMessage message{
      .channel = channel, .header = header, .data = data, .token = nullptr, .data_bytes = bytes};
  if (rendezvous != nullptr) {
    message.token = rendezvous.get();
    tokens_[message.token] = rendezvous;
  }
  if (!events_->OnMessage(message) && rendezvous != nullptr) Drop(message.token);
}

void FakeWire::Receive(void* token, absl::Span<const WirePiece> pieces, MemoryKind memory,
                       WireOperation* operation) {
  if (closed_) {
    operation->OnDone(absl::UnavailableError("the connection is closed"));
    return;
  }
  const auto found = tokens_.find(token);
  KVMILL_CHECK(found != tokens_.end());
  const FakeRendezvousPtr rendezvous = std::move(found->second);
  tokens_.erase(found);
  receiving_[rendezvous] = {{pieces.begin(), pieces.end()}, memory, operation};
  if (network_->Chance(network_->faults.loss)) return;
  const bool corrupt = network_->Chance(network_->faults.corrupt);
  const std::shared_ptr<FakeLink> link = link_;
  const int end = end_;
  network_->At(network_->Now() + network_->Delay(), transport_, [link, end, rendezvous, corrupt] {
    FakeWire* const to = link->ends[end];
    if (to == nullptr || to->closed_ || rendezvous->sender == nullptr) return;  // It will break.
    std::vector<std::byte> bytes;
    for (const WirePiece& piece : rendezvous->pieces) {
      bytes.resize(bytes.size() + piece.bytes);
      rendezvous->sender->transport_->Copy(
          rendezvous->memory, bytes.data() + bytes.size() - piece.bytes, piece.data, piece.bytes);
    }
    if (corrupt) bytes[bytes.size() / 2] ^= std::byte{4};
    auto receiving = to->receiving_.extract(rendezvous);
    std::size_t offset = 0;
    for (const WirePiece& piece : receiving.mapped().pieces) {
      to->transport_->Copy(receiving.mapped().memory, piece.data, bytes.data() + offset,
                           piece.bytes);
      offset += piece.bytes;
    }
    FakeWire* const sender = rendezvous->sender;
    const int sender_end = 1 - end;
    to->network_->At(to->network_->Now() + to->network_->Delay(), sender->transport_,
                     [link, sender_end, rendezvous] {
                       FakeWire* const from = link->ends[sender_end];
                       if (from != nullptr) from->FinishSend(rendezvous);
                     });
    receiving.mapped().operation->OnDone(absl::OkStatus());
  });
}

void FakeWire::Drop(void* token) {
  const auto found = tokens_.find(token);
  if (found == tokens_.end()) return;
  const FakeRendezvousPtr rendezvous = std::move(found->second);
  tokens_.erase(found);
  if (rendezvous->sender == nullptr) return;
  const std::shared_ptr<FakeLink> link = link_;
  const int sender_end = 1 - end_;
  network_->At(network_->Now() + network_->Delay(), rendezvous->sender->transport_,
               [link, sender_end, rendezvous] {
                 FakeWire* const from = link->ends[sender_end];
                 if (from != nullptr) from->FinishSend(rendezvous);
               });
}

void FakeWire::Close() {
  if (closed_) return;
  closed_ = true;
  transport_->wires()->erase(this);
  link_->ends[end_] = nullptr;
  if (peer() != nullptr) peer()->BreakLater();
  tokens_.clear();
  network_->At(network_->Now(), transport_, [this] {
    const absl::Status status = absl::UnavailableError("the connection broke");
    while (!sending_.empty()) {
      const FakeRendezvousPtr rendezvous = *sending_.begin();
      sending_.erase(sending_.begin());
      rendezvous->sender = nullptr;
      rendezvous->operation->OnDone(status);
    }
    while (!receiving_.empty()) {
      auto receiving = receiving_.extract(receiving_.begin());
      receiving.mapped().operation->OnDone(status);
    }
    events_->OnClosed();
  });
}

FakeTransport::~FakeTransport() {
  stopped_ = false;
  Shutdown();
  // Closing takes no time; whatever else is due now belongs to others and may happen.
  while (has_connections() || NextDueNanos() == INT64_MIN) {
    Run();
    auto event = network_->events.begin();
    while (event != network_->events.end() && event->second.transport != this) ++event;
    if (event == network_->events.end()) continue;
    const std::function<void()> task = std::move(event->second.task);
    network_->events.erase(event);
    task();
  }
  network_->RemoveEventsOf(this);
  auto& all = network_->transports;
  all.erase(std::find(all.begin(), all.end(), this));
}

absl::StatusOr<std::unique_ptr<Wire>> FakeTransport::DialWire(const std::string& address,
                                                              WireEvents* events) {
  FakeTransport* target = nullptr;
  for (FakeTransport* const transport : network_->transports) {
    if (transport->address() == address && !address.empty()) target = transport;
  }
  auto link = std::make_shared<FakeLink>();
  auto wire = std::make_unique<FakeWire>(this, events, link, 0, address);
  if (target == nullptr || target == this) {
    wire->BreakLater();
    return wire;
  }
  // In two steps, as networks do it: what this end sends meanwhile finds nobody yet, so the other
  // end exists at once; that its owner refuses it comes later.
  if (!target->AcceptFrom(link, address_)) wire->BreakLater();
  return wire;
}

bool FakeTransport::AcceptFrom(const std::shared_ptr<FakeLink>& link, const std::string& from) {
  return AcceptWire([&](WireEvents* events) -> absl::StatusOr<std::unique_ptr<Wire>> {
    return std::make_unique<FakeWire>(this, events, link, 1, from);
  });
}

FakeNetwork::FakeNetwork(std::uint64_t seed) : impl_(std::make_unique<Impl>(seed)) {}

FakeNetwork::~FakeNetwork() { KVMILL_CHECK(impl_->transports.empty()); }

absl::StatusOr<std::unique_ptr<Transport>> FakeNetwork::MakeTransport(
    const TransportOptions& options, const std::string& address) {
  KVMILL_RETURN_IF_ERROR(CheckTransportOptions(options));
  for (const FakeTransport* const transport : impl_->transports) {
    if (!address.empty() && transport->address() == address) {
      return absl::AlreadyExistsError(absl::StrCat("somebody is at \"", address, "\" already"));
    }
  }
  return std::make_unique<FakeTransport>(options, impl_.get(), address);
}

void FakeNetwork::set_faults(const Faults& faults) { impl_->faults = faults; }

void FakeNetwork::set_nature(const Nature& nature) { impl_->nature = nature; }

std::uint64_t FakeNetwork::device_bytes() const { return impl_->device_bytes; }

void FakeNetwork::Cut(const std::string& address) {
  for (FakeTransport* const transport : impl_->transports) {
    if (transport->address() != address) continue;
    const std::vector<FakeWire*> wires(transport->wires()->begin(), transport->wires()->end());
    for (FakeWire* const wire : wires) {
      wire->BreakLater();
      // Its peer learns it from the wire's end.
    }
  }
}

void FakeNetwork::Stop(const std::string& address) {
  for (FakeTransport* const transport : impl_->transports) {
    if (transport->address() == address) transport->set_stopped(true);
  }
}

void FakeNetwork::Resume(const std::string& address) {
  for (FakeTransport* const transport : impl_->transports) {
    if (transport->address() == address) transport->set_stopped(false);
  }
}

const Clock& FakeNetwork::clock() const { return impl_->clock; }

bool FakeNetwork::Step() {
  const std::int64_t now = impl_->Now();
  std::int64_t next = INT64_MAX;
  FakeTransport* runner = nullptr;
  for (FakeTransport* const transport : impl_->transports) {
    const std::int64_t due = transport->NextNanos();
    if (due < next) {
      next = due;
      runner = transport;
    }
  }
  auto event = impl_->events.begin();
  while (event != impl_->events.end() && event->second.transport->stopped()) ++event;
  if (event != impl_->events.end() && (runner == nullptr || event->first < next)) {
    if (event->first > now) impl_->clock.AdvanceNanos(event->first - now);
    const std::function<void()> task = std::move(event->second.task);
    impl_->events.erase(event);
    task();
    return true;
  }
  if (runner == nullptr) return false;
  if (next > now) impl_->clock.AdvanceNanos(next - now);
  runner->Run();
  return true;
}

void FakeNetwork::RunFor(std::int64_t nanos) {
  const std::int64_t end = impl_->Now() + nanos;
  RunUntil([] { return false; }, nanos);
  if (impl_->Now() < end) impl_->clock.AdvanceNanos(end - impl_->Now());
}

bool FakeNetwork::RunUntil(const std::function<bool()>& done, std::int64_t limit_nanos) {
  const std::int64_t end = impl_->Now() + limit_nanos;
  while (!done()) {
    std::int64_t next = INT64_MAX;
    for (FakeTransport* const transport : impl_->transports) {
      next = std::min(next, transport->NextNanos());
    }
    for (const auto& [nanos, event] : impl_->events) {
      if (event.transport->stopped()) continue;
      next = std::min(next, nanos);
      break;
    }
    if (next > end) return false;
    Step();
  }
  return true;
}

}  // namespace kvmill
