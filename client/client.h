// The client library: what an engine (or the CLI) links to talk to a kvmilld.
//
// Core and wrappers. Every call exists as `XAsync(arguments, options, done)`, which returns at once
// and calls `done` exactly once on a thread of the library, and as a blocking `X` around it. `done`
// (and the callbacks of a FetchSink) must not block for long and must not destroy the Client; they
// may start other calls. Every call has a deadline. Nothing throws.
//
// Memory. Spans and pointers in arguments are borrowed until `done` was called (until the blocking
// form returns): data to be stored is not copied, the transport reads it in place. That holds for
// failed and timed-out calls too: `done` comes when the transport has let go of the memory.
//
// Errors. RPC-level: INVALID_ARGUMENT bad request or over a limit; NOT_FOUND unknown namespace;
// FAILED_PRECONDITION the namespace is bound to another identity, protocol versions too far apart,
// or a call in a forked child; RESOURCE_EXHAUSTED full: wait RetryAfter(); PERMISSION_DENIED admin
// call from a place where it is not allowed; UNAVAILABLE no daemon there, it died during the call,
// or it drains: retry later or elsewhere; DEADLINE_EXCEEDED outcome unknown; CANCELLED the Client
// goes. Per block: NOT_FOUND is a miss; every other code is one block's failure, others are not
// affected. To an engine every failure of a fetch is a miss: recompute.
//
// Connection. Made lazily, in the background, again after it broke (with back-off). A restarted
// daemon shows in boot_id(); namespaces opened here are registered again by themselves. With
// Options::when_away kMiss a daemon that is away or restarts is no error either (WhenAway).
//
// Fork. In a child of a process that made a Client every call, and Create, is FAILED_PRECONDITION:
// gRPC does not survive it. Fork before the first Client, or start processes by exec.
//
// Thread-safe. Any number of calls may run at once.
//
// Beside this header engines include client/kv_sink.h (KvSink: a FetchSink that decodes into the
// engine's memory), client/mapped_blocks.h (what Map gives) and client/shared_memory.h (memory that
// can be stored from without a copy). docs/client.md has an example, the fields of a NamespaceSpec,
// and how to link.
#ifndef KVMILL_CLIENT_CLIENT_H_
#define KVMILL_CLIENT_CLIENT_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "client/elsewhere.h"
#include "client/engine_geometry.h"
#include "client/page_store.h"
#include "client/server_address.h"
#include "client/ticket.h"
#include "client/tls/tls_files.h"
#include "client/transport/rdma_use.h"
#include "kernels/algorithm.h"
#include "storage/core/block_key.h"
#include "storage/core/namespace.h"
#include "storage/core/page_layout.h"
#include "storage/core/tier.h"

namespace kvmill {

// K or V of some heads of one layer of one block in the engine's memory: the 16-bit value of
// (token, head, channel) lies at
//
//   page(token) + (token % page_tokens) * token_stride_bytes + head * head_stride_bytes + 2 *
//   channel
//
// where page(token) is `data` when page_tokens is 0 (all tokens from one address), else
// pages[token / page_tokens] + offset_bytes. Zero-copy when the heads of a token are adjacent; fast
// when whole pages are.
struct KvView {
  const std::byte* data = nullptr;
  const std::byte* const* pages = nullptr;
  std::size_t offset_bytes = 0;
  std::uint32_t page_tokens = 0;
  std::ptrdiff_t token_stride_bytes = 0;
  std::ptrdiff_t head_stride_bytes = 0;  // 2 * head_dim when heads are adjacent.

  // An array [tokens, heads, head_dim] of which `base` is the block's first token.
  static KvView Array(const void* base, std::uint32_t heads, std::uint32_t head_dim) {
    KvView view;
    view.data = static_cast<const std::byte*>(base);
    view.head_stride_bytes = std::ptrdiff_t{2} * head_dim;
    view.token_stride_bytes = view.head_stride_bytes * heads;
    return view;
  }
};

// What one layer contributes to a store: K and V in 16 bits, or records.
struct LayerInput {
  KvView k;
  KvView v;
  // When not null: [heads][RecordBytes] records, sent unchanged; k and v are ignored.
  const std::byte* records = nullptr;
};

struct StoreBlock {
  // The engine's: stands for the block's tokens and all before them, those of a tail (token_count <
  // block_tokens) as well. A tail is stored under TailKey(parent, token_count, key).
  BlockKey key;
  BlockKey parent;  // Empty for the first block of a sequence.
  std::uint32_t token_count = 0;
  std::uint32_t block_index = 0;  // Position in its sequence.
  // One per layer, in the order of the namespace's groups and of the layers in them; borrowed.
  absl::Span<const LayerInput> layers;
};

// How long to wait before what failed with this status is tried again; zero when the daemon gave no
// hint. RESOURCE_EXHAUSTED of a block has one.
absl::Duration RetryAfter(const absl::Status& status);

enum class StoreOutcome : std::uint8_t {
  kFailed = 0,    // See status.
  kStored = 1,    // Complete, and at least one layer group was completed by this call.
  kExisting = 2,  // It was there: the first bytes stay.
  kPartial = 3,   // This call's heads are in place; other writers still owe some.
  kDropped = 4,   // No daemon was there to take it; the status is OK. WhenAway::kMiss only.
};

struct StoreBlockResult {
  absl::Status status;  // INVALID_ARGUMENT names token, head and channel of a non-finite value.
  StoreOutcome outcome = StoreOutcome::kFailed;
};

struct StoreResult {
  std::vector<StoreBlockResult> blocks;  // One per StoreBlock.
  std::uint64_t blocks_stored = 0;
  std::uint64_t blocks_existing = 0;
  std::uint64_t blocks_failed = 0;
  std::uint64_t raw_bytes = 0;  // 16-bit bytes of the stored blocks.
  std::uint64_t stored_bytes =
      0;                         // Bytes of all their pages (records, raw heads, headers, padding),
  std::uint64_t tile_bytes = 0;  //   of their records alone,
  std::uint64_t tile_raw_bytes = 0;  //   and the 16-bit bytes of the tokens and heads in records.
  std::uint64_t raw_heads = 0;       // (layer, head) pairs of them kept in 16 bits.
  std::uint64_t blocks_dropped = 0;
  absl::Status away;  // Not OK: why blocks were dropped. Some of them may have been stored.
};

struct StoreOptions {
  bool wait_durable = false;  // Answer when the blocks survive a crash, not only when complete.
  // Heads that the LayerInputs hold: a tensor-parallel rank's range. head_count 0: all heads.
  std::uint32_t head_begin = 0;
  std::uint32_t head_count = 0;
};

// Why the daemon's guard (docs/operations.md#guard) has something against a namespace: tiles in its
// format lose more of K or V than the daemon's limits.
struct NamespaceTrip {
  double key_error = 0;  // |decoded - stored| / |stored|, means over samples.
  double value_error = 0;
  bool refuses_stores = false;  // With FAILED_PRECONDITION; of blocks that are not there yet.
  // What to use instead: this name, and the same spec but for these. Empty: the daemon names none.
  std::string fallback_name;
  std::uint8_t fallback_key_bits = 0;
  std::uint8_t fallback_value_bits = 0;
  std::uint32_t fallback_sink_blocks = 0;
};

// A namespace as the daemon knows it. Value type.
struct ClientNamespace {
  std::string name;
  Fingerprint fingerprint{};
  NamespaceSpec spec;                   // The tenant is empty: it is the server's business.
  std::optional<NamespaceTrip> trip{};  // As it was when this was asked for.
  // What encodes where the client does it (over TCP): what its daemon said, which does the same
  // (--encode-algorithm). Whoever decodes need not know.
  Algorithm algorithm = Algorithm::kKvarn;
};

struct LookupResult {
  std::uint32_t hit_blocks = 0;   // Longest available prefix of the keys.
  std::uint64_t hit_tokens = 0;   // Of those blocks, the tail not counted.
  std::vector<Tier> tiers;        // Per hit block: the slowest over its layer groups; or kPeer.
  std::uint32_t tail_tokens = 0;  // Of the longest tail asked for that is there; 0: none.
  BlockKey tail_key;              // What it is stored under: for Fetch, Map, Touch and Remove.
  absl::Status away;              // Not OK: why there is nothing. WhenAway::kMiss only.
};

// Where fetched pages go. Calls come one at a time per Fetch, on a library's thread or in Fetch.
class FetchSink {
 public:
  virtual ~FetchSink() = default;

  struct PageId {
    std::uint32_t block = 0;  // Index into the keys of the call.
    std::uint8_t group = 0;
    std::uint32_t layer_index = 0;  // Within the group; the model's number is in the page header.
  };

  // A layer group of a block comes: one page a layer, of these bytes. Before its first page;
  // must not wait. Not OK: as of OnPage.
  virtual absl::Status OnGroup(std::uint32_t block, std::uint8_t group, std::uint32_t token_count,
                               absl::Span<const std::uint32_t> page_bytes) {
    static_cast<void>(block), static_cast<void>(group);
    static_cast<void>(token_count), static_cast<void>(page_bytes);
    return absl::OkStatus();
  }
  // Where to put a page of `page_bytes`: exactly that many bytes, left alone until OnPage for the
  // same id; or empty (the default): the library uses memory of its own that OnPage may only read
  // during its call. If the block fails midway its memory holds nothing of use.
  virtual absl::Span<std::byte> PageMemory(const PageId& id, std::size_t page_bytes) {
    static_cast<void>(id), static_cast<void>(page_bytes);
    return {};
  }
  // A verified page (identity and checksums). Not OK: the rest of this block is dropped and this
  // status becomes the block's.
  virtual absl::Status OnPage(const PageId& id, const PageView& page) = 0;

  // True: the sink verifies pages itself (VerifyPage), later and where it likes. Then OnPage gets
  // what came, of which no more is known than that it is laid out as a page. The same for all of a
  // Fetch.
  virtual bool verifies() const { return false; }
};

struct FetchBlockResult {
  absl::Status status = absl::NotFoundError("not fetched");  // NOT_FOUND: a miss.
  Tier tier = Tier::kHost;                                   // The slowest over its layer groups.
  std::uint32_t token_count = 0;
};

struct FetchResult {
  std::vector<FetchBlockResult> blocks;  // One per key.
  std::uint64_t page_bytes = 0;          // That arrived and were verified,
  std::string transport;                 //   by "grpc", or by what UCX negotiated: "tcp/eth0".
  absl::Status away;                     // Not OK: why misses are misses. WhenAway::kMiss only.
};

struct TierUsage {
  Tier tier = Tier::kHost;
  std::uint64_t used_bytes = 0;
  std::uint64_t capacity_bytes = 0;
  std::uint64_t blocks = 0;
  std::uint64_t hit_blocks = 0;      // That lookups found there, and
  std::uint64_t evicted_blocks = 0;  //   that left to make room or on an administrator's wish.
};

// Files of the daemon's disk tier that one key encrypts.
struct DiskKeyUse {
  std::string key;  // Its id, which says nothing about it.
  bool is_current = false;
  std::uint64_t files = 0;
  std::uint64_t bytes = 0;
};

// Bytes of blocks that moved, by way.
struct TransferUsage {
  std::string path;       // "inline", "map", "pages" or "ucx".
  std::string transport;  // "grpc", "shm", or what UCX negotiated.
  std::uint64_t bytes_in = 0, bytes_out = 0;
};

// Counters since the daemon's start, and gauges. A tenant other than the daemon's own sees no
// counters and no capacities: 0.
struct ServerStat {
  std::uint64_t blocks = 0, pages = 0, sessions = 0, leases = 0;
  std::vector<TierUsage> tiers;
  std::uint64_t raw_bytes_ingested = 0, encoded_bytes_stored = 0;  // Their ratio is compression.
  std::uint64_t lookup_blocks = 0, hit_blocks = 0;                 // Their ratio is hit_rate.
  std::uint64_t lookup_requests = 0;
  std::uint64_t stored_blocks = 0, existing_blocks = 0, rejected_blocks = 0;
  std::uint64_t fetched_blocks = 0, fetch_misses = 0;
  std::vector<TransferUsage> transfers;
  std::uint64_t leased_bytes = 0, lease_expirations = 0;
  std::uint64_t checksum_failures = 0;
  std::uint64_t unwritten_blocks = 0, metadata_bytes = 0;
  bool draining = false;
  std::string boot_id;  // Lower-case hex.
  double uptime_s = 0;
  std::vector<DiskKeyUse> disk_keys;  // The current one first; empty: nothing is encrypted.
};

struct ServerStatus {
  std::string version;
  std::uint32_t protocol_version = 0;
  ServerStat stat;
  bool draining = false;
  std::string device;
  std::string data_dir;
  std::uint32_t encode_threads = 0;
};

struct ListedBlock {
  std::string namespace_name;
  BlockKey key;
  std::uint8_t group = 0;
  Tier tier = Tier::kHost;
  std::uint64_t bytes = 0;
  double age_s = 0;
  std::uint32_t leases = 0;
};

struct VerifyResult {
  std::uint64_t records_checked = 0;
  std::uint64_t failures = 0;
};

// What a tenant has in the daemon's store, and may have (docs/operations.md, Quotas).
struct TenantQuotaUse {
  std::string tenant;
  std::uint64_t used_bytes = 0;  // Of its blocks, each once.
  // What the hard quota compares: those, what is on its way in, and what was removed and is still
  // read.
  std::uint64_t charged_bytes = 0;
  std::uint64_t gpu_bytes = 0;  // Of its blocks in each tier; a block can be in two.
  std::uint64_t host_bytes = 0;
  std::uint64_t disk_bytes = 0;
  std::optional<std::uint64_t> soft_bytes;
  std::optional<std::uint64_t> hard_bytes;
  std::uint64_t rejections = 0;  // Blocks that its hard quota refused since the daemon started.
};

struct ClusterMember {
  std::string id;
  std::string incarnation;  // Lower-case hex.
  std::string address;      // HOST:PORT.
  std::string zone;
  std::uint64_t capacity_bytes = 0;
  bool draining = false;
  std::string admin_address;  // HOST:PORT; empty: none that other nodes reach.
};

// How far a node is that drains.
struct NodeDrain {
  enum class Phase : std::uint8_t {
    kHandingOver,  // Other nodes copy what only it has. It takes no stores.
    kEnding,       // Calls in flight end, blocks become durable.
    kLeft,         // It is no longer in the cluster.
  };
  Phase phase = Phase::kHandingOver;
  std::uint64_t blocks = 0;       // Of it that are on other nodes.
  std::uint64_t blocks_left = 0;  // Of it that are on no other node that is known.
  // Known at the end. Tails, blocks whose place in a sequence nobody said, and those of tenants
  // that nodes do not share: no other node is asked to take them.
  std::uint64_t blocks_left_out = 0;
  bool alone = false;  // Known at the end: no other node stays in the cluster.
};

// The configuration of a daemon, without secrets.
struct DaemonConfig {
  struct Option {
    std::string name;    // Of kvmilld's flag.
    std::string value;   // In force.
    std::string source;  // default, file or flag.
    std::string default_value;
    bool reloadable = false;  // While the daemon runs.
    // What the file says since it was read again, and only another start takes over.
    std::optional<std::string> pending;
  };
  std::string file;  // Empty: none.
  std::vector<Option> options;
  absl::Time loaded;  // When what is in force was read.
  std::uint64_t reloads_applied = 0, reloads_refused = 0;
  std::string problem;  // Why what was last read again is refused; empty: it is in force.
};

// What a daemon knows of its cluster.
struct ClusterStatus {
  std::string node_id;       // Of the daemon; empty when it is in no cluster.
  std::string registration;  // none, joining, registered, refused or left.
  std::vector<ClusterMember> members;
  std::uint64_t version = 0;  // Rises when the members change; 0: nothing was heard yet.
  bool stale = false;         // No word of etcd for one --lease-ttl: they are those of then.
  bool keeping = false;       // Some are kept although etcd has lost them.
  std::string problem;        // Empty: none.
};

// Where in a cluster a block is.
struct BlockPlaces {
  struct Holder {
    ClusterMember member;
    bool told = false;  // It says so itself; otherwise a home says that it did.
  };
  std::vector<ClusterMember> homes;  // Nodes that are asked for it, best first.
  std::vector<Holder> holders;       // Nodes that have it.
};

// How the bytes of Store and Fetch travel.
enum class DataPath : std::uint8_t {
  kAuto,    // UCX to a daemon that is not local and offers it, else with the gRPC messages.
  kInline,  // With the gRPC messages.
  kUcx,     // UCX, or the calls fail: FAILED_PRECONDITION, UNAVAILABLE.
};

// Where 16-bit values become tiles.
enum class EncodeIn : std::uint8_t {
  kAuto,  // Here for a daemon that is not local, so that only tiles travel.
  kClient,
  kDaemon,
};

// What calls come to while no daemon answers: it is being restarted, or died, or drains.
enum class WhenAway : std::uint8_t {
  kFail,  // They fail: UNAVAILABLE, DEADLINE_EXCEEDED, or ABORTED for what went with the daemon.
  // To an engine that only wants to go on they succeed: Lookup, Fetch and Map find nothing, Store
  // and StorePages drop their blocks (kDropped), Touch is 0; `away` of the result says why. They do
  // not wait for the daemon longer than it takes to see that it is not there: one call after a
  // pause of at most half a second looks for it, and the others are answered at once. Registrations
  // of memory stay: the library makes them again when the daemon is back, of descriptors that it
  // duplicated, and stores from it are dropped until then.
  // Errors as ever: calls whose failure the caller must know of (all others; stores with
  // wait_durable; a StorePages that ends with DEADLINE_EXCEEDED, whose pages may be read still;
  // FlushPages and CancelPages, which say OK when the daemon is dead), OpenNamespace, which needs
  // the daemon once, and refusals. What was mapped is ABORTED (Check), whatever this says.
  kMiss,
};

struct CallOptions {
  absl::Duration timeout = absl::ZeroDuration();  // Zero: Client::Options::timeout.
  Elsewhere elsewhere = {};                       // Of Lookup, Fetch and Map.
};

// Of the session that owns what the daemon holds for a client: mapped blocks, registered memory.
enum class SessionEvent : std::uint8_t {
  kDraining = 0,       // The daemon takes no more stores and will end.
  kLeasesExpired = 1,  // As many leases were over before they were given back or renewed.
  kEnded = 2,          // Nothing of it is held any more: map and register again.
};

class Device;        // storage/device/device.h
class MappedBlocks;  // client/mapped_blocks.h

struct TicketPagesRequest;  // client/ticket_pages.h
class TicketPageSink;

struct MapOptions {
  // From the moment of the call. The daemon has a limit (60 s), which its refusal names.
  absl::Duration lease = absl::Seconds(10);
  // Other than kHost: for Client::Options::device, without which the call is FAILED_PRECONDITION.
  // Blocks on the GPU that this device cannot have (it is another GPU, say) are FAILED_PRECONDITION
  // each, with the reason: map those again in host memory.
  PageMemory memory = PageMemory::kHost;
};

class Client {
 public:
  struct Options {
    std::string address;                         // As ParseServerAddress takes it.
    absl::Duration timeout = absl::Seconds(10);  // Of calls whose CallOptions say nothing. Finite.
    // Over TCP: none is for a daemon that was started with --insecure. Not used on a unix socket.
    TlsFiles tls;
    // Shows who this is in place of a certificate. 1 to 4,096 printable ASCII characters other than
    // spaces; over TCP it needs `tls`.
    std::string token;
    DataPath path = DataPath::kAuto;
    // UCX without encryption: the network is trusted. The daemon must say so too.
    bool data_plane_plaintext = false;
    // Of UCX's connections. kRequired: those without RDMA are not used, so that calls fail with
    // kUcx and go over gRPC with kAuto, with a warning.
    RdmaUse rdma = RdmaUse::kAuto;
    EncodeIn encode_in = EncodeIn::kAuto;
    WhenAway when_away = WhenAway::kFail;
    // That encode, and that verify what UCX brought; 0: one a core, up to 4.
    std::uint32_t encode_threads = 0;
    // The GPU that reads blocks which Map leaves on the daemon's (storage/device/device.h). May be
    // null. Borrowed: outlives the client and its MappedBlocks.
    Device* device = nullptr;
    // May be null. From a thread of the library, like `done`.
    std::function<void(SessionEvent event, std::uint64_t leases)> on_session_event;
  };

  template <typename T>
  using Done = std::function<void(absl::StatusOr<T> result)>;

  // Checks the options (INVALID_ARGUMENT); does not connect yet.
  static absl::StatusOr<std::unique_ptr<Client>> Create(const Options& options);
  // Cancels what still runs and waits for its completions.
  ~Client();
  Client(const Client&) = delete;
  Client& operator=(const Client&) = delete;

  // --- Namespaces ---
  // Registers `spec` under `name` (spec.tenant is ignored). FAILED_PRECONDITION names the first
  // difference when the name is bound to another identity.
  absl::StatusOr<ClientNamespace> OpenNamespace(absl::string_view name, const NamespaceSpec& spec,
                                                CallOptions call = {});
  void OpenNamespaceAsync(absl::string_view name, const NamespaceSpec& spec, CallOptions call,
                          Done<ClientNamespace> done);
  // The same; where the daemon refuses stores into it because its tiles lose too much, and names
  // what to use instead, that is opened, with its name and spec, and so on. An engine that stores
  // and is answered FAILED_PRECONDITION calls this again, and uses what it gets from then on: for
  // lookups, too, since blocks are found in the namespace in which they were stored.
  absl::StatusOr<ClientNamespace> OpenNamespaceOrFallback(absl::string_view name,
                                                          const NamespaceSpec& spec,
                                                          CallOptions call = {});
  void OpenNamespaceOrFallbackAsync(absl::string_view name, const NamespaceSpec& spec,
                                    CallOptions call, Done<ClientNamespace> done);
  // One that was registered before, by name. NOT_FOUND.
  absl::StatusOr<ClientNamespace> FindNamespace(absl::string_view name, CallOptions call = {});
  void FindNamespaceAsync(absl::string_view name, CallOptions call, Done<ClientNamespace> done);
  // The same by its fingerprint, under whatever name.
  void FindNamespaceAsync(const Fingerprint& fingerprint, CallOptions call,
                          Done<ClientNamespace> done);

  // --- Blocks ---
  // How many of the first `keys` (those of a sequence, from its first block on) are there, and
  // which of `tails` behind them: only candidates whose block_index is hit_blocks count, so give
  // those of every block that may turn out to be the first missing one. INVALID_ARGUMENT: more than
  // kTailCandidatesMax, an empty key, or a token count of no tail.
  absl::StatusOr<LookupResult> Lookup(const ClientNamespace& ns, absl::Span<const BlockKey> keys,
                                      absl::Span<const TailCandidate> tails = {},
                                      CallOptions call = {});
  void LookupAsync(const ClientNamespace& ns, absl::Span<const BlockKey> keys,
                   absl::Span<const TailCandidate> tails, CallOptions call,
                   Done<LookupResult> done);

  // Results are per block; the call fails as a whole only for an RPC-level error (then some blocks
  // may have been stored), or when not everything became durable though asked for.
  absl::StatusOr<StoreResult> Store(const ClientNamespace& ns, absl::Span<const StoreBlock> blocks,
                                    const StoreOptions& options, CallOptions call = {});
  void StoreAsync(const ClientNamespace& ns, absl::Span<const StoreBlock> blocks,
                  const StoreOptions& options, CallOptions call, Done<StoreResult> done);

  // All layer groups of each key. Every page is verified against `ns`, the key and its place before
  // `sink` sees it. A block is OK only if all its pages were.
  absl::StatusOr<FetchResult> Fetch(const ClientNamespace& ns, absl::Span<const BlockKey> keys,
                                    FetchSink& sink, CallOptions call = {});
  void FetchAsync(const ClientNamespace& ns, absl::Span<const BlockKey> keys, FetchSink& sink,
                  CallOptions call, Done<FetchResult> done);

  // The number of (block, layer group)s that were there.
  absl::StatusOr<std::uint64_t> Remove(const ClientNamespace& ns, absl::Span<const BlockKey> keys,
                                       CallOptions call = {});
  void RemoveAsync(const ClientNamespace& ns, absl::Span<const BlockKey> keys, CallOptions call,
                   Done<std::uint64_t> done);
  absl::StatusOr<std::uint64_t> Clear(const ClientNamespace& ns, CallOptions call = {});
  void ClearAsync(const ClientNamespace& ns, CallOptions call, Done<std::uint64_t> done);
  // Returns when every sealed block of the daemon is durable.
  absl::StatusOr<std::uint64_t> Flush(CallOptions call = {});
  void FlushAsync(CallOptions call, Done<std::uint64_t> done);

  // --- In place: only on the daemon's socket, FAILED_PRECONDITION elsewhere ---
  // Leases on the blocks, and their pages as memory of this process: client/mapped_blocks.h. Blocks
  // that are only on disk are loaded first. Misses are statuses of blocks. INVALID_ARGUMENT: too
  // many keys or too long a lease; RESOURCE_EXHAUSTED: too much is under lease.
  using MappedPtr = std::unique_ptr<MappedBlocks>;
  absl::StatusOr<MappedPtr> Map(const ClientNamespace& ns, absl::Span<const BlockKey> keys,
                                const MapOptions& options = {}, CallOptions call = {});
  void MapAsync(const ClientNamespace& ns, absl::Span<const BlockKey> keys,
                const MapOptions& options, CallOptions call, Done<MappedPtr> done);
  // The leases last `lease` from the moment of the call. ABORTED when one had ended before: then
  // Check() of the blocks says so from now on. `mapped` must live until `done`.
  absl::Status Renew(MappedBlocks& mapped, absl::Duration lease, CallOptions call = {});
  void RenewAsync(MappedBlocks& mapped, absl::Duration lease, CallOptions call,
                  std::function<void(absl::Status)> done);

  // --- For eviction ---
  // The blocks were used; the number of (block, layer group) pairs of them that are in memory.
  absl::StatusOr<std::uint64_t> Touch(const ClientNamespace& ns, absl::Span<const BlockKey> keys,
                                      CallOptions call = {});
  void TouchAsync(const ClientNamespace& ns, absl::Span<const BlockKey> keys, CallOptions call,
                  Done<std::uint64_t> done);

  // --- The engine's memory ---
  // Describes it to the daemon, for as long as the session lives (SessionEvent::kEnded: again). A
  // number to unregister it by. FAILED_PRECONDITION names the field that does not fit the
  // namespace, INVALID_ARGUMENT one that makes no sense. With WhenAway::kMiss for as long as the
  // client lives, from the moment on when there is a daemon.
  absl::StatusOr<std::uint64_t> RegisterMemory(const ClientNamespace& ns,
                                               const EngineGeometry& geometry,
                                               CallOptions call = {});
  void RegisterMemoryAsync(const ClientNamespace& ns, const EngineGeometry& geometry,
                           CallOptions call, Done<std::uint64_t> done);
  // NOT_FOUND when this session has no such registration. Stores of its pages end, CANCELLED where
  // they had not stored the block, and nobody reads the pages any more.
  absl::Status UnregisterMemory(std::uint64_t registration, CallOptions call = {});
  void UnregisterMemoryAsync(std::uint64_t registration, CallOptions call,
                             std::function<void(absl::Status)> done);

  // --- Pages in shared memory, stored without a copy: client/page_store.h says when pages are read
  // and when they are free ---
  // Results as Store's. FAILED_PRECONDITION: the daemon is not on this node; NOT_FOUND, ABORTED (of
  // a block, too): register the memory again. `blocks` is needed during the call only.
  absl::StatusOr<StoreResult> StorePages(const ClientNamespace& ns, std::uint64_t registration,
                                         absl::Span<const PageBlock> blocks,
                                         const PageStoreOptions& options = {},
                                         CallOptions call = {});
  void StorePagesAsync(const ClientNamespace& ns, std::uint64_t registration,
                       absl::Span<const PageBlock> blocks, const PageStoreOptions& options,
                       CallOptions call, Done<StoreResult> done);
  // Layers of the model below `layers` have their values in the pages, for all running stores of
  // the request.
  void ReadyPages(std::uint64_t request, std::uint32_t layers);
  // Of all stores of the request; of these blocks, whosever. OK: the pages are free.
  absl::Status FlushPages(std::uint64_t request, CallOptions call = {});
  void FlushPagesAsync(std::uint64_t request, CallOptions call,
                       std::function<void(absl::Status)> done);
  absl::Status FlushPages(absl::Span<const BlockKey> keys, CallOptions call = {});
  void FlushPagesAsync(absl::Span<const BlockKey> keys, CallOptions call,
                       std::function<void(absl::Status)> done);
  absl::Status CancelPages(std::uint64_t request, CallOptions call = {});
  void CancelPagesAsync(std::uint64_t request, CallOptions call,
                        std::function<void(absl::Status)> done);

  // --- Tickets: a prompt's blocks from prefill to decode, while they are computed
  // (client/ticket.h) ---
  // At the daemon that assembles the blocks: it holds them from now on, what is there of them and
  // what comes, until the ticket ends. A ticket is some 100 bytes that the decode engine redeems.
  // INVALID_ARGUMENT names what is wrong with a block, RESOURCE_EXHAUSTED which limit is reached;
  // FAILED_PRECONDITION: the daemon is in no cluster; PERMISSION_DENIED: of another tenant.
  absl::StatusOr<std::string> CreateTicket(const ClientNamespace& ns,
                                           absl::Span<const PromisedBlock> blocks,
                                           const TicketOptions& options = {},
                                           CallOptions call = {});
  void CreateTicketAsync(const ClientNamespace& ns, absl::Span<const PromisedBlock> blocks,
                         const TicketOptions& options, CallOptions call, Done<std::string> done);
  // The engine gave the prompt up. NOT_FOUND: the ticket has ended.
  absl::Status RevokeTicket(absl::string_view ticket, CallOptions call = {});
  void RevokeTicketAsync(absl::string_view ticket, CallOptions call,
                         std::function<void(absl::Status)> done);
  // At any daemon of the cluster: brings the blocks to its store. (At the one that made the ticket
  // they are there, and it only tells.) What did not come is a miss. `update` may be null. The
  // call's time is how long the caller waits, prefill included.
  RedeemResult RedeemTicket(const ClientNamespace& ns, absl::string_view ticket,
                            RedeemUpdate update = nullptr, CallOptions call = {});
  void RedeemTicketAsync(const ClientNamespace& ns, absl::string_view ticket, RedeemUpdate update,
                         CallOptions call, std::function<void(RedeemResult)> done);
  // Redeems of it that this client started end with CANCELLED, soon. When nobody else redeems it at
  // that daemon, what is not sealed is discarded and the producer lets go.
  void CancelRedeem(absl::string_view ticket);

  // --- Between daemons: finished pages of a ticket (client/ticket_pages.h) ---
  // `sink` is used until `done`.
  void ReadTicketPagesAsync(const TicketPagesRequest& request, TicketPageSink& sink,
                            CallOptions call, std::function<void(absl::Status)> done);

  // --- For people ---
  absl::StatusOr<ServerStat> Stat(CallOptions call = {});
  void StatAsync(CallOptions call, Done<ServerStat> done);
  // `ns_name` empty: all namespaces.
  absl::StatusOr<std::vector<ListedBlock>> List(absl::string_view ns_name, CallOptions call = {});
  void ListAsync(absl::string_view ns_name, CallOptions call, Done<std::vector<ListedBlock>> done);

  // --- Admin: on the daemon's --admin address, or on its socket for its own uid and root ---
  // bytes 0: everything that can leave.
  absl::StatusOr<std::uint64_t> Evict(Tier tier, std::uint64_t bytes, CallOptions call = {});
  void EvictAsync(Tier tier, std::uint64_t bytes, CallOptions call, Done<std::uint64_t> done);
  absl::StatusOr<VerifyResult> Verify(CallOptions call = {});
  void VerifyAsync(CallOptions call, Done<VerifyResult> done);
  // Of each tenant with a namespace or a quota, by name.
  absl::StatusOr<std::vector<TenantQuotaUse>> Quota(CallOptions call = {});
  void QuotaAsync(CallOptions call, Done<std::vector<TenantQuotaUse>> done);
  // The number of blocks made durable. The daemon takes no more stores afterwards.
  absl::StatusOr<std::uint64_t> Drain(CallOptions call = {});
  void DrainAsync(CallOptions call, Done<std::uint64_t> done);
  // Has a node of the daemon's cluster, or the daemon itself, drain, leave and end, as SIGTERM
  // does. `progress` runs on the connection's threads, twice a second and at every change. Done
  // when the node has left, or, when it is the daemon itself, when it is ending; `blocks_left` then
  // says what may be lost. It goes on when the call ends before that: a node drains for up to its
  // --drain-timeout, so that is what the call needs. NOT_FOUND: no such node; FAILED_PRECONDITION:
  // it drains already, or has no --admin that other nodes reach; ABORTED: it could not be reached,
  // or was lost.
  absl::StatusOr<NodeDrain> DrainNode(absl::string_view node,
                                      std::function<void(const NodeDrain&)> progress = nullptr,
                                      CallOptions call = {});
  void DrainNodeAsync(absl::string_view node, std::function<void(const NodeDrain&)> progress,
                      CallOptions call, Done<NodeDrain> done);
  absl::StatusOr<ClusterStatus> Cluster(CallOptions call = {});
  void ClusterAsync(CallOptions call, Done<ClusterStatus> done);
  // Of a block of a namespace of `tenant`; empty: the caller's own. `anchor` is the first block of
  // its run of 32, in which it has this place; empty: it is that itself. Nobody when the daemon is
  // in no cluster. FAILED_PRECONDITION: nodes do not share this tenant's blocks.
  absl::StatusOr<BlockPlaces> Where(absl::string_view ns_name, const BlockKey& key,
                                    const BlockKey& anchor, std::uint32_t place,
                                    CallOptions call = {}, absl::string_view tenant = "");
  void WhereAsync(absl::string_view ns_name, const BlockKey& key, const BlockKey& anchor,
                  std::uint32_t place, CallOptions call, Done<BlockPlaces> done,
                  absl::string_view tenant = "");
  absl::StatusOr<ServerStatus> Status(CallOptions call = {});
  void StatusAsync(CallOptions call, Done<ServerStatus> done);
  absl::StatusOr<DaemonConfig> Configuration(CallOptions call = {});
  void ConfigurationAsync(CallOptions call, Done<DaemonConfig> done);
  absl::StatusOr<std::vector<ClientNamespace>> Namespaces(CallOptions call = {});
  void NamespacesAsync(CallOptions call, Done<std::vector<ClientNamespace>> done);

  // Boot id (lower-case hex) that the daemon last showed; empty before the first answer. Another
  // value than before means that the daemon was restarted.
  std::string boot_id() const;
  // What UCX negotiated for the connection that is open now, as "tcp/eth0"; empty: there is none.
  std::string ucx_transport() const;

 private:
  class Impl;
  explicit Client(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace kvmill

#endif  // KVMILL_CLIENT_CLIENT_H_
