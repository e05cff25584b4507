// The daemon, wired: the only place that names concrete classes; owns the order of start and drain.
#ifndef KVMILL_SERVICE_NODE_H_
#define KVMILL_SERVICE_NODE_H_

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "service/config.h"
#include "service/leaving.h"

namespace kvmill {

class Node {
 public:
  // Starts everything; when it returns the daemon serves. `config` passed CheckConfig. Errors say
  // which resource, value and limit. An administrator asks `leaving`, which outlives the node:
  // whoever started the node waits there, and calls Drain.
  static absl::StatusOr<std::unique_ptr<Node>> Start(const Config& config, Leaving& leaving);
  // Drains if Drain() was not called.
  ~Node();

  // The JSON line for standard output (docs/contracts.md), without a line end.
  std::string ReadyLine() const;

  // Refuses new work, lets calls in flight finish (up to drain_timeout, then cancels them), makes
  // every sealed block durable, stops. Once.
  void Drain();

 private:
  class Impl;
  explicit Node(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace kvmill

#endif  // KVMILL_SERVICE_NODE_H_
