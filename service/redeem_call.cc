#include "service/redeem_call.h"

#include <algorithm>
#include <utility>

#include "service/status_grpc.h"

namespace kvmill {
namespace {

// Nobody waits longer; tickets do not live longer either.
constexpr std::chrono::nanoseconds kRedeemMax = std::chrono::hours(1);

}  // namespace

RedeemCall* RedeemCall::Start(ClusterTickets* tickets, const absl::StatusOr<TicketBearer>& ticket,
                              std::chrono::system_clock::time_point deadline) {
  const auto call = std::make_shared<RedeemCall>();
  call->self_ = call;
  call->tickets_ = tickets;
  if (!ticket.ok()) {
    call->Ended(ticket.status());
    return call.get();
  }
  const std::chrono::nanoseconds left = deadline - std::chrono::system_clock::now() > kRedeemMax
                                            ? kRedeemMax
                                            : std::chrono::duration_cast<std::chrono::nanoseconds>(
                                                  deadline - std::chrono::system_clock::now());
  MutexLock lock(call->mu_);
  call->redeeming_ = tickets->Redeem(
      *ticket, left.count(),
      [call](const std::vector<TicketRedeem::Block>& blocks,
             const std::vector<std::uint32_t>& changed) { call->Updated(blocks, changed); },
      [call](const TicketRedeem::Outcome& outcome) {
        // What became of blocks at the end was no update.
        std::vector<std::uint32_t> all(outcome.blocks.size());
        for (std::uint32_t i = 0; i < all.size(); ++i) all[i] = i;
        if (!all.empty()) call->Updated(outcome.blocks, all);
        call->Ended(outcome.status);
      });
  return call.get();
}

void RedeemCall::Updated(const std::vector<TicketRedeem::Block>& blocks,
                         const std::vector<std::uint32_t>& changed) {
  MutexLock lock(mu_);
  const bool greeted = !told_.empty();
  told_.resize(blocks.size());
  for (const std::uint32_t i : changed) {
    const Told now{blocks[i].fate, blocks[i].here.count()};  // Layers only come, but for a miss.
    if (greeted && now.fate == told_[i].fate && now.layers == told_[i].layers) continue;
    told_[i] = now;
    v1::RedeemedBlock& block = changed_[i];
    // What has not been written yet still says what the block is.
    const bool first = !greeted || block.has_what();
    block.Clear();
    ToProto(i, blocks[i], first, &block);
  }
  Advance();
}

void RedeemCall::Ended(const absl::Status& status) {
  MutexLock lock(mu_);
  if (!end_.has_value()) end_ = status;
  Advance();
}

void RedeemCall::Advance() {
  if (writing_ || finished_) return;
  if (!changed_.empty()) {
    message_.Clear();
    for (auto& [place, block] : changed_) *message_.add_blocks() = std::move(block);
    changed_.clear();
    writing_ = true;
    StartWrite(&message_);
  } else if (end_.has_value()) {
    finished_ = true;
    Finish(StatusToGrpc(*end_));
  }
}

void RedeemCall::OnWriteDone(bool ok) {
  MutexLock lock(mu_);
  writing_ = false;
  if (!ok) {
    changed_.clear();
    if (!end_.has_value()) end_ = absl::CancelledError("the caller is gone");
  }
  Advance();
}

void RedeemCall::OnCancel() {
  MutexLock lock(mu_);
  changed_.clear();
  if (!end_.has_value()) end_ = absl::CancelledError("the call was cancelled");
  Advance();
}

void RedeemCall::OnDone() {
  {
    MutexLock lock(mu_);
    if (redeeming_ != nullptr) tickets_->Cancel(redeeming_);
  }
  self_ = nullptr;
}

}  // namespace kvmill
