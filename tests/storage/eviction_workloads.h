// Made-up prompt traces, so that no policy is chosen for one real trace alone. The same on every
// machine: integer arithmetic and a generator of our own.
#ifndef KVMILL_TESTS_STORAGE_EVICTION_WORKLOADS_H_
#define KVMILL_TESTS_STORAGE_EVICTION_WORKLOADS_H_

#include <cstdint>
#include <vector>

namespace kvmill {

// Requests; each the ids of its blocks in prefix order.
using Trace = std::vector<std::vector<std::uint64_t>>;

// Conversations on top of one of 8 system prompts (popular ones more often). A conversation
// continues after each turn with the same chance, however often it did before: what a policy reads
// from its past is worth nothing, only how long ago its last turn was.
Trace ChatTrace(std::uint64_t seed, int requests);

// Questions about 400 documents of 40 blocks whose popularity follows Zipf's law; halfway, other
// documents become the popular ones.
Trace DocumentsTrace(std::uint64_t seed, int requests);

// ChatTrace with as many requests of a batch job between them, each 60 blocks that never return.
Trace ScanTrace(std::uint64_t seed, int requests);

// `chains` prompts of 10 blocks, one after the other, again and again.
Trace LoopTrace(int chains, int rounds);

}  // namespace kvmill

#endif  // KVMILL_TESTS_STORAGE_EVICTION_WORKLOADS_H_
