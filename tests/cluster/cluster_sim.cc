// Runs simulated clusters from seeds. Prints the first seed that fails, with the command that plays
// it again, and ends with 1. With --faults: plants each mistake it knows, and ends with 1 when one
// is not found.
#include <cstdio>
#include <optional>
#include <string>

#include "CLI/CLI.hpp"
#include "absl/strings/str_cat.h"
#include "tests/cluster/fetch_sim.h"
#include "tests/long_form.h"

namespace kvmill {
namespace {

// The first seed that fails, or none.
std::optional<std::uint64_t> Play(FetchSimOptions options, std::uint64_t seeds,
                                  FetchSimReport* sum) {
  for (std::uint64_t i = 0; i < seeds; ++i, ++options.seed) {
    const FetchSimReport report = RunFetchSim(options);
    sum->events += report.events;
    sum->views += report.views;
    sum->lookups += report.lookups;
    sum->calls += report.calls;
    sum->hedges += report.hedges;
    sum->blocks_asked += report.blocks_asked;
    sum->blocks_found += report.blocks_found;
    sum->blocks_refused += report.blocks_refused;
    sum->failure = report.failure;
    if (!report.failure.empty()) return options.seed;
  }
  return std::nullopt;
}

int PlantFaults(FetchSimOptions options) {
  constexpr std::uint64_t kSeeds = 300;
  int missed = 0;
  for (const std::string& name : FetchFaultNames()) {
    options.fault = *FetchFaultNamed(name);
    FetchSimReport sum;
    const std::optional<std::uint64_t> seed = Play(options, kSeeds, &sum);
    missed += !seed.has_value();
    std::printf("%-18s %s\n", name.c_str(),
                seed.has_value() ? absl::StrCat("seed ", *seed, ": ", sum.failure).c_str()
                                 : absl::StrCat("NOT FOUND in ", kSeeds, " seeds").c_str());
  }
  return missed == 0 ? 0 : 1;
}

int Main(int argc, char** argv) {
  FetchSimOptions options;
  std::uint64_t seeds = ShortOrLong<std::uint64_t>(1500, 100'000);
  std::string fault;
  bool faults = false;
  CLI::App app("Simulated clusters from seeds: a storm, then peace in which all must be found.");
  const CLI::Option* seed =
      app.add_option("--seed", options.seed, "The only seed, or with --seeds the first");
  const CLI::Option* count = app.add_option("--seeds", seeds, "How many (1 with --seed alone)");
  app.add_option("--nodes", options.nodes, "Of each cluster; 0: drawn from the seed")
      ->check(CLI::Range(0, 1000));
  app.add_option("--fault", fault, "Plant a mistake")->check(CLI::IsMember(FetchFaultNames()));
  app.add_flag("--faults", faults, "Plant every mistake, one after the other; all must be found");
  app.add_flag("--trace", options.trace, "Print what happens");
  CLI11_PARSE(app, argc, argv);
  if (faults) return PlantFaults(options);
  if (!fault.empty()) options.fault = *FetchFaultNamed(fault);
  if (!seed->empty() && count->empty()) seeds = 1;

  FetchSimReport sum;
  if (const auto failed = Play(options, seeds, &sum)) {
    std::printf("seed %s: %s\nagain: cluster_sim --seed %s", absl::StrCat(*failed).c_str(),
                sum.failure.c_str(), absl::StrCat(*failed).c_str());
    if (options.nodes != 0) std::printf(" --nodes %s", absl::StrCat(options.nodes).c_str());
    if (!fault.empty()) std::printf(" --fault %s", fault.c_str());
    std::printf(" --trace\n");
    return 1;
  }
  std::printf("%s\n",
              absl::StrCat(seeds, " seeds, ", sum.events, " events, ", sum.views, " views, ",
                           sum.lookups, " lookups, ", sum.calls, " calls, ", sum.hedges,
                           " of them hedges; in peace ", sum.blocks_found, " of ", sum.blocks_asked,
                           " blocks found; ", sum.blocks_refused, " with wrong bytes refused")
                  .c_str());
  return 0;
}

}  // namespace
}  // namespace kvmill

int main(int argc, char** argv) { return kvmill::Main(argc, argv); }
