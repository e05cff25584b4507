// One Engine.Session stream: reads heartbeats, writes what the table of sessions has to say.
//
// What waits to be written is a flag or a short list of numbers: a client that does not read costs
// nothing but its stream, since nothing is read from it until it took its answers. Threads: gRPC
// calls the On...Done functions, the table the others. The object lives until OnDone was called and
// the table does not hold it.
#ifndef KVMILL_SERVICE_SESSION_CALL_H_
#define KVMILL_SERVICE_SESSION_CALL_H_

#include <grpcpp/support/server_callback.h>

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kvmill/v1/engine.pb.h"
#include "service/service_context.h"
#include "service/session_table.h"
#include "storage/core/mutex.h"

namespace kvmill {

class SessionCall final : public grpc::ServerBidiReactor<v1::SessionRequest, v1::SessionReply>,
                          public SessionListener,
                          public std::enable_shared_from_this<SessionCall> {
 public:
  // The reactor for gRPC; it owns itself.
  static SessionCall* Start(ServiceContext& context, const absl::StatusOr<Caller>& caller);
  explicit SessionCall(ServiceContext& context) : context_(context) {}

  void OnReadDone(bool ok) override;
  void OnWriteDone(bool ok) override;
  void OnCancel() override;
  void OnDone() override;

  void OnLeasesExpired(const std::vector<LeaseId>& leases) override;
  void OnDrain() override;
  void OnEnd(const absl::Status& why) override;

 private:
  // Of one notice; the rest comes in the next one.
  static constexpr std::size_t kExpiredPerMessage = 4096;
  static constexpr std::size_t kExpiredMax = 65536;  // That wait; what is beyond is not told.

  static constexpr std::size_t kCancelsMax = 64;    // That are not answered.
  static constexpr int kCancelledStoresMax = 4096;  // Of one message.

  absl::Status Handle();
  absl::Status HandleCancel();
  // Of debugging.
  void LogSession(const char* does) const;
  // Of HandleCancel; from any thread.
  void Cancelled(std::uint64_t number, std::uint64_t stores);
  void Finish(const absl::Status& status) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Advance() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  ServiceContext& context_;
  std::shared_ptr<SessionCall> self_;  // Until OnDone.
  Caller caller_;                      // Constant after Start.
  v1::SessionRequest request_;         // Of the read in progress.
  std::string id_;                     // Empty until opened; used by OnReadDone and later alone.

  Mutex mu_;
  std::optional<v1::SessionOpened> opened_ ABSL_GUARDED_BY(mu_);  // To be written,
  std::optional<std::uint64_t> heartbeat_ ABSL_GUARDED_BY(mu_);   //   all of these.
  std::deque<v1::SessionCompletion> completions_ ABSL_GUARDED_BY(mu_);
  std::size_t cancels_ ABSL_GUARDED_BY(mu_) = 0;  // Whose answers are not being written yet.
  bool read_waits_ ABSL_GUARDED_BY(mu_) = false;  // Until there are fewer of them.
  std::vector<LeaseId> expired_ ABSL_GUARDED_BY(mu_);
  bool drain_ ABSL_GUARDED_BY(mu_) = false;
  v1::SessionReply reply_ ABSL_GUARDED_BY(mu_);  // Being written.
  bool writing_ ABSL_GUARDED_BY(mu_) = false;
  bool opened_written_ ABSL_GUARDED_BY(mu_) = false;  // Nothing goes before it.
  bool finished_ ABSL_GUARDED_BY(mu_) = false;
};

}  // namespace kvmill

#endif  // KVMILL_SERVICE_SESSION_CALL_H_
