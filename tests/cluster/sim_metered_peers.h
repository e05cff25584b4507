// `Peers` of one simulated process that measures how many bytes it asks for with Pull, by the clock
// of that process, and says when it is more than a rate allows.
#ifndef KVMILL_TESTS_CLUSTER_SIM_METERED_PEERS_H_
#define KVMILL_TESTS_CLUSTER_SIM_METERED_PEERS_H_

#include <algorithm>
#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

#include "service/cluster/peers.h"
#include "storage/core/clock.h"

namespace kvmill {

class SimMeteredPeers : public Peers {
 public:
  struct Options {
    double bytes_per_second = 0;
    double burst_bytes = 0;  // More than the rate gives, at any moment.
    double block_bytes = 0;
    std::function<void()> exceeded;
  };
  SimMeteredPeers(Peers& peers, const Clock& clock, Options options)
      : peers_(peers), clock_(clock), options_(std::move(options)) {}

  CallId Locate(const Member& member, const Fingerprint& fingerprint, std::vector<RunQuery> queries,
                std::int64_t deadline, Done<std::vector<RunAnswer>> done) override {
    return peers_.Locate(member, fingerprint, std::move(queries), deadline, std::move(done));
  }
  CallId Pull(const Member& member, const Fingerprint& fingerprint, RunKeys blocks,
              std::int64_t deadline, Done<std::vector<absl::Status>> done) override {
    Add(static_cast<double>(blocks.keys.size()));
    return peers_.Pull(
        member, fingerprint, std::move(blocks), deadline,
        [this, done = std::move(done)](const absl::StatusOr<std::vector<absl::Status>>& statuses) {
          if (statuses.ok()) {
            // These never came.
            Add(-static_cast<double>(
                std::count_if(statuses->begin(), statuses->end(),
                              [](const absl::Status& s) { return absl::IsNotFound(s); })));
          }
          done(statuses);
        });
  }
  CallId Announce(const Member& member, std::vector<Announcement> announcements,
                  std::int64_t deadline, std::function<void(absl::Status)> done) override {
    return peers_.Announce(member, std::move(announcements), deadline, std::move(done));
  }
  CallId ListRuns(const Member& member, std::vector<RunList> lists, std::int64_t deadline,
                  Done<std::vector<HeldRun>> done) override {
    return peers_.ListRuns(member, std::move(lists), deadline, std::move(done));
  }
  CallId HandOver(const Member& member, std::vector<Announcement> announcements,
                  std::int64_t deadline, Done<std::vector<std::uint8_t>> done) override {
    return peers_.HandOver(member, std::move(announcements), deadline, std::move(done));
  }
  CallId Compare(const Member& member, const Digests& digests, std::int64_t deadline,
                 Done<std::uint64_t> done) override {
    return peers_.Compare(member, digests, deadline, std::move(done));
  }
  void Cancel(CallId call) override { peers_.Cancel(call); }

 private:
  void Add(double blocks) {
    const std::int64_t now = clock_.MonotonicNanos();
    if (last_ != 0) {
      level_ -= static_cast<double>(now - last_) / 1e9 * options_.bytes_per_second;
      level_ = std::max(level_, 0.0);
    }
    last_ = now;
    level_ += blocks * options_.block_bytes;
    if (level_ > options_.burst_bytes) options_.exceeded();
  }

  Peers& peers_;
  const Clock& clock_;
  const Options options_;
  std::int64_t last_ = 0;
  double level_ = 0;
};

}  // namespace kvmill

#endif  // KVMILL_TESTS_CLUSTER_SIM_METERED_PEERS_H_
