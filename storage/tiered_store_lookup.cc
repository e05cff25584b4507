// How far a prefix of keys reaches, over all layer groups.
#include <algorithm>
#include <optional>

#include "storage/tiered_store_impl.h"

namespace kvmill {
TieredStore::LookupResult TieredStore::Lookup(NamespaceId namespace_id,
                                              absl::Span<const BlockKey> keys,
                                              absl::Span<const TailCandidate> tails,
                                              const LookupOptions& options) {
  LookupResult result;
  const OpenedNamespace* space = impl_->namespaces_.Find(namespace_id);
  if (space == nullptr) return result;
  const std::vector<LayerGroup>& groups = space->spec.groups;
  std::vector<std::vector<BlockIndex::Presence>> found(
      groups.size(), std::vector<BlockIndex::Presence>(keys.size()));
  for (std::size_t g = 0; g < groups.size(); ++g) {
    impl_->index_->FindBatch(namespace_id, static_cast<std::uint8_t>(g), keys,
                             absl::MakeSpan(found[g]));
  }
  const bool some_elsewhere = options.elsewhere != nullptr && !options.elsewhere->empty();
  const auto is_elsewhere = [&](std::size_t i) {
    return some_elsewhere && (*options.elsewhere)[i];
  };
  const auto is_there = [&](std::size_t g, std::size_t i) {
    return found[g][i].flags != 0 || is_elsewhere(i);
  };
  const auto window_of = [space](const LayerGroup& group) {
    return (group.window_tokens + space->spec.block_tokens - 1) / space->spec.block_tokens;
  };

  // Full attention bounds the prefix from above; then the longest prefix whose last window of
  // blocks every window group has.
  std::size_t hit = keys.size();
  const std::uint64_t hard =
      impl_->accounts_[space->tenant_id].hard_bytes.load(std::memory_order_relaxed);
  if (some_elsewhere && hard != kNoQuota) {
    // What is elsewhere comes here to be fetched: never more than the quota has room for.
    std::size_t here = 0;
    while (here < hit && std::all_of(found.begin(), found.end(),
                                     [here](const auto& of) { return of[here].flags != 0; })) {
      ++here;
    }
    hit = std::min<std::size_t>(hit, std::max<std::uint64_t>(here, hard / BlockBytes(space->spec)));
  }
  for (std::size_t g = 0; g < groups.size(); ++g) {
    if (groups[g].attention != AttentionKind::kFull) continue;
    std::size_t present = 0;
    while (present < hit && is_there(g, present)) ++present;
    hit = present;
  }
  for (bool agreed = false; !agreed && hit > 0;) {
    agreed = true;
    for (std::size_t g = 0; g < groups.size() && agreed; ++g) {
      if (groups[g].attention != AttentionKind::kWindow) continue;
      const std::size_t first = hit - std::min<std::size_t>(hit, window_of(groups[g]));
      for (std::size_t i = hit; i-- > first;) {
        if (is_there(g, i)) continue;
        hit = i;  // Every prefix that ends after block i and not after here has it in its window.
        agreed = false;
        break;
      }
    }
  }

  const bool counts = options.is_last_word || hit == keys.size();
  result.hit_blocks = static_cast<std::uint32_t>(hit);
  for (std::size_t i = 0; i < hit; ++i) {
    std::optional<Tier> slowest_found;
    std::uint32_t tokens = 0;
    for (std::size_t g = 0; g < groups.size(); ++g) {
      const BlockIndex::Presence& block = found[g][i];
      if (block.flags != 0) {
        slowest_found = std::max(slowest_found, std::optional<Tier>(TierOf(block.flags)));
        tokens = std::max<std::uint32_t>(tokens, block.token_count);
      } else if (groups[g].attention == AttentionKind::kFull || i + window_of(groups[g]) >= hit) {
        slowest_found = Tier::kPeer;  // Not before a window: another node's is needed.
        tokens = space->spec.block_tokens;
      }
    }
    const Tier slowest = slowest_found.value_or(Tier::kHost);
    result.tiers.push_back(slowest);
    result.hit_tokens += tokens;
    if (!counts) continue;
    impl_->counters_.hit_blocks[Index(slowest)].Add();
    impl_->counters_.hit_tokens[Index(slowest)].Add(tokens);
  }
  if (const TailCandidate* tail =
          impl_->FindTail(*space, keys.subspan(0, hit), tails, &result.tail_key)) {
    result.tail_tokens = tail->token_count;
  }

  if (!counts) return result;
  impl_->counters_.lookup_blocks.Add(keys.size());
  impl_->counters_.lookup_tokens.Add(keys.size() * space->spec.block_tokens);
  (hit == 0             ? impl_->counters_.lookup_miss
   : hit == keys.size() ? impl_->counters_.lookup_hit
                        : impl_->counters_.lookup_partial)
      .Add();
  return result;
}

std::vector<bool> TieredStore::Present(NamespaceId namespace_id,
                                       absl::Span<const BlockKey> keys) const {
  const OpenedNamespace* space = impl_->namespaces_.Find(namespace_id);
  std::vector<bool> present(keys.size(), space != nullptr);
  if (space == nullptr) return present;
  std::vector<BlockIndex::Presence> found(keys.size());
  for (std::size_t g = 0; g < space->spec.groups.size(); ++g) {
    impl_->index_->FindBatch(namespace_id, static_cast<std::uint8_t>(g), keys,
                             absl::MakeSpan(found));
    for (std::size_t i = 0; i < keys.size(); ++i) present[i] = present[i] && found[i].flags != 0;
  }
  return present;
}

const TailCandidate* TieredStore::Impl::FindTail(const OpenedNamespace& space,
                                                 absl::Span<const BlockKey> keys,
                                                 absl::Span<const TailCandidate> tails,
                                                 BlockKey* key) const {
  const BlockKey parent = keys.empty() ? BlockKey() : keys.back();
  std::vector<const TailCandidate*> candidates;
  std::vector<BlockKey> names;
  for (const TailCandidate& tail : tails) {
    if (tail.block_index != keys.size()) continue;
    candidates.push_back(&tail);
    names.push_back(TailKey(parent, tail.token_count, tail.key));
  }
  std::vector<bool> everywhere(names.size(), true);
  std::vector<BlockIndex::Presence> present(names.size());
  for (std::size_t g = 0; g < space.spec.groups.size(); ++g) {
    index_->FindBatch(space.id, static_cast<std::uint8_t>(g), names, absl::MakeSpan(present));
    for (std::size_t i = 0; i < names.size(); ++i)
      everywhere[i] = everywhere[i] && present[i].flags != 0;
  }
  const TailCandidate* longest = nullptr;
  for (std::size_t i = 0; i < names.size(); ++i) {
    if (!everywhere[i]) continue;
    if (longest != nullptr && longest->token_count >= candidates[i]->token_count) continue;
    longest = candidates[i];
    *key = names[i];
  }
  return longest;
}

}  // namespace kvmill
