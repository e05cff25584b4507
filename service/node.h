// The daemon, wired: the only place that makes concrete stores, transports and registries; owns the
// order of start and drain. What the options mean for each part is decided beside it
// (docs/architecture.md).
#ifndef KVMILL_SERVICE_NODE_H_
#define KVMILL_SERVICE_NODE_H_

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "service/config.h"
#include "service/identities.h"
#include "service/leaving.h"
#include "service/running_config.h"
#include "storage/tenant_quotas.h"

namespace kvmill {

class Node {
 public:
  // Starts everything; when it returns the daemon serves. `running`, which passed CheckConfig, is
  // shown to administrators. Errors say which resource, value and limit. An administrator asks
  // `leaving`: whoever started the node waits there, and calls Drain. Both outlive the node.
  static absl::StatusOr<std::unique_ptr<Node>> Start(const RunningConfig& running,
                                                     Leaving& leaving);
  // Drains if Drain() was not called.
  ~Node();

  // The JSON line for standard output (docs/contracts.md), without a line end.
  std::string ReadyLine() const;

  // Takes over what of `config` a running daemon can (OptionInfo::reloadable), but for logs, which
  // are the process's; who is who, and what each may have. `config` passed CheckConfig, the others
  // are of it. Thread-safe. CANCELLED once Drain has begun.
  absl::Status Reload(const Config& config, Identities identities, const TenantQuotas& quotas);

  // Refuses new work, lets calls in flight finish (up to drain_timeout, then cancels them), makes
  // every sealed block durable, stops. Once; later calls return the same. Not OK when there is a
  // disk tier and blocks are not durable.
  absl::Status Drain();

 private:
  class Impl;
  explicit Node(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace kvmill

#endif  // KVMILL_SERVICE_NODE_H_
