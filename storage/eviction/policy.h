// Which block leaves a full tier next.
//
// A policy orders the blocks of one tier; it neither owns them nor knows their bytes. The owner
// (the tiered store, or a trace replay) tells it about every block that enters, is used, or leaves,
// and asks for a victim when room is needed. Blocks of a prompt form chains: a block is useless
// without its parents, so a policy never names a block whose children are still in the tier (leaves
// leave first; see Options::leaf_first).
//
// Not thread-safe: the owner serializes calls. No allocation after creation: memory is a fixed
// number of bytes per entry (bytes_per_entry), counted in the tier's metadata budget. Every call
// takes constant time, amortized over the calls before it.
#ifndef KVMILL_STORAGE_EVICTION_POLICY_H_
#define KVMILL_STORAGE_EVICTION_POLICY_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string_view>

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"

namespace kvmill {

// Dense id of a block in a tier, below entries_max; the owner reuses an id once its block has left.
using EntryId = std::uint32_t;
inline constexpr EntryId kNoEntry = 0xFFFFFFFFu;

class SharedNodes;  // storage/eviction/shared_nodes.h

struct EntryTraits {
  // 64-bit hash of the full block key; what ghosts and frequency sketches remember.
  std::uint64_t key_hash = 0;
  // The parent block when it is in this tier, else kNoEntry. An id that the policy does not know is
  // taken as kNoEntry.
  EntryId parent = kNoEntry;
  // Blocks before it in its prompt; 0 for the first. A hint, may be 0 when unknown.
  std::uint32_t depth = 0;
};

class EvictionPolicy {
 public:
  struct Options {
    // Ids are below this; 1 to 2^31.
    std::uint32_t entries_max = 0;
    // Blocks that are expected to fit; sizes queues and ghosts. 1 to entries_max. For "returns" and
    // "lru" a guess that is far too high costs memory only (8 and 0 bytes a block) and little or
    // nothing of the hit rate; the queues of the others come out wrong.
    std::uint32_t capacity_blocks = 0;
    // False: the algorithm as published, blind to parents. For comparing in a replay; a daemon
    // leaves it on. The policy "returns" is about chains and does not heed it.
    bool leaf_first = true;
    // Where the entries are kept, with those of other policies for as many ids, so that many orders
    // of few entries each cost one array. No two of them may know an id at once, and the parent of
    // an entry must be of the same policy or of none. Null: an array of the policy's own. Outlives
    // the policy.
    SharedNodes* nodes = nullptr;
  };

  virtual ~EvictionPolicy() = default;

  // `id` entered the tier and is not known yet. Parents enter before their children.
  virtual void Insert(EntryId id, const EntryTraits& traits) = 0;
  // `id` was used by a request. Called for the blocks of a request in prefix order: the order among
  // the blocks of one chain rests on it (that leaves leave first does not).
  virtual void Touch(EntryId id) = 0;
  // `id` left the tier for a reason other than Evict (removed, cleared). Its children may still be
  // here; they count as having no parent from now on.
  virtual void Remove(EntryId id) = 0;
  // Chooses the block to leave, forgets it (but for ghosts) and returns it. `may_leave` is false
  // for blocks that cannot go now (leased, in use); it is asked at most kAsksMax times, and a block
  // that it refuses counts as just used, so that the next call asks about others. kNoEntry: no
  // candidate among those asked.
  virtual EntryId Evict(absl::FunctionRef<bool(EntryId)> may_leave) = 0;
  static constexpr int kAsksMax = 64;

  // Whether it is known; with Options::nodes, to any of the policies that share them.
  virtual bool Contains(EntryId id) const = 0;
  // The parent of a known entry, kNoEntry when that is not known.
  virtual EntryId Parent(EntryId id) const = 0;
  virtual std::uint32_t size() const = 0;  // Known entries.
  virtual std::string_view name() const = 0;
  // Everything the policy holds: links (but for Options::nodes), ghosts, sketches.
  virtual std::size_t bytes() const = 0;
  virtual std::uint32_t entries_max() const = 0;
  // The first divided by the second, rounded to the nearest.
  std::size_t bytes_per_entry() const { return (bytes() + entries_max() / 2) / entries_max(); }
};

// The policy that kvmilld uses: "returns"; chosen by trace replay
// (docs/decisions/0002-eviction-policy.md).
extern const std::string_view kDefaultEvictionPolicy;

// Names for --help and errors, the default first.
absl::Span<const std::string_view> EvictionPolicyNames();

// INVALID_ARGUMENT for an unknown name (the message lists the known ones) or bad options.
absl::StatusOr<std::unique_ptr<EvictionPolicy>> CreateEvictionPolicy(
    std::string_view name, const EvictionPolicy::Options& options);

}  // namespace kvmill

#endif  // KVMILL_STORAGE_EVICTION_POLICY_H_
