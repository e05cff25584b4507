// What the configuration says of the events that are published over ZeroMQ.
#ifndef KVMILL_SERVICE_EVENTS_CONFIG_H_
#define KVMILL_SERVICE_EVENTS_CONFIG_H_

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "client/server_address.h"
#include "service/config.h"
#include "service/event_publisher.h"

namespace kvmill {

// HOST:PORT or tcp://HOST:PORT, with a numeric host. INVALID_ARGUMENT.
absl::StatusOr<HostPort> ParseEventsAddress(absl::string_view text);

// INVALID_ARGUMENT: --events-replay without --events. FAILED_PRECONDITION: off loopback without
// --insecure, since whoever reaches the port reads along.
absl::Status CheckEvents(const Config& config);

// `config` passed CheckEvents, and has `events`.
absl::StatusOr<EventPublisher::Options> MakePublisherOptions(const Config& config);

}  // namespace kvmill

#endif  // KVMILL_SERVICE_EVENTS_CONFIG_H_
