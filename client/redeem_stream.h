// One Ticket.Redeem call. Internal to client/.
#ifndef KVMILL_CLIENT_REDEEM_STREAM_H_
#define KVMILL_CLIENT_REDEEM_STREAM_H_

#include <functional>
#include <memory>
#include <utility>

#include "client/server_stream.h"
#include "client/ticket.h"
#include "kvmill/v1/ticket.grpc.pb.h"
#include "storage/core/mutex.h"

namespace kvmill {

class RedeemStream;

// A redeem, which may take more than one call. Of who may cancel it, and of its calls. Thread-safe.
class Redeeming {
 public:
  // Whatever call is or will be made for it ends.
  void Cancel();
  bool cancelled() const;

 private:
  friend class RedeemStream;
  mutable Mutex mu_;
  bool cancelled_ ABSL_GUARDED_BY(mu_) = false;
  RedeemStream* stream_ ABSL_GUARDED_BY(mu_) = nullptr;  // Null: none runs.
};
using RedeemingPtr = std::shared_ptr<Redeeming>;

class RedeemStream final : public ServerStream<v1::TicketUpdate> {
 public:
  using Done = std::function<void(RedeemResult)>;

  RedeemStream(Connection& connection, v1::RedeemTicketRequest request, RedeemUpdate update,
               RedeemingPtr redeeming, Done done);

 private:
  friend class Redeeming;
  Reader Prepare(Channel& channel, grpc::ClientContext* context,
                 grpc::CompletionQueue* queue) override;
  absl::StatusOr<bool> Take(const v1::TicketUpdate& update) override;
  void Ended(const absl::Status& status) override;

  const v1::RedeemTicketRequest request_;
  const RedeemUpdate update_;
  const RedeemingPtr redeeming_;
  const Done done_;
  std::shared_ptr<v1::Ticket::Stub> stub_;  // Its connection's place is this call's.
  RedeemResult result_;
};

}  // namespace kvmill

#endif  // KVMILL_CLIENT_REDEEM_STREAM_H_
