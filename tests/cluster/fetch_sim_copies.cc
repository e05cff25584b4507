#include "tests/cluster/fetch_sim_copies.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

namespace kvmill {

namespace {

std::size_t MostOf(const FetchSimNodes& nodes, std::size_t prompt, std::size_t run) {
  std::size_t most = 0;
  for (const auto& node : nodes) {
    if (node->running()) most = std::max(most, node->Leading(prompt, run));
  }
  return most;
}

}  // namespace

std::vector<SimLack> LacksOf(const FetchSimNodes& nodes, std::size_t copies) {
  std::vector<SimLack> lacks;
  const auto any = std::find_if(nodes.begin(), nodes.end(),
                                [](const auto& node) { return node->view() != nullptr; });
  if (copies == 0 || any == nodes.end()) return lacks;
  const ClusterView& view = *(*any)->view();
  for (std::size_t prompt = 0; prompt < kSimPrompts; ++prompt) {
    for (std::size_t run = 0; run < kSimPromptRuns; ++run) {
      const std::size_t most = MostOf(nodes, prompt, run);
      std::vector<std::size_t> homes;
      for (const MemberIndex index :
           view.HomesOf(Fingerprint{}, SimKey(prompt, run * kRunBlocks))) {
        homes.push_back(SimHosts::MachineOf(view.members()[index].address));
      }
      std::size_t keepers = std::min(copies, homes.size());
      const auto outside = [&](std::size_t machine) {
        return std::find(homes.begin(), homes.begin() + static_cast<std::ptrdiff_t>(keepers),
                         machine) == homes.begin() + static_cast<std::ptrdiff_t>(keepers);
      };
      bool elsewhere = homes.size() == keepers;
      for (std::size_t machine = 0; machine < nodes.size(); ++machine) {
        elsewhere |= nodes[machine]->running() && outside(machine) &&
                     nodes[machine]->Leading(prompt, run) == most;
      }
      if (!elsewhere) ++keepers;
      for (std::size_t rank = 0; rank < keepers; ++rank) {
        const FetchSimNode& home = *nodes[homes[rank]];
        const std::size_t has = home.running() ? home.Leading(prompt, run) : most;
        if (has < most) lacks.push_back({homes[rank], prompt, run, has, most});
      }
    }
  }
  return lacks;
}

std::string ToString(const SimLack& lack) {
  return absl::StrCat("node-", lack.machine, " keeps ", lack.has, " of ", lack.wants,
                      " blocks of prompt ", lack.prompt, " run ", lack.run);
}

std::int64_t PredictedNanos(const FetchSimNodes& nodes, const std::vector<SimLack>& lacks) {
  std::int64_t longest = 0;
  for (std::size_t machine = 0; machine < nodes.size(); ++machine) {
    std::uint64_t blocks = 0;
    for (const SimLack& lack : lacks) {
      if (lack.machine == machine) blocks += lack.wants - lack.has;
    }
    if (blocks == 0) continue;
    longest =
        std::max(longest, nodes[machine]->replicator().rate().NanosFor(blocks * kSimBlockBytes));
  }
  return longest;
}

std::vector<std::size_t> KnownBlocks(const FetchSimNodes& nodes) {
  std::vector<std::size_t> counts;
  for (std::size_t prompt = 0; prompt < kSimPrompts; ++prompt) {
    std::size_t count = 0;
    for (std::size_t run = 0; run < kSimPromptRuns && count == run * kRunBlocks; ++run) {
      count += MostOf(nodes, prompt, run);
    }
    counts.push_back(count);
  }
  return counts;
}

}  // namespace kvmill
