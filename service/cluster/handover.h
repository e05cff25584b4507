// What a node that leaves does with the blocks that only it has: asks their homes to see to them,
// again and again, until they have them or the time is over.
//
// Homes pull, at their own rate; this node goes on to answer meanwhile. A home that knows of
// another node with the blocks, one that stays, copies nothing. Lives on the loop.
#ifndef KVMILL_SERVICE_CLUSTER_HANDOVER_H_
#define KVMILL_SERVICE_CLUSTER_HANDOVER_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "service/cluster/cluster_view.h"
#include "service/cluster/loop.h"
#include "service/cluster/peer_health.h"
#include "service/cluster/peers.h"

namespace kvmill {

class Handover {
 public:
  struct Options {
    std::string self_id;
    std::int64_t first_wait_nanos = 50'000'000;  // Between two calls to one home; doubles
    std::int64_t last_wait_nanos = 800'000'000;  //   up to this while nothing moves.
    std::int64_t call_nanos = 2'000'000'000;
    // Homes are asked no sooner: until then all have heard that this node leaves, and whether they
    // do, too. Two that leave together must not count on each other.
    std::int64_t begin_nanos = 300'000'000;
  };
  static constexpr std::size_t kSliceMax = 16384;  // Runs that a tick looks at.
  struct Report {
    std::uint64_t runs = 0, blocks = 0;            // That others have now.
    std::uint64_t runs_left = 0, blocks_left = 0;  // That may be lost.
    bool alone = false;                            // As it ended: no other node stays.
  };

  Handover(Loop& loop, Peers& peers, PeerHealth& health, Options options);
  ~Handover();
  Handover(const Handover&) = delete;
  Handover& operator=(const Handover&) = delete;

  void SetView(std::shared_ptr<const ClusterView> view) { view_ = std::move(view); }

  // Whether others stay, as members say it, which is sooner than there is a view.
  void SetMembers(const std::vector<Member>& members);

  // `runs`: what this node holds, those first that should be safe first. `done` runs once, on the
  // loop, not within this call and not after the deadline. Not while one runs.
  void Start(std::vector<Announcement> runs, std::int64_t deadline_nanos,
             std::function<void(const Report&)> done);

  bool running() const { return done_ != nullptr; }

  // What is known by now; zeros before Start.
  const Report& report() const { return report_; }

 private:
  struct Home {
    Member member;
    Peers::CallId call = 0;
    std::vector<Announcement> asked;
    std::int64_t next = 0;  // Not before.
    std::int64_t wait = 0;
  };

  void Tick();
  // The best home that may be asked now, and is not this node; null: none.
  const Member* HomeOf(std::uint64_t anchor_hash) const;
  void Answered(const std::string& id, const absl::StatusOr<std::vector<std::uint8_t>>& counts);
  void Complete();

  Loop& loop_;
  Peers& peers_;
  PeerHealth& health_;
  const Options options_;
  std::shared_ptr<const ClusterView> view_;
  std::vector<Announcement> left_;  // In the order in which they should go.
  std::size_t next_ = 0;            // Where the next tick begins.
  std::map<std::string, Home> homes_;
  bool others_serve_ = false;
  std::int64_t begin_ = 0, deadline_ = 0;
  Loop::TimerId timer_ = 0;
  Report report_;
  std::function<void(const Report&)> done_;
};

}  // namespace kvmill

#endif  // KVMILL_SERVICE_CLUSTER_HANDOVER_H_
