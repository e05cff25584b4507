// Whether this host has the addresses that the configuration names, before anything is started.
#ifndef KVMILL_SERVICE_LISTENERS_H_
#define KVMILL_SERVICE_LISTENERS_H_

#include "absl/status/status.h"
#include "service/config.h"

namespace kvmill {

// Resolves and binds --listen, --admin, --metrics and --ucx for a moment; UNAVAILABLE names option,
// value and reason. Without their ports only whether the host has the addresses: for a look at the
// configuration of a daemon that may be running.
absl::Status CheckListeners(const Config& config, bool with_ports);

}  // namespace kvmill

#endif  // KVMILL_SERVICE_LISTENERS_H_
