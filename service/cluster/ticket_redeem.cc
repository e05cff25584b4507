#include "service/cluster/ticket_redeem.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

namespace kvmill {

namespace {

// A question that was answered with nothing new is not asked again at once: who answers so without
// waiting must not keep this node busy.
constexpr std::int64_t kPauseNanos = 5'000'000;

// The ticket is no more, or is not this node's.
bool IsOver(const absl::Status& status) {
  return absl::IsNotFound(status) || absl::IsAborted(status) ||
         absl::IsFailedPrecondition(status) || absl::IsPermissionDenied(status);
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
}

// --- Callers ---

TicketRedeem::CallerId TicketRedeem::Start(Request request, Update update, Done done) {
  const CallerId id = next_caller_++;
  Caller& caller = callers_[id];
  caller.secret = request.secret;
  caller.update = std::move(update);
  caller.done = std::move(done);
  const std::int64_t now = loop_.clock().MonotonicNanos();
  while (!remembered_.empty() && remembered_.front().until <= now) remembered_.pop_front();
  const auto same = [&request](const Request& other) {
    return other.producer == request.producer && other.fingerprint == request.fingerprint;
  };
  const absl::Status contradiction =
      absl::InvalidArgumentError("the ticket was redeemed here with another producer or namespace");

  auto found = ops_.find(request.secret);
  if (found == ops_.end()) {
    for (const Remembered& ended : remembered_) {
      if (ended.request.secret != request.secret) continue;
      CompleteSoon(id, same(ended.request) ? ended.outcome : Outcome{contradiction, {}});
      return id;
    }
    if (ops_.size() >= options_.tickets_max) {
      CompleteSoon(
          id, {absl::ResourceExhaustedError(absl::StrCat(
                   ops_.size(), " tickets are being redeemed: at most ", options_.tickets_max)),
               {}});
      return id;
    }
    found = ops_.try_emplace(request.secret, ++seed_).first;
    found->second.request = request;
    found->second.answered_at = now;
    Ask(request.secret, &found->second);
  } else if (!same(found->second.request)) {
    CompleteSoon(id, {contradiction, {}});
    return id;
  }
  Op& op = found->second;
  op.callers.push_back(id);
  caller.timer = loop_.At(request.deadline_nanos, [this, id] { Late(id); });
  if (!op.blocks.empty() && op.tell == 0) {
    op.tell = loop_.After(0, [this, secret = request.secret] { Tell(secret); });
  }
  return id;
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

void TicketRedeem::Leave(CallerId id, const TicketSecret& secret) {
  const auto found = ops_.find(secret);
  if (found == ops_.end()) return;
  Op& op = found->second;
  if (std::erase(op.callers, id) == 0 || !op.callers.empty()) return;
  End(secret, absl::CancelledError("nobody wants the ticket any more"), /*acknowledge=*/true);
}

void TicketRedeem::Late(CallerId id) {
  const TicketSecret secret = callers_.at(id).secret;
  const Outcome outcome{absl::DeadlineExceededError("the ticket was not done in time"),
                        ops_.at(secret).blocks};
  Leave(id, secret);
  Complete(id, outcome);
}

void TicketRedeem::Cancel(CallerId id) {
  auto node = callers_.extract(id);
  if (node.empty()) return;
  loop_.Cancel(node.mapped().timer);
  Leave(id, node.mapped().secret);
}

void TicketRedeem::NoteChange(const TicketSecret& secret, Op* op, std::uint32_t block) {
  op->changed.insert(block);
  if (op->tell == 0) op->tell = loop_.After(0, [this, secret] { Tell(secret); });
}

void TicketRedeem::Tell(const TicketSecret& secret) {
  Op& op = ops_.at(secret);
  op.tell = 0;
  const std::vector<std::uint32_t> changed(op.changed.begin(), op.changed.end());
  op.changed.clear();
  for (const CallerId id : std::vector<CallerId>(op.callers)) {
    // What ran before may have cancelled this one, or all.
    const auto caller = callers_.find(id);
    const auto found = ops_.find(secret);
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

void TicketRedeem::Ask(const TicketSecret& secret, Op* op) {
  const std::int64_t wait = op->seen == 0 ? 0 : options_.wait_nanos;
  op->question = peers_.Redeem(
      op->request.producer, secret, op->seen, wait,
      loop_.clock().MonotonicNanos() + wait + options_.call_nanos,
      [this, secret](const absl::StatusOr<TicketNews>& news) { Answered(secret, news); });
}

void TicketRedeem::AskLater(const TicketSecret& secret, Op* op, std::int64_t nanos) {
  op->retry = loop_.After(nanos, [this, secret] {
    Op& later = ops_.at(secret);
    later.retry = 0;
    Ask(secret, &later);
  });
}

bool TicketRedeem::IsTheEnd(const TicketSecret& secret, std::int64_t failing_since,
                            const absl::Status& status) {
  if (IsOver(status)) {
    End(secret, status, /*acknowledge=*/false);
    return true;
  }
  if (loop_.clock().MonotonicNanos() - failing_since < options_.silence_nanos) return false;
  End(secret,
      absl::UnavailableError(absl::StrCat("no answer from the producer: ", status.message())),
      /*acknowledge=*/true);
  return true;
}

void TicketRedeem::Answered(const TicketSecret& secret, const absl::StatusOr<TicketNews>& news) {
  Op& op = ops_.at(secret);
  op.question = 0;
  if (!news.ok()) {
    if (!IsTheEnd(secret, op.answered_at, news.status())) AskLater(secret, &op, op.back_off.Next());
    return;
  }
  op.answered_at = loop_.clock().MonotonicNanos();
  op.back_off.Reset();
  std::vector<TicketBlock> known;
  for (const Block& block : op.blocks) known.push_back(block.what);
  if (!ValidNews(op.seen, known, *news)) {
    health_.Failed(op.request.producer, PeerHealth::Fault::kLied);
    return End(secret, absl::DataLossError("the producer's answer about a ticket cannot be"), true);
  }
  if (news->fingerprint != op.request.fingerprint) {
    return End(secret,
               absl::FailedPreconditionError(absl::StrCat("the ticket is of namespace ",
                                                          ToHex(news->fingerprint), ", not of ",
                                                          ToHex(op.request.fingerprint))),
               true);
  }
  const bool anything_new = Learn(secret, &op, *news);
  if (op.there_open > 0) {
    // Also when what was said to have changed has not: who answers so would be asked all the time.
    if (!anything_new) {
      AskLater(secret, &op, kPauseNanos);
    } else {
      Ask(secret, &op);
    }
  }
  Advance(secret, &op);
}

bool TicketRedeem::Learn(const TicketSecret& secret, Op* op, const TicketNews& news) {
  bool anything_new = op->seen == 0;
  if (op->seen == 0) {
    for (const TicketBlock& block : news.blocks) op->blocks.emplace_back().what = block;
    op->work.resize(op->blocks.size());
    op->open = op->there_open = op->blocks.size();
    for (std::uint32_t i = 0; i < op->blocks.size(); ++i) NoteChange(secret, op, i);
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
      Decide(secret, op, change.block, Fate::kMissed);
    } else {
      CommitIfWhole(secret, op, change.block);
    }
  }
  return anything_new;
}

// --- Copies ---

void TicketRedeem::Advance(const TicketSecret& secret, Op* op) {
  if (op->open == 0 && op->seen != 0) return End(secret, absl::OkStatus(), /*acknowledge=*/true);
  for (std::uint32_t i = 0; i < op->work.size() && op->begins < options_.begins_max; ++i) {
    if (op->work[i].phase == Phase::kIdle && !op->work[i].finished.empty()) Begin(secret, op, i);
  }
  while (op->pull_retry == 0 && op->pulls.size() < options_.pulls_max && StartPull(secret, op)) {
  }
}

void TicketRedeem::Begin(const TicketSecret& secret, Op* op, std::uint32_t i) {
  Work& begun = op->work[i];
  begun.phase = Phase::kBeginning;
  ++op->begins;
  begun.copy = copies_.Begin(
      op->request.fingerprint, op->blocks[i].what, [this, secret, i](const absl::Status& status) {
        Op& of = ops_.at(secret);
        Work& work = of.work[i];
        --of.begins;
        if (status.ok()) {
          work.phase = Phase::kCopying;
        } else {
          work.phase = Phase::kIdle;  // There is nothing to abandon.
          Decide(secret, &of, i, absl::IsAlreadyExists(status) ? Fate::kExists : Fate::kMissed);
        }
        Advance(secret, &of);
      });
}

bool TicketRedeem::StartPull(const TicketSecret& secret, Op* op) {
  Pull pull;
  std::size_t pages = 0;
  for (std::uint32_t i = 0; i < op->work.size() && pages < options_.pull_pages_max; ++i) {
    Work& work = op->work[i];
    if (work.phase != Phase::kCopying) continue;
    LayerSet want = work.finished.Without(op->blocks[i].here);
    want.Remove(work.asked);
    want = want.Leading(options_.pull_pages_max - pages);
    if (want.empty()) continue;
    pages += want.count();
    work.asked.Add(want);
    pull.pieces.push_back({work.copy, i, want});
  }
  if (pages == 0) return false;
  const std::uint64_t id = next_pull_++;
  pull.call = peers_.Pull(
      op->request.producer, secret, pull.pieces,
      loop_.clock().MonotonicNanos() + options_.call_nanos,
      [this, secret, id](const absl::StatusOr<std::vector<TicketPeers::Landed>>& landed) {
        Landed(secret, id, landed);
      });
  op->pulls[id] = std::move(pull);
  return true;
}

void TicketRedeem::Landed(const TicketSecret& secret, std::uint64_t id,
                          const absl::StatusOr<std::vector<TicketPeers::Landed>>& landed) {
  Op& op = ops_.at(secret);
  const std::vector<TicketPeers::Piece> pieces = op.pulls.extract(id).mapped().pieces;
  for (const TicketPeers::Piece& piece : pieces) op.work[piece.block].asked.Remove(piece.layers);
  const std::int64_t now = loop_.clock().MonotonicNanos();
  if (!landed.ok()) {
    if (op.pulls_fail_since == 0) op.pulls_fail_since = now;
    if (IsTheEnd(secret, op.pulls_fail_since, landed.status())) return;
    if (op.pull_retry == 0) {
      op.pull_retry = loop_.After(op.pull_back_off.Next(), [this, secret] {
        Op& later = ops_.at(secret);
        later.pull_retry = 0;
        Advance(secret, &later);
      });
    }
    return;
  }
  op.answered_at = now;
  op.pulls_fail_since = 0;
  op.pull_back_off.Reset();
  bool lied = landed->size() != pieces.size();
  for (std::size_t p = 0; p < pieces.size(); ++p) {
    const std::uint32_t i = pieces[p].block;
    Work& work = op.work[i];
    if (work.phase != Phase::kCopying) continue;  // It was given up meanwhile.
    LayerSet came;
    if (p < landed->size()) {
      came = (*landed)[p].layers;
      lied |= (*landed)[p].damaged;
    }
    if (!came.empty()) {
      op.blocks[i].here.Add(came);
      NoteChange(secret, &op, i);
    }
    if (!came.HasAll(pieces[p].layers) && ++work.tries >= options_.tries_max) {
      Decide(secret, &op, i, Fate::kMissed);
    } else {
      CommitIfWhole(secret, &op, i);
    }
  }
  if (lied) health_.Failed(op.request.producer, PeerHealth::Fault::kLied);
  Advance(secret, &op);
}

void TicketRedeem::CommitIfWhole(const TicketSecret& secret, Op* op, std::uint32_t i) {
  Work& work = op->work[i];
  if (work.phase != Phase::kCopying || work.there != TicketBlockState::kSealed) return;
  if (op->blocks[i].here.count() < op->blocks[i].what.layer_count) return;
  work.phase = Phase::kCommitting;
  copies_.Commit(work.copy, work.digest,
                 [this, secret, i](const absl::Status& status) { Committed(secret, i, status); });
}

void TicketRedeem::Committed(const TicketSecret& secret, std::uint32_t i,
                             const absl::Status& status) {
  Op& op = ops_.at(secret);
  op.work[i].phase = Phase::kIdle;  // There is nothing to abandon.
  if (absl::IsDataLoss(status)) health_.Failed(op.request.producer, PeerHealth::Fault::kLied);
  Decide(secret, &op, i,
         status.ok()                     ? Fate::kSealed
         : absl::IsAlreadyExists(status) ? Fate::kExists
                                         : Fate::kMissed);
  Advance(secret, &op);
}

void TicketRedeem::Decide(const TicketSecret& secret, Op* op, std::uint32_t i, Fate fate) {
  Work& work = op->work[i];
  if (work.phase == Phase::kBeginning) --op->begins;
  if (work.phase == Phase::kBeginning || work.phase == Phase::kCopying) copies_.Abandon(work.copy);
  work.phase = Phase::kOver;
  Block& block = op->blocks[i];
  block.fate = fate;
  Count(fate);
  block.here = fate == Fate::kMissed ? LayerSet() : LayerSet::First(block.what.layer_count);
  --op->open;
  // What the producer may still say of it is of no interest.
  if (work.there == TicketBlockState::kOpen) {
    work.there = TicketBlockState::kFailed;
    --op->there_open;
  }
  NoteChange(secret, op, i);
}

void TicketRedeem::Count(Fate fate) {
  ++(fate == Fate::kSealed   ? counts_.sealed
     : fate == Fate::kExists ? counts_.exists
                             : counts_.missed);
}

// --- The end ---

void TicketRedeem::End(const TicketSecret& ended, const absl::Status& status, bool acknowledge) {
  const TicketSecret secret = ended;  // It may be part of what goes.
  auto node = ops_.extract(secret);
  Op& op = node.mapped();
  if (op.question != 0) peers_.Cancel(op.question);
  for (const auto& [id, pull] : op.pulls) peers_.Cancel(pull.call);
  for (const Loop::TimerId timer : {op.retry, op.pull_retry, op.tell}) {
    if (timer != 0) loop_.Cancel(timer);
  }
  for (std::size_t i = 0; i < op.work.size(); ++i) {
    const Phase phase = op.work[i].phase;
    if (phase == Phase::kBeginning || phase == Phase::kCopying || phase == Phase::kCommitting) {
      copies_.Abandon(op.work[i].copy);
    }
    if (op.blocks[i].fate == Fate::kOpen) {
      op.blocks[i].fate = Fate::kMissed;
      Count(Fate::kMissed);
      op.blocks[i].here = LayerSet();
    }
  }
  if (acknowledge) Acknowledge(op.request);
  const Outcome outcome{status, std::move(op.blocks)};
  if (!absl::IsCancelled(status)) {
    if (remembered_.size() >= kRememberMax) remembered_.pop_front();
    remembered_.push_back({op.request, outcome, loop_.clock().MonotonicNanos() + kRememberNanos});
  }
  for (const CallerId caller : op.callers) Complete(caller, outcome);
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
  acknowledgement.secret = request.secret;
  acknowledgement.producer = request.producer;
  acknowledgement.until = loop_.clock().MonotonicNanos() + options_.acknowledge_nanos;
  TryAcknowledge(id);
}

void TicketRedeem::TryAcknowledge(std::uint64_t id) {
  Acknowledgement& acknowledgement = acknowledgements_.at(id);
  acknowledgement.timer = 0;
  acknowledgement.call =
      peers_.Acknowledge(acknowledgement.producer, acknowledgement.secret,
                         loop_.clock().MonotonicNanos() + options_.call_nanos,
                         [this, id](const absl::Status& status) { Acknowledged(id, status); });
}

void TicketRedeem::Acknowledged(std::uint64_t id, const absl::Status& status) {
  Acknowledgement& acknowledgement = acknowledgements_.at(id);
  acknowledgement.call = 0;
  if (status.ok() || IsOver(status) || loop_.clock().MonotonicNanos() >= acknowledgement.until) {
    acknowledgements_.erase(id);
    return;
  }
  acknowledgement.timer =
      loop_.After(acknowledgement.back_off.Next(), [this, id] { TryAcknowledge(id); });
}

}  // namespace kvmill
