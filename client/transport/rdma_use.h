// What is expected of RDMA between hosts.
#ifndef KVMILL_CLIENT_TRANSPORT_RDMA_USE_H_
#define KVMILL_CLIENT_TRANSPORT_RDMA_USE_H_

#include <cstdint>

namespace kvmill {

// A connection that has only TCP although RDMA was expected is logged, and marked in its
// ConnectionInfo.
enum class RdmaUse : std::uint8_t {
  kAuto,      // Expected when this host has a device for it.
  kNever,     // Not expected.
  kExpected,  // Expected, whatever this host has.
  kRequired,  // A connection without it is refused, and so is a host without it.
};

}  // namespace kvmill

#endif  // KVMILL_CLIENT_TRANSPORT_RDMA_USE_H_
