// What a node holds, by run: which blocks of which anchor, and the sketch of each run.
//
// Sequences that part within a run share its anchor, so a place may hold several blocks; the sketch
// counts the first places that hold some block and says which ones (run_sketch.h).
//
// A block's anchor is found from the block before it (RunLink), so it may have to wait until that
// is here; it is known for good then, whether or not the block before it stays. Blocks are known by
// the hash of namespace and key.
//
// Every change is O(1), but that each block waits once at most. bytes() tells what it takes: some
// 40 bytes a block and 110 a run. Not thread-safe.
#ifndef KVMILL_SERVICE_CLUSTER_HELD_TABLE_H_
#define KVMILL_SERVICE_CLUSTER_HELD_TABLE_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/hash/hash.h"
#include "service/cluster/peers.h"
#include "service/cluster/run_sketch.h"
#include "storage/core/run_link.h"

namespace kvmill {

class HeldTable {
 public:
  HeldTable();
  HeldTable(const HeldTable&) = delete;
  HeldTable& operator=(const HeldTable&) = delete;

  // The block is here; `entry` is the caller's, to find it again. A block without a place in a run
  // is not kept. What is known of a block that is there already stays, but for the entry.
  void Put(std::uint64_t key_hash, const RunLink& link, std::uint32_t entry);
  void Erase(std::uint64_t key_hash);

  // A count of 0: nothing, or not the first block.
  RunSketch SketchOf(std::uint64_t anchor_hash) const;

  struct Place {
    std::uint64_t anchor_hash = 0;
    std::uint8_t place = 0;
  };
  // Empty: the block is not here, or its anchor is not known.
  std::optional<Place> PlaceOf(std::uint64_t key_hash) const;

  struct Block {
    std::uint64_t key_hash = 0;
    std::uint32_t entry = 0;
    std::uint8_t place = 0;
  };
  // All blocks of the run that are here, those behind a gap included; in no particular order.
  std::vector<Block> BlocksOf(std::uint64_t anchor_hash) const;

  // The sketches that are not what they were when this was called last, each once.
  std::vector<Announcement> TakeChanges();

  // Blocks of runs that are not here any more, since this was called last.
  struct Left {
    std::uint64_t anchor_hash = 0;
    std::uint64_t key_hash = 0;
  };
  std::vector<Left> TakeLeft();

  // To find what is not here any more: between BeginSweep and SweepSome, Put is called for all that
  // is. SweepSome then appends blocks for which it was not to `missed` and moves the cursor, from
  // 0; false at the end. Put and Erase may be called in between. A sweep that was begun is ended,
  // with an Erase or a Put of all that was missed, before the next one.
  void BeginSweep();
  bool SweepSome(std::size_t* cursor, std::vector<Block>* missed) const;

  std::size_t blocks() const { return blocks_.size(); }
  std::size_t runs() const { return runs_.size(); }
  // Blocks whose anchor is not known yet.
  std::size_t waiting() const { return waiting_count_; }
  // Of memory, with what the tables keep free.
  std::size_t bytes() const;

 private:
  using Index = std::uint32_t;
  static constexpr Index kNone = 0xFFFFFFFF;

  struct Node {
    std::uint64_t hash = 0;
    std::uint32_t entry = 0;
    Index group = kNone;  // Of groups_; kNone: not in use.
    Index next = kNone;   // Of the group's; of nodes that are not in use.
    Index before = kNone;
    std::uint8_t place = 0;
    bool waits = false;
    bool seen = false;  // == seen_: there was a Put since BeginSweep.
  };
  static_assert(sizeof(Node) == 32);

  // A run, or the blocks that wait for one block.
  struct Group {
    std::uint64_t hash = 0;  // Of the anchor, or of what they wait for.
    Index first = kNone;     // Of nodes_; of groups that are not in use.
    // Of a run only.
    std::uint32_t blocks = 0;
    std::uint64_t sum = 0;      // As RunSketch::sum.
    std::uint32_t places = 0;   // Bit i: some block has place i;
    std::uint32_t several = 0;  //   more than one has.
    // Of each place the exclusive or of the tags of its blocks.
    std::array<std::uint16_t, kRunBlocks> tags{};
  };
  static_assert(sizeof(Group) == 96);

  // Tables of indexes, found by the hash of what the index stands for.
  struct HashOfItem {
    using is_transparent = void;
    const HeldTable* table;
    bool groups;
    std::uint64_t Of(Index i) const {
      return groups ? table->groups_[i].hash : table->nodes_[i].hash;
    }
    std::size_t operator()(Index i) const { return absl::Hash<std::uint64_t>{}(Of(i)); }
    std::size_t operator()(std::uint64_t hash) const { return absl::Hash<std::uint64_t>{}(hash); }
  };
  struct SameItem {
    using is_transparent = void;
    HashOfItem of;
    bool operator()(Index a, Index b) const { return a == b; }
    bool operator()(Index a, std::uint64_t hash) const { return of.Of(a) == hash; }
    bool operator()(std::uint64_t hash, Index a) const { return of.Of(a) == hash; }
  };
  using Table = absl::flat_hash_set<Index, HashOfItem, SameItem>;

  Index Find(const Table& table, std::uint64_t hash) const {
    const auto found = table.find(hash);
    return found == table.end() ? kNone : *found;
  }
  Index GroupOf(Table* table, std::uint64_t hash);
  void Link(Index node, Index group);
  // Takes it out of its group, which goes with its last one.
  void Unlink(Index node);
  void EnterRun(Index node, std::uint64_t anchor_hash);
  // Puts those that wait for `node`, which is in a run, there, too; and those that wait for them.
  void Release(Index node);
  // Before a run's blocks change.
  void Note(const Group& run);
  // Adds the block to what the run sums up, or takes it out.
  static void Sum(Group* run, const Node& block);
  static RunSketch SketchOf(const Group& run);

  std::deque<Node> nodes_;
  std::deque<Group> groups_;
  Index free_node_ = kNone, free_group_ = kNone;
  Table blocks_;          // Of nodes_.
  Table runs_, waiting_;  // Of groups_.
  std::size_t waiting_count_ = 0;
  // Blocks of a place beyond the first one, where there are any: by run's index and place.
  absl::flat_hash_map<std::uint64_t, std::uint32_t> more_;
  // Of runs that changed: what was told, as far as it tells one from another.
  struct ToldRun {
    std::uint8_t count = 0;
    std::uint32_t blocks = 0;
    std::uint64_t sum = 0;
  };
  absl::flat_hash_map<std::uint64_t, ToldRun> told_;
  std::vector<Left> left_;
  bool seen_ = false;
};

}  // namespace kvmill

#endif  // KVMILL_SERVICE_CLUSTER_HELD_TABLE_H_
