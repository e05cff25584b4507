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

void Client::RegisterMemoryAsync(const ClientNamespace& ns, const EngineGeometry& geometry,
                                 CallOptions call, Done<std::uint64_t> done) {
  absl::Status checked = impl_->CheckProcess();
  if (checked.ok()) checked = CheckGeometry(ns.spec, geometry);
  if (!checked.ok()) return done(checked);
  const Deadline deadline = impl_->DeadlineOf(call);
  v1::RegisterMemoryRequest request;
  request.mutable_namespace_()->set_fingerprint(std::string(AsBytes(ns.fingerprint)));
  ToProto(geometry, request.mutable_geometry());
  const auto memory = std::make_shared<RegisteredMemory>();
  memory->fingerprint = ns.fingerprint;
  memory->geometry = geometry;
  impl_->WithNamespace<std::uint64_t>(
      ns, deadline,
      [impl = impl_.get(), request, memory, deadline](Done<std::uint64_t> attempt_done) {
        impl->session().Ensure(deadline, [impl, request, memory, deadline,
                                          attempt_done](absl::StatusOr<SessionPtr> session) {
          if (!session.ok()) return attempt_done(session.status());
          memory->session = *session;
          v1::RegisterMemoryRequest mine = request;
          mine.set_session_id((*session)->id);
          impl->Call<v1::RegisterMemoryReply, std::uint64_t>(
              deadline,
              [mine = std::move(mine)](Channel& channel, auto* context, auto* queue) {
                return channel.engine->PrepareAsyncRegisterMemory(context, mine, queue);
              },
              [](const v1::RegisterMemoryReply& reply) { return reply.registration(); },
              [impl, memory, deadline, attempt_done](absl::StatusOr<std::uint64_t> registration) {
                if (!registration.ok()) return attempt_done(std::move(registration));
                memory->registration = *registration;
                impl->Share(memory, deadline, attempt_done);
              });
        });
      },
      std::move(done));
}

void Client::UnregisterMemoryAsync(std::uint64_t registration, CallOptions call,
                                   std::function<void(absl::Status)> done) {
  if (absl::Status s = impl_->CheckProcess(); !s.ok()) return done(s);
  const Deadline deadline = impl_->DeadlineOf(call);
  impl_->session().Ensure(deadline, [impl = impl_.get(), registration, deadline,
                                     done = std::move(done)](absl::StatusOr<SessionPtr> session) {
    if (!session.ok()) return done(session.status());
    impl->Unregister(*session, registration, deadline, done);
  });
}

void Client::StorePagesAsync(const ClientNamespace& ns, std::uint64_t registration,
                             absl::Span<const PageBlock> blocks, const PageStoreOptions& options,
                             CallOptions call, Done<StoreResult> done) {
  if (absl::Status s = impl_->CheckProcess(); !s.ok()) return done(s);
  impl_->pages().Start(ns, registration, blocks, options, impl_->DeadlineOf(call), std::move(done));
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
