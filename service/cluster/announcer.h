// Tells homes what this node holds, so that others find it: batched, repeated before pointers die,
// and said again to whoever becomes the home of an anchor.
//
// Lives on the loop. What it costs is bounded: a tick looks at kSliceMax anchors and starts at most
// one call a home; homes that fail are left alone as PeerHealth says and told later.
#ifndef KVMILL_SERVICE_CLUSTER_ANNOUNCER_H_
#define KVMILL_SERVICE_CLUSTER_ANNOUNCER_H_

#include <cstddef>
#include <cstdint>
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
    std::int64_t tick_nanos = 50'000'000;
    std::int64_t call_nanos = 1'000'000'000;
    // Said again after so long: three times within the life of a pointer.
    std::int64_t repeat_nanos = 200'000'000'000;
    // What this node says to itself as a home.
    std::function<void(const std::vector<Announcement>&)> to_self;
  };
  static constexpr std::size_t kSliceMax = 16384;

  Announcer(Loop& loop, Peers& peers, PeerHealth& health, Options options);
  ~Announcer();
  Announcer(const Announcer&) = delete;
  Announcer& operator=(const Announcer&) = delete;

  void SetView(std::shared_ptr<const ClusterView> view) { view_ = std::move(view); }
  // The node has the first `count` blocks of the anchor's run; 0: none.
  void Set(std::uint64_t anchor_hash, std::uint8_t count);

  std::size_t anchors() const { return entries_.size(); }
  // Anchors whose home was not told yet.
  std::size_t untold() const;

 private:
  using Name = std::pair<std::string, std::string>;  // Id and incarnation.
  struct Entry {
    std::uint64_t hash = 0;
    std::uint8_t count = 0;
    std::uint32_t told = 0;  // Number of the home that knows; 0: none does.
    std::int64_t told_at = 0;
  };
  struct Home {
    Name name;
    Peers::CallId call = 0;
  };

  void Tick();
  void Tell(MemberIndex home, std::vector<Announcement> batch);
  void Told(std::uint32_t number, const std::vector<Announcement>& batch);
  std::uint32_t NumberOf(const Member& home);
  void Remove(std::size_t at);

  Loop& loop_;
  Peers& peers_;
  PeerHealth& health_;
  const Options options_;
  std::shared_ptr<const ClusterView> view_;
  std::vector<Entry> entries_;
  absl::flat_hash_map<std::uint64_t, std::size_t> places_;
  std::size_t next_ = 0;     // Where the next tick begins.
  std::vector<Home> homes_;  // By number; numbers are never used again.
  std::map<Name, std::uint32_t> numbers_;
  Loop::TimerId timer_ = 0;
};

}  // namespace kvmill

#endif  // KVMILL_SERVICE_CLUSTER_ANNOUNCER_H_
