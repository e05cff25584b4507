// Client: tickets.
#include <atomic>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/client_impl.h"
#include "client/redeem_stream.h"
#include "client/ticket_pages.h"

namespace kvmill {
namespace {

absl::StatusOr<std::uint32_t> MillisOf(absl::string_view what, absl::Duration duration) {
  const std::int64_t millis = absl::ToInt64Milliseconds(duration);
  if (millis > 0 && millis <= std::int64_t{1} << 31) return static_cast<std::uint32_t>(millis);
  return absl::InvalidArgumentError(absl::StrCat(what, " of a ticket ",
                                                 absl::FormatDuration(duration),
                                                 ": want at least 1 ms, and days at most"));
}

}  // namespace

void Client::CreateTicketAsync(const ClientNamespace& ns, absl::Span<const PromisedBlock> blocks,
                               const TicketOptions& options, CallOptions call,
                               Done<std::string> done) {
  if (absl::Status s = impl_->CheckProcess(); !s.ok()) return done(s);
  v1::CreateTicketRequest request;
  request.mutable_namespace_()->set_fingerprint(std::string(AsBytes(ns.fingerprint)));
  request.set_consumer(options.consumer);
  const absl::StatusOr<std::uint32_t> ttl = MillisOf("ttl", options.ttl);
  const absl::StatusOr<std::uint32_t> life = MillisOf("life", options.life);
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
                               RedeemUpdate update, CallOptions call, Done<RedeemResult> done) {
  if (absl::Status s = impl_->CheckProcess(); !s.ok()) return done(s);
  v1::RedeemTicketRequest request;
  request.set_ticket(std::string(ticket));
  request.mutable_namespace_()->set_fingerprint(std::string(AsBytes(ns.fingerprint)));
  const Deadline deadline = impl_->DeadlineOf(call);
  // An attempt of which something was told is the last one: its NOT_FOUND is the ticket's.
  const auto told = std::make_shared<std::atomic<bool>>(false);
  const Done<RedeemResult> at_once = done;
  RedeemUpdate tell = [told, update = std::move(update)](absl::Span<const RedeemedBlock> blocks,
                                                         absl::Span<const std::uint32_t> changed) {
    told->store(true, std::memory_order_relaxed);
    if (update != nullptr) update(blocks, changed);
  };
  impl_->WithNamespace<RedeemResult>(
      ns, deadline,
      [impl = impl_.get(), request, tell = std::move(tell), told, at_once,
       deadline](Done<RedeemResult> attempt_done) {
        const auto self = std::make_shared<RedeemStream*>(nullptr);
        auto* const stream = new RedeemStream(
            impl->connection(), request, tell,
            [impl, ticket_bytes = request.ticket(), self] {
              impl->RedeemEnds(ticket_bytes, *self);
            },
            [told, at_once, attempt_done](absl::StatusOr<RedeemResult> result) {
              (told->load(std::memory_order_relaxed) ? at_once : attempt_done)(std::move(result));
            });
        *self = stream;
        impl->Redeems(request.ticket(), stream);
        stream->Start(deadline);
      },
      std::move(done));
}

void Client::CancelRedeem(absl::string_view ticket) {
  if (impl_->CheckProcess().ok()) impl_->CancelRedeems(std::string(ticket));
}

void Client::Impl::RedeemEnds(const std::string& ticket, const RedeemStream* stream) {
  MutexLock lock(mu_);
  const auto [begin, end] = redeems_.equal_range(ticket);
  for (auto it = begin; it != end; ++it) {
    if (it->second != stream) continue;
    redeems_.erase(it);
    return;
  }
}

void Client::Impl::CancelRedeems(const std::string& ticket) {
  MutexLock lock(mu_);
  const auto [begin, end] = redeems_.equal_range(ticket);
  for (auto it = begin; it != end; ++it) it->second->Cancel();
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
