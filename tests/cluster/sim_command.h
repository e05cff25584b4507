// The command line of a simulation: plays seeds and prints the first one that fails, with the
// command that plays it again, and ends with 1. With --faults: plants each mistake that the
// simulation knows, and ends with 1 when one is not found.
//
// `Sim` has Options (seed, fault, trace), Report (failure), and, static: kProgram, kAbout, kSeeds
// (of the short form), Run, FaultNames, FaultNamed, Add (a report to a sum), AddFlags, Again (what
// --seed does not say), Summary.
#ifndef KVMILL_TESTS_CLUSTER_SIM_COMMAND_H_
#define KVMILL_TESTS_CLUSTER_SIM_COMMAND_H_

#include <cstdint>
#include <cstdio>
#include <optional>
#include <string>

#include "CLI/CLI.hpp"
#include "absl/strings/str_cat.h"
#include "tests/long_form.h"

namespace kvmill {

// The first seed that fails, or none.
template <typename Sim>
std::optional<std::uint64_t> PlaySeeds(typename Sim::Options options, std::uint64_t seeds,
                                       typename Sim::Report* sum) {
  for (std::uint64_t i = 0; i < seeds; ++i, ++options.seed) {
    const typename Sim::Report report = Sim::Run(options);
    Sim::Add(report, sum);
    sum->failure = report.failure;
    if (!report.failure.empty()) return options.seed;
  }
  return std::nullopt;
}

template <typename Sim>
int PlantFaults(typename Sim::Options options) {
  constexpr std::uint64_t kSeeds = 300;
  int missed = 0;
  for (const std::string& name : Sim::FaultNames()) {
    options.fault = *Sim::FaultNamed(name);
    typename Sim::Report sum;
    const std::optional<std::uint64_t> seed = PlaySeeds<Sim>(options, kSeeds, &sum);
    missed += !seed.has_value();
    std::printf("%-18s %s\n", name.c_str(),
                seed.has_value() ? absl::StrCat("seed ", *seed, ": ", sum.failure).c_str()
                                 : absl::StrCat("NOT FOUND in ", kSeeds, " seeds").c_str());
  }
  return missed == 0 ? 0 : 1;
}

template <typename Sim>
int SimMain(int argc, char** argv) {
  typename Sim::Options options;
  std::uint64_t seeds = ShortOrLong<std::uint64_t>(Sim::kSeeds, 100'000);
  std::string fault;
  bool faults = false;
  CLI::App app(Sim::kAbout);
  const CLI::Option* seed =
      app.add_option("--seed", options.seed, "The only seed, or with --seeds the first");
  const CLI::Option* count = app.add_option("--seeds", seeds, "How many (1 with --seed alone)");
  Sim::AddFlags(&app, &options);
  app.add_option("--fault", fault, "Plant a mistake")->check(CLI::IsMember(Sim::FaultNames()));
  app.add_flag("--faults", faults, "Plant every mistake, one after the other; all must be found");
  app.add_flag("--trace", options.trace, "Print what happens");
  CLI11_PARSE(app, argc, argv);
  if (faults) return PlantFaults<Sim>(options);
  if (!fault.empty()) options.fault = *Sim::FaultNamed(fault);
  if (!seed->empty() && count->empty()) seeds = 1;

  typename Sim::Report sum;
  if (const auto failed = PlaySeeds<Sim>(options, seeds, &sum)) {
    std::printf("seed %s: %s\nagain: %s --seed %s%s", absl::StrCat(*failed).c_str(),
                sum.failure.c_str(), Sim::kProgram, absl::StrCat(*failed).c_str(),
                Sim::Again(options).c_str());
    if (!fault.empty()) std::printf(" --fault %s", fault.c_str());
    std::printf(" --trace\n");
    return 1;
  }
  std::printf("%s\n", absl::StrCat(seeds, " seeds, ", Sim::Summary(sum)).c_str());
  return 0;
}

}  // namespace kvmill

#endif  // KVMILL_TESTS_CLUSTER_SIM_COMMAND_H_
