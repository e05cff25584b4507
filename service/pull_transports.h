// What carried the bytes that other nodes sent: counted by transport, and known of each node.
//
// Thread-safe.
#ifndef KVMILL_SERVICE_PULL_TRANSPORTS_H_
#define KVMILL_SERVICE_PULL_TRANSPORTS_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>

#include "storage/core/mutex.h"

namespace kvmill {

class PullTransports {
 public:
  // With names of their own; more are "other".
  static constexpr std::size_t kNamesMax = 16;
  static constexpr std::size_t kNodesMax = 4096;  // Known at once, those that left included.

  // `bytes` came from the node. `transport`: "grpc", or what UCX negotiated, as "tcp/eth0"; empty:
  // nobody knows. Logged when it is another one than before.
  void Came(const std::string& node, const std::string& transport, std::uint64_t bytes);
  struct Snapshot {
    std::map<std::string, std::uint64_t> bytes;  // By transport; "unknown" of those.
    std::map<std::string, std::string> last;     // By node: what came last came by this.
  };
  Snapshot snapshot() const;

 private:
  mutable Mutex mu_;
  Snapshot now_ ABSL_GUARDED_BY(mu_);
};

}  // namespace kvmill

#endif  // KVMILL_SERVICE_PULL_TRANSPORTS_H_
