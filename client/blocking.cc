// The blocking forms of Client's calls.
#include <optional>
#include <utility>

#include "client/client_impl.h"
#include "client/mapped_blocks.h"
#include "storage/core/mutex.h"

namespace kvmill {
namespace {

// Runs `start(done)` and waits for `done`. The call's own deadline bounds the wait.
template <typename T, typename StartFn>
absl::StatusOr<T> Wait(StartFn start) {
  Mutex mu;
  CondVar changed;
  std::optional<absl::StatusOr<T>> result;
  start([&](absl::StatusOr<T> r) {
    MutexLock lock(mu);
    result = std::move(r);
    changed.NotifyAll();
  });
  MutexLock lock(mu);
  while (!result.has_value()) changed.Wait(mu);
  return *std::move(result);
}

// The same for a call that gives a status alone.
template <typename StartFn>
absl::Status WaitForStatus(StartFn start) {
  return Wait<int>([&](auto done) {
           start([done](const absl::Status& status) {
             done(status.ok() ? absl::StatusOr<int>(0) : status);
           });
         })
      .status();
}

}  // namespace

absl::StatusOr<ClientNamespace> Client::OpenNamespaceOrFallback(absl::string_view name,
                                                                const NamespaceSpec& spec,
                                                                CallOptions call) {
  return Wait<ClientNamespace>(
      [&](auto done) { OpenNamespaceOrFallbackAsync(name, spec, call, std::move(done)); });
}

absl::StatusOr<ClientNamespace> Client::OpenNamespace(absl::string_view name,
                                                      const NamespaceSpec& spec, CallOptions call) {
  return Wait<ClientNamespace>(
      [&](auto done) { OpenNamespaceAsync(name, spec, call, std::move(done)); });
}

absl::StatusOr<ClientNamespace> Client::FindNamespace(absl::string_view name, CallOptions call) {
  return Wait<ClientNamespace>([&](auto done) { FindNamespaceAsync(name, call, std::move(done)); });
}

absl::StatusOr<LookupResult> Client::Lookup(const ClientNamespace& ns,
                                            absl::Span<const BlockKey> keys,
                                            absl::Span<const TailCandidate> tails,
                                            CallOptions call) {
  return Wait<LookupResult>(
      [&](auto done) { LookupAsync(ns, keys, tails, call, std::move(done)); });
}

absl::StatusOr<StoreResult> Client::Store(const ClientNamespace& ns,
                                          absl::Span<const StoreBlock> blocks,
                                          const StoreOptions& options, CallOptions call) {
  return Wait<StoreResult>(
      [&](auto done) { StoreAsync(ns, blocks, options, call, std::move(done)); });
}

absl::StatusOr<FetchResult> Client::Fetch(const ClientNamespace& ns,
                                          absl::Span<const BlockKey> keys, FetchSink& sink,
                                          CallOptions call) {
  WaitingCaller caller;
  absl::StatusOr<FetchResult> result;
  impl_->Fetch(ns, keys, sink, call, &caller, [&](absl::StatusOr<FetchResult> fetched) {
    result = std::move(fetched);
    caller.End();
  });
  caller.Work();
  return result;
}

absl::StatusOr<Client::MappedPtr> Client::Map(const ClientNamespace& ns,
                                              absl::Span<const BlockKey> keys,
                                              const MapOptions& options, CallOptions call) {
  return Wait<MappedPtr>([&](auto done) { MapAsync(ns, keys, options, call, std::move(done)); });
}

absl::Status Client::Renew(MappedBlocks& mapped, absl::Duration lease, CallOptions call) {
  return WaitForStatus([&](auto done) { RenewAsync(mapped, lease, call, std::move(done)); });
}

absl::StatusOr<std::uint64_t> Client::Touch(const ClientNamespace& ns,
                                            absl::Span<const BlockKey> keys, CallOptions call) {
  return Wait<std::uint64_t>([&](auto done) { TouchAsync(ns, keys, call, std::move(done)); });
}

absl::StatusOr<std::uint64_t> Client::RegisterMemory(const ClientNamespace& ns,
                                                     const EngineGeometry& geometry,
                                                     CallOptions call) {
  return Wait<std::uint64_t>(
      [&](auto done) { RegisterMemoryAsync(ns, geometry, call, std::move(done)); });
}

absl::Status Client::UnregisterMemory(std::uint64_t registration, CallOptions call) {
  return WaitForStatus(
      [&](auto done) { UnregisterMemoryAsync(registration, call, std::move(done)); });
}

absl::StatusOr<StoreResult> Client::StorePages(const ClientNamespace& ns,
                                               std::uint64_t registration,
                                               absl::Span<const PageBlock> blocks,
                                               const PageStoreOptions& options, CallOptions call) {
  return Wait<StoreResult>([&](auto done) {
    StorePagesAsync(ns, registration, blocks, options, call, std::move(done));
  });
}

absl::Status Client::FlushPages(std::uint64_t request, CallOptions call) {
  return WaitForStatus([&](auto done) { FlushPagesAsync(request, call, std::move(done)); });
}

absl::Status Client::FlushPages(absl::Span<const BlockKey> keys, CallOptions call) {
  return WaitForStatus([&](auto done) { FlushPagesAsync(keys, call, std::move(done)); });
}

absl::Status Client::CancelPages(std::uint64_t request, CallOptions call) {
  return WaitForStatus([&](auto done) { CancelPagesAsync(request, call, std::move(done)); });
}

absl::StatusOr<std::uint64_t> Client::Remove(const ClientNamespace& ns,
                                             absl::Span<const BlockKey> keys, CallOptions call) {
  return Wait<std::uint64_t>([&](auto done) { RemoveAsync(ns, keys, call, std::move(done)); });
}

absl::StatusOr<std::uint64_t> Client::Clear(const ClientNamespace& ns, CallOptions call) {
  return Wait<std::uint64_t>([&](auto done) { ClearAsync(ns, call, std::move(done)); });
}

absl::StatusOr<std::uint64_t> Client::Flush(CallOptions call) {
  return Wait<std::uint64_t>([&](auto done) { FlushAsync(call, std::move(done)); });
}

absl::StatusOr<ServerStat> Client::Stat(CallOptions call) {
  return Wait<ServerStat>([&](auto done) { StatAsync(call, std::move(done)); });
}

absl::StatusOr<std::vector<ListedBlock>> Client::List(absl::string_view ns_name, CallOptions call) {
  return Wait<std::vector<ListedBlock>>(
      [&](auto done) { ListAsync(ns_name, call, std::move(done)); });
}

absl::StatusOr<std::uint64_t> Client::Evict(Tier tier, std::uint64_t bytes, CallOptions call) {
  return Wait<std::uint64_t>([&](auto done) { EvictAsync(tier, bytes, call, std::move(done)); });
}

absl::StatusOr<std::vector<TenantQuotaUse>> Client::Quota(CallOptions call) {
  return Wait<std::vector<TenantQuotaUse>>([&](auto done) { QuotaAsync(call, std::move(done)); });
}

absl::StatusOr<VerifyResult> Client::Verify(CallOptions call) {
  return Wait<VerifyResult>([&](auto done) { VerifyAsync(call, std::move(done)); });
}

absl::StatusOr<DaemonConfig> Client::Configuration(CallOptions call) {
  return Wait<DaemonConfig>([&](auto done) { ConfigurationAsync(call, std::move(done)); });
}

absl::StatusOr<ClusterStatus> Client::Cluster(CallOptions call) {
  return Wait<ClusterStatus>([&](auto done) { ClusterAsync(call, std::move(done)); });
}

absl::StatusOr<std::string> Client::CreateTicket(const ClientNamespace& ns,
                                                 absl::Span<const PromisedBlock> blocks,
                                                 const TicketOptions& options, CallOptions call) {
  return Wait<std::string>(
      [&](auto done) { CreateTicketAsync(ns, blocks, options, call, std::move(done)); });
}

absl::Status Client::RevokeTicket(absl::string_view ticket, CallOptions call) {
  return WaitForStatus([&](auto done) { RevokeTicketAsync(ticket, call, std::move(done)); });
}

RedeemResult Client::RedeemTicket(const ClientNamespace& ns, absl::string_view ticket,
                                  RedeemUpdate update, CallOptions call) {
  return *Wait<RedeemResult>(
      [&](auto done) { RedeemTicketAsync(ns, ticket, std::move(update), call, std::move(done)); });
}

absl::StatusOr<BlockPlaces> Client::Where(absl::string_view ns_name, const BlockKey& key,
                                          const BlockKey& anchor, std::uint32_t place,
                                          CallOptions call, absl::string_view tenant) {
  return Wait<BlockPlaces>(
      [&](auto done) { WhereAsync(ns_name, key, anchor, place, call, std::move(done), tenant); });
}

absl::StatusOr<std::uint64_t> Client::Drain(CallOptions call) {
  return Wait<std::uint64_t>([&](auto done) { DrainAsync(call, std::move(done)); });
}

absl::StatusOr<NodeDrain> Client::DrainNode(absl::string_view node,
                                            std::function<void(const NodeDrain&)> progress,
                                            CallOptions call) {
  return Wait<NodeDrain>(
      [&](auto done) { DrainNodeAsync(node, std::move(progress), call, std::move(done)); });
}

absl::StatusOr<ServerStatus> Client::Status(CallOptions call) {
  return Wait<ServerStatus>([&](auto done) { StatusAsync(call, std::move(done)); });
}

absl::StatusOr<std::vector<ClientNamespace>> Client::Namespaces(CallOptions call) {
  return Wait<std::vector<ClientNamespace>>(
      [&](auto done) { NamespacesAsync(call, std::move(done)); });
}

}  // namespace kvmill
