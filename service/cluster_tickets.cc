#include "service/cluster_tickets.h"

#include <sys/random.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "storage/core/check.h"

namespace kvmill {
namespace {

TicketSecret RandomSecret() {
  TicketSecret secret{};
  // Whoever of the tenant guesses it has the blocks: no other source will do.
  KVMILL_CHECK(getrandom(secret.data(), secret.size(), 0) == static_cast<ssize_t>(secret.size()));
  return secret;
}

}  // namespace

ClusterTickets::ClusterTickets(Loop& loop, TieredStore& store, GrpcPeers& peers,
                               PeerClients& clients, PeerHealth& health, const Options& options)
    : loop_(loop),
      store_(store),
      options_(options),
      mail_(std::make_shared<LoopMail>(loop)),
      workers_(2, "tickets"),
      holds_(loop, store, workers_, options.held_bytes_max, options.shared),
      table_(loop, holds_, &RandomSecret, options.table),
      copies_(loop, store, workers_, options.copied_bytes_max, options.shared),
      pulls_(loop, peers, clients, copies_, workers_, options.self),
      redeem_(loop, pulls_, copies_, health,
              static_cast<std::uint64_t>(loop.clock().MonotonicNanos()), options.redeem) {
  PublishStats();
}

ClusterTickets::~ClusterTickets() {
  mail_->Close();
  loop_.Cancel(stats_timer_);
}

void ClusterTickets::PublishStats() {
  constexpr std::int64_t kEveryNanos = 100'000'000;
  stats_timer_ = loop_.After(kEveryNanos, [this] { PublishStats(); });
  MutexLock lock(stats_mu_);
  stats_ = {.made = table_.counts(),
            .redeemed = redeem_.counts(),
            .pulled = pulls_.counts(),
            .tickets = table_.size(),
            .held_bytes = holds_.bytes(),
            .redeeming = redeem_.running(),
            .copy_bytes = copies_.bytes()};
}

void ClusterTickets::SetMembers(const std::vector<Member>& members, bool fresh) {
  fresh_ = fresh;
  if (members == members_) return;
  members_ = members;
  redeem_.SetMembers(members);
}

// --- For engines ---

absl::Status ClusterTickets::CheckConsumer(const std::string& consumer) const {
  // Who is not known now may be by the time when the ticket is redeemed.
  if (consumer.empty() || !fresh_) return absl::OkStatus();
  constexpr std::size_t kNamesMax = 16;
  std::string names;
  for (std::size_t i = 0; i < members_.size(); ++i) {
    if (members_[i].id == consumer) return absl::OkStatus();
    if (i < kNamesMax) absl::StrAppend(&names, i == 0 ? "" : ", ", members_[i].id);
  }
  if (members_.size() > kNamesMax) {
    absl::StrAppend(&names, " and ", members_.size() - kNamesMax, " more");
  }
  return absl::InvalidArgumentError(absl::StrCat("consumer \"", consumer,
                                                 "\" of a ticket is no node of the cluster: there "
                                                 "are ",
                                                 names));
}

std::string ClusterTickets::TenantOf(const Fingerprint& fingerprint) const {
  const auto space = options_.shared.Find(store_, fingerprint);
  return space.ok() ? ShareOf(*space) : "";
}

void ClusterTickets::Create(TicketTable::Request request, std::function<bool()> lives,
                            std::function<void(absl::StatusOr<std::string>)> done) {
  mail_->Post([this, request = std::move(request), lives = std::move(lives),
               done = std::move(done)]() mutable {
    if (!stopped_.ok()) return done(stopped_);
    if (absl::Status s = CheckConsumer(request.consumer); !s.ok()) return done(s);
    TicketBearer bearer;
    bearer.producer = options_.self.id;
    bearer.incarnation = options_.self.incarnation;
    bearer.fingerprint = request.fingerprint;
    request.tenant = TenantOf(request.fingerprint);
    const absl::StatusOr<TicketName> name = table_.Create(std::move(request));
    if (!name.ok()) return done(name.status());
    bearer.secret = name->secret;
    // It may have ended before there was a ticket to revoke.
    if (!lives()) {
      table_.Revoke(*name).IgnoreError();  // It is there.
      return done(absl::AbortedError("the session has ended"));
    }
    holds_.WhenHeld([done = std::move(done), bearer] { done(Serialize(bearer)); });
  });
}

absl::Status ClusterTickets::CheckMadeHere(const TicketBearer& ticket) const {
  if (ticket.incarnation == options_.self.incarnation) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat("the ticket was made by another process, of node \"", ticket.producer,
                   "\": it is revoked there"));
}

void ClusterTickets::Revoke(const TicketBearer& ticket, std::function<void(absl::Status)> done) {
  mail_->Post([this, ticket, done = std::move(done)] {
    const absl::Status here = CheckMadeHere(ticket);
    done(here.ok() ? table_.Revoke(ticket.name()) : here);
  });
}

void ClusterTickets::SessionEnded(const std::string& session) {
  mail_->Post([this, session] { table_.RevokeAll(session); });
}

ClusterTickets::RedeemingPtr ClusterTickets::Redeem(const TicketBearer& ticket, std::int64_t nanos,
                                                    TicketRedeem::Update update,
                                                    TicketRedeem::Done done) {
  auto redeeming = std::make_shared<Redeeming>();
  redeeming->done = std::move(done);
  const std::int64_t deadline_nanos = loop_.clock().MonotonicNanos() + nanos;
  mail_->Post([this, redeeming, ticket, deadline_nanos, update = std::move(update)]() mutable {
    Start(redeeming, ticket, deadline_nanos, std::move(update));
  });
  return redeeming;
}

void ClusterTickets::Start(const RedeemingPtr& redeeming, const TicketBearer& ticket,
                           std::int64_t deadline_nanos, TicketRedeem::Update update) {
  if (redeeming->over) return;  // Cancelled.
  redeeming_[redeeming.get()] = redeeming;
  if (!stopped_.ok()) return End(redeeming, {stopped_, {}});
  const auto producer = std::find_if(members_.begin(), members_.end(), [&](const Member& member) {
    return member.id == ticket.producer && member.incarnation == ticket.incarnation;
  });
  if (producer == members_.end()) {
    return End(redeeming, {absl::UnavailableError(absl::StrCat(
                               "node \"", ticket.producer,
                               "\", which made the ticket, is no member of the cluster, or was "
                               "restarted since")),
                           {}});
  }
  TicketRedeem::Request request;
  request.name = ticket.name();
  request.tenant = TenantOf(ticket.fingerprint);
  // What else it says of itself may change.
  request.producer = {
      .id = producer->id, .incarnation = producer->incarnation, .address = producer->address};
  request.deadline_nanos = deadline_nanos;
  request.here = producer->id == options_.self.id;
  redeeming->caller = redeem_.Start(std::move(request), std::move(update),
                                    [this, redeeming](const TicketRedeem::Outcome& outcome) {
                                      redeeming->caller = 0;
                                      End(redeeming, outcome);
                                    });
}

void ClusterTickets::End(const RedeemingPtr& redeeming, const TicketRedeem::Outcome& outcome) {
  redeeming_.erase(redeeming.get());
  if (std::exchange(redeeming->over, true)) return;
  const TicketRedeem::Done done = std::move(redeeming->done);
  done(outcome);
}

void ClusterTickets::Cancel(const RedeemingPtr& redeeming) {
  mail_->Post([this, redeeming] {
    if (std::exchange(redeeming->over, true)) return;
    redeeming_.erase(redeeming.get());
    redeeming->done = nullptr;
    if (redeeming->caller != 0) redeem_.Cancel(std::exchange(redeeming->caller, 0));
  });
}

// --- For consumers ---

TicketName ClusterTickets::NameOf(const TicketHolder& holder) const {
  if (holder.fingerprint.has_value()) return {holder.secret, *holder.fingerprint};
  // A node of an earlier version has tickets of the daemons' own tenant.
  const std::optional<Fingerprint> of = table_.NamespaceOf(holder.secret);
  if (of.has_value() && store_.FindNamespace(kDefaultTenant, *of).ok()) return {holder.secret, *of};
  return {holder.secret, {}};
}

void ClusterTickets::Ask(const TicketHolder& holder, std::uint64_t seen, std::int64_t wait_nanos,
                         std::function<void(absl::StatusOr<TicketNews>)> done) {
  mail_->Post([this, holder, seen, wait_nanos, done = std::move(done)] {
    table_.Redeem(NameOf(holder), holder.consumer, seen, wait_nanos, done);
  });
}

std::shared_ptr<const void> ClusterTickets::BeginRead(const std::string& consumer) {
  std::weak_ptr<std::atomic<std::size_t>>& known = reads_[consumer];
  std::shared_ptr<std::atomic<std::size_t>> count = known.lock();
  if (count == nullptr) {
    std::erase_if(reads_, [](const auto& entry) { return entry.second.expired(); });
    count = std::make_shared<std::atomic<std::size_t>>(0);  // Of the reads that it counts.
    reads_[consumer] = count;
  }
  if (count->load(std::memory_order_relaxed) >= kReadsMax) return nullptr;
  count->fetch_add(1, std::memory_order_relaxed);
  return std::shared_ptr<const void>(
      count.get(), [count](const void*) { count->fetch_sub(1, std::memory_order_relaxed); });
}

void ClusterTickets::Read(const TicketHolder& holder, std::vector<TicketPiece> pieces,
                          std::function<void(absl::StatusOr<Pages>)> done) {
  mail_->Post([this, holder, pieces = std::move(pieces), done = std::move(done)] {
    Pages read;
    for (const TicketPiece& piece : pieces) {
      const absl::StatusOr<TicketHolds::HoldId> hold =
          table_.Read(NameOf(holder), holder.consumer, piece.block, piece.layers);
      if (!hold.ok()) return done(hold.status());
      const absl::Status found = holds_.Read(*hold, piece.block, piece.layers, &read.pages);
      if (!found.ok()) return done(found);
    }
    read.reading = BeginRead(holder.consumer.id);
    if (read.reading == nullptr) {
      return done(absl::ResourceExhaustedError(absl::StrCat("node \"", holder.consumer.id,
                                                            "\" reads pages of tickets ", kReadsMax,
                                                            " times at once: no more than that")));
    }
    done(std::move(read));
  });
}

void ClusterTickets::Acknowledge(const TicketHolder& holder,
                                 std::function<void(absl::Status)> done) {
  mail_->Post([this, holder, done = std::move(done)] {
    done(table_.Acknowledge(NameOf(holder), holder.consumer));
  });
}

void ClusterTickets::Stop() {
  mail_->Post([this] {
    stopped_ = absl::UnavailableError("the daemon stops");
    while (!redeeming_.empty()) {
      const RedeemingPtr redeeming = redeeming_.begin()->second;
      if (redeeming->caller != 0) redeem_.Cancel(std::exchange(redeeming->caller, 0));
      End(redeeming, {stopped_, {}});
    }
  });
}

}  // namespace kvmill
