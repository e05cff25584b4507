// Map and its like: what a session of the client owns.
#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/client_impl.h"
#include "client/mapped_blocks.h"
#include "client/mapped_content.h"
#include "kvmill/v1/data.grpc.pb.h"

namespace kvmill {
namespace {

// At the end of a client: what the daemon gets to say that it reads no pages any more, and to hear
// that a session over TCP is over.
constexpr std::chrono::milliseconds kCloseWait{500};

absl::StatusOr<std::uint32_t> LeaseMs(absl::Duration lease) {
  const std::int64_t ms = absl::ToInt64Milliseconds(lease);
  constexpr std::int64_t kLeaseMsMax = std::int64_t{1} << 31;
  if (ms <= 0 || ms > kLeaseMsMax) {
    return absl::InvalidArgumentError(
        absl::StrCat("lease of ", absl::FormatDuration(lease), ", want 1ms to ",
                     absl::FormatDuration(absl::Milliseconds(kLeaseMsMax))));
  }
  return static_cast<std::uint32_t>(ms);
}

}  // namespace

Client::Impl::Impl(const ServerAddress& address, const Options& options)
    : options_(options), local_(address.is_unix()), pid_(getpid()) {
  connection_ = std::make_unique<Connection>(
      address, Connection::Identity{options.tls, options.token}, [this](std::uint64_t pass) {
        session_->PassLost(pass);
        maps_->PassLost();
      });
  SessionNotices notices;
  if (options.on_session_event) {
    const auto say = options.on_session_event;
    notices.draining = [say] { say(SessionEvent::kDraining, 0); };
    notices.leases_expired = [say](std::uint64_t n) { say(SessionEvent::kLeasesExpired, n); };
    notices.ended = [say] { say(SessionEvent::kEnded, 0); };
  }
  if (options.when_away == WhenAway::kMiss) {
    away_ = std::make_unique<Away>(local_);
    standing_ = std::make_unique<StandingMemory>(
        *away_, options.timeout,
        [this](const ClientNamespace& ns, const std::shared_ptr<RegisteredMemory>& memory,
               Deadline deadline, std::function<void(absl::Status)> done) {
          RegisterMemory(ns, memory, deadline,
                         [done = std::move(done)](const absl::StatusOr<std::uint64_t>& number) {
                           done(number.status());
                         });
        });
    notices.ended = [standing = standing_.get(), say = std::move(notices.ended)] {
      standing->SessionEnded();
      if (say) say();
    };
  }
  session_ = std::make_unique<ClientSession>(*connection_, std::move(notices));
  maps_ = std::make_unique<MapCalls>(*connection_, *session_, options.device);
  pages_ = std::make_unique<PageStores>(*connection_, *session_);
  const bool links = options.path == DataPath::kUcx || (options.path == DataPath::kAuto && !local_);
  if (!links && !encodes()) return;
  std::uint32_t threads = options.encode_threads;
  if (threads == 0) threads = std::clamp(std::thread::hardware_concurrency(), 1u, 4u);
  workers_ = std::make_unique<WorkerPool>(threads, "kvmill-data");
  if (!links) return;
  link_ = std::make_unique<DataLink>(
      *connection_, *workers_, DataLink::Options{options.data_plane_plaintext, options.rdma},
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

Client::Impl::~Impl() {
  // The threads did not follow into a forked child, nor did anybody who could release locks.
  if (getpid() != pid_) {
    static_cast<void>(connection_.release());
    static_cast<void>(link_.release());
    static_cast<void>(workers_.release());
    static_cast<void>(maps_.release());
    static_cast<void>(pages_.release());
    static_cast<void>(session_.release());
    static_cast<void>(standing_.release());
    static_cast<void>(away_.release());
    return;
  }
  maps_->Stop();
  pages_->Stop(kCloseWait);
  session_->Close(kCloseWait);
  // Its operations use the connection, and calls that end with that may ask for it.
  if (link_ != nullptr) link_->Stop();
  connection_.reset();
}

void Client::MapAsync(const ClientNamespace& ns, absl::Span<const BlockKey> keys,
                      const MapOptions& options, CallOptions call, Done<MappedPtr> done) {
  absl::Status status = impl_->CheckProcess();
  if (status.ok()) status = CheckElsewhere(call.elsewhere);
  if (!status.ok()) return done(status);
  const absl::StatusOr<std::uint32_t> lease_ms = LeaseMs(options.lease);
  if (!lease_ms.ok()) return done(lease_ms.status());
  const auto missed = [ns, keys = std::vector<BlockKey>(keys.begin(), keys.end()),
                       lease = *lease_ms](const absl::Status& why) {
    return MissedMap(ns, keys, lease, why);
  };
  if (!impl_->MissIfAway<MappedPtr>(true, missed, &done)) return;
  const Deadline deadline = impl_->DeadlineOf(call);
  impl_->WithNamespace<MappedPtr>(
      ns, deadline,
      [impl = impl_.get(), ns, keys, lease = *lease_ms, memory = options.memory,
       elsewhere = std::move(call.elsewhere), deadline](Done<MappedPtr> attempt_done) {
        impl->maps().Map(
            ns, keys, lease, memory, elsewhere, deadline,
            [attempt_done](absl::StatusOr<std::unique_ptr<MappedBlocks::Content>> content) {
              if (!content.ok()) {
                attempt_done(content.status());
              } else {
                attempt_done(MappedPtr(new MappedBlocks(*std::move(content))));
              }
            });
      },
      std::move(done));
}

void Client::RenewAsync(MappedBlocks& mapped, absl::Duration lease, CallOptions call,
                        std::function<void(absl::Status)> done) {
  if (absl::Status s = impl_->CheckProcess(); !s.ok()) return done(s);
  const absl::StatusOr<std::uint32_t> lease_ms = LeaseMs(lease);
  if (!lease_ms.ok()) return done(lease_ms.status());
  impl_->maps().Renew(*mapped.content_, *lease_ms, impl_->DeadlineOf(call), std::move(done));
}

void Client::TouchAsync(const ClientNamespace& ns, absl::Span<const BlockKey> keys,
                        CallOptions call, Done<std::uint64_t> done) {
  if (absl::Status s = impl_->CheckProcess(); !s.ok()) return done(s);
  const auto none = [](const absl::Status&) { return std::uint64_t{0}; };
  if (!impl_->MissIfAway<std::uint64_t>(true, none, &done)) return;
  v1::TouchRequest request;
  request.mutable_namespace_()->set_fingerprint(std::string(AsBytes(ns.fingerprint)));
  for (const BlockKey& key : keys) request.add_keys(std::string(key.view()));
  impl_->Call<v1::BlockCount, std::uint64_t>(
      impl_->DeadlineOf(call),
      [request = std::move(request)](Channel& channel, auto* context, auto* queue) {
        return channel.cache->PrepareAsyncTouch(context, request, queue);
      },
      [](const v1::BlockCount& reply) { return reply.blocks(); }, std::move(done));
}

}  // namespace kvmill
