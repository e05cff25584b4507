// What the tiered store counts: each event once, where it is decided. Exported by the service as
// metrics and by Stat.
#ifndef KVMILL_STORAGE_STORE_STATS_H_
#define KVMILL_STORAGE_STORE_STATS_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

#include "kernels/tile_format.h"
#include "storage/core/histogram.h"
#include "storage/core/tier.h"

namespace kvmill {

enum class EvictReason : std::uint8_t {
  kCapacity = 0,
  kAdmin = 1,
  kRemoved = 2,
  kCorrupt = 3,
  kQuota = 4,      // The tenant's own: it made room for others of its blocks.
  kWatermark = 5,  // In the background, before somebody needed the room.
};
inline constexpr std::size_t kEvictReasonCount = 6;
constexpr const char* EvictReasonName(EvictReason reason) {
  constexpr const char* kNames[kEvictReasonCount] = {"capacity", "admin", "removed",
                                                     "corrupt",  "quota", "watermark"};
  return kNames[static_cast<std::size_t>(reason)];
}

// How a fetched block gets to its reader.
enum class FetchPath : std::uint8_t { kInline = 0, kMap = 1, kUcx = 2 };
inline constexpr std::size_t kFetchPathCount = 3;
constexpr const char* FetchPathName(FetchPath path) {
  constexpr const char* kNames[kFetchPathCount] = {"inline", "map", "ucx"};
  return kNames[static_cast<std::size_t>(path)];
}

// Where the time of an operation goes.
enum class Stage : std::uint8_t {
  kStoreEncode = 0,
  kStoreDisk = 1,
  kFetchDisk = 2,
  kStoreQueue = 3,
  kFetchTransfer = 4,  // From the GPU's memory to the host's.
  kStoreDecode = 5     // Of sampled tiles, to see how far they are from what came in.
};
inline constexpr std::size_t kStageCount = 6;

inline constexpr std::array<double, 12> kStageSecondsBounds = {1e-5, 5e-5, 1e-4, 5e-4, 1e-3, 5e-3,
                                                               1e-2, 5e-2, 0.1,  0.5,  1,    5};
inline constexpr std::array<double, 10> kEvictionAgeSecondsBounds = {
    1, 10, 60, 300, 900, 3600, 14400, 43200, 86400, 604800};
using StageHistogram = Histogram<kStageSecondsBounds.size()>;
using EvictionAgeHistogram = Histogram<kEvictionAgeSecondsBounds.size()>;

// {k2,k4} x {v2,v4} x {g64,g128}, then {k3} x the same.
inline constexpr std::size_t kFormatNameCount = 12;
// A format with the name that per-format counters have at `index`.
inline TileFormat FormatOfName(std::size_t index) {
  constexpr std::size_t kThree = kTileFormatCount / 3 * 2;  // Where those with 3-bit keys begin.
  return TileFormatAt(index < 8 ? index : kThree + index - 8);
}

struct TierStats {
  std::uint64_t used_bytes = 0;
  std::uint64_t capacity_bytes = 0;
  std::uint64_t blocks = 0;
};

// A snapshot: counters since start, gauges now. Values read one after the other, so sums may be off
// by what happened meanwhile.
struct StoreStats {
  std::uint64_t blocks = 0;      // Sealed blocks (layer groups) in any tier.
  std::uint64_t pages = 0;       // Of those in host memory and on the GPU.
  std::uint64_t references = 0;  // BlockRefs alive.
  std::uint64_t referenced_bytes = 0;
  std::uint64_t assembling_blocks = 0;
  std::uint64_t copying_blocks = 0;    // BlockCopys alive.
  std::uint64_t unwritten_blocks = 0;  // Sealed, waiting for the disk.
  // Writes of a block, and flushes, that failed; they may be tried again. A flush counts once,
  // however many blocks it would have made durable.
  std::uint64_t disk_write_failures = 0;
  std::uint64_t unpromoted_blocks = 0;  // Waiting to be copied to the GPU.
  std::uint64_t metadata_bytes = 0;
  std::array<TierStats, kTierCount> tiers{};
  std::uint64_t huge_page_bytes = 0;  // Of host memory.

  std::uint64_t lookup_hit = 0, lookup_partial = 0, lookup_miss = 0;  // Requests.
  std::uint64_t lookup_blocks = 0, lookup_tokens = 0;
  std::array<std::uint64_t, kTierCount> hit_blocks{}, hit_tokens{};
  std::uint64_t stored_blocks = 0, existing_blocks = 0, rejected_blocks = 0;
  std::uint64_t raw_blocks = 0;     // Of the stored: with at least one raw head.
  std::uint64_t copied_blocks = 0;  // From other nodes; not among the stored.
  // By path and the tier they were found in.
  std::array<std::array<std::uint64_t, kTierCount>, kFetchPathCount> fetched_blocks{};
  std::array<std::uint64_t, kFetchPathCount> fetch_misses{};
  std::array<std::uint64_t, kTierCount> moved_blocks{};  // Between memory tiers, by where to.
  // Blocks that stayed in host memory: see storage/gpu_tier.h.
  std::uint64_t skipped_promotions = 0;
  std::array<std::uint64_t, kFormatNameCount> raw_bytes_ingested{}, encoded_bytes_stored{};
  std::array<std::array<std::uint64_t, kEvictReasonCount>, kTierCount> evicted_blocks{};
  std::array<std::uint64_t, kTierCount> checksum_failures{};
  std::array<StageHistogram::Snapshot, kStageCount> stage_seconds{};
  std::array<EvictionAgeHistogram::Snapshot, kTierCount> eviction_age_seconds{};
};

}  // namespace kvmill

#endif  // KVMILL_STORAGE_STORE_STATS_H_
