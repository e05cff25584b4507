// Runs simulated tickets from seeds. Prints the first seed that fails, with the command that plays
// it again, and ends with 1. With --faults: plants each mistake it knows, and ends with 1 when one
// is not found.
#include <cstdio>
#include <optional>
#include <string>

#include "CLI/CLI.hpp"
#include "absl/strings/str_cat.h"
#include "tests/cluster/ticket_sim.h"
#include "tests/long_form.h"

namespace kvmill {
namespace {

// The first seed that fails, or none.
std::optional<std::uint64_t> Play(TicketSimOptions options, std::uint64_t seeds,
                                  TicketSimReport* sum) {
  for (std::uint64_t i = 0; i < seeds; ++i, ++options.seed) {
    const TicketSimReport report = RunTicketSim(options);
    sum->events += report.events;
    sum->tickets += report.tickets;
    sum->redemptions += report.redemptions;
    sum->blocks_promised += report.blocks_promised;
    sum->blocks_sealed += report.blocks_sealed;
    sum->acknowledged += report.acknowledged;
    sum->revoked += report.revoked;
    sum->expired += report.expired;
    sum->damaged += report.damaged;
    sum->failure = report.failure;
    if (!report.failure.empty()) return options.seed;
  }
  return std::nullopt;
}

int PlantFaults(TicketSimOptions options) {
  constexpr std::uint64_t kSeeds = 300;
  int missed = 0;
  for (const std::string& name : TicketFaultNames()) {
    options.fault = *TicketFaultNamed(name);
    TicketSimReport sum;
    const std::optional<std::uint64_t> seed = Play(options, kSeeds, &sum);
    missed += !seed.has_value();
    std::printf("%-18s %s\n", name.c_str(),
                seed.has_value() ? absl::StrCat("seed ", *seed, ": ", sum.failure).c_str()
                                 : absl::StrCat("NOT FOUND in ", kSeeds, " seeds").c_str());
  }
  return missed == 0 ? 0 : 1;
}

int Main(int argc, char** argv) {
  TicketSimOptions options;
  std::uint64_t seeds = ShortOrLong<std::uint64_t>(1000, 100'000);
  std::string fault;
  bool faults = false;
  CLI::App app("Simulated tickets from seeds: a storm, then peace in which all must arrive.");
  const CLI::Option* seed =
      app.add_option("--seed", options.seed, "The only seed, or with --seeds the first");
  const CLI::Option* count = app.add_option("--seeds", seeds, "How many (1 with --seed alone)");
  app.add_option("--fault", fault, "Plant a mistake")->check(CLI::IsMember(TicketFaultNames()));
  app.add_flag("--faults", faults, "Plant every mistake, one after the other; all must be found");
  app.add_flag("--trace", options.trace, "Print what happens");
  CLI11_PARSE(app, argc, argv);
  if (faults) return PlantFaults(options);
  if (!fault.empty()) options.fault = *TicketFaultNamed(fault);
  if (!seed->empty() && count->empty()) seeds = 1;

  TicketSimReport sum;
  if (const auto failed = Play(options, seeds, &sum)) {
    std::printf("seed %s: %s\nagain: ticket_sim --seed %s", absl::StrCat(*failed).c_str(),
                sum.failure.c_str(), absl::StrCat(*failed).c_str());
    if (!fault.empty()) std::printf(" --fault %s", fault.c_str());
    std::printf(" --trace\n");
    return 1;
  }
  std::printf("%s\n",
              absl::StrCat(seeds, " seeds, ", sum.events, " events, ", sum.tickets, " tickets, ",
                           sum.redemptions, " redemptions, ", sum.blocks_sealed, " of ",
                           sum.blocks_promised, " blocks sealed; ", sum.acknowledged,
                           " acknowledged, ", sum.revoked, " revoked, ", sum.expired, " expired; ",
                           sum.damaged, " pages and seals refused")
                  .c_str());
  return 0;
}

}  // namespace
}  // namespace kvmill

int main(int argc, char** argv) { return kvmill::Main(argc, argv); }
