#include "service/metrics.h"

#include <prometheus/text_serializer.h>

#include <algorithm>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <sstream>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/convert.h"
#include "service/cluster_node.h"
#include "service/data_plane.h"
#include "service/event_journal.h"
#include "service/metrics_namespaces.h"
#include "service/running_config.h"
#include "service/transfers.h"
#include "storage/core/log.h"
#include "storage/error_guard.h"
#include "storage/quantization_errors.h"
#include "storage/store_stats.h"
#include "storage/tenant_quotas.h"

namespace kvmill {
namespace {

using prometheus::ClientMetric;
using prometheus::MetricFamily;
using prometheus::MetricType;
using Label = ClientMetric::Label;

constexpr char kPrefix[] = "kvmill_";

// What a scrape sees: one snapshot for all families.
struct Source {
  const ServiceContext& context;
  const StoreStats& stats;
  const DataPlane::Stats& data;
  const SessionTable::Stats& sessions;
  double start_unix_seconds;
  const MembershipSnapshot& members;  // Empty without a cluster, and not stale.
  const ClusterBlocks* cluster;       // Null without one.
  NamespaceNames names;
  const std::vector<TenantUsage>& tenants;
  RunningConfig::Stats config{};
  std::vector<EncryptionKeyUsage> keys{};
  std::vector<Metrics::CertificateEnd> certificates{};
  std::vector<NamespaceShare> namespaces{};
  // Zeros without a cluster.
  PeerPull::Stats pulled{};
  ClusterBlocks::CopyStats copies{};
  ClusterTickets::Stats tickets{};
  PullTransports::Snapshot pulled_by{};
  PullTransports::Snapshot ticket_pages_by{};
  EventJournal::Stats events{};
};

struct Family {
  const char* name;  // Without the prefix.
  MetricType type;
  const char* labels;  // Separated by spaces.
  const char* help;
  void (*fill)(const Source& source, MetricFamily* out);
};

void Add(MetricFamily* out, double value, std::vector<Label> labels = {}) {
  ClientMetric metric;
  metric.label = std::move(labels);
  if (out->type == MetricType::Counter) {
    metric.counter.value = value;
  } else {
    metric.gauge.value = value;
  }
  out->metric.push_back(std::move(metric));
}

void Add(MetricFamily* out, std::uint64_t value, std::vector<Label> labels = {}) {
  Add(out, static_cast<double>(value), std::move(labels));
}

template <std::size_t kBoundCount>
void AddHistogram(MetricFamily* out, const std::array<double, kBoundCount>& bounds,
                  const typename Histogram<kBoundCount>::Snapshot& snapshot,
                  std::vector<Label> labels) {
  ClientMetric metric;
  metric.label = std::move(labels);
  std::uint64_t cumulative = 0;
  for (std::size_t i = 0; i <= kBoundCount; ++i) {
    cumulative += snapshot.counts[i];
    ClientMetric::Bucket bucket;
    bucket.cumulative_count = cumulative;
    bucket.upper_bound = i < kBoundCount ? bounds[i] : std::numeric_limits<double>::infinity();
    metric.histogram.bucket.push_back(bucket);
  }
  metric.histogram.sample_count = cumulative;
  metric.histogram.sample_sum = snapshot.sum;
  out->metric.push_back(std::move(metric));
}

// Tiers that this daemon has.
template <typename Visit>
void ForEachTier(const StoreStats& stats, Visit visit) {
  for (std::size_t i = 0; i < kTierCount; ++i) {
    if (stats.tiers[i].capacity_bytes > 0) visit(i, TierName(static_cast<Tier>(i)));
  }
}

template <typename Member>
void PerTier(const Source& s, MetricFamily* out, Member member) {
  ForEachTier(s.stats, [&](std::size_t i, const char* tier) {
    Add(out, (s.stats.*member)[i], {{"tier", tier}});
  });
}

// What lookups found, which may be other nodes' blocks.
template <typename Member>
void PerHitTier(const Source& s, MetricFamily* out, Member member) {
  PerTier(s, out, member);
  constexpr auto kPeer = static_cast<std::size_t>(Tier::kPeer);
  if (s.cluster != nullptr) Add(out, (s.stats.*member)[kPeer], {{"tier", TierName(Tier::kPeer)}});
}

// What their blocks came by last; gRPC, by which they are asked, before any did.
void PeerInfo(const Source& s, MetricFamily* out) {
  if (s.cluster == nullptr) return;
  for (const auto& [peer, stats] : s.cluster->peer_stats()) {
    std::string transport = "grpc";
    for (const PullTransports::Snapshot* pulls : {&s.ticket_pages_by, &s.pulled_by}) {
      const auto known = pulls->last.find(peer);
      if (known != pulls->last.end()) transport = known->second;
    }
    Add(out, 1.0, {{"peer", peer}, {"transport", transport}});
  }
}

// Of gRPC in any case: without a cluster there is one series, of zero.
void PerTransport(std::map<std::string, std::uint64_t> bytes, MetricFamily* out) {
  bytes.emplace("grpc", 0);
  for (const auto& [transport, value] : bytes) Add(out, value, {{"transport", transport}});
}

// What other nodes are asked goes by gRPC.
template <typename Value>
void PerPeer(const Source& s, MetricFamily* out, Value value) {
  if (s.cluster == nullptr) return;
  for (const auto& [peer, stats] : s.cluster->peer_stats()) {
    Add(out, value(stats), {{"peer", peer}, {"transport", "grpc"}});
  }
}

void PerFormat(const std::array<std::uint64_t, kFormatNameCount>& values, MetricFamily* out) {
  for (std::size_t i = 0; i < kFormatNameCount; ++i) {
    // A format appears with its first block; the two families agree in which ones they show.
    if (values[i] > 0) Add(out, values[i], {{"format", ToString(FormatOfName(i))}});
  }
}

template <std::size_t kBoundCount>
void AddTo(const typename Histogram<kBoundCount>::Snapshot& part,
           typename Histogram<kBoundCount>::Snapshot* total) {
  for (std::size_t i = 0; i <= kBoundCount; ++i) total->counts[i] += part.counts[i];
  total->sum += part.sum;
}

void AddErrors(const Source& s, MetricFamily* out) {
  if (s.context.errors == nullptr) return;
  constexpr std::size_t kBoundCount = kQuantizationErrorBounds.size();
  const auto add = [out](const std::string& label,
                         const QuantizationErrors::NamespaceErrors& errors) {
    AddHistogram<kBoundCount>(out, kQuantizationErrorBounds, errors.k,
                              {{"namespace", label}, {"kind", "k"}});
    AddHistogram<kBoundCount>(out, kQuantizationErrorBounds, errors.v,
                              {{"namespace", label}, {"kind", "v"}});
  };
  QuantizationErrors::NamespaceErrors all;
  const std::vector<QuantizationErrors::NamespaceErrors> errors = s.context.errors->snapshot();
  for (const QuantizationErrors::NamespaceErrors& of : errors) {
    if (s.names == NamespaceNames::kShown) {
      add(of.name.empty() ? kOtherNamespaces : NamespaceLabel(of.tenant, of.name), of);
      continue;
    }
    AddTo<kBoundCount>(of.k, &all.k);
    AddTo<kBoundCount>(of.v, &all.v);
  }
  if (s.names == NamespaceNames::kLeftOut && !errors.empty()) add(kAllNamespaces, all);
}

// As of errors: so many of them by name. Those that tripped first are those.
void AddTrips(const Source& s, MetricFamily* out) {
  if (s.context.guard == nullptr) return;
  const bool shown = s.names == NamespaceNames::kShown;
  const std::size_t shown_max =
      shown && s.context.errors != nullptr ? s.context.errors->namespaces_max() : 0;
  const std::vector<ErrorGuard::Trip> trips = s.context.guard->trips();
  for (std::size_t i = 0; i < std::min(trips.size(), shown_max); ++i) {
    Add(out, 1.0, {{"namespace", NamespaceLabel(trips[i].tenant, trips[i].name)}});
  }
  if (trips.size() > shown_max) {
    Add(out, static_cast<double>(trips.size() - shown_max),
        {{"namespace", shown ? kOtherNamespaces : kAllNamespaces}});
  }
}

// Of each tenant that is shown, a value; those beyond kTenantsShown, and to who does not see names
// all, are summed up. Names of tenants have no spaces.
constexpr std::size_t kTenantsShown = 64;
template <typename Value>
void PerTenant(const Source& s, MetricFamily* out, Value value) {
  const bool shown = s.names == NamespaceNames::kShown;
  std::uint64_t others = 0;
  for (std::size_t i = 0; i < s.tenants.size(); ++i) {
    if (shown && i < kTenantsShown) {
      Add(out, value(s.tenants[i]), {{"tenant", s.tenants[i].tenant}});
    } else {
      others += value(s.tenants[i]);
    }
  }
  if (!shown && !s.tenants.empty()) Add(out, others, {{"tenant", "all tenants"}});
  if (shown && s.tenants.size() > kTenantsShown) Add(out, others, {{"tenant", "other tenants"}});
}

// The families of docs/contracts.md, which tests compare. `tier` is one of gpu, host, disk, peer.
const Family kFamilies[] = {
    {"build_info", MetricType::Gauge, "version device boot_id",
     "Constant 1; version, device and boot id of the daemon.",
     [](const Source& s, MetricFamily* out) {
       Add(out, 1.0,
           {{"version", kSoftwareVersion},
            {"device", s.context.device},
            {"boot_id", s.context.boot_id_hex}});
     }},
    {"start_time_seconds", MetricType::Gauge, "", "Unix time at which the daemon started.",
     [](const Source& s, MetricFamily* out) { Add(out, s.start_unix_seconds); }},
    {"config_reloads_total", MetricType::Counter, "result",
     "Times that the configuration was read again while the daemon ran, by what became of it.",
     [](const Source& s, MetricFamily* out) {
       Add(out, s.config.applied, {{"result", "applied"}});
       Add(out, s.config.refused, {{"result", "refused"}});
     }},
    {"config_refused", MetricType::Gauge, "",
     "1 while what was last read again is refused, and the configuration of before is in force.",
     [](const Source& s, MetricFamily* out) { Add(out, s.config.last_refused ? 1.0 : 0.0); }},
    {"config_loaded_time_seconds", MetricType::Gauge, "",
     "Unix time at which the configuration in force was read.",
     [](const Source& s, MetricFamily* out) {
       Add(out, static_cast<double>(s.config.loaded_unix_millis) / 1000.0);
     }},
    {"config_pending_options", MetricType::Gauge, "",
     "Options that file and flags changed, and that only another start takes over.",
     [](const Source& s, MetricFamily* out) { Add(out, s.config.pending_options); }},
    {"log_messages_suppressed_total", MetricType::Counter, "",
     "Lines that the log left out because one place logged too many.",
     [](const Source&, MetricFamily* out) { Add(out, SuppressedLogLines()); }},
    {"tls_certificate_end_time_seconds", MetricType::Gauge, "certificate",
     "Unix time at which the certificate in use ends: node, of --listen, --admin and peers; etcd.",
     [](const Source& s, MetricFamily* out) {
       for (const Metrics::CertificateEnd& end : s.certificates) {
         Add(out, static_cast<double>(end.unix_seconds), {{"certificate", end.certificate}});
       }
     }},
    {"draining", MetricType::Gauge, "", "1 while the daemon drains and refuses stores, else 0.",
     [](const Source& s, MetricFamily* out) {
       Add(out, s.context.draining.load(std::memory_order_relaxed) ? 1.0 : 0.0);
     }},
    {"lookup_requests_total", MetricType::Counter, "result",
     "Lookups by result: hit (every block asked for), partial, miss.",
     [](const Source& s, MetricFamily* out) {
       Add(out, s.stats.lookup_hit, {{"result", "hit"}});
       Add(out, s.stats.lookup_partial, {{"result", "partial"}});
       Add(out, s.stats.lookup_miss, {{"result", "miss"}});
     }},
    {"lookup_blocks_total", MetricType::Counter, "", "Blocks that lookups asked for.",
     [](const Source& s, MetricFamily* out) { Add(out, s.stats.lookup_blocks); }},
    {"lookup_tokens_total", MetricType::Counter, "", "Tokens of the blocks that lookups asked for.",
     [](const Source& s, MetricFamily* out) { Add(out, s.stats.lookup_tokens); }},
    {"hit_blocks_total", MetricType::Counter, "tier", "Blocks that lookups found, by tier.",
     [](const Source& s, MetricFamily* out) { PerHitTier(s, out, &StoreStats::hit_blocks); }},
    {"hit_tokens_total", MetricType::Counter, "tier",
     "Tokens of the blocks that lookups found, by tier.",
     [](const Source& s, MetricFamily* out) { PerHitTier(s, out, &StoreStats::hit_tokens); }},
    {"stored_blocks_total", MetricType::Counter, "result",
     "Blocks by what became of storing them; raw: of the stored, with at least one 16-bit head.",
     [](const Source& s, MetricFamily* out) {
       Add(out, s.stats.stored_blocks, {{"result", "stored"}});
       Add(out, s.stats.existing_blocks, {{"result", "existing"}});
       Add(out, s.stats.rejected_blocks, {{"result", "rejected"}});
       Add(out, s.stats.raw_blocks, {{"result", "raw"}});
     }},
    {"fetched_blocks_total", MetricType::Counter, "path tier result",
     "Blocks fetched, by path, tier they were found in, and result; a miss has no tier.",
     [](const Source& s, MetricFamily* out) {
       for (std::size_t p = 0; p < kFetchPathCount; ++p) {
         const char* path = FetchPathName(static_cast<FetchPath>(p));
         ForEachTier(s.stats, [&](std::size_t i, const char* tier) {
           Add(out, s.stats.fetched_blocks[p][i],
               {{"path", path}, {"tier", tier}, {"result", "hit"}});
         });
         Add(out, s.stats.fetch_misses[p], {{"path", path}, {"tier", "none"}, {"result", "miss"}});
       }
     }},
    {"bytes_total", MetricType::Counter, "direction path transport",
     "Bulk bytes of blocks, by direction, path and transport.",
     [](const Source& s, MetricFamily* out) {
       for (const Transfer& t : TransfersOf(s.context, s.data)) {
         const auto labels = [&t](const char* direction) {
           return std::vector<Label>{
               {"direction", direction}, {"path", t.path}, {"transport", t.transport}};
         };
         if (t.bytes_in.has_value()) Add(out, *t.bytes_in, labels("in"));
         Add(out, t.bytes_out, labels("out"));
       }
     }},
    {"raw_bytes_ingested_total", MetricType::Counter, "format",
     "16-bit bytes of the stored blocks, by format.",
     [](const Source& s, MetricFamily* out) { PerFormat(s.stats.raw_bytes_ingested, out); }},
    {"encoded_bytes_stored_total", MetricType::Counter, "format",
     "Bytes of the stored blocks' pages (records, raw heads, headers, padding), by format.",
     [](const Source& s, MetricFamily* out) { PerFormat(s.stats.encoded_bytes_stored, out); }},
    // Gauges, because who is among the most changes, and what the others have with it.
    {"namespace_stored_blocks", MetricType::Gauge, "namespace",
     "Blocks that a namespace stored since the start, of those that stored most; others together.",
     [](const Source& s, MetricFamily* out) {
       for (const NamespaceShare& of : s.namespaces) Add(out, of.blocks, {{"namespace", of.label}});
     }},
    {"namespace_stored_bytes", MetricType::Gauge, "namespace", "Bytes of the pages of these blocks.",
     [](const Source& s, MetricFamily* out) {
       for (const NamespaceShare& of : s.namespaces) Add(out, of.bytes, {{"namespace", of.label}});
     }},
    {"tier_used_bytes", MetricType::Gauge, "tier", "Bytes in use, by tier.",
     [](const Source& s, MetricFamily* out) {
       ForEachTier(s.stats, [&](std::size_t i, const char* tier) {
         Add(out, s.stats.tiers[i].used_bytes, {{"tier", tier}});
       });
     }},
    {"tier_capacity_bytes", MetricType::Gauge, "tier", "Capacity in bytes, by tier.",
     [](const Source& s, MetricFamily* out) {
       ForEachTier(s.stats, [&](std::size_t i, const char* tier) {
         Add(out, s.stats.tiers[i].capacity_bytes, {{"tier", tier}});
       });
     }},
    {"disk_key_bytes", MetricType::Gauge, "key state",
     "Bytes of the disk tier's files by the id of the key that encrypts them, current or old.",
     [](const Source& s, MetricFamily* out) {
       for (const EncryptionKeyUsage& usage : s.keys) {
         Add(out, usage.bytes,
             {{"key", usage.key}, {"state", usage.is_current ? "current" : "old"}});
       }
     }},
    {"host_huge_page_bytes", MetricType::Gauge, "", "Host memory for blocks that is in huge pages.",
     [](const Source& s, MetricFamily* out) { Add(out, s.stats.huge_page_bytes); }},
    {"tier_blocks", MetricType::Gauge, "tier", "Blocks (layer groups of blocks), by tier.",
     [](const Source& s, MetricFamily* out) {
       ForEachTier(s.stats, [&](std::size_t i, const char* tier) {
         Add(out, s.stats.tiers[i].blocks, {{"tier", tier}});
       });
     }},
    {"evicted_blocks_total", MetricType::Counter, "tier reason",
     "Blocks that left a tier, by reason.",
     [](const Source& s, MetricFamily* out) {
       ForEachTier(s.stats, [&](std::size_t i, const char* tier) {
         for (std::size_t r = 0; r < kEvictReasonCount; ++r) {
           Add(out, s.stats.evicted_blocks[i][r],
               {{"tier", tier}, {"reason", EvictReasonName(static_cast<EvictReason>(r))}});
         }
       });
     }},
    {"quota_used_bytes", MetricType::Gauge, "tenant", "Bytes of a tenant's blocks, each once.",
     [](const Source& s, MetricFamily* out) {
       PerTenant(s, out, [](const TenantUsage& of) { return of.used_bytes; });
     }},
    {"quota_charged_bytes", MetricType::Gauge, "tenant",
     "What a tenant's hard quota limits: its blocks, those on their way in, and removed ones that "
     "are still read.",
     [](const Source& s, MetricFamily* out) {
       PerTenant(s, out, [](const TenantUsage& of) { return of.charged_bytes; });
     }},
    {"quota_tier_bytes", MetricType::Gauge, "tenant tier",
     "Bytes of a tenant's blocks in a tier; what its soft quota keeps.",
     [](const Source& s, MetricFamily* out) {
       ForEachTier(s.stats, [&](std::size_t i, const char* tier) {
         const std::size_t first = out->metric.size();
         PerTenant(s, out, [i](const TenantUsage& of) { return of.tier_bytes[i]; });
         for (std::size_t m = first; m < out->metric.size(); ++m) {
           out->metric[m].label.push_back({"tier", tier});
         }
       });
     }},
    {"quota_limit_bytes", MetricType::Gauge, "tenant kind",
     "Quotas of tenants, by kind: soft, hard. Of tenants that have one and that are shown by name.",
     [](const Source& s, MetricFamily* out) {
       if (s.names != NamespaceNames::kShown) return;
       for (std::size_t i = 0; i < std::min(s.tenants.size(), kTenantsShown); ++i) {
         const auto add = [&](const char* kind, std::uint64_t bytes) {
           if (bytes == kNoQuota) return;
           Add(out, bytes, {{"tenant", s.tenants[i].tenant}, {"kind", kind}});
         };
         add("soft", s.tenants[i].quota.soft_bytes);
         add("hard", s.tenants[i].quota.hard_bytes);
       }
     }},
    {"quota_rejections_total", MetricType::Counter, "tenant",
     "Blocks that a tenant's hard quota refused.",
     [](const Source& s, MetricFamily* out) {
       PerTenant(s, out, [](const TenantUsage& of) { return of.rejections; });
     }},
    {"moved_blocks_total", MetricType::Counter, "from to",
     "Blocks that moved between GPU and host memory, by where from and where to.",
     [](const Source& s, MetricFamily* out) {
       Add(out, s.stats.moved_blocks[static_cast<std::size_t>(Tier::kGpu)],
           {{"from", "host"}, {"to", "gpu"}});
       Add(out, s.stats.moved_blocks[static_cast<std::size_t>(Tier::kHost)],
           {{"from", "gpu"}, {"to", "host"}});
     }},
    {"skipped_promotions_total", MetricType::Counter, "",
     "Blocks that could not move to the GPU when it was their turn, and stayed in host memory.",
     [](const Source& s, MetricFamily* out) { Add(out, s.stats.skipped_promotions); }},
    {"unpromoted_blocks", MetricType::Gauge, "", "Blocks that wait to move to the GPU.",
     [](const Source& s, MetricFamily* out) { Add(out, s.stats.unpromoted_blocks); }},
    {"eviction_age_seconds", MetricType::Histogram, "tier", "Age of blocks when they left a tier.",
     [](const Source& s, MetricFamily* out) {
       ForEachTier(s.stats, [&](std::size_t i, const char* tier) {
         AddHistogram<kEvictionAgeSecondsBounds.size()>(
             out, kEvictionAgeSecondsBounds, s.stats.eviction_age_seconds[i], {{"tier", tier}});
       });
     }},
    {"stage_duration_seconds", MetricType::Histogram, "op stage",
     "Time spent in a stage of an operation.",
     [](const Source& s, MetricFamily* out) {
       constexpr std::array<std::pair<Stage, std::pair<const char*, const char*>>, kStageCount>
           kStages = {{{Stage::kStoreQueue, {"store", "queue"}},
                       {Stage::kStoreEncode, {"store", "encode"}},
                       {Stage::kStoreDecode, {"store", "decode"}},
                       {Stage::kStoreDisk, {"store", "disk"}},
                       {Stage::kFetchDisk, {"fetch", "disk"}},
                       {Stage::kFetchTransfer, {"fetch", "transfer"}}}};
       for (const auto& [stage, names] : kStages) {
         AddHistogram<kStageSecondsBounds.size()>(
             out, kStageSecondsBounds, s.stats.stage_seconds[static_cast<std::size_t>(stage)],
             {{"op", names.first}, {"stage", names.second}});
       }
       AddHistogram<kStageSecondsBounds.size()>(out, kStageSecondsBounds, s.data.store_seconds,
                                                {{"op", "store"}, {"stage", "network"}});
       AddHistogram<kStageSecondsBounds.size()>(out, kStageSecondsBounds, s.data.fetch_seconds,
                                                {{"op", "fetch"}, {"stage", "network"}});
     }},
    {"quantization_error_ratio", MetricType::Histogram, "namespace kind",
     "What encoding lost of sampled tiles, as |decoded - stored| / |stored|, of K and of V (kind).",
     AddErrors},
    {"guard_tripped", MetricType::Gauge, "namespace",
     "1 of a namespace whose samples lost more than the limits of --guard-...; of several together "
     "how many.",
     AddTrips},
    {"data_transport_connections", MetricType::Gauge, "transport",
     "Connections of the UCX data plane by the transport that UCX negotiated.",
     [](const Source& s, MetricFamily* out) {
       for (const auto& [transport, connections] : s.data.connections_by_transport) {
         Add(out, connections, {{"transport", transport}});
       }
     }},
    {"data_gpu_bytes_total", MetricType::Counter, "memory",
     "Bytes of blocks on the GPU that the data plane sent: from there (gpu), or from a copy "
     "(host).",
     [](const Source& s, MetricFamily* out) {
       Add(out, s.data.gpu_bytes_from_gpu, {{"memory", "gpu"}});
       Add(out, s.data.gpu_bytes_from_host, {{"memory", "host"}});
     }},
    {"data_connections", MetricType::Gauge, "", "Connections of the UCX data plane.",
     [](const Source& s, MetricFamily* out) { Add(out, s.data.connections); }},
    {"data_hosts", MetricType::Gauge, "", "Hosts that may reach UCX's ports.",
     [](const Source& s, MetricFamily* out) { Add(out, s.data.hosts); }},
    {"data_calls", MetricType::Gauge, "", "Calls that run on the UCX data plane.",
     [](const Source& s, MetricFamily* out) { Add(out, s.data.calls); }},
    {"staging_bytes", MetricType::Gauge, "", "Memory that holds received chunks of stores.",
     [](const Source& s, MetricFamily* out) { Add(out, s.data.staging_bytes); }},
    {"sessions", MetricType::Gauge, "", "Sessions of clients.",
     [](const Source& s, MetricFamily* out) { Add(out, s.sessions.sessions); }},
    {"leases", MetricType::Gauge, "", "Leases of sessions on blocks.",
     [](const Source& s, MetricFamily* out) { Add(out, s.sessions.leases); }},
    {"leased_bytes", MetricType::Gauge, "", "Bytes of the blocks under lease.",
     [](const Source& s, MetricFamily* out) { Add(out, s.sessions.leased_bytes); }},
    {"registrations", MetricType::Gauge, "", "Engines' memory that sessions registered.",
     [](const Source& s, MetricFamily* out) { Add(out, s.sessions.registrations); }},
    {"lease_expirations_total", MetricType::Counter, "",
     "Leases whose time was over before they were released.",
     [](const Source& s, MetricFamily* out) { Add(out, s.sessions.lease_expirations); }},
    {"referenced_blocks", MetricType::Gauge, "",
     "Holds on blocks, of leases and of running fetches.",
     [](const Source& s, MetricFamily* out) { Add(out, s.stats.references); }},
    {"checksum_failures_total", MetricType::Counter, "tier",
     "Copies that were dropped because a checksum or header was wrong, by tier.",
     [](const Source& s, MetricFamily* out) { PerTier(s, out, &StoreStats::checksum_failures); }},
    {"unwritten_blocks", MetricType::Gauge, "", "Sealed blocks that wait to be written to disk.",
     [](const Source& s, MetricFamily* out) { Add(out, s.stats.unwritten_blocks); }},
    {"disk_write_failures_total", MetricType::Counter, "",
     "Writes of a block to disk, and flushes, that failed: until one does not, blocks are in memory "
     "only.",
     [](const Source& s, MetricFamily* out) { Add(out, s.stats.disk_write_failures); }},
    {"assembling_blocks", MetricType::Gauge, "", "Blocks of which some heads are still missing.",
     [](const Source& s, MetricFamily* out) { Add(out, s.stats.assembling_blocks); }},
    {"members", MetricType::Gauge, "state", "Nodes of the cluster as this one knows it, by state.",
     [](const Source& s, MetricFamily* out) {
       std::uint64_t serving = 0;
       std::uint64_t draining = 0;
       for (const Member& member : s.members.members) {
         ++(member.state == MemberState::kServing ? serving : draining);
       }
       Add(out, serving, {{"state", "serving"}});
       Add(out, draining, {{"state", "draining"}});
     }},
    {"membership_stale", MetricType::Gauge, "",
     "1 while this node's knowledge of the cluster may not be what etcd has.",
     [](const Source& s, MetricFamily* out) {
       Add(out, s.members.stale || s.members.keeping ? 1.0 : 0.0);
     }},
    {"peer_info", MetricType::Gauge, "peer transport",
     "Constant 1 for each other node of the cluster, with what its blocks came by last, or grpc.",
     PeerInfo},
    {"peer_requests_total", MetricType::Counter, "peer transport",
     "Questions that another node was asked.",
     [](const Source& s, MetricFamily* out) {
       PerPeer(s, out, [](const GrpcPeers::PeerStats& stats) { return stats.requests; });
     }},
    {"peer_failures_total", MetricType::Counter, "peer transport",
     "Questions that another node did not answer in time, or with an error.",
     [](const Source& s, MetricFamily* out) {
       PerPeer(s, out, [](const GrpcPeers::PeerStats& stats) { return stats.failures; });
     }},
    {"pulled_blocks_total", MetricType::Counter, "result",
     "Blocks that this node fetched from others, by what became of it.",
     [](const Source& s, MetricFamily* out) {
       Add(out, s.pulled.blocks, {{"result", "stored"}});
       Add(out, s.pulled.missing_blocks, {{"result", "miss"}});
       Add(out, s.pulled.damaged_blocks, {{"result", "damaged"}});
     }},
    {"pulled_bytes_total", MetricType::Counter, "transport",
     "Bytes of the blocks that were stored so, by what they came by.",
     [](const Source& s, MetricFamily* out) { PerTransport(s.pulled_by.bytes, out); }},
    {"replication_bytes_total", MetricType::Counter, "",
     "Bytes of the blocks of others that this node copied to keep them.",
     [](const Source& s, MetricFamily* out) { Add(out, s.copies.copied.copied_bytes); }},
    {"replication_blocks_total", MetricType::Counter, "result",
     "Blocks that this node asked others for to keep them, by what became of it.",
     [](const Source& s, MetricFamily* out) {
       Add(out, s.copies.copied.copied_blocks, {{"result", "copied"}});
       Add(out, s.copies.copied.failed_blocks, {{"result", "failed"}});
     }},
    {"replication_queue_runs", MetricType::Gauge, "", "Runs of blocks that wait to be copied here.",
     [](const Source& s, MetricFamily* out) { Add(out, s.copies.queued_runs); }},
    {"handed_over_blocks_total", MetricType::Counter, "result",
     "Blocks of this node, as it left: on other nodes (safe), and on no other that is known "
     "(left).",
     [](const Source& s, MetricFamily* out) {
       Add(out, s.copies.handed_over_blocks, {{"result", "safe"}});
       Add(out, s.copies.left_blocks, {{"result", "left"}});
     }},
    {"handing_over_blocks", MetricType::Gauge, "",
     "Blocks that only this node has, and that wait to be taken over while it leaves.",
     [](const Source& s, MetricFamily* out) { Add(out, s.copies.handing_over_blocks); }},
    {"pointer_differences_total", MetricType::Counter, "",
     "Ranges of anchors of which a home knew other than this node had told it.",
     [](const Source& s, MetricFamily* out) { Add(out, s.copies.differed_digests); }},
    {"tickets", MetricType::Gauge, "side",
     "Tickets by side: made here and not over (producer), being redeemed here (consumer).",
     [](const Source& s, MetricFamily* out) {
       Add(out, s.tickets.tickets, {{"side", "producer"}});
       Add(out, s.tickets.redeeming, {{"side", "consumer"}});
     }},
    {"ticket_bytes", MetricType::Gauge, "side",
     "Bytes of blocks that tickets hold, and of copies that they bring, by side.",
     [](const Source& s, MetricFamily* out) {
       Add(out, s.tickets.held_bytes, {{"side", "producer"}});
       Add(out, s.tickets.copy_bytes, {{"side", "consumer"}});
     }},
    {"tickets_created_total", MetricType::Counter, "", "Tickets that were made here.",
     [](const Source& s, MetricFamily* out) { Add(out, s.tickets.made.created); }},
    {"tickets_ended_total", MetricType::Counter, "end",
     "Tickets that were made here, by how they ended.",
     [](const Source& s, MetricFamily* out) {
       Add(out, s.tickets.made.acknowledged, {{"end", "acknowledged"}});
       Add(out, s.tickets.made.revoked, {{"end", "revoked"}});
       Add(out, s.tickets.made.expired, {{"end", "deadline"}});
     }},
    {"redeemed_blocks_total", MetricType::Counter, "result",
     "Blocks (layer groups of blocks) of tickets that were redeemed here, by their fate.",
     [](const Source& s, MetricFamily* out) {
       Add(out, s.tickets.redeemed.sealed, {{"result", "sealed"}});
       Add(out, s.tickets.redeemed.exists, {{"result", "exists"}});
       Add(out, s.tickets.redeemed.missed, {{"result", "missed"}});
     }},
    {"ticket_pages_total", MetricType::Counter, "result",
     "Pages that came here with tickets, by what became of them.",
     [](const Source& s, MetricFamily* out) {
       Add(out, s.tickets.pulled.pages, {{"result", "right"}});
       Add(out, s.tickets.pulled.damaged_pages, {{"result", "damaged"}});
     }},
    {"ticket_pages_bytes_total", MetricType::Counter, "transport",
     "Bytes of the pages that were right, by what they came by.",
     [](const Source& s, MetricFamily* out) { PerTransport(s.ticket_pages_by.bytes, out); }},
    {"events_total", MetricType::Counter, "event",
     "Events of blocks, of all tenants that have or had a reader, by kind.",
     [](const Source& s, MetricFamily* out) {
       for (std::size_t i = 0; i < kBlockEventKinds; ++i) {
         Add(out, s.events.events[i],
             {{"event", BlockEventName(static_cast<BlockEvent::Kind>(i))}});
       }
     }},
    {"events_dropped_total", MetricType::Counter, "",
     "Events that readers were too slow for, summed over them; they got a snapshot instead.",
     [](const Source& s, MetricFamily* out) { Add(out, s.events.dropped); }},
    {"event_readers", MetricType::Gauge, "",
     "Who reads events: calls of Watch, and the publisher of --events.",
     [](const Source& s, MetricFamily* out) { Add(out, s.events.readers); }},
    {"event_blocks", MetricType::Gauge, "",
     "Blocks that readers of events were told of, with about 105 bytes of memory each.",
     [](const Source& s, MetricFamily* out) { Add(out, s.events.blocks); }},
    {"event_walks_total", MetricType::Counter, "",
     "Comparisons of the whole store with what was told of it: at the first reader of a tenant, "
     "and when changes came faster than they were looked at.",
     [](const Source& s, MetricFamily* out) { Add(out, s.events.walks); }},
    {"metadata_bytes", MetricType::Gauge, "", "Memory of the index and what belongs to it.",
     [](const Source& s, MetricFamily* out) { Add(out, s.stats.metadata_bytes + s.events.bytes); }},
};

}  // namespace

std::vector<MetricFamily> Metrics::Collect(NamespaceNames names) const {
  const StoreStats stats = context_.store.stats();
  // Those with a quota first: of the others fewer are of interest.
  std::vector<TenantUsage> tenants = context_.store.Usage();
  std::stable_partition(tenants.begin(), tenants.end(),
                        [](const TenantUsage& of) { return of.quota != TenantQuota(); });
  DataPlane::Stats data;
  if (context_.data_plane != nullptr) data = context_.data_plane->stats();
  const SessionTable::Stats sessions = context_.sessions.stats();
  MembershipSnapshot none;
  none.stale = false;
  std::shared_ptr<const MembershipSnapshot> members;
  const ClusterNode* const cluster = context_.cluster.load(std::memory_order_acquire);
  if (cluster != nullptr) members = cluster->snapshot();
  Source source{context_,
                stats,
                data,
                sessions,
                start_unix_seconds_,
                members == nullptr ? none : *members,
                cluster == nullptr ? nullptr : &cluster->blocks(),
                names,
                tenants};
  if (context_.running_config != nullptr) source.config = context_.running_config->stats();
  if (context_.disk_keys != nullptr) source.keys = context_.disk_keys();
  source.certificates = certificate_ends_();
  if (context_.errors != nullptr) {
    source.namespaces = SharesOf(context_.store.Stored(), context_.errors->namespaces_max(), names);
  }
  if (source.cluster != nullptr) {
    source.pulled = source.cluster->pull_stats();
    source.copies = source.cluster->copy_stats();
    source.tickets = cluster->tickets().stats();
    source.pulled_by = source.cluster->pull_transports().snapshot();
    source.ticket_pages_by = cluster->tickets().transports().snapshot();
  }
  if (events_ != nullptr) source.events = events_->stats();
  std::vector<MetricFamily> families;
  for (const Family& family : kFamilies) {
    MetricFamily out;
    out.name = absl::StrCat(kPrefix, family.name);
    out.help = family.help;
    out.type = family.type;
    family.fill(source, &out);
    if (!out.metric.empty()) families.push_back(std::move(out));
  }
  return families;
}

std::string Metrics::Serialize(NamespaceNames names) const {
  std::ostringstream text;
  prometheus::TextSerializer().Serialize(text, Collect(names));
  return text.str();
}

std::vector<MetricInfo> MetricInfos() {
  std::vector<MetricInfo> infos;
  for (const Family& family : kFamilies) {
    const char* const type = family.type == MetricType::Counter ? "counter"
                             : family.type == MetricType::Gauge ? "gauge"
                                                                : "histogram";
    infos.push_back({absl::StrCat(kPrefix, family.name), type, family.labels, family.help});
  }
  return infos;
}

}  // namespace kvmill
