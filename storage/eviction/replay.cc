#include "storage/eviction/replay.h"

#include <algorithm>
#include <memory>
#include <unordered_map>

#include "absl/strings/str_cat.h"
#include "storage/core/check.h"
#include "storage/core/status_macros.h"
#include "storage/eviction/policy.h"

namespace kvmill {
namespace {

// A finalizer with full avalanche (constants of MurmurHash3's fmix64): trace ids are small
// counters.
std::uint64_t HashOf(std::uint64_t id) {
  id ^= id >> 33;
  id *= 0xff51afd7ed558ccdu;
  id ^= id >> 33;
  id *= 0xc4ceb9fe1a85ec53u;
  return id ^ (id >> 33);
}

}  // namespace

absl::StatusOr<ReplayResult> ReplayTrace(absl::Span<const std::vector<std::uint64_t>> requests,
                                         const ReplayOptions& options) {
  constexpr std::uint32_t kBlocksMax = 1u << 31;
  if (options.blocks == 0 || options.blocks > kBlocksMax) {
    return absl::InvalidArgumentError(
        absl::StrCat("replay: blocks is ", options.blocks, ", must be 1 to ", kBlocksMax));
  }

  // Every distinct id gets an EntryId of its own, so the policy's ids are never reused.
  std::unordered_map<std::uint64_t, EntryId> entry_of;
  for (const std::vector<std::uint64_t>& request : requests) {
    for (const std::uint64_t id : request) {
      entry_of.try_emplace(id, static_cast<EntryId>(entry_of.size()));
    }
  }
  if (entry_of.size() > kBlocksMax) {
    return absl::InvalidArgumentError(
        absl::StrCat("replay: ", entry_of.size(), " distinct ids, at most ", kBlocksMax));
  }
  const auto entries_max = static_cast<std::uint32_t>(
      std::max<std::size_t>({1, entry_of.size(), options.expected_blocks}));
  const std::uint32_t expected_blocks =
      options.expected_blocks != 0 ? options.expected_blocks : options.blocks;
  KVMILL_ASSIGN_OR_RETURN(
      const std::unique_ptr<EvictionPolicy> policy,
      CreateEvictionPolicy(options.policy.empty() ? kDefaultEvictionPolicy : options.policy,
                           {.entries_max = entries_max,
                            .capacity_blocks = std::min(expected_blocks, entries_max),
                            .leaf_first = options.leaf_first}));

  ReplayResult result{.blocks = options.blocks, .policy = std::string(policy->name())};
  std::vector<bool> present(entries_max, false);
  std::vector<EntryId> entries;
  for (const std::vector<std::uint64_t>& request : requests) {
    entries.clear();
    for (const std::uint64_t id : request) entries.push_back(entry_of.find(id)->second);
    const auto miss = std::find_if(entries.begin(), entries.end(),
                                   [&](EntryId entry) { return !present[entry]; });
    result.lookups += entries.size();
    result.hits += static_cast<std::uint64_t>(miss - entries.begin());

    for (std::size_t i = 0; i < entries.size(); ++i) {
      const EntryId entry = entries[i];
      if (present[entry]) {
        policy->Touch(entry);
        continue;
      }
      if (policy->size() == options.blocks) {
        const EntryId victim = policy->Evict([](EntryId) { return true; });
        KVMILL_CHECK(victim != kNoEntry);  // Any block may leave, and the youngest is a leaf.
        present[victim] = false;
      }
      const bool has_parent = i > 0 && present[entries[i - 1]];
      policy->Insert(entry, {.key_hash = HashOf(request[i]),
                             .parent = has_parent ? entries[i - 1] : kNoEntry,
                             .depth = static_cast<std::uint32_t>(i)});
      present[entry] = true;
    }
  }
  if (result.lookups > 0) {
    result.hit_rate = static_cast<double>(result.hits) / static_cast<double>(result.lookups);
  }
  return result;
}

}  // namespace kvmill
