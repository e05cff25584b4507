// Whether the nodes of a simulated cluster keep the copies that they should: said by somebody who
// sees all of them, while each node decides by what it was told.
#ifndef KVMILL_TESTS_CLUSTER_FETCH_SIM_COPIES_H_
#define KVMILL_TESTS_CLUSTER_FETCH_SIM_COPIES_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "tests/cluster/fetch_sim_node.h"

namespace kvmill {

using FetchSimNodes = std::vector<std::unique_ptr<FetchSimNode>>;

inline constexpr std::size_t kSimPrompts = 6;
inline constexpr std::size_t kSimPromptBlocks = 80;
inline constexpr std::size_t kSimPromptRuns = (kSimPromptBlocks + kRunBlocks - 1) / kRunBlocks;

// A run of which a home has fewer blocks than somebody else, and should not.
struct SimLack {
  std::size_t machine = 0;
  std::size_t prompt = 0, run = 0;
  std::size_t has = 0, wants = 0;
};

// All of them, by the views of the nodes that run, which agree. With R = `copies` every run is on
// R + 1 nodes: on the first R homes, and on somebody else or the next home.
std::vector<SimLack> LacksOf(const FetchSimNodes& nodes, std::size_t copies);
std::string ToString(const SimLack& lack);

// How long the slowest node takes for what it lacks, by its rate alone.
std::int64_t PredictedNanos(const FetchSimNodes& nodes, const std::vector<SimLack>& lacks);

// How many blocks of each prompt somebody has who runs, up to the first gap.
std::vector<std::size_t> KnownBlocks(const FetchSimNodes& nodes);

}  // namespace kvmill

#endif  // KVMILL_TESTS_CLUSTER_FETCH_SIM_COPIES_H_
