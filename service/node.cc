#include "service/node.h"

#include <grpcpp/server.h>
#include <grpcpp/server_posix.h>
#include <sys/random.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "client/door_protocol.h"
#include "client/transport/ucx_transport.h"
#include "service/cluster_config.h"
#include "service/cluster_node.h"
#include "service/data_plane.h"
#include "service/data_plane_config.h"
#include "service/device_regions.h"
#include "service/disk_config.h"
#include "service/door_handlers.h"
#include "service/door_memory.h"
#include "service/drain_handover.h"
#include "service/etcd/etcd_registry.h"
#include "service/event_journal.h"
#include "service/event_publisher.h"
#include "service/events_config.h"
#include "service/grpc_servers.h"
#include "service/grpc_services.h"
#include "service/held_runs.h"
#include "service/listeners.h"
#include "service/local_door.h"
#include "service/local_peers.h"
#include "service/node_devices.h"
#include "service/node_drains.h"
#include "service/node_http.h"
#include "service/ready_line.h"
#include "service/service_context.h"
#include "service/session_table.h"
#include "service/store_config.h"
#include "service/tenant_quotas.h"
#include "service/ticker.h"
#include "service/tls_config.h"
#include "service/unix_listener.h"
#include "storage/block_watcher.h"
#include "storage/core/clock.h"
#include "storage/core/log.h"
#include "storage/core/mutex.h"
#include "storage/core/status_macros.h"
#include "storage/core/worker_pool.h"
#include "storage/error_guard.h"
#include "storage/quantization_errors.h"
#include "storage/rocks_disk_store.h"
#include "storage/tiered_store.h"

namespace kvmill {
namespace {

constexpr std::size_t kIoThreads = 4;
// Several times in a lease's grace.
constexpr std::chrono::milliseconds kSessionTick{50};
// How long slices that gRPC still holds may keep the store from being destroyed.
constexpr std::chrono::seconds kPinnedWaitMax{5};
// For etcd to take this node out; its lease ends anyway.
constexpr std::chrono::milliseconds kLeaveMax{2000};

absl::StatusOr<std::string> MakeBootId() {
  std::string id(16, '\0');
  if (getrandom(id.data(), id.size(), 0) != static_cast<ssize_t>(id.size())) {
    return absl::InternalError("getrandom gave no boot id");
  }
  return id;
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
  absl::StatusOr<std::unique_ptr<DiskStore>> OpenDisk();
  absl::Status OpenStore();
  void MakeSessions();
  void MakeContext(const std::string& boot_id);
  absl::Status StartDataPlane();
  absl::Status StartServers();
  absl::Status StartHttp();
  absl::Status StartPublisher();
  void StartDoor();
  absl::Status StartCluster();
  void StartDraining();
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
  NodeDevices devices_;
  std::unique_ptr<HeldRuns> held_;  // Null without --cluster.
  std::unique_ptr<EventJournal> journal_;
  std::unique_ptr<WatcherAndObserver> observer_;  // Those two.
  std::unique_ptr<ErrorGuard> guard_;
  std::unique_ptr<QuantizationErrors> errors_;
  std::unique_ptr<TieredStore> store_;
  RocksDiskStore* encrypted_disk_ = nullptr;  // Of store_; null where nothing is encrypted.
  std::uint32_t encode_threads_ = 0;
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
  std::unique_ptr<EventPublisher> publisher_;  // Null without --events.
  std::unique_ptr<DataPlane> data_plane_;      // Null without --ucx.
  std::unique_ptr<NodeDrains> drains_;
  std::unique_ptr<GrpcServices> services_;
  GrpcServer main_server_;
  GrpcServer admin_server_;               // Empty without --admin.
  std::unique_ptr<NodeHttp> http_;        // Null without --metrics.
  std::unique_ptr<ClusterNode> cluster_;  // Null without --cluster.
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
  tcp_credentials_ = TcpCredentialsOf(config_);
  WarnOfAuthority(config_);
  callers_ = std::make_unique<Callers>(peers_, *door_, geteuid(), std::move(identities));
  KVMILL_ASSIGN_OR_RETURN(devices_, OpenNodeDevices(config_));
  KVMILL_RETURN_IF_ERROR(OpenStore());
  encode_threads_ = config_.encode_threads;
  if (encode_threads_ == 0) encode_threads_ = std::max(1u, std::thread::hardware_concurrency());
  encode_pool_ = std::make_unique<WorkerPool>(encode_threads_, "encode");
  io_pool_ = std::make_unique<WorkerPool>(kIoThreads, "io");
  MakeSessions();
  MakeContext(boot_id);
  KVMILL_RETURN_IF_ERROR(StartDataPlane());
  KVMILL_RETURN_IF_ERROR(StartServers());
  KVMILL_RETURN_IF_ERROR(StartHttp());
  KVMILL_RETURN_IF_ERROR(StartPublisher());
  StartDoor();
  listener_->Start([this](int fd, uid_t uid) {
    peers_.Connected(fd, uid);
    grpc::AddInsecureChannelFromFd(main_server_.server.get(), fd);
  });
  KVMILL_RETURN_IF_ERROR(StartCluster());
  started_ = true;
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<DiskStore>> Node::Impl::OpenDisk() {
  if (config_.data_dir.empty()) {
    LogInfo("no --data-dir: blocks live in host memory only and are gone after a restart");
    return std::unique_ptr<DiskStore>();
  }
  RocksDiskStoreOptions options;
  options.directory = config_.data_dir;
  options.capacity_bytes = config_.disk_bytes;
  KVMILL_ASSIGN_OR_RETURN(options.keys, DiskKeysOf(config_));
  if (options.keys == nullptr) LogInfo("no --disk-key-file: what is on the disk is not encrypted");
  KVMILL_ASSIGN_OR_RETURN(std::unique_ptr<RocksDiskStore> disk, RocksDiskStore::Open(options));
  if (options.keys != nullptr) encrypted_disk_ = disk.get();
  return disk;
}

absl::Status Node::Impl::OpenStore() {
  KVMILL_ASSIGN_OR_RETURN(std::unique_ptr<DiskStore> disk, OpenDisk());
  TieredStore::Options options = MakeStoreOptions(config_, devices_.gpu());
  if (config_.cluster != "none") {
    held_ = std::make_unique<HeldRuns>(HeldRuns::Options{.tenants = SharedTenantsOf(config_)});
  }
  guard_ = std::make_unique<ErrorGuard>(MakeGuardOptions(config_));
  options.guard = guard_.get();
  errors_ = std::make_unique<QuantizationErrors>(
      QuantizationErrors::Options{.sample_interval = config_.error_sample_interval,
                                  .namespaces_max = config_.metrics_namespaces,
                                  .guard = guard_.get()});
  options.errors = errors_.get();
  journal_ = std::make_unique<EventJournal>(EventJournal::Options{});
  observer_ = std::make_unique<WatcherAndObserver>(*journal_, held_.get());
  options.observer = observer_.get();
  KVMILL_ASSIGN_OR_RETURN(const TenantQuotas quotas, ReadTenantQuotas(config_.tenants));
  KVMILL_ASSIGN_OR_RETURN(store_, TieredStore::Create(options, clock_, std::move(disk)));
  KVMILL_RETURN_IF_ERROR(store_->SetQuotas(quotas));
  KVMILL_RETURN_IF_ERROR(SetWatermarks(config_, *store_));
  journal_->Start(*store_);
  return absl::OkStatus();
}

void Node::Impl::MakeSessions() {
  if (Device* const gpu = devices_.gpu(); gpu != nullptr) {
    device_regions_ = std::make_unique<DeviceRegions>(*gpu, encode_threads_, geteuid());
  }
  sessions_ = std::make_unique<SessionTable>(MakeSessionOptions(config_), clock_);
  session_ticker_ = std::make_unique<Ticker>(kSessionTick, [this] { sessions_->Advance(); });
}

void Node::Impl::MakeContext(const std::string& boot_id) {
  context_.reset(
      new ServiceContext{*store_, *encode_pool_, *io_pool_, clock_, *callers_, *sessions_});
  context_->boot_id = boot_id;
  context_->boot_id_hex = absl::BytesToHexString(boot_id);
  context_->has_cluster = config_.cluster != "none";
  context_->shared = SharedTenantsOf(config_);
  context_->device = devices_.device->info().name;
  context_->data_dir = config_.data_dir;
  context_->has_other_tiers = !config_.data_dir.empty() || config_.gpu_bytes > 0;
  context_->reads_gpu_memory = device_regions_ != nullptr;
  context_->errors = errors_.get();
  context_->guard = guard_.get();
  if (encrypted_disk_ != nullptr) {
    context_->disk_keys = [this] { return encrypted_disk_->key_usage(); };
  }
  context_->running_config = &running_;
  context_->encode_threads = encode_threads_;
  context_->start_nanos = clock_.MonotonicNanos();
  sessions_->SetEnded([this](const std::string& session) {
    ClusterTickets* const tickets = context_->tickets.load(std::memory_order_acquire);
    if (tickets != nullptr) tickets->SessionEnded(session);
  });
}

absl::Status Node::Impl::StartDataPlane() {
  if (config_.ucx.empty()) return absl::OkStatus();
  KVMILL_ASSIGN_OR_RETURN(const UcxOptions ucx, MakeUcxOptions(config_));
  absl::StatusOr<std::unique_ptr<DataPlane>> plane = DataPlane::Start(
      *context_, MakeDataPlaneOptions(config_, context_->boot_id),
      [&ucx](const TransportOptions& transport) { return MakeUcxTransport(transport, ucx); });
  if (!plane.ok()) {
    return absl::Status(plane.status().code(),
                        absl::StrCat("--ucx ", config_.ucx, ": ", plane.status().message()));
  }
  data_plane_ = *std::move(plane);
  context_->data_plane = data_plane_.get();
  LogDataPlane(config_, *data_plane_);
  return absl::OkStatus();
}

absl::Status Node::Impl::StartServers() {
  drains_ = std::make_unique<NodeDrains>(*context_, leaving_, NodeIdOf(config_), config_.tls);
  services_ = std::make_unique<GrpcServices>(*context_, *journal_, data_plane_.get(), *drains_,
                                             peers_, geteuid(), [this] { StartDraining(); });
  EnableHealthAndReflection();
  KVMILL_ASSIGN_OR_RETURN(main_server_, StartGrpcServer("--listen", config_.listen,
                                                        tcp_credentials_, services_->main()));
  if (config_.admin.empty()) return absl::OkStatus();
  KVMILL_ASSIGN_OR_RETURN(admin_server_, StartGrpcServer("--admin", config_.admin, tcp_credentials_,
                                                         services_->admin()));
  return absl::OkStatus();
}

absl::Status Node::Impl::StartHttp() {
  if (config_.metrics.empty()) return absl::OkStatus();
  KVMILL_ASSIGN_OR_RETURN(http_, NodeHttp::Start(config_, *context_, *journal_));
  return absl::OkStatus();
}

absl::Status Node::Impl::StartPublisher() {
  if (config_.events.empty()) return absl::OkStatus();
  KVMILL_ASSIGN_OR_RETURN(const EventPublisher::Options options, MakePublisherOptions(config_));
  KVMILL_ASSIGN_OR_RETURN(publisher_, EventPublisher::Start(options, *journal_, *store_, clock_));
  return absl::OkStatus();
}

void Node::Impl::StartDoor() {
  door_memory_ = std::make_unique<DoorMemory>(*store_, *sessions_, device_regions_.get(),
                                              devices_.device->info().name, geteuid());
  door_->Start(MakeDoorHandlers(*sessions_, *door_memory_, data_plane_.get()));
}

absl::Status Node::Impl::StartCluster() {
  if (config_.cluster == "none") return absl::OkStatus();
  KVMILL_ASSIGN_OR_RETURN(const EtcdOptions etcd, MakeEtcdOptions(config_));
  ClusterNode::Options options = MakeClusterNodeOptions(config_);
  KVMILL_ASSIGN_OR_RETURN(
      options.membership,
      MakeMembershipOptions(config_, main_server_.address, admin_server_.address, context_->boot_id,
                            listener_->holder()));
  options.blocks.held = held_.get();
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
  ReadyFacts facts;
  facts.boot_id_hex = context_->boot_id_hex;
  facts.device = context_->device;
  facts.listen = main_server_.address;
  facts.admin = admin_server_.address;
  if (publisher_ != nullptr) {
    facts.events = publisher_->address();
    facts.events_replay = publisher_->replay_address();
  }
  if (http_ != nullptr) facts.metrics = http_->address().ToString();
  if (data_plane_ != nullptr) facts.ucx = data_plane_->addresses().front();
  return FormatReadyLine(config_, facts);
}

absl::Status Node::Impl::Reload(const Config& config, Identities identities,
                                const TenantQuotas& quotas) {
  MutexLock lock(reload_mu_);
  if (drained_) return absl::CancelledError("the daemon drains");
  KVMILL_RETURN_IF_ERROR(store_->SetQuotas(quotas));
  KVMILL_RETURN_IF_ERROR(SetWatermarks(config, *store_));
  WarnIfNobodyIsNamed(config, identities);
  WarnOfUselessTokens(config_, config, identities);
  const std::set<std::string> revoked = callers_->identities()->LostBy(identities);
  callers_->SetIdentities(std::move(identities));
  // Their calls do not say each time who they are.
  if (data_plane_ != nullptr && !revoked.empty()) data_plane_->Revoke(revoked);
  if (!revoked.empty()) journal_->Revoke(revoked);
  errors_->SetOptions({.sample_interval = config.error_sample_interval,
                       .namespaces_max = config.metrics_namespaces});
  guard_->SetOptions(MakeGuardOptions(config));
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
  main_server_.SetNotServing();
  admin_server_.SetNotServing();
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
    HandOver(cluster_->blocks(), clock_, deadline, /*has_disk=*/!config_.data_dir.empty(),
             leaving_);
    cluster_->tickets().Stop();
  } else {
    leaving_.HandedOver({.alone = true});
  }
  if (listener_ != nullptr) listener_->Stop();
  // Their streams would keep the servers waiting, their leases the store.
  if (journal_ != nullptr) journal_->Stop(absl::UnavailableError("the daemon stops"));
  publisher_.reset();
  if (sessions_ != nullptr) sessions_->Stop(absl::UnavailableError("the daemon stops"));
  // Calls in flight finish, or are cancelled at the deadline. No call, no task: then the pools.
  for (grpc::Server* server : {main_server_.server.get(), admin_server_.server.get()}) {
    if (server != nullptr) server->Shutdown(deadline);
  }
  main_server_.server.reset();
  admin_server_.server.reset();
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
        static_cast<void>(guard_.release());
        static_cast<void>(devices_.device.release());
        static_cast<void>(devices_.stand_in.release());
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
