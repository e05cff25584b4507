// Events as routers read them from engines: the payload of vLLM's KV cache events, msgpack.
//
//   [ts, [event, ...], 0]        seconds of Unix time (float 64); the last is the data-parallel
//   rank
//   ["BlockStored", [hash, ...], nil, [], block_size, nil, medium, lora_name or nil]
//   ["BlockRemoved", [hash, ...], medium]
//   ["AllBlocksCleared"]
//
// The fields of BlockStored that are nil or empty are the parent's hash, the token ids and the
// adapter's number. kvmill knows no token ids, and without them a parent is of no use to a reader:
// engines' own events of blocks in other memory than the GPU's have neither.
//
// Sources, and which readers take what: docs/decisions/0047.
#ifndef KVMILL_SERVICE_EVENT_WIRE_H_
#define KVMILL_SERVICE_EVENT_WIRE_H_

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "service/event_log.h"
#include "storage/core/block_key.h"
#include "storage/core/tier.h"

namespace kvmill {

enum class WireHashes : std::uint8_t {
  kInt,    // The last 8 bytes of the key, as a big-endian number; of a shorter one all of it.
  kBytes,  // The whole key.
};

// What readers call where a block is: GPU, CPU or DISK.
const char* MediumOf(Tier tier);

// One event, of any number of blocks that have all of it in common.
struct WireEvent {
  enum class Kind : std::uint8_t { kStored, kRemoved, kCleared };
  Kind kind = Kind::kCleared;
  Tier tier = Tier::kHost;
  std::uint32_t block_tokens = 0;
  std::string adapter;  // Empty: none.
  std::vector<BlockKey> keys;
};

struct WireNamespace {
  std::uint32_t block_tokens = 0;
  std::string adapter;
};

// Events that have no kCleared among them. Of each block in their order, and blocks with the same
// fate together; a block that moved is stored in its new medium before it is removed from the old
// one. Tails are left out: no reader knows their keys.
std::vector<WireEvent> ToWireEvents(absl::Span<const BlockEvent> events,
                                    const std::function<WireNamespace(NamespaceId)>& namespace_of);

std::string PackEvents(double unix_seconds, absl::Span<const WireEvent> events, WireHashes hashes);

// A sequence number as it travels: 8 bytes, big-endian.
std::string PackSequence(std::uint64_t sequence);

}  // namespace kvmill

#endif  // KVMILL_SERVICE_EVENT_WIRE_H_
