// The daemon's side of the data plane: who may connect, and the calls of those who did.
//
// A connection is made with an offer that its caller got over gRPC; what is done on it is done as
// that caller, in that tenant. Fetches answer with pages straight from where they lie, pinned until
// the transport is done with them: blocks on the GPU from there where the transport can (in
// plaintext only), else from a copy in host memory. Stores are received into staging memory of a
// fixed size and encoded from there; what finds no room waits, inside the windows of its
// connection.
//
// Nothing here blocks the transport's thread: what may wait for a disk runs on the I/O pool, what
// computes on the encode pool. A peer that dies leaves nothing behind but the heads that it wrote,
// which the store gives up in time like those of any writer.
//
// Thread-safe.
#ifndef KVMILL_SERVICE_DATA_PLANE_H_
#define KVMILL_SERVICE_DATA_PLANE_H_

#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/transport/transport.h"
#include "kvmill/v1/data.pb.h"
#include "service/callers.h"
#include "service/service_context.h"
#include "storage/core/mutex.h"
#include "storage/store_stats.h"
#include "storage/tiered_store.h"

namespace kvmill {

// Limits that the outside meets; refusals name the value and the limit.
inline constexpr std::uint32_t kOffersPerCallerMax = 16;       // Not used yet.
inline constexpr std::uint32_t kConnectionsPerCallerMax = 64;  // With the offers.
inline constexpr std::uint32_t kHostsPerCallerMax = 16;        // Let in for them.
inline constexpr std::uint32_t kDataCallsMax = 1024;           // At once, of all connections.
inline constexpr std::uint64_t kDataChunkBytesMax = std::uint64_t{1} << 20;  // Of one store call.
inline constexpr std::uint64_t kStagingBytesMax = std::uint64_t{64} << 20;
// A fetch call is answered with less than this and one layer group more.
inline constexpr std::uint64_t kFetchReplyBytes = std::uint64_t{4} << 20;

class DataPlane final : public TransportHandler {
 public:
  struct Options {
    NodeIdentity self;
    bool plaintext = false;
    std::chrono::nanoseconds receive_timeout = std::chrono::seconds(30);  // Of one store call.
  };
  using MakeTransport =
      std::function<absl::StatusOr<std::unique_ptr<Transport>>(const TransportOptions& options)>;

  // `context` outlives it.
  static absl::StatusOr<std::unique_ptr<DataPlane>> Start(ServiceContext& context,
                                                          const Options& options,
                                                          const MakeTransport& make);
  ~DataPlane() override;

  // Calls in flight finish until then; then connections are closed. When it returns no call runs
  // and none can start. Idempotent.
  void Stop(std::chrono::steady_clock::time_point deadline);

  // `who` is what is counted as one caller, `hosts` (numeric) where its connections come from:
  // while the offer can be used or its connection lives, they reach the transport. As Data.Connect
  // answers.
  absl::StatusOr<Offer> MakeOffer(const Caller& caller, const std::string& who,
                                  const NodeIdentity::Id& only_for, std::vector<std::string> hosts);
  // Closes the connections of a local client, and drops its offers.
  void CallerLeft(DoorClientId client);
  // The same of everybody of these tenants who came over TCP: they have to say again who they are.
  void Revoke(const std::set<std::string>& tenants);

  bool plaintext() const { return options_.plaintext; }
  bool sends_gpu_memory() const { return sends_gpu_memory_; }
  std::vector<std::string> addresses() const { return transport_->addresses(); }
  std::vector<std::string> sources() const { return transport_->sources(); }

  struct ByteCounts {
    std::atomic<std::uint64_t> in{0};   // Of store calls.
    std::atomic<std::uint64_t> out{0};  // Of fetch calls.
  };
  struct Stats {
    std::map<std::string, std::pair<std::uint64_t, std::uint64_t>> bytes;  // In, out by transport.
    StageHistogram::Snapshot store_seconds, fetch_seconds;  // That payloads travelled.
    std::uint64_t connections = 0;
    std::map<std::string, std::uint64_t> connections_by_transport;
    std::uint64_t hosts = 0;  // Let in.
    std::uint64_t calls = 0;
    std::uint64_t staging_bytes = 0;
    // Of blocks on the GPU that were sent, by the memory that they were sent from.
    std::uint64_t gpu_bytes_from_gpu = 0, gpu_bytes_from_host = 0;
  };
  Stats stats() const;

  void OnConnection(const ConnectionPtr& connection) override;
  void OnCall(const ConnectionPtr& connection, std::unique_ptr<IncomingCall> call) override;
  void OnClosed(const ConnectionPtr& connection, const absl::Status& why) override;

 private:
  // Who has an offer, and then a connection.
  struct Peer {
    Caller caller;
    std::string who;
    std::vector<std::string> hosts;
    std::int64_t offer_expires_nanos = 0;
    ConnectionPtr connection;  // Null until the offer was used.
    ByteCounts* bytes = nullptr;
  };
  using PeerPtr = std::shared_ptr<const Peer>;  // Calls keep it beyond their connection.
  using Peers = std::map<std::uint64_t, std::shared_ptr<Peer>>;  // By owner tag.

  // Keeps Stop waiting.
  class Running {
   public:
    explicit Running(DataPlane* plane) : plane_(plane) {}
    Running(const Running&) = delete;
    Running& operator=(const Running&) = delete;
    ~Running();
    DataPlane* plane() const { return plane_; }

   private:
    DataPlane* const plane_;
  };
  struct FetchCall;
  struct StoreCall;
  using FetchCallPtr = std::shared_ptr<FetchCall>;  // Tasks are copied.
  using StoreCallPtr = std::shared_ptr<StoreCall>;
  using Slab = std::unique_ptr<std::byte[]>;  // kDataChunkBytesMax bytes.

  DataPlane(ServiceContext& context, const Options& options);

  absl::StatusOr<TieredStore::NamespaceInfo> Resolve(const Peer& peer,
                                                     const std::string& fingerprint) const;
  absl::Status Admit(const Peer& peer) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Disconnect(absl::FunctionRef<bool(const Caller&)> whom);
  Peers::iterator Forget(Peers::iterator peer) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void ForgetUnused() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);  // Offers whose time is up.
  absl::Status TellTransport() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  bool Begin();  // One call more; false when there are too many.

  void StartFetch(const PeerPtr& peer, const v1::DataFetch& request,
                  std::unique_ptr<IncomingCall> call, std::unique_ptr<Running> running);
  // The block from the memory that the reply is of. Not valid: it is not there.
  BlockRef FromMemory(const FetchCall& fetch, const BlockId& id) const;
  // Adds layer groups to the reply; false when the next one is not in memory, and `may_block` is.
  bool Gather(FetchCall& fetch, bool may_block);
  void FetchFrom(TieredStore::NamespaceInfo ns, const FetchCallPtr& fetch);
  std::chrono::system_clock::time_point DeadlineOf(const FetchCall& fetch) const;
  static void Answer(const FetchCallPtr& fetch);

  void StartStore(const PeerPtr& peer, v1::DataStore request, std::unique_ptr<IncomingCall> call,
                  std::unique_ptr<Running> running);
  void StartDurable(const PeerPtr& peer, const v1::DataDurable& request,
                    std::unique_ptr<IncomingCall> call, std::unique_ptr<Running> running);
  void Receive(const StoreCallPtr& store, Slab slab);
  void Write(const StoreCallPtr& store);  // Task of the encode pool.
  void StartTicketRead(const PeerPtr& peer, const v1::ReadTicketRequest& request,
                       std::unique_ptr<IncomingCall> call, std::unique_ptr<Running> running);
  void GiveBack(Slab slab);
  void ScheduleSweep();

  ServiceContext& context_;
  const Options options_;
  std::unique_ptr<Transport> transport_;  // Constant after Start, as the next.
  bool sends_gpu_memory_ = false;
  std::atomic<std::uint64_t> gpu_bytes_from_gpu_{0}, gpu_bytes_from_host_{0};

  mutable Mutex mu_;
  CondVar idle_;
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  std::uint64_t running_ ABSL_GUARDED_BY(mu_) = 0;
  std::uint64_t next_tag_ ABSL_GUARDED_BY(mu_) = 1;
  Peers peers_ ABSL_GUARDED_BY(mu_);
  std::map<std::string, std::uint32_t> hosts_ ABSL_GUARDED_BY(mu_);  // Of how many peers.
  // By transport, at most a few; never removed.
  std::map<std::string, std::unique_ptr<ByteCounts>> bytes_ ABSL_GUARDED_BY(mu_);
  std::vector<Slab> free_slabs_ ABSL_GUARDED_BY(mu_);
  std::uint64_t slabs_used_ ABSL_GUARDED_BY(mu_) = 0;
  std::deque<StoreCallPtr> waiting_ ABSL_GUARDED_BY(mu_);  // For a slab.
  // Payloads that are on their way, by when they started; swept so that no peer holds a slab for
  // long without sending.
  std::multimap<std::int64_t, std::weak_ptr<StoreCall>> receiving_ ABSL_GUARDED_BY(mu_);
  bool sweep_scheduled_ ABSL_GUARDED_BY(mu_) = false;
  StageHistogram store_seconds_{kStageSecondsBounds};
  StageHistogram fetch_seconds_{kStageSecondsBounds};
};

}  // namespace kvmill

#endif  // KVMILL_SERVICE_DATA_PLANE_H_
