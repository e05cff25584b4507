#include "service/cluster/pointer_table.h"

#include <algorithm>
#include <array>
#include <bit>
#include <limits>
#include <utility>

namespace kvmill {

namespace {

// Before any time, and far from the ends of the range.
constexpr std::int64_t kNever = std::numeric_limits<std::int64_t>::min() / 2;

}  // namespace

std::uint32_t PointerTable::NumberOf(const Member& holder) {
  std::size_t free = names_.size();
  for (std::size_t i = 0; i < names_.size(); ++i) {
    if (!names_[i].used) {
      free = i;
    } else if (names_[i].id == holder.id && names_[i].incarnation == holder.incarnation) {
      return static_cast<std::uint32_t>(i);
    }
  }
  if (free == names_.size()) names_.emplace_back();
  names_[free] = {.id = holder.id, .incarnation = holder.incarnation, .used = true};
  names_[free].forgotten.fill(kNever);
  return static_cast<std::uint32_t>(free);
}

bool PointerTable::Valid(std::uint64_t anchor_hash, const Entry& holder) const {
  const std::int64_t now = clock_.MonotonicNanos();
  const std::int64_t forgotten = names_[holder.number].forgotten[DigestOf(anchor_hash)];
  return holder.announced > now - options_.life_nanos &&
         (holder.announced > forgotten || now < forgotten + kForgetNanos);
}

template <typename Which>
void PointerTable::Drop(std::uint64_t anchor_hash, Anchor* anchor, const Which& which) {
  const std::size_t range = DigestOf(anchor_hash);
  std::erase_if(anchor->holders, [&](const Entry& holder) {
    if (!which(holder)) return false;
    Name& name = names_[holder.number];
    if (holder.announced > name.forgotten[range]) {
      name.digests[range] ^= DigestWord({anchor_hash, holder.sketch});
    }
    return true;
  });
}

void PointerTable::Announced(const Member& holder, const std::vector<Announcement>& announcements,
                             bool keep) {
  const std::int64_t now = clock_.MonotonicNanos();
  const std::uint32_t number = NumberOf(holder);
  for (const Announcement& announcement : announcements) {
    const RunSketch& sketch = announcement.sketch;
    if (sketch.count > kRunBlocks) continue;
    auto found = anchors_.find(announcement.anchor_hash);
    if (found == anchors_.end()) {
      if (sketch.count == 0) continue;
      found = anchors_.try_emplace(announcement.anchor_hash).first;
      order_.emplace_back(now, announcement.anchor_hash);
    }
    Anchor& anchor = found->second;
    Drop(announcement.anchor_hash, &anchor, [&](const Entry& known) {
      return known.number == number || !Valid(announcement.anchor_hash, known);
    });
    if (sketch.count > 0) {
      anchor.announced = now;
      const auto place =
          std::find_if(anchor.holders.begin(), anchor.holders.end(), [&sketch](const Entry& known) {
            return std::pair(known.sketch.count, known.sketch.blocks) <=
                   std::pair(sketch.count, sketch.blocks);
          });
      anchor.holders.insert(place, {number, now, sketch});
      names_[number].digests[DigestOf(announcement.anchor_hash)] ^= DigestWord(announcement);
      if (anchor.holders.size() > kHoldersMax) {
        auto goes = anchor.holders.rbegin();
        if (keep && goes->number == number) ++goes;
        const std::uint32_t last = goes->number;
        Drop(announcement.anchor_hash, &anchor,
             [last](const Entry& known) { return known.number == last; });
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
         [&](const Entry& holder) { return goes || holder.announced <= oldest; });
    if (found->second.holders.empty()) {
      anchors_.erase(found);
    } else {
      order_.emplace_back(std::max(found->second.announced, entered + 1), hash);
    }
  }
}

std::vector<PointerTable::Holder> PointerTable::HoldersOf(std::uint64_t anchor_hash) const {
  std::vector<Holder> holders;
  const auto found = anchors_.find(anchor_hash);
  if (found == anchors_.end()) return holders;
  for (const Entry& entry : found->second.holders) {
    if (!Valid(anchor_hash, entry)) continue;
    const Name& name = names_[entry.number];
    holders.push_back({name.id, name.incarnation, entry.sketch});
  }
  return holders;
}

std::vector<Pointer> PointerTable::PointersTo(const Fingerprint& fingerprint, const RunQuery& query,
                                              std::uint32_t wanted) const {
  std::vector<Pointer> pointers;
  if (wanted == 0 || query.anchor.empty()) return pointers;
  const std::uint64_t anchor_hash = AnchorHash(fingerprint, query.anchor);
  const auto found = anchors_.find(anchor_hash);
  if (found == anchors_.end()) return pointers;
  std::array<std::uint64_t, kRunBlocks> key_hashes;
  for (std::size_t i = 0; i < query.keys.size(); ++i) {
    key_hashes[i] = KeyHash(fingerprint, query.keys[i]);
  }
  for (const Entry& entry : found->second.holders) {
    if (!Valid(anchor_hash, entry)) continue;
    Pointer pointer;
    for (std::size_t i = 0; i < query.keys.size(); ++i) {
      const std::uint32_t bit = std::uint32_t{1} << i;
      if ((wanted & bit) == 0) continue;
      const Holds holds = HoldsBlock(entry.sketch, query.first + i, key_hashes[i]);
      if (holds == Holds::kYes) pointer.blocks |= bit;
      if (holds == Holds::kPerhaps) pointer.perhaps |= bit;
    }
    if ((pointer.blocks | pointer.perhaps) == 0) continue;
    const Name& name = names_[entry.number];
    pointer.holder = name.id;
    pointer.incarnation = name.incarnation;
    pointers.push_back(std::move(pointer));
  }
  // Those who surely have most of the beginning; then those who may have more than any of them.
  const auto leading = [wanted](std::uint32_t bits) { return std::countr_one(bits | ~wanted); };
  std::stable_sort(pointers.begin(), pointers.end(), [&](const Pointer& a, const Pointer& b) {
    return leading(a.blocks) > leading(b.blocks);
  });
  std::vector<Pointer> named;
  std::uint32_t sure = 0;
  std::size_t sure_count = 0;
  for (Pointer& pointer : pointers) {
    if (named.size() == kPointersMax) break;
    const bool surely = pointer.blocks != 0 && sure_count < kSureMax;
    if (!surely && (pointer.perhaps & ~sure) == 0) continue;
    sure_count += surely;
    sure |= pointer.blocks;
    named.push_back(std::move(pointer));
  }
  return named;
}

std::uint64_t PointerTable::Compare(const Member& holder, const Digests& digests) {
  Name& name = names_[NumberOf(holder)];
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
  std::vector<bool> gone(names_.size(), false);
  bool any = false;
  for (std::size_t i = 0; i < names_.size(); ++i) {
    if (!names_[i].used) continue;
    const auto index = view.IndexOf(names_[i].id);
    gone[i] = !index.has_value() || view.members()[*index].incarnation != names_[i].incarnation;
    any |= gone[i];
  }
  if (!any) return;
  for (auto& [hash, anchor] : anchors_) {
    Drop(hash, &anchor, [&](const Entry& holder) { return gone[holder.number]; });
  }
  // Anchors that nobody holds stay until their turn in order_: they count, but hold nothing.
  for (std::size_t i = 0; i < names_.size(); ++i) {
    if (gone[i]) names_[i] = {};
  }
}

void AddPointers(const Fingerprint& fingerprint, const RunQuery& query,
                 const PointerTable& pointers, RunAnswer* answer) {
  answer->pointers = pointers.PointersTo(fingerprint, query, AllOf(query) & ~answer->present);
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
