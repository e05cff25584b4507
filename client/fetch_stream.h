// The client's side of one Fetch call. Internal to client/.
#ifndef KVMILL_CLIENT_FETCH_STREAM_H_
#define KVMILL_CLIENT_FETCH_STREAM_H_

#include <chrono>
#include <functional>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "client/client.h"
#include "client/connection.h"

namespace kvmill {

// Starts the call; `done` is called once, after the last call of `sink`.
void StartFetchStream(Connection& connection, const ClientNamespace& ns,
                      absl::Span<const BlockKey> keys, FetchSink& sink, const Elsewhere& elsewhere,
                      std::chrono::system_clock::time_point deadline,
                      std::function<void(absl::StatusOr<FetchResult>)> done);

}  // namespace kvmill

#endif  // KVMILL_CLIENT_FETCH_STREAM_H_
