// `Registry` as one simulated process has it: calls to SimEtcd over SimNetwork.
#ifndef KVMILL_TESTS_CLUSTER_SIM_REGISTRY_H_
#define KVMILL_TESTS_CLUSTER_SIM_REGISTRY_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>

#include "service/cluster/loop.h"
#include "service/cluster/registry.h"
#include "tests/cluster/sim_etcd.h"

namespace kvmill {

class SimRegistry : public Registry {
 public:
  using Machine = SimNetwork::Machine;

  // For a process on `machine`, whose loop is `loop`. Both outlive it.
  SimRegistry(SimEtcd& etcd, SimNetwork& network, Loop& loop, Machine machine)
      : etcd_(etcd), network_(network), loop_(loop), machine_(machine) {}
  // The process is gone, or at least this: its connections end.
  ~SimRegistry() override;

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

  // Calls and watches that have not ended.
  std::size_t open() const { return calls_.size() + watches_.size(); }

 private:
  struct Call {
    std::function<void(const absl::Status&)> fail;
    Loop::TimerId timer = 0;
  };
  struct OpenWatch {
    WatchCalls calls;
    std::int64_t silence = 0;
    std::int64_t heard = 0;
    SimEtcd::WatchId remote = 0;  // 0: not known yet.
    Loop::TimerId timer = 0;
  };

  // Checks bounds first; `run` at the server, its answer to `done` unless the time is up before.
  template <typename Answer>
  CallId Start(absl::Status bounds, std::int64_t deadline_nanos, Done<Answer> done,
               std::function<absl::StatusOr<Answer>(SimEtcd&)> run);
  void Fail(CallId id, const absl::Status& status);
  void OnMessage(CallId id, const SimEtcd::WatchMessage& message);
  void Break(CallId id, const absl::Status& status);
  void AskWatch(CallId id);
  // Runs on the loop, unless this is gone by then.
  std::function<void()> OnLoop(std::function<void()> task);

  SimEtcd& etcd_;
  SimNetwork& network_;
  Loop& loop_;
  const Machine machine_;
  CallId next_ = 1;
  std::map<CallId, Call> calls_;
  std::map<CallId, OpenWatch> watches_;
  // What messages on their way find when this is gone: then the loop may be gone, too.
  std::shared_ptr<bool> alive_ = std::make_shared<bool>(true);
};

}  // namespace kvmill

#endif  // KVMILL_TESTS_CLUSTER_SIM_REGISTRY_H_
