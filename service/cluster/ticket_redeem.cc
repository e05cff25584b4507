#include "service/cluster/ticket_redeem.h"

#include <algorithm>
#include <map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "service/cluster/peers.h"

namespace kvmill {

namespace {

// A question that was answered with nothing new is not asked again at once: who answers so without
// waiting must not keep this node busy.
constexpr std::int64_t kPauseNanos = 5'000'000;
constexpr std::size_t kBlocksMax = 256 << 10;  // Of all tickets at work: some 200 MiB.

// The ticket is no more, or is not this node's.
bool IsOver(const absl::Status& status) {
  return absl::IsNotFound(status) || absl::IsAborted(status) ||
         absl::IsFailedPrecondition(status) || absl::IsPermissionDenied(status);
}

// Why blocks are missed whose ticket ended so.
TicketRedeem::Miss MissOf(const absl::Status& status) {
  using Miss = TicketRedeem::Miss;
  switch (EndOf(status)) {
    case TicketEnd::kRevoked:
      return Miss::kRevoked;
    case TicketEnd::kDeadline:
      return Miss::kDeadline;
    case TicketEnd::kAcknowledged:
    case TicketEnd::kUnsaid:
      break;
  }
  switch (status.code()) {
    case absl::StatusCode::kNotFound:
    case absl::StatusCode::kAborted:
      return Miss::kEnded;
    case absl::StatusCode::kUnavailable:
      return Miss::kProducerGone;
    case absl::StatusCode::kDataLoss:
      return Miss::kDamaged;
    case absl::StatusCode::kDeadlineExceeded:
    case absl::StatusCode::kCancelled:
      return Miss::kCallEnded;
    default:
      return Miss::kRefused;
  }
}

// Gives the blocks that have no fate one.
void GiveUpOpen(TicketRedeem::Miss why, std::vector<TicketRedeem::Block>* blocks) {
  for (TicketRedeem::Block& block : *blocks) {
    if (block.fate != TicketRedeem::Fate::kOpen) continue;
    block.fate = TicketRedeem::Fate::kMissed;
    block.miss = why;
    block.here = LayerSet();
  }
}

}  // namespace

TicketRedeem::~TicketRedeem() {
  while (!ops_.empty()) {
    const auto op = ops_.begin();
    for (const CallerId caller : op->second.callers) {
      loop_.Cancel(callers_.at(caller).timer);
      callers_.erase(caller);
    }
    op->second.callers.clear();
    End(op->first, absl::CancelledError(""), /*acknowledge=*/false);
  }
  for (auto& [id, caller] : callers_) loop_.Cancel(caller.timer);
  for (auto& [id, acknowledgement] : acknowledgements_) {
    loop_.Cancel(acknowledgement.timer);
    if (acknowledgement.call != 0) peers_.Cancel(acknowledgement.call);
  }
  for (auto& [producer, turns] : turns_) {
    if (turns.timer != 0) loop_.Cancel(turns.timer);
  }
}

// --- Callers ---

TicketRedeem::CallerId TicketRedeem::Start(Request request, Update update, Done done) {
  const CallerId id = next_caller_++;
  Caller& caller = callers_[id];
  caller.name = request.name;
  caller.update = std::move(update);
  caller.done = std::move(done);
  const std::int64_t now = loop_.clock().MonotonicNanos();
  while (!remembered_.empty() && remembered_.front().until <= now) {
    remembered_blocks_ -= remembered_.front().outcome.blocks.size();
    remembered_.pop_front();
  }
  const absl::Status contradiction =
      absl::InvalidArgumentError("the ticket was redeemed here with another producer");

  auto found = ops_.find(request.name);
  if (found == ops_.end()) {
    for (const Remembered& ended : remembered_) {
      if (ended.request.name != request.name) continue;
      CompleteSoon(id, ended.request.producer == request.producer ? ended.outcome
                                                                  : Outcome{contradiction, {}});
      return id;
    }
    if (ops_.size() >= options_.tickets_max) {
      CompleteSoon(
          id, {absl::ResourceExhaustedError(absl::StrCat(
                   ops_.size(), " tickets are being redeemed: at most ", options_.tickets_max)),
               {}});
      return id;
    }
    if (const absl::Status share = CheckShare(request.tenant); !share.ok()) {
      CompleteSoon(id, {share, {}});
      return id;
    }
    found = ops_.try_emplace(request.name, ++seed_).first;
    found->second.request = request;
    found->second.answered_at = now;
    Ask(request.name, &found->second);
  } else if (found->second.request.producer != request.producer) {
    CompleteSoon(id, {contradiction, {}});
    return id;
  }
  Op& op = found->second;
  op.callers.push_back(id);
  caller.timer = loop_.At(request.deadline_nanos, [this, id] { Late(id); });
  if (!op.blocks.empty() && op.tell == 0) {
    op.tell = loop_.After(0, [this, name = request.name] { Tell(name); });
  }
  return id;
}

absl::Status TicketRedeem::CheckShare(const std::string& tenant) const {
  if (tenant.empty()) return absl::OkStatus();
  const auto theirs =
      static_cast<std::size_t>(std::count_if(ops_.begin(), ops_.end(), [&tenant](const auto& op) {
        return op.second.request.tenant == tenant;
      }));
  const std::size_t most = options_.tickets_max / kTicketShares;
  if (theirs < most) return absl::OkStatus();
  return absl::ResourceExhaustedError(absl::StrCat(theirs, " tickets of tenant \"", tenant,
                                                   "\" are being redeemed: at most ", most));
}

void TicketRedeem::CompleteSoon(CallerId id, Outcome outcome) {
  callers_.at(id).timer =
      loop_.After(0, [this, id, outcome = std::move(outcome)] { Complete(id, outcome); });
}

void TicketRedeem::Complete(CallerId id, const Outcome& outcome) {
  auto node = callers_.extract(id);
  if (node.empty()) return;  // An earlier one's `done` cancelled it.
  loop_.Cancel(node.mapped().timer);
  node.mapped().done(outcome);
}

void TicketRedeem::Leave(CallerId id, const TicketName& name) {
  const auto found = ops_.find(name);
  if (found == ops_.end()) return;
  Op& op = found->second;
  if (std::erase(op.callers, id) == 0 || !op.callers.empty()) return;
  End(name, absl::CancelledError("nobody wants the ticket any more"), /*acknowledge=*/true);
}

void TicketRedeem::Late(CallerId id) {
  const TicketName name = callers_.at(id).name;
  Outcome outcome{absl::DeadlineExceededError("the ticket was not done in time"),
                  ops_.at(name).blocks};
  GiveUpOpen(Miss::kCallEnded, &outcome.blocks);
  Leave(id, name);
  Complete(id, outcome);
}

void TicketRedeem::Cancel(CallerId id) {
  auto node = callers_.extract(id);
  if (node.empty()) return;
  loop_.Cancel(node.mapped().timer);
  Leave(id, node.mapped().name);
}

void TicketRedeem::NoteChange(const TicketName& name, Op* op, std::uint32_t block) {
  op->changed.insert(block);
  if (op->tell == 0) op->tell = loop_.After(0, [this, name] { Tell(name); });
}

void TicketRedeem::Tell(const TicketName& name) {
  Op& op = ops_.at(name);
  op.tell = 0;
  const std::vector<std::uint32_t> changed(op.changed.begin(), op.changed.end());
  op.changed.clear();
  for (const CallerId id : std::vector<CallerId>(op.callers)) {
    // What ran before may have cancelled this one, or all.
    const auto caller = callers_.find(id);
    const auto found = ops_.find(name);
    if (caller == callers_.end() || found == ops_.end()) continue;
    if (caller->second.update == nullptr) continue;
    const Update update = caller->second.update;
    const std::vector<Block>& blocks = found->second.blocks;
    if (caller->second.greeted) {
      if (!changed.empty()) update(blocks, changed);
      continue;
    }
    caller->second.greeted = true;
    std::vector<std::uint32_t> all(blocks.size());
    for (std::uint32_t i = 0; i < all.size(); ++i) all[i] = i;
    update(blocks, all);
  }
}

// --- What the producer says ---

void TicketRedeem::Ask(const TicketName& name, Op* op) {
  const std::int64_t wait = op->seen == 0 ? 0 : options_.wait_nanos;
  op->question =
      peers_.Redeem(op->request.producer, name, op->seen, wait,
                    loop_.clock().MonotonicNanos() + wait + options_.call_nanos,
                    [this, name](const absl::StatusOr<TicketNews>& news) { Answered(name, news); });
}

void TicketRedeem::AskLater(const TicketName& name, Op* op, std::int64_t nanos) {
  op->retry = loop_.After(nanos, [this, name] {
    Op& later = ops_.at(name);
    later.retry = 0;
    Ask(name, &later);
  });
}

bool TicketRedeem::IsTheEnd(const TicketName& name, std::int64_t failing_since,
                            const absl::Status& status) {
  if (IsOver(status)) {
    End(name, status, /*acknowledge=*/false);
    return true;
  }
  if (IsReplaced(status)) {
    // Whoever is there has nothing of it, and who made it does not come back.
    End(name,
        absl::UnavailableError(absl::StrCat("node \"", ops_.at(name).request.producer.id,
                                            "\", which made the ticket, was restarted, or is not "
                                            "at its address any more: ",
                                            status.message())),
        /*acknowledge=*/false);
    return true;
  }
  if (loop_.clock().MonotonicNanos() - failing_since < options_.silence_nanos) return false;
  End(name, absl::UnavailableError(absl::StrCat("no answer from the producer: ", status.message())),
      /*acknowledge=*/true);
  return true;
}

void TicketRedeem::Answered(const TicketName& name, const absl::StatusOr<TicketNews>& news) {
  Op& op = ops_.at(name);
  op.question = 0;
  if (!news.ok()) {
    if (!IsTheEnd(name, op.answered_at, news.status())) AskLater(name, &op, op.back_off.Next());
    return;
  }
  op.answered_at = loop_.clock().MonotonicNanos();
  op.back_off.Reset();
  std::vector<TicketBlock> known;
  for (const Block& block : op.blocks) known.push_back(block.what);
  if (!ValidNews(op.seen, known, *news)) {
    health_.Failed(op.request.producer, PeerHealth::Fault::kLied);
    return End(name, absl::DataLossError("the producer's answer about a ticket cannot be"), true);
  }
  // A producer of an earlier version does not look at the namespace that is asked for. It is told
  // nothing: the ticket is not the caller's to end.
  if (news->fingerprint != name.fingerprint) {
    return End(name, NoSuchTicketError(), /*acknowledge=*/false);
  }
  // A producer can say more than it has.
  std::size_t blocks = news->blocks.size();
  for (const auto& [of, other] : ops_) blocks += other.blocks.size();
  if (op.seen == 0 && blocks > kBlocksMax) {
    return End(name,
               absl::ResourceExhaustedError(absl::StrCat(
                   "with this ticket ", blocks, " blocks would be redeemed: at most ", kBlocksMax)),
               true);
  }
  const bool anything_new = Learn(name, &op, *news);
  if (op.there_open > 0) {
    // Also when what was said to have changed has not: who answers so would be asked all the time.
    if (!anything_new) {
      AskLater(name, &op, kPauseNanos);
    } else {
      Ask(name, &op);
    }
  }
  Advance(name, &op);
}

bool TicketRedeem::Learn(const TicketName& name, Op* op, const TicketNews& news) {
  bool anything_new = op->seen == 0;
  if (op->seen == 0) {
    for (const TicketBlock& block : news.blocks) op->blocks.emplace_back().what = block;
    op->work.resize(op->blocks.size());
    op->open = op->there_open = op->blocks.size();
    for (std::uint32_t i = 0; i < op->blocks.size(); ++i) NoteChange(name, op, i);
  }
  op->seen = news.version;
  for (const TicketBlockNews& change : news.changed) {
    Work& work = op->work[change.block];
    if (work.there != TicketBlockState::kOpen) continue;  // That was final.
    anything_new |=
        change.state != TicketBlockState::kOpen || !work.finished.HasAll(change.finished);
    work.finished.Add(change.finished);
    work.there = change.state;
    work.digest = change.digest;
    if (work.there != TicketBlockState::kOpen) --op->there_open;
    if (work.phase == Phase::kOver) continue;
    if (work.there == TicketBlockState::kFailed) {
      Decide(name, op, change.block, Fate::kMissed, Miss::kGivenUp);
    } else if (!op->request.here) {
      CommitIfWhole(name, op, change.block);
    } else if (work.there == TicketBlockState::kSealed) {
      Decide(name, op, change.block, Fate::kSealed);
    } else if (LayerSet& here = op->blocks[change.block].here; !here.HasAll(change.finished)) {
      here.Add(change.finished);
      NoteChange(name, op, change.block);
    }
  }
  return anything_new;
}

// --- The end ---

void TicketRedeem::End(const TicketName& ended, const absl::Status& status, bool acknowledge) {
  const TicketName name = ended;  // It may be part of what goes.
  auto node = ops_.extract(name);
  Op& op = node.mapped();
  if (op.question != 0) peers_.Cancel(op.question);
  for (const auto& [id, pull] : op.pulls) {
    peers_.Cancel(pull.call);
    PullEnded(op.request.producer);
  }
  for (const Loop::TimerId timer : {op.retry, op.pull_retry, op.tell}) {
    if (timer != 0) loop_.Cancel(timer);
  }
  for (std::size_t i = 0; i < op.work.size(); ++i) {
    const Phase phase = op.work[i].phase;
    if (phase == Phase::kBeginning || phase == Phase::kCopying || phase == Phase::kCommitting) {
      copies_.Abandon(op.work[i].copy);
    }
    if (op.blocks[i].fate == Fate::kOpen) Count(Fate::kMissed);
  }
  GiveUpOpen(MissOf(status), &op.blocks);
  if (acknowledge) Acknowledge(op.request);
  const Outcome outcome{status, std::move(op.blocks)};
  if (!absl::IsCancelled(status)) Remember(op.request, outcome);
  for (const CallerId caller : op.callers) Complete(caller, outcome);
}

void TicketRedeem::Remember(const Request& request, const Outcome& outcome) {
  const std::size_t blocks = outcome.blocks.size();  // kTicketBlocksMax at most.
  while (!remembered_.empty() &&
         (remembered_.size() >= kRememberMax || remembered_blocks_ + blocks > kRememberBlocksMax)) {
    remembered_blocks_ -= remembered_.front().outcome.blocks.size();
    remembered_.pop_front();
  }
  remembered_blocks_ += blocks;
  remembered_.push_back({request, outcome, loop_.clock().MonotonicNanos() + kRememberNanos});
}

void TicketRedeem::SetMembers(const std::vector<Member>& members) {
  std::map<std::string, std::string> incarnations;
  for (const Member& member : members) incarnations[member.id] = member.incarnation;
  std::vector<std::pair<TicketName, absl::Status>> over;
  for (const auto& [name, op] : ops_) {
    const Member& producer = op.request.producer;
    const auto now = incarnations.find(producer.id);
    const bool left = now == incarnations.end();
    if (left ? !draining_.contains({producer.id, producer.incarnation})
             : now->second == producer.incarnation) {
      continue;
    }
    over.emplace_back(name, absl::UnavailableError(
                                absl::StrCat("node \"", producer.id, "\", which made the ticket, ",
                                             left ? "left the cluster" : "was restarted")));
  }
  draining_.clear();
  for (const Member& member : members) {
    if (member.state == MemberState::kDraining) draining_.emplace(member.id, member.incarnation);
  }
  for (const auto& [name, why] : over) {
    // Whoever heard of an end may have ended another one.
    if (ops_.contains(name)) End(name, why, /*acknowledge=*/false);
  }
}

void TicketRedeem::Acknowledge(const Request& request) {
  // Whoever did not answer for so long is told by its own deadline.
  while (acknowledgements_.size() >= 4 * options_.tickets_max) {
    const auto oldest = acknowledgements_.begin();
    loop_.Cancel(oldest->second.timer);
    if (oldest->second.call != 0) peers_.Cancel(oldest->second.call);
    acknowledgements_.erase(oldest);
  }
  const std::uint64_t id = next_acknowledgement_++;
  Acknowledgement& acknowledgement = acknowledgements_.try_emplace(id, ++seed_).first->second;
  acknowledgement.name = request.name;
  acknowledgement.producer = request.producer;
  acknowledgement.until = loop_.clock().MonotonicNanos() + options_.acknowledge_nanos;
  TryAcknowledge(id);
}

void TicketRedeem::TryAcknowledge(std::uint64_t id) {
  Acknowledgement& acknowledgement = acknowledgements_.at(id);
  acknowledgement.timer = 0;
  acknowledgement.call =
      peers_.Acknowledge(acknowledgement.producer, acknowledgement.name,
                         loop_.clock().MonotonicNanos() + options_.call_nanos,
                         [this, id](const absl::Status& status) { Acknowledged(id, status); });
}

void TicketRedeem::Acknowledged(std::uint64_t id, const absl::Status& status) {
  Acknowledgement& acknowledgement = acknowledgements_.at(id);
  acknowledgement.call = 0;
  if (status.ok() || IsOver(status) || IsReplaced(status) ||
      loop_.clock().MonotonicNanos() >= acknowledgement.until) {
    acknowledgements_.erase(id);
    return;
  }
  acknowledgement.timer =
      loop_.After(acknowledgement.back_off.Next(), [this, id] { TryAcknowledge(id); });
}

}  // namespace kvmill
