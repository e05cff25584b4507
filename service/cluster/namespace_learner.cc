#include "service/cluster/namespace_learner.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "storage/core/quoted.h"

namespace kvmill {
namespace {

std::string TextOf(const NamespaceQuestion& question) {
  return question.name.empty() ? ToHex(question.fingerprint) : Quoted(question.name);
}

absl::Status Unknown(const NamespaceQuestion& question) {
  return absl::NotFoundError(
      absl::StrCat("namespace ", TextOf(question), " is known neither here nor by another node"));
}

}  // namespace

NamespaceLearner::NamespaceLearner(Loop& loop, PeerHealth& health, Options options)
    : loop_(loop), health_(health), options_(std::move(options)) {}

NamespaceLearner::~NamespaceLearner() {
  for (auto& [question, asking] : asking_) {
    loop_.Cancel(asking.timer);
    for (const auto& [id, waiter] : asking.waiters) loop_.Cancel(waiter.timer);
    for (const auto& [call, member] : asking.calls) options_.cancel(call);
  }
}

// The hint, then the others, each question beginning with another one.
std::vector<Member> NamespaceLearner::MembersToAsk(const NamespaceQuestion& question,
                                                   const std::string& hint) const {
  std::vector<Member> members;
  if (view_ == nullptr) return members;
  const std::vector<Member>& all = view_->members();
  std::size_t begin = 0;
  for (const std::byte b : question.fingerprint) begin = 31 * begin + std::to_integer<unsigned>(b);
  for (const char c : question.name) begin = 31 * begin + static_cast<unsigned char>(c);
  for (std::size_t i = 0; i < all.size(); ++i) {
    const Member& member = all[(begin + i) % all.size()];
    if (member.id == options_.self_id || health_.Paused(member)) continue;
    members.insert(member.id == hint ? members.begin() : members.end(), member);
  }
  if (members.size() > kAskedMax) members.resize(kAskedMax);
  return members;
}

bool NamespaceLearner::TooMany(const NamespaceQuestion& question) const {
  if (asking_.size() >= kQuestionsMax) return true;
  if (question.tenant.empty()) return false;
  std::size_t of_one = 0;
  for (const auto& [asked, asking] : asking_) of_one += asked.tenant == question.tenant;
  return of_one >= kQuestionsOfOneMax;
}

void NamespaceLearner::Learn(const NamespaceQuestion& question, const std::string& hint,
                             std::int64_t deadline_nanos, Done done) {
  const std::int64_t now = loop_.clock().MonotonicNanos();
  if (const auto known = unknown_.find(question); known != unknown_.end()) {
    if (now < known->second) return done(Unknown(question));
    unknown_.erase(known);
  }
  auto found = asking_.find(question);
  if (waiters_ >= kWaitersMax || (found == asking_.end() && TooMany(question))) {
    return done(absl::ResourceExhaustedError(absl::StrCat(
        "namespace ", TextOf(question), " is not known here, and other nodes are asked for ",
        asking_.size(), " others already, at most ", kQuestionsMax,
        question.tenant.empty() ? ""
                                : absl::StrCat(", and ", kQuestionsOfOneMax, " of a tenant"))));
  }
  const bool first = found == asking_.end();
  if (first) {
    Asking asking;
    asking.members = MembersToAsk(question, hint);
    Hear(question, &asking.heard);
    if (asking.members.empty()) return done(ResultOf(question, asking));
    found = asking_.emplace(question, std::move(asking)).first;
    found->second.timer =
        loop_.At(now + options_.limit_nanos, [this, question] { Complete(question); });
  }
  ++waiters_;
  const std::uint64_t id = next_waiter_++;
  Waiter& waiter = found->second.waiters[id];
  waiter.done = std::move(done);
  waiter.timer = loop_.At(deadline_nanos, [this, question, id] {
    const auto node = asking_.at(question).waiters.extract(id);
    --waiters_;
    node.mapped().done(Unknown(question));
  });
  if (first) Ask(question);
}

// What this node heard itself counts as what others heard.
void NamespaceLearner::Hear(const NamespaceQuestion& question, Asking::Meaning* heard) const {
  if (question.name.empty()) return;
  absl::StatusOr<NamespaceSpec> spec = options_.heard(question);
  if (spec.ok()) {
    Add(question, {*std::move(spec), question.name, true}, options_.self_id, heard);
  } else if (!absl::IsNotFound(spec.status())) {
    heard->differ = spec.status();
  }
}

void NamespaceLearner::Ask(const NamespaceQuestion& question) {
  Asking& asking = asking_.at(question);
  const std::int64_t deadline = loop_.clock().MonotonicNanos() + options_.call_nanos;
  while (asking.calls.size() < kCallsMax && asking.next < asking.members.size()) {
    const Member& member = asking.members[asking.next++];
    if (!health_.Admit(member)) continue;
    // It is told later, never within this call, so `call` is set by then.
    const auto call = std::make_shared<Peers::CallId>(0);
    *call = options_.ask(member, question, deadline,
                         [this, question, call](absl::StatusOr<Answer> answer) {
                           Answered(question, *call, std::move(answer));
                         });
    asking.calls.emplace(*call, member);
  }
  if (asking.calls.empty()) Complete(question);
}

bool NamespaceLearner::IsTrue(const NamespaceQuestion& question, const NamespaceSpec& spec) const {
  if (!ValidateNamespace(spec).ok()) return false;
  return !question.name.empty() || FingerprintOf(spec) == question.fingerprint;
}

void NamespaceLearner::Answered(const NamespaceQuestion& question, Peers::CallId call,
                                absl::StatusOr<Answer> answer) {
  Asking& asking = asking_.at(question);
  const Member member = asking.calls.extract(call).mapped();
  if (answer.ok() && answer->has_value()) (**answer).spec.tenant = TenantOf(question);
  if (!answer.ok()) {
    // One of an earlier version has no such method, and is well.
    if (absl::IsUnimplemented(answer.status())) {
      health_.Succeeded(member);
    } else {
      health_.Failed(member, PeerHealth::Fault::kFailed);
    }
  } else if (answer->has_value() && !IsTrue(question, (**answer).spec)) {
    health_.Failed(member, PeerHealth::Fault::kLied);
  } else {
    health_.Succeeded(member);
    if (answer->has_value()) {
      const bool heard = !question.name.empty() && (**answer).heard;
      Add(question, **std::move(answer), member.id, heard ? &asking.heard : &asking.known);
      if (question.name.empty() || !asking.known.differ.ok()) return Complete(question);
    }
  }
  Ask(question);
}

void NamespaceLearner::Add(const NamespaceQuestion& question, DescribedNamespace said,
                           const std::string& by, Asking::Meaning* meaning) {
  if (!meaning->found.has_value()) {
    meaning->found = std::move(said);
    meaning->found_by = by;
  } else if (meaning->found->spec != said.spec) {
    meaning->differ = absl::FailedPreconditionError(absl::StrCat(
        "namespace ", TextOf(question), " is another one on node \"", by, "\" than on \"",
        meaning->found_by, "\": ", DescribeDifference(said.spec, meaning->found->spec)));
  }
}

absl::StatusOr<DescribedNamespace> NamespaceLearner::ResultOf(const NamespaceQuestion& question,
                                                              const Asking& asking) const {
  for (const Asking::Meaning* meaning : {&asking.known, &asking.heard}) {
    if (!meaning->differ.ok()) return meaning->differ;
    if (meaning->found.has_value()) return *meaning->found;
  }
  return Unknown(question);
}

void NamespaceLearner::Complete(const NamespaceQuestion& question) {
  auto node = asking_.extract(question);
  Asking& asking = node.mapped();
  loop_.Cancel(asking.timer);
  for (const auto& [call, member] : asking.calls) options_.cancel(call);
  const absl::StatusOr<DescribedNamespace> result = ResultOf(question, asking);
  if (absl::IsNotFound(result.status())) RememberUnknown(question);
  waiters_ -= asking.waiters.size();
  for (auto& [id, waiter] : asking.waiters) {
    loop_.Cancel(waiter.timer);
    waiter.done(result);
  }
}

void NamespaceLearner::RememberUnknown(const NamespaceQuestion& question) {
  const std::int64_t now = loop_.clock().MonotonicNanos();
  if (unknown_.size() >= kUnknownMax) {
    std::erase_if(unknown_, [now](const auto& entry) { return entry.second <= now; });
  }
  if (unknown_.size() >= kUnknownMax) unknown_.erase(unknown_.begin());
  unknown_[question] = now + options_.unknown_nanos;
}

void NamespaceLearner::CompleteAll() {
  while (!asking_.empty()) Complete(NamespaceQuestion(asking_.begin()->first));
}

}  // namespace kvmill
