#include "client/cli/lookup_bench.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstring>
#include <memory>
#include <random>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "client/cli/output.h"
#include "storage/block_index.h"
#include "storage/core/block_key.h"
#include "storage/core/check.h"
#include "storage/core/status_macros.h"

namespace kvmill::cli {
namespace {

constexpr NamespaceId kNamespace = 1;
constexpr std::size_t kKeyBytes = 32;

// Block `n`'s key: 32 bytes that look like a hash and cost little to make (SplitMix64).
BlockKey KeyOf(std::uint64_t n) {
  std::array<char, kKeyBytes> bytes;
  for (std::size_t at = 0; at < kKeyBytes; at += 8) {
    std::uint64_t x = n * (kKeyBytes / 8) + at / 8 + 0x9E3779B97F4A7C15u;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    x ^= x >> 31;
    std::memcpy(bytes.data() + at, &x, sizeof(x));
  }
  absl::StatusOr<BlockKey> key = BlockKey::FromBytes({bytes.data(), bytes.size()});
  KVMILL_CHECK(key.ok());
  return *key;
}

absl::Status Fill(BlockIndex& index, std::uint32_t keys) {
  Progress progress("filling the index");
  for (std::uint32_t n = 0; n < keys; ++n) {
    const BlockId id{kNamespace, 0, KeyOf(n)};
    KVMILL_RETURN_IF_ERROR(index
                               .Insert(id, 1,
                                       [](BlockEntry& entry) {
                                         entry.flags = kInHost;
                                         entry.token_count = 128;
                                       })
                               .status());
    if (n % 65536 == 0) progress.Update(n, keys, "keys");
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<LookupBenchResult> RunLookupBench(const LookupBenchOptions& options) {
  BlockIndex::Options index_options;
  index_options.entries_max = options.keys;
  KVMILL_ASSIGN_OR_RETURN(const std::unique_ptr<BlockIndex> index,
                          BlockIndex::Create(index_options));
  KVMILL_RETURN_IF_ERROR(Fill(*index, options.keys));

  LookupBenchResult result;
  result.metadata_bytes_per_key =
      static_cast<double>(index->metadata_bytes()) / static_cast<double>(options.keys);
  std::mt19937_64 random(1);
  std::vector<BlockIndex::Presence> found(options.batch);
  // Keys are made between the batches and their time is not counted. A chunk of many batches keeps
  // the clock out of the measurement; it is far larger than what caches hold of the index.
  const std::size_t chunk = std::max<std::size_t>(1, 65536 / options.batch) * options.batch;
  std::vector<BlockKey> keys(chunk);
  Progress progress("looking up");
  for (std::uint32_t r = 0; r < options.repetitions; ++r) {
    absl::Duration elapsed;
    std::uint64_t looked_up = 0;
    while (looked_up < options.lookups) {
      for (BlockKey& key : keys) key = KeyOf(random() % options.keys);
      const absl::Time start = absl::Now();
      std::size_t hits = 0;
      for (std::size_t at = 0; at < chunk; at += options.batch) {
        index->FindBatch(kNamespace, 0, absl::MakeConstSpan(keys).subspan(at, options.batch),
                         absl::MakeSpan(found));
        for (const BlockIndex::Presence& presence : found) hits += presence.flags != 0;
      }
      elapsed += absl::Now() - start;
      looked_up += chunk;
      if (hits != chunk) {
        return absl::InternalError(
            absl::StrCat("the index found ", hits, " of ", chunk, " keys that it holds"));
      }
    }
    result.keys_per_s.push_back(static_cast<double>(looked_up) / absl::ToDoubleSeconds(elapsed));
    progress.Update(r + 1, options.repetitions, "repetitions");
  }
  std::sort(result.keys_per_s.begin(), result.keys_per_s.end());
  return result;
}

}  // namespace kvmill::cli
