#include "service/peer_answers.h"

#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "service/callers.h"

namespace kvmill {

std::uint32_t PeerAnswers::Present(const Fingerprint& fingerprint, const RunQuery& query) const {
  const auto space = store_.FindNamespace(kDefaultTenant, fingerprint);
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

void PeerAnswers::Locate(const Fingerprint& fingerprint, std::vector<RunQuery> queries,
                         std::function<void(std::vector<RunAnswer>)> done) {
  std::vector<RunAnswer> answers(queries.size());
  bool all = true;
  for (std::size_t i = 0; i < queries.size(); ++i) {
    answers[i].present = Present(fingerprint, queries[i]);
    all &= answers[i].present == AllOf(queries[i]);
  }
  if (all) return done(std::move(answers));
  loop_.Post([this, fingerprint, queries = std::move(queries), answers = std::move(answers),
              done = std::move(done)]() mutable {
    for (std::size_t i = 0; i < queries.size(); ++i) {
      AddPointers(fingerprint, queries[i], pointers_, &answers[i]);
    }
    done(std::move(answers));
  });
}

void PeerAnswers::Announced(const Member& holder, std::vector<Announcement> announcements,
                            std::function<void(absl::Status)> done) {
  loop_.Post([this, holder, announcements = std::move(announcements), done = std::move(done)] {
    const std::optional<MemberIndex> index =
        view_ == nullptr ? std::nullopt : view_->IndexOf(holder.id);
    if (!index.has_value() || view_->members()[*index].incarnation != holder.incarnation) {
      return done(absl::UnavailableError(
          absl::StrCat("node \"", holder.id, "\" is no member, as far as is known here")));
    }
    pointers_.Announced(holder, announcements);
    done(absl::OkStatus());
  });
}

void PeerAnswers::SetView(std::shared_ptr<const ClusterView> view) {
  view_ = std::move(view);
  pointers_.Keep(*view_);
}

}  // namespace kvmill
