// One Ticket.Redeem call. Internal to client/.
#ifndef KVMILL_CLIENT_REDEEM_STREAM_H_
#define KVMILL_CLIENT_REDEEM_STREAM_H_

#include <grpcpp/support/async_stream.h>

#include <atomic>
#include <functional>
#include <memory>
#include <utility>

#include "absl/status/statusor.h"
#include "client/connection.h"
#include "client/ticket.h"
#include "kvmill/v1/ticket.grpc.pb.h"

namespace kvmill {

// Deletes itself after `done`.
class RedeemStream {
 public:
  using Done = std::function<void(absl::StatusOr<RedeemResult>)>;

  // `ended` is called before `done`, on whatever thread: nobody may Cancel from then on.
  RedeemStream(Connection& connection, v1::RedeemTicketRequest request, RedeemUpdate update,
               std::function<void()> ended, Done done)
      : connection_(connection),
        request_(std::move(request)),
        update_(std::move(update)),
        ended_(std::move(ended)),
        done_(std::move(done)) {}

  void Start(Connection::Deadline deadline);
  // From any thread.
  void Cancel() {
    cancelled_.store(true, std::memory_order_relaxed);
    context_.TryCancel();
  }

 private:
  void OnStart(bool ok);
  void OnRead(bool ok);
  void OnFinish(bool ok);
  absl::Status Take();

  Connection& connection_;
  const v1::RedeemTicketRequest request_;
  const RedeemUpdate update_;
  const std::function<void()> ended_;
  const Done done_;
  std::atomic<bool> cancelled_{false};  // Which of two reasons is told does not matter much.
  std::uint64_t pass_ = 0;
  grpc::ClientContext context_;
  ChannelPtr channel_;
  std::unique_ptr<grpc::ClientAsyncReader<v1::TicketUpdate>> reader_;
  MemberCompletion<RedeemStream> start_done_{this, &RedeemStream::OnStart};
  MemberCompletion<RedeemStream> read_done_{this, &RedeemStream::OnRead};
  MemberCompletion<RedeemStream> finish_done_{this, &RedeemStream::OnFinish};
  v1::TicketUpdate message_;
  RedeemResult result_;
  absl::Status failed_;
  grpc::Status status_;
};

}  // namespace kvmill

#endif  // KVMILL_CLIENT_REDEEM_STREAM_H_
