#include "service/cluster/vanished.h"

#include <algorithm>

namespace kvmill {

void VanishedMembers::Present(const Member& member) {
  present_[member.id] = member;
  lost_.erase(member.id);
}

void VanishedMembers::Gone(const std::string& id, std::int64_t now_nanos) {
  Advance(now_nanos);
  const auto node = present_.extract(id);
  if (node.empty() || node.mapped().state == MemberState::kDraining) return;
  lost_[id] = {.member = node.mapped(), .nanos = now_nanos};
  const auto recent = [&](const auto& lost) {
    return now_nanos - lost.second.nanos <= window_nanos_;
  };
  const auto together = static_cast<std::size_t>(std::count_if(lost_.begin(), lost_.end(), recent));
  // Those that drain do not count on either side, or it would matter who is told to be gone first.
  const auto serving = static_cast<std::size_t>(std::count_if(
      present_.begin(), present_.end(),
      [](const auto& entry) { return entry.second.state != MemberState::kDraining; }));
  if (3 * together <= serving + lost_.size()) return;
  for (auto& lost : lost_) {
    if (recent(lost)) lost.second.keep_until_nanos = now_nanos + grace_nanos_;
  }
}

bool VanishedMembers::Advance(std::int64_t now_nanos) {
  bool ended = false;
  std::erase_if(lost_, [&](const auto& entry) {
    const Lost& lost = entry.second;
    if (!lost.keep_until_nanos.has_value()) return now_nanos - lost.nanos > window_nanos_;
    const bool over = now_nanos >= *lost.keep_until_nanos;
    ended |= over;
    return over;
  });
  return ended;
}

bool VanishedMembers::keeping() const { return deadline_nanos().has_value(); }

std::optional<std::int64_t> VanishedMembers::deadline_nanos() const {
  std::optional<std::int64_t> first;
  for (const auto& [id, lost] : lost_) {
    if (!lost.keep_until_nanos.has_value()) continue;
    if (!first.has_value() || *lost.keep_until_nanos < *first) first = lost.keep_until_nanos;
  }
  return first;
}

std::vector<Member> VanishedMembers::Believed() const {
  std::map<std::string, Member> members = present_;
  for (const auto& [id, lost] : lost_) {
    if (lost.keep_until_nanos.has_value()) members.emplace(id, lost.member);
  }
  std::vector<Member> believed;
  believed.reserve(members.size());
  for (auto& [id, member] : members) believed.push_back(std::move(member));
  return believed;
}

}  // namespace kvmill
