// Two transports that talk to each other, over UCX or in memory, for tests of the interface.
#ifndef KVMILL_TESTS_CLIENT_TRANSPORT_TRANSPORT_FIXTURE_H_
#define KVMILL_TESTS_CLIENT_TRANSPORT_TRANSPORT_FIXTURE_H_

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "client/transport/fake_transport.h"
#include "client/transport/transport.h"
#include "client/transport/ucx_transport.h"
#include "storage/core/mutex.h"

namespace kvmill::testing {

inline constexpr std::int64_t kMilli = 1'000'000;
inline constexpr std::int64_t kSecond = 1'000'000'000;

inline std::vector<std::byte> RandomData(std::size_t bytes, std::uint64_t seed) {
  std::vector<std::byte> data(bytes);
  std::mt19937_64 random(seed);
  for (std::size_t i = 0; i < bytes; i += 8) {
    const std::uint64_t value = random();
    for (std::size_t j = i; j < std::min(bytes, i + 8); ++j) {
      data[j] = static_cast<std::byte>(value >> (8 * (j - i)));
    }
  }
  return data;
}

inline std::vector<std::byte> ToBytes(absl::string_view text) {
  const auto* const data = reinterpret_cast<const std::byte*>(text.data());
  return {data, data + text.size()};
}
inline std::string ToText(absl::Span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

// A value that a callback sets and a test waits for. Counts how often it was set.
template <typename T>
class Box {
 public:
  void Set(T value) {
    const MutexLock lock(mu_);
    value_ = std::move(value);
    ++times_;
    changed_.NotifyAll();
  }
  bool has() const {
    const MutexLock lock(mu_);
    return times_ > 0;
  }
  int times() const {
    const MutexLock lock(mu_);
    return times_;
  }
  T Get() const {
    const MutexLock lock(mu_);
    return *value_;
  }

 private:
  mutable Mutex mu_;
  CondVar changed_;
  std::optional<T> value_ ABSL_GUARDED_BY(mu_);
  int times_ ABSL_GUARDED_BY(mu_) = 0;
};

// A handler whose reactions a test sets. Defaults: header `echo` returns what came; anything else
// is answered OK and empty.
class ScriptedHandler : public TransportHandler {
 public:
  using OnCallFunction = std::function<void(std::unique_ptr<IncomingCall>)>;

  void set_on_call(OnCallFunction function) {
    const MutexLock lock(mu_);
    on_call_ = std::move(function);
  }

  void OnConnection(const ConnectionPtr& connection) override {
    const MutexLock lock(mu_);
    connections_.push_back(connection);
  }
  void OnClosed(const ConnectionPtr& /*connection*/, const absl::Status& why) override {
    const MutexLock lock(mu_);
    closed_.push_back(why);
  }
  void OnCall(const ConnectionPtr& /*connection*/, std::unique_ptr<IncomingCall> call) override {
    OnCallFunction function;
    {
      const MutexLock lock(mu_);
      function = on_call_;
      ++calls_;
    }
    if (function) return function(std::move(call));
    Echo(std::move(call));
  }

  // Receives the request and answers with the same header and payload.
  static void Echo(std::unique_ptr<IncomingCall> call) {
    const std::size_t bytes = call->payload_bytes();
    auto buffer = std::make_shared<std::vector<std::byte>>(bytes);
    IncomingCall* const raw = call.get();
    auto shared = std::make_shared<std::unique_ptr<IncomingCall>>(std::move(call));
    raw->Receive(
        {absl::MakeSpan(*buffer)}, MemoryKind::kHost, [shared, buffer](absl::Status status) {
          std::vector<std::byte> header((*shared)->header().begin(), (*shared)->header().end());
          (*shared)->Respond({.status = status,
                              .header = std::move(header),
                              .payload = {absl::MakeConstSpan(*buffer)},
                              .done = [buffer](absl::Status) {}});
          shared->reset();
        });
  }

  std::vector<ConnectionPtr> connections() const {
    const MutexLock lock(mu_);
    return connections_;
  }
  std::vector<absl::Status> closed() const {
    const MutexLock lock(mu_);
    return closed_;
  }
  int calls() const {
    const MutexLock lock(mu_);
    return calls_;
  }

 private:
  mutable Mutex mu_;
  OnCallFunction on_call_ ABSL_GUARDED_BY(mu_);
  std::vector<ConnectionPtr> connections_ ABSL_GUARDED_BY(mu_);
  std::vector<absl::Status> closed_ ABSL_GUARDED_BY(mu_);
  int calls_ ABSL_GUARDED_BY(mu_) = 0;
};

// One call of a test and how it ended.
struct CallResult {
  Box<absl::StatusOr<Response>> done;
  std::vector<std::byte> destination;  // The response's payload.
  CallId id = 0;

  absl::Status status() const { return done.Get().status(); }
};
using CallResultPtr = std::shared_ptr<CallResult>;  // Of the test and of the call's callbacks.

// How the transports of a test are made.
struct TransportKind {
  bool ucx = false;
  bool plaintext = false;
};
inline std::string NameOf(const TransportKind& kind) {
  return std::string(kind.ucx ? "Ucx" : "Fake") + (kind.plaintext ? "Plaintext" : "Encrypted");
}

// A server that listens and a client, with their handlers.
class Pair {
 public:
  explicit Pair(const TransportKind& kind, std::uint64_t seed = 1) : kind_(kind) {
    if (!kind.ucx) network_ = std::make_unique<FakeNetwork>(seed);
    server_options.self = {NodeIdentity::IdOf("server"), 11};
    server_options.plaintext = kind.plaintext;
    server_options.handler = &server_handler;
    client_options.self = {NodeIdentity::IdOf("client"), 22};
    client_options.plaintext = kind.plaintext;
    client_options.handler = &client_handler;
    // In real time: a machine that has much else to do is not what most tests are about.
    if (kind.ucx) server_options.handshake_nanos = client_options.handshake_nanos = 40 * kSecond;
  }
  ~Pair() {
    client.reset();
    server.reset();
  }

  void Make() {
    MakeServer();
    MakeClient();
  }
  void MakeServer() { server = MakeTransport(server_options, true); }
  void MakeClient() { client = MakeTransport(client_options, false); }
  std::unique_ptr<Transport> MakeTransport(const TransportOptions& options, bool listens) {
    absl::StatusOr<std::unique_ptr<Transport>> made =
        kind_.ucx
            ? MakeUcxTransport(options, {.listen = listens ? std::vector<std::string>{"127.0.0.1:0"}
                                                           : std::vector<std::string>{}})
            : network_->MakeTransport(options, listens ? "server" : "");
    EXPECT_TRUE(made.ok()) << made.status();
    return *std::move(made);
  }

  // Real time over UCX, simulated time otherwise.
  bool WaitFor(const std::function<bool()>& done, std::int64_t limit_nanos = 60 * kSecond) {
    if (network_ != nullptr) return network_->RunUntil(done, limit_nanos);
    const auto end = std::chrono::steady_clock::now() + std::chrono::nanoseconds(limit_nanos);
    while (!done()) {
      if (std::chrono::steady_clock::now() > end) return false;
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
    return true;
  }
  void Pass(std::int64_t nanos) {
    if (network_ != nullptr) {
      network_->RunFor(nanos);
    } else {
      std::this_thread::sleep_for(std::chrono::nanoseconds(nanos));
    }
  }

  absl::StatusOr<ConnectionPtr> TryConnect(const Offer& offer) {
    auto result = std::make_shared<Box<absl::StatusOr<ConnectionPtr>>>();
    client->Connect(
        offer, {.done = [result](absl::StatusOr<ConnectionPtr> c) { result->Set(std::move(c)); },
                .closed = [this](absl::Status why) { client_closed.Set(why); }});
    if (!WaitFor([&] { return result->has(); })) return absl::InternalError("nothing happened");
    EXPECT_EQ(result->times(), 1);
    return result->Get();
  }
  ConnectionPtr Connect(std::uint64_t owner_tag = 0) {
    absl::StatusOr<Offer> offer = server->MakeOffer(owner_tag);
    EXPECT_TRUE(offer.ok()) << offer.status();
    absl::StatusOr<ConnectionPtr> connection = TryConnect(*offer);
    EXPECT_TRUE(connection.ok()) << connection.status();
    return connection.ok() ? *connection : nullptr;
  }

  // `payload` lives until the call is done.
  CallResultPtr Start(const ConnectionPtr& connection, absl::string_view header,
                      absl::Span<const std::byte> payload = {},
                      std::int64_t timeout_nanos = 40 * kSecond) {
    auto result = std::make_shared<CallResult>();
    Call call;
    call.header = ToBytes(header);
    if (!payload.empty()) call.payload = {payload};
    call.timeout_nanos = timeout_nanos;
    call.place = [result](const ResponseHead& head, DestinationSpans* spans) {
      result->destination.resize(head.payload_bytes);
      spans->push_back(absl::MakeSpan(result->destination));
      return absl::OkStatus();
    };
    call.done = [result](absl::StatusOr<Response> response) {
      result->done.Set(std::move(response));
    };
    result->id = connection->Start(std::move(call));
    return result;
  }
  absl::Status Wait(const CallResultPtr& result) {
    if (!WaitFor([&] { return result->done.has(); })) return absl::InternalError("never completed");
    EXPECT_EQ(result->done.times(), 1);
    return result->status();
  }

  // Every count of what is in flight is back at zero, on both sides.
  bool Idle() const {
    for (const Transport* const transport : {client.get(), server.get()}) {
      if (transport == nullptr) continue;
      const TransportStats stats = transport->stats();
      if (stats.calls_started + stats.calls_served + stats.operations + stats.held_bytes != 0) {
        return false;
      }
    }
    return true;
  }
  void ExpectIdle() {
    EXPECT_TRUE(WaitFor([this] { return Idle(); }));
    for (const Transport* const transport : {client.get(), server.get()}) {
      if (transport == nullptr) continue;
      const TransportStats stats = transport->stats();
      EXPECT_EQ(stats.calls_started, 0u);
      EXPECT_EQ(stats.calls_served, 0u);
      EXPECT_EQ(stats.operations, 0u);
      EXPECT_EQ(stats.held_bytes, 0u);
    }
  }

  FakeNetwork* network() { return network_.get(); }

  TransportOptions server_options;
  TransportOptions client_options;
  ScriptedHandler server_handler;
  ScriptedHandler client_handler;
  Box<absl::Status> client_closed;

 private:
  const TransportKind kind_;
  std::unique_ptr<FakeNetwork> network_;

 public:
  std::unique_ptr<Transport> server;
  std::unique_ptr<Transport> client;
};

}  // namespace kvmill::testing

#endif  // KVMILL_TESTS_CLIENT_TRANSPORT_TRANSPORT_FIXTURE_H_
