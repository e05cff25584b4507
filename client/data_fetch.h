// A Fetch over the data plane. Internal to client/.
#ifndef KVMILL_CLIENT_DATA_FETCH_H_
#define KVMILL_CLIENT_DATA_FETCH_H_

#include <chrono>
#include <functional>
#include <memory>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "client/client.h"
#include "client/data_link.h"
#include "client/waiting_caller.h"

namespace kvmill {

// As StartFetchStream. `link.Begin()` was called for it; it ends what that began. Unless `caller`
// is null it verifies the pages and calls the sink, else the link's workers do.
void StartDataFetch(DataLink& link, ConnectionPtr connection,
                    std::shared_ptr<const ClientNamespace> ns, absl::Span<const BlockKey> keys,
                    FetchSink& sink, const Elsewhere& elsewhere,
                    std::chrono::system_clock::time_point deadline, WaitingCaller* caller,
                    std::function<void(absl::StatusOr<FetchResult>)> done);

}  // namespace kvmill

#endif  // KVMILL_CLIENT_DATA_FETCH_H_
