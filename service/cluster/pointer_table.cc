#include "service/cluster/pointer_table.h"

#include <algorithm>
#include <limits>
#include <utility>

namespace kvmill {

namespace {

// Before any time, and far from the ends of the range.
constexpr std::int64_t kNever = std::numeric_limits<std::int64_t>::min() / 2;

}  // namespace

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
  holders_[free] = {.id = holder.id, .incarnation = holder.incarnation, .used = true};
  holders_[free].forgotten.fill(kNever);
  return static_cast<std::uint32_t>(free);
}

bool PointerTable::Valid(std::uint64_t anchor_hash, const Holder& holder) const {
  const std::int64_t now = clock_.MonotonicNanos();
  const std::int64_t forgotten = holders_[holder.number].forgotten[DigestOf(anchor_hash)];
  return holder.announced > now - options_.life_nanos &&
         (holder.announced > forgotten || now < forgotten + kForgetNanos);
}

template <typename Which>
void PointerTable::Drop(std::uint64_t anchor_hash, Anchor* anchor, const Which& which) {
  const std::size_t range = DigestOf(anchor_hash);
  std::erase_if(anchor->holders, [&](const Holder& holder) {
    if (!which(holder)) return false;
    Name& name = holders_[holder.number];
    if (holder.announced > name.forgotten[range]) {
      name.digests[range] ^= DigestWord({anchor_hash, holder.count});
    }
    return true;
  });
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
    Drop(announcement.anchor_hash, &anchor, [&](const Holder& known) {
      return known.number == number || !Valid(announcement.anchor_hash, known);
    });
    if (announcement.count > 0) {
      anchor.announced = now;
      const Holder entry{number, announcement.count, now};
      const auto place =
          std::find_if(anchor.holders.begin(), anchor.holders.end(),
                       [&](const Holder& known) { return known.count <= entry.count; });
      anchor.holders.insert(place, entry);
      holders_[number].digests[DigestOf(announcement.anchor_hash)] ^= DigestWord(announcement);
      if (anchor.holders.size() > kPointersMax) {
        const std::uint32_t last = anchor.holders.back().number;
        Drop(announcement.anchor_hash, &anchor,
             [last](const Holder& known) { return known.number == last; });
      }
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
    const bool goes = full && found->second.announced <= entered;
    Drop(hash, &found->second,
         [&](const Holder& holder) { return goes || holder.announced <= oldest; });
    if (found->second.holders.empty()) {
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
  for (const Holder& holder : found->second.holders) {
    if (!Valid(anchor_hash, holder)) continue;
    const Name& name = holders_[holder.number];
    pointers.push_back({name.id, name.incarnation, holder.count});
  }
  return pointers;
}

std::uint8_t PointerTable::MostOf(std::uint64_t anchor_hash) const {
  const auto found = anchors_.find(anchor_hash);
  if (found == anchors_.end()) return 0;
  for (const Holder& holder : found->second.holders) {
    if (Valid(anchor_hash, holder)) return holder.count;
  }
  return 0;
}

std::uint64_t PointerTable::Compare(const Member& holder, const Digests& digests) {
  Name& name = holders_[NumberOf(holder)];
  std::uint64_t differ = 0;
  for (std::size_t i = 0; i < kDigests; ++i) {
    if (name.digests[i] == digests[i]) continue;
    differ |= std::uint64_t{1} << i;
    name.digests[i] = 0;
    name.forgotten[i] = clock_.MonotonicNanos();
  }
  return differ;
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
    Drop(hash, &anchor, [&](const Holder& holder) { return gone[holder.number]; });
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
