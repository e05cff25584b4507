// Runs simulated clusters from seeds.
#include "tests/cluster/fetch_sim.h"
#include "tests/cluster/sim_command.h"

namespace kvmill {
namespace {

struct ClusterSim {
  using Options = FetchSimOptions;
  using Report = FetchSimReport;
  static constexpr char kProgram[] = "cluster_sim";
  static constexpr char kAbout[] =
      "Simulated clusters from seeds: a storm, then peace in which all must be found.";
  static constexpr std::uint64_t kSeeds = 1500;

  static Report Run(const Options& options) { return RunFetchSim(options); }
  static auto FaultNames() { return FetchFaultNames(); }
  static auto FaultNamed(const std::string& name) { return FetchFaultNamed(name); }
  static void AddFlags(CLI::App* app, Options* options) {
    app->add_option("--nodes", options->nodes, "Of each cluster; 0: drawn from the seed")
        ->check(CLI::Range(0, 1000));
  }
  static std::string Again(const Options& options) {
    return options.nodes == 0 ? "" : absl::StrCat(" --nodes ", options.nodes);
  }
  static void Add(const Report& report, Report* sum) {
    sum->events += report.events;
    sum->views += report.views;
    sum->lookups += report.lookups;
    sum->calls += report.calls;
    sum->hedges += report.hedges;
    sum->blocks_asked += report.blocks_asked;
    sum->blocks_found += report.blocks_found;
    sum->blocks_refused += report.blocks_refused;
  }
  static std::string Summary(const Report& sum) {
    return absl::StrCat(sum.events, " events, ", sum.views, " views, ", sum.lookups, " lookups, ",
                        sum.calls, " calls, ", sum.hedges, " of them hedges; in peace ",
                        sum.blocks_found, " of ", sum.blocks_asked, " blocks found; ",
                        sum.blocks_refused, " with wrong bytes refused");
  }
};

}  // namespace
}  // namespace kvmill

int main(int argc, char** argv) { return kvmill::SimMain<kvmill::ClusterSim>(argc, argv); }
