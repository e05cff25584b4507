// The table of docs/decisions/0002-eviction-policy.md: hit rates in percent of every policy, plain
// and with leaves leaving first, on the made-up workloads and on a trace.
#include <cstdio>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "CLI/CLI.hpp"
#include "storage/eviction/policy.h"
#include "storage/eviction/replay.h"
#include "tests/storage/eviction_workloads.h"

namespace kvmill {
namespace {

struct Workload {
  std::string name;
  Trace trace;
  std::vector<std::uint32_t> blocks;
};

int PrintRow(const Workload& workload, std::string_view policy, bool leaf_first) {
  std::printf("%-10s %-6s", std::string(policy).c_str(), leaf_first ? "leaf" : "plain");
  for (const std::uint32_t blocks : workload.blocks) {
    const auto result =
        ReplayTrace(workload.trace,
                    {.blocks = blocks, .policy = std::string(policy), .leaf_first = leaf_first});
    if (!result.ok()) {
      std::fprintf(stderr, "%s\n", std::string(result.status().message()).c_str());
      return 1;
    }
    std::printf(" %8.2f", 100.0 * result->hit_rate);
  }
  std::printf("\n");
  return 0;
}

int Main(int argc, char** argv) {
  std::string trace;
  CLI::App app(
      "Hit rates in percent of every eviction policy, on made-up workloads and on a trace.");
  app.add_option("trace", trace, "A file with {\"hash_ids\": [...]} a line");
  CLI11_PARSE(app, argc, argv);
  std::vector<Workload> workloads = {
      {"chat", ChatTrace(1, 6000), {500, 1000, 2000, 4000, 8000}},
      {"documents", DocumentsTrace(1, 6000), {500, 1000, 2000, 4000, 8000}},
      {"scan", ScanTrace(1, 6000), {500, 1000, 2000, 4000, 8000}},
      {"loop of 1100", LoopTrace(110, 20), {1000}},
  };
  if (!trace.empty()) {
    std::ifstream file(trace);
    if (!file) {
      std::fprintf(stderr, "cannot read %s\n", trace.c_str());
      return 1;
    }
    Workload workload{trace, {}, {1'000, 10'000, 40'000, 50'000}};
    for (std::string line; std::getline(file, line);) {
      workload.trace.push_back(
          nlohmann::json::parse(line).at("hash_ids").get<std::vector<std::uint64_t>>());
    }
    workloads.insert(workloads.begin(), std::move(workload));
  }
  for (const Workload& workload : workloads) {
    std::printf("%s\n%-17s", workload.name.c_str(), "blocks");
    for (const std::uint32_t blocks : workload.blocks) std::printf(" %8u", blocks);
    std::printf("\n");
    for (const std::string_view policy : EvictionPolicyNames()) {
      for (const bool leaf_first : {false, true}) {
        if (!leaf_first && policy == kDefaultEvictionPolicy) continue;  // It always is.
        if (const int failed = PrintRow(workload, policy, leaf_first); failed != 0) return failed;
      }
    }
  }
  return 0;
}

}  // namespace
}  // namespace kvmill

int main(int argc, char** argv) { return kvmill::Main(argc, argv); }
