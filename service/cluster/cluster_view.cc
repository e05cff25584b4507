#include "service/cluster/cluster_view.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"

namespace kvmill {

namespace {

bool Serves(const Member& member) { return member.state == MemberState::kServing; }

absl::Status CheckMembers(absl::Span<const Member> serving, absl::Span<const Member> others) {
  if (serving.size() + others.size() > kHomesMax) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "a cluster of ", serving.size() + others.size(), " members: at most ", kHomesMax));
  }
  for (const absl::Span<const Member> part : {serving, others}) {
    for (std::size_t i = 0; i < part.size(); ++i) {
      if (part[i].capacity_bytes == 0) {
        return absl::InvalidArgumentError(
            absl::StrCat("member \"", part[i].id, "\": capacity of 0 bytes, want at least 1"));
      }
      if (i > 0 && part[i].id == part[i - 1].id) {
        return absl::InvalidArgumentError(absl::StrCat("two members with id \"", part[i].id, "\""));
      }
    }
  }
  for (const Member& other : others) {
    const auto found =
        std::lower_bound(serving.begin(), serving.end(), other,
                         [](const Member& a, const Member& b) { return a.id < b.id; });
    if (found != serving.end() && found->id == other.id) {
      return absl::InvalidArgumentError(absl::StrCat("two members with id \"", other.id, "\""));
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::shared_ptr<const ClusterView>> ClusterView::Make(
    std::vector<Member> members, std::uint64_t number, int shard_bits,
    const std::shared_ptr<const ClusterView>& old) {
  std::sort(members.begin(), members.end(), [](const Member& a, const Member& b) {
    return Serves(a) != Serves(b) ? Serves(a) : a.id < b.id;
  });
  std::shared_ptr<ClusterView> view(new ClusterView);
  view->number_ = number;
  view->members_ = std::move(members);
  view->serving_ =
      static_cast<std::size_t>(std::count_if(view->members_.begin(), view->members_.end(), Serves));
  const absl::Span<const Member> all = view->members_;
  if (absl::Status status = CheckMembers(view->serving(), all.subspan(view->serving_));
      !status.ok()) {
    return status;
  }
  const bool same = old != nullptr && old->table_->shard_bits() == shard_bits &&
                    old->table_->IsFor(view->serving());
  view->table_ = same ? old->table_
                      : ShardTable::Make(view->serving(), shard_bits,
                                         old == nullptr ? nullptr : old->table_.get());
  return view;
}

std::optional<MemberIndex> ClusterView::IndexOf(std::string_view id) const {
  const absl::Span<const Member> all = members_;
  for (const absl::Span<const Member> part : {all.first(serving_), all.subspan(serving_)}) {
    const auto found = std::lower_bound(
        part.begin(), part.end(), id,
        [](const Member& member, std::string_view want) { return member.id < want; });
    if (found != part.end() && found->id == id) {
      return static_cast<MemberIndex>(&*found - members_.data());
    }
  }
  return std::nullopt;
}

ViewKeeper::ViewKeeper(Options options) : options_(std::move(options)) {}
ViewKeeper::~ViewKeeper() { *alive_ = false; }

void ViewKeeper::SetMembers(std::vector<Member> members) {
  wanted_ = std::move(members);
  if (!working_) Start();
}

void ViewKeeper::Start() {
  working_ = true;
  // Shared with the work, which may outlive this; `alive` is looked at on the loop only.
  struct Making {
    std::vector<Member> members;
    std::uint64_t number;
    int shard_bits;
    std::shared_ptr<const ClusterView> old;
    absl::StatusOr<std::shared_ptr<const ClusterView>> view = absl::UnknownError("not made");
  };
  auto making = std::make_shared<Making>();
  making->members = *std::exchange(wanted_, std::nullopt);
  making->number = view_ == nullptr ? 1 : view_->number() + 1;
  making->shard_bits = options_.shard_bits;
  making->old = view_;
  options_.background(
      [making] {
        making->view = ClusterView::Make(std::move(making->members), making->number,
                                         making->shard_bits, making->old);
      },
      [this, making, alive = alive_] {
        if (!*alive) return;
        working_ = false;
        // Started before anyone is told, who may set members.
        const auto view = std::move(making->view);
        if (view.ok()) view_ = *view;
        if (wanted_.has_value()) Start();
        if (view.ok()) {
          options_.publish(*view);
        } else {
          options_.refuse(view.status());
        }
      });
}

}  // namespace kvmill
