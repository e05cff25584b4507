// One Events.Watch call: a reader of the journal, written as fast as the caller reads.
//
// One message is being written at a time, so that a caller that does not read costs that one. When
// the reader ends while one is being written the call is cancelled: it may never be read.
#ifndef KVMILL_SERVICE_WATCH_CALL_H_
#define KVMILL_SERVICE_WATCH_CALL_H_

#include <grpcpp/support/server_callback.h>

#include <memory>
#include <optional>
#include <string>

#include "absl/container/flat_hash_set.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kvmill/v1/events.pb.h"
#include "service/event_journal.h"
#include "service/service_context.h"
#include "storage/core/mutex.h"

namespace kvmill {

class WatchCall final : public grpc::ServerWriteReactor<v1::WatchReply>,
                        public std::enable_shared_from_this<WatchCall> {
 public:
  // The reactor for gRPC; it owns itself. With an error instead of `from` it ends with that.
  static WatchCall* Start(const ServiceContext& context, grpc::CallbackServerContext& of,
                          EventJournal& journal, const std::string& tenant,
                          const absl::StatusOr<EventJournal::From>& from);
  WatchCall(const ServiceContext& context, grpc::CallbackServerContext& call, EventJournal& journal)
      : context_(context), call_(call), journal_(journal) {}

  void OnWriteDone(bool ok) override;
  void OnCancel() override;
  void OnDone() override;

 private:
  void Woken();
  void Advance() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void End(const absl::Status& status) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Fill(const EventJournal::Part& part) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  const ServiceContext& context_;
  grpc::CallbackServerContext& call_;  // There until OnDone.
  EventJournal& journal_;
  std::shared_ptr<WatchCall> self_;  // Until OnDone; wakes of the journal share it, too.

  Mutex mu_;  // Before the journal's.
  EventJournal::ReaderPtr reader_ ABSL_GUARDED_BY(mu_);
  absl::flat_hash_set<NamespaceId> named_ ABSL_GUARDED_BY(mu_);  // To the caller.
  bool greeted_ ABSL_GUARDED_BY(mu_) = false;
  v1::WatchReply message_ ABSL_GUARDED_BY(mu_);  // Being written.
  bool writing_ ABSL_GUARDED_BY(mu_) = false;
  bool cancelling_ ABSL_GUARDED_BY(mu_) = false;  // Until that is done the call does not finish.
  std::optional<absl::Status> end_ ABSL_GUARDED_BY(mu_);
  bool finished_ ABSL_GUARDED_BY(mu_) = false;
};

}  // namespace kvmill

#endif  // KVMILL_SERVICE_WATCH_CALL_H_
