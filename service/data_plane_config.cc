#include "service/data_plane_config.h"

#include <limits.h>
#include <unistd.h>

#include <cstring>

#include "absl/strings/str_cat.h"
#include "client/server_address.h"
#include "storage/core/log.h"
#include "storage/core/status_macros.h"

namespace kvmill {

RdmaUse RdmaUseOf(const Config& config) {
  if (config.rdma == "required") return RdmaUse::kRequired;
  return config.rdma == "expected" ? RdmaUse::kExpected : RdmaUse::kAuto;
}

absl::StatusOr<UcxOptions> MakeUcxOptions(const Config& config) {
  KVMILL_ASSIGN_OR_RETURN(const HostPort address, ParseUcxAddress(config.ucx));
  UcxOptions ucx;
  ucx.listen = {address.ToString()};
  ucx.only_admitted = true;
  ucx.rdma = RdmaUseOf(config);
  ucx.family = address.is_ipv6() ? AddressFamily::kIpv6 : AddressFamily::kIpv4;
  return ucx;
}

DataPlane::Options MakeDataPlaneOptions(const Config& config, const std::string& boot_id) {
  DataPlane::Options options;
  options.plaintext = config.data_plane_plaintext;
  // The socket's path keeps daemons of one host apart.
  std::string host(HOST_NAME_MAX + 1, '\0');
  static_cast<void>(gethostname(host.data(), host.size() - 1));
  options.self.id = NodeIdentity::IdOf(
      config.node_id.empty() ? absl::StrCat(host.c_str(), config.socket) : config.node_id);
  std::memcpy(&options.self.incarnation, boot_id.data(), sizeof(options.self.incarnation));
  return options;
}

void LogDataPlane(const Config& config, const DataPlane& plane) {
  if (config.gpu_bytes > 0) {
    LogInfo(absl::StrCat("data plane: blocks on the GPU are sent ",
                         plane.sends_gpu_memory()
                             ? "from there"
                             : "by way of host memory: UCX has no CUDA here, or it encrypts"));
  }
  if (config.data_plane_plaintext) {
    LogWarning("--data-plane-plaintext: blocks travel unencrypted between hosts");
  }
}

}  // namespace kvmill
