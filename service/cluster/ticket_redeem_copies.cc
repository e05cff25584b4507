// TicketRedeem: copies of blocks, from their first finished layer to their fate.
#include <utility>

#include "service/cluster/ticket_redeem.h"

namespace kvmill {

void TicketRedeem::Advance(const TicketName& name, Op* op) {
  if (op->open == 0 && op->seen != 0) return End(name, absl::OkStatus(), /*acknowledge=*/true);
  if (op->request.here) return;
  for (std::uint32_t i = 0; i < op->work.size() && op->begins < options_.begins_max; ++i) {
    if (op->work[i].phase == Phase::kIdle && !op->work[i].finished.empty()) Begin(name, op, i);
  }
  while (op->pull_retry == 0 && op->pulls.size() < options_.pulls_max &&
         StartPull(name, op, /*turn=*/false)) {
  }
}

void TicketRedeem::Begin(const TicketName& name, Op* op, std::uint32_t i) {
  Work& begun = op->work[i];
  begun.phase = Phase::kBeginning;
  ++op->begins;
  begun.copy = copies_.Begin(
      name.fingerprint, op->blocks[i].what, [this, name, i](const absl::Status& status) {
        Op& of = ops_.at(name);
        Work& work = of.work[i];
        --of.begins;
        if (status.ok()) {
          work.phase = Phase::kCopying;
        } else {
          work.phase = Phase::kIdle;  // There is nothing to abandon.
          if (absl::IsAlreadyExists(status)) {
            Decide(name, &of, i, Fate::kExists);
          } else {
            Decide(name, &of, i, Fate::kMissed,
                   absl::IsResourceExhausted(status) ? Miss::kNoRoom : Miss::kRefused);
          }
        }
        Advance(name, &of);
      });
}

bool TicketRedeem::StartPull(const TicketName& name, Op* op, bool turn) {
  Pull pull;
  std::size_t pages = 0;
  for (std::uint32_t i = 0; i < op->work.size() && pages < options_.pull_pages_max; ++i) {
    const Work& work = op->work[i];
    if (work.phase != Phase::kCopying) continue;
    LayerSet want = work.finished.Without(op->blocks[i].here);
    want.Remove(work.asked);
    want = want.Leading(options_.pull_pages_max - pages);
    if (want.empty()) continue;
    pages += want.count();
    pull.pieces.push_back({work.copy, i, want});
  }
  if (pages == 0) return false;
  const Member& producer = op->request.producer;
  Turns& turns = turns_[{producer.id, producer.incarnation}];
  if (turns.pulls >= options_.producer_pulls_max || (!turn && !turns.waiting.empty())) {
    if (!std::exchange(op->waits, true)) turns.waiting.push_back(name);
    return false;
  }
  ++turns.pulls;
  for (const TicketPeers::Piece& piece : pull.pieces) op->work[piece.block].asked.Add(piece.layers);
  const std::uint64_t id = next_pull_++;
  pull.call = peers_.Pull(
      op->request.producer, name, pull.pieces, loop_.clock().MonotonicNanos() + options_.call_nanos,
      [this, name, id](const absl::StatusOr<std::vector<TicketPeers::Landed>>& landed) {
        Landed(name, id, landed);
      });
  op->pulls[id] = std::move(pull);
  return true;
}

// Not within: whoever is called may be the one that made room.
void TicketRedeem::PullEnded(const Member& producer) {
  const ProducerId id(producer.id, producer.incarnation);
  Turns& turns = turns_.at(id);
  --turns.pulls;
  if (turns.timer == 0) turns.timer = loop_.After(0, [this, id] { TakeTurns(id); });
}

void TicketRedeem::TakeTurns(const ProducerId& producer) {
  Turns& turns = turns_.at(producer);
  turns.timer = 0;
  while (turns.pulls < options_.producer_pulls_max && !turns.waiting.empty()) {
    const TicketName name = turns.waiting.front();
    turns.waiting.pop_front();
    const auto found = ops_.find(name);
    if (found == ops_.end() || !std::exchange(found->second.waits, false)) continue;
    Op& op = found->second;
    if (op.pull_retry != 0 || op.pulls.size() >= options_.pulls_max) continue;
    if (!StartPull(name, &op, /*turn=*/true)) continue;
    op.waits = true;  // It may have more.
    turns.waiting.push_back(name);
  }
  if (turns.pulls == 0 && turns.waiting.empty()) turns_.erase(producer);
}

void TicketRedeem::Landed(const TicketName& name, std::uint64_t id,
                          const absl::StatusOr<std::vector<TicketPeers::Landed>>& landed) {
  Op& op = ops_.at(name);
  const std::vector<TicketPeers::Piece> pieces = op.pulls.extract(id).mapped().pieces;
  PullEnded(op.request.producer);
  for (const TicketPeers::Piece& piece : pieces) op.work[piece.block].asked.Remove(piece.layers);
  const std::int64_t now = loop_.clock().MonotonicNanos();
  if (!landed.ok()) {
    if (op.pulls_fail_since == 0) op.pulls_fail_since = now;
    if (IsTheEnd(name, op.pulls_fail_since, landed.status())) return;
    if (op.pull_retry == 0) {
      op.pull_retry = loop_.After(op.pull_back_off.Next(), [this, name] {
        Op& later = ops_.at(name);
        later.pull_retry = 0;
        Advance(name, &later);
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
    bool damaged = true;  // No answer to it is a wrong one.
    if (p < landed->size()) {
      came = (*landed)[p].layers;
      damaged = (*landed)[p].damaged;
      lied |= damaged;
    }
    if (!came.empty()) {
      op.blocks[i].here.Add(came);
      NoteChange(name, &op, i);
    }
    if (!came.HasAll(pieces[p].layers) && ++work.tries >= options_.tries_max) {
      // Else there was no memory for a page that is longer than those of tiles.
      Decide(name, &op, i, Fate::kMissed, damaged ? Miss::kDamaged : Miss::kNoRoom);
    } else {
      CommitIfWhole(name, &op, i);
    }
  }
  if (lied) health_.Failed(op.request.producer, PeerHealth::Fault::kLied);
  Advance(name, &op);
}

void TicketRedeem::CommitIfWhole(const TicketName& name, Op* op, std::uint32_t i) {
  Work& work = op->work[i];
  if (work.phase != Phase::kCopying || work.there != TicketBlockState::kSealed) return;
  if (op->blocks[i].here.count() < op->blocks[i].what.layer_count) return;
  work.phase = Phase::kCommitting;
  copies_.Commit(work.copy, work.digest,
                 [this, name, i](const absl::Status& status) { Committed(name, i, status); });
}

void TicketRedeem::Committed(const TicketName& name, std::uint32_t i, const absl::Status& status) {
  Op& op = ops_.at(name);
  op.work[i].phase = Phase::kIdle;  // There is nothing to abandon.
  if (absl::IsDataLoss(status)) health_.Failed(op.request.producer, PeerHealth::Fault::kLied);
  if (status.ok() || absl::IsAlreadyExists(status)) {
    Decide(name, &op, i, status.ok() ? Fate::kSealed : Fate::kExists);
  } else {
    Decide(name, &op, i, Fate::kMissed,
           absl::IsDataLoss(status)            ? Miss::kDamaged
           : absl::IsResourceExhausted(status) ? Miss::kNoRoom
                                               : Miss::kRefused);
  }
  Advance(name, &op);
}

void TicketRedeem::Decide(const TicketName& name, Op* op, std::uint32_t i, Fate fate, Miss why) {
  Work& work = op->work[i];
  if (work.phase == Phase::kBeginning) --op->begins;
  if (work.phase == Phase::kBeginning || work.phase == Phase::kCopying) copies_.Abandon(work.copy);
  work.phase = Phase::kOver;
  Block& block = op->blocks[i];
  block.fate = fate;
  block.miss = why;
  Count(fate);
  block.here = fate == Fate::kMissed ? LayerSet() : LayerSet::First(block.what.layer_count);
  --op->open;
  // What the producer may still say of it is of no interest.
  if (work.there == TicketBlockState::kOpen) {
    work.there = TicketBlockState::kFailed;
    --op->there_open;
  }
  NoteChange(name, op, i);
}

void TicketRedeem::Count(Fate fate) {
  ++(fate == Fate::kSealed   ? counts_.sealed
     : fate == Fate::kExists ? counts_.exists
                             : counts_.missed);
}

}  // namespace kvmill
