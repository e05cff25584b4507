// The live counters behind StoreStats. Internal to storage/; every member is counted at exactly one
// place.
#ifndef KVMILL_STORAGE_STORE_COUNTERS_H_
#define KVMILL_STORAGE_STORE_COUNTERS_H_

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "kernels/tile_format.h"
#include "storage/store_stats.h"

namespace kvmill {

// Relaxed: each is a sum of its own, and a reader may see it a moment late.
class Counter {
 public:
  void Add(std::uint64_t n = 1) { value_.fetch_add(n, std::memory_order_relaxed); }
  void Subtract(std::uint64_t n = 1) { value_.fetch_sub(n, std::memory_order_relaxed); }
  std::uint64_t value() const { return value_.load(std::memory_order_relaxed); }

 private:
  std::atomic<std::uint64_t> value_{0};
};

// Index of a format's name (k4v2_g128) in the per-format counters: that of FormatOfName.
constexpr std::size_t FormatNameIndex(const TileFormat& f) {
  if (f.key_bits == 3) return 8u + (f.value_bits == 4 ? 1u : 0u) + (f.group == 128 ? 2u : 0u);
  return (f.key_bits == 4 ? 1u : 0u) + (f.value_bits == 4 ? 2u : 0u) + (f.group == 128 ? 4u : 0u);
}

struct StoreCounters {
  // Gauges.
  Counter references, referenced_bytes;
  std::array<Counter, kTierCount> tier_blocks;  // Of the index: with a copy in the tier.
  Counter memory_pages;                         // Of the blocks in host memory and on the GPU.
  Counter unwritten_blocks;                     // Sealed, on their way to the disk.
  Counter copying_blocks;                       // BlockCopys alive.

  Counter lookup_hit, lookup_partial, lookup_miss;
  Counter lookup_blocks, lookup_tokens;
  std::array<Counter, kTierCount> hit_blocks, hit_tokens;
  Counter stored_blocks, existing_blocks, rejected_blocks, raw_blocks;
  Counter copied_blocks;
  Counter disk_write_failures;
  std::array<std::array<Counter, kTierCount>, kFetchPathCount> fetched_blocks;
  std::array<Counter, kFetchPathCount> fetch_misses;
  std::array<Counter, kTierCount> moved_blocks;  // Between memory tiers, by where to.
  Counter skipped_promotions;
  std::array<Counter, kFormatNameCount> raw_bytes_ingested, encoded_bytes_stored;
  std::array<std::array<Counter, kEvictReasonCount>, kTierCount> evicted_blocks;
  std::array<Counter, kTierCount> checksum_failures;
  std::array<StageHistogram, kStageCount> stage_seconds{
      StageHistogram{kStageSecondsBounds}, StageHistogram{kStageSecondsBounds},
      StageHistogram{kStageSecondsBounds}, StageHistogram{kStageSecondsBounds},
      StageHistogram{kStageSecondsBounds}, StageHistogram{kStageSecondsBounds}};
  std::array<EvictionAgeHistogram, kTierCount> eviction_age_seconds{
      EvictionAgeHistogram{kEvictionAgeSecondsBounds},
      EvictionAgeHistogram{kEvictionAgeSecondsBounds},
      EvictionAgeHistogram{kEvictionAgeSecondsBounds},
      EvictionAgeHistogram{kEvictionAgeSecondsBounds}};

  Counter& evicted(Tier tier, EvictReason reason) {
    return evicted_blocks[static_cast<std::size_t>(tier)][static_cast<std::size_t>(reason)];
  }
  Counter& fetched(FetchPath path, Tier tier) {
    return fetched_blocks[static_cast<std::size_t>(path)][static_cast<std::size_t>(tier)];
  }
  void ObserveStage(Stage stage, double seconds) {
    stage_seconds[static_cast<std::size_t>(stage)].Observe(seconds);
  }

  // Everything but what other parts own (tier bytes, index size, assemblies).
  void Fill(StoreStats* stats) const;
};

}  // namespace kvmill

#endif  // KVMILL_STORAGE_STORE_COUNTERS_H_
