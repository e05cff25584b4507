// How many bytes of blocks went which way since the start: what the service and the data plane
// counted, put together for metrics and Stat.
#ifndef KVMILL_SERVICE_TRANSFERS_H_
#define KVMILL_SERVICE_TRANSFERS_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "service/data_plane.h"
#include "service/service_context.h"

namespace kvmill {

struct Transfer {
  const char* path;
  std::string transport;
  std::optional<std::uint64_t> bytes_in;  // None: nothing comes in that way.
  std::uint64_t bytes_out = 0;
};

// `data`: of the daemon's data plane; empty without one.
std::vector<Transfer> TransfersOf(const ServiceContext& context, const DataPlane::Stats& data);

}  // namespace kvmill

#endif  // KVMILL_SERVICE_TRANSFERS_H_
