#include "service/cluster/vanished.h"

namespace kvmill {

void VanishedMembers::Present(const Member& member) {
  present_[member.id] = member;
  lost_.erase(member.id);
  if (lost_.empty()) keep_until_nanos_.reset();
}

void VanishedMembers::Gone(const std::string& id, std::int64_t now_nanos) {
  Advance(now_nanos);
  const auto node = present_.extract(id);
  if (node.empty() || node.mapped().state == MemberState::kDraining) return;
  lost_[id] = {node.mapped(), now_nanos};
  if (!keeping() && 3 * lost_.size() > present_.size() + lost_.size()) {
    keep_until_nanos_ = now_nanos + grace_nanos_;
  }
}

void VanishedMembers::Advance(std::int64_t now_nanos) {
  if (keeping()) {
    if (now_nanos < *keep_until_nanos_) return;
    keep_until_nanos_.reset();
    lost_.clear();
  }
  std::erase_if(lost_,
                [&](const auto& lost) { return now_nanos - lost.second.nanos > window_nanos_; });
}

std::vector<Member> VanishedMembers::Believed() const {
  std::vector<Member> members;
  members.reserve(present_.size() + lost_.size());
  auto lost = keeping() ? lost_.begin() : lost_.end();
  for (const auto& [id, member] : present_) {
    for (; lost != lost_.end() && lost->first < id; ++lost) members.push_back(lost->second.member);
    members.push_back(member);
  }
  for (; lost != lost_.end(); ++lost) members.push_back(lost->second.member);
  return members;
}

}  // namespace kvmill
