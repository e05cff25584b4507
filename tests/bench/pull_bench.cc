// A prompt's blocks copied from another node's daemon into a store of this process (PeerPull),
// against fetching them into plain memory with the client library: one call for all of them, and
// four threads with a block a call, as `kvmill bench fetch` has it.
//
// Prints one line per round: GB/s of pages of the three, which take turns, and the ratio of the
// pull to the better one of the other two; in the end medians. Shape: 4,096 tokens in 32 blocks, 36
// layers, 8 KV heads, head_dim 128, k4v2_g128.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <future>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "CLI/CLI.hpp"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "client/client.h"
#include "kernels/float16.h"
#include "service/peer_pull.h"
#include "service/thread_loop.h"
#include "tests/integration/daemon_process.h"

namespace kvmill {
namespace {

constexpr std::uint32_t kLayers = 36;
constexpr std::uint32_t kHeads = 8;
constexpr std::uint32_t kHeadDim = 128;
constexpr std::uint32_t kTokens = 128;
constexpr std::uint32_t kBlocks = 32;
constexpr std::size_t kThreads = 4;

NamespaceSpec Spec() {
  NamespaceSpec spec;
  spec.tenant = "default";
  spec.model = "bench";
  spec.hash_scheme = "bench";
  spec.block_tokens = kTokens;
  LayerGroup group;
  for (std::uint16_t layer = 0; layer < kLayers; ++layer) group.layers.push_back(layer);
  group.kv_heads = kHeads;
  group.head_dim = kHeadDim;
  spec.groups.push_back(group);
  return spec;
}

std::vector<BlockKey> Keys() {
  std::vector<BlockKey> keys;
  for (std::uint32_t i = 0; i < kBlocks; ++i) {
    keys.push_back(*BlockKey::FromBytes(absl::StrCat("a block of the prompt, number ", 100 + i)));
  }
  return keys;
}

[[noreturn]] void Die(const std::string& what, const absl::Status& status) {
  std::fprintf(stderr, "pull_bench: %s: %s\n", what.c_str(), std::string(status.message()).c_str());
  std::exit(1);
}

// Blocks of Gaussian values; all layers and blocks are the same, which nothing here looks at.
void Store(Client& client, const ClientNamespace& ns) {
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  std::vector<std::uint16_t> values(std::size_t{kTokens} * kHeads * kHeadDim);
  for (std::uint16_t& value : values) value = FromFloat(normal(random), ns.spec.source_dtype);
  LayerInput layer;
  layer.k = layer.v = KvView::Array(values.data(), kHeads, kHeadDim);
  const std::vector<LayerInput> layers(kLayers, layer);
  const std::vector<BlockKey> keys = Keys();
  for (std::uint32_t i = 0; i < kBlocks; ++i) {
    StoreBlock block;
    block.key = keys[i];
    if (i > 0) block.parent = keys[i - 1];
    block.token_count = kTokens;
    block.block_index = i;
    block.layers = layers;
    const auto stored = client.Store(ns, {&block, 1}, {});
    if (!stored.ok()) Die("store", stored.status());
    if (!stored->blocks[0].status.ok()) Die("store", stored->blocks[0].status);
  }
}

// An engine's memory for the whole prompt.
class Memory final : public FetchSink {
 public:
  explicit Memory(std::size_t page_bytes)
      : page_bytes_(page_bytes), bytes_(page_bytes * kLayers * kBlocks) {}
  absl::Span<std::byte> PageMemory(const PageId& id, std::size_t page_bytes) override {
    return absl::MakeSpan(bytes_).subspan((id.block * kLayers + id.layer_index) * page_bytes_,
                                          page_bytes);
  }
  absl::Status OnPage(const PageId&, const PageView&) override { return absl::OkStatus(); }

 private:
  const std::size_t page_bytes_;
  std::vector<std::byte> bytes_;
};

void Fetch(Client& client, const ClientNamespace& ns, absl::Span<const BlockKey> keys,
           Memory* memory) {
  const auto fetched = client.Fetch(ns, keys, *memory);
  if (!fetched.ok()) Die("fetch", fetched.status());
  for (const FetchBlockResult& block : fetched->blocks) {
    if (!block.status.ok()) Die("fetch", block.status);
  }
}

void FetchByThreads(Client& client, const ClientNamespace& ns,
                    std::vector<std::unique_ptr<Memory>>& memories) {
  const std::vector<BlockKey> keys = Keys();
  std::atomic<std::size_t> next{0};
  std::vector<std::thread> threads;
  for (std::size_t t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      for (std::size_t i; (i = next++) < kBlocks;)
        Fetch(client, ns, {&keys[i], 1}, memories[t].get());
    });
  }
  for (std::thread& thread : threads) thread.join();
}

double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

int Main(int argc, char** argv) {
  int rounds = 9;
  bool plaintext = false;
  bool in_line = false;
  int batch_mib = 16;
  int seal_threads = 2;
  CLI::App app("A prompt pulled from another node, against fetching it.");
  app.add_option("--rounds", rounds, "")->check(CLI::Range(1, 100000))->capture_default_str();
  app.add_flag("--plaintext", plaintext, "UCX without encryption");
  app.add_flag("--inline", in_line, "With the gRPC messages");
  app.add_option("--batch-mib", batch_mib, "")->check(CLI::Range(1, 1024))->capture_default_str();
  app.add_option("--seal-threads", seal_threads, "")
      ->check(CLI::Range(1, 64))
      ->capture_default_str();
  CLI11_PARSE(app, argc, argv);

  testing::TemporaryDirectory directory;
  std::vector<std::string> arguments = {"--socket",     directory / "run/kvmill.sock",
                                        "--host-bytes", "512MiB",
                                        "--listen",     "127.0.0.1:0",
                                        "--ucx",        "127.0.0.1",
                                        "--insecure"};
  if (plaintext) arguments.push_back("--data-plane-plaintext");
  testing::DaemonProcess daemon(testing::DaemonBinary(), arguments);
  const nlohmann::json ready = daemon.WaitReady();
  if (ready.is_null())
    Die(daemon.standard_error(), absl::UnknownError("the daemon does not start"));

  Client::Options options;
  options.address = ready["listen"].get<std::string>();
  options.timeout = absl::Seconds(60);
  options.path = in_line ? DataPath::kInline : DataPath::kUcx;
  options.data_plane_plaintext = plaintext;
  const std::unique_ptr<Client> client = *Client::Create(options);
  const auto ns = client->OpenNamespace("bench", Spec());
  if (!ns.ok()) Die("namespace", ns.status());
  Store(*client, *ns);
  const std::vector<BlockKey> keys = Keys();
  const std::size_t page_bytes =
      UniformPageBytes(FormatOf(ns->spec, ns->spec.groups[0]), kTokens, SlotKind::kTile, kHeads);
  const double bytes = static_cast<double>(page_bytes) * kLayers * kBlocks;

  TieredStore::Options store_options;
  store_options.host_bytes = store_options.arena_bytes = std::uint64_t{256} << 20;
  const std::unique_ptr<TieredStore> store =
      *TieredStore::Create(store_options, SystemClock(), nullptr);
  const NamespaceId space = store->OpenNamespace("bench", Spec())->id;
  Member member;
  member.id = "peer";
  member.address = options.address;
  member.incarnation = absl::HexStringToBytes(client->Stat()->boot_id);
  ThreadLoop loop(SystemClock());
  PeerClients clients(loop, {.path = options.path, .data_plane_plaintext = plaintext});
  PeerPull::Options pull_options;
  pull_options.batch_bytes = static_cast<std::uint64_t>(batch_mib) << 20;
  pull_options.seal_threads = static_cast<std::size_t>(seal_threads);
  auto pull = std::make_unique<PeerPull>(loop, *store, clients, pull_options);

  std::vector<std::unique_ptr<Memory>> memories;
  for (std::size_t t = 0; t < kThreads; ++t)
    memories.push_back(std::make_unique<Memory>(page_bytes));
  Peers::CallId call = 0;
  const auto pull_all = [&] {
    std::promise<absl::StatusOr<std::vector<absl::Status>>> pulled;
    loop.Run([&] {
      RunKeys run;
      run.keys = keys;
      pull->Pull(++call, member, ns->fingerprint, run,
                 SystemClock().MonotonicNanos() + 60'000'000'000,
                 [&](absl::StatusOr<std::vector<absl::Status>> statuses) {
                   pulled.set_value(std::move(statuses));
                 });
    });
    const auto statuses = pulled.get_future().get();
    if (!statuses.ok()) Die("pull", statuses.status());
    for (const absl::Status& status : *statuses) {
      if (!status.ok()) Die("pull", status);
    }
  };
  const auto rate = [&](const std::function<void()>& work) {
    const auto begin = std::chrono::steady_clock::now();
    work();
    return bytes * 1e-9 /
           std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  };
  std::vector<double> all_at_once, by_threads, pulls, ratios;
  for (int round = -1; round < rounds; ++round) {
    const double fetched = rate([&] { Fetch(*client, *ns, keys, memories[0].get()); });
    const double threads = rate([&] { FetchByThreads(*client, *ns, memories); });
    const double pulled = rate(pull_all);
    if (const auto cleared = store->Clear(space); !cleared.ok()) Die("clear", cleared.status());
    if (round < 0) continue;  // To warm up: connections, memory.
    all_at_once.push_back(fetched);
    by_threads.push_back(threads);
    pulls.push_back(pulled);
    ratios.push_back(pulled / std::max(fetched, threads));
    std::printf("one fetch %.2f GB/s, four threads %.2f, pull %.2f: %.2f\n", fetched, threads,
                pulled, ratios.back());
  }
  std::printf(
      "median: one fetch %.2f GB/s, four threads %.2f, pull %.2f: ratio %.2f (%.0f MiB, %s)\n",
      Median(all_at_once), Median(by_threads), Median(pulls), Median(ratios), bytes / (1 << 20),
      client->ucx_transport().c_str());
  loop.Stop();
  pull.reset();
  return 0;
}

}  // namespace
}  // namespace kvmill

int main(int argc, char** argv) { return kvmill::Main(argc, argv); }
