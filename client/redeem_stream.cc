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

absl::Status RedeemStream::Take(const v1::TicketUpdate& update) {
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

void RedeemStream::Ended(const absl::Status& status) {
  ended_();
  if (status.ok()) {
    result_.missed = static_cast<std::size_t>(
        std::count_if(result_.blocks.begin(), result_.blocks.end(),
                      [](const RedeemedBlock& b) { return b.fate == TicketFate::kMissed; }));
    done_(std::move(result_));
  } else if (cancelled_.load(std::memory_order_relaxed)) {
    done_(absl::CancelledError("the redeem was cancelled"));
  } else {
    done_(status);
  }
}

}  // namespace kvmill
