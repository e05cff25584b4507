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
    "Moves blocks of Gaussian K and V (k4v2_g128, head_dim 128), about --bytes of pages each: "
    "first\n"
    "--count single calls, each after a call without work, for their times; then as many by "
    "--depth\n"
    "threads of each client, for the rate. The blocks have a namespace of their own, "
    "kvmill-bench-PID,\n"
    "and are removed in the end. Those of a bench that was killed stay until they are evicted, or\n"
    "`kvmill clear --namespace kvmill-bench-PID`; `kvmill ls` shows them.\n"
    "  gb_per_s          pages\n"
    "  raw_gb_per_s      the 16-bit values in them\n"
    "  empty_rpc_p50_us  a call without work, over gRPC\n"
    "  transport         grpc, shm (map), or what UCX negotiated\n"
    "  clients_gb_per_s  with --clients N the rate of 1, 2, 4, ... N clients, five times in turns; "
    "medians\n";
constexpr const char* kFetchHelp =
    "--path map copies nothing. Its single calls are the map alone, until the client knows where "
    "the\n"
    "pages are; its rate is that of mapping blocks, loading one word of every cache line of their "
    "pages,\n"
    "and checking afterwards that what was read was right.\n"
    "\n"
    "Examples:\n"
    "  kvmill bench fetch --path ucx --bytes 256KiB --count 2000\n"
    "  kvmill bench fetch --path map --bytes 1MiB --blocks 64\n";
constexpr const char* kStoreHelp =
    "--path map copies nothing: the daemon encodes from pages in shared memory of this process.\n"
    "\n"
    "Examples:\n"
    "  kvmill bench store --path ucx --bytes 1MiB --records\n"
    "  kvmill bench store --path map --bytes 1MiB\n";

absl::Status BenchData(const CommonFlags& common, const DataBenchOptions& options, bool store) {
  const auto connect = [&common] { return Connect(common); };
  KVMILL_ASSIGN_OR_RETURN(const DataBenchResult result, store ? RunStoreBench(connect, options)
                                                              : RunFetchBench(connect, options));
  Json clients = Json::object();
  for (const auto& [count, gb_per_s] : result.clients_gb_per_s) {
    clients[absl::StrCat(count)] = gb_per_s;
  }
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
               {"raw_bytes", result.raw_bytes},
               {"blocks", options.blocks},
               {"clients_gb_per_s", clients}});
    return absl::OkStatus();
  }
  Report report;
  report.Add("a block", HumanBytes(result.page_bytes),
             absl::StrCat(HumanBytes(result.raw_bytes), " in 16 bits, over ", result.transport));
  report.Add(options.blocks == 1 ? "one call" : absl::StrCat("a call of ", options.blocks),
             absl::StrCat(HumanNumber(p50, 0), " us"),
             absl::StrCat("median; p99 ", HumanNumber(p99, 0), " us, an empty RPC ",
                          HumanNumber(result.empty_rpc_p50_us, 0), " us"));
  report.Add("rate", absl::StrCat(HumanNumber(result.gb_per_s, 2), " GB/s"),
             absl::StrCat(HumanNumber(result.raw_gb_per_s, 2), " GB/s of 16-bit K and V, ",
                          options.depth * options.clients, " calls at once"));
  if (options.clients > 1) {
    for (const auto& [count, gb_per_s] : result.clients_gb_per_s) {
      report.Add(absl::StrCat(count, count == 1 ? " client" : " clients"),
                 absl::StrCat(HumanNumber(gb_per_s, 2), " GB/s"));
    }
  }
  report.Print();
  return absl::OkStatus();
}

void Add(CommandLine& line, CLI::App& bench, bool store) {
  auto options = std::make_shared<DataBenchOptions>();
  CLI::App* app =
      line.Add(bench, store ? "store" : "fetch",
               store ? "Speed of storing in a daemon" : "Speed of fetching from a daemon",
               absl::StrCat(kDataHelp, store ? kStoreHelp : kFetchHelp),
               [&line, options, store] { return BenchData(line.flags(), *options, store); });
  line.AddPath(*app, &options->map);
  AddBytes(*app, "--bytes", options->bytes, "Pages of a block, about (default 1MiB)");
  const auto add = [app](const char* name, std::uint32_t& value, std::uint32_t max,
                         const char* help) {
    app->add_option(name, value, help)->check(CLI::Range(1u, max))->capture_default_str();
  };
  add("--count", options->count, 10000000, "Calls");
  add("--depth", options->depth, 64, "Calls at once of a client, for the rate");
  add("--clients", options->clients, 64, "Clients with a connection each, for the rate");
  if (store) {
    app->add_flag("--records", options->records, "Store tiles: nothing is encoded");
  } else {
    add("--blocks", options->blocks, 4096, "Blocks of one call");
  }
}

}  // namespace

void AddBenchData(CommandLine& line, CLI::App& bench) {
  Add(line, bench, false);
  Add(line, bench, true);
}

}  // namespace kvmill::cli
