#include "client/transport/ucx_transport.h"

#include <dlfcn.h>
#include <ucp/api/ucp.h>
#include <ucs/config/global_opts.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <set>
#include <system_error>
#include <thread>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "client/transport/loop_sleep.h"
#include "client/transport/own_hosts.h"
#include "client/transport/port_guard.h"
#include "client/transport/transport_base.h"
#include "client/transport/ucx_handles.h"
#include "client/transport/ucx_wire.h"
#include "storage/core/check.h"
#include "storage/core/log.h"
#include "storage/core/status_macros.h"

namespace kvmill {
namespace {

absl::Status CheckFamily(const SocketAddress& address, AddressFamily family) {
  if (address.is_ipv6() != (family == AddressFamily::kIpv6)) {
    return absl::InvalidArgumentError(
        absl::StrCat("address ", address.ToString(), ": this transport speaks ",
                     family == AddressFamily::kIpv6 ? "IPv6" : "IPv4"));
  }
  if (address.is_ipv6() && address.is_loopback()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "address ", address.ToString(), ": UCX has no transport for IPv6's loopback address"));
  }
  return absl::OkStatus();
}

// How long who stands in for the loop looks for an answer before it sleeps: about what an answer
// takes that needs no disk. It lets others have the processor meanwhile. The loop itself never
// looks in vain, so that nothing spins while no call waits.
constexpr std::int64_t kLookNanos = 50'000;

// UCX takes over what its process does about crashes: a backtrace instead of the engine's own
// handler. Gives that back.
void ReleaseSignals() {
  ucs_global_opts_set_value("ERROR_SIGNALS", "");  // Else UCX's sigaction keeps its handlers.
  for (const int number : {SIGSEGV, SIGBUS, SIGFPE, SIGILL}) {
    struct sigaction action {};
    if (sigaction(number, nullptr, &action) != 0 || (action.sa_flags & SA_SIGINFO) == 0) continue;
    Dl_info library{};
    if (dladdr(reinterpret_cast<void*>(action.sa_sigaction), &library) == 0 ||
        library.dli_fname == nullptr || !absl::StrContains(library.dli_fname, "libucs.")) {
      continue;  // Somebody else's.
    }
    signal(number, SIG_DFL);
  }
}

class UcxTransport final : public TransportBase {
 public:
  // Unless `guard` is null it shuts what is listened on.
  UcxTransport(const TransportOptions& options, UcxContext context, UcxWorker worker,
               std::unique_ptr<PortGuard> guard)
      : TransportBase(options, &SystemClock()),
        context_(std::move(context)),
        worker_(std::move(worker)),
        guard_(std::move(guard)),
        wires_(worker_.get()) {}
  ~UcxTransport() override;

  // Once, before it is given to anybody.
  absl::Status Start(const UcxOptions& ucx, const std::set<std::string>& interfaces);

  std::vector<std::string> addresses() const override { return addresses_; }
  bool Supports(MemoryKind memory) const override {
    return memory == MemoryKind::kHost ||
           (options_.plaintext && (memory_types_ & UCS_BIT(UcxMemory(memory))) != 0);
  }
  absl::Status Admit(const std::vector<std::string>& hosts) override {
    return guard_ == nullptr ? absl::OkStatus() : guard_->Admit(hosts);
  }
  std::vector<std::string> sources() const override { return sources_; }
  bool InLoop() const override { return std::this_thread::get_id() == loop_id_; }
  bool TryEnter() override;
  void Leave(std::int64_t due_nanos) override;
  bool RunUntil(absl::FunctionRef<bool()> done) override;

 private:
  absl::StatusOr<std::unique_ptr<Wire>> DialWire(const std::string& address,
                                                 WireEvents* events) override;
  void Wake() override { sleep_.Wake(); }
  void Run();
  bool RunOnce();  // True: something happened.
  void Sleep() ABSL_EXCLUSIVE_LOCKS_REQUIRED(loop_mu_);
  void AcceptPending();
  static void OnDialed(ucp_conn_request_h request, void* transport);
  static ucs_status_t OnActiveMessage(void* channel, const void* header, std::size_t header_bytes,
                                      void* data, std::size_t bytes,
                                      const ucp_am_recv_param_t* parameters);
  struct Channel {
    UcxTransport* transport = nullptr;
    WireChannel channel = WireChannel::kSegments;
  };

  const UcxContext context_;
  const UcxWorker worker_;
  const std::unique_ptr<PortGuard> guard_;  // Null: everybody reaches the ports.
  std::vector<UcxListener> listeners_;
  std::vector<std::string> addresses_;
  std::vector<std::string> sources_;
  AddressFamily family_ = AddressFamily::kIpv4;
  std::uint64_t memory_types_ = 0;
  std::array<Channel, 2> channels_;
  LoopSleep sleep_;
  std::atomic<bool> stop_{false};
  std::thread thread_;
  // Held by whoever is the loop: the thread while it is awake, one that entered, or one that stands
  // in. UCX's worker is made for that (UCS_THREAD_MODE_SERIALIZED).
  Mutex loop_mu_;
  std::atomic<std::thread::id> loop_id_{};  // Who holds it.
  bool stood_in_ ABSL_GUARDED_BY(loop_mu_) = false;
  bool stand_in_sleeps_ ABSL_GUARDED_BY(loop_mu_) = false;
  // Of the loop:
  UcxWires wires_;
  std::vector<ucp_conn_request_h> dialed_;
};

UcxTransport::~UcxTransport() {
  stop_.store(true, std::memory_order_relaxed);
  if (thread_.joinable()) {
    Wake();
    thread_.join();
  }
  listeners_.clear();
}

absl::Status UcxTransport::Start(const UcxOptions& ucx, const std::set<std::string>& interfaces) {
  family_ = ucx.family;
  sources_ = HostsOfInterfaces(interfaces, family_ == AddressFamily::kIpv6);
  memory_types_ = context_.memory_types();
  const std::vector<std::string> resources = context_.Resources();
  const auto has = [&](absl::string_view prefix) {
    return std::any_of(resources.begin(), resources.end(),
                       [&](const std::string& name) { return absl::StartsWith(name, prefix); });
  };
  if (!has("tcp/")) {
    return absl::FailedPreconditionError(absl::StrCat("UCX has no TCP here, only ",
                                                      absl::StrJoin(resources, ", "),
                                                      ": see UCX_TLS and UCX_NET_DEVICES"));
  }
  const bool rdma = has("rc_") || has("dc_") || has("ud_");
  if (!rdma && (ucx.rdma == RdmaUse::kRequired || ucx.rdma == RdmaUse::kExpected)) {
    const bool required = ucx.rdma == RdmaUse::kRequired;
    const std::string text = absl::StrCat(
        "RDMA is ", required ? "required" : "expected", ", and UCX has none here, only ",
        absl::StrJoin(resources, ", "), ": see UCX_TLS and UCX_NET_DEVICES");
    if (required) return absl::FailedPreconditionError(text);
    LogWarning(absl::StrCat("transport: ", text));
  }
  set_rdma(ucx.rdma == RdmaUse::kExpected || (ucx.rdma == RdmaUse::kAuto && rdma),
           ucx.rdma == RdmaUse::kRequired);

  for (const WireChannel channel : {WireChannel::kHandshake, WireChannel::kSegments}) {
    Channel& argument = channels_[static_cast<std::size_t>(channel) - 1];
    argument = {.transport = this, .channel = channel};
    ucp_am_handler_param_t parameters{};
    parameters.field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_CB |
                            UCP_AM_HANDLER_PARAM_FIELD_ARG | UCP_AM_HANDLER_PARAM_FIELD_FLAGS;
    parameters.id = static_cast<unsigned>(channel);
    parameters.cb = OnActiveMessage;
    parameters.arg = &argument;
    parameters.flags = UCP_AM_FLAG_WHOLE_MSG;
    const ucs_status_t status = ucp_worker_set_am_recv_handler(worker_.get(), &parameters);
    if (status != UCS_OK) return UcxError("a handler for active messages", status);
  }
  ucp_worker_attr_t attributes{};
  attributes.field_mask = UCP_WORKER_ATTR_FIELD_MAX_AM_HEADER;
  if (ucp_worker_query(worker_.get(), &attributes) != UCS_OK ||
      attributes.max_am_header < sizeof(SegmentHeader) + kSegmentHeadBytesMax) {
    return absl::FailedPreconditionError(
        absl::StrCat("UCX sends headers of up to ", attributes.max_am_header, " bytes, want ",
                     sizeof(SegmentHeader) + kSegmentHeadBytesMax, ": see UCX_TCP_TX_SEG_SIZE"));
  }

  int worker_fd = -1;
  const ucs_status_t waits = ucp_worker_get_efd(worker_.get(), &worker_fd);
  if (waits != UCS_OK) return UcxError("waiting for events", waits);
  KVMILL_RETURN_IF_ERROR(sleep_.Open(worker_fd));
  for (std::size_t i = 0; i < ucx.listen.size(); ++i) {
    KVMILL_ASSIGN_OR_RETURN(const SocketAddress address, ParseSocketAddress(ucx.listen[i]));
    const std::set<ino_t> others = ListenersOn(address.port());
    KVMILL_ASSIGN_OR_RETURN(UcxListener listener,
                            UcxListener::Make(worker_, address, OnDialed, this));
    KVMILL_ASSIGN_OR_RETURN(SocketAddress bound, listener.address());
    if (guard_ != nullptr) KVMILL_RETURN_IF_ERROR(guard_->Shut(bound.port(), others));
    if (!ucx.advertise.empty()) {
      const bool v6 = absl::StrContains(ucx.advertise[i], ':');
      KVMILL_ASSIGN_OR_RETURN(
          bound, ParseSocketAddress(
                     absl::StrCat(v6 ? "[" : "", ucx.advertise[i], v6 ? "]:" : ":", bound.port())));
    }
    addresses_.push_back(bound.ToString());
    listeners_.push_back(std::move(listener));
  }
  thread_ = std::thread([this] { Run(); });
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<Wire>> UcxTransport::DialWire(const std::string& address,
                                                             WireEvents* events) {
  KVMILL_ASSIGN_OR_RETURN(const SocketAddress socket, ParseSocketAddress(address));
  KVMILL_RETURN_IF_ERROR(CheckFamily(socket, family_));
  auto wire = std::make_unique<UcxWire>(&wires_, events);
  KVMILL_RETURN_IF_ERROR(wire->Dial(socket));
  return wire;
}

void UcxTransport::OnDialed(ucp_conn_request_h request, void* transport) {
  static_cast<UcxTransport*>(transport)->dialed_.push_back(request);
}

void UcxTransport::AcceptPending() {
  std::vector<ucp_conn_request_h> requests;
  requests.swap(dialed_);
  for (const ucp_conn_request_h request : requests) {
    const bool accepted =
        AcceptWire([&](WireEvents* events) -> absl::StatusOr<std::unique_ptr<Wire>> {
          auto wire = std::make_unique<UcxWire>(&wires_, events);
          KVMILL_RETURN_IF_ERROR(wire->Accept(request));
          return wire;
        });
    // Any listener can reject: the request knows where it came from.
    if (!accepted) ucp_listener_reject(listeners_.front().get(), request);
  }
}

ucs_status_t UcxTransport::OnActiveMessage(void* channel, const void* header,
                                           std::size_t header_bytes, void* data, std::size_t bytes,
                                           const ucp_am_recv_param_t* parameters) {
  const auto* const ours = static_cast<Channel*>(channel);
  if ((parameters->recv_attr & UCP_AM_RECV_ATTR_FIELD_REPLY_EP) == 0) return UCS_OK;
  UcxWire* const wire = ours->transport->wires_.Find(parameters->reply_ep);
  if (wire == nullptr) return UCS_OK;
  const bool rendezvous = (parameters->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV) != 0;
  WireMessage message;
  message.channel = ours->channel;
  message.header = {static_cast<const std::byte*>(header), header_bytes};
  message.data_bytes = bytes;
  if (rendezvous) {
    message.token = data;
  } else {
    message.data = {static_cast<const std::byte*>(data), bytes};
  }
  // OK drops what is left at the sender, and its request ends well.
  return wire->OnMessage(message) && rendezvous ? UCS_INPROGRESS : UCS_OK;
}

bool UcxTransport::TryEnter() ABSL_NO_THREAD_SAFETY_ANALYSIS {
  if (!loop_mu_.TryLock()) return false;
  // What this thread posted before comes first.
  if (has_tasks()) {
    loop_mu_.Unlock();
    return false;
  }
  loop_id_.store(std::this_thread::get_id());
  return true;
}

void UcxTransport::Leave(std::int64_t due_nanos) ABSL_NO_THREAD_SAFETY_ANALYSIS {
  EndSleepIfDue(wires_.wanted() ? INT64_MIN : due_nanos);
  loop_id_.store(std::thread::id());
  loop_mu_.Unlock();  // Last: the transport may be destroyed as soon as the loop goes on.
}

bool UcxTransport::RunOnce() {
  bool busy = false;
  // Now and then something else gets its turn, however busy the network is. What a message leads to
  // comes before the next message: its bytes are in the cache.
  for (int i = 0; i < 16 && ucp_worker_progress(worker_.get()) != 0; ++i) {
    busy = true;
    RunTasks();
  }
  if (!dialed_.empty()) AcceptPending();
  busy |= wires_.Attend();
  busy |= RunTasks();
  busy |= RunDue();
  busy |= wires_.Attend();
  return busy;
}

bool UcxTransport::RunUntil(absl::FunctionRef<bool()> done) ABSL_NO_THREAD_SAFETY_ANALYSIS {
  // Among several calls it would be now this caller and now that one, which costs more than it
  // saves.
  if (InLoop() || calls_started() != 1 || !loop_mu_.TryLock()) return false;
  if (stood_in_) {
    loop_mu_.Unlock();
    return false;
  }
  stood_in_ = true;
  loop_id_.store(std::this_thread::get_id());
  sleep_.BeginStandIn();
  WakeUp();
  std::int64_t sleep_at_nanos = NowNanos() + kLookNanos;
  for (;;) {
    const bool busy = RunOnce();
    if (done()) break;
    const std::int64_t now_nanos = NowNanos();
    if (busy) {
      sleep_at_nanos = now_nanos + kLookNanos;
    } else if (now_nanos < sleep_at_nanos) {
      std::this_thread::yield();  // The peer may wait for this very processor.
    } else if (ucp_worker_arm(worker_.get()) == UCS_OK && StandInFallsAsleep()) {
      stand_in_sleeps_ = true;
      loop_id_.store(std::thread::id());
      loop_mu_.Unlock();
      sleep_.StandInSleep();
      loop_mu_.Lock();
      loop_id_.store(std::this_thread::get_id());
      stand_in_sleeps_ = false;
      WakeUp();
    }
  }
  // The loop must hear of what comes from now on, and of what it shall do already.
  const bool armed = ucp_worker_arm(worker_.get()) == UCS_OK;
  if (!StandInFallsAsleep() || !armed) Wake();
  sleep_.EndStandIn();
  stood_in_ = false;
  loop_id_.store(std::thread::id());
  loop_mu_.Unlock();
  return true;
}

void UcxTransport::Run() {
  MutexLock lock(loop_mu_);
  loop_id_.store(std::this_thread::get_id());
  bool stopping = false;
  for (;;) {
    const bool busy = RunOnce();
    if (std::exchange(stand_in_sleeps_, false)) sleep_.WakeStandIn();
    if (stop_.load(std::memory_order_relaxed)) {
      if (!stopping) {
        stopping = true;
        Shutdown();
        continue;
      }
      if (!busy && !has_connections() && NextDueNanos() == INT64_MAX) return;
    }
    if (!busy) Sleep();
  }
}

void UcxTransport::Sleep() {
  const std::int64_t next_nanos = FallAsleep();
  int timeout_ms = -1;
  if (next_nanos != INT64_MAX) {
    const std::int64_t now_nanos = NowNanos();
    if (next_nanos <= now_nanos) return WakeUp();
    constexpr std::int64_t kNanosPerMilli = 1'000'000;
    timeout_ms = static_cast<int>(std::min<std::int64_t>(
        (next_nanos - now_nanos + kNanosPerMilli - 1) / kNanosPerMilli, 3'600'000));
  }
  // Arming fails while something waits to be progressed; only then is it safe not to sleep.
  if (ucp_worker_arm(worker_.get()) != UCS_OK) return WakeUp();
  loop_id_.store(std::thread::id());
  loop_mu_.Unlock();
  sleep_.Sleep(timeout_ms);
  loop_mu_.Lock();
  loop_id_.store(std::this_thread::get_id());
  WakeUp();
}

// UCX takes signals when it is loaded, so a process that only links this library has to get them
// back as well: its handler can hang in a process that crashed, which then never dies.
[[maybe_unused]] const bool kSignalsReleased = [] {
  ReleaseSignals();
  return true;
}();

// The interfaces to keep to; empty: all. RDMA devices have names of their own, and which of them
// belongs to an address is not known here.
absl::StatusOr<std::set<std::string>> InterfacesFor(const UcxOptions& ucx) {
  std::set<std::string> interfaces;
  std::error_code error;
  const std::filesystem::directory_iterator rdma("/sys/class/infiniband", error);
  if (!error && rdma != std::filesystem::directory_iterator()) return interfaces;
  for (const std::string& text : ucx.dial) {
    KVMILL_ASSIGN_OR_RETURN(const SocketAddress address, ParseSocketAddress(text));
    interfaces.insert(InterfaceTo(address));
  }
  for (const std::string& text : ucx.listen) {
    KVMILL_ASSIGN_OR_RETURN(const SocketAddress address, ParseSocketAddress(text));
    if (address.is_wildcard()) return std::set<std::string>();
    interfaces.insert(InterfaceOf(address));
  }
  interfaces.erase("");  // Listening or dialing there fails, and says so.
  return interfaces;
}

// Where UCX shall listen, when that has to be known.
struct Ports {
  std::uint16_t listener = 0;
  std::uint16_t data = 0;
};

absl::StatusOr<Ports> ChoosePorts(const UcxOptions& ucx) {
  const bool ipv6 = ucx.family == AddressFamily::kIpv6;
  Ports ports;
  std::uint16_t first = 0;
  std::uint16_t last = 0;
  if (!ucx.listen.empty()) {
    KVMILL_ASSIGN_OR_RETURN(const SocketAddress address, ParseSocketAddress(ucx.listen.front()));
    ports.listener = address.port();
    constexpr std::uint16_t kListenerMax = 65535 - kDataPortsMax;
    while (ports.listener == 0 || (address.port() == 0 && ports.listener > kListenerMax)) {
      KVMILL_ASSIGN_OR_RETURN(ports.listener, FreePort(ipv6, 0, 0));
    }
    if (ports.listener > kListenerMax) {
      return absl::InvalidArgumentError(absl::StrCat("port ", ports.listener, ": want at most ",
                                                     kListenerMax, ", the data port is one of the ",
                                                     kDataPortsMax, " that follow"));
    }
    first = static_cast<std::uint16_t>(ports.listener + 1);
    last = static_cast<std::uint16_t>(ports.listener + kDataPortsMax);
  }
  const char* const range = std::getenv("UCX_TCP_PORT_RANGE");
  if (range != nullptr && absl::string_view(range) != "0") {
    const std::pair<std::string, std::string> ends = absl::StrSplit(range, absl::MaxSplits('-', 1));
    std::uint32_t from = 0;
    std::uint32_t to = 0;
    if (!absl::SimpleAtoi(ends.first, &from) || !absl::SimpleAtoi(ends.second, &to) || from == 0 ||
        from > to || to > 65535) {
      return absl::InvalidArgumentError(
          absl::StrCat("UCX_TCP_PORT_RANGE=", range, ": want FIRST-LAST, 1 to 65535"));
    }
    first = static_cast<std::uint16_t>(from);
    last = static_cast<std::uint16_t>(to);
  }
  KVMILL_ASSIGN_OR_RETURN(ports.data, FreePort(ipv6, first, last));
  return ports;
}

absl::Status CheckUcxOptions(const UcxOptions& ucx) {
  if (!ucx.advertise.empty() && ucx.advertise.size() != ucx.listen.size()) {
    return absl::InvalidArgumentError(absl::StrCat(
        ucx.advertise.size(), " addresses to advertise for ", ucx.listen.size(), " to listen on"));
  }
  if (ucx.only_admitted && ucx.listen.size() > 1) {
    return absl::InvalidArgumentError(
        absl::StrCat(ucx.listen.size(), " addresses to listen on, want one with only_admitted"));
  }
  for (const std::string& text : ucx.listen) {
    KVMILL_ASSIGN_OR_RETURN(const SocketAddress address, ParseSocketAddress(text));
    KVMILL_RETURN_IF_ERROR(CheckFamily(address, ucx.family));
    if (address.is_wildcard() && ucx.advertise.empty()) {
      return absl::InvalidArgumentError(
          absl::StrCat("listening on ", text, " needs an address to advertise"));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<Transport>> TryToMake(const TransportOptions& options,
                                                     UcxOptions ucx) {
  KVMILL_ASSIGN_OR_RETURN(UcxConfig config, UcxConfig::Read());
  if (!ucx.tls.empty()) {
    const std::vector<std::string> names = absl::StrSplit(ucx.tls, ',');
    const bool has_tcp = ucx.tls == "all" || absl::StartsWith(ucx.tls, "^") ||
                         std::find(names.begin(), names.end(), "tcp") != names.end();
    KVMILL_RETURN_IF_ERROR(config.Set("TLS", has_tcp ? ucx.tls : ucx.tls + ",tcp"));
  }
  // Settings of UCX's TCP: ucp_config_modify wants their names without "TCP_".
  KVMILL_RETURN_IF_ERROR(
      config.Set("AF_PRIO", ucx.family == AddressFamily::kIpv6 ? "inet6,inet" : "inet,inet6"));
  // Its PUT fails assertions of UCX 1.13 when several are under way, which ends the process; active
  // messages carry the same bytes as fast.
  KVMILL_RETURN_IF_ERROR(config.Set("PUT_ENABLE", "n"));
  // A pushed segment with its header is one message of TCP, not several that UCX puts together in a
  // buffer of its own; and one read takes what has arrived.
  KVMILL_RETURN_IF_ERROR(config.Set("TX_SEG_SIZE", "512k"));
  KVMILL_RETURN_IF_ERROR(config.Set("RX_SEG_SIZE", "1m"));
  KVMILL_ASSIGN_OR_RETURN(std::set<std::string> interfaces, InterfacesFor(ucx));
  if (config.Get("NET_DEVICES") != "all") {
    interfaces.clear();
  } else if (!interfaces.empty()) {
    KVMILL_RETURN_IF_ERROR(config.Set("NET_DEVICES", absl::StrJoin(interfaces, ",")));
  }
  Ports ports;
  std::set<ino_t> others;
  if (ucx.only_admitted) {
    KVMILL_ASSIGN_OR_RETURN(ports, ChoosePorts(ucx));
    KVMILL_RETURN_IF_ERROR(config.Set("PORT_RANGE", absl::StrCat(ports.data, "-", ports.data)));
    if (!ucx.listen.empty()) {
      KVMILL_ASSIGN_OR_RETURN(const SocketAddress address, ParseSocketAddress(ucx.listen.front()));
      ucx.listen.front() = address.WithPort(ports.listener).ToString();
    }
    // RDMA's connection manager has no sockets that could be shut.
    KVMILL_RETURN_IF_ERROR(config.Set("SOCKADDR_TLS_PRIORITY", "tcp"));
    others = ListenersOn(ports.data);
  }
  for (const auto& [name, value] : ucx.settings) KVMILL_RETURN_IF_ERROR(config.Set(name, value));
  KVMILL_ASSIGN_OR_RETURN(UcxContext context, UcxContext::Make(config));
  KVMILL_ASSIGN_OR_RETURN(UcxWorker worker, UcxWorker::Make(context));
  std::unique_ptr<PortGuard> guard;
  if (ucx.only_admitted) {
    guard = std::make_unique<PortGuard>();
    KVMILL_RETURN_IF_ERROR(guard->Shut(ports.data, others));
  }
  auto transport = std::make_unique<UcxTransport>(options, std::move(context), std::move(worker),
                                                  std::move(guard));
  KVMILL_RETURN_IF_ERROR(transport->Start(ucx, interfaces));
  return transport;
}

}  // namespace

absl::StatusOr<std::unique_ptr<Transport>> MakeUcxTransport(const TransportOptions& options,
                                                            const UcxOptions& ucx) {
  KVMILL_RETURN_IF_ERROR(CheckTransportOptions(options));
  KVMILL_RETURN_IF_ERROR(CheckUcxOptions(ucx));
  // One at a time: each has to know its sockets from the others'.
  static Mutex making;
  const MutexLock lock(making);
  constexpr int kAttempts = 4;
  for (int attempt = 1;; ++attempt) {
    absl::StatusOr<std::unique_ptr<Transport>> made = TryToMake(options, ucx);
    // A port that was free is not any more, or a stranger was quicker than the guard.
    const bool again = absl::IsUnavailable(made.status()) || absl::IsAborted(made.status());
    if (!ucx.only_admitted || !again || attempt == kAttempts) return made;
  }
}

}  // namespace kvmill
