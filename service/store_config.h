// What the configuration says of a daemon's memory: the tiers of its store, and how much of them
// may be under lease, and what may be lost in encoding what they hold.
//
// For node.cc. Only numbers are decided here, from `config` alone: nothing is opened or allocated.
// How a tier is cut into arenas and the share for leases may change in store_config.cc; what an
// option means is in docs/configuration.md.
#ifndef KVMILL_SERVICE_STORE_CONFIG_H_
#define KVMILL_SERVICE_STORE_CONFIG_H_

#include "absl/status/status.h"
#include "service/config.h"
#include "service/session_table.h"
#include "storage/device/device.h"
#include "storage/error_guard.h"
#include "storage/tiered_store.h"

namespace kvmill {

// `gpu` holds the tier above host memory, if `config` has one, and outlives the store. The store
// logs how far the filling of host memory is. Without `observer` and `errors`, which are no
// configuration.
TieredStore::Options MakeStoreOptions(const Config& config, Device* gpu);

// Also while it runs. OK for what passed CheckConfig.
absl::Status SetWatermarks(const Config& config, TieredStore& store);

SessionTable::Options MakeSessionOptions(const Config& config);

// Also while it runs.
ErrorGuard::Options MakeGuardOptions(const Config& config);

}  // namespace kvmill

#endif  // KVMILL_SERVICE_STORE_CONFIG_H_
