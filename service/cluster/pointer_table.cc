#include "service/cluster/pointer_table.h"

#include <algorithm>
#include <utility>

namespace kvmill {

std::uint32_t PointerTable::NumberOf(const Member& holder) {
  std::size_t free = holders_.size();
  for (std::size_t i = 0; i < holders_.size(); ++i) {
    if (!holders_[i].used) {
      free = i;
    } else if (holders_[i].id == holder.id && holders_[i].incarnation == holder.incarnation) {
      return static_cast<std::uint32_t>(i);
    }
  }
  if (free == holders_.size()) holders_.emplace_back();
  holders_[free] = {holder.id, holder.incarnation, true};
  return static_cast<std::uint32_t>(free);
}

void PointerTable::Announced(const Member& holder, const std::vector<Announcement>& announcements) {
  const std::int64_t now = clock_.MonotonicNanos();
  const std::uint32_t number = NumberOf(holder);
  for (const Announcement& announcement : announcements) {
    if (announcement.count > kRunBlocks) continue;
    auto found = anchors_.find(announcement.anchor_hash);
    if (found == anchors_.end()) {
      if (announcement.count == 0) continue;
      found = anchors_.try_emplace(announcement.anchor_hash).first;
      order_.emplace_back(now, announcement.anchor_hash);
    }
    Anchor& anchor = found->second;
    std::erase_if(anchor.holders, [&](const Holder& known) { return known.number == number; });
    if (announcement.count > 0) {
      anchor.announced = now;
      const Holder entry{number, announcement.count, now};
      const auto place =
          std::find_if(anchor.holders.begin(), anchor.holders.end(),
                       [&](const Holder& known) { return known.count <= entry.count; });
      anchor.holders.insert(place, entry);
      if (anchor.holders.size() > kPointersMax) anchor.holders.pop_back();
    }
  }
  Trim();
}

void PointerTable::Trim() {
  const std::int64_t oldest = clock_.MonotonicNanos() - options_.life_nanos;
  while (!order_.empty()) {
    const auto [entered, hash] = order_.front();
    const bool full = anchors_.size() > options_.anchors_max;
    if (!full && entered > oldest) return;
    order_.pop_front();
    const auto found = anchors_.find(hash);
    std::erase_if(found->second.holders,
                  [&](const Holder& holder) { return holder.announced <= oldest; });
    if (found->second.holders.empty() || (full && found->second.announced <= entered)) {
      anchors_.erase(found);
    } else {
      order_.emplace_back(std::max(found->second.announced, entered + 1), hash);
    }
  }
}

std::vector<Pointer> PointerTable::Find(std::uint64_t anchor_hash) const {
  std::vector<Pointer> pointers;
  const auto found = anchors_.find(anchor_hash);
  if (found == anchors_.end()) return pointers;
  const std::int64_t oldest = clock_.MonotonicNanos() - options_.life_nanos;
  for (const Holder& holder : found->second.holders) {
    if (holder.announced <= oldest) continue;
    const Name& name = holders_[holder.number];
    pointers.push_back({name.id, name.incarnation, holder.count});
  }
  return pointers;
}

void PointerTable::Keep(const ClusterView& view) {
  std::vector<bool> gone(holders_.size(), false);
  bool any = false;
  for (std::size_t i = 0; i < holders_.size(); ++i) {
    if (!holders_[i].used) continue;
    const auto index = view.IndexOf(holders_[i].id);
    gone[i] = !index.has_value() || view.members()[*index].incarnation != holders_[i].incarnation;
    any |= gone[i];
  }
  if (!any) return;
  for (auto& [hash, anchor] : anchors_) {
    std::erase_if(anchor.holders, [&](const Holder& holder) { return gone[holder.number]; });
  }
  // Anchors that nobody holds stay until their turn in order_: they count, but hold nothing.
  for (std::size_t i = 0; i < holders_.size(); ++i) {
    if (gone[i]) holders_[i] = {};
  }
}

void AddPointers(const Fingerprint& fingerprint, const RunQuery& query,
                 const PointerTable& pointers, RunAnswer* answer) {
  if (answer->present != AllOf(query) && !query.anchor.empty()) {
    answer->pointers = pointers.Find(AnchorHash(fingerprint, query.anchor));
  }
}

RunAnswer AnswerOf(const Fingerprint& fingerprint, const RunQuery& query,
                   const std::function<bool(const BlockKey&)>& has, const PointerTable& pointers) {
  RunAnswer answer;
  for (std::size_t i = 0; i < query.keys.size(); ++i) {
    if (has(query.keys[i])) answer.present |= std::uint32_t{1} << i;
  }
  AddPointers(fingerprint, query, pointers, &answer);
  return answer;
}

}  // namespace kvmill
