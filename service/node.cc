#include "service/node.h"

#include <grpcpp/ext/proto_server_reflection_plugin.h>
#include <grpcpp/health_check_service_interface.h>
#include <grpcpp/resource_quota.h>
#include <grpcpp/server.h>
#include <grpcpp/server_builder.h>
#include <grpcpp/server_posix.h>
#include <limits.h>
#include <sys/random.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <nlohmann/json.hpp>
#include <set>
#include <thread>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "client/channel_args.h"
#include "client/convert.h"
#include "client/door_protocol.h"
#include "client/server_address.h"
#include "client/tls/tls_checks.h"
#include "client/tls/tls_credentials.h"
#include "client/transport/ucx_transport.h"
#include "client/units.h"
#include "service/admin_service.h"
#include "service/cache_service.h"
#include "service/cluster_config.h"
#include "service/cluster_node.h"
#include "service/data_plane.h"
#include "service/data_service.h"
#include "service/device_regions.h"
#include "service/disk_config.h"
#include "service/door_memory.h"
#include "service/engine_service.h"
#include "service/etcd/etcd_registry.h"
#include "service/event_journal.h"
#include "service/event_publisher.h"
#include "service/events_config.h"
#include "service/events_service.h"
#include "service/held_runs.h"
#include "service/http_server.h"
#include "service/listeners.h"
#include "service/local_door.h"
#include "service/local_peers.h"
#include "service/metrics.h"
#include "service/metrics_names.h"
#include "service/node_drains.h"
#include "service/peer_service.h"
#include "service/service_context.h"
#include "service/session_table.h"
#include "service/tenant_quotas.h"
#include "service/ticker.h"
#include "service/ticket_service.h"
#include "service/unix_listener.h"
#include "storage/block_watcher.h"
#include "storage/core/clock.h"
#include "storage/core/log.h"
#include "storage/core/mutex.h"
#include "storage/core/status_macros.h"
#include "storage/core/worker_pool.h"
#include "storage/device/device.h"
#include "storage/page_pool.h"
#include "storage/quantization_errors.h"
#include "storage/rocks_disk_store.h"
#include "storage/tiered_store.h"

namespace kvmill {
namespace {

constexpr std::size_t kIoThreads = 4;
constexpr int kGrpcThreadsMax = 32;  // For calls that block (Lookup, Flush, UnregisterMemory, ...).
constexpr int kStreamsPerConnection = 128;
// Several times in a lease's grace.
constexpr std::chrono::milliseconds kSessionTick{50};
// Of host memory, and of the GPU's, that may be under lease: stores need room, too.
constexpr double kLeasedShareMax = 0.75;
// The same for blocks that tickets promise, and for copies that tickets bring.
constexpr double kHeldShareMax = 0.5;
constexpr double kCopiedShareMax = 0.25;
// How long slices that gRPC still holds may keep the store from being destroyed.
constexpr std::chrono::seconds kPinnedWaitMax{5};
// A node that has just started becomes home of many blocks at once: until then it copies slowly.
constexpr std::chrono::nanoseconds kReplicationRamp = std::chrono::seconds(60);
// Of --drain-timeout, for blocks that only this node has; calls in flight get the rest, at least.
constexpr double kHandOverShare = 0.75;
// And until calls do without what peers have not sent: they get the rest to pass on what came.
constexpr double kWaitForPeersShare = 0.9;
// For etcd to take this node out; its lease ends anyway.
constexpr std::chrono::milliseconds kLeaveMax{2000};
constexpr int kHandshakeMs = 10'000;

absl::StatusOr<std::string> MakeBootId() {
  std::string id(16, '\0');
  if (getrandom(id.data(), id.size(), 0) != static_cast<ssize_t>(id.size())) {
    return absl::InternalError("getrandom gave no boot id");
  }
  return id;
}

void WarnIfNobodyIsNamed(const Config& config, const Identities& identities) {
  if (!config.tls.enabled() || config.tenants.empty() || identities.names_somebody()) return;
  LogWarning(absl::StrCat("--tenants ", config.tenants,
                          ": names no certificate and no token: over TCP only nodes come in"));
}

RdmaUse RdmaUseOf(const Config& config) {
  if (config.rdma == "required") return RdmaUse::kRequired;
  return config.rdma == "expected" ? RdmaUse::kExpected : RdmaUse::kAuto;
}

void SetCommonArguments(grpc::ServerBuilder& builder) {
  for (const auto& [name, value] : BulkChannelArgs()) builder.AddChannelArgument(name, value);
  builder.AddChannelArgument(GRPC_ARG_MAX_CONCURRENT_STREAMS, kStreamsPerConnection);
  // Clients ping every kKeepaliveMs while a call waits.
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS,
                             kKeepaliveMs / 2);
  // Whoever connects and then says nothing, or stops, is hung up on: it holds a descriptor. Before
  // the handshakes of TLS and HTTP/2 are over as well, for which gRPC would give two minutes.
  builder.AddChannelArgument(GRPC_ARG_SERVER_HANDSHAKE_TIMEOUT_MS, kHandshakeMs);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  // A taken port is an error, not a port shared with a stranger.
  builder.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
  builder.SetMaxReceiveMessageSize(static_cast<int>(kMessageBytesMax));
  builder.SetSyncServerOption(grpc::ServerBuilder::NUM_CQS, 1);
  builder.SetSyncServerOption(grpc::ServerBuilder::MIN_POLLERS, 1);
  builder.SetSyncServerOption(grpc::ServerBuilder::MAX_POLLERS, 2);
  grpc::ResourceQuota quota("kvmilld");
  quota.SetMaxThreads(kGrpcThreadsMax);
  builder.SetResourceQuota(quota);
}

}  // namespace

class Node::Impl {
 public:
  Impl(const RunningConfig& running, Leaving& leaving)
      : running_(running), config_(running.config()), leaving_(leaving) {}
  ~Impl() { Drain().IgnoreError(); }

  absl::Status Start();
  std::string ReadyLine() const;
  absl::Status Reload(const Config& config, Identities identities, const TenantQuotas& quotas);
  absl::Status Drain();

 private:
  void CheckCertificate() const;
  absl::Status OpenDevices();
  absl::Status OpenStore();
  absl::Status SetWatermarks(const Config& config);  // Of a checked one it is OK.
  absl::Status StartDataPlane();
  absl::Status StartMainServer();
  absl::Status StartAdminServer();
  absl::Status StartHttp();
  absl::StatusOr<std::string> Scrape(const HttpServer::Asker& asker) const;
  absl::Status StartPublisher();
  absl::Status StartCluster();
  void StartDoor();
  void StartDraining();
  void HandOver(std::chrono::system_clock::time_point deadline);
  bool Ready() const { return !context_->draining.load(std::memory_order_relaxed); }
  void StopStore();

  const RunningConfig& running_;
  const Config config_;  // Of the start.
  Leaving& leaving_;
  const Clock& clock_ = SystemClock();
  bool started_ = false;
  absl::Status flushed_;  // At the drain: not OK when blocks are not durable.

  Mutex reload_mu_;
  bool drained_ ABSL_GUARDED_BY(reload_mu_) = false;
  absl::Duration drain_timeout_ ABSL_GUARDED_BY(reload_mu_) = config_.drain_timeout;

  // In the order of start; stopped in the reverse order by Drain.
  std::unique_ptr<UnixListener> listener_;
  std::unique_ptr<LocalDoor> door_;
  std::unique_ptr<Device> device_;
  std::unique_ptr<Device> stand_in_;  // For a GPU, where the device is the host: for tests.
  std::unique_ptr<HeldRuns> held_;    // Null without --cluster.
  std::unique_ptr<EventJournal> journal_;
  std::unique_ptr<WatcherAndObserver> observer_;  // Those two.
  std::unique_ptr<QuantizationErrors> errors_;
  std::unique_ptr<TieredStore> store_;
  RocksDiskStore* encrypted_disk_ = nullptr;  // Of store_; null where nothing is encrypted.
  std::unique_ptr<WorkerPool> encode_pool_;
  std::unique_ptr<WorkerPool> io_pool_;
  std::unique_ptr<DeviceRegions> device_regions_;  // Null without a GPU. Of the sessions' memory.
  std::unique_ptr<SessionTable> sessions_;
  std::unique_ptr<DoorMemory> door_memory_;
  std::unique_ptr<Ticker> session_ticker_;
  std::unique_ptr<ServiceContext> context_;
  LocalPeers peers_;
  std::shared_ptr<grpc::ServerCredentials> tcp_credentials_;  // Of --listen and --admin.
  std::unique_ptr<Callers> callers_;
  std::unique_ptr<CacheService> cache_;
  std::unique_ptr<EventsService> events_;
  std::unique_ptr<EventPublisher> publisher_;  // Null without --events.
  std::unique_ptr<EngineService> engine_;
  std::unique_ptr<DataPlane> data_plane_;  // Null without --ucx.
  std::unique_ptr<DataService> data_;
  std::unique_ptr<PeerService> peer_service_;
  std::unique_ptr<TicketService> ticket_service_;
  std::unique_ptr<NodeDrains> drains_;
  std::unique_ptr<AdminService> local_admin_;
  std::unique_ptr<AdminService> remote_admin_;
  std::unique_ptr<grpc::Server> main_server_;
  std::unique_ptr<grpc::Server> admin_server_;
  std::unique_ptr<Metrics> metrics_;
  std::unique_ptr<HttpServer> http_;
  std::unique_ptr<ClusterNode> cluster_;  // Null without --cluster.
  std::string listen_address_;            // With real ports.
  std::string admin_address_;
};

absl::Status Node::Impl::Start() {
  // The socket first: it is also what keeps two daemons apart that share nothing else.
  KVMILL_ASSIGN_OR_RETURN(listener_, UnixListener::Create(config_.socket));
  // Memory is filled before there are listeners, and that can take a minute.
  KVMILL_RETURN_IF_ERROR(CheckListeners(config_, /*with_ports=*/true));
  KVMILL_ASSIGN_OR_RETURN(const std::string boot_id, MakeBootId());
  LocalDoor::Options door_options;
  door_options.path = DoorPath(config_.socket);
  door_options.boot_id = boot_id;
  KVMILL_ASSIGN_OR_RETURN(door_, LocalDoor::Create(door_options, clock_));
  KVMILL_ASSIGN_OR_RETURN(Identities identities, MakeIdentities(config_));
  WarnIfNobodyIsNamed(config_, identities);
  tcp_credentials_ = config_.tls.enabled()
                         ? ServerCredentialsOf(config_.tls, !config_.tenants.empty())
                         : grpc::InsecureServerCredentials();
  CheckCertificate();
  callers_ = std::make_unique<Callers>(peers_, *door_, geteuid(), std::move(identities));
  KVMILL_RETURN_IF_ERROR(OpenDevices());
  KVMILL_RETURN_IF_ERROR(OpenStore());
  std::uint32_t threads = config_.encode_threads;
  if (threads == 0) threads = std::max(1u, std::thread::hardware_concurrency());
  encode_pool_ = std::make_unique<WorkerPool>(threads, "encode");
  io_pool_ = std::make_unique<WorkerPool>(kIoThreads, "io");
  SessionTable::Options session_options;
  session_options.leased_bytes_max =
      static_cast<std::uint64_t>(kLeasedShareMax * static_cast<double>(config_.host_bytes));
  session_options.leased_gpu_bytes_max =
      static_cast<std::uint64_t>(kLeasedShareMax * static_cast<double>(config_.gpu_bytes));
  session_options.resume_grace_nanos = absl::ToInt64Nanoseconds(config_.session_grace);
  Device* const gpu = device_->info().kind == DeviceKind::kCuda ? device_.get() : stand_in_.get();
  if (gpu != nullptr) {
    device_regions_ = std::make_unique<DeviceRegions>(*gpu, threads, geteuid());
  }
  sessions_ = std::make_unique<SessionTable>(session_options, clock_);
  session_ticker_ = std::make_unique<Ticker>(kSessionTick, [this] { sessions_->Advance(); });
  context_.reset(
      new ServiceContext{*store_, *encode_pool_, *io_pool_, clock_, *callers_, *sessions_});
  context_->boot_id = boot_id;
  context_->boot_id_hex = absl::BytesToHexString(boot_id);
  context_->has_cluster = config_.cluster != "none";
  context_->shared = SharedTenantsOf(config_);
  context_->device = device_->info().name;
  context_->data_dir = config_.data_dir;
  context_->has_other_tiers = !config_.data_dir.empty() || config_.gpu_bytes > 0;
  context_->reads_gpu_memory = device_regions_ != nullptr;
  context_->errors = errors_.get();
  if (encrypted_disk_ != nullptr) {
    context_->disk_keys = [this] { return encrypted_disk_->key_usage(); };
  }
  context_->running_config = &running_;
  context_->encode_threads = threads;
  context_->start_nanos = clock_.MonotonicNanos();
  cache_ = std::make_unique<CacheService>(*context_);
  events_ = std::make_unique<EventsService>(*context_, *journal_);
  engine_ = std::make_unique<EngineService>(*context_);
  peer_service_ = std::make_unique<PeerService>(*context_);
  ticket_service_ = std::make_unique<TicketService>(*context_);
  sessions_->SetEnded([this](const std::string& session) {
    ClusterTickets* const tickets = context_->tickets.load(std::memory_order_acquire);
    if (tickets != nullptr) tickets->SessionEnded(session);
  });
  drains_ = std::make_unique<NodeDrains>(*context_, leaving_, NodeIdOf(config_), config_.tls);
  grpc::EnableDefaultHealthCheckService(true);
  grpc::reflection::InitProtoReflectionServerBuilderPlugin();
  KVMILL_RETURN_IF_ERROR(StartDataPlane());
  KVMILL_RETURN_IF_ERROR(StartMainServer());
  KVMILL_RETURN_IF_ERROR(StartAdminServer());
  KVMILL_RETURN_IF_ERROR(StartHttp());
  KVMILL_RETURN_IF_ERROR(StartPublisher());
  StartDoor();
  listener_->Start([this](int fd, uid_t uid) {
    peers_.Connected(fd, uid);
    grpc::AddInsecureChannelFromFd(main_server_.get(), fd);
  });
  KVMILL_RETURN_IF_ERROR(StartCluster());
  started_ = true;
  return absl::OkStatus();
}

// Of a node of a cluster CheckConfig looked at it. Clients of another daemon may have authorities
// of their own.
void Node::Impl::CheckCertificate() const {
  if (!config_.tls.enabled()) return;
  if (const absl::Status known = CheckTlsAuthority(config_.tls); !known.ok()) {
    LogWarning(absl::StrCat(known.message(), ": clients need its authority in their tls-ca"));
  }
}

absl::Status Node::Impl::OpenDevices() {
  absl::StatusOr<std::unique_ptr<Device>> opened = OpenDevice(config_.device);
  if (!opened.ok()) {
    return absl::Status(opened.status().code(),
                        absl::StrCat("--device ", config_.device, ": ", opened.status().message()));
  }
  device_ = *std::move(opened);
  const DeviceInfo& info = device_->info();
  LogInfo(absl::StrCat("device ", info.name, ": ", info.description));
  if (config_.gpu_bytes == 0) return absl::OkStatus();
  if (info.kind == DeviceKind::kHost) {
    if (config_.device == "auto") {
      return absl::FailedPreconditionError(
          absl::StrCat("--gpu-bytes ", FormatBytes(config_.gpu_bytes),
                       ": no GPU answers; want 0, or --device host to try the tiers without one"));
    }
    LogWarning(absl::StrCat("--device host with --gpu-bytes ", FormatBytes(config_.gpu_bytes),
                            ": host memory stands in for a GPU's; this is for tests of the tiers"));
    stand_in_ = MakeHostDevice();
  } else if (config_.gpu_bytes > info.memory_bytes) {
    return absl::ResourceExhaustedError(absl::StrCat("--gpu-bytes ", FormatBytes(config_.gpu_bytes),
                                                     ": device ", info.name, " has ",
                                                     FormatBytes(info.memory_bytes)));
  }
  return absl::OkStatus();
}

absl::Status Node::Impl::OpenStore() {
  std::unique_ptr<DiskStore> disk;
  if (config_.data_dir.empty()) {
    LogInfo("no --data-dir: blocks live in host memory only and are gone after a restart");
  } else {
    RocksDiskStoreOptions options;
    options.directory = config_.data_dir;
    options.capacity_bytes = config_.disk_bytes;
    KVMILL_ASSIGN_OR_RETURN(options.keys, DiskKeysOf(config_));
    if (options.keys == nullptr) {
      LogInfo("no --disk-key-file: what is on the disk is not encrypted");
    }
    KVMILL_ASSIGN_OR_RETURN(std::unique_ptr<RocksDiskStore> opened, RocksDiskStore::Open(options));
    if (options.keys != nullptr) encrypted_disk_ = opened.get();
    disk = std::move(opened);
  }
  TieredStore::Options options;
  options.host_bytes = config_.host_bytes;
  options.huge_pages = config_.huge_pages == "on"    ? HugePages::kOn
                       : config_.huge_pages == "off" ? HugePages::kOff
                                                     : HugePages::kAuto;
  // Blocks of small models are 64 KiB; the index takes memory for those that are there only.
  constexpr std::uint64_t kSmallBlockBytes = 64 << 10;
  const std::uint64_t disk_bytes = config_.data_dir.empty() ? 0 : config_.disk_bytes;
  options.blocks_max = static_cast<std::uint32_t>(std::clamp<std::uint64_t>(
      (config_.gpu_bytes + config_.host_bytes + disk_bytes) / kSmallBlockBytes, options.blocks_max,
      std::uint64_t{1} << 26));
  // Each tenant needs an arena of its own: a small tier has several small ones.
  options.arena_bytes = std::clamp(config_.host_bytes / 4 / kExtentBytes * kExtentBytes,
                                   kHostBytesMin, options.arena_bytes);
  if (config_.gpu_bytes > 0) {
    options.gpu = stand_in_ != nullptr ? stand_in_.get() : device_.get();
    options.gpu_bytes = config_.gpu_bytes;
    options.gpu_arena_bytes = std::clamp(config_.gpu_bytes / 4 / kExtentBytes * kExtentBytes,
                                         kGpuBytesMin, options.gpu_arena_bytes);
  }
  options.eviction_policy = config_.eviction_policy;
  if (config_.cluster != "none") {
    held_ = std::make_unique<HeldRuns>(HeldRuns::Options{.tenants = SharedTenantsOf(config_)});
  }
  errors_ = std::make_unique<QuantizationErrors>(
      QuantizationErrors::Options{.sample_interval = config_.error_sample_interval,
                                  .namespaces_max = config_.metrics_namespaces});
  options.errors = errors_.get();
  journal_ = std::make_unique<EventJournal>(EventJournal::Options{});
  observer_ = std::make_unique<WatcherAndObserver>(*journal_, held_.get());
  options.observer = observer_.get();
  options.prefault_progress = [](std::uint64_t done, std::uint64_t total) {
    LogInfo(absl::StrCat("host memory: ", done >> 20, " of ", total >> 20, " MiB touched"));
  };
  KVMILL_ASSIGN_OR_RETURN(const TenantQuotas quotas, ReadTenantQuotas(config_.tenants));
  KVMILL_ASSIGN_OR_RETURN(store_, TieredStore::Create(options, clock_, std::move(disk)));
  KVMILL_RETURN_IF_ERROR(store_->SetQuotas(quotas));
  KVMILL_RETURN_IF_ERROR(SetWatermarks(config_));
  journal_->Start(*store_);
  return absl::OkStatus();
}

absl::Status Node::Impl::SetWatermarks(const Config& config) {
  KVMILL_RETURN_IF_ERROR(
      store_->SetWatermarks(Tier::kHost, {config.host_high_watermark, config.host_low_watermark}));
  return store_->SetWatermarks(Tier::kGpu, {config.gpu_high_watermark, config.gpu_low_watermark});
}

absl::Status Node::Impl::StartDataPlane() {
  if (!config_.ucx.empty()) {
    KVMILL_ASSIGN_OR_RETURN(const HostPort address, ParseUcxAddress(config_.ucx));
    UcxOptions ucx;
    ucx.listen = {address.ToString()};
    ucx.only_admitted = true;
    ucx.rdma = RdmaUseOf(config_);
    ucx.family = address.is_ipv6() ? AddressFamily::kIpv6 : AddressFamily::kIpv4;
    DataPlane::Options options;
    options.plaintext = config_.data_plane_plaintext;
    // The socket's path keeps daemons of one host apart.
    std::string host(HOST_NAME_MAX + 1, '\0');
    static_cast<void>(gethostname(host.data(), host.size() - 1));
    options.self.id = NodeIdentity::IdOf(
        config_.node_id.empty() ? absl::StrCat(host.c_str(), config_.socket) : config_.node_id);
    std::memcpy(&options.self.incarnation, context_->boot_id.data(),
                sizeof(options.self.incarnation));
    absl::StatusOr<std::unique_ptr<DataPlane>> plane = DataPlane::Start(
        *context_, options,
        [&ucx](const TransportOptions& transport) { return MakeUcxTransport(transport, ucx); });
    if (!plane.ok()) {
      return absl::Status(plane.status().code(),
                          absl::StrCat("--ucx ", config_.ucx, ": ", plane.status().message()));
    }
    data_plane_ = *std::move(plane);
    context_->data_plane = data_plane_.get();
    if (config_.gpu_bytes > 0) {
      LogInfo(absl::StrCat("data plane: blocks on the GPU are sent ",
                           data_plane_->sends_gpu_memory()
                               ? "from there"
                               : "by way of host memory: UCX has no CUDA here, or it encrypts"));
    }
    if (config_.data_plane_plaintext) {
      LogWarning("--data-plane-plaintext: blocks travel unencrypted between hosts");
    }
  }
  data_ = std::make_unique<DataService>(*context_, data_plane_.get());
  return absl::OkStatus();
}

absl::Status Node::Impl::StartMainServer() {
  local_admin_ = std::make_unique<AdminService>(*context_, AdminGate(peers_, geteuid()), *drains_,
                                                [this] { StartDraining(); });
  grpc::ServerBuilder builder;
  SetCommonArguments(builder);
  builder.RegisterService(cache_.get());
  builder.RegisterService(events_.get());
  builder.RegisterService(engine_.get());
  builder.RegisterService(data_.get());
  builder.RegisterService(peer_service_.get());
  builder.RegisterService(ticket_service_.get());
  builder.RegisterService(local_admin_.get());
  int port = -1;
  HostPort address;
  if (!config_.listen.empty()) {
    KVMILL_ASSIGN_OR_RETURN(address, ParseHostPort(config_.listen));
    builder.AddListeningPort(config_.listen, tcp_credentials_, &port);
  }
  main_server_ = builder.BuildAndStart();
  if (main_server_ == nullptr || port == 0) {
    return absl::UnavailableError(
        absl::StrCat("--listen ", config_.listen, ": cannot listen there"));
  }
  if (port > 0) {
    address.port = static_cast<std::uint16_t>(port);
    listen_address_ = address.ToString();
  }
  return absl::OkStatus();
}

absl::Status Node::Impl::StartAdminServer() {
  if (config_.admin.empty()) return absl::OkStatus();
  remote_admin_ =
      std::make_unique<AdminService>(*context_, AdminGate(), *drains_, [this] { StartDraining(); });
  KVMILL_ASSIGN_OR_RETURN(HostPort address, ParseHostPort(config_.admin));
  grpc::ServerBuilder builder;
  SetCommonArguments(builder);
  builder.RegisterService(remote_admin_.get());
  int port = -1;
  builder.AddListeningPort(config_.admin, tcp_credentials_, &port);
  admin_server_ = builder.BuildAndStart();
  if (admin_server_ == nullptr || port <= 0) {
    return absl::UnavailableError(absl::StrCat("--admin ", config_.admin, ": cannot listen there"));
  }
  address.port = static_cast<std::uint16_t>(port);
  admin_address_ = address.ToString();
  return absl::OkStatus();
}

absl::Status Node::Impl::StartHttp() {
  if (config_.metrics.empty()) return absl::OkStatus();
  KVMILL_ASSIGN_OR_RETURN(const HostPort address, ParseHostPort(config_.metrics));
  metrics_ = std::make_unique<Metrics>(
      *context_, journal_.get(), static_cast<double>(clock_.UnixMillis()) / 1000.0, [this] {
        std::vector<Metrics::CertificateEnd> ends;
        const std::int64_t node_end = ShownCertificateEndSeconds(config_.tls);
        if (node_end != 0) ends.push_back({"node", node_end});
        const std::int64_t etcd_end =
            config_.cluster == "none" ? 0 : ShownCertificateEndSeconds(EtcdTlsOf(config_));
        if (etcd_end != 0) ends.push_back({"etcd", etcd_end});
        return ends;
      });
  KVMILL_ASSIGN_OR_RETURN(
      http_,
      HttpServer::Start(address, {[this](const HttpServer::Asker& asker) { return Scrape(asker); },
                                  [this] { return Ready(); }}));
  return absl::OkStatus();
}

absl::StatusOr<std::string> Node::Impl::Scrape(const HttpServer::Asker& asker) const {
  const absl::StatusOr<NamespaceNames> names = NamesFor(asker, *callers_->identities());
  if (names.ok()) return metrics_->Serialize(*names);
  LogInfo(absl::StrCat("a scrape is refused: ", names.status().message()), {{"peer", asker.host}});
  return names.status();
}

absl::Status Node::Impl::StartPublisher() {
  if (config_.events.empty()) return absl::OkStatus();
  KVMILL_ASSIGN_OR_RETURN(const EventPublisher::Options options, MakePublisherOptions(config_));
  KVMILL_ASSIGN_OR_RETURN(publisher_, EventPublisher::Start(options, *journal_, *store_, clock_));
  return absl::OkStatus();
}

void Node::Impl::StartDoor() {
  door_memory_ = std::make_unique<DoorMemory>(*store_, *sessions_, device_regions_.get(),
                                              device_->info().name, geteuid());
  LocalDoor::Handlers handlers;
  handlers.entered = [this](DoorClientId client) { sessions_->ClientEntered(client); };
  handlers.left = [this](DoorClientId client) {
    sessions_->ClientLeft(client);
    if (data_plane_ != nullptr) data_plane_->CallerLeft(client);
  };
  handlers.arena = [this](DoorClientId client, const DoorArenaRequest& request) {
    return door_memory_->ArenaFor(client, request);
  };
  handlers.region = [this](const DoorPeer& peer, const DoorRegion& region, int fd) {
    return door_memory_->TakeRegion(peer, region, fd);
  };
  handlers.device_region = [this](const DoorPeer& peer, const DoorDeviceRegion& region) {
    return door_memory_->TakeDeviceRegion(peer, region);
  };
  door_->Start(std::move(handlers));
}

absl::Status Node::Impl::StartCluster() {
  if (config_.cluster == "none") return absl::OkStatus();
  KVMILL_ASSIGN_OR_RETURN(const EtcdOptions etcd, MakeEtcdOptions(config_));
  ClusterNode::Options options;
  KVMILL_ASSIGN_OR_RETURN(options.membership,
                          MakeMembershipOptions(config_, listen_address_, admin_address_,
                                                context_->boot_id, listener_->holder()));
  options.clients.data_plane_plaintext = config_.data_plane_plaintext;
  options.clients.rdma = RdmaUseOf(config_);
  options.clients.tls = config_.tls;
  options.blocks.peer_nanos = absl::ToInt64Nanoseconds(config_.peer_timeout);
  options.blocks.copies = config_.copies;
  options.blocks.replication.bytes_per_second = config_.replication_rate;
  options.blocks.replication.ramp_nanos = kReplicationRamp.count();
  options.blocks.held = held_.get();
  options.blocks.shared = context_->shared;
  options.tickets.held_bytes_max =
      static_cast<std::uint64_t>(kHeldShareMax * static_cast<double>(config_.host_bytes));
  options.tickets.copied_bytes_max =
      static_cast<std::uint64_t>(kCopiedShareMax * static_cast<double>(config_.host_bytes));
  KVMILL_ASSIGN_OR_RETURN(
      cluster_, ClusterNode::Start(clock_, *store_, std::move(options), [&etcd](Loop& loop) {
        return EtcdRegistry::Create(etcd, loop);
      }));
  context_->peer_answers.store(&cluster_->blocks().answers());
  context_->tickets.store(&cluster_->tickets());
  context_->cluster.store(cluster_.get());
  held_->Start(*store_, [this](absl::Span<const Announcement> changed,
                               absl::Span<const HeldTable::Left> left) {
    cluster_->blocks().Hold(changed, left);
  });
  if (context_->draining.load()) cluster_->SetDraining();  // An administrator was quick.
  return absl::OkStatus();
}

std::string Node::Impl::ReadyLine() const {
  const auto text_or_null = [](const std::string& text) {
    return text.empty() ? nlohmann::ordered_json() : nlohmann::ordered_json(text);
  };
  const nlohmann::ordered_json line = {
      {"ready", true},
      {"version", kSoftwareVersion},
      {"boot_id", context_->boot_id_hex},
      {"device", context_->device},
      {"socket", config_.socket},
      {"listen", text_or_null(listen_address_)},
      {"admin", text_or_null(admin_address_)},
      {"tls", config_.tls.enabled()},
      {"events", text_or_null(publisher_ == nullptr ? "" : publisher_->address())},
      {"events_replay", text_or_null(publisher_ == nullptr ? "" : publisher_->replay_address())},
      {"metrics", text_or_null(http_ == nullptr ? "" : http_->address().ToString())},
      {"ucx", text_or_null(data_plane_ == nullptr ? "" : data_plane_->addresses().front())},
      {"data_dir", text_or_null(config_.data_dir)},
  };
  // Paths may be any bytes; JSON is UTF-8.
  return line.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

absl::Status Node::Impl::Reload(const Config& config, Identities identities,
                                const TenantQuotas& quotas) {
  MutexLock lock(reload_mu_);
  if (drained_) return absl::CancelledError("the daemon drains");
  KVMILL_RETURN_IF_ERROR(store_->SetQuotas(quotas));
  KVMILL_RETURN_IF_ERROR(SetWatermarks(config));
  WarnIfNobodyIsNamed(config, identities);
  if (config_.tls.enabled() && config_.tenants.empty() && identities.has_tokens()) {
    LogWarning(absl::StrCat("--tenants ", config.tenants,
                            " has tokens: without a certificate they "
                            "let nobody in before another start, this one had no --tenants"));
  }
  const std::set<std::string> revoked = callers_->identities()->LostBy(identities);
  callers_->SetIdentities(std::move(identities));
  // Their calls do not say each time who they are.
  if (data_plane_ != nullptr && !revoked.empty()) data_plane_->Revoke(revoked);
  if (!revoked.empty()) journal_->Revoke(revoked);
  errors_->SetOptions({.sample_interval = config.error_sample_interval,
                       .namespaces_max = config.metrics_namespaces});
  sessions_->SetResumeGrace(absl::ToInt64Nanoseconds(config.session_grace));
  drain_timeout_ = config.drain_timeout;
  if (cluster_ != nullptr) {
    cluster_->blocks().SetPeerNanos(absl::ToInt64Nanoseconds(config.peer_timeout));
    cluster_->blocks().SetReplicationRate(config.replication_rate);
  }
  return absl::OkStatus();
}

void Node::Impl::StartDraining() {
  if (context_->draining.exchange(true)) return;
  if (started_) LogInfo("draining: stores are refused from now on");
  if (ClusterNode* cluster = context_->cluster.load()) cluster->SetDraining();
  sessions_->Drain();
  for (grpc::Server* server : {main_server_.get(), admin_server_.get()}) {
    if (server != nullptr && server->GetHealthCheckService() != nullptr) {
      server->GetHealthCheckService()->SetServingStatus(false);
    }
  }
}

// While this node still answers: those that take blocks over fetch them here.
void Node::Impl::HandOver(std::chrono::system_clock::time_point deadline) {
  const std::chrono::nanoseconds left = deadline - std::chrono::system_clock::now();
  const auto share = [left](double of) {
    return static_cast<std::int64_t>(of * static_cast<double>(left.count()));
  };
  cluster_->blocks().EndWaiting(clock_.MonotonicNanos() + share(kWaitForPeersShare));
  const Handover::Report report = cluster_->blocks().HandOver(share(kHandOverShare));
  leaving_.HandedOver(report.blocks, report.blocks_left);
  const std::string line = absl::StrCat("drain: ", report.blocks, " blocks are on other nodes, ",
                                        report.blocks_left, " are not");
  if (report.blocks_left == 0) {
    LogInfo(line);
  } else {
    LogWarning(absl::StrCat(line, config_.data_dir.empty()
                                      ? " and may be lost"
                                      : " and are missed until this one is back"));
  }
}

absl::Status Node::Impl::Drain() {
  absl::Duration timeout;
  {
    MutexLock lock(reload_mu_);  // What reads the configuration again does not touch what ends.
    if (std::exchange(drained_, true)) return flushed_;
    timeout = drain_timeout_;
  }
  const auto deadline = std::chrono::system_clock::now() + absl::ToChronoMilliseconds(timeout);
  if (context_ != nullptr) StartDraining();
  if (cluster_ != nullptr) {
    HandOver(deadline);
    cluster_->tickets().Stop();
  } else {
    leaving_.HandedOver(0, 0);
  }
  if (listener_ != nullptr) listener_->Stop();
  // Their streams would keep the servers waiting, their leases the store.
  if (journal_ != nullptr) journal_->Stop(absl::UnavailableError("the daemon stops"));
  publisher_.reset();
  if (sessions_ != nullptr) sessions_->Stop(absl::UnavailableError("the daemon stops"));
  // Calls in flight finish, or are cancelled at the deadline. No call, no task: then the pools.
  for (grpc::Server* server : {main_server_.get(), admin_server_.get()}) {
    if (server != nullptr) server->Shutdown(deadline);
  }
  main_server_.reset();
  admin_server_.reset();
  if (cluster_ != nullptr) {
    const absl::Status left = cluster_->Leave(kLeaveMax);
    if (!left.ok()) {
      LogWarning(
          absl::StrCat("drain: the cluster sees this node until its lease ends: ", left.message()));
    }
  }
  if (door_ != nullptr) door_->Stop();
  if (data_plane_ != nullptr) {
    data_plane_->Stop(std::chrono::steady_clock::now() +
                      std::max(std::chrono::milliseconds(0),
                               std::chrono::duration_cast<std::chrono::milliseconds>(
                                   deadline - std::chrono::system_clock::now())));
  }
  session_ticker_.reset();
  encode_pool_.reset();
  io_pool_.reset();
  http_.reset();
  if (held_ != nullptr) held_->Stop();
  cluster_.reset();
  data_plane_.reset();
  StopStore();
  door_.reset();
  listener_.reset();
  return flushed_;
}

void Node::Impl::StopStore() {
  if (store_ == nullptr) return;
  if (!config_.data_dir.empty()) {
    const absl::StatusOr<std::uint64_t> flushed = store_->Flush();
    if (flushed.ok() && !started_) {
      // Nobody was served, and nobody is told of a drain.
    } else if (flushed.ok()) {
      LogInfo(absl::StrCat("drained: ", *flushed, " blocks made durable"));
    } else {
      flushed_ = flushed.status();
      LogError(absl::StrCat("drain: not every block is durable: ", flushed_.ToString()));
    }
  }
  if (context_ != nullptr) {
    const auto give_up = std::chrono::steady_clock::now() + kPinnedWaitMax;
    while (context_->counters.pinned_slices.load(std::memory_order_acquire) > 0) {
      if (std::chrono::steady_clock::now() > give_up) {
        // gRPC would read freed pages: the store stays until the process ends. It is flushed.
        LogWarning("drain: a reader still holds pages; the store is left to the process exit");
        static_cast<void>(store_.release());
        static_cast<void>(observer_.release());  // Whom the store tells.
        static_cast<void>(journal_.release());
        static_cast<void>(held_.release());
        static_cast<void>(errors_.release());
        static_cast<void>(device_.release());
        static_cast<void>(stand_in_.release());
        return;
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }
  store_.reset();
}

absl::StatusOr<std::unique_ptr<Node>> Node::Start(const RunningConfig& running, Leaving& leaving) {
  auto impl = std::make_unique<Impl>(running, leaving);
  KVMILL_RETURN_IF_ERROR(impl->Start());
  return std::unique_ptr<Node>(new Node(std::move(impl)));
}

Node::Node(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Node::~Node() = default;
std::string Node::ReadyLine() const { return impl_->ReadyLine(); }
absl::Status Node::Reload(const Config& config, Identities identities, const TenantQuotas& quotas) {
  return impl_->Reload(config, std::move(identities), quotas);
}
absl::Status Node::Drain() { return impl_->Drain(); }

}  // namespace kvmill
