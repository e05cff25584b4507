#include "storage/store_counters.h"

namespace kvmill {
namespace {

template <typename Counters, typename Values>
void Copy(const Counters& counters, Values* values) {
  for (std::size_t i = 0; i < counters.size(); ++i) (*values)[i] = counters[i].value();
}

}  // namespace

void StoreCounters::Fill(StoreStats* stats) const {
  stats->references = references.value();
  stats->referenced_bytes = referenced_bytes.value();
  stats->copying_blocks = copying_blocks.value();
  stats->unwritten_blocks = unwritten_blocks.value();
  stats->pages = memory_pages.value();
  for (std::size_t tier = 0; tier < kTierCount; ++tier) {
    stats->tiers[tier].blocks = tier_blocks[tier].value();
  }
  stats->lookup_hit = lookup_hit.value();
  stats->lookup_partial = lookup_partial.value();
  stats->lookup_miss = lookup_miss.value();
  stats->lookup_blocks = lookup_blocks.value();
  stats->lookup_tokens = lookup_tokens.value();
  Copy(hit_blocks, &stats->hit_blocks);
  Copy(hit_tokens, &stats->hit_tokens);
  stats->stored_blocks = stored_blocks.value();
  stats->existing_blocks = existing_blocks.value();
  stats->rejected_blocks = rejected_blocks.value();
  stats->raw_blocks = raw_blocks.value();
  stats->copied_blocks = copied_blocks.value();
  stats->disk_write_failures = disk_write_failures.value();
  for (std::size_t path = 0; path < kFetchPathCount; ++path) {
    Copy(fetched_blocks[path], &stats->fetched_blocks[path]);
  }
  Copy(fetch_misses, &stats->fetch_misses);
  Copy(moved_blocks, &stats->moved_blocks);
  stats->skipped_promotions = skipped_promotions.value();
  Copy(raw_bytes_ingested, &stats->raw_bytes_ingested);
  Copy(encoded_bytes_stored, &stats->encoded_bytes_stored);
  for (std::size_t tier = 0; tier < kTierCount; ++tier) {
    Copy(evicted_blocks[tier], &stats->evicted_blocks[tier]);
    stats->eviction_age_seconds[tier] = eviction_age_seconds[tier].snapshot();
  }
  Copy(checksum_failures, &stats->checksum_failures);
  for (std::size_t stage = 0; stage < kStageCount; ++stage) {
    stats->stage_seconds[stage] = stage_seconds[stage].snapshot();
  }
}

}  // namespace kvmill
