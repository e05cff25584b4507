#include "client/cli/top_model.h"

#include <algorithm>
#include <cstdint>

namespace kvmill::cli {
namespace {

// A restart is said for so long.
constexpr absl::Duration kRestartShown = absl::Seconds(30);

}  // namespace

std::optional<TopRates> RatesBetween(const ServerStat& before, const ServerStat& now) {
  const double seconds = now.uptime_s - before.uptime_s;
  if (now.boot_id != before.boot_id || !(seconds > 0)) return std::nullopt;
  const auto grown = [](std::uint64_t was, std::uint64_t is) {
    return is > was ? static_cast<double>(is - was) : 0.0;
  };
  const auto rate = [&](std::uint64_t ServerStat::*counter) {
    return grown(before.*counter, now.*counter) / seconds;
  };
  TopRates rates;
  rates.lookups = rate(&ServerStat::lookup_requests);
  rates.lookup_blocks = rate(&ServerStat::lookup_blocks);
  if (rates.lookup_blocks > 0) {
    // Read one after the other while lookups go on: a hit more than blocks asked for is possible.
    rates.hit_rate = std::min(1.0, rate(&ServerStat::hit_blocks) / rates.lookup_blocks);
  }
  rates.stored_blocks = rate(&ServerStat::stored_blocks);
  rates.existing_blocks = rate(&ServerStat::existing_blocks);
  rates.rejected_blocks = rate(&ServerStat::rejected_blocks);
  rates.fetched_blocks = rate(&ServerStat::fetched_blocks);
  rates.fetch_misses = rate(&ServerStat::fetch_misses);
  std::map<Tier, std::uint64_t> evicted;
  for (const TierUsage& tier : before.tiers) evicted[tier.tier] = tier.evicted_blocks;
  for (const TierUsage& tier : now.tiers) {
    rates.evicted_blocks[tier.tier] = grown(evicted[tier.tier], tier.evicted_blocks) / seconds;
  }
  // A way that was not there before had moved nothing.
  std::map<std::pair<std::string, std::string>, TransferUsage> moved;
  for (const TransferUsage& t : before.transfers) moved[{t.path, t.transport}] = t;
  for (const TransferUsage& t : now.transfers) {
    const std::pair<std::string, std::string> way = {t.path, t.transport};
    rates.bytes_in[way] = grown(moved[way].bytes_in, t.bytes_in) / seconds;
    rates.bytes_out[way] = grown(moved[way].bytes_out, t.bytes_out) / seconds;
  }
  return rates;
}

TopModel::TopModel(std::string server, absl::Duration interval, absl::Time now) : heard_(now) {
  view_.server = std::move(server);
  view_.interval = interval;
}

void TopModel::OnStat(const ServerStat& stat, absl::Time now) {
  if (view_.stat.has_value()) {
    view_.rates = RatesBetween(*view_.stat, stat);
    if (view_.stat->boot_id != stat.boot_id) {
      view_.previous_boot_id = view_.stat->boot_id;
      restart_shown_until_ = now + kRestartShown;
    }
  }
  view_.stat = stat;
  view_.error = absl::OkStatus();
  heard_ = now;
}

void TopModel::OnError(const absl::Status& error) {
  view_.error = error;
  view_.rates.reset();
}

TopView TopModel::View(absl::Time now) const {
  TopView view = view_;
  view.now = now;
  view.silence = std::max(absl::ZeroDuration(), now - heard_);
  if (now >= restart_shown_until_) view.previous_boot_id.clear();
  return view;
}

}  // namespace kvmill::cli
