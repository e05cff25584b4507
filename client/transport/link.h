// A connection to one peer that comes back: asks for an offer, connects, and after a failure tries
// again, waiting longer each time. One failure bans nobody for ever; a peer that is gone costs one
// attempt now and then.
//
// Calls go to the connection of the moment. Those under way when it breaks fail with UNAVAILABLE
// and are not repeated: whether the peer did them is unknown, and only their owner knows whether
// doing them twice is harmless. Calls started while there is no connection fail at once with
// UNAVAILABLE (retry elsewhere), except that the first ones wait for a connection being made, up to
// calls_max.
#ifndef KVMILL_CLIENT_TRANSPORT_LINK_H_
#define KVMILL_CLIENT_TRANSPORT_LINK_H_

#include <cstdint>
#include <functional>
#include <memory>

#include "absl/functional/any_invocable.h"
#include "absl/status/statusor.h"
#include "client/transport/transport.h"

namespace kvmill {

class Link {
 public:
  struct Options {
    std::int64_t backoff_min_nanos = 100'000'000;
    std::int64_t backoff_max_nanos = 10'000'000'000;  // Doubled from min up to here,
    std::uint64_t seed = 1;                           // and scattered between half and all of it.
    std::uint32_t calls_max = 64;                     // That wait for a connection being made.
  };
  // Fetches a new offer over the authenticated channel and hands it over, once, from any thread. An
  // error counts as a failed attempt.
  using AskForOffer = std::function<void(absl::AnyInvocable<void(absl::StatusOr<Offer>)>)>;

  struct State {
    bool connected = false;
    bool connecting = false;
    std::uint64_t attempts = 0;  // Since the start.
    std::uint64_t failures_in_a_row = 0;
    std::int64_t next_attempt_nanos = 0;  // Of the transport's time, while waiting.
    absl::Status last_error;
  };

  // `transport` and what `ask` uses outlive the link, and whatever it started: destroy the
  // transport after the link. Nothing is dialed before the first call.
  Link(Transport* transport, AskForOffer ask, const Options& options);
  // Closes the connection. Calls under way complete later, as Connection::Close says; those that
  // waited for one complete with CANCELLED before this returns, on this thread.
  ~Link();

  // `call.done` will run, possibly before this returns when there is no connection. Thread-safe.
  void Start(Call call);
  // Null while there is none. Thread-safe; for calls that are to be cancelled, and for info().
  ConnectionPtr connection() const;
  State state() const;

 private:
  class Impl;
  const std::shared_ptr<Impl> impl_;  // Also of callbacks that come after the link is gone.
};

}  // namespace kvmill

#endif  // KVMILL_CLIENT_TRANSPORT_LINK_H_
