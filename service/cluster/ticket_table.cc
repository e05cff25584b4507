#include "service/cluster/ticket_table.h"

#include <algorithm>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "storage/core/status_macros.h"

namespace kvmill {

TicketTable::~TicketTable() {
  for (auto& [id, wait] : waits_) loop_.Cancel(wait.timer);
  for (auto& [name, ticket] : tickets_) {
    loop_.Cancel(ticket.timer);
    holds_.Release(ticket.hold);
  }
}

absl::Status TicketTable::Check(const Request& request) const {
  if (request.blocks.empty() || request.blocks.size() > kTicketBlocksMax) {
    return absl::InvalidArgumentError(absl::StrCat("a ticket of ", request.blocks.size(),
                                                   " blocks: want 1 to ", kTicketBlocksMax));
  }
  std::set<std::pair<std::uint8_t, absl::string_view>> names;
  for (const TicketBlock& block : request.blocks) {
    if (block.key.empty() || block.layer_count == 0 || block.layer_count > kLayersMax) {
      return absl::InvalidArgumentError(
          absl::StrCat("block ", block.key.ToHex(), " of ", block.layer_count,
                       " layers in a ticket: want a key and 1 to ", kLayersMax, " layers"));
    }
    if (!block.parent.empty() && (block.parent == block.key || block.parent == block.tail_key)) {
      return absl::InvalidArgumentError(
          absl::StrCat("block ", block.parent.ToHex(), " of a ticket is named as its own parent"));
    }
    if (!names.emplace(block.group, block.key.view()).second) {
      return absl::InvalidArgumentError(absl::StrCat("block ", block.key.ToHex(),
                                                     " of layer group ", int{block.group},
                                                     " is in the ticket twice"));
    }
  }
  const auto in_range = [](const char* what, std::int64_t nanos, std::int64_t most) {
    if (nanos > 0 && nanos <= most) return absl::OkStatus();
    return absl::InvalidArgumentError(
        absl::StrCat(what, " ", absl::FormatDuration(absl::Nanoseconds(nanos)),
                     " of a ticket: want 1 ms to ", absl::FormatDuration(absl::Nanoseconds(most))));
  };
  KVMILL_RETURN_IF_ERROR(in_range("ttl", request.ttl_nanos, options_.ttl_nanos_max));
  KVMILL_RETURN_IF_ERROR(in_range("life", request.life_nanos, options_.life_nanos_max));
  KVMILL_RETURN_IF_ERROR(CheckShare(request));
  if (tickets_.size() >= options_.tickets_max) {
    return absl::ResourceExhaustedError(
        absl::StrCat("there are ", tickets_.size(), " tickets: at most ", options_.tickets_max));
  }
  if (request.blocks.size() > options_.blocks_max - std::min(blocks_, options_.blocks_max)) {
    // How much others have is for the daemons' own tenant to know.
    return absl::ResourceExhaustedError(absl::StrCat(
        "tickets hold ", request.tenant.empty() ? absl::StrCat(blocks_) : "many",
        " blocks: ", request.blocks.size(), " more would be above ", options_.blocks_max));
  }
  return absl::OkStatus();
}

absl::Status TicketTable::CheckShare(const Request& request) const {
  if (request.tenant.empty()) return absl::OkStatus();
  const auto found = shares_.find(request.tenant);
  const Share has = found == shares_.end() ? Share() : found->second;
  const std::size_t tickets_max = options_.tickets_max / kTicketShares;
  if (has.tickets >= tickets_max) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "tenant \"", request.tenant, "\" has ", has.tickets, " tickets: at most ", tickets_max));
  }
  const std::size_t blocks_max = options_.blocks_max / kTicketShares;
  if (request.blocks.size() > blocks_max - std::min(has.blocks, blocks_max)) {
    return absl::ResourceExhaustedError(
        absl::StrCat("tickets of tenant \"", request.tenant, "\" hold ", has.blocks,
                     " blocks: ", request.blocks.size(), " more would be above ", blocks_max));
  }
  return absl::OkStatus();
}

std::optional<Fingerprint> TicketTable::NamespaceOf(const TicketSecret& secret) const {
  const auto found = tickets_.lower_bound({secret, {}});
  if (found == tickets_.end() || found->first.secret != secret) return std::nullopt;
  return found->first.fingerprint;
}

absl::StatusOr<TicketName> TicketTable::Create(Request request) {
  KVMILL_RETURN_IF_ERROR(Check(request));
  KVMILL_ASSIGN_OR_RETURN(const TicketHolds::HoldId hold,
                          holds_.Hold(request.fingerprint, request.blocks, this));
  TicketName name{random_(), request.fingerprint};
  while (tickets_.contains(name)) name.secret = random_();
  const std::int64_t now = loop_.clock().MonotonicNanos();
  Ticket& ticket = tickets_[name];
  ticket.tenant = std::move(request.tenant);
  for (TicketBlock& block : request.blocks) {
    ticket.blocks.emplace_back().what = std::move(block);
  }
  ticket.wanted = std::move(request.consumer);
  ticket.owner = std::move(request.owner);
  ticket.ttl_nanos = request.ttl_nanos;
  ticket.progress_at = now;
  ticket.ends_at = now + request.life_nanos;
  ticket.hold = hold;
  ticket.timer =
      loop_.At(std::min(now + ticket.ttl_nanos, ticket.ends_at), [this, name] { Due(name); });
  by_hold_[hold] = name;
  blocks_ += ticket.blocks.size();
  if (!ticket.tenant.empty()) {
    Share& share = shares_[ticket.tenant];
    ++share.tickets;
    share.blocks += ticket.blocks.size();
  }
  ++counts_.created;
  return name;
}

// Progress only notes the time; the timer looks whether there was some.
void TicketTable::Due(const TicketName& name) {
  const auto found = tickets_.find(name);
  Ticket& ticket = found->second;
  const std::int64_t deadline = std::min(ticket.progress_at + ticket.ttl_nanos, ticket.ends_at);
  if (deadline <= loop_.clock().MonotonicNanos()) return Finish(found, End::kDeadline);
  ticket.timer = loop_.At(deadline, [this, name] { Due(name); });
}

void TicketTable::Progress(Ticket* ticket) { ticket->progress_at = loop_.clock().MonotonicNanos(); }

void TicketTable::Finish(Tickets::iterator found, End why) {
  auto node = tickets_.extract(found);
  Ticket& ticket = node.mapped();
  loop_.Cancel(ticket.timer);
  by_hold_.erase(ticket.hold);
  blocks_ -= ticket.blocks.size();
  if (const auto share = shares_.find(ticket.tenant); share != shares_.end()) {
    share->second.blocks -= ticket.blocks.size();
    if (--share->second.tickets == 0) shares_.erase(share);
  }
  switch (why) {
    case End::kAcknowledged:
      ++counts_.acknowledged;
      break;
    case End::kRevoked:
      ++counts_.revoked;
      break;
    case End::kDeadline:
      ++counts_.expired;
      break;
    case End::kUnsaid:  // Not here.
      break;
  }
  holds_.Release(ticket.hold);
  if (ticket.wait == 0) return;
  auto wait = waits_.extract(ticket.wait);
  loop_.Cancel(wait.mapped().timer);
  wait.mapped().done(TicketEndedError(why));
}

absl::Status TicketTable::Revoke(const TicketName& name) {
  const auto found = tickets_.find(name);
  if (found == tickets_.end()) return NoSuchTicketError();
  Finish(found, End::kRevoked);
  return absl::OkStatus();
}

void TicketTable::RevokeAll(const std::string& owner) {
  if (owner.empty()) return;
  std::vector<TicketName> theirs;
  for (const auto& [name, ticket] : tickets_) {
    if (ticket.owner == owner) theirs.push_back(name);
  }
  // What hears of an end may end others.
  for (const TicketName& name : theirs) Revoke(name).IgnoreError();  // Ended meanwhile.
}

absl::StatusOr<TicketTable::Tickets::iterator> TicketTable::Find(const TicketName& name,
                                                                 const Consumer& consumer) {
  const auto found = tickets_.find(name);
  if (found == tickets_.end()) return NoSuchTicketError();
  const Ticket& ticket = found->second;
  if (!ticket.wanted.empty() && ticket.wanted != consumer.id) {
    return absl::PermissionDeniedError(absl::StrCat("the ticket is not for node ", consumer.id));
  }
  if (!ticket.consumer.id.empty() && !(ticket.consumer == consumer)) {
    return absl::FailedPreconditionError(
        absl::StrCat("the ticket was redeemed by another process, of node ", ticket.consumer.id));
  }
  return found;
}

TicketNews TicketTable::NewsOf(const TicketName& name, std::uint64_t seen) const {
  const Ticket& ticket = tickets_.at(name);
  TicketNews news;
  news.version = ticket.version;
  news.fingerprint = name.fingerprint;
  for (std::uint32_t i = 0; i < ticket.blocks.size(); ++i) {
    const Block& block = ticket.blocks[i];
    if (seen == 0) news.blocks.push_back(block.what);
    if (block.changed_at > seen) {
      news.changed.push_back({i, block.state, block.finished, block.digest});
    }
  }
  return news;
}

TicketTable::WaitId TicketTable::Redeem(const TicketName& name, const Consumer& consumer,
                                        std::uint64_t seen, std::int64_t wait_nanos, News done) {
  const auto found = Find(name, consumer);
  if (!found.ok()) {
    done(found.status());
    return 0;
  }
  Ticket& ticket = (*found)->second;
  if (seen > ticket.version) {
    done(absl::InvalidArgumentError(
        absl::StrCat("version ", seen, " of a ticket that is at ", ticket.version)));
    return 0;
  }
  if (ticket.consumer.id.empty()) {
    ticket.consumer = consumer;
    Progress(&ticket);
  }
  // Whoever asks again does not listen to the last answer any more.
  const WaitId last = std::exchange(ticket.wait, 0);
  if (seen < ticket.version) {
    const TicketNews news = NewsOf(name, seen);
    if (last != 0) Answer(last);
    done(news);
    return 0;
  }
  const WaitId id = next_wait_++;
  Wait& wait = waits_[id];
  wait.name = name;
  wait.seen = seen;
  wait.done = std::move(done);
  wait.timer = loop_.After(std::clamp<std::int64_t>(wait_nanos, 0, options_.wait_nanos_max),
                           [this, id] { Answer(id); });
  ticket.wait = id;
  if (last != 0) Answer(last);
  return id;
}

void TicketTable::Answer(WaitId id) {
  auto node = waits_.extract(id);
  Wait& wait = node.mapped();
  loop_.Cancel(wait.timer);
  Ticket& ticket = tickets_.at(wait.name);
  if (ticket.wait == id) ticket.wait = 0;
  wait.done(NewsOf(wait.name, wait.seen));
}

void TicketTable::CancelWait(WaitId id) {
  auto node = waits_.extract(id);
  if (node.empty()) return;
  loop_.Cancel(node.mapped().timer);
  tickets_.at(node.mapped().name).wait = 0;
}

absl::StatusOr<TicketHolds::HoldId> TicketTable::Read(const TicketName& name,
                                                      const Consumer& consumer, std::uint32_t block,
                                                      const LayerSet& layers) {
  KVMILL_ASSIGN_OR_RETURN(const auto found, Find(name, consumer));
  Ticket& ticket = found->second;
  if (ticket.consumer.id.empty()) {
    return absl::FailedPreconditionError("the ticket was not redeemed yet");
  }
  if (block >= ticket.blocks.size()) {
    return absl::InvalidArgumentError(
        absl::StrCat("block ", block, " of a ticket of ", ticket.blocks.size()));
  }
  Block& of = ticket.blocks[block];
  const LayerSet missing = layers.Without(of.finished);
  if (!missing.empty()) {
    return absl::InvalidArgumentError(absl::StrCat("layer ", missing.end() - 1, " of block ", block,
                                                   " of a ticket: ", of.finished.count(), " of ",
                                                   of.what.layer_count, " are finished"));
  }
  if (of.state == TicketBlockState::kFailed) {
    return absl::InvalidArgumentError(
        absl::StrCat("block ", block, " of a ticket was given up by its writers"));
  }
  if (!of.pulled.HasAll(layers)) {
    of.pulled.Add(layers);
    Progress(&ticket);
  }
  return ticket.hold;
}

absl::Status TicketTable::Acknowledge(const TicketName& name, const Consumer& consumer) {
  KVMILL_ASSIGN_OR_RETURN(const auto found, Find(name, consumer));
  Finish(found, End::kAcknowledged);
  return absl::OkStatus();
}

TicketTable::Ticket* TicketTable::OfHold(TicketHolds::HoldId hold) {
  return &tickets_.at(by_hold_.at(hold));
}

void TicketTable::Changed(Ticket* ticket, Block* block) {
  block->changed_at = ++ticket->version;
  if (ticket->wait != 0) Answer(ticket->wait);
}

void TicketTable::Finished(TicketHolds::HoldId hold, std::uint32_t block, const LayerSet& layers) {
  Ticket* ticket = OfHold(hold);
  Block& of = ticket->blocks[block];
  if (of.finished.HasAll(layers)) return;
  of.finished.Add(layers);
  Progress(ticket);
  Changed(ticket, &of);
}

void TicketTable::Sealed(TicketHolds::HoldId hold, std::uint32_t block, std::uint64_t digest) {
  Ticket* ticket = OfHold(hold);
  Block& of = ticket->blocks[block];
  of.finished = LayerSet::First(of.what.layer_count);
  of.state = TicketBlockState::kSealed;
  of.digest = digest;
  Progress(ticket);
  Changed(ticket, &of);
}

void TicketTable::Failed(TicketHolds::HoldId hold, std::uint32_t block) {
  Ticket* ticket = OfHold(hold);
  Block& of = ticket->blocks[block];
  of.state = TicketBlockState::kFailed;
  Changed(ticket, &of);
}

}  // namespace kvmill
