// What every gRPC service of a daemon shares. Made by Node; outlives the services.
#ifndef KVMILL_SERVICE_SERVICE_CONTEXT_H_
#define KVMILL_SERVICE_SERVICE_CONTEXT_H_

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/elsewhere.h"
#include "kvmill/v1/common.pb.h"
#include "service/callers.h"
#include "service/session_table.h"
#include "service/tenants.h"
#include "storage/core/clock.h"
#include "storage/core/worker_pool.h"
#include "storage/encryption_keys.h"
#include "storage/tiered_store.h"

namespace kvmill {

class ClusterBlocks;
class ClusterNode;
class ClusterTickets;
class DataPlane;
class ErrorGuard;
class PeerAnswers;
class QuantizationErrors;
class RunningConfig;

// Limits that the outside meets; refusals name the value and the limit.
inline constexpr std::uint64_t kMessageBytesMax = std::uint64_t{4} << 20;
inline constexpr std::uint32_t kBatchKeysMax = 32768;  // * 66 bytes stays below kMessageBytesMax.
inline constexpr std::uint32_t kStoreStreamsMax = 64;  // * kStoreWindowBytes = 1 GiB at worst.
inline constexpr std::uint32_t kFetchStreamsMax = 256;
inline constexpr std::uint64_t kStoreWindowBytes = std::uint64_t{16} << 20;
inline constexpr std::uint32_t kOpenBlocksMax = 4096;  // Of one Store stream.
// Results that the caller of a Store has not read: then the daemon stops reading too.
inline constexpr std::size_t kStoreRepliesMax = 4096;

// What the service itself counts: what happens on the wire. Relaxed: each value alone is true.
struct ServiceCounters {
  std::atomic<std::uint64_t> inline_bytes_in{0};    // Bulk bytes of Store.
  std::atomic<std::uint64_t> inline_bytes_out{0};   // Bulk bytes of Fetch.
  std::atomic<std::uint64_t> page_bytes_in{0};      // Of engines' pages, read in place,
  std::atomic<std::uint64_t> gpu_page_bytes_in{0};  //   and of those on the GPU.
  std::atomic<std::uint64_t> mapped_bytes{0};       // Of the pages that Map answered with.
  std::atomic<std::uint32_t> map_loads{0};          // Map calls that wait for the disk.
  std::atomic<std::uint32_t> store_streams{0};
  std::atomic<std::uint32_t> fetch_streams{0};
  // Slices that reference pinned pages and that gRPC still holds.
  std::atomic<std::uint64_t> pinned_slices{0};
};

struct ServiceContext {
  TieredStore& store;
  WorkerPool& encode_pool;
  WorkerPool& io_pool;  // For what may wait for a disk.
  const Clock& clock;
  const Callers& callers;
  SessionTable& sessions;
  std::string boot_id{};  // 16 random bytes.
  std::string boot_id_hex{};
  std::string device{};
  std::string data_dir{};         // Empty: no disk tier.
  bool has_other_tiers = false;   // Than host memory.
  bool reads_gpu_memory = false;  // Of engines.
  std::uint32_t encode_threads = 0;
  std::int64_t start_nanos = 0;           // Of `clock`.
  const DataPlane* data_plane = nullptr;  // Null: none.
  bool has_cluster = false;               // By configuration.
  // Set once calls may be running already. Null: there is none (yet).
  std::atomic<ClusterNode*> cluster{nullptr};
  std::atomic<PeerAnswers*> peer_answers{nullptr};  // Of the cluster.
  std::atomic<ClusterTickets*> tickets{nullptr};    // Of the cluster.
  ServiceCounters counters{};
  std::atomic<bool> draining{false};
  const QuantizationErrors* errors = nullptr;     // Of samples of stored tiles; null: none.
  const ErrorGuard* guard = nullptr;              // Of the same; null: none.
  const RunningConfig* running_config = nullptr;  // Null in tests without a daemon.
  // Of the disk tier's files; null where nothing is encrypted.
  std::function<std::vector<EncryptionKeyUsage>()> disk_keys = nullptr;
  SharedTenants shared{};  // With the other nodes of the cluster.

  // A namespace of the caller's tenant. NOT_FOUND for an unknown one, INVALID_ARGUMENT for a
  // malformed reference. Where no other node can be asked what a name means, what was heard of it
  // (service/heard_names.h) is enough.
  absl::StatusOr<TieredStore::NamespaceInfo> Resolve(const Caller& caller,
                                                     const v1::NamespaceRef& ref) const;
  // As Resolve, but only what engines of this node opened, and what was opened by its fingerprint.
  absl::StatusOr<TieredStore::NamespaceInfo> Known(const Caller& caller,
                                                   const v1::NamespaceRef& ref) const;
  // As Resolve; and a node of the cluster gets what it names by its fingerprint of whichever tenant
  // is shared. For what nodes call to copy blocks: everything else is for a tenant.
  absl::StatusOr<TieredStore::NamespaceInfo> ResolveForNode(const Caller& caller,
                                                            const v1::NamespaceRef& ref) const;
  // Where blocks of the caller's tenant that this node lacks are looked for; null: nowhere.
  ClusterBlocks* BlocksOfPeers(const Caller& caller, const Elsewhere& elsewhere) const;
  // Asks other nodes what `ref` is, when Resolve said `unknown` of it, NOT_FOUND, and this caller
  // may use what they have. False: nobody is asked, `done` does not run, and `unknown` is the
  // answer. Otherwise `done` runs once, on the cluster's loop, with the namespace, which is open
  // here then, or with what the caller is told. A name that was learned so stays unbound here.
  using NamespaceDone = std::function<void(absl::StatusOr<TieredStore::NamespaceInfo>)>;
  bool Learn(const absl::Status& unknown, const Caller& caller, const v1::NamespaceRef& ref,
             const Elsewhere& elsewhere, std::chrono::system_clock::time_point deadline,
             NamespaceDone done) const;
  bool registered() const;  // In the cluster, now.
  // What is answered as long as those of the cluster are null: UNAVAILABLE where they will come,
  // else FAILED_PRECONDITION.
  absl::Status NoCluster() const;
  // UNAVAILABLE while draining.
  absl::Status CheckAcceptsStores() const;
};

// INVALID_ARGUMENT naming the count and kBatchKeysMax, or a bad key.
absl::StatusOr<std::vector<BlockKey>> KeysFromProto(
    const google::protobuf::RepeatedPtrField<std::string>& keys);

}  // namespace kvmill

#endif  // KVMILL_SERVICE_SERVICE_CONTEXT_H_
