// The calls of a DataPlane while they run. Internal to data_plane*.cc.
#ifndef KVMILL_SERVICE_DATA_PLANE_CALLS_H_
#define KVMILL_SERVICE_DATA_PLANE_CALLS_H_

#include <atomic>
#include <memory>
#include <optional>
#include <vector>

#include "service/data_plane.h"

namespace kvmill {

// Members are destroyed in the reverse order: `running` last.
struct DataPlane::FetchCall {
  std::unique_ptr<Running> running;
  PeerPtr peer;
  RequestPtr request;  // For which it is; null: not said.
  std::unique_ptr<IncomingCall> call;
  TieredStore::NamespaceInfo ns;
  std::vector<BlockKey> keys;
  Elsewhere elsewhere;
  std::size_t next = 0;  // Of keys.size() * layer groups.
  v1::DataFetchReply reply;
  std::size_t reply_bytes = 0;  // Of `reply`, serialized; at most.
  std::uint64_t payload_bytes = 0;
  std::vector<BlockRef> blocks;  // Pinned until the transport is done with their pages.
  // Where all their pages are, since a message is of one kind of memory. None: no blocks yet.
  std::optional<Tier> memory;
};

struct DataPlane::StoreCall {
  std::unique_ptr<Running> running;
  PeerPtr peer;
  RequestPtr request;  // As of a FetchCall.
  std::unique_ptr<IncomingCall> call;
  TieredStore::NamespaceInfo ns;
  v1::StoreChunk chunk;
  BlockId id;
  BlockOrigin origin;
  Slab slab;
  std::size_t bytes = 0;  // Of the slab.
  std::atomic<bool> receiving{false};
  std::int64_t receive_nanos = 0;  // When it began.
};

}  // namespace kvmill

#endif  // KVMILL_SERVICE_DATA_PLANE_CALLS_H_
