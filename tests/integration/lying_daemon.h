// A gRPC server in this process that passes every call on to a daemon and lies about the answers.
#ifndef KVMILL_TESTS_INTEGRATION_LYING_DAEMON_H_
#define KVMILL_TESTS_INTEGRATION_LYING_DAEMON_H_

#include <grpcpp/channel.h>
#include <grpcpp/generic/async_generic_service.h>
#include <grpcpp/server.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "storage/core/mutex.h"
#include "tests/integration/message_mutator.h"

namespace kvmill::testing {

// Serves a unix socket, whose door is the daemon's own, and a port of 127.0.0.1. Replies are
// changed field by field, damaged, dropped and repeated; statuses are others, or never come. Or
// replies are what a test makes of them, and nothing else is changed.
class LyingDaemon final : public grpc::CallbackGenericService {
 public:
  // What is sent instead of a reply of the method, as "/kvmill.v1.Cache/Fetch". One at a time.
  using Script =
      std::function<std::vector<std::string>(const std::string& method, std::string reply)>;

  // The daemon's socket and address; where this one's socket will be.
  LyingDaemon(const std::string& real_socket, const std::string& real_tcp,
              const std::string& socket, std::uint64_t seed);
  LyingDaemon(const std::string& real_socket, const std::string& real_tcp,
              const std::string& socket, Script script);
  ~LyingDaemon() override;

  // What calls of the method end with from now on; all else stays as it is.
  void EndWith(std::string method, grpc::Status status);

  const std::string& tcp_address() const { return tcp_address_; }
  std::uint64_t lies() const { return lies_.load(); }

  grpc::ServerGenericBidiReactor* CreateReactor(grpc::GenericCallbackServerContext* call) override;

  // Instead of this reply of the method.
  std::vector<std::string> InsteadOf(const std::string& method, std::string reply);
  // Instead of this status of the method; false: nothing, ever.
  bool InsteadOf(const std::string& method, grpc::Status* status);
  // The way by which a call came.
  const std::shared_ptr<grpc::Channel>& real(bool local) const {
    return local ? real_local_ : real_tcp_;
  }

 private:
  void Serve(const std::string& real_socket, const std::string& socket);

  const std::shared_ptr<grpc::Channel> real_local_;
  const std::shared_ptr<grpc::Channel> real_tcp_;
  const Script script_;  // Null: random lies.
  std::string tcp_address_;
  std::atomic<std::uint64_t> lies_{0};
  Mutex mu_;
  MessageMutator mutator_ ABSL_GUARDED_BY(mu_);
  std::map<std::string, grpc::Status> ends_ ABSL_GUARDED_BY(mu_);  // By method.
  std::unique_ptr<grpc::Server> server_;
};

}  // namespace kvmill::testing

#endif  // KVMILL_TESTS_INTEGRATION_LYING_DAEMON_H_
