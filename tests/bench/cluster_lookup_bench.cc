// What a lookup in a cluster takes: a prompt of 256 blocks that another node has, beside a call
// that does nothing, in turns. Starts an etcd and daemons of its own.
//
//   cluster_lookup_bench [--nodes N] [--rounds N] [--daemon BINARY]
//
// Prints microseconds (p50, p90) of: a bare call; the lookup on the node that has the blocks; the
// lookup on one that has none and asks; gRPC alone with the same messages, one call and a call that
// makes calls (grpc_chain.h); and how many calls to other nodes one lookup took. Then, each kind
// for itself, what all processes together take for one: CPU time, and how often a thread went to
// sleep.
#include <dirent.h>
#include <httplib.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <fstream>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/synchronization/mutex.h"
#include "client/client.h"
#include "client/server_address.h"
#include "tests/bench/grpc_chain.h"
#include "tests/cluster/etcd_process.h"
#include "tests/integration/daemon_process.h"

namespace kvmill::testing {
namespace {

using std::chrono::steady_clock;
constexpr std::uint32_t kBlocks = 256;

NamespaceSpec Spec() {
  NamespaceSpec spec;
  spec.model = "bench";
  spec.hash_scheme = "bench-1";
  spec.block_tokens = 64;
  LayerGroup group;
  group.layers = {0};
  group.kv_heads = 1;
  group.head_dim = 64;
  spec.groups = {group};
  return spec;
}

struct Node {
  std::unique_ptr<DaemonProcess> process;
  std::unique_ptr<Client> client;
  std::string metrics;
  ClientNamespace ns;
};

[[noreturn]] void Fail(const std::string& what) {
  std::fprintf(stderr, "cluster_lookup_bench: %s\n", what.c_str());
  std::exit(1);
}

template <typename T>
T Need(absl::StatusOr<T> result) {
  if (!result.ok()) Fail(std::string(result.status().message()));
  return *std::move(result);
}

std::vector<BlockKey> Keys() {
  std::vector<BlockKey> keys;
  for (std::uint32_t i = 0; i < kBlocks; ++i) {
    // As long as a SHA-256.
    std::string bytes = absl::StrCat("block ", i);
    bytes.resize(32, '.');
    keys.push_back(*BlockKey::FromBytes(bytes));
  }
  return keys;
}

// Of all requests to all peers.
std::uint64_t PeerRequests(const Node& node) {
  const HostPort address = *ParseHostPort(node.metrics);
  httplib::Client http(address.host, address.port);
  const auto answer = http.Get("/metrics");
  if (!answer) Fail("no metrics");
  std::uint64_t sum = 0;
  for (const absl::string_view line : absl::StrSplit(answer->body, '\n')) {
    if (line.substr(0, 28) != "kvmill_peer_requests_total{p") continue;
    double value = 0;
    if (absl::SimpleAtod(line.substr(line.rfind(' ') + 1), &value)) {
      sum += static_cast<std::uint64_t>(value);
    }
  }
  return sum;
}

double Micros(const std::function<void()>& call) {
  const auto begin = steady_clock::now();
  call();
  return std::chrono::duration<double, std::micro>(steady_clock::now() - begin).count();
}

std::string Quantiles(std::vector<double> micros) {
  std::sort(micros.begin(), micros.end());
  char text[64];
  std::snprintf(text, sizeof(text), "p50 %.0f p90 %.0f", micros[micros.size() / 2],
                micros[micros.size() * 9 / 10]);
  return text;
}

double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

// Of processes, all threads.
struct Work {
  double cpu_micros = 0;
  double sleeps = 0;  // Voluntary context switches.
};

double Sleeps(pid_t process) {
  const std::string tasks = absl::StrCat("/proc/", process, "/task");
  DIR* const directory = opendir(tasks.c_str());
  if (directory == nullptr) Fail("no " + tasks);
  constexpr absl::string_view kName = "voluntary_ctxt_switches:";
  double sum = 0;
  while (const dirent* entry = readdir(directory)) {
    std::ifstream status(absl::StrCat(tasks, "/", entry->d_name, "/status"));
    for (std::string line; std::getline(status, line);) {
      double value = 0;
      const absl::string_view text = line;
      if (text.substr(0, kName.size()) != kName) continue;
      if (absl::SimpleAtod(text.substr(kName.size()), &value)) sum += value;
    }
  }
  closedir(directory);
  return sum;
}

Work WorkOf(const std::vector<pid_t>& processes) {
  Work work;
  for (const pid_t process : processes) {
    clockid_t clock;
    timespec time{};
    if (clock_getcpuclockid(process, &clock) != 0 || clock_gettime(clock, &time) != 0) {
      Fail("no CPU time of a process");
    }
    work.cpu_micros +=
        static_cast<double>(time.tv_sec) * 1e6 + static_cast<double>(time.tv_nsec) * 1e-3;
    work.sleeps += Sleeps(process);
  }
  return work;
}

void PrintWork(const char* name, const std::vector<pid_t>& processes, int rounds,
               const std::function<void()>& call) {
  const Work before = WorkOf(processes);
  for (int round = 0; round < rounds; ++round) call();
  const Work after = WorkOf(processes);
  std::printf("%-16s CPU %.0f, threads slept %.1f times\n", name,
              (after.cpu_micros - before.cpu_micros) / rounds,
              (after.sleeps - before.sleeps) / rounds);
}

void Run(const std::string& daemon, std::size_t node_count, int rounds) {
  EtcdProcess etcd;
  if (!etcd.Start()) Fail("etcd does not start");
  TemporaryDirectory directory;
  std::vector<Node> nodes(node_count);
  // A machine that stands still for a moment is no node that does not answer: --peer-timeout.
  for (std::size_t i = 0; i < node_count; ++i) {
    const std::string socket = directory / absl::StrCat("n", i, "/kvmill.sock");
    nodes[i].process = std::make_unique<DaemonProcess>(
        daemon,
        std::vector<std::string>{
            "--socket", socket, "--cluster", absl::StrCat("etcd://", etcd.address().ToString()),
            "--listen", "127.0.0.1:0", "--insecure", "--node-id", absl::StrCat("n", i), "--metrics",
            "127.0.0.1:0", "--host-bytes", "64MiB", "--device", "host", "--peer-timeout", "2s"});
    const nlohmann::json ready = nodes[i].process->WaitReady();
    if (ready.is_null()) Fail(nodes[i].process->standard_error());
    nodes[i].metrics = ready["metrics"].get<std::string>();
    Client::Options options;
    options.address = "unix:" + socket;
    nodes[i].client = Need(Client::Create(options));
    nodes[i].ns = Need(nodes[i].client->OpenNamespace("bench", Spec()));
  }
  const std::vector<BlockKey> keys = Keys();
  const std::vector<std::uint16_t> values(64 * 64, 0x3c00);
  const LayerInput layer{KvView::Array(values.data(), 1, 64), KvView::Array(values.data(), 1, 64)};
  std::vector<StoreBlock> blocks(kBlocks);
  for (std::uint32_t i = 0; i < kBlocks; ++i) {
    blocks[i].key = keys[i];
    if (i > 0) blocks[i].parent = keys[i - 1];
    blocks[i].token_count = 64;
    blocks[i].block_index = i;
    blocks[i].layers = absl::MakeConstSpan(&layer, 1);
  }
  Need(nodes[0].client->Store(nodes[0].ns, blocks, {}));
  const auto look = [&](std::size_t node) {
    return Need(nodes[node].client->Lookup(nodes[node].ns, keys)).hit_blocks;
  };
  for (int i = 0; look(1) < kBlocks; ++i) {
    if (i == 500) Fail("the other node does not find the blocks");
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  std::vector<pid_t> all = {getpid()};
  for (const Node& node : nodes) all.push_back(node.process->pid());
  const auto bare_call = [&] { Need(nodes[1].client->FindNamespace("bench")); };
  const auto look_there = [&] {
    if (look(1) != kBlocks) Fail("a lookup found less");
  };
  // As many homes as this prompt's lookup asks, once no node is paused any more that was asked
  // before it served.
  std::this_thread::sleep_for(std::chrono::seconds(4));
  std::vector<double> asked;
  for (int i = 0; i < 25; ++i) {
    const std::uint64_t before = PeerRequests(nodes[1]);
    look_there();
    asked.push_back(static_cast<double>(PeerRequests(nodes[1]) - before));
  }
  const double homes = Median(asked);
  if (homes < 1) Fail("a lookup asked nobody");
  GrpcChain grpc(static_cast<std::size_t>(homes));
  std::vector<pid_t> grpc_all = grpc.processes();
  grpc_all.push_back(getpid());
  for (int i = 0; i < 20; ++i) grpc.CallAndAskHomes();
  std::vector<double> bare, here, there, one, chain;
  const std::uint64_t before = PeerRequests(nodes[1]);
  for (int round = 0; round < rounds; ++round) {
    bare.push_back(Micros(bare_call));
    here.push_back(Micros([&] { look(0); }));
    there.push_back(Micros(look_there));
    one.push_back(Micros([&] { grpc.Call(); }));
    chain.push_back(Micros([&] { grpc.CallAndAskHomes(); }));
  }
  const double calls = static_cast<double>(PeerRequests(nodes[1]) - before) / rounds;
  std::printf("nodes %zu, %u keys, %d rounds, microseconds\n", node_count, kBlocks, rounds);
  std::printf("bare call        %s\n", Quantiles(bare).c_str());
  std::printf("lookup, here     %s\n", Quantiles(here).c_str());
  std::printf("lookup, there    %s\n", Quantiles(there).c_str());
  std::printf("gRPC, a call     %s\n", Quantiles(one).c_str());
  std::printf("gRPC, a chain    %s\n", Quantiles(chain).c_str());
  std::printf("there / bare     p50 %.2f\n", Median(there) / Median(bare));
  std::printf("chain / a call   p50 %.2f\n", Median(chain) / Median(one));
  std::printf("there / chain    p50 %.2f\n", Median(there) / Median(chain));
  std::printf("calls to others  %.2f a lookup, %.0f in the chain\n", calls, homes);
  PrintWork("bare call", all, rounds, bare_call);
  PrintWork("lookup, here", all, rounds, [&] { look(0); });
  PrintWork("lookup, there", all, rounds, look_there);
  PrintWork("gRPC, a call", grpc_all, rounds, [&] { grpc.Call(); });
  PrintWork("gRPC, a chain", grpc_all, rounds, [&] { grpc.CallAndAskHomes(); });
}

}  // namespace
}  // namespace kvmill::testing

int main(int argc, char** argv) {
#ifdef NDEBUG
  // As in the daemon (service/main.cc): for its opponents, and for the clients of both.
  absl::SetMutexDeadlockDetectionMode(absl::OnDeadlockCycle::kIgnore);
#endif
  kvmill::testing::GrpcChain::ServeIfAsked(argc, argv);
  std::string daemon = kvmill::testing::DaemonBinary();
  std::size_t nodes = 3;
  int rounds = 1000;
  CLI::App app(
      "What a lookup in a cluster takes: a prompt of 256 blocks that another node has, beside a\n"
      "call that does nothing and gRPC alone with the same messages, in turns. Starts an etcd and\n"
      "daemons of its own. Prints microseconds, then CPU time and sleeps of all processes a call.");
  app.add_option("--nodes", nodes, "Daemons")->check(CLI::Range(2, 16))->capture_default_str();
  app.add_option("--rounds", rounds, "Of each kind of call")
      ->check(CLI::Range(1, 1000000))
      ->capture_default_str();
  app.add_option("--daemon", daemon, "Another kvmilld")->check(CLI::ExistingFile);
  CLI11_PARSE(app, argc, argv);
  kvmill::testing::Run(daemon, nodes, rounds);
  return 0;
}
