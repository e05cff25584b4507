#include "client/redeem_stream.h"

#include <algorithm>
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

void RedeemStream::Start(Connection::Deadline deadline) {
  connection_.Admit(&context_, deadline, [this](const Connection::Admission& admission) {
    if (!admission.status.ok()) {
      ended_();
      done_(admission.status);
      delete this;
      return;
    }
    pass_ = admission.pass;
    channel_ = connection_.channel();
    reader_ = channel_->redeem->PrepareAsyncRedeem(&context_, request_, connection_.queue());
    reader_->StartCall(&start_done_);
  });
}

void RedeemStream::OnStart(bool ok) {
  if (ok) {
    reader_->Read(&message_, &read_done_);
  } else {
    reader_->Finish(&status_, &finish_done_);
  }
}

void RedeemStream::OnRead(bool ok) {
  if (ok) failed_ = Take();
  if (ok && failed_.ok()) return reader_->Read(&message_, &read_done_);
  if (!failed_.ok()) context_.TryCancel();
  reader_->Finish(&status_, &finish_done_);
}

absl::Status RedeemStream::Take() {
  const bool first = result_.blocks.empty();
  std::vector<std::uint32_t> changed;
  for (const v1::RedeemedBlock& news : message_.blocks()) {
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
  return absl::OkStatus();
}

void RedeemStream::OnFinish(bool) {
  connection_.NoteBootId(context_);
  if (status_.error_code() == grpc::StatusCode::UNAUTHENTICATED) connection_.PassRefused(pass_);
  reader_.reset();
  channel_.reset();
  ended_();
  absl::Status status = failed_;
  if (status.ok() && !status_.ok() && cancelled_.load(std::memory_order_relaxed)) {
    status = absl::CancelledError("the redeem was cancelled");
  }
  if (status.ok()) status = connection_.StatusOf(status_);
  if (status.ok()) {
    result_.missed = static_cast<std::size_t>(
        std::count_if(result_.blocks.begin(), result_.blocks.end(),
                      [](const RedeemedBlock& b) { return b.fate == TicketFate::kMissed; }));
    done_(std::move(result_));
  } else {
    done_(status);
  }
  connection_.End(&context_);
  delete this;
}

}  // namespace kvmill
