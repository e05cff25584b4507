// What a home knows of who holds the blocks of its anchors: those it points at, and those it copies
// from.
//
// Bounded and forgetful: a pointer lives for `life_nanos` after it was announced, and when the
// table is full the one announced longest ago goes. A pointer that is missing or wrong is a miss,
// never wrong bytes, so anchors are known by their 64-bit hash alone. Lives on the loop.
#ifndef KVMILL_SERVICE_CLUSTER_POINTER_TABLE_H_
#define KVMILL_SERVICE_CLUSTER_POINTER_TABLE_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "service/cluster/cluster_view.h"
#include "service/cluster/peers.h"
#include "storage/core/clock.h"

namespace kvmill {

class PointerTable {
 public:
  struct Options {
    std::size_t anchors_max = 1 << 20;  // About 180 bytes each with one holder.
    std::int64_t life_nanos = 600'000'000'000;
  };
  static constexpr std::size_t kHoldersMax = 16;  // Of an anchor.
  // Of an answer: those that surely have blocks. More are named only where none of these does.
  static constexpr std::size_t kSureMax = 4;
  static constexpr std::int64_t kForgetNanos = 10'000'000'000;

  PointerTable(const Clock& clock, const Options& options) : clock_(clock), options_(options) {}

  // `holder` says so. Of more than kHoldersMax holders of an anchor those stay that have more
  // blocks, or said so later; with `keep` this one does. A count above kRunBlocks is not one, and
  // ignored.
  void Announced(const Member& holder, const std::vector<Announcement>& announcements,
                 bool keep = false);

  // What a node was heard to have of a run.
  struct Holder {
    std::string id;           // Member::id
    std::string incarnation;  // Member::incarnation
    RunSketch sketch;
  };
  // Most places first, then most blocks, later ones first among equals.
  std::vector<Holder> HoldersOf(std::uint64_t anchor_hash) const;

  // Who has, or may have, blocks of the query that are among the bits `wanted`: best first, at most
  // kPointersMax. Whose anchor is not known nobody has.
  std::vector<Pointer> PointersTo(const Fingerprint& fingerprint, const RunQuery& query,
                                  std::uint32_t wanted) const;

  // Forgets holders that are not in the view: they are gone, or another process.
  void Keep(const ClusterView& view);

  // Which of the holder's digests, as bits, are not those of what it announced and is known here.
  // Those pointers are forgotten kForgetNanos later, unless the holder, which knows, announces them
  // again.
  std::uint64_t Compare(const Member& holder, const Digests& digests);

  std::size_t anchors() const { return anchors_.size(); }
  // Every anchor has a place below anchors(). When others come and go it moves to a lower one, or
  // to the end: who goes through them from the end to the beginning misses none that stays.
  std::uint64_t AnchorAt(std::size_t place) const { return order_[place].second; }

 private:
  struct Entry {
    std::uint32_t number = 0;  // Of who, in names_.
    std::int64_t announced = 0;
    RunSketch sketch;
  };
  struct Anchor {
    std::vector<Entry> holders;  // 1 to kHoldersMax.
    std::int64_t announced = 0;  // Last.
  };

  std::uint32_t NumberOf(const Member& holder);
  bool Valid(std::uint64_t anchor_hash, const Entry& holder) const;
  // Takes out the holders of an anchor for which `which` is true.
  template <typename Which>
  void Drop(std::uint64_t anchor_hash, Anchor* anchor, const Which& which);
  void Trim();

  const Clock& clock_;
  const Options options_;
  absl::flat_hash_map<std::uint64_t, Anchor> anchors_;
  // One entry for each anchor, by the time when it was entered or last looked at: an anchor that
  // was announced again meanwhile goes to the end instead of away.
  std::deque<std::pair<std::int64_t, std::uint64_t>> order_;
  // Holders by number, so that a pointer is small. Names of those who left are used again.
  struct Name {
    std::string id, incarnation;
    bool used = false;
    Digests digests = {};  // Of its pointers, but for those that were forgotten.
    std::array<std::int64_t, kDigests> forgotten = {};  // All that were announced until then.
  };
  std::vector<Name> names_;
};

// The pointers of an answer that has the blocks already: none when these are all.
void AddPointers(const Fingerprint& fingerprint, const RunQuery& query,
                 const PointerTable& pointers, RunAnswer* answer);

// What a node answers: the blocks of the query that `has` says are here, whole, and, when these are
// not all, who was announced to have some.
RunAnswer AnswerOf(const Fingerprint& fingerprint, const RunQuery& query,
                   const std::function<bool(const BlockKey&)>& has, const PointerTable& pointers);

}  // namespace kvmill

#endif  // KVMILL_SERVICE_CLUSTER_POINTER_TABLE_H_
