// A Store over the data plane. Internal to client/.
#ifndef KVMILL_CLIENT_DATA_STORE_H_
#define KVMILL_CLIENT_DATA_STORE_H_

#include <chrono>
#include <functional>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "client/client.h"
#include "client/data_link.h"

namespace kvmill {

// As StartStoreStream. `link.Begin()` was called for it; it ends what that began. `encode`: blocks
// of 16-bit values are encoded here, so that only records travel.
void StartDataStore(DataLink& link, ConnectionPtr connection, const ClientNamespace& ns,
                    absl::Span<const StoreBlock> blocks, const StoreOptions& options, bool encode,
                    std::chrono::system_clock::time_point deadline,
                    std::function<void(absl::StatusOr<StoreResult>)> done);

}  // namespace kvmill

#endif  // KVMILL_CLIENT_DATA_STORE_H_
