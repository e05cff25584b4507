// gRPC alone, as the opponent of a cluster's lookup: the same messages between as many processes,
// none of which does anything but answer. One call, and a call whose handler calls others, all at
// once, and answers when they have: what a lookup elsewhere costs when our own part is free.
//
// Callbacks everywhere, as in the daemon; no thread of ours.
#ifndef KVMILL_TESTS_BENCH_GRPC_CHAIN_H_
#define KVMILL_TESTS_BENCH_GRPC_CHAIN_H_

#include <sys/types.h>

#include <cstddef>
#include <memory>
#include <vector>

#include "kvmill/v1/cache.grpc.pb.h"
#include "tests/integration/daemon_process.h"

namespace kvmill::testing {

class GrpcChain {
 public:
  // Processes: one that is called, over a unix socket, and `homes` that it calls over TCP.
  explicit GrpcChain(std::size_t homes);
  ~GrpcChain();

  void Call() { Lookup(false); }
  void CallAndAskHomes() { Lookup(true); }
  std::vector<pid_t> processes() const;

  // In a process that was started as "PROGRAM grpc-chain ...": serves until it is killed. Else it
  // returns at once.
  static void ServeIfAsked(int argc, char** argv);

 private:
  void Lookup(bool chain);

  TemporaryDirectory directory_;
  std::vector<std::unique_ptr<DaemonProcess>> processes_;
  std::unique_ptr<v1::Cache::Stub> stub_;
};

}  // namespace kvmill::testing

#endif  // KVMILL_TESTS_BENCH_GRPC_CHAIN_H_
