#include "service/cluster/handover.h"

#include <algorithm>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"

namespace kvmill {

Handover::Handover(Loop& loop, Peers& peers, PeerHealth& health, Options options)
    : loop_(loop), peers_(peers), health_(health), options_(std::move(options)) {}

Handover::~Handover() {
  loop_.Cancel(timer_);
  for (const auto& [id, home] : homes_) {
    if (home.call != 0) peers_.Cancel(home.call);
  }
}

void Handover::Start(std::vector<Announcement> runs, std::int64_t deadline_nanos,
                     std::function<void(const Report&)> done) {
  report_ = {};
  homes_.clear();
  next_ = 0;
  left_ = std::move(runs);
  std::erase_if(left_, [](const Announcement& run) { return run.sketch.count == 0; });
  report_.runs_left = left_.size();
  for (const Announcement& run : left_) report_.blocks_left += run.sketch.blocks;
  begin_ = loop_.clock().MonotonicNanos() + options_.begin_nanos;
  deadline_ = deadline_nanos;
  done_ = std::move(done);
  timer_ = loop_.After(0, [this] { Tick(); });
}

const Member* Handover::HomeOf(std::uint64_t anchor_hash) const {
  const ShardTable& table = view_->table();
  for (const MemberIndex index : table.Ranking(table.ShardOf(anchor_hash))) {
    const Member& member = view_->members()[index];
    if (member.id != options_.self_id && !health_.Paused(member)) return &member;
  }
  return nullptr;
}

void Handover::SetMembers(const std::vector<Member>& members) {
  others_serve_ = std::any_of(members.begin(), members.end(), [this](const Member& member) {
    return member.state == MemberState::kServing && member.id != options_.self_id;
  });
}

void Handover::Tick() {
  const std::int64_t now = loop_.clock().MonotonicNanos();
  if (left_.empty() || !others_serve_ || now >= deadline_) return Complete();
  if (now < begin_ || view_ == nullptr) {
    const std::int64_t next = std::max(begin_, now + options_.first_wait_nanos);
    timer_ = loop_.At(std::min(deadline_, next), [this] { Tick(); });
    return;
  }
  timer_ = loop_.At(std::min(deadline_, now + options_.first_wait_nanos), [this] { Tick(); });

  std::map<const Member*, std::vector<Announcement>> batches;
  const std::size_t slice = std::min(left_.size(), kSliceMax);
  for (std::size_t i = 0; i < slice; ++i) {
    if (next_ >= left_.size()) next_ = 0;
    const Announcement& run = left_[next_++];
    const Member* member = HomeOf(run.anchor_hash);
    if (member == nullptr) continue;
    const auto home = homes_.find(member->id);
    if (home != homes_.end() && (home->second.call != 0 || now < home->second.next)) continue;
    std::vector<Announcement>& batch = batches[member];
    if (batch.size() < kAnnouncementsMax) batch.push_back(run);
  }
  for (auto& [member, batch] : batches) {
    if (!health_.Admit(*member)) continue;
    Home& home = homes_[member->id];
    home.member = *member;
    home.asked = batch;
    home.call = peers_.HandOver(
        *member, std::move(batch), std::min(deadline_, now + options_.call_nanos),
        [this, id = member->id](const absl::StatusOr<std::vector<std::uint8_t>>& counts) {
          Answered(id, counts);
        });
  }
}

void Handover::Answered(const std::string& id,
                        const absl::StatusOr<std::vector<std::uint8_t>>& counts) {
  Home& home = homes_.at(id);
  home.call = 0;
  if (!counts.ok()) return health_.Failed(home.member, PeerHealth::Fault::kFailed);
  if (counts->size() != home.asked.size()) {
    return health_.Failed(home.member, PeerHealth::Fault::kLied);
  }
  health_.Succeeded(home.member);
  absl::flat_hash_set<std::uint64_t> safe;
  for (std::size_t i = 0; i < counts->size(); ++i) {
    if ((*counts)[i] >= home.asked[i].sketch.count) safe.insert(home.asked[i].anchor_hash);
  }
  // Counted once, whoever says it first: when the view changes two homes may be asked about a run.
  std::erase_if(left_, [&](const Announcement& run) {
    if (!safe.contains(run.anchor_hash)) return false;
    ++report_.runs;
    --report_.runs_left;
    report_.blocks += run.sketch.blocks;
    report_.blocks_left -= run.sketch.blocks;
    return true;
  });
  // A home that copies is asked less and less often; what it has done by then counts.
  home.wait = safe.empty() ? std::min(2 * home.wait, options_.last_wait_nanos) : 0;
  home.wait = std::max(home.wait, options_.first_wait_nanos);
  home.next = loop_.clock().MonotonicNanos() + home.wait;
  if (left_.empty()) {
    loop_.Cancel(timer_);
    timer_ = loop_.After(0, [this] { Tick(); });
  }
}

void Handover::Complete() {
  for (auto& [id, home] : homes_) {
    if (home.call != 0) peers_.Cancel(home.call);
    home.call = 0;
  }
  report_.alone = !others_serve_;
  std::exchange(done_, nullptr)(report_);
}

}  // namespace kvmill
