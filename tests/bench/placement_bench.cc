// Placement with 1,000 members: what a table costs to make and to change, how evenly it spreads,
// what moves when a member is lost, and what a lookup costs. Ends with 1 when more moves than has
// to, or a member deviates by more than a tenth.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <ctime>
#include <random>
#include <string>
#include <vector>

#include "CLI/CLI.hpp"
#include "service/cluster/anchor.h"
#include "service/cluster/cluster_view.h"

namespace kvmill {
namespace {

// Processor time of this thread: the machine is shared.
double CpuMillis() {
  timespec now;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) * 1e3 + static_cast<double>(now.tv_nsec) / 1e6;
}

std::vector<Member> Members(std::size_t count, std::size_t zones, bool weighted) {
  std::mt19937_64 random(1);
  std::vector<Member> members;
  for (std::size_t i = 0; i < count; ++i) {
    members.push_back(
        {.id = "node-" + std::to_string(i),
         .zone = "zone-" + std::to_string(i % zones),
         .capacity_bytes = (std::uint64_t{1} << 40) * (weighted ? 1 + random() % 8 : 1)});
  }
  return members;
}

struct Made {
  std::shared_ptr<const ClusterView> view;
  double millis;
};
Made Make(const std::vector<Member>& members, const std::shared_ptr<const ClusterView>& old) {
  std::vector<Member> copy = members;
  const double start = CpuMillis();
  auto view = ClusterView::Make(std::move(copy), 1, kShardBits, old);
  const double millis = CpuMillis() - start;
  if (!view.ok()) {
    std::fprintf(stderr, "%s\n", std::string(view.status().message()).c_str());
    std::exit(2);
  }
  return {*std::move(view), millis};
}

double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

// Largest |load - share| / max(share, mean load) over members, by first ranks.
double Imbalance(const ClusterView& view) {
  std::vector<double> load(view.serving_count(), 0);
  for (std::uint32_t shard = 0; shard < view.table().shard_count(); ++shard) {
    load[view.table().Ranking(shard)[0]] += 1;
  }
  double weight = 0, largest = 0;
  for (const Member& member : view.serving()) weight += static_cast<double>(member.capacity_bytes);
  const double shards = static_cast<double>(view.table().shard_count());
  for (std::size_t i = 0; i < load.size(); ++i) {
    const double share = static_cast<double>(view.members()[i].capacity_bytes) / weight * shards;
    largest = std::max(largest, std::abs(load[i] - share) /
                                    std::max(share, shards / static_cast<double>(load.size())));
  }
  return largest;
}

// Shards of which a copy moved although none was on the lost member, or more than that one.
struct Moves {
  std::size_t lost = 0, moved = 0, wrong = 0;
};
Moves Compare(const ClusterView& before, const ClusterView& after, const std::string& lost,
              std::size_t copies) {
  Moves moves;
  for (std::uint32_t shard = 0; shard < before.table().shard_count(); ++shard) {
    const auto a = before.table().Ranking(shard).first(copies);
    const auto b = after.table().Ranking(shard).first(copies);
    std::size_t gone = 0;
    bool had = false;
    for (const MemberIndex index : a) {
      const std::string& id = before.members()[index].id;
      had |= id == lost;
      gone += std::none_of(b.begin(), b.end(),
                           [&](MemberIndex i) { return after.members()[i].id == id; });
    }
    moves.lost += had;
    moves.moved += gone > 0;
    moves.wrong += gone != (had ? 1 : 0);
  }
  return moves;
}

void TimeLookups(const ClusterView& view) {
  constexpr std::size_t kAnchors = 1 << 20, kHot = 256;
  std::mt19937_64 random(2);
  std::vector<BlockKey> anchors;
  for (std::size_t i = 0; i < kAnchors; ++i) {
    std::string key(32, '\0');
    for (char& c : key) c = static_cast<char>(random());
    anchors.push_back(*BlockKey::FromBytes(key));
  }
  Fingerprint fingerprint{};
  std::size_t sum = 0;
  const auto time = [&](std::size_t distinct) {
    std::vector<double> nanos;
    for (int round = 0; round < 5; ++round) {
      const double start = CpuMillis();
      for (std::size_t i = 0; i < kAnchors; ++i) {
        sum += view.HomesOf(fingerprint, anchors[i % distinct])[0];
      }
      nanos.push_back((CpuMillis() - start) * 1e6 / static_cast<double>(kAnchors));
    }
    return Median(nanos);
  };
  const double cold = time(kAnchors), hot = time(kHot);
  std::printf(
      "lookup of an anchor of 32 bytes: %.0f ns among %zu Mi, %.0f ns among %zu (sum %zu)\n", cold,
      kAnchors >> 20, hot, kHot, sum);
}

int Main(int argc, char** argv) {
  std::size_t count = 1000;
  int rounds = 5;
  CLI::App app("Placement: cost of tables and lookups, balance, and what moves.");
  app.add_option("members", count)->check(CLI::Range(10, 10'000))->capture_default_str();
  app.add_option("--rounds", rounds, "Joins and leaves of each kind; the median is shown")
      ->check(CLI::Range(1, 100))
      ->capture_default_str();
  CLI11_PARSE(app, argc, argv);
  bool good = true;
  std::printf("%zu members, %zu shards of %zu ranks, %.0f MiB; ms of processor time\n", count,
              std::size_t{1} << kShardBits, kRanks,
              static_cast<double>((sizeof(MemberIndex) * kRanks) << kShardBits) / (1 << 20));
  std::printf("%-22s %8s %8s %8s %10s %22s\n", "", "rebuild", "leave", "join", "imbalance",
              "moved/had/wrong (R=1)");
  std::shared_ptr<const ClusterView> last;
  for (const std::size_t zones : {1, 3}) {
    for (const bool weighted : {false, true}) {
      const std::vector<Member> members = Members(count, zones, weighted);
      const Made all = Make(members, nullptr);
      std::vector<double> leave, join;
      Moves moves;
      for (int round = 0; round < rounds; ++round) {
        std::vector<Member> rest = members;
        const std::size_t at = static_cast<std::size_t>(round) * 37 % count;
        rest.erase(rest.begin() + static_cast<std::ptrdiff_t>(at));
        const Made without = Make(rest, all.view);
        const Made again = Make(members, without.view);
        leave.push_back(without.millis);
        join.push_back(again.millis);
        if (round > 0) continue;
        moves = Compare(*all.view, *without.view, members[at].id, 1);
        for (const std::size_t copies : {2, 3}) {
          moves.wrong += Compare(*all.view, *without.view, members[at].id, copies).wrong;
        }
        moves.wrong += Compare(*all.view, *again.view, "", 3).wrong;
      }
      const double imbalance = Imbalance(*all.view);
      const std::string name = std::to_string(zones) + (zones == 1 ? " zone, " : " zones, ") +
                               (weighted ? "weights 1:8" : "equal");
      std::printf("%-22s %8.0f %8.0f %8.0f %9.1f%% %8zu/%zu/%zu\n", name.c_str(), all.millis,
                  Median(leave), Median(join), imbalance * 100, moves.moved, moves.lost,
                  moves.wrong);
      good &= moves.wrong == 0 && moves.moved == moves.lost && imbalance <= 0.10;
      last = all.view;
    }
  }
  TimeLookups(*last);
  return good ? 0 : 1;
}

}  // namespace
}  // namespace kvmill

int main(int argc, char** argv) { return kvmill::Main(argc, argv); }
