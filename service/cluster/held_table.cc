#include "service/cluster/held_table.h"

#include <algorithm>
#include <bit>
#include <utility>

namespace kvmill {
namespace {

constexpr std::size_t kSweepStep = 1024;

std::uint8_t CountIn(std::uint32_t places) {
  return static_cast<std::uint8_t>(std::countr_one(places));
}

}  // namespace

HeldTable::HeldTable()
    : blocks_(0, HashOfItem{this, false}, SameItem{{this, false}}),
      runs_(0, HashOfItem{this, true}, SameItem{{this, true}}),
      waiting_(0, HashOfItem{this, true}, SameItem{{this, true}}) {}

HeldTable::Index HeldTable::GroupOf(Table* table, std::uint64_t hash) {
  if (const Index found = Find(*table, hash); found != kNone) return found;
  Index group = free_group_;
  if (group == kNone) {
    group = static_cast<Index>(groups_.size());
    groups_.emplace_back();
  } else {
    free_group_ = groups_[group].first;
  }
  groups_[group] = {.hash = hash};
  table->insert(group);
  return group;
}

void HeldTable::Link(Index node, Index group) {
  Node& n = nodes_[node];
  n.group = group;
  n.before = kNone;
  n.next = groups_[group].first;
  if (n.next != kNone) nodes_[n.next].before = node;
  groups_[group].first = node;
}

void HeldTable::Unlink(Index node) {
  const Node& n = nodes_[node];
  Group& group = groups_[n.group];
  if (!n.waits) Note(group);
  if (n.next != kNone) nodes_[n.next].before = n.before;
  (n.before == kNone ? group.first : nodes_[n.before].next) = n.next;
  if (n.waits) {
    --waiting_count_;
  } else {
    Sum(&group, n);
    --group.blocks;
    const std::uint32_t bit = std::uint32_t{1} << n.place;
    const auto more = more_.find(std::uint64_t{n.group} * kRunBlocks + n.place);
    if (more == more_.end()) {
      group.places &= ~bit;
    } else if (--more->second == 0) {
      group.several &= ~bit;
      more_.erase(more);
    }
  }
  if (group.first != kNone) return;
  (n.waits ? waiting_ : runs_).erase(n.group);
  group.first = free_group_;
  free_group_ = n.group;
}

void HeldTable::Note(const Group& run) {
  // What starts behind a gap is nothing that anybody could find, and was not told.
  const std::uint8_t count = CountIn(run.places);
  told_.try_emplace(run.hash, count == 0 ? ToldRun() : ToldRun{count, run.blocks, run.sum});
}

void HeldTable::Sum(Group* run, const Node& block) {
  run->sum ^= block.hash;
  run->tags[block.place] ^= TagOf(block.hash);
}

RunSketch HeldTable::SketchOf(const Group& run) {
  RunSketch sketch;
  sketch.count = CountIn(run.places);
  if (sketch.count == 0) return sketch;
  sketch.blocks = run.blocks;
  sketch.sum = run.sum;
  for (std::size_t place = 0; place < sketch.count; ++place) {
    const bool several = (run.several >> place & 1) != 0;
    sketch.tags[place] = several ? RunSketch::kSeveral : run.tags[place];
  }
  return sketch;
}

void HeldTable::EnterRun(Index node, std::uint64_t anchor_hash) {
  const Index run = GroupOf(&runs_, anchor_hash);
  Node& n = nodes_[node];
  Group& group = groups_[run];
  Note(group);
  n.waits = false;
  Link(node, run);
  Sum(&group, n);
  ++group.blocks;
  const std::uint32_t bit = std::uint32_t{1} << n.place;
  if ((group.places & bit) != 0) {
    group.several |= bit;
    ++more_[std::uint64_t{run} * kRunBlocks + n.place];
  }
  group.places |= bit;
}

void HeldTable::Release(Index node) {
  std::vector<Index> entered = {node};
  while (!entered.empty()) {
    const Index parent = entered.back();
    entered.pop_back();
    const Index group = Find(waiting_, nodes_[parent].hash);
    if (group == kNone) continue;
    const std::uint64_t anchor_hash = groups_[nodes_[parent].group].hash;
    for (Index child = groups_[group].first; child != kNone;) {
      const Index next = nodes_[child].next;
      // One that names another place is in no run with it.
      if (nodes_[child].place == nodes_[parent].place + 1) {
        Unlink(child);
        EnterRun(child, anchor_hash);
        entered.push_back(child);
      }
      child = next;
    }
  }
}

void HeldTable::Put(std::uint64_t key_hash, const RunLink& link, std::uint32_t entry) {
  if (link.kind == RunLink::Kind::kNone || link.place >= kRunBlocks) return Erase(key_hash);
  Index node = Find(blocks_, key_hash);
  if (node != kNone) {
    nodes_[node].entry = entry;
    nodes_[node].seen = seen_;
    // It may have come again with a better link.
    if (!nodes_[node].waits || link.kind == RunLink::Kind::kParent) return;
    Erase(key_hash);
  }
  node = free_node_;
  if (node == kNone) {
    node = static_cast<Index>(nodes_.size());
    nodes_.emplace_back();
  } else {
    free_node_ = nodes_[node].next;
  }
  nodes_[node] = {
      .hash = key_hash, .entry = entry, .place = link.place, .waits = true, .seen = seen_};
  blocks_.insert(node);

  std::optional<std::uint64_t> anchor_hash;
  if (link.kind == RunLink::Kind::kFirst) {
    anchor_hash = key_hash;
  } else if (link.kind == RunLink::Kind::kAnchor) {
    anchor_hash = link.hash;
  } else if (const std::optional<Place> parent = PlaceOf(link.hash);
             parent.has_value() && parent->place + 1 == link.place) {
    anchor_hash = parent->anchor_hash;
  }
  if (!anchor_hash.has_value()) {
    Link(node, GroupOf(&waiting_, link.hash));
    ++waiting_count_;
    return;
  }
  EnterRun(node, *anchor_hash);
  Release(node);
}

void HeldTable::Erase(std::uint64_t key_hash) {
  const auto found = blocks_.find(key_hash);
  if (found == blocks_.end()) return;
  const Index node = *found;
  blocks_.erase(found);
  if (!nodes_[node].waits) left_.push_back({groups_[nodes_[node].group].hash, key_hash});
  Unlink(node);
  nodes_[node].group = kNone;
  nodes_[node].next = free_node_;
  free_node_ = node;
}

RunSketch HeldTable::SketchOf(std::uint64_t anchor_hash) const {
  const Index run = Find(runs_, anchor_hash);
  return run == kNone ? RunSketch() : SketchOf(groups_[run]);
}

std::optional<HeldTable::Place> HeldTable::PlaceOf(std::uint64_t key_hash) const {
  const Index node = Find(blocks_, key_hash);
  if (node == kNone || nodes_[node].waits) return std::nullopt;
  return Place{groups_[nodes_[node].group].hash, nodes_[node].place};
}

std::vector<HeldTable::Block> HeldTable::BlocksOf(std::uint64_t anchor_hash) const {
  std::vector<Block> blocks;
  const Index run = Find(runs_, anchor_hash);
  if (run == kNone) return blocks;
  for (Index node = groups_[run].first; node != kNone; node = nodes_[node].next) {
    blocks.push_back({nodes_[node].hash, nodes_[node].entry, nodes_[node].place});
  }
  return blocks;
}

std::vector<Announcement> HeldTable::TakeChanges() {
  std::vector<Announcement> changes;
  for (const auto& [anchor_hash, told] : told_) {
    const RunSketch is = SketchOf(anchor_hash);
    if (is.count == told.count && is.blocks == told.blocks && is.sum == told.sum) continue;
    changes.push_back({anchor_hash, is});
  }
  told_.clear();
  return changes;
}

std::vector<HeldTable::Left> HeldTable::TakeLeft() { return std::exchange(left_, {}); }

void HeldTable::BeginSweep() { seen_ = !seen_; }

bool HeldTable::SweepSome(std::size_t* cursor, std::vector<Block>* missed) const {
  const std::size_t end = std::min(nodes_.size(), *cursor + kSweepStep);
  for (; *cursor < end; ++*cursor) {
    const Node& node = nodes_[*cursor];
    if (node.group != kNone && node.seen != seen_) {
      missed->push_back({node.hash, node.entry, node.place});
    }
  }
  return end < nodes_.size();
}

std::size_t HeldTable::bytes() const {
  const auto table_bytes = [](const auto& table, std::size_t item_bytes) {
    return table.capacity() * (item_bytes + 1);
  };
  return sizeof(*this) + nodes_.size() * sizeof(Node) + groups_.size() * sizeof(Group) +
         table_bytes(blocks_, sizeof(Index)) + table_bytes(runs_, sizeof(Index)) +
         table_bytes(waiting_, sizeof(Index)) +
         table_bytes(more_, sizeof(std::pair<std::uint64_t, std::uint32_t>)) +
         table_bytes(told_, sizeof(std::pair<std::uint64_t, ToldRun>));
}

}  // namespace kvmill
