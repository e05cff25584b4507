#include "service/cluster/remote_fetch.h"

#include <algorithm>
#include <bit>
#include <utility>

namespace kvmill {

RemoteFetch::~RemoteFetch() {
  for (auto& [id, op] : ops_) End(&op);
}

RemoteFetch::OpId RemoteFetch::Start(Request request, std::function<void(std::uint32_t)> done) {
  const OpId id = next_++;
  Op& op = ops_[id];
  op.request = std::move(request);
  op.done = std::move(done);
  for (const RemoteLookup::Source& source : op.request.sources) {
    op.left.push_back(source.self ? 0 : source.blocks);
  }
  Pull(id, &op);
  const bool nothing = op.calls.empty();
  op.timer = nothing ? loop_.After(0, [this, id] { Complete(id); })
                     : loop_.At(op.request.deadline_nanos, [this, id] { Complete(id); });
  return id;
}

// Asks for each block that is neither here nor asked for, from the first source that is left.
void RemoteFetch::Pull(OpId id, Op* op) {
  const std::vector<RemoteLookup::Source>& sources = op->request.sources;
  std::uint32_t open = op->have;
  for (const auto& [source, call] : op->calls) open |= call.silent ? 0 : call.asked;
  const std::int64_t now = loop_.clock().MonotonicNanos();
  for (std::size_t i = 0; i < sources.size(); ++i) {
    if (op->calls.contains(i)) continue;
    const std::uint32_t ask = op->left[i] & ~open;
    if (ask == 0) continue;
    if (!health_.Admit(sources[i].member)) {
      op->left[i] = 0;
      continue;
    }
    op->left[i] &= ~ask;
    open |= ask;
    RunKeys blocks{.anchor = op->request.anchor, .keys = {}, .places = {}};
    for (std::size_t k = 0; k < op->request.keys.size(); ++k) {
      if ((ask >> k & 1) == 0) continue;
      blocks.keys.push_back(op->request.keys[k]);
      if (blocks.anchor.empty()) continue;
      blocks.places.push_back(static_cast<std::uint8_t>(op->request.first + k));
    }
    op->calls[i].asked = ask;
    op->calls[i].id =
        peers_.Pull(sources[i].member, op->request.fingerprint, std::move(blocks),
                    std::min(op->request.deadline_nanos, now + op->request.call_nanos),
                    [this, id, i](const absl::StatusOr<std::vector<absl::Status>>& statuses) {
                      Answered(id, i, statuses);
                    });
    CheckLater(id, i);
  }
}

void RemoteFetch::CheckLater(OpId id, std::size_t source) {
  Op::Call& call = ops_.at(id).calls.at(source);
  call.check = loop_.After(call.wait, [this, id, source] { Check(id, source); });
}

void RemoteFetch::Check(OpId id, std::size_t source) {
  Op& op = ops_.at(id);
  Op::Call& call = op.calls.at(source);
  call.check = 0;
  const Member& member = op.request.sources[source].member;
  const auto first = static_cast<std::size_t>(std::countr_zero(call.asked));
  RunQuery query{.anchor = op.request.anchor, .first = 0, .keys = {op.request.keys[first]}};
  if (!query.anchor.empty()) query.first = static_cast<std::uint8_t>(op.request.first + first);
  const std::int64_t patience = std::max(kFirstCheckNanos, 2 * health_.HedgeNanos(member));
  call.question = peers_.Locate(
      member, op.request.fingerprint, {std::move(query)}, loop_.clock().MonotonicNanos() + patience,
      [this, id, source](const absl::StatusOr<std::vector<RunAnswer>>& answer) {
        Checked(id, source, answer.ok());
      });
}

void RemoteFetch::Checked(OpId id, std::size_t source, bool answered) {
  Op& op = ops_.at(id);
  Op::Call& call = op.calls.at(source);
  call.question = 0;
  if (answered) {
    call.wait = std::min(2 * call.wait, kLastCheckNanos);
    return CheckLater(id, source);
  }
  call.silent = true;
  Pull(id, &op);
  std::uint32_t open = op.have;
  for (const auto& [other, running] : op.calls) open |= running.silent ? 0 : running.asked;
  if ((op.calls.at(source).asked & ~open) != 0 && op.request.stalled != nullptr) {
    std::exchange(op.request.stalled, nullptr)();
  }
}

void RemoteFetch::AddSources(OpId id, const std::vector<RemoteLookup::Source>& sources) {
  const auto found = ops_.find(id);
  if (found == ops_.end()) return;
  Op& op = found->second;
  for (const RemoteLookup::Source& source : sources) {
    const bool known = std::any_of(op.request.sources.begin(), op.request.sources.end(),
                                   [&source](const auto& other) {
                                     return other.member.id == source.member.id &&
                                            other.member.incarnation == source.member.incarnation;
                                   });
    if (known || source.self) continue;
    op.request.sources.push_back(source);
    op.left.push_back(source.blocks);
  }
  Pull(id, &op);
}

void RemoteFetch::EndCall(const Op::Call& call) {
  loop_.Cancel(call.check);
  if (call.question != 0) peers_.Cancel(call.question);
}

// Silent sources whose blocks have come from others.
void RemoteFetch::DropOvertaken(Op* op) {
  for (auto it = op->calls.begin(); it != op->calls.end();) {
    const Op::Call& call = it->second;
    if (!call.silent || (call.asked & ~op->have) != 0) {
      ++it;
      continue;
    }
    health_.Failed(op->request.sources[it->first].member, PeerHealth::Fault::kFailed);
    peers_.Cancel(call.id);
    it = op->calls.erase(it);
  }
}

void RemoteFetch::Answered(OpId id, std::size_t source,
                           const absl::StatusOr<std::vector<absl::Status>>& statuses) {
  Op& op = ops_.at(id);
  const Op::Call call = op.calls.extract(source).mapped();
  EndCall(call);
  const std::uint32_t asked = call.asked;
  const Member& member = op.request.sources[source].member;
  const bool in_time = loop_.clock().MonotonicNanos() < op.request.deadline_nanos;
  if (!statuses.ok()) {
    op.left[source] = 0;
    if (in_time) health_.Failed(member, PeerHealth::Fault::kFailed);
  } else if (statuses->size() != static_cast<std::size_t>(std::popcount(asked))) {
    op.left[source] = 0;
    health_.Failed(member, PeerHealth::Fault::kLied);
  } else {
    bool lied = false;
    std::size_t next = 0;
    for (std::size_t k = 0; k < op.request.keys.size(); ++k) {
      if ((asked >> k & 1) == 0) continue;
      const absl::Status& status = (*statuses)[next++];
      if (status.ok()) op.have |= std::uint32_t{1} << k;
      lied |= absl::IsDataLoss(status);
    }
    if (lied) {
      health_.Failed(member, PeerHealth::Fault::kLied);
    } else {
      health_.Succeeded(member);
    }
  }
  DropOvertaken(&op);
  Pull(id, &op);
  if (op.calls.empty()) Complete(id);
}

void RemoteFetch::End(Op* op) {
  loop_.Cancel(op->timer);
  for (const auto& [source, call] : op->calls) {
    EndCall(call);
    peers_.Cancel(call.id);
  }
}

void RemoteFetch::Complete(OpId id) {
  auto node = ops_.extract(id);
  End(&node.mapped());
  node.mapped().done(node.mapped().have);
}

void RemoteFetch::Cancel(OpId id) {
  auto node = ops_.extract(id);
  if (!node.empty()) End(&node.mapped());
}

}  // namespace kvmill
