#include "client/redeem_stream.h"

#include <bit>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "storage/core/namespace.h"
#include "storage/core/status_macros.h"

namespace kvmill {
namespace {

absl::Status Malformed(absl::string_view what, std::uint64_t got, std::uint64_t want) {
  return absl::InternalError(
      absl::StrCat("malformed reply to Redeem: ", what, " ", got, ", want ", want));
}

}  // namespace

void Redeeming::Cancel() {
  MutexLock lock(mu_);
  cancelled_ = true;
  if (stream_ != nullptr) stream_->TryCancel();
}

bool Redeeming::cancelled() const {
  MutexLock lock(mu_);
  return cancelled_;
}

RedeemStream::RedeemStream(Connection& connection, v1::RedeemTicketRequest request,
                           RedeemUpdate update, RedeemingPtr redeeming, Done done)
    : ServerStream(connection),
      request_(std::move(request)),
      update_(std::move(update)),
      redeeming_(std::move(redeeming)),
      done_(std::move(done)) {
  MutexLock lock(redeeming_->mu_);
  redeeming_->stream_ = this;
  if (redeeming_->cancelled_) TryCancel();  // Before this call was made.
}

RedeemStream::Reader RedeemStream::Prepare(Channel& channel, grpc::ClientContext* context,
                                           grpc::CompletionQueue* queue) {
  stub_ = channel.redeems.Get();
  return stub_->PrepareAsyncRedeem(context, request_, queue);
}

absl::StatusOr<bool> RedeemStream::Take(const v1::TicketUpdate& update) {
  const bool first = result_.blocks.empty();
  std::vector<std::uint32_t> changed;
  for (const v1::RedeemedBlock& news : update.blocks()) {
    if (first) {
      // All of them, in their order.
      if (news.block() != result_.blocks.size() || !news.has_what()) {
        return Malformed("block", news.block(), result_.blocks.size());
      }
      RedeemedBlock& block = result_.blocks.emplace_back();
      KVMILL_ASSIGN_OR_RETURN(block.key, BlockKey::FromBytes(news.what().key()));
      block.group = static_cast<std::uint8_t>(news.what().group());
      block.block_index = news.what().block_index();
      block.token_count = news.what().token_count();
      block.layer_count = news.what().layer_count();
      if (block.layer_count == 0 || block.layer_count > kLayersMax) {
        return Malformed("layers", block.layer_count, kLayersMax);
      }
    }
    if (news.block() >= result_.blocks.size()) {
      return Malformed("block", news.block(), result_.blocks.size());
    }
    RedeemedBlock& block = result_.blocks[news.block()];
    if (!v1::TicketFate_IsValid(news.fate())) {
      return Malformed("fate", static_cast<std::uint64_t>(news.fate()), v1::TICKET_FATE_MISSED);
    }
    block.fate = static_cast<TicketFate>(news.fate());
    // A newer daemon may have reasons that are not known here.
    block.miss = v1::TicketMiss_IsValid(news.miss()) ? static_cast<TicketMiss>(news.miss())
                                                     : TicketMiss::kRefused;
    block.layer_words.assign(news.layers().begin(), news.layers().end());
    block.layers_here = 0;
    for (const std::uint64_t word : block.layer_words) {
      block.layers_here += static_cast<std::uint32_t>(std::popcount(word));
    }
    if (block.layer_words.size() > (block.layer_count + 63) / 64 ||
        block.layers_here > block.layer_count) {
      return Malformed("layers", block.layers_here, block.layer_count);
    }
    changed.push_back(news.block());
  }
  if (update_ != nullptr && !changed.empty()) update_(result_.blocks, changed);
  return true;
}

void RedeemStream::Ended(const absl::Status& status) {
  bool cancelled = false;
  {
    MutexLock lock(redeeming_->mu_);
    redeeming_->stream_ = nullptr;
    cancelled = redeeming_->cancelled_;
  }
  stub_ = nullptr;
  result_.status = status;
  if (!status.ok() && cancelled) result_.status = absl::CancelledError("the redeem was cancelled");
  for (RedeemedBlock& block : result_.blocks) {
    if (block.fate == TicketFate::kOpen) {
      block.fate = TicketFate::kMissed;
      block.miss = TicketMiss::kCallEnded;
      block.layers_here = 0;
      block.layer_words.clear();
    }
    if (block.fate == TicketFate::kMissed) ++result_.missed;
  }
  done_(std::move(result_));
}

}  // namespace kvmill
