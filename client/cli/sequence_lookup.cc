#include "client/cli/sequence_lookup.h"

#include <algorithm>
#include <array>

#include "absl/types/span.h"
#include "client/cli/block_keys.h"
#include "storage/core/status_macros.h"

namespace kvmill::cli {
namespace {

// Keys of the first question; the next ask twice as many. Few, because the daemon counts keys that
// were asked for and not there as misses.
constexpr std::uint32_t kFirstAsk = 1;

// A tail's own key is the one that its block would get; only the length is not known.
absl::Status FindTail(Client& client, const ClientNamespace& ns, absl::string_view sequence,
                      FoundSequence* found) {
  const auto blocks = static_cast<std::uint32_t>(found->keys.size());
  TailCandidate tail;
  tail.key = SequenceKeys(sequence, blocks + 1).back();
  tail.block_index = blocks;
  std::vector<TailCandidate> tails;
  for (std::uint32_t tokens = 1; tokens < ns.spec.block_tokens; ++tokens) {
    tail.token_count = tokens;
    tails.push_back(tail);
  }
  KVMILL_ASSIGN_OR_RETURN(const LookupResult result, client.Lookup(ns, found->keys, tails));
  found->tail_tokens = result.tail_tokens;
  found->tail_key = result.tail_key;
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<FoundSequence> FindSequence(Client& client, const ClientNamespace& ns,
                                           absl::string_view sequence, std::uint32_t blocks_max) {
  const bool find_tail = blocks_max == 0;
  const std::uint32_t limit = find_tail ? kSequenceBlocksMax : blocks_max;
  FoundSequence found;
  // A lookup answers for a prefix, so every question starts at block 0.
  for (std::uint32_t ask = std::min(kFirstAsk, limit);;) {
    const std::vector<BlockKey> keys = SequenceKeys(sequence, ask);
    KVMILL_ASSIGN_OR_RETURN(const LookupResult result, client.Lookup(ns, keys));
    if (result.hit_blocks < ask || ask == limit) {
      const auto hits = static_cast<std::ptrdiff_t>(result.hit_blocks);
      found.keys.assign(keys.begin(), keys.begin() + hits);
      found.hit_tokens = result.hit_tokens;
      found.tiers = result.tiers;
      if (find_tail) KVMILL_RETURN_IF_ERROR(FindTail(client, ns, sequence, &found));
      return found;
    }
    ask = std::min(2 * ask, limit);
  }
}

std::vector<std::pair<std::string, std::uint64_t>> CountTiers(const std::vector<Tier>& tiers) {
  std::array<std::uint64_t, kTierCount> counts{};
  for (const Tier tier : tiers) ++counts[static_cast<std::size_t>(tier)];
  std::vector<std::pair<std::string, std::uint64_t>> named;
  for (std::size_t t = 0; t < kTierCount; ++t) {
    if (counts[t] > 0) named.emplace_back(TierName(static_cast<Tier>(t)), counts[t]);
  }
  return named;
}

}  // namespace kvmill::cli
