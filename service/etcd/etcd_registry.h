// The registry over etcd's v3 gRPC API (3.4 and later).
//
// A call asks the server that answered last, and when that one is at fault each of the others once,
// in time that its deadline leaves: it returns sooner than its deadline when nobody can be reached.
// Each try has a deadline of its own, so a server that is stopped costs one try. Servers without a
// leader are as good as gone.
//
// With a user, a token is fetched before the first call and again when etcd no longer takes it.
// Neither password nor token is in any message.
#ifndef KVMILL_SERVICE_ETCD_ETCD_REGISTRY_H_
#define KVMILL_SERVICE_ETCD_ETCD_REGISTRY_H_

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "service/cluster/loop.h"
#include "service/cluster/registry.h"
#include "service/etcd/etcd_servers.h"

namespace kvmill {

class EtcdCalls;

class EtcdRegistry final : public Registry {
 public:
  // Thread-safe; opens no connection. INVALID_ARGUMENT as EtcdServers. `loop` must outlive it.
  static absl::StatusOr<std::unique_ptr<EtcdRegistry>> Create(const EtcdOptions& options,
                                                              Loop& loop);
  // On the loop, or once that has ended. Waits for gRPC to let go of what is cancelled: moments.
  ~EtcdRegistry() override;

  CallId Grant(std::int64_t seconds, std::int64_t deadline_nanos, Done<Lease> done) override;
  CallId KeepAlive(LeaseId lease, std::int64_t deadline_nanos, Done<Lease> done) override;
  CallId Revoke(LeaseId lease, std::int64_t deadline_nanos, Done<Header> done) override;
  CallId Put(PutRequest request, std::int64_t deadline_nanos, Done<Written> done) override;
  CallId Delete(std::string key, Revision expected, std::int64_t deadline_nanos,
                Done<Written> done) override;
  CallId List(std::string prefix, std::int64_t deadline_nanos, Done<Listing> done) override;
  CallId Watch(std::string prefix, Revision from_revision, std::int64_t silence_nanos,
               WatchCalls calls) override;
  void Cancel(CallId call) override;

 private:
  explicit EtcdRegistry(std::unique_ptr<EtcdCalls> calls);
  std::unique_ptr<EtcdCalls> calls_;
};

}  // namespace kvmill

#endif  // KVMILL_SERVICE_ETCD_ETCD_REGISTRY_H_
