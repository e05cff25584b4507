#include "service/cluster/remote_lookup.h"

#include <algorithm>
#include <utility>

#include "storage/core/check.h"

namespace kvmill {

RemoteLookup::RemoteLookup(Loop& loop, Peers& peers, PeerHealth& health, Options options)
    : loop_(loop), peers_(peers), health_(health), options_(std::move(options)) {
  KVMILL_CHECK(options_.copies + 2 <= kRanks);
}

RemoteLookup::~RemoteLookup() {
  for (auto& [id, op] : ops_) End(&op);
  for (auto& [number, call] : calls_) peers_.Cancel(call.id);
}

RemoteLookup::OpId RemoteLookup::Start(Request request,
                                       std::function<void(std::vector<Run>)> done) {
  const OpId id = next_++;
  Op& op = ops_[id];
  op.id = id;
  op.fingerprint = request.fingerprint;
  op.everybody = request.everybody;
  op.view = view_;
  op.done = std::move(done);
  op.runs.reserve(request.runs.size());
  for (RunQuery& query : request.runs) {
    op.runs.emplace_back();
    op.runs.back().query = std::move(query);
  }
  AskLocal(&op);
  if (op.view != nullptr) ListCandidates(&op, request.hint, request.all_members);
  std::vector<std::size_t> all;
  for (std::size_t i = 0; i < op.runs.size(); ++i) all.push_back(i);
  Advance(&op, all, false);
  // One after the other would take too long.
  const auto has_more = [](const OpRun& run) { return run.next < run.candidates.size(); };
  while (request.all_members && request.everybody &&
         std::any_of(op.runs.begin(), op.runs.end(), has_more)) {
    Advance(&op, all, false);
  }
  const bool finished = Finished(op);
  op.timer = finished ? loop_.After(0, [this, id] { Complete(id); })
                      : loop_.At(request.deadline_nanos, [this, id] { Complete(id); });
  return id;
}

void RemoteLookup::AskLocal(Op* op) {
  Member self{.id = options_.self_id};
  for (OpRun& run : op->runs) {
    const RunAnswer answer = options_.local(op->fingerprint, run.query);
    Take(*op, &run, self, true, answer);
  }
}

void RemoteLookup::ListCandidates(Op* op, const std::string& hint, bool all_members) {
  const std::optional<MemberIndex> hinted = op->view->IndexOf(hint);
  const auto add = [&](OpRun* run, MemberIndex index) {
    if (op->view->members()[index].id == options_.self_id) return;
    if (std::count(run->candidates.begin(), run->candidates.end(), index) > 0) return;
    run->candidates.push_back(index);
  };
  for (OpRun& run : op->runs) {
    if (hinted.has_value()) {
      add(&run, *hinted);
      if (run.at_once > 0) run.at_once = run.candidates.size();
    }
    if (!run.query.anchor.empty()) {
      const auto homes = op->view->HomesOf(op->fingerprint, run.query.anchor);
      for (std::size_t rank = 0; rank < std::min(homes.size(), options_.copies + 2); ++rank) {
        add(&run, homes[rank]);
      }
    }
    if (!all_members) continue;
    for (MemberIndex i = 0; i < op->view->members().size(); ++i) add(&run, i);
  }
}

// Asks the next node of each of these runs, as far as it has blocks open.
void RemoteLookup::Advance(Op* op, const std::vector<std::size_t>& runs, bool hedge) {
  std::map<MemberIndex, std::vector<std::size_t>> asks;
  for (const std::size_t i : runs) {
    OpRun& run = op->runs[i];
    if (Settled(*op, run)) continue;
    for (bool asked = false; run.next < run.candidates.size() && (run.at_once > 0 || !asked);) {
      const MemberIndex peer = run.candidates[run.next++];
      if (run.at_once > 0) --run.at_once;
      if (asks.contains(peer) || health_.Admit(op->view->members()[peer])) {
        asks[peer].push_back(i);
        asked = true;
      }
    }
  }
  for (auto& [peer, of] : asks) {
    for (std::size_t first = 0; first < of.size(); first += kQueryRunsMax) {
      const auto begin = of.begin() + static_cast<std::ptrdiff_t>(first);
      const std::size_t count = std::min(kQueryRunsMax, of.size() - first);
      Ask(op, peer, {begin, begin + static_cast<std::ptrdiff_t>(count)});
      hedges_started_ += hedge;
    }
  }
}

void RemoteLookup::Ask(Op* op, MemberIndex peer, std::vector<std::size_t> runs) {
  const CallNumber number = next_call_++;
  Call& call = calls_[number];
  call.op = op->id;
  call.member = op->view->members()[peer];
  call.started = loop_.clock().MonotonicNanos();
  for (const std::size_t i : runs) {
    call.queries.push_back(op->runs[i].query);
    ++op->runs[i].open;
  }
  call.runs = std::move(runs);
  op->calls.insert(number);
  ++calls_started_;
  call.hedge = loop_.After(health_.HedgeNanos(call.member), [this, number] { Hedge(number); });
  call.id =
      peers_.Locate(call.member, op->fingerprint, call.queries, call.started + options_.call_nanos,
                    [this, number](const absl::StatusOr<std::vector<RunAnswer>>& answers) {
                      Answered(number, answers);
                    });
}

void RemoteLookup::Hedge(CallNumber number) {
  Call& call = calls_.at(number);
  call.hedge = 0;
  Advance(&ops_.at(call.op), call.runs, true);
}

void RemoteLookup::Answered(CallNumber number,
                            const absl::StatusOr<std::vector<RunAnswer>>& answers) {
  const auto node = calls_.extract(number);
  const Call& call = node.mapped();
  const bool good = answers.ok() && ValidAnswer(call.queries, *answers);
  if (good) {
    health_.Succeeded(call.member);
    health_.Measured(call.member, loop_.clock().MonotonicNanos() - call.started);
  } else {
    health_.Failed(call.member,
                   answers.ok() ? PeerHealth::Fault::kLied : PeerHealth::Fault::kFailed);
  }
  if (call.op == 0) {
    --stragglers_;
    return;
  }
  loop_.Cancel(call.hedge);
  Op& op = ops_.at(call.op);
  op.calls.erase(number);
  std::vector<std::size_t> rest;
  for (std::size_t k = 0; k < call.runs.size(); ++k) {
    OpRun& run = op.runs[call.runs[k]];
    if (good) Take(op, &run, call.member, false, (*answers)[k]);
    if (--run.open == 0 || run.at_once > 0) rest.push_back(call.runs[k]);
  }
  Advance(&op, rest, false);
  if (Finished(op)) Complete(op.id);
}

void RemoteLookup::Take(const Op& op, OpRun* run, const Member& from, bool self,
                        const RunAnswer& answer) {
  const auto add = [run](const Member& member, bool is_self, bool told, std::uint32_t blocks) {
    if (blocks == 0) return;
    run->found.covered |= blocks;
    for (Source& source : run->found.sources) {
      if (source.member.id != member.id) continue;
      source.blocks = told ? blocks : source.blocks | (source.told ? 0 : blocks);
      source.told |= told;
      return;
    }
    run->found.sources.push_back({member, is_self, told, blocks});
  };
  add(from, self, true, answer.present);
  if (op.view == nullptr) return;
  for (const Pointer& pointer : answer.pointers) {
    // What this node has it has said already.
    if (pointer.holder == options_.self_id) continue;
    const std::optional<MemberIndex> index = op.view->IndexOf(pointer.holder);
    if (!index.has_value()) continue;
    const Member& holder = op.view->members()[*index];
    // Another process than the one that said so; or one that would not be asked.
    if (holder.incarnation != pointer.incarnation || health_.Paused(holder)) continue;
    add(holder, false, false, pointer.blocks);
  }
  for (const Pointer& pointer : answer.pointers) {
    const std::optional<MemberIndex> index = op.view->IndexOf(pointer.holder);
    const std::uint32_t open = op.everybody ? ~std::uint32_t{0} : ~run->found.covered;
    if ((pointer.perhaps & open) == 0 || !index.has_value()) continue;
    if (op.view->members()[*index].incarnation != pointer.incarnation) continue;
    if (pointer.holder != options_.self_id) AskSoon(run, *index);
  }
}

void RemoteLookup::AskSoon(OpRun* run, MemberIndex peer) {
  std::vector<MemberIndex>& all = run->candidates;
  const auto known = std::find(all.begin(), all.end(), peer);
  const auto soon = static_cast<std::ptrdiff_t>(run->next + run->at_once);
  if (known != all.end()) {
    if (known - all.begin() < soon) return;
    all.erase(known);
  }
  all.insert(all.begin() + soon, peer);
  ++run->at_once;
}

// Whether there is a reason to ask nobody else.
bool RemoteLookup::Settled(const Op& op, const OpRun& run) {
  return !op.everybody && run.found.covered == AllOf(run.query);
}

bool RemoteLookup::Finished(const Op& op) const {
  return std::all_of(op.runs.begin(), op.runs.end(),
                     [&op](const OpRun& run) { return Settled(op, run) || run.open == 0; });
}

void RemoteLookup::End(Op* op) {
  loop_.Cancel(op->timer);
  for (const CallNumber number : op->calls) {
    Call& call = calls_.at(number);
    loop_.Cancel(call.hedge);
    if (stragglers_ == kStragglersMax) {
      peers_.Cancel(call.id);
      calls_.erase(number);
      continue;
    }
    call.op = 0;
    ++stragglers_;
  }
  op->calls.clear();
}

void RemoteLookup::Complete(OpId id) {
  auto node = ops_.extract(id);
  Op& op = node.mapped();
  End(&op);
  std::vector<Run> found;
  for (OpRun& run : op.runs) {
    std::stable_partition(run.found.sources.begin(), run.found.sources.end(),
                          [](const Source& source) { return source.told; });
    found.push_back(std::move(run.found));
  }
  op.done(std::move(found));
}

void RemoteLookup::CompleteAll() {
  std::vector<OpId> running;
  for (const auto& [id, op] : ops_) running.push_back(id);
  for (const OpId id : running) {
    if (ops_.contains(id)) Complete(id);
  }
}

void RemoteLookup::Cancel(OpId id) {
  auto node = ops_.extract(id);
  if (!node.empty()) End(&node.mapped());
}

}  // namespace kvmill
