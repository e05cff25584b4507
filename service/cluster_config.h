// What the options of the cluster mean.
//
// For node.cc and CheckConfig. Nothing is opened here but the files that options name. The shares
// of memory for tickets and the pace of copying are in cluster_config.cc and may change; addresses,
// ids and prefixes that other nodes see may not.
#ifndef KVMILL_SERVICE_CLUSTER_CONFIG_H_
#define KVMILL_SERVICE_CLUSTER_CONFIG_H_

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "client/server_address.h"
#include "client/tls/tls_files.h"
#include "service/cluster/membership.h"
#include "service/cluster_node.h"
#include "service/config.h"
#include "service/etcd/etcd_servers.h"
#include "service/tenants.h"

namespace kvmill {

struct ClusterAddress {
  std::vector<HostPort> servers;  // Empty: no cluster.
  std::string prefix;             // Of all keys; begins and ends with '/'.
};
// "none" or "etcd://HOST:PORT,...", with "/PREFIX" at its end for a prefix other than "/kvmill/".
// INVALID_ARGUMENT naming the part.
absl::StatusOr<ClusterAddress> ParseCluster(absl::string_view text);

// Whether `name` can be a node id, a zone or a part of the prefix. INVALID_ARGUMENT naming `what`
// it is and the name.
absl::Status CheckClusterName(absl::string_view what, absl::string_view name);

// With the files that the options name, read now. Messages name files, never what is in them.
absl::StatusOr<EtcdOptions> MakeEtcdOptions(const Config& config);

// Of the connections to etcd.
TlsFiles EtcdTlsOf(const Config& config);

// Whose blocks this node shares with others.
SharedTenants SharedTenantsOf(const Config& config);

// The id of this node: --node-id, or else the host's name.
std::string NodeIdOf(const Config& config);

// `listen` and `admin` are the addresses with their real ports, `admin` empty without one;
// `incarnation` and `holder` as in member.h and registration.h.
absl::StatusOr<Membership::Options> MakeMembershipOptions(const Config& config,
                                                          const std::string& listen,
                                                          const std::string& admin,
                                                          const std::string& incarnation,
                                                          const std::string& holder);

// Of a node of a cluster, but for its membership and what it holds (ClusterBlocks::Options::held).
ClusterNode::Options MakeClusterNodeOptions(const Config& config);

// The part of CheckConfig that is about the cluster.
absl::Status CheckCluster(const Config& config);

}  // namespace kvmill

#endif  // KVMILL_SERVICE_CLUSTER_CONFIG_H_
