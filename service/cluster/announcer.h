// Tells homes what this node holds, so that others find it and homes copy it: batched, repeated
// before pointers die, said again to whoever becomes a home of an anchor and, a while after, taken
// back from whoever is one no more. Now and then digests of all that a home was told are compared
// with what it knows (Peers::Compare), and what differs is said again.
//
// Lives on the loop. What it costs is bounded: a tick looks at kSliceMax anchors and starts at most
// one call a home; homes that fail are left alone as PeerHealth says and told later.
#ifndef KVMILL_SERVICE_CLUSTER_ANNOUNCER_H_
#define KVMILL_SERVICE_CLUSTER_ANNOUNCER_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "service/cluster/cluster_view.h"
#include "service/cluster/loop.h"
#include "service/cluster/peer_health.h"
#include "service/cluster/peers.h"

namespace kvmill {

class Announcer {
 public:
  struct Options {
    std::string self_id;
    std::size_t copies = 0;  // R: ranks 0 to R are told, at most kRanks - 2.
    std::int64_t tick_nanos = 50'000'000;
    std::int64_t call_nanos = 1'000'000'000;
    // Said again after so long: three times within the life of a pointer.
    std::int64_t repeat_nanos = 200'000'000'000;
    // A home's digests are compared so often; half as often after each time that they differed,
    // down to once a repeat.
    std::int64_t compare_nanos = 30'000'000'000;
    // Until a former home is told to forget: those who have not heard of the new one ask it.
    std::int64_t withdraw_nanos = 30'000'000'000;
    // What this node says to itself as a home.
    std::function<void(const std::vector<Announcement>&)> to_self;
  };
  static constexpr std::size_t kSliceMax = 16384;
  // Anchors of which former homes are still to be told; of more the pointers die.
  static constexpr std::size_t kFormerMax = 1 << 18;

  Announcer(Loop& loop, Peers& peers, PeerHealth& health, Options options);
  ~Announcer();
  Announcer(const Announcer&) = delete;
  Announcer& operator=(const Announcer&) = delete;

  void SetView(std::shared_ptr<const ClusterView> view);
  // What the node has of the anchor's run; a count of 0: nothing.
  void Set(const Announcement& run);

  std::size_t anchors() const { return entries_.size(); }
  // Anchors of which a home has not been told what is true now.
  std::size_t untold() const;
  // What Set said last.
  RunSketch SketchOf(std::uint64_t anchor_hash) const;
  // All that this node holds, in no order.
  std::vector<Announcement> Held() const;
  // Ranges of digests that differed, since the start.
  std::uint64_t differed() const { return differed_; }

 private:
  using Name = std::pair<std::string, std::string>;  // Id and incarnation.
  using HomeNumber = std::uint32_t;                  // 0: none.
  // What a home was told, as far as it tells one sketch from another.
  struct Told {
    HomeNumber home = 0;
    std::uint8_t count = 0;
    std::uint64_t sum = 0;
    std::int64_t at = 0;
    bool Is(const RunSketch& sketch) const { return count == sketch.count && sum == sketch.sum; }
  };
  struct Sums {
    Digests digests = {};  // Of what the home was told, but for what it has forgotten.
    std::array<std::int64_t, kDigests> forgotten = {};  // All it was told until then.
  };
  struct Home {
    Name name;
    Peers::CallId call = 0;
    std::unique_ptr<Sums> sums;   // Of those in the view.
    std::int64_t compare_at = 0;  // 0: not compared yet.
    std::int64_t compare_wait = 0;
  };
  struct Former {
    std::int64_t due = 0;
    std::uint64_t anchor_hash = 0;
    Told told;
  };
  struct Batch {
    std::vector<Announcement> said;
    std::vector<std::uint8_t> ranks;  // Of the home, for each that was said.
    std::vector<Former> withdrawn;    // Said after them, each with a count of 0.
    std::size_t size() const { return said.size() + withdrawn.size(); }
  };

  void Tick();
  // Adds what the homes of an anchor have to be told. False: there is nothing left to say, and the
  // node does not hold it.
  bool Collect(std::size_t at, std::int64_t now, std::map<MemberIndex, Batch>* batches);
  void CollectFormer(std::int64_t now, std::map<MemberIndex, Batch>* batches);
  void Tell(MemberIndex home, Batch batch);
  void Heard(HomeNumber number, const Batch& batch);
  void Hear(HomeNumber number, const Announcement& said, std::size_t rank, std::int64_t now);
  void Again(std::vector<Former> withdrawn);
  void Compare(std::int64_t now);
  void Compared(HomeNumber number, std::uint64_t differ);

  Told* Slots(std::size_t at) { return told_.data() + at * ranks_; }
  // The slot for the home of that rank; what it was told as one of another rank moves with it.
  Told& SlotOf(std::size_t at, std::size_t rank, HomeNumber home);
  // Whether the home still knows what it was told then.
  bool Knows(std::uint64_t anchor_hash, HomeNumber home, std::int64_t told_at) const;
  // Adds it to the home's digests, or takes it out.
  void Sum(std::uint64_t anchor_hash, const Told& told);
  void Leave(std::uint64_t anchor_hash, const Told& told);
  std::size_t HomeCount(std::uint64_t anchor_hash) const;
  HomeNumber NumberOf(const Member& home);
  void Remove(std::size_t at);

  Loop& loop_;
  Peers& peers_;
  PeerHealth& health_;
  const Options options_;
  const std::size_t ranks_;
  std::shared_ptr<const ClusterView> view_;
  std::vector<HomeNumber> view_homes_;  // Of the view's members.
  absl::flat_hash_map<HomeNumber, MemberIndex> members_;
  std::vector<Announcement> entries_;
  std::vector<Told> told_;  // ranks_ for each entry.
  absl::flat_hash_map<std::uint64_t, std::size_t> places_;
  std::size_t next_ = 0;     // Where the next tick begins.
  std::vector<Home> homes_;  // By number; numbers are never used again.
  std::map<Name, HomeNumber> numbers_;
  std::deque<Former> former_;  // By when they are due.
  std::uint64_t differed_ = 0;
  Loop::TimerId timer_ = 0;
};

}  // namespace kvmill

#endif  // KVMILL_SERVICE_CLUSTER_ANNOUNCER_H_
