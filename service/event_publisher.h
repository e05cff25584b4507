// Publishes what happens to the blocks of one tenant in the form that routers read from engines:
// vLLM's KV cache events over ZeroMQ (event_wire.h has the payload).
//
// PUB socket: messages of three parts, topic, sequence (8 bytes, big-endian), payload. Sequences
// begin with 0 when the daemon starts, and so does a first batch with AllBlocksCleared; then come
// the blocks that are here. ZeroMQ drops what a subscriber does not take in time, which that one
// sees by a gap in the sequences.
//
// ROUTER socket, for replay: the request is the first sequence that is wanted (8 bytes, big-endian,
// behind an empty part, as REQ sends it); the answers are the messages from that one on, and an end
// marker with sequence -1 and an empty payload. When the first one is not kept any more, what is
// sent instead is AllBlocksCleared and the blocks that are here, under the last sequences before
// the present; whoever applies them, and what follows, has what is here.
//
// The readers count how often a block was stored, so each event is published once, and a snapshot
// is exactly of its place.
#ifndef KVMILL_SERVICE_EVENT_PUBLISHER_H_
#define KVMILL_SERVICE_EVENT_PUBLISHER_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "client/server_address.h"
#include "service/event_journal.h"
#include "service/event_wire.h"
#include "storage/core/clock.h"
#include "storage/tiered_store.h"

namespace kvmill {

class EventPublisher {
 public:
  struct Options {
    std::string tenant;
    HostPort address;                // Port 0: a free one. The host is numeric.
    std::optional<HostPort> replay;  // Absent: none.
    std::string topic;
    std::string namespace_name;          // Only of this one; empty: of all, in one stream.
    std::uint32_t buffer_steps = 10000;  // Messages that are kept,
    std::size_t buffer_bytes = std::size_t{64} << 20;  // and their payloads' bytes.
    std::uint32_t high_water_mark = 100000;            // Of each subscriber.
    WireHashes hashes = WireHashes::kInt;
    bool replay_topic = true;  // Answers to replays begin with the topic.
  };
  // UNAVAILABLE naming the address that cannot be bound; RESOURCE_EXHAUSTED as EventJournal::Open.
  static absl::StatusOr<std::unique_ptr<EventPublisher>> Start(const Options& options,
                                                               EventJournal& journal,
                                                               const TieredStore& store,
                                                               const Clock& clock);
  // Ends when the journal has ended, too: before that, or before the store.
  ~EventPublisher();

  // "tcp://HOST:PORT", with the real port; empty without one.
  const std::string& address() const;
  const std::string& replay_address() const;

 private:
  class Impl;
  explicit EventPublisher(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace kvmill

#endif  // KVMILL_SERVICE_EVENT_PUBLISHER_H_
