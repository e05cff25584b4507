// One Ticket.Redeem call. Internal to client/.
#ifndef KVMILL_CLIENT_REDEEM_STREAM_H_
#define KVMILL_CLIENT_REDEEM_STREAM_H_

#include <atomic>
#include <functional>
#include <utility>

#include "absl/status/statusor.h"
#include "client/server_stream.h"
#include "client/ticket.h"
#include "kvmill/v1/ticket.grpc.pb.h"

namespace kvmill {

class RedeemStream final : public ServerStream<v1::TicketUpdate> {
 public:
  using Done = std::function<void(absl::StatusOr<RedeemResult>)>;

  // `ended` is called before `done`, on whatever thread: nobody may Cancel from then on.
  RedeemStream(Connection& connection, v1::RedeemTicketRequest request, RedeemUpdate update,
               std::function<void()> ended, Done done)
      : ServerStream(connection),
        request_(std::move(request)),
        update_(std::move(update)),
        ended_(std::move(ended)),
        done_(std::move(done)) {}

  // From any thread.
  void Cancel() {
    cancelled_.store(true, std::memory_order_relaxed);
    TryCancel();
  }

 private:
  Reader Prepare(Channel& channel, grpc::ClientContext* context,
                 grpc::CompletionQueue* queue) override {
    return channel.redeem->PrepareAsyncRedeem(context, request_, queue);
  }
  absl::Status Take(const v1::TicketUpdate& update) override;
  void Ended(const absl::Status& status) override;

  const v1::RedeemTicketRequest request_;
  const RedeemUpdate update_;
  const std::function<void()> ended_;
  const Done done_;
  std::atomic<bool> cancelled_{false};  // Which of two reasons is told does not matter much.
  RedeemResult result_;
};

}  // namespace kvmill

#endif  // KVMILL_CLIENT_REDEEM_STREAM_H_
