// Runs simulated tickets from seeds.
#include "tests/cluster/sim_command.h"
#include "tests/cluster/ticket_sim.h"

namespace kvmill {
namespace {

struct TicketSim {
  using Options = TicketSimOptions;
  using Report = TicketSimReport;
  static constexpr char kProgram[] = "ticket_sim";
  static constexpr char kAbout[] =
      "Simulated tickets from seeds: a storm, then peace in which all must arrive.";
  static constexpr std::uint64_t kSeeds = 1000;

  static Report Run(const Options& options) { return RunTicketSim(options); }
  static auto FaultNames() { return TicketFaultNames(); }
  static auto FaultNamed(const std::string& name) { return TicketFaultNamed(name); }
  static void AddFlags(CLI::App*, Options*) {}
  static std::string Again(const Options&) { return ""; }
  static void Add(const Report& report, Report* sum) {
    sum->events += report.events;
    sum->tickets += report.tickets;
    sum->redemptions += report.redemptions;
    sum->blocks_promised += report.blocks_promised;
    sum->blocks_sealed += report.blocks_sealed;
    sum->acknowledged += report.acknowledged;
    sum->revoked += report.revoked;
    sum->expired += report.expired;
    sum->damaged += report.damaged;
  }
  static std::string Summary(const Report& sum) {
    return absl::StrCat(sum.events, " events, ", sum.tickets, " tickets, ", sum.redemptions,
                        " redemptions, ", sum.blocks_sealed, " of ", sum.blocks_promised,
                        " blocks sealed; ", sum.acknowledged, " acknowledged, ", sum.revoked,
                        " revoked, ", sum.expired, " expired; ", sum.damaged,
                        " pages and seals refused");
  }
};

}  // namespace
}  // namespace kvmill

int main(int argc, char** argv) { return kvmill::SimMain<kvmill::TicketSim>(argc, argv); }
