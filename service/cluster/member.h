// What the nodes of a cluster know about one another.
#ifndef KVMILL_SERVICE_CLUSTER_MEMBER_H_
#define KVMILL_SERVICE_CLUSTER_MEMBER_H_

#include <cstdint>
#include <string>

namespace kvmill {

enum class MemberState : std::uint8_t {
  kServing = 0,
  kDraining = 1,  // Answers what it is asked, is no home, takes no copies.
};

// A value type: what a node says about itself. Its registration in etcd carries it whole.
struct Member {
  std::string id;  // Of the node, chosen by its operator; survives restarts. 1 to 64 bytes.
  std::string incarnation;  // 16 bytes: the boot id of the process. A restart is another one.
  std::string address;      // HOST:PORT of its gRPC listener, as peers reach it.
  std::string zone;         // Copies go to different ones where there are several. May be empty.
  std::uint64_t capacity_bytes =
      0;  // Of host memory and disk: the weight in placement. At least 1.
  MemberState state = MemberState::kServing;
  // HOST:PORT of its --admin, as peers reach it; empty: they do not.
  std::string admin_address{};

  friend bool operator==(const Member&, const Member&) = default;
};

}  // namespace kvmill

#endif  // KVMILL_SERVICE_CLUSTER_MEMBER_H_
