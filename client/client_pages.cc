// The engine's memory, and stores from its pages.
#include <utility>

#include "client/client_impl.h"
#include "client/page_stores.h"

namespace kvmill {
void Client::Impl::Unregister(const SessionPtr& session, std::uint64_t registration,
                              Deadline deadline, std::function<void(absl::Status)> done) {
  pages().Unregistering(registration);
  v1::UnregisterMemoryRequest request;
  request.set_session_id(session->id);
  request.set_registration(registration);
  Call<v1::UnregisterMemoryReply, int>(
      deadline,
      [request = std::move(request)](Channel& channel, auto* context, auto* queue) {
        return channel.engine->PrepareAsyncUnregisterMemory(context, request, queue);
      },
      [](const v1::UnregisterMemoryReply&) { return absl::StatusOr<int>(0); },
      [this, registration, done = std::move(done)](const absl::StatusOr<int>& result) {
        if (result.ok()) pages().Unregistered(registration);
        done(result.status());
      });
}

void Client::Impl::Share(const std::shared_ptr<RegisteredMemory>& memory, Deadline deadline,
                         Done<std::uint64_t> done) {
  pages().Register(memory, deadline,
                   [this, memory, deadline, done = std::move(done)](const absl::Status& s) {
                     if (s.ok()) return done(memory->registration);
                     Unregister(memory->session, memory->registration, deadline,
                                [s, done](const absl::Status&) { done(s); });
                   });
}

void Client::Impl::RegisterMemory(const ClientNamespace& ns,
                                  const std::shared_ptr<RegisteredMemory>& memory,
                                  Deadline deadline, Done<std::uint64_t> done) {
  v1::RegisterMemoryRequest request;
  request.mutable_namespace_()->set_fingerprint(std::string(AsBytes(ns.fingerprint)));
  ToProto(memory->geometry, request.mutable_geometry());
  WithNamespace<std::uint64_t>(
      ns, deadline,
      [this, request, memory, deadline](Done<std::uint64_t> attempt_done) {
        session().Ensure(deadline, [this, request, memory, deadline,
                                    attempt_done](absl::StatusOr<SessionPtr> session) {
          if (!session.ok()) return attempt_done(session.status());
          memory->session = *session;
          v1::RegisterMemoryRequest mine = request;
          mine.set_session_id((*session)->id);
          Call<v1::RegisterMemoryReply, std::uint64_t>(
              deadline,
              [mine = std::move(mine)](Channel& channel, auto* context, auto* queue) {
                return channel.engine->PrepareAsyncRegisterMemory(context, mine, queue);
              },
              [](const v1::RegisterMemoryReply& reply) { return reply.registration(); },
              [this, memory, deadline, attempt_done](absl::StatusOr<std::uint64_t> registration) {
                if (absl::IsAborted(registration.status())) this->session().Ended(memory->session);
                if (!registration.ok()) return attempt_done(std::move(registration));
                memory->registration = *registration;
                Share(memory, deadline, attempt_done);
              });
        });
      },
      std::move(done));
}

void Client::RegisterMemoryAsync(const ClientNamespace& ns, const EngineGeometry& geometry,
                                 CallOptions call, Done<std::uint64_t> done) {
  absl::Status checked = impl_->CheckProcess();
  if (checked.ok()) checked = CheckGeometry(ns.spec, geometry);
  if (!checked.ok()) return done(checked);
  const Deadline deadline = impl_->DeadlineOf(call);
  if (impl_->standing() != nullptr) {
    return impl_->standing()->Add(ns, geometry, deadline, std::move(done));
  }
  const auto memory = std::make_shared<RegisteredMemory>();
  memory->fingerprint = ns.fingerprint;
  memory->geometry = geometry;
  impl_->RegisterMemory(ns, memory, deadline, std::move(done));
}

void Client::UnregisterMemoryAsync(std::uint64_t registration, CallOptions call,
                                   std::function<void(absl::Status)> done) {
  if (absl::Status s = impl_->CheckProcess(); !s.ok()) return done(s);
  const Deadline deadline = impl_->DeadlineOf(call);
  if (impl_->standing() != nullptr) return impl_->RemoveStanding(registration, deadline, done);
  impl_->session().Ensure(deadline, [impl = impl_.get(), registration, deadline,
                                     done = std::move(done)](absl::StatusOr<SessionPtr> session) {
    if (!session.ok()) return done(session.status());
    impl->Unregister(*session, registration, deadline, done);
  });
}

void Client::Impl::RemoveStanding(std::uint64_t number, Deadline deadline,
                                  std::function<void(absl::Status)> done) {
  standing_->Remove(number, [this, number, deadline,
                             done = std::move(done)](absl::StatusOr<RegisteredMemoryPtr> now) {
    if (!now.ok()) return done(now.status());
    // What is left are stores of sessions that have ended, perhaps this one, whose ends are told
    // when nobody reads.
    const auto rest = [this, number, deadline, done](const RegisteredMemoryPtr& unregistered) {
      pages().CancelStanding(number, unregistered, deadline,
                             [this, number, done](const absl::Status& status) {
                               if (status.ok()) standing_->Forget(number);
                               done(status);
                             });
    };
    if (*now == nullptr) return rest(nullptr);
    Unregister((*now)->session, (*now)->registration, deadline,
               [this, memory = *now, rest, done](const absl::Status& status) {
                 if (status.ok()) return rest(memory);
                 if (absl::IsDeadlineExceeded(status)) return done(status);  // May be tried again.
                 // The session, or the daemon, has gone.
                 if (absl::IsNotFound(status) || away_->IsAway(status)) return rest(nullptr);
                 done(status);
               });
  });
}

void Client::StorePagesAsync(const ClientNamespace& ns, std::uint64_t registration,
                             absl::Span<const PageBlock> blocks, const PageStoreOptions& options,
                             CallOptions call, Done<StoreResult> done) {
  if (absl::Status s = impl_->CheckProcess(); !s.ok()) return done(s);
  const Deadline deadline = impl_->DeadlineOf(call);
  if (impl_->standing() == nullptr) {
    return impl_->pages().Start(ns, registration, nullptr, blocks, options, deadline,
                                std::move(done));
  }
  impl_->StoreStanding(ns, registration, blocks, options, deadline, std::move(done));
}

// A store never waits for its memory to be registered: what the engine says meanwhile, that values
// are ready or that pages get another use, would find no store.
void Client::Impl::StoreStanding(const ClientNamespace& ns, std::uint64_t number,
                                 absl::Span<const PageBlock> blocks,
                                 const PageStoreOptions& options, Deadline deadline,
                                 Done<StoreResult> done) {
  const auto end = [this, count = blocks.size(), durable = options.wait_durable,
                    done = std::move(done)](absl::StatusOr<StoreResult> result) {
    // After DEADLINE_EXCEEDED somebody may be reading.
    const bool lost = away_->IsAway(result.status()) && !absl::IsDeadlineExceeded(result.status());
    if (result.ok() && !durable) DropLostBlocks(*away_, &*result);
    if (lost && !durable) {
      const absl::Status why = result.status();
      result = DroppedStore(count, why);
    }
    done(std::move(result));
  };
  absl::StatusOr<RegisteredMemoryPtr> memory = standing_->Find(number);
  if (!memory.ok()) {
    connection_->Post([end, status = memory.status()] { end(status); });
    return;
  }
  pages().Start(ns, (*memory)->registration, *memory, blocks, options, deadline,
                [this, memory = *memory, end](absl::StatusOr<StoreResult> result) {
                  bool unknown = false;
                  // Of another session or daemon: as if none had been there.
                  const auto look = [&unknown](absl::Status status) {
                    if (!absl::IsNotFound(status) && !absl::IsAborted(status)) return status;
                    unknown = true;
                    return absl::AbortedError(status.message());
                  };
                  if (result.ok()) {
                    for (StoreBlockResult& block : result->blocks) {
                      block.status = look(std::move(block.status));
                    }
                  } else {
                    result = look(result.status());
                  }
                  if (unknown) {
                    standing_->Lost(memory);
                    standing_->Restore();
                  }
                  end(std::move(result));
                });
}

void Client::ReadyPages(std::uint64_t request, std::uint32_t layers) {
  if (impl_->CheckProcess().ok()) impl_->pages().Ready(request, layers);
}

void Client::FlushPagesAsync(std::uint64_t request, CallOptions call,
                             std::function<void(absl::Status)> done) {
  if (absl::Status s = impl_->CheckProcess(); !s.ok()) return done(s);
  impl_->pages().FlushRequest(request, impl_->DeadlineOf(call), std::move(done));
}

void Client::FlushPagesAsync(absl::Span<const BlockKey> keys, CallOptions call,
                             std::function<void(absl::Status)> done) {
  if (absl::Status s = impl_->CheckProcess(); !s.ok()) return done(s);
  impl_->pages().FlushBlocks(keys, impl_->DeadlineOf(call), std::move(done));
}

void Client::CancelPagesAsync(std::uint64_t request, CallOptions call,
                              std::function<void(absl::Status)> done) {
  if (absl::Status s = impl_->CheckProcess(); !s.ok()) return done(s);
  impl_->pages().Cancel(request, impl_->DeadlineOf(call), std::move(done));
}

}  // namespace kvmill
