// One Ticket.Redeem call: tells an engine what of a ticket is here.
//
// What changes is gathered while a message is being written: an engine that does not read costs the
// latest state of each block and nothing more.
#ifndef KVMILL_SERVICE_REDEEM_CALL_H_
#define KVMILL_SERVICE_REDEEM_CALL_H_

#include <grpcpp/support/server_callback.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "kvmill/v1/ticket.pb.h"
#include "service/cluster_tickets.h"
#include "storage/core/mutex.h"

namespace kvmill {

class RedeemCall final : public grpc::ServerWriteReactor<v1::TicketUpdate>,
                         public std::enable_shared_from_this<RedeemCall> {
 public:
  // The reactor for gRPC; it owns itself. With an error instead of `ticket` it ends with that.
  static RedeemCall* Start(ClusterTickets* tickets, const absl::StatusOr<TicketBearer>& ticket,
                           std::chrono::system_clock::time_point deadline);

  void OnWriteDone(bool ok) override;
  void OnCancel() override;
  void OnDone() override;

 private:
  // Of the loop.
  void Updated(const std::vector<TicketRedeem::Block>& blocks,
               const std::vector<std::uint32_t>& changed);
  void Ended(const absl::Status& status);

  void Advance() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  std::shared_ptr<RedeemCall> self_;  // Until OnDone; tasks of the loop share it, too.
  ClusterTickets* tickets_ = nullptr;

  Mutex mu_;
  ClusterTickets::RedeemingPtr redeeming_ ABSL_GUARDED_BY(mu_);
  struct Told {
    TicketRedeem::Fate fate = TicketRedeem::Fate::kOpen;
    std::size_t layers = 0;
  };
  std::vector<Told> told_ ABSL_GUARDED_BY(mu_);  // Of each block, the last.
  std::map<std::uint32_t, v1::RedeemedBlock> changed_ ABSL_GUARDED_BY(mu_);  // To be written.
  v1::TicketUpdate message_ ABSL_GUARDED_BY(mu_);                            // Being written.
  bool writing_ ABSL_GUARDED_BY(mu_) = false;
  std::optional<absl::Status> end_ ABSL_GUARDED_BY(mu_);
  bool finished_ ABSL_GUARDED_BY(mu_) = false;
};

}  // namespace kvmill

#endif  // KVMILL_SERVICE_REDEEM_CALL_H_
