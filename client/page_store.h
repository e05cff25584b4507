// Storing from the engine's own pages, without a copy: a daemon on the same node encodes straight
// from shared memory.
//
//   auto memory = SharedMemory::Create(bytes);  // KV pages live in it.
//   geometry.regions[0].fd = memory->fd();      // ... base, bytes, layers
//   auto registration = client->RegisterMemory(ns, geometry);
//   client->StorePagesAsync(ns, *registration, blocks, options, call, done);
//   for (layer ...) { compute; client->ReadyPages(options.request, layer + 1); }
//   client->FlushPages(options.request);        // Before the pages get another use.
//
// with options.ready_layers = 0. The call lasts until the last layer is stored: call.timeout is at
// least what computing them takes.
//
// Or from memory of a GPU that it uses as well: EngineRegion::device_memory instead of fd.
//
// When values are read. Never before they are ready: `ready_layers` of the call says what is, and
// ReadyPages says more. Layers are stored as they become ready. Values that are ready must stay
// until the pages are free. Of memory of a GPU: the work that writes them has ended there (an event
// behind it has passed), not only been enqueued; the daemon's streams wait for nothing else.
//
// When pages are free, that is, when nobody reads them and nobody will:
//   - when the store is done, with whichever status but DEADLINE_EXCEEDED;
//   - when FlushPages or CancelPages said OK. After their DEADLINE_EXCEEDED, as after a store's,
//     the daemon may be in the middle of a read, however long ago it was stopped: ask again. A
//     daemon that has died, or was started again, reads nothing: that is OK, too;
//   - when UnregisterMemory said OK, all pages of the registration;
//   - when the Client was destroyed and the daemon answered within half a second. Who cannot be
//     sure of that calls CancelPages first.
// Pages that are given another use earlier make wrong blocks, and nothing can find out. (They
// cannot do more than that: whatever is in the pages, the daemon stores well-formed blocks.)
//
// FlushPages is for preemption and eviction: blocks whose values are all ready are stored first,
// the others are given up. CancelPages is for aborted requests: it gives up what is not stored yet,
// and so is done as soon as running encoders (some milliseconds) are.
//
// What was given up is a failure of its block, not of the call: CANCELLED, with a text that says
// who gave it up (FlushPages, CancelPages, UnregisterMemory) and what to do. Such a block is not
// there, unless another store had it; or, of CancelPages and a store with wait_durable, it may be
// there and not be durable. ABORTED of a block: the session ended in the middle, register the
// memory again.
//
// All of it needs a daemon on the same node, reached by its socket: FAILED_PRECONDITION elsewhere,
// where Store reads the pages in this process and sends them.
#ifndef KVMILL_CLIENT_PAGE_STORE_H_
#define KVMILL_CLIENT_PAGE_STORE_H_

#include <cstddef>
#include <cstdint>
#include <limits>

#include "absl/types/span.h"
#include "storage/core/block_key.h"

namespace kvmill {

// Of one call, blocks times layer groups.
inline constexpr std::size_t kPageStoreBlocksMax = 4096;

using PageNumbers = absl::Span<const std::uint64_t>;

// A block in pages of a registration, which says where a page of each layer is (EngineLayers). The
// numbers are copied by the call.
struct PageBlock {
  BlockKey key;     // The engine's, as in StoreBlock: a tail has one as well.
  BlockKey parent;  // Empty for the first block of a sequence.
  std::uint32_t token_count = 0;
  std::uint32_t block_index = 0;  // Position in its sequence.
  // One a layer group of the namespace: the pages with the block's tokens, in order. Empty for a
  // group of which the registration has no layers.
  absl::Span<const PageNumbers> pages;
};

struct PageStoreOptions {
  static constexpr std::uint32_t kAllLayers = std::numeric_limits<std::uint32_t>::max();

  // The engine's name for what the blocks belong to, by which ReadyPages, FlushPages and
  // CancelPages find the store. Several running stores may have the same.
  std::uint64_t request = 0;
  // Layers of the model below this number have their values in the pages.
  std::uint32_t ready_layers = kAllLayers;
  bool wait_durable = false;  // As StoreOptions::wait_durable.
};

}  // namespace kvmill

#endif  // KVMILL_CLIENT_PAGE_STORE_H_
