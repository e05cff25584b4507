// Replays a trace of prompts through an eviction policy and counts what a tier of a given size
// would have had.
//
// A request is the ids of its blocks in prefix order. Its hits are the consecutive prefix that is
// present before it. Then every id is touched or inserted, first to last; an insert into a full
// tier evicts first, and any block may leave, those of the same request too. Nothing else happens:
// no time, no leases, no tails.
#ifndef KVMILL_STORAGE_EVICTION_REPLAY_H_
#define KVMILL_STORAGE_EVICTION_REPLAY_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"

namespace kvmill {

struct ReplayOptions {
  std::uint32_t blocks = 0;  // Capacity of the tier; 1 to 2^31. More than the trace has: no limit.
  std::string policy = {};   // Empty: the default policy.
  // False: the policies as published, blind to chains; so "lru" is plain LRU. (The default policy
  // is about chains and always sees them.) True: as a daemon would run them.
  bool leaf_first = false;
  // What the policy is told to expect (capacity_blocks), up to 2^31; 0: the truth, `blocks`.
  std::uint32_t expected_blocks = 0;
};

struct ReplayResult {
  std::uint64_t lookups = 0;  // Ids in the trace.
  std::uint64_t hits = 0;
  double hit_rate = 0;  // hits / lookups, from 0 to 1; 0 for an empty trace.
  std::uint32_t blocks = 0;
  std::string policy;
};

// INVALID_ARGUMENT for an unknown policy, or blocks or expected_blocks out of range.
absl::StatusOr<ReplayResult> ReplayTrace(absl::Span<const std::vector<std::uint64_t>> requests,
                                         const ReplayOptions& options);

}  // namespace kvmill

#endif  // KVMILL_STORAGE_EVICTION_REPLAY_H_
