// What a node knows of its cluster at one moment: who is in it, and who is home of what.
#ifndef KVMILL_SERVICE_CLUSTER_CLUSTER_VIEW_H_
#define KVMILL_SERVICE_CLUSTER_CLUSTER_VIEW_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "service/cluster/anchor.h"
#include "service/cluster/member.h"
#include "service/cluster/placement.h"

namespace kvmill {

// Immutable, thread-safe: the data path reads the one that was published last, and never waits for
// the loop. Whoever holds a view may use everything in it.
class ClusterView {
 public:
  // The view of `members`, in any order. What stayed is taken from `old`, which may be null. Takes
  // milliseconds to seconds of processor time: not on the loop. INVALID_ARGUMENT naming the member:
  // two have one id, or one has no capacity; RESOURCE_EXHAUSTED: more than kHomesMax.
  static absl::StatusOr<std::shared_ptr<const ClusterView>> Make(
      std::vector<Member> members, std::uint64_t number, int shard_bits,
      const std::shared_ptr<const ClusterView>& old);

  // Rises by one with each view of this node; other nodes count differently.
  std::uint64_t number() const { return number_; }
  std::uint32_t placement_version() const { return kPlacementVersion; }

  // Those that serve, by id, then the others, by id. What the table calls a MemberIndex is an index
  // into it.
  const std::vector<Member>& members() const { return members_; }
  std::size_t serving_count() const { return serving_; }
  absl::Span<const Member> serving() const { return {members_.data(), serving_}; }
  std::optional<MemberIndex> IndexOf(std::string_view id) const;

  // The members that are asked for the blocks of an anchor, and keep them, best first; at most
  // kRanks, none when nobody serves. No lock, no allocation.
  absl::Span<const MemberIndex> HomesOf(const Fingerprint& fingerprint,
                                        const BlockKey& anchor) const {
    return table_->Ranking(table_->ShardOf(AnchorHash(fingerprint, anchor)));
  }

  const ShardTable& table() const { return *table_; }

 private:
  ClusterView() = default;

  std::uint64_t number_ = 0;
  std::vector<Member> members_;
  std::size_t serving_ = 0;
  std::shared_ptr<const ShardTable> table_;  // Shared: views with the same homes have one.
};

// Turns changes of membership into views, off the loop and one at a time: when members change
// faster than views are made, those in between are left out. Lives on the loop.
class ViewKeeper {
 public:
  // Runs `work` where it may take seconds, later and not on the loop, then `done` on the loop.
  // Neither runs when the loop ends first.
  using Background = std::function<void(std::function<void()> work, std::function<void()> done)>;

  struct Options {
    int shard_bits = kShardBits;  // Of the placement version; tests take fewer.
    Background background;
    // On the loop, with each new view.
    std::function<void(std::shared_ptr<const ClusterView>)> publish;
    // On the loop: members of which no view can be made. The last view stays.
    std::function<void(const absl::Status&)> refuse;
  };
  explicit ViewKeeper(Options options);
  // What runs in the background finishes, and is dropped.
  ~ViewKeeper();
  ViewKeeper(const ViewKeeper&) = delete;
  ViewKeeper& operator=(const ViewKeeper&) = delete;

  // The members from now on. Ends in `publish` or `refuse`, unless others replace them first.
  void SetMembers(std::vector<Member> members);

  bool idle() const { return !working_ && !wanted_.has_value(); }

 private:
  void Start();

  Options options_;
  std::shared_ptr<const ClusterView> view_;
  std::optional<std::vector<Member>> wanted_;
  bool working_ = false;
  // What background work finds when the keeper is gone.
  std::shared_ptr<bool> alive_ = std::make_shared<bool>(true);
};

}  // namespace kvmill

#endif  // KVMILL_SERVICE_CLUSTER_CLUSTER_VIEW_H_
