// bench fetch and bench store: one client against a running daemon.
#include <memory>
#include <string>

#include "absl/strings/str_cat.h"
#include "client/cli/commands.h"
#include "client/cli/data_bench.h"
#include "client/cli/human.h"
#include "client/cli/output.h"
#include "storage/core/status_macros.h"

namespace kvmill::cli {
namespace {

constexpr const char* kDataHelp =
    "Moves blocks of Gaussian K and V (k4v2_g128, head_dim 128), about --bytes of pages each, one "
    "a\n"
    "call: first --count single calls, for their times, then as many by --depth threads, for the "
    "rate.\n"
    "The blocks have a namespace of their own and are removed afterwards.\n"
    "  gb_per_s          pages\n"
    "  raw_gb_per_s      the 16-bit values in them\n"
    "  empty_rpc_p50_us  a call without work, over gRPC\n"
    "  transport         grpc, or what UCX negotiated\n"
    "\n"
    "Example:\n";
constexpr const char* kFetchExample =
    "  kvmill bench fetch --path ucx --bytes 256KiB --count 2000\n";
constexpr const char* kStoreExample = "  kvmill bench store --path ucx --bytes 1MiB --records\n";

absl::Status BenchData(const CommonFlags& common, const DataBenchOptions& options, bool store) {
  KVMILL_ASSIGN_OR_RETURN(const std::unique_ptr<Client> client, Connect(common));
  KVMILL_ASSIGN_OR_RETURN(const DataBenchResult result, store ? RunStoreBench(*client, options)
                                                              : RunFetchBench(*client, options));
  const double p50 = result.us[result.us.size() / 2];
  const double p99 = result.us[result.us.size() * 99 / 100];
  if (common.json) {
    PrintJson({{"gb_per_s", result.gb_per_s},
               {"raw_gb_per_s", result.raw_gb_per_s},
               {"p50_us", p50},
               {"p99_us", p99},
               {"empty_rpc_p50_us", result.empty_rpc_p50_us},
               {"transport", result.transport},
               {"page_bytes", result.page_bytes},
               {"raw_bytes", result.raw_bytes}});
    return absl::OkStatus();
  }
  Report report;
  report.Add("a block", HumanBytes(result.page_bytes),
             absl::StrCat(HumanBytes(result.raw_bytes), " in 16 bits, over ", result.transport));
  report.Add("one call", absl::StrCat(HumanNumber(p50, 0), " us"),
             absl::StrCat("median; p99 ", HumanNumber(p99, 0), " us, an empty RPC ",
                          HumanNumber(result.empty_rpc_p50_us, 0), " us"));
  report.Add("rate", absl::StrCat(HumanNumber(result.gb_per_s, 2), " GB/s"),
             absl::StrCat(HumanNumber(result.raw_gb_per_s, 2), " GB/s of 16-bit K and V, ",
                          options.depth, " calls at once"));
  report.Print();
  return absl::OkStatus();
}

void Add(CommandLine& line, CLI::App& bench, bool store) {
  auto options = std::make_shared<DataBenchOptions>();
  CLI::App* app =
      line.Add(bench, store ? "store" : "fetch",
               store ? "Speed of storing in a daemon" : "Speed of fetching from a daemon",
               absl::StrCat(kDataHelp, store ? kStoreExample : kFetchExample),
               [&line, options, store] { return BenchData(line.flags(), *options, store); });
  line.AddPath(*app);
  AddBytes(*app, "--bytes", options->bytes, "Pages of a block, about (default 1MiB)");
  app->add_option("--count", options->count, "Blocks")
      ->check(CLI::Range(1u, 10000000u))
      ->capture_default_str();
  app->add_option("--depth", options->depth, "Calls at once, for the rate")
      ->check(CLI::Range(1u, 64u))
      ->capture_default_str();
  if (store) app->add_flag("--records", options->records, "Store tiles: nothing is encoded");
}

}  // namespace

void AddBenchData(CommandLine& line, CLI::App& bench) {
  Add(line, bench, false);
  Add(line, bench, true);
}

}  // namespace kvmill::cli
