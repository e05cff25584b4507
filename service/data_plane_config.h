// What the configuration says of the data plane: where UCX listens, as whom, over what.
//
// For node.cc, which alone makes the UCX transport of it, and for connections to peers, which are
// of the same kind. Nothing is opened here. The node's id must tell daemons apart, also two on one
// host: an offer says by it who must answer.
#ifndef KVMILL_SERVICE_DATA_PLANE_CONFIG_H_
#define KVMILL_SERVICE_DATA_PLANE_CONFIG_H_

#include <string>

#include "absl/status/statusor.h"
#include "client/transport/rdma_use.h"
#include "client/transport/ucx_transport.h"
#include "service/config.h"
#include "service/data_plane.h"

namespace kvmill {

RdmaUse RdmaUseOf(const Config& config);

// `config` has `ucx`. INVALID_ARGUMENT.
absl::StatusOr<UcxOptions> MakeUcxOptions(const Config& config);

// `boot_id`: the 16 bytes of this daemon's life.
DataPlane::Options MakeDataPlaneOptions(const Config& config, const std::string& boot_id);

// What an operator should know of how blocks travel.
void LogDataPlane(const Config& config, const DataPlane& plane);

}  // namespace kvmill

#endif  // KVMILL_SERVICE_DATA_PLANE_CONFIG_H_
