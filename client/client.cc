#include "client/client.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <map>
#include <optional>
#include <thread>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "client/connection.h"
#include "client/convert.h"
#include "client/data_fetch.h"
#include "client/data_link.h"
#include "client/data_store.h"
#include "client/fetch_stream.h"
#include "client/store_stream.h"
#include "kvmill/v1/data.grpc.pb.h"
#include "storage/core/log.h"
#include "storage/core/mutex.h"
#include "storage/core/status_macros.h"
#include "storage/core/worker_pool.h"

namespace kvmill {
namespace {

using Deadline = std::chrono::system_clock::time_point;

ServerStat StatFromProto(const v1::StatReply& reply) {
  ServerStat stat;
  stat.blocks = reply.blocks();
  stat.pages = reply.pages();
  stat.sessions = reply.sessions();
  stat.leases = reply.leases();
  for (const v1::TierStat& tier : reply.tiers()) {
    const absl::StatusOr<Tier> which = FromProto(tier.tier());
    if (!which.ok()) continue;  // A tier of a newer daemon.
    stat.tiers.push_back({*which, tier.used_bytes(), tier.capacity_bytes(), tier.blocks()});
  }
  stat.raw_bytes_ingested = reply.raw_bytes_ingested();
  stat.encoded_bytes_stored = reply.encoded_bytes_stored();
  stat.lookup_blocks = reply.lookup_blocks();
  stat.hit_blocks = reply.hit_blocks();
  stat.checksum_failures = reply.checksum_failures();
  stat.unwritten_blocks = reply.unwritten_blocks();
  stat.metadata_bytes = reply.metadata_bytes();
  stat.boot_id = absl::BytesToHexString(reply.boot_id());
  stat.uptime_s = reply.uptime_s();
  return stat;
}

absl::StatusOr<ClientNamespace> NamespaceFromProto(const v1::NamespaceInfo& info) {
  ClientNamespace ns;
  ns.name = info.name();
  KVMILL_ASSIGN_OR_RETURN(ns.fingerprint, FingerprintFromBytes(info.fingerprint()));
  KVMILL_ASSIGN_OR_RETURN(ns.spec, FromProto(info.spec()));
  return ns;
}

absl::StatusOr<LookupResult> LookupFromProto(const v1::LookupReply& reply) {
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

// One call with one request and one reply. Deletes itself after `done`. `Prepare(channel, context,
// queue)` makes the reader of a stub.
template <typename Reply, typename T, typename Prepare, typename Convert>
class UnaryCall final : public Completion {
 public:
  UnaryCall(Connection& connection, Prepare prepare, Convert convert, Client::Done<T> done)
      : connection_(connection),
        prepare_(std::move(prepare)),
        convert_(std::move(convert)),
        done_(std::move(done)) {}

  void Start(Deadline deadline, bool again = false) {
    deadline_ = deadline;
    again_ = again;
    connection_.Admit(&context_, deadline, [this](const Connection::Admission& admission) {
      if (!admission.status.ok()) {
        done_(admission.status);
        delete this;
        return;
      }
      pass_ = admission.pass;
      channel_ = connection_.channel();
      reader_ = prepare_(*channel_, &context_, connection_.queue());
      reader_->StartCall();
      reader_->Finish(&reply_, &status_, this);
    });
  }

  void OnEvent(bool) override {
    connection_.NoteBootId(context_);
    reader_.reset();
    channel_.reset();
    if (status_.error_code() == grpc::StatusCode::UNAUTHENTICATED && !again_ &&
        connection_.PassRefused(pass_)) {
      (new UnaryCall(connection_, std::move(prepare_), std::move(convert_), std::move(done_)))
          ->Start(deadline_, true);
    } else if (status_.ok()) {
      done_(convert_(reply_));
    } else {
      done_(FromGrpc(status_));
    }
    connection_.End(&context_);
    delete this;
  }

 private:
  Connection& connection_;
  Prepare prepare_;
  Convert convert_;
  Client::Done<T> done_;
  Deadline deadline_;
  bool again_ = false;  // The token was refused once.
  std::uint64_t pass_ = 0;
  grpc::ClientContext context_;
  ChannelPtr channel_;
  std::unique_ptr<grpc::ClientAsyncResponseReader<Reply>> reader_;
  Reply reply_;
  grpc::Status status_;
};

// Collects a List stream. Deletes itself after `done`.
class ListStream {
 public:
  ListStream(Connection& connection, Client::Done<std::vector<ListedBlock>> done)
      : connection_(connection), done_(std::move(done)) {}

  void Start(absl::string_view ns_name, Deadline deadline) {
    v1::ListRequest request;
    if (!ns_name.empty()) request.mutable_namespace_()->set_name(std::string(ns_name));
    connection_.Admit(&context_, deadline, [this, request](const Connection::Admission& admission) {
      if (!admission.status.ok()) {
        done_(admission.status);
        delete this;
        return;
      }
      pass_ = admission.pass;
      channel_ = connection_.channel();
      reader_ = channel_->cache->PrepareAsyncList(&context_, request, connection_.queue());
      reader_->StartCall(&start_done_);
    });
  }

 private:
  void OnStart(bool ok) {
    if (ok) {
      reader_->Read(&reply_, &read_done_);
    } else {
      reader_->Finish(&status_, &finish_done_);
    }
  }

  void OnRead(bool ok) {
    if (!ok) {
      reader_->Finish(&status_, &finish_done_);
      return;
    }
    for (const v1::ListEntry& entry : reply_.entries()) {
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
    reader_->Read(&reply_, &read_done_);
  }

  void OnFinish(bool) {
    connection_.NoteBootId(context_);
    reader_.reset();
    channel_.reset();
    if (status_.error_code() == grpc::StatusCode::UNAUTHENTICATED) connection_.PassRefused(pass_);
    if (status_.ok()) {
      done_(std::move(blocks_));
    } else {
      done_(FromGrpc(status_));
    }
    connection_.End(&context_);
    delete this;
  }

  Connection& connection_;
  const Client::Done<std::vector<ListedBlock>> done_;
  std::uint64_t pass_ = 0;
  grpc::ClientContext context_;
  ChannelPtr channel_;
  std::unique_ptr<grpc::ClientAsyncReader<v1::ListReply>> reader_;
  MemberCompletion<ListStream> start_done_{this, &ListStream::OnStart};
  MemberCompletion<ListStream> read_done_{this, &ListStream::OnRead};
  MemberCompletion<ListStream> finish_done_{this, &ListStream::OnFinish};
  v1::ListReply reply_;
  grpc::Status status_;
  std::vector<ListedBlock> blocks_;
};

}  // namespace

class Client::Impl {
 public:
  Impl(const ServerAddress& address, const Options& options)
      : options_(options),
        local_(address.is_unix()),
        pid_(getpid()),
        connection_(std::make_unique<Connection>(address)) {
    const bool links =
        options.path == DataPath::kUcx || (options.path == DataPath::kAuto && !local_);
    if (!links && !encodes()) return;
    std::uint32_t threads = options.encode_threads;
    if (threads == 0) threads = std::clamp(std::thread::hardware_concurrency(), 1u, 4u);
    workers_ = std::make_unique<WorkerPool>(threads, "kvmill-data");
    if (!links) return;
    link_ = std::make_unique<DataLink>(
        *connection_, *workers_, options.data_plane_plaintext,
        [this](const v1::ConnectRequest& request, Deadline deadline, DataLink::OfferDone done) {
          Call<v1::ConnectReply, v1::ConnectReply>(
              deadline,
              [request](Channel& channel, auto* context, auto* queue) {
                return v1::Data::NewStub(channel.channel)
                    ->PrepareAsyncConnect(context, request, queue);
              },
              [](const v1::ConnectReply& reply) { return reply; }, std::move(done));
        });
  }
  ~Impl() {
    // The threads did not follow into a forked child, nor did anybody who could release locks.
    if (getpid() != pid_) {
      static_cast<void>(connection_.release());
      static_cast<void>(link_.release());
      static_cast<void>(workers_.release());
      return;
    }
    // Its operations use the connection, and calls that end with that may ask for it.
    if (link_ != nullptr) link_->Stop();
    connection_.reset();
  }

  Connection& connection() { return *connection_; }
  // Null when bytes travel inline whatever happens.
  DataLink* link() { return link_.get(); }
  // Null: values travel as they are.
  WorkerPool* encoder() { return encodes() ? workers_.get() : nullptr; }
  bool encodes() const {
    return options_.encode_in == EncodeIn::kClient ||
           (options_.encode_in == EncodeIn::kAuto && !local_);
  }

  // Calls one of the three, once: `ucx`, after a Begin of the link, with its connection; `in_line`;
  // `fail` with why there is no way.
  void ChoosePath(Deadline deadline, std::function<void(const ConnectionPtr&)> ucx,
                  std::function<void()> in_line, std::function<void(const absl::Status&)> fail) {
    if (link_ == nullptr) return in_line();
    if (!link_->Begin()) return fail(absl::CancelledError("the client is being destroyed"));
    link_->Connect(deadline,
                   [this, ucx = std::move(ucx), in_line = std::move(in_line),
                    fail = std::move(fail)](const absl::StatusOr<ConnectionPtr>& connection) {
                     if (connection.ok()) {
                       fell_back_.store(false, std::memory_order_relaxed);
                       return ucx(*connection);  // Calls End when it has ended.
                     }
                     if (options_.path == DataPath::kAuto && !link_->stopping()) {
                       NoteFallback(connection.status());
                       in_line();
                     } else {
                       fail(connection.status());
                     }
                     link_->End();
                   });
  }

  absl::Status CheckProcess() const {
    if (getpid() == pid_) return absl::OkStatus();
    return absl::FailedPreconditionError(
        "this client was made before fork(): make a new one in the child");
  }

  Deadline DeadlineOf(const CallOptions& call) const {
    const absl::Duration timeout =
        call.timeout > absl::ZeroDuration() ? call.timeout : options_.timeout;
    return std::chrono::system_clock::now() + absl::ToChronoMicroseconds(timeout);
  }

  // `prepare(channel, context, queue)` makes the reader of a stub; `convert(reply)` the result.
  template <typename Reply, typename T, typename Prepare, typename Convert>
  void Call(Deadline deadline, Prepare prepare, Convert convert, Done<T> done) {
    (new UnaryCall<Reply, T, Prepare, Convert>(*connection_, std::move(prepare), std::move(convert),
                                               std::move(done)))
        ->Start(deadline);
  }

  void Register(const std::string& name, const NamespaceSpec& spec, Deadline deadline,
                Done<ClientNamespace> done) {
    v1::RegisterRequest request;
    request.mutable_client()->set_protocol_version(kProtocolVersion);
    request.mutable_client()->set_software_version(kSoftwareVersion);
    request.set_name(name);
    ToProto(spec, request.mutable_spec());
    Call<v1::RegisterReply, ClientNamespace>(
        deadline,
        [request = std::move(request)](Channel& channel, auto* context, auto* queue) {
          return channel.engine->PrepareAsyncRegister(context, request, queue);
        },
        [this](const v1::RegisterReply& reply) -> absl::StatusOr<ClientNamespace> {
          KVMILL_RETURN_IF_ERROR(CheckProtocolVersion(reply.hello().server().protocol_version()));
          KVMILL_ASSIGN_OR_RETURN(ClientNamespace ns, NamespaceFromProto(reply.namespace_()));
          MutexLock lock(mu_);
          registered_[ns.fingerprint] = ns;
          return ns;
        },
        std::move(done));
  }

  // Runs `attempt(done)`; tries once more when the daemon was restarted meanwhile: it does not know
  // the token, or the namespace though that was opened here, which is registered first.
  template <typename T>
  void WithNamespace(const ClientNamespace& ns, Deadline deadline,
                     std::function<void(Done<T>)> attempt, Done<T> done) {
    attempt([this, fingerprint = ns.fingerprint, deadline, attempt,
             done = std::move(done)](absl::StatusOr<T> result) {
      if (absl::IsUnauthenticated(result.status())) {
        attempt(done);
        return;
      }
      std::optional<ClientNamespace> known;
      if (absl::IsNotFound(result.status())) {
        MutexLock lock(mu_);
        const auto it = registered_.find(fingerprint);
        if (it != registered_.end()) known = it->second;
      }
      if (!known.has_value()) {
        done(std::move(result));
        return;
      }
      Register(known->name, known->spec, deadline,
               [attempt, done](absl::StatusOr<ClientNamespace> registered) {
                 if (registered.ok()) {
                   attempt(done);
                 } else {
                   done(registered.status());
                 }
               });
    });
  }

 private:
  // Once in a row of failures.
  void NoteFallback(const absl::Status& why) {
    if (fell_back_.exchange(true, std::memory_order_relaxed)) return;
    const std::string text =
        absl::StrCat("data plane: ", why.message(), "; blocks travel with the gRPC messages");
    // Without a data plane that is how it is meant to be.
    absl::IsFailedPrecondition(why) ? LogDebug(text) : LogWarning(text);
  }

  const Options options_;
  const bool local_;
  const pid_t pid_;
  std::atomic<bool> fell_back_{false};
  Mutex mu_;
  std::map<Fingerprint, ClientNamespace> registered_ ABSL_GUARDED_BY(mu_);
  // May be null; constant after construction. Workers are used by both others.
  std::unique_ptr<WorkerPool> workers_;
  std::unique_ptr<DataLink> link_;
  std::unique_ptr<Connection>
      connection_;  // Last: its destructor ends the calls that use the rest.
};

absl::StatusOr<std::unique_ptr<Client>> Client::Create(const Options& options) {
  KVMILL_ASSIGN_OR_RETURN(const ServerAddress address, ParseServerAddress(options.address));
  if (options.timeout <= absl::ZeroDuration() || options.timeout > absl::Hours(24 * 365)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "timeout ", absl::FormatDuration(options.timeout), ": want more than 0, at most a year"));
  }
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

void Client::FindNamespaceAsync(absl::string_view name, CallOptions call,
                                Done<ClientNamespace> done) {
  if (absl::Status s = impl_->CheckProcess(); !s.ok()) return done(s);
  v1::DescribeRequest request;
  request.mutable_namespace_()->set_name(std::string(name));
  impl_->Call<v1::NamespaceInfo, ClientNamespace>(
      impl_->DeadlineOf(call),
      [request = std::move(request)](Channel& channel, auto* context, auto* queue) {
        return channel.engine->PrepareAsyncDescribe(context, request, queue);
      },
      &NamespaceFromProto, std::move(done));
}

void Client::LookupAsync(const ClientNamespace& ns, absl::Span<const BlockKey> keys, bool find_tail,
                         CallOptions call, Done<LookupResult> done) {
  if (absl::Status s = impl_->CheckProcess(); !s.ok()) return done(s);
  v1::LookupRequest request;
  request.mutable_namespace_()->set_fingerprint(std::string(AsBytes(ns.fingerprint)));
  for (const BlockKey& key : keys) request.add_keys(std::string(key.view()));
  request.set_find_tail(find_tail);
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
            &LookupFromProto, std::move(attempt_done));
      },
      std::move(done));
}

void Client::StoreAsync(const ClientNamespace& ns, absl::Span<const StoreBlock> blocks,
                        const StoreOptions& options, CallOptions call, Done<StoreResult> done) {
  absl::Status status = impl_->CheckProcess();
  if (status.ok()) status = CheckStore(ns, blocks, options);
  if (!status.ok()) return done(status);
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
  if (absl::Status s = impl_->CheckProcess(); !s.ok()) return done(s);
  const Deadline deadline = impl_->DeadlineOf(call);
  impl_->WithNamespace<FetchResult>(
      ns, deadline,
      [impl = impl_.get(), ns, keys, &sink, deadline](Done<FetchResult> attempt_done) {
        impl->ChoosePath(
            deadline,
            [=, &sink](const ConnectionPtr& connection) {
              StartDataFetch(*impl->link(), connection, ns, keys, sink, deadline, attempt_done);
            },
            [=, &sink] {
              StartFetchStream(impl->connection(), ns, keys, sink, deadline, attempt_done);
            },
            attempt_done);
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
  (new ListStream(impl_->connection(), std::move(done)))->Start(ns_name, impl_->DeadlineOf(call));
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
