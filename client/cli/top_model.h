// What `kvmill top` knows: the last answer of the daemon, rates between the last two, and what went
// wrong. No clock, no terminal, no daemon.
#ifndef KVMILL_CLIENT_CLI_TOP_MODEL_H_
#define KVMILL_CLIENT_CLI_TOP_MODEL_H_

#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "client/client.h"

namespace kvmill::cli {

// Per second, between two answers.
struct TopRates {
  double lookups = 0, lookup_blocks = 0;
  std::optional<double> hit_rate;  // Of the blocks looked up meanwhile; none: there were none.
  double stored_blocks = 0, existing_blocks = 0, rejected_blocks = 0;
  double fetched_blocks = 0, fetch_misses = 0;
  std::map<Tier, double> evicted_blocks;
  std::map<std::pair<std::string, std::string>, double> bytes_in, bytes_out;  // Path, transport.
};

// By the daemon's own clock, so that the way of an answer does not count. None when there is
// nothing to compare: another life of the daemon (its counters began again), or no time between
// the two. A counter that went back all the same counts as not moved.
std::optional<TopRates> RatesBetween(const ServerStat& before, const ServerStat& now);

// What a frame shows.
struct TopView {
  std::string server;
  absl::Time now;
  absl::Duration interval;         // Between questions.
  std::optional<ServerStat> stat;  // The last answer. None: there was none yet.
  std::optional<TopRates> rates;   // None: not yet, or no longer true.
  absl::Duration silence;          // Since the last answer, or since the beginning.
  absl::Status error;              // Of the last question, when it failed.
  std::string previous_boot_id;    // Not empty: the daemon was restarted a moment ago.
};

class TopModel {
 public:
  TopModel(std::string server, absl::Duration interval, absl::Time now);

  void OnStat(const ServerStat& stat, absl::Time now);
  void OnError(const absl::Status& error);  // Not OK.
  TopView View(absl::Time now) const;

 private:
  TopView view_;  // As of the last answer; View() adds what depends on the time.
  absl::Time heard_;
  absl::Time restart_shown_until_ = absl::InfinitePast();
};

}  // namespace kvmill::cli

#endif  // KVMILL_CLIENT_CLI_TOP_MODEL_H_
