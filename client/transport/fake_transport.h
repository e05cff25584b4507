// Transports within one process, in simulated time, with faults on demand: everything above the
// wire (handshake, encryption, windows, deadlines) is the code that runs over UCX.
//
// A FakeNetwork joins any number of transports. Nothing happens by itself: Step and its friends run
// what is due, advancing the clock to it, so that a run is a function of seed and calls. Not
// thread-safe: network, transports and connections belong to one thread.
#ifndef KVMILL_CLIENT_TRANSPORT_FAKE_TRANSPORT_H_
#define KVMILL_CLIENT_TRANSPORT_FAKE_TRANSPORT_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "client/transport/rdma_use.h"
#include "client/transport/transport.h"
#include "storage/core/clock.h"

namespace kvmill {

class FakeNetwork {
 public:
  // Probabilities are per message of the wire (a segment of a payload, a step of the handshake).
  struct Faults {
    std::int64_t delay_min_nanos = 10'000;
    std::int64_t delay_max_nanos = 50'000;
    double reorder = 0;  // Delayed by twenty times as much: others overtake it. Segments only.
    double loss = 0;     // Never arrives, and nobody is told.
    double corrupt = 0;  // One bit of header or data flips.
    double cut = 0;      // The connection breaks instead, on both sides.
  };

  // What a network is made of. Of transports that are made from then on.
  struct Nature {
    std::string transport = "fake/memory";  // ConnectionInfo::transport.
    RdmaUse rdma = RdmaUse::kNever;
    // Copies to or from device memory, the other end is host memory: then Supports(kCuda) in
    // plaintext. Null: such memory cannot be had.
    std::function<void(std::byte* to, const std::byte* from, std::size_t bytes)> copy_device;
  };

  explicit FakeNetwork(std::uint64_t seed);
  ~FakeNetwork();  // After all its transports.

  // Reached at `address`, any text without faults of its own; empty: dials only. INVALID_ARGUMENT
  // for bad options, ALREADY_EXISTS for an address in use. The network outlives the transport.
  absl::StatusOr<std::unique_ptr<Transport>> MakeTransport(const TransportOptions& options,
                                                           const std::string& address);

  void set_faults(const Faults& faults);
  void set_nature(const Nature& nature);
  // That were copied to or from device memory so far.
  std::uint64_t device_bytes() const;
  // Breaks every connection of the transport at `address`; both sides learn it.
  void Cut(const std::string& address);
  // As if the process there were stopped: it runs nothing, its peers learn nothing.
  void Stop(const std::string& address);
  void Resume(const std::string& address);

  const Clock& clock() const;
  // Runs what is due next, advancing the clock. False: nothing will ever happen by itself.
  bool Step();
  void RunFor(std::int64_t nanos);
  // False: `limit_nanos` of simulated time passed, or nothing is left to happen.
  bool RunUntil(const std::function<bool()>& done, std::int64_t limit_nanos);

 private:
  friend class FakeTransport;
  friend class FakeWire;
  class Impl;
  const std::unique_ptr<Impl> impl_;
};

}  // namespace kvmill

#endif  // KVMILL_CLIENT_TRANSPORT_FAKE_TRANSPORT_H_
