// The servers of one etcd cluster: channels, credentials, and which of them to ask. On the loop
// only.
#ifndef KVMILL_SERVICE_ETCD_ETCD_SERVERS_H_
#define KVMILL_SERVICE_ETCD_ETCD_SERVERS_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "client/server_address.h"
#include "client/tls/tls_files.h"
#include "etcd/rpc.grpc.pb.h"

namespace kvmill {

struct EtcdOptions {
  std::vector<HostPort> servers;  // At least one, of one cluster.
  // With an authority the connections are TLS, and a server must prove the host it is reached by.
  // Files that change are taken for connections from then on (client/tls/tls_files.h).
  TlsFiles tls;
  std::string user;  // Empty: nobody asks for one.
  std::string password;
};

struct EtcdServer {
  std::string name;  // "HOST:PORT".
  bool tls = false;
  std::unique_ptr<etcdserverpb::KV::Stub> kv;
  std::unique_ptr<etcdserverpb::Lease::Stub> lease;
  std::unique_ptr<etcdserverpb::Watch::Stub> watch;
  std::unique_ptr<etcdserverpb::Auth::Stub> auth;
  std::int64_t failed_nanos = 0;  // When it last failed; 0: it did not since it last answered.
};

class EtcdServers {
 public:
  // Opens no connection. INVALID_ARGUMENT: no server, or as CheckTlsFiles.
  static absl::StatusOr<std::unique_ptr<EtcdServers>> Create(const EtcdOptions& options);

  std::size_t size() const { return servers_.size(); }
  EtcdServer& operator[](std::size_t index) { return servers_[index]; }

  // The one to ask first: whoever answered last.
  std::size_t current() const { return current_; }
  void Answered(std::size_t index);
  // If it was the current one, then of the others the one whose failure is the longest ago is now.
  void Failed(std::size_t index, std::int64_t now_nanos);

 private:
  EtcdServers() = default;

  std::vector<EtcdServer> servers_;
  std::size_t current_ = 0;
};

}  // namespace kvmill

#endif  // KVMILL_SERVICE_ETCD_ETCD_SERVERS_H_
