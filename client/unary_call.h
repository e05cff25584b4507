// Calls with one request and one reply. Internal to client/.
#ifndef KVMILL_CLIENT_UNARY_CALL_H_
#define KVMILL_CLIENT_UNARY_CALL_H_

#include <grpcpp/support/async_unary_call.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/connection.h"
#include "client/request_context.h"

namespace kvmill {

// One call with one request and one reply. Deletes itself after `done`. `Prepare(channel, context,
// queue)` makes the reader of a stub.
template <typename Reply, typename T, typename Prepare, typename Convert>
class UnaryCall final : public Completion {
 public:
  UnaryCall(Connection& connection, Prepare prepare, Convert convert,
            std::function<void(absl::StatusOr<T>)> done)
      : connection_(connection),
        prepare_(std::move(prepare)),
        convert_(std::move(convert)),
        done_(std::move(done)) {}

  void Start(Connection::Deadline deadline, bool again = false) {
    deadline_ = deadline;
    request_ = CurrentRequest();
    again_ = again;
    connection_.Admit(&context_, deadline, [this](const Connection::Admission& admission) {
      if (!admission.status.ok()) {
        done_(admission.status);
        delete this;
        return;
      }
      pass_ = admission.pass;
      channel_ = connection_.channel();
      reader_ = prepare_(*channel_, &context_, connection_.queue());
      reader_->StartCall();
      reader_->Finish(&reply_, &status_, this);
    });
  }

  void OnEvent(bool) override {
    connection_.NoteBootId(context_);
    reader_.reset();
    channel_.reset();
    if (status_.error_code() == grpc::StatusCode::UNAUTHENTICATED && !again_ &&
        connection_.PassRefused(pass_)) {
      const RequestScope scope(request_);
      (new UnaryCall(connection_, std::move(prepare_), std::move(convert_), std::move(done_)))
          ->Start(deadline_, true);
    } else if (status_.ok()) {
      done_(convert_(reply_));
    } else {
      done_(connection_.StatusOf(status_, context_));
    }
    connection_.End(&context_);
    delete this;
  }

 private:
  Connection& connection_;
  Prepare prepare_;
  Convert convert_;
  std::function<void(absl::StatusOr<T>)> done_;
  Connection::Deadline deadline_;
  bool again_ = false;  // The token was refused once.
  std::uint64_t pass_ = 0;
  RequestPtr request_;
  grpc::ClientContext context_;
  ChannelPtr channel_;
  std::unique_ptr<grpc::ClientAsyncResponseReader<Reply>> reader_;
  Reply reply_;
  grpc::Status status_;
};

// Starts one. `prepare(channel, context, queue)` makes the reader of a stub, `convert(reply)` the
// result; `done` is called once.
template <typename Reply, typename T, typename Prepare, typename Convert>
void StartUnaryCall(Connection& connection, Connection::Deadline deadline, Prepare prepare,
                    Convert convert, std::function<void(absl::StatusOr<T>)> done) {
  // Deletes itself after `done`.
  (new UnaryCall<Reply, T, Prepare, Convert>(connection, std::move(prepare), std::move(convert),
                                             std::move(done)))
      ->Start(deadline);
}

}  // namespace kvmill

#endif  // KVMILL_CLIENT_UNARY_CALL_H_
