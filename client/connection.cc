#include "client/connection.h"

#include <grpc/grpc.h>
#include <grpcpp/create_channel.h>

#include <cstdlib>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/channel_args.h"
#include "client/connection_hints.h"
#include "client/convert.h"
#include "client/door_protocol.h"
#include "client/request_metadata.h"
#include "client/tls/tls_credentials.h"
#include "storage/core/log.h"

namespace kvmill {
namespace {

constexpr int kReceiveBytesMax = 16 << 20;  // Of one message; the daemon sends far smaller ones.

std::shared_ptr<grpc::Channel> MakeChannel(const ServerAddress& address, const TlsFiles& tls) {
  grpc::ChannelArguments args;
  for (const auto& [name, value] : BulkChannelArgs()) args.SetInt(name, value);
  // Each channel has a connection of its own, so that dropping one closes it.
  args.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  args.SetInt(GRPC_ARG_ENABLE_RETRIES, 0);  // Retries would keep copies of what was sent.
  args.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 50);
  // Not a back-off, whatever its name: how long one attempt may take. A busy daemon needs a while
  // to greet; one that does not answer at all is UNAVAILABLE after this.
  args.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, 5000);
  args.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 2000);
  args.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  args.SetMaxReceiveMessageSize(kReceiveBytesMax);
  args.SetMaxSendMessageSize(-1);  // The daemon refuses what is too long, naming its limit.
  if (address.is_unix()) {
    // HTTP/2 wants an authority; a path is none.
    args.SetString(GRPC_ARG_DEFAULT_AUTHORITY, "localhost");
    return grpc::CreateCustomChannel(address.ToString(), ChannelCredentialsOf({}), args);
  }
  SetTlsArguments(tls, &args);
  return grpc::CreateCustomChannel(address.ToString(), ChannelCredentialsOf(tls), args);
}

// The transport allocates and frees its receive buffers message by message. glibc returns heap ends
// above a threshold to the system at every free, which costs more than the copying (page faults,
// and interrupts to every core). The threshold follows the largest mapped chunk that was ever
// freed: free one just below 32 MiB, the most it follows, once. It is never touched. Other
// allocators do not mind.
void KeepHeapWarm() {
  static const bool once = [] {
    void* volatile chunk = std::malloc((std::size_t{32} << 20) - 65536);
    std::free(chunk);
    return true;
  }();
  static_cast<void>(once);
}

// The last grpc_shutdown() of a process joins a thread that polls for up to ten seconds and that
// nothing wakes (gRPC 1.51). A reference that is never given back keeps destroying the last client
// from being that shutdown; the process ends without one.
void KeepGrpcRunning() {
  static const bool once = [] {
    grpc_init();
    return true;
  }();
  static_cast<void>(once);
}

}  // namespace

Channel::Channel(const ServerAddress& address, const TlsFiles& tls)
    : channel(MakeChannel(address, tls)),
      engine(v1::Engine::NewStub(channel)),
      cache(v1::Cache::NewStub(channel)),
      admin(v1::Admin::NewStub(channel)),
      ticket(v1::Ticket::NewStub(channel)),
      redeems([address, tls] { return v1::Ticket::NewStub(MakeChannel(address, tls)); }),
      peer(v1::Peer::NewStub(channel)),
      generic(channel) {}

Connection::Connection(const ServerAddress& address, Identity identity,
                       std::function<void(std::uint64_t)> pass_lost)
    : address_(address), identity_(std::move(identity)) {
  KeepHeapWarm();
  KeepGrpcRunning();
  threads_.emplace_back([this] { RunTasks(); });
  // Two: one moves bytes while the other works on what came.
  for (int i = 0; i < 2; ++i) threads_.emplace_back([this] { RunQueue(); });
  if (address.is_unix()) {
    door_ = std::make_unique<DoorClient>(DoorPath(address.unix_path), std::move(pass_lost));
  }
}

Connection::~Connection() {
  if (door_ != nullptr) door_->Stop();  // Those who wait for it are told.
  {
    MutexLock lock(mu_);
    stopping_ = true;
    for (grpc::ClientContext* call : contexts_) call->TryCancel();
    channel_.reset();
    while (calls_ > 0) changed_.Wait(mu_);
    timed_tasks_.clear();
    stop_thread_ = true;
  }
  changed_.NotifyAll();
  queue_.Shutdown();
  for (std::thread& thread : threads_) thread.join();
}

ChannelPtr Connection::channel() {
  MutexLock lock(mu_);
  if (channel_ == nullptr) channel_ = std::make_shared<Channel>(address_, identity_.tls);
  return channel_;
}

void Connection::Replace(const ChannelPtr& stuck) {
  MutexLock lock(mu_);
  if (channel_ == stuck) channel_.reset();
}

bool Connection::Begin(grpc::ClientContext* call) {
  MutexLock lock(mu_);
  if (stopping_) return false;
  contexts_.insert(call);
  ++calls_;
  return true;
}

void Connection::Admit(grpc::ClientContext* call, Deadline deadline,
                       std::function<void(const Admission&)> start) {
  call->set_deadline(deadline);
  AddRequest(CurrentRequest(), call);
  if (!Begin(call)) {
    start({absl::CancelledError("the client is being destroyed")});
    return;
  }
  if (door_ == nullptr) {
    if (!identity_.token.empty()) {
      call->AddMetadata(kTokenMetadata, absl::StrCat(kTokenScheme, identity_.token));
    }
    start({absl::OkStatus()});
    return;
  }
  if (const std::shared_ptr<const DoorPass> pass = door_->pass(); pass != nullptr) {
    call->AddMetadata(kDoorTokenMetadata, pass->token_hex);
    start({absl::OkStatus(), pass->number});
    return;
  }
  door_->Enter(deadline, [this, call, start = std::move(start)](
                             const absl::StatusOr<std::shared_ptr<const DoorPass>>& pass) {
    if (!pass.ok()) {
      // `start` may end the object that owns the context; the client waits for End.
      ForgetContext(call);
      start({pass.status()});
      End(nullptr);
      return;
    }
    NoteBootId((*pass)->boot_id_hex);
    call->AddMetadata(kDoorTokenMetadata, (*pass)->token_hex);
    start({absl::OkStatus(), (*pass)->number});
  });
}

bool Connection::PassRefused(std::uint64_t pass) {
  if (door_ == nullptr || pass == 0) return false;
  door_->Refused(pass);
  return true;
}

void Connection::End(grpc::ClientContext* call) {
  MutexLock lock(mu_);
  contexts_.erase(call);
  --calls_;
  changed_.NotifyAll();
}

void Connection::ForgetContext(grpc::ClientContext* call) {
  MutexLock lock(mu_);
  contexts_.erase(call);
}

void Connection::Post(std::function<void()> task) {
  MutexLock lock(mu_);
  tasks_.push_back(std::move(task));
  changed_.NotifyAll();
}

void Connection::PostAt(std::chrono::steady_clock::time_point when, std::function<void()> task) {
  MutexLock lock(mu_);
  if (stopping_) return;
  timed_tasks_.emplace(when, std::move(task));
  changed_.NotifyAll();
}

void Connection::RunQueue() {
  void* tag = nullptr;
  bool ok = false;
  while (queue_.Next(&tag, &ok)) static_cast<Completion*>(tag)->OnEvent(ok);
}

void Connection::RunTasks() {
  for (;;) {
    std::vector<std::function<void()>> tasks;
    {
      MutexLock lock(mu_);
      for (;;) {
        const auto now = std::chrono::steady_clock::now();
        while (!stopping_ && !timed_tasks_.empty() && timed_tasks_.begin()->first <= now) {
          tasks_.push_back(std::move(timed_tasks_.begin()->second));
          timed_tasks_.erase(timed_tasks_.begin());
        }
        if (!tasks_.empty() || stop_thread_) break;
        if (stopping_ || timed_tasks_.empty()) {
          changed_.Wait(mu_);
        } else {
          changed_.WaitFor(mu_, timed_tasks_.begin()->first - now);
        }
      }
      if (tasks_.empty()) return;
      tasks.swap(tasks_);
    }
    for (std::function<void()>& task : tasks) task();
  }
}

std::string Connection::boot_id() const {
  MutexLock lock(mu_);
  return boot_id_;
}

void Connection::NoteBootId(const grpc::ClientContext& call) {
  const auto& metadata = call.GetServerInitialMetadata();
  const auto it = metadata.find(kBootIdMetadata);
  if (it == metadata.end()) return;
  NoteBootId(std::string(it->second.data(), it->second.size()));
}

void Connection::NoteBootId(const std::string& boot_id_hex) {
  bool restarted = false;
  {
    MutexLock lock(mu_);
    restarted = !boot_id_.empty() && boot_id_ != boot_id_hex;
    boot_id_ = boot_id_hex;
  }
  if (restarted) LogInfo("the daemon was restarted");
}

absl::Status Connection::StatusOf(const grpc::Status& status) const {
  if (status.error_code() == grpc::StatusCode::CANCELLED) {
    MutexLock lock(mu_);
    if (!stopping_) return absl::UnavailableError("the daemon stopped during the call");
    return absl::CancelledError("the client is being destroyed");
  }
  return ExplainConnection(FromGrpc(status), address_, identity_.tls, !boot_id().empty());
}

absl::Status Connection::StatusOf(const grpc::Status& status,
                                  const grpc::ClientContext& call) const {
  const absl::Status ours = StatusOf(status);
  switch (ours.code()) {
    case absl::StatusCode::kUnknown:
    case absl::StatusCode::kInternal:
    case absl::StatusCode::kDataLoss:
    case absl::StatusCode::kPermissionDenied:
    case absl::StatusCode::kUnauthenticated: {
      const auto& metadata = call.GetServerTrailingMetadata();
      const auto id = metadata.find(kRequestIdMetadata);
      if (id == metadata.end()) return ours;
      const absl::string_view text(id->second.data(), id->second.size());
      if (!IsRequestId(text)) return ours;
      return absl::Status(ours.code(), absl::StrCat(ours.message(), " (request ", text, ")"));
    }
    default:
      return ours;
  }
}

absl::Status FromGrpc(const grpc::Status& status) {
  if (status.ok()) return absl::OkStatus();
  return absl::Status(static_cast<absl::StatusCode>(status.error_code()), status.error_message());
}

}  // namespace kvmill
