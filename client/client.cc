#include "client/client.h"

#include <sys/types.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "client/client_impl.h"
#include "client/connection.h"
#include "client/convert.h"
#include "client/data_fetch.h"
#include "client/data_link.h"
#include "client/data_store.h"
#include "client/fetch_stream.h"
#include "client/once_sink.h"
#include "client/server_stream.h"
#include "client/store_stream.h"
#include "storage/core/mutex.h"
#include "storage/core/status_macros.h"

namespace kvmill {
namespace {

ServerStat StatFromProto(const v1::StatReply& reply) {
  ServerStat stat;
  stat.blocks = reply.blocks();
  stat.pages = reply.pages();
  stat.sessions = reply.sessions();
  stat.leases = reply.leases();
  for (const v1::TierStat& tier : reply.tiers()) {
    const absl::StatusOr<Tier> which = FromProto(tier.tier());
    if (!which.ok()) continue;  // A tier of a newer daemon.
    stat.tiers.push_back({*which, tier.used_bytes(), tier.capacity_bytes(), tier.blocks(),
                          tier.hit_blocks(), tier.evicted_blocks()});
  }
  for (const v1::TransferStat& t : reply.transfers()) {
    stat.transfers.push_back({t.path(), t.transport(), t.bytes_in(), t.bytes_out()});
  }
  stat.lookup_requests = reply.lookup_requests();
  stat.stored_blocks = reply.stored_blocks();
  stat.existing_blocks = reply.existing_blocks();
  stat.rejected_blocks = reply.rejected_blocks();
  stat.fetched_blocks = reply.fetched_blocks();
  stat.fetch_misses = reply.fetch_misses();
  stat.leased_bytes = reply.leased_bytes();
  stat.lease_expirations = reply.lease_expirations();
  stat.draining = reply.draining();
  stat.raw_bytes_ingested = reply.raw_bytes_ingested();
  stat.encoded_bytes_stored = reply.encoded_bytes_stored();
  stat.lookup_blocks = reply.lookup_blocks();
  stat.hit_blocks = reply.hit_blocks();
  stat.checksum_failures = reply.checksum_failures();
  stat.unwritten_blocks = reply.unwritten_blocks();
  stat.metadata_bytes = reply.metadata_bytes();
  stat.boot_id = absl::BytesToHexString(reply.boot_id());
  stat.uptime_s = reply.uptime_s();
  for (const v1::DiskKeyStat& key : reply.disk_keys()) {
    stat.disk_keys.push_back({key.key(), key.current(), key.files(), key.bytes()});
  }
  return stat;
}

// What callers index with is what they asked for.
absl::StatusOr<LookupResult> LookupFromProto(const v1::LookupReply& reply, int key_count) {
  const auto malformed = [](absl::string_view what, std::uint64_t got, std::uint64_t want) {
    return absl::InternalError(
        absl::StrCat("malformed reply to Lookup: ", what, " ", got, ", want ", want));
  };
  if (reply.hit_blocks() > static_cast<std::uint32_t>(key_count)) {
    return malformed("hit_blocks", reply.hit_blocks(), static_cast<std::uint64_t>(key_count));
  }
  if (static_cast<std::uint32_t>(reply.tiers_size()) != reply.hit_blocks()) {
    return malformed("tiers", static_cast<std::uint64_t>(reply.tiers_size()), reply.hit_blocks());
  }
  if ((reply.tail_tokens() == 0) != reply.tail_key().empty()) {
    return malformed("tail_key bytes", reply.tail_key().size(), reply.tail_tokens() == 0 ? 0 : 1);
  }
  LookupResult result;
  result.hit_blocks = reply.hit_blocks();
  result.hit_tokens = reply.hit_tokens();
  for (int tier : reply.tiers()) {
    KVMILL_ASSIGN_OR_RETURN(result.tiers.emplace_back(), FromProto(static_cast<v1::Tier>(tier)));
  }
  result.tail_tokens = reply.tail_tokens();
  KVMILL_ASSIGN_OR_RETURN(result.tail_key, OptionalKeyFromBytes(reply.tail_key()));
  return result;
}

// Collects a List stream.
class ListStream final : public ServerStream<v1::ListReply> {
 public:
  ListStream(Connection& connection, absl::string_view ns_name,
             Client::Done<std::vector<ListedBlock>> done)
      : ServerStream(connection), done_(std::move(done)) {
    if (!ns_name.empty()) request_.mutable_namespace_()->set_name(std::string(ns_name));
  }

 private:
  Reader Prepare(Channel& channel, grpc::ClientContext* context,
                 grpc::CompletionQueue* queue) override {
    return channel.cache->PrepareAsyncList(context, request_, queue);
  }
  absl::StatusOr<bool> Take(const v1::ListReply& reply) override {
    for (const v1::ListEntry& entry : reply.entries()) {
      ListedBlock block;
      block.namespace_name = entry.namespace_();
      const absl::StatusOr<BlockKey> key = BlockKey::FromBytes(entry.key());
      const absl::StatusOr<Tier> tier = FromProto(entry.tier());
      if (!key.ok() || !tier.ok()) continue;  // Nothing that this version knows.
      block.key = *key;
      block.group = static_cast<std::uint8_t>(entry.group());
      block.tier = *tier;
      block.bytes = entry.bytes();
      block.age_s = entry.age_s();
      block.leases = entry.leases();
      blocks_.push_back(std::move(block));
    }
    return true;
  }
  void Ended(const absl::Status& status) override {
    if (status.ok()) {
      done_(std::move(blocks_));
    } else {
      done_(status);
    }
  }

  v1::ListRequest request_;
  const Client::Done<std::vector<ListedBlock>> done_;
  std::vector<ListedBlock> blocks_;
};

}  // namespace

absl::StatusOr<ClientNamespace> NamespaceFromProto(const v1::NamespaceInfo& info) {
  ClientNamespace ns;
  ns.name = info.name();
  KVMILL_ASSIGN_OR_RETURN(ns.fingerprint, FingerprintFromBytes(info.fingerprint()));
  KVMILL_ASSIGN_OR_RETURN(ns.spec, FromProto(info.spec()));
  ns.spec.tenant = info.tenant();
  KVMILL_RETURN_IF_ERROR(ValidateNamespace(ns.spec));
  // One that this version does not know is its daemon's own; the tiles are right with any.
  if (info.algorithm() == v1::ENCODE_ALGORITHM_REFINED) ns.algorithm = Algorithm::kRefined;
  if (info.has_trip()) {
    const v1::NamespaceTrip& from = info.trip();
    NamespaceTrip& trip = ns.trip.emplace();
    trip.key_error = from.key_error();
    trip.value_error = from.value_error();
    trip.refuses_stores = from.refuses_stores();
    if (!from.fallback_name().empty()) {
      NamespaceSpec fallback = ns.spec;
      fallback.key_bits = static_cast<std::uint8_t>(std::min(from.fallback_key_bits(), 255u));
      fallback.value_bits = static_cast<std::uint8_t>(std::min(from.fallback_value_bits(), 255u));
      KVMILL_RETURN_IF_ERROR(ValidateNamespace(fallback));
      trip.fallback_name = from.fallback_name();
      trip.fallback_key_bits = fallback.key_bits;
      trip.fallback_value_bits = fallback.value_bits;
      trip.fallback_sink_blocks = from.fallback_sink_blocks();
    }
  }
  return ns;
}

namespace {

// What gRPC has open for its pollers a child of fork() has, too, and by using it ends both.
absl::Status CheckNotForked() {
  static std::atomic<pid_t> first_user{0};
  const pid_t self = getpid();
  pid_t user = 0;
  if (first_user.compare_exchange_strong(user, self) || user == self) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat("process ", self, " is a fork() of process ", user,
                   ", which has made a client: fork before that, or start processes by exec "
                   "(Python: spawn)"));
}

// What it is stays out of messages.
absl::Status CheckToken(const Client::Options& options) {
  constexpr std::size_t kTokenBytesMax = 4096;
  if (options.token.empty()) return absl::OkStatus();
  if (!options.tls.enabled()) {
    return absl::FailedPreconditionError(
        "a token over TCP needs TLS: whoever reads it on its way could use it");
  }
  if (options.token.size() > kTokenBytesMax) {
    return absl::InvalidArgumentError(absl::StrCat("a token of ", options.token.size(),
                                                   " characters: want at most ", kTokenBytesMax));
  }
  if (!std::all_of(options.token.begin(), options.token.end(), absl::ascii_isgraph)) {
    return absl::InvalidArgumentError(
        "a token with a character that is a space, or not printable ASCII");
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::unique_ptr<Client>> Client::Create(const Options& options) {
  KVMILL_ASSIGN_OR_RETURN(const ServerAddress address, ParseServerAddress(options.address));
  if (options.timeout <= absl::ZeroDuration() || options.timeout > absl::Hours(24 * 365)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "timeout ", absl::FormatDuration(options.timeout), ": want more than 0, at most a year"));
  }
  if (!address.is_unix()) {
    KVMILL_RETURN_IF_ERROR(CheckTlsFiles(options.tls));
    KVMILL_RETURN_IF_ERROR(CheckToken(options));
  }
  KVMILL_RETURN_IF_ERROR(CheckNotForked());
  return std::unique_ptr<Client>(new Client(std::make_unique<Impl>(address, options)));
}

Client::Client(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Client::~Client() = default;

std::string Client::boot_id() const { return impl_->connection().boot_id(); }
std::string Client::ucx_transport() const {
  return impl_->link() == nullptr ? "" : impl_->link()->transport();
}

void Client::OpenNamespaceAsync(absl::string_view name, const NamespaceSpec& spec, CallOptions call,
                                Done<ClientNamespace> done) {
  if (absl::Status s = impl_->CheckProcess(); !s.ok()) return done(s);
  impl_->Register(std::string(name), spec, impl_->DeadlineOf(call), std::move(done));
}

void Client::OpenNamespaceOrFallbackAsync(absl::string_view name, const NamespaceSpec& spec,
                                          CallOptions call, Done<ClientNamespace> done) {
  if (absl::Status s = impl_->CheckProcess(); !s.ok()) return done(s);
  impl_->RegisterOrFallback(std::string(name), spec, impl_->DeadlineOf(call), kFallbacksMax,
                            std::move(done));
}

void Client::FindNamespaceAsync(absl::string_view name, CallOptions call,
                                Done<ClientNamespace> done) {
  if (absl::Status s = impl_->CheckProcess(); !s.ok()) return done(s);
  v1::DescribeRequest request;
  request.mutable_namespace_()->set_name(std::string(name));
  impl_->Describe(request, impl_->DeadlineOf(call), std::move(done));
}

void Client::FindNamespaceAsync(const Fingerprint& fingerprint, CallOptions call,
                                Done<ClientNamespace> done) {
  if (absl::Status s = impl_->CheckProcess(); !s.ok()) return done(s);
  v1::DescribeRequest request;
  request.mutable_namespace_()->set_fingerprint(std::string(AsBytes(fingerprint)));
  impl_->Describe(request, impl_->DeadlineOf(call), std::move(done));
}

void Client::LookupAsync(const ClientNamespace& ns, absl::Span<const BlockKey> keys,
                         absl::Span<const TailCandidate> tails, CallOptions call,
                         Done<LookupResult> done) {
  absl::Status status = impl_->CheckProcess();
  if (status.ok()) status = CheckElsewhere(call.elsewhere);
  if (!status.ok()) return done(status);
  if (!impl_->MissIfAway<LookupResult>(true, &MissedLookup, &done)) return;
  v1::LookupRequest request;
  request.mutable_namespace_()->set_fingerprint(std::string(AsBytes(ns.fingerprint)));
  for (const BlockKey& key : keys) request.add_keys(std::string(key.view()));
  for (const TailCandidate& tail : tails) {
    v1::TailCandidate* to = request.add_tails();
    to->set_key(std::string(tail.key.view()));
    to->set_token_count(tail.token_count);
    to->set_block_index(tail.block_index);
  }
  if (call.elsewhere != Elsewhere()) ToProto(call.elsewhere, request.mutable_elsewhere());
  // Shared: it may be sent more than once, and is not small.
  const auto shared = std::make_shared<const v1::LookupRequest>(std::move(request));
  const Deadline deadline = impl_->DeadlineOf(call);
  impl_->WithNamespace<LookupResult>(
      ns, deadline,
      [impl = impl_.get(), shared, deadline](Done<LookupResult> attempt_done) {
        impl->Call<v1::LookupReply, LookupResult>(
            deadline,
            [shared](Channel& channel, auto* context, auto* queue) {
              return channel.cache->PrepareAsyncLookup(context, *shared, queue);
            },
            [shared](const v1::LookupReply& reply) {
              return LookupFromProto(reply, shared->keys_size());
            },
            std::move(attempt_done));
      },
      std::move(done));
}

void Client::StoreAsync(const ClientNamespace& ns, absl::Span<const StoreBlock> blocks,
                        const StoreOptions& options, CallOptions call, Done<StoreResult> done) {
  absl::Status status = impl_->CheckProcess();
  if (status.ok()) status = CheckStore(ns, blocks, options);
  if (!status.ok()) return done(status);
  if (!options.wait_durable && !impl_->DropIfAway(blocks.size(), &done)) return;
  const Deadline deadline = impl_->DeadlineOf(call);
  impl_->WithNamespace<StoreResult>(
      ns, deadline,
      [impl = impl_.get(), ns, blocks, options, deadline](Done<StoreResult> attempt_done) {
        impl->ChoosePath(
            deadline,
            [=](const ConnectionPtr& connection) {
              StartDataStore(*impl->link(), connection, ns, blocks, options, impl->encodes(),
                             deadline, attempt_done);
            },
            [=] {
              StartStoreStream(impl->connection(), impl->encoder(), ns, blocks, options, deadline,
                               attempt_done);
            },
            attempt_done);
      },
      std::move(done));
}

void Client::FetchAsync(const ClientNamespace& ns, absl::Span<const BlockKey> keys, FetchSink& sink,
                        CallOptions call, Done<FetchResult> done) {
  impl_->Fetch(ns, keys, sink, call, nullptr, std::move(done));
}

void Client::Impl::Fetch(const ClientNamespace& ns, absl::Span<const BlockKey> keys,
                         FetchSink& sink, CallOptions call, WaitingCaller* caller,
                         Done<FetchResult> done) {
  absl::Status status = CheckProcess();
  if (status.ok()) status = CheckElsewhere(call.elsewhere);
  if (!status.ok()) return done(status);
  if (away_ != nullptr) {
    done = [away = away_.get(), done = std::move(done)](absl::StatusOr<FetchResult> result) {
      if (result.ok()) MissLostBlocks(*away, &*result);
      done(std::move(result));
    };
  }
  const auto missed = [count = keys.size()](const absl::Status& why) {
    return MissedFetch(count, why);
  };
  if (!MissIfAway<FetchResult>(true, missed, &done)) return;
  const Deadline deadline = DeadlineOf(call);
  WithNamespace<FetchResult>(
      ns, deadline,
      [this, ns = std::make_shared<const ClientNamespace>(ns), keys,
       sink = std::make_shared<OnceSink>(sink), elsewhere = std::move(call.elsewhere), deadline,
       caller](Done<FetchResult> attempt_done) {
        const Done<FetchResult> ended =
            [sink, attempt_done = std::move(attempt_done)](absl::StatusOr<FetchResult> result) {
              attempt_done(sink->Final(std::move(result)));
            };
        ChoosePath(
            deadline,
            [=, this](const ConnectionPtr& connection) {
              StartDataFetch(*link(), connection, ns, keys, *sink, elsewhere, deadline, caller,
                             ended);
            },
            [=, this] {
              StartFetchStream(*connection_, *ns, keys, *sink, elsewhere, deadline, ended);
            },
            ended);
      },
      std::move(done));
}

void Client::RemoveAsync(const ClientNamespace& ns, absl::Span<const BlockKey> keys,
                         CallOptions call, Done<std::uint64_t> done) {
  if (absl::Status s = impl_->CheckProcess(); !s.ok()) return done(s);
  v1::RemoveRequest request;
  request.mutable_namespace_()->set_fingerprint(std::string(AsBytes(ns.fingerprint)));
  for (const BlockKey& key : keys) request.add_keys(std::string(key.view()));
  impl_->Call<v1::BlockCount, std::uint64_t>(
      impl_->DeadlineOf(call),
      [request = std::move(request)](Channel& channel, auto* context, auto* queue) {
        return channel.cache->PrepareAsyncRemove(context, request, queue);
      },
      [](const v1::BlockCount& reply) { return reply.blocks(); }, std::move(done));
}

void Client::ClearAsync(const ClientNamespace& ns, CallOptions call, Done<std::uint64_t> done) {
  if (absl::Status s = impl_->CheckProcess(); !s.ok()) return done(s);
  v1::ClearRequest request;
  request.mutable_namespace_()->set_fingerprint(std::string(AsBytes(ns.fingerprint)));
  impl_->Call<v1::BlockCount, std::uint64_t>(
      impl_->DeadlineOf(call),
      [request = std::move(request)](Channel& channel, auto* context, auto* queue) {
        return channel.cache->PrepareAsyncClear(context, request, queue);
      },
      [](const v1::BlockCount& reply) { return reply.blocks(); }, std::move(done));
}

void Client::FlushAsync(CallOptions call, Done<std::uint64_t> done) {
  if (absl::Status s = impl_->CheckProcess(); !s.ok()) return done(s);
  impl_->Call<v1::BlockCount, std::uint64_t>(
      impl_->DeadlineOf(call),
      [request = v1::FlushRequest()](Channel& channel, auto* context, auto* queue) {
        return channel.cache->PrepareAsyncFlush(context, request, queue);
      },
      [](const v1::BlockCount& reply) { return reply.blocks(); }, std::move(done));
}

void Client::StatAsync(CallOptions call, Done<ServerStat> done) {
  if (absl::Status s = impl_->CheckProcess(); !s.ok()) return done(s);
  impl_->Call<v1::StatReply, ServerStat>(
      impl_->DeadlineOf(call),
      [request = v1::StatRequest()](Channel& channel, auto* context, auto* queue) {
        return channel.cache->PrepareAsyncStat(context, request, queue);
      },
      &StatFromProto, std::move(done));
}

void Client::ListAsync(absl::string_view ns_name, CallOptions call,
                       Done<std::vector<ListedBlock>> done) {
  if (absl::Status s = impl_->CheckProcess(); !s.ok()) return done(s);
  // Deletes itself after `done`.
  (new ListStream(impl_->connection(), ns_name, std::move(done)))->Start(impl_->DeadlineOf(call));
}

void Client::EvictAsync(Tier tier, std::uint64_t bytes, CallOptions call,
                        Done<std::uint64_t> done) {
  if (absl::Status s = impl_->CheckProcess(); !s.ok()) return done(s);
  v1::EvictRequest request;
  request.set_tier(ToProto(tier));
  request.set_bytes(bytes);
  impl_->Call<v1::BlockCount, std::uint64_t>(
      impl_->DeadlineOf(call),
      [request = std::move(request)](Channel& channel, auto* context, auto* queue) {
        return channel.admin->PrepareAsyncEvict(context, request, queue);
      },
      [](const v1::BlockCount& reply) { return reply.blocks(); }, std::move(done));
}

void Client::VerifyAsync(CallOptions call, Done<VerifyResult> done) {
  if (absl::Status s = impl_->CheckProcess(); !s.ok()) return done(s);
  impl_->Call<v1::VerifyReply, VerifyResult>(
      impl_->DeadlineOf(call),
      [request = v1::VerifyRequest()](Channel& channel, auto* context, auto* queue) {
        return channel.admin->PrepareAsyncVerify(context, request, queue);
      },
      [](const v1::VerifyReply& reply) {
        return VerifyResult{reply.records_checked(), reply.failures()};
      },
      std::move(done));
}

void Client::QuotaAsync(CallOptions call, Done<std::vector<TenantQuotaUse>> done) {
  if (absl::Status s = impl_->CheckProcess(); !s.ok()) return done(s);
  impl_->Call<v1::QuotaReply, std::vector<TenantQuotaUse>>(
      impl_->DeadlineOf(call),
      [request = v1::QuotaRequest()](Channel& channel, auto* context, auto* queue) {
        return channel.admin->PrepareAsyncQuota(context, request, queue);
      },
      [](const v1::QuotaReply& reply) {
        std::vector<TenantQuotaUse> tenants;
        for (const v1::TenantUsage& from : reply.tenants()) {
          TenantQuotaUse& to = tenants.emplace_back();
          to.tenant = from.tenant();
          to.used_bytes = from.used_bytes();
          to.charged_bytes = from.charged_bytes();
          to.gpu_bytes = from.gpu_bytes();
          to.host_bytes = from.host_bytes();
          to.disk_bytes = from.disk_bytes();
          if (from.has_soft_bytes()) to.soft_bytes = from.soft_bytes();
          if (from.has_hard_bytes()) to.hard_bytes = from.hard_bytes();
          to.rejections = from.rejections();
        }
        return tenants;
      },
      std::move(done));
}

void Client::DrainAsync(CallOptions call, Done<std::uint64_t> done) {
  if (absl::Status s = impl_->CheckProcess(); !s.ok()) return done(s);
  impl_->Call<v1::BlockCount, std::uint64_t>(
      impl_->DeadlineOf(call),
      [request = v1::DrainRequest()](Channel& channel, auto* context, auto* queue) {
        return channel.admin->PrepareAsyncDrain(context, request, queue);
      },
      [](const v1::BlockCount& reply) { return reply.blocks(); }, std::move(done));
}

void Client::StatusAsync(CallOptions call, Done<ServerStatus> done) {
  if (absl::Status s = impl_->CheckProcess(); !s.ok()) return done(s);
  impl_->Call<v1::StatusReply, ServerStatus>(
      impl_->DeadlineOf(call),
      [request = v1::StatusRequest()](Channel& channel, auto* context, auto* queue) {
        return channel.admin->PrepareAsyncStatus(context, request, queue);
      },
      [](const v1::StatusReply& reply) {
        ServerStatus status;
        status.version = reply.hello().server().software_version();
        status.protocol_version = reply.hello().server().protocol_version();
        status.stat = StatFromProto(reply.stat());
        status.draining = reply.draining();
        status.device = reply.device();
        status.data_dir = reply.data_dir();
        status.encode_threads = reply.encode_threads();
        return status;
      },
      std::move(done));
}

void Client::NamespacesAsync(CallOptions call, Done<std::vector<ClientNamespace>> done) {
  if (absl::Status s = impl_->CheckProcess(); !s.ok()) return done(s);
  impl_->Call<v1::NamespacesReply, std::vector<ClientNamespace>>(
      impl_->DeadlineOf(call),
      [request = v1::NamespacesRequest()](Channel& channel, auto* context, auto* queue) {
        return channel.admin->PrepareAsyncNamespaces(context, request, queue);
      },
      [](const v1::NamespacesReply& reply) -> absl::StatusOr<std::vector<ClientNamespace>> {
        std::vector<ClientNamespace> namespaces;
        for (const v1::NamespaceInfo& info : reply.namespaces()) {
          KVMILL_ASSIGN_OR_RETURN(namespaces.emplace_back(), NamespaceFromProto(info));
        }
        return namespaces;
      },
      std::move(done));
}

}  // namespace kvmill
