#include "service/peer_answers.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"

namespace kvmill {

std::uint32_t PeerAnswers::Present(const Fingerprint& fingerprint, const RunQuery& query) const {
  const auto space = shared_.Find(store_, fingerprint);
  if (!space.ok()) return 0;
  const std::vector<bool> found = store_.Present(space->id, query.keys);
  std::uint32_t present = 0;
  for (std::size_t i = 0; i < found.size(); ++i) present |= std::uint32_t{found[i]} << i;
  return present;
}

RunAnswer PeerAnswers::Answer(const Fingerprint& fingerprint, const RunQuery& query) const {
  RunAnswer answer;
  answer.present = Present(fingerprint, query);
  AddPointers(fingerprint, query, pointers_, &answer);
  return answer;
}

void PeerAnswers::Locate(const std::string& asker, const Fingerprint& fingerprint,
                         std::vector<RunQuery> queries,
                         std::function<void(std::vector<RunAnswer>)> done) {
  std::vector<RunAnswer> answers(queries.size());
  bool all = true;
  for (std::size_t i = 0; i < queries.size(); ++i) {
    answers[i].present = Present(fingerprint, queries[i]);
    all &= answers[i].present == AllOf(queries[i]);
  }
  if (all) return done(std::move(answers));
  loop_.Post([this, asker, fingerprint, queries = std::move(queries), answers = std::move(answers),
              done = std::move(done)]() mutable {
    for (std::size_t i = 0; i < queries.size(); ++i) {
      AddPointers(fingerprint, queries[i], pointers_, &answers[i]);
      // Who only may have some is no reason to copy what was not asked for.
      const bool elsewhere =
          std::any_of(answers[i].pointers.begin(), answers[i].pointers.end(),
                      [](const Pointer& pointer) { return pointer.blocks != 0; });
      if (!elsewhere || asker.empty() || replicator_ == nullptr) continue;
      const std::uint64_t hash = AnchorHash(fingerprint, queries[i].anchor);
      if (hot_.Asked(hash, asker)) replicator_->Hot(hash);
    }
    done(std::move(answers));
  });
}

absl::Status PeerAnswers::CheckMember(const Member& holder) const {
  const std::optional<MemberIndex> index =
      view_ == nullptr ? std::nullopt : view_->IndexOf(holder.id);
  if (index.has_value() && view_->members()[*index].incarnation == holder.incarnation) {
    return absl::OkStatus();
  }
  return absl::UnavailableError(
      absl::StrCat("node \"", holder.id, "\" is no member, as far as is known here"));
}

void PeerAnswers::Announced(const Member& holder, std::vector<Announcement> announcements,
                            std::function<void(absl::Status)> done) {
  loop_.Post([this, holder, announcements = std::move(announcements), done = std::move(done)] {
    const absl::Status member = CheckMember(holder);
    if (member.ok()) {
      pointers_.Announced(holder, announcements);
      if (replicator_ != nullptr) replicator_->Announced(announcements);
    }
    done(member);
  });
}

void PeerAnswers::HandedOver(const Member& holder, std::vector<Announcement> announcements,
                             Peers::Done<std::vector<std::uint8_t>> done) {
  loop_.Post([this, holder, announcements = std::move(announcements), done = std::move(done)] {
    const absl::Status member = CheckMember(holder);
    if (!member.ok()) return done(member);
    if (replicator_ == nullptr) {
      return done(absl::UnavailableError("this node keeps nothing for others"));
    }
    pointers_.Announced(holder, announcements, /*keep=*/true);
    done(replicator_->HandedOver(holder, announcements));
  });
}

void PeerAnswers::Compare(const Member& holder, const Digests& digests,
                          Peers::Done<std::uint64_t> done) {
  loop_.Post([this, holder, digests, done = std::move(done)] {
    const absl::Status member = CheckMember(holder);
    if (!member.ok()) return done(member);
    done(pointers_.Compare(holder, digests));
  });
}

void PeerAnswers::SetView(std::shared_ptr<const ClusterView> view) {
  view_ = std::move(view);
  pointers_.Keep(*view_);
}

}  // namespace kvmill
