#include "client/events.h"

#include <algorithm>
#include <chrono>
#include <deque>
#include <functional>
#include <map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "client/connection.h"
#include "client/convert.h"
#include "client/server_stream.h"
#include "kvmill/v1/events.grpc.pb.h"
#include "storage/core/mutex.h"
#include "storage/core/status_macros.h"

namespace kvmill {
namespace {

constexpr std::size_t kBatchesAhead = 4;  // That nobody has asked for yet.
constexpr std::chrono::hours kCallTime{1};
constexpr std::chrono::milliseconds kRetryFirst{50};
constexpr std::chrono::milliseconds kRetryMost{2000};

// Of a stream that had begun: a namespace that was there comes again, when an engine opens it.
bool IsFinal(const absl::Status& status, bool began) {
  switch (status.code()) {
    case absl::StatusCode::kNotFound:
      return !began;
    case absl::StatusCode::kInvalidArgument:
    case absl::StatusCode::kPermissionDenied:
    case absl::StatusCode::kUnauthenticated:
    case absl::StatusCode::kFailedPrecondition:
    case absl::StatusCode::kUnimplemented:
    case absl::StatusCode::kInternal:
      return true;
    default:
      return false;
  }
}

absl::Status Malformed(absl::string_view what) {
  return absl::InternalError(absl::StrCat("malformed reply to Watch: ", what));
}

// One call.
class WatchStream final : public ServerStream<v1::WatchReply> {
 public:
  using Took = std::function<absl::StatusOr<bool>(const v1::WatchReply&)>;
  using Done = std::function<void(const absl::Status&)>;

  WatchStream(Connection& connection, v1::WatchRequest request, Took took, Done done)
      : ServerStream(connection),
        request_(std::move(request)),
        took_(std::move(took)),
        done_(std::move(done)) {}

  void Start() { ServerStream::Start(std::chrono::system_clock::now() + kCallTime); }
  using ServerStream::Resume;
  using ServerStream::TryCancel;

 private:
  Reader Prepare(Channel& channel, grpc::ClientContext* context,
                 grpc::CompletionQueue* queue) override {
    stub_ = v1::Events::NewStub(channel.channel);
    return stub_->PrepareAsyncWatch(context, request_, queue);
  }
  absl::StatusOr<bool> Take(const v1::WatchReply& reply) override {
    absl::StatusOr<bool> more = took_(reply);
    if (!more.ok()) is_ours_ = true;
    return more;
  }
  void Ended(const absl::Status& status) override {
    stub_.reset();
    // INTERNAL is of gRPC, for a stream that broke (RST_STREAM), or of the daemon: neither is for
    // ever.
    const bool again = pass_refused() || (absl::IsInternal(status) && !is_ours_);
    done_(again ? absl::UnavailableError(status.message()) : status);
  }

  const v1::WatchRequest request_;
  const Took took_;
  const Done done_;
  std::unique_ptr<v1::Events::Stub> stub_;
  bool is_ours_ = false;  // What it ended with.
};

}  // namespace

class EventStream::State : public std::enable_shared_from_this<EventStream::State> {
 public:
  State(Connection& connection, Options options)
      : connection_(connection), options_(std::move(options)), position_(options_.after) {}

  void Connect() {
    v1::WatchRequest request;
    WatchStream* stream = nullptr;
    {
      MutexLock lock(mu_);
      if (closed_) return;
      if (position_.has_value()) {
        request.set_epoch(position_->epoch);
        request.set_sequence(position_->sequence);
      } else {
        request.set_snapshot(options_.snapshot || began_);
      }
      epoch_.clear();
      namespaces_.clear();
      in_snapshot_ = false;
      if (!options_.namespace_name.empty()) {
        request.mutable_namespace_()->set_name(options_.namespace_name);
      }
      stream = new WatchStream(
          connection_, std::move(request),
          [self = shared_from_this()](const v1::WatchReply& reply) {
            const auto state = self;  // Who is woken may read on, to the end of the call.
            absl::StatusOr<bool> more = state->Take(reply);
            state->Wake();
            return more;
          },
          [self = shared_from_this()](const absl::Status& status) {
            self->Ended(status);
            self->Wake();
          });
      stream_ = stream;
    }
    stream->Start();
  }

  // Nobody asks any more. The connection, when it is destroyed, waits for what runs.
  void Close() {
    MutexLock lock(mu_);
    closed_ = true;
    batches_.clear();
    if (stream_ != nullptr) {
      stream_->TryCancel();
      if (std::exchange(paused_, false)) stream_->Resume();
    }
  }

  absl::StatusOr<EventBatch> Next(absl::Duration timeout) {
    const absl::Time deadline = absl::Now() + timeout;
    MutexLock lock(mu_);
    while (batches_.empty() && !end_.has_value()) {
      const absl::Duration left = deadline - absl::Now();
      if (left <= absl::ZeroDuration()) {
        waiting_ = true;
        return absl::DeadlineExceededError(
            absl::StrCat("no events within ", absl::FormatDuration(timeout)));
      }
      changed_.WaitFor(mu_, absl::ToChronoMilliseconds(std::min(left, absl::Seconds(3600)) +
                                                       absl::Milliseconds(1)));
    }
    if (batches_.empty()) return *end_;
    EventBatch batch = std::move(batches_.front());
    batches_.pop_front();
    if (paused_ && batches_.size() < kBatchesAhead && stream_ != nullptr) {
      paused_ = false;
      stream_->Resume();
    }
    return batch;
  }

  absl::Status trouble() const {
    MutexLock lock(mu_);
    return trouble_;
  }

 private:
  void Wake() {
    {
      MutexLock lock(mu_);
      if (options_.wake == nullptr || closed_ || (batches_.empty() && !end_.has_value())) return;
      if (!std::exchange(waiting_, false)) return;
    }
    options_.wake();
  }

  absl::StatusOr<bool> Take(const v1::WatchReply& reply) {
    MutexLock lock(mu_);
    if (closed_) return absl::CancelledError("nobody reads events any more");
    if (epoch_.empty()) {
      if (reply.epoch().size() != 16) return Malformed("no epoch");
      epoch_ = reply.epoch();
    }
    for (const v1::WatchedNamespace& space : reply.namespaces()) {
      KVMILL_ASSIGN_OR_RETURN(const Fingerprint fingerprint,
                              FingerprintFromBytes(space.fingerprint()));
      namespaces_[space.id()] = std::make_shared<const WatchedNamespace>(
          WatchedNamespace{space.name(), fingerprint, space.block_tokens(), space.model(),
                           space.adapter_digest(), space.hash_scheme()});
    }
    EventBatch batch;
    batch.snapshot_begin = reply.snapshot_begin();
    batch.snapshot_end = reply.snapshot_end();
    for (const v1::BlockEvent& event : reply.events()) {
      KVMILL_ASSIGN_OR_RETURN(batch.events.emplace_back(), FromProto(event));
    }
    if (reply.snapshot_begin()) in_snapshot_ = true;
    if (reply.snapshot_end()) in_snapshot_ = false;
    began_ = true;
    if (in_snapshot_) {
      position_.reset();
    } else {
      position_ = EventPosition{epoch_, reply.sequence()};
      batch.position = position_;
      retry_ = kRetryFirst;
    }
    trouble_ = absl::OkStatus();
    batches_.push_back(std::move(batch));
    changed_.NotifyAll();
    paused_ = batches_.size() >= kBatchesAhead;
    return !paused_;
  }

  absl::StatusOr<WatchedEvent> FromProto(const v1::BlockEvent& event)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    WatchedEvent result;
    const auto space = namespaces_.find(event.namespace_());
    if (space == namespaces_.end()) return Malformed("an event of an unnamed namespace");
    result.ns = space->second;
    switch (event.event_case()) {
      case v1::BlockEvent::kStored: {
        const v1::BlockStored& stored = event.stored();
        KVMILL_ASSIGN_OR_RETURN(result.key, BlockKey::FromBytes(stored.key()));
        if (!stored.parent_key().empty()) {
          KVMILL_ASSIGN_OR_RETURN(result.parent, BlockKey::FromBytes(stored.parent_key()));
        }
        result.token_count = stored.token_count();
        KVMILL_ASSIGN_OR_RETURN(result.tier, kvmill::FromProto(stored.tier()));
        result.from = result.tier;
        return result;
      }
      case v1::BlockEvent::kMoved: {
        result.kind = WatchedEvent::Kind::kMoved;
        KVMILL_ASSIGN_OR_RETURN(result.key, BlockKey::FromBytes(event.moved().key()));
        KVMILL_ASSIGN_OR_RETURN(result.from, kvmill::FromProto(event.moved().from()));
        KVMILL_ASSIGN_OR_RETURN(result.tier, kvmill::FromProto(event.moved().to()));
        return result;
      }
      case v1::BlockEvent::kRemoved: {
        result.kind = WatchedEvent::Kind::kRemoved;
        KVMILL_ASSIGN_OR_RETURN(result.key, BlockKey::FromBytes(event.removed().key()));
        KVMILL_ASSIGN_OR_RETURN(result.tier, kvmill::FromProto(event.removed().tier()));
        result.from = result.tier;
        return result;
      }
      case v1::BlockEvent::kCleared:
        result.kind = WatchedEvent::Kind::kCleared;
        return result;
      case v1::BlockEvent::EVENT_NOT_SET:
        break;
    }
    return Malformed("an event of no known kind");
  }

  void Ended(const absl::Status& status) {
    MutexLock lock(mu_);
    stream_ = nullptr;
    paused_ = false;
    changed_.NotifyAll();
    if (closed_) return;
    if (IsFinal(status, began_)) {
      end_ = status;
      return;
    }
    trouble_ = status;
    const auto wait = absl::IsDeadlineExceeded(status) ? std::chrono::milliseconds(0) : retry_;
    retry_ = std::min(retry_ * 2, kRetryMost);
    connection_.PostAt(std::chrono::steady_clock::now() + wait,
                       [self = shared_from_this()] { self->Connect(); });
  }

  Connection& connection_;
  const Options options_;

  mutable Mutex mu_;
  CondVar changed_;
  bool closed_ ABSL_GUARDED_BY(mu_) = false;
  bool waiting_ ABSL_GUARDED_BY(mu_) = false;  // For a wake.
  std::optional<absl::Status> end_ ABSL_GUARDED_BY(mu_);
  absl::Status trouble_ ABSL_GUARDED_BY(mu_);
  std::chrono::milliseconds retry_ ABSL_GUARDED_BY(mu_) = kRetryFirst;
  std::deque<EventBatch> batches_ ABSL_GUARDED_BY(mu_);
  std::optional<EventPosition> position_ ABSL_GUARDED_BY(mu_);  // Behind what came.
  bool began_ ABSL_GUARDED_BY(mu_) = false;  // Something came: it must not be missed later.
  // Of the call.
  WatchStream* stream_ ABSL_GUARDED_BY(mu_) = nullptr;  // Null: none runs.
  bool paused_ ABSL_GUARDED_BY(mu_) = false;            // Until somebody takes a batch.
  bool in_snapshot_ ABSL_GUARDED_BY(mu_) = false;
  std::string epoch_ ABSL_GUARDED_BY(mu_);
  std::map<std::uint32_t, std::shared_ptr<const WatchedNamespace>> namespaces_ ABSL_GUARDED_BY(mu_);
};

absl::StatusOr<std::unique_ptr<EventStream>> EventStream::Open(const Client::Options& daemon,
                                                               Options options) {
  KVMILL_RETURN_IF_ERROR(Client::Create(daemon).status());  // Checks what it is given.
  KVMILL_ASSIGN_OR_RETURN(const ServerAddress address, ParseServerAddress(daemon.address));
  auto connection = std::make_unique<Connection>(
      address, Connection::Identity{daemon.tls, daemon.token}, [](std::uint64_t) {});
  return std::unique_ptr<EventStream>(new EventStream(std::move(connection), std::move(options)));
}

EventStream::EventStream(std::unique_ptr<Connection> connection, Options options)
    : connection_(std::move(connection)),
      state_(std::make_shared<State>(*connection_, std::move(options))) {
  state_->Connect();
}
EventStream::~EventStream() {
  state_->Close();
  connection_.reset();
}
absl::StatusOr<EventBatch> EventStream::Next(absl::Duration timeout) {
  return state_->Next(timeout);
}
absl::Status EventStream::trouble() const { return state_->trouble(); }

}  // namespace kvmill
