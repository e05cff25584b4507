// The client's side of one Store call. Internal to client/.
#ifndef KVMILL_CLIENT_STORE_STREAM_H_
#define KVMILL_CLIENT_STORE_STREAM_H_

#include <chrono>
#include <functional>
#include <memory>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "client/client.h"
#include "client/connection.h"
#include "storage/core/worker_pool.h"

namespace kvmill {

// INVALID_ARGUMENT when a block does not fit the namespace (layers, tokens, heads).
absl::Status CheckStore(const ClientNamespace& ns, absl::Span<const StoreBlock> blocks,
                        const StoreOptions& options);

// Starts the call; with an `encoder`, values become records on it before they travel. `done` is
// called once, when the transport holds no reference to the blocks'
// memory any more. The arguments passed CheckStore.
void StartStoreStream(Connection& connection, WorkerPool* encoder, const ClientNamespace& ns,
                      absl::Span<const StoreBlock> blocks, const StoreOptions& options,
                      std::chrono::system_clock::time_point deadline,
                      std::function<void(absl::StatusOr<StoreResult>)> done);

}  // namespace kvmill

#endif  // KVMILL_CLIENT_STORE_STREAM_H_
