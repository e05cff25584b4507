// Every eviction policy in a full tier: nanoseconds for one Evict, Insert and Touch, and the
// longest single Evict. Blocks form chains of 32; the touched block is any that is present.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <string>
#include <vector>

#include "CLI/CLI.hpp"
#include "storage/eviction/policy.h"

namespace kvmill {
namespace {

using Clock = std::chrono::steady_clock;

double NanosSince(Clock::time_point start) {
  return std::chrono::duration<double, std::nano>(Clock::now() - start).count();
}

// Xorshift64 (Marsaglia 2003): a few cycles, so that the policies are what is measured.
std::uint64_t Draw(std::uint64_t* state) {
  *state ^= *state << 13;
  *state ^= *state >> 7;
  *state ^= *state << 17;
  return *state;
}

int Main(int argc, char** argv) {
  constexpr std::uint32_t kChain = 32;
  std::uint32_t entries = 1'000'000;
  CLI::App app("Every eviction policy in a full tier: nanoseconds for an Evict, Insert and Touch.");
  app.add_option("entries", entries, "Of the tier")
      ->check(CLI::Range(kChain, 100'000'000u))
      ->capture_default_str();
  CLI11_PARSE(app, argc, argv);
  std::printf("%u entries, all present\n", entries);
  std::printf("%-10s %16s %16s %14s %12s\n", "policy", "evict+insert_ns", "touch_ns",
              "longest_evict", "bytes/entry");
  std::printf("%-10s %16s %16s\n", "", "fastest median", "fastest median");
  for (const std::string_view name : EvictionPolicyNames()) {
    auto created = CreateEvictionPolicy(name, {.entries_max = entries, .capacity_blocks = entries});
    if (!created.ok()) {
      std::fprintf(stderr, "%s\n", std::string(created.status().message()).c_str());
      return 2;
    }
    EvictionPolicy& policy = **created;
    std::uint64_t random = 88172645463325252u;
    std::vector<EntryId> parents(entries, kNoEntry);
    std::vector<EntryId> victims, path;
    std::vector<double> insert_ns, touch_ns;
    double longest_evict_ns = 0;

    const auto insert_prompt = [&](const std::vector<EntryId>& ids) {
      for (std::size_t i = 0; i < ids.size(); ++i) {
        parents[ids[i]] = i == 0 ? kNoEntry : ids[i - 1];
        policy.Insert(ids[i], {.key_hash = Draw(&random), .parent = parents[ids[i]]});
      }
    };
    for (EntryId id = 0; id + kChain <= entries; id += kChain) {
      victims.clear();
      for (EntryId i = 0; i < kChain; ++i) victims.push_back(id + i);
      insert_prompt(victims);
    }

    // Every block leaves about twice.
    for (std::uint32_t prompt = 0; prompt < 2 * entries / kChain; ++prompt) {
      victims.clear();
      double evict_ns = 0;
      for (std::uint32_t i = 0; i < kChain; ++i) {
        const auto start = Clock::now();
        const EntryId victim = policy.Evict([](EntryId) { return true; });
        const double ns = NanosSince(start);
        evict_ns += ns;
        longest_evict_ns = std::max(longest_evict_ns, ns);
        victims.push_back(victim);
      }
      auto start = Clock::now();
      insert_prompt(victims);
      insert_ns.push_back((evict_ns + NanosSince(start)) / kChain);

      path.clear();
      for (EntryId id = static_cast<EntryId>(Draw(&random) % policy.size()); id != kNoEntry;
           id = parents[id]) {
        path.push_back(id);
      }
      start = Clock::now();
      for (auto id = path.rbegin(); id != path.rend(); ++id) policy.Touch(*id);
      touch_ns.push_back(NanosSince(start) / static_cast<double>(path.size()));
    }
    std::sort(insert_ns.begin(), insert_ns.end());
    std::sort(touch_ns.begin(), touch_ns.end());
    std::printf("%-10s %9.0f %6.0f %9.0f %6.0f %11.0f us %12zu\n", std::string(name).c_str(),
                insert_ns.front(), insert_ns[insert_ns.size() / 2], touch_ns.front(),
                touch_ns[touch_ns.size() / 2], longest_evict_ns / 1e3, policy.bytes_per_entry());
  }
  return 0;
}

}  // namespace
}  // namespace kvmill

int main(int argc, char** argv) { return kvmill::Main(argc, argv); }
