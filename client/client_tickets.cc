// Client: tickets.
#include <atomic>
#include <memory>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/client_impl.h"
#include "client/redeem_stream.h"
#include "client/ticket_pages.h"

namespace kvmill {
namespace {

absl::StatusOr<std::uint32_t> MillisOf(absl::string_view what, absl::Duration duration,
                                       absl::Duration most) {
  if (duration >= absl::Milliseconds(1) && duration <= most) {
    return static_cast<std::uint32_t>(absl::ToInt64Milliseconds(duration));
  }
  return absl::InvalidArgumentError(absl::StrCat(what, " ", absl::FormatDuration(duration),
                                                 " of a ticket: want 1 ms to ",
                                                 absl::FormatDuration(most)));
}

}  // namespace

absl::string_view NameOf(TicketMiss miss) {
  switch (miss) {
    case TicketMiss::kNone:
      return "not missed";
    case TicketMiss::kGivenUp:
      return "given up";
    case TicketMiss::kDamaged:
      return "damaged";
    case TicketMiss::kNoRoom:
      return "no room";
    case TicketMiss::kProducerGone:
      return "producer gone";
    case TicketMiss::kRevoked:
      return "revoked";
    case TicketMiss::kDeadline:
      return "out of time";
    case TicketMiss::kEnded:
      return "ticket ended";
    case TicketMiss::kRefused:
      return "refused";
    case TicketMiss::kCallEnded:
      return "call ended";
  }
  return "unknown";
}

void Client::CreateTicketAsync(const ClientNamespace& ns, absl::Span<const PromisedBlock> blocks,
                               const TicketOptions& options, CallOptions call,
                               Done<std::string> done) {
  if (absl::Status s = impl_->CheckProcess(); !s.ok()) return done(s);
  v1::CreateTicketRequest request;
  request.mutable_namespace_()->set_fingerprint(std::string(AsBytes(ns.fingerprint)));
  request.set_consumer(options.consumer);
  const absl::StatusOr<std::uint32_t> ttl = MillisOf("ttl", options.ttl, kTicketTtlMax);
  const absl::StatusOr<std::uint32_t> life = MillisOf("life", options.life, kTicketLifeMax);
  if (!ttl.ok()) return done(ttl.status());
  if (!life.ok()) return done(life.status());
  request.set_ttl_ms(*ttl);
  request.set_life_ms(*life);
  for (const PromisedBlock& block : blocks) {
    v1::PromisedBlock* to = request.add_blocks();
    to->set_key(std::string(block.key.view()));
    to->set_parent(std::string(block.parent.view()));
    to->set_token_count(block.token_count);
    to->set_block_index(block.block_index);
  }
  const auto shared = std::make_shared<const v1::CreateTicketRequest>(std::move(request));
  const Deadline deadline = impl_->DeadlineOf(call);
  impl_->WithNamespace<std::string>(
      ns, deadline,
      [impl = impl_.get(), shared, deadline](Done<std::string> attempt_done) {
        impl->session().Ensure(
            deadline, [impl, shared, deadline, attempt_done](absl::StatusOr<SessionPtr> session) {
              if (!session.ok()) return attempt_done(session.status());
              v1::CreateTicketRequest mine = *shared;
              mine.set_session_id((*session)->id);
              impl->Call<v1::CreateTicketReply, std::string>(
                  deadline,
                  [mine = std::move(mine)](Channel& channel, auto* context, auto* queue) {
                    return channel.ticket->PrepareAsyncCreate(context, mine, queue);
                  },
                  [](const v1::CreateTicketReply& reply) { return reply.ticket(); },
                  [impl, session = *session, attempt_done](absl::StatusOr<std::string> ticket) {
                    // The next call opens another one.
                    if (absl::IsAborted(ticket.status())) impl->session().Ended(session);
                    attempt_done(std::move(ticket));
                  });
            });
      },
      std::move(done));
}

void Client::RevokeTicketAsync(absl::string_view ticket, CallOptions call,
                               std::function<void(absl::Status)> done) {
  if (absl::Status s = impl_->CheckProcess(); !s.ok()) return done(s);
  v1::RevokeTicketRequest request;
  request.set_ticket(std::string(ticket));
  impl_->Call<v1::RevokeTicketReply, bool>(
      impl_->DeadlineOf(call),
      [request = std::move(request)](Channel& channel, auto* context, auto* queue) {
        return channel.ticket->PrepareAsyncRevoke(context, request, queue);
      },
      [](const v1::RevokeTicketReply&) { return true; },
      [done = std::move(done)](const absl::StatusOr<bool>& revoked) { done(revoked.status()); });
}

void Client::RedeemTicketAsync(const ClientNamespace& ns, absl::string_view ticket,
                               RedeemUpdate update, CallOptions call,
                               std::function<void(RedeemResult)> done) {
  if (absl::Status s = impl_->CheckProcess(); !s.ok()) return done({s, {}, 0});
  v1::RedeemTicketRequest request;
  request.set_ticket(std::string(ticket));
  request.mutable_namespace_()->set_fingerprint(std::string(AsBytes(ns.fingerprint)));
  const Deadline deadline = impl_->DeadlineOf(call);
  const auto redeeming = std::make_shared<Redeeming>();
  impl_->RedeemBegins(request.ticket(), redeeming);
  const auto finish = [impl = impl_.get(), bytes = request.ticket(), redeeming,
                       done = std::move(done)](RedeemResult result) {
    impl->RedeemEnds(bytes, redeeming);
    done(std::move(result));
  };
  // A call of which something was told is the last one: its NOT_FOUND is the ticket's.
  const auto told = std::make_shared<std::atomic<bool>>(false);
  RedeemUpdate tell = [told, update = std::move(update)](absl::Span<const RedeemedBlock> blocks,
                                                         absl::Span<const std::uint32_t> changed) {
    told->store(true, std::memory_order_relaxed);
    if (update != nullptr) update(blocks, changed);
  };
  impl_->WithNamespace<RedeemResult>(
      ns, deadline,
      [impl = impl_.get(), request, tell = std::move(tell), told, redeeming, finish,
       deadline](const Done<RedeemResult>& attempt_done) {
        auto* const stream =
            new RedeemStream(impl->connection(), request, tell, redeeming,
                             [told, finish, attempt_done](RedeemResult result) {
                               if (result.status.ok() || told->load(std::memory_order_relaxed)) {
                                 finish(std::move(result));
                               } else {
                                 attempt_done(result.status);
                               }
                             });
        stream->Start(deadline);
      },
      [redeeming, finish](const absl::StatusOr<RedeemResult>& failed) {
        // Between two calls nobody else hears of it.
        finish({redeeming->cancelled() ? absl::CancelledError("the redeem was cancelled")
                                       : failed.status(),
                {},
                0});
      });
}

void Client::CancelRedeem(absl::string_view ticket) {
  if (impl_->CheckProcess().ok()) impl_->CancelRedeems(std::string(ticket));
}

void Client::Impl::RedeemEnds(const std::string& ticket, const RedeemingPtr& redeeming) {
  MutexLock lock(mu_);
  const auto [begin, end] = redeems_.equal_range(ticket);
  for (auto it = begin; it != end; ++it) {
    if (it->second != redeeming) continue;
    redeems_.erase(it);
    return;
  }
}

void Client::Impl::CancelRedeems(const std::string& ticket) {
  std::vector<RedeemingPtr> theirs;
  {
    MutexLock lock(mu_);
    const auto [begin, end] = redeems_.equal_range(ticket);
    for (auto it = begin; it != end; ++it) theirs.push_back(it->second);
  }
  for (const RedeemingPtr& redeeming : theirs) redeeming->Cancel();
}

void Client::ReadTicketPagesAsync(const TicketPagesRequest& request, TicketPageSink& sink,
                                  CallOptions call, std::function<void(absl::Status)> done) {
  if (absl::Status s = impl_->CheckProcess(); !s.ok()) return done(s);
  const Deadline deadline = impl_->DeadlineOf(call);
  impl_->ChoosePath(
      deadline,
      [impl = impl_.get(), request, &sink, deadline, done](const ConnectionPtr& connection) {
        StartDataTicketRead(*impl->link(), connection, request, sink, deadline, done);
      },
      [impl = impl_.get(), request, &sink, deadline, done] {
        StartTicketReadStream(impl->connection(), request, sink, deadline, done);
      },
      done);
}

}  // namespace kvmill
