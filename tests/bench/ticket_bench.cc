// How soon a prompt is on the decode node when the prefill node has stored it: two daemons with UCX
// over the loopback, and an etcd. A prefill "computes" a layer every so many milliseconds and
// stores it from shared memory; a ticket brings layers to the other node meanwhile.
//
//   ticket_bench --help
//
// Prints, as median and range over the rounds, milliseconds from the moment when the producer has
// stored the last layer of every block (its store is done) until the consumer has every layer, and
// until the consumer has sealed every block; and from the moment when the last layer was computed
// until the store was done. Negative: the consumer was told before the engine that stores.
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <future>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/client.h"
#include "client/shared_memory.h"
#include "kernels/float16.h"
#include "tests/cluster/etcd_process.h"
#include "tests/integration/daemon_process.h"

namespace kvmill::testing {
namespace {

using std::chrono::steady_clock;
constexpr std::uint32_t kHeads = 8, kDim = 128, kBlockTokens = 128;

struct Options {
  std::uint32_t layer_ms = 20, rounds = 5, tokens = 4096, layers = 36;
};

[[noreturn]] void Fail(const std::string& what) {
  std::fprintf(stderr, "ticket_bench: %s\n", what.c_str());
  std::exit(1);
}

template <typename T>
T Need(absl::StatusOr<T> result) {
  if (!result.ok()) Fail(result.status().ToString());
  return *std::move(result);
}

NamespaceSpec Spec(std::uint32_t layers) {
  NamespaceSpec spec;
  spec.model = "bench";
  spec.hash_scheme = "bench-1";
  spec.block_tokens = kBlockTokens;
  LayerGroup group;
  for (std::uint32_t layer = 0; layer < layers; ++layer) {
    group.layers.push_back(static_cast<std::uint16_t>(layer));
  }
  group.kv_heads = kHeads;
  group.head_dim = kDim;
  spec.groups = {group};
  return spec;
}

struct Node {
  std::unique_ptr<DaemonProcess> process;
  std::unique_ptr<Client> client;
  ClientNamespace ns;
};

Node StartNode(const EtcdProcess& etcd, const std::string& id, const std::string& socket,
               const NamespaceSpec& spec) {
  Node node;
  node.process = std::make_unique<DaemonProcess>(
      DaemonBinary(),
      std::vector<std::string>{"--socket", socket, "--cluster",
                               absl::StrCat("etcd://", etcd.address().ToString()), "--listen",
                               "127.0.0.1:0", "--insecure", "--node-id", id, "--ucx", "127.0.0.1",
                               "--host-bytes", "1GiB", "--device", "host"});
  if (node.process->WaitReady().is_null()) Fail(node.process->standard_error());
  Client::Options options;
  options.address = "unix:" + socket;
  node.client = Need(Client::Create(options));
  node.ns = Need(node.client->OpenNamespace("bench", spec));
  return node;
}

// K and V of a prompt in shared memory, one engine page a block. All layers lie in the same place:
// they are stored one after the other, and what is in them does not matter.
struct EngineMemory {
  EngineMemory(std::uint32_t blocks, std::uint32_t layers) {
    const std::uint64_t page_bytes = std::uint64_t{2} * kBlockTokens * kHeads * kDim;
    const std::uint64_t half = page_bytes * blocks;
    memory = Need(SharedMemory::Create(2 * half));
    std::mt19937 random(1);
    std::normal_distribution<float> normal;
    std::vector<std::uint16_t> values(1 << 16);
    for (std::uint16_t& value : values) value = FloatToFloat16(normal(random));
    for (std::size_t at = 0; at < memory.bytes(); at += 2 * values.size()) {
      std::memcpy(memory.data() + at, values.data(),
                  std::min(2 * values.size(), memory.bytes() - at));
    }
    EngineRegion region;
    region.base = reinterpret_cast<std::uintptr_t>(memory.data());
    region.bytes = memory.bytes();
    region.fd = memory.fd();
    geometry.regions = {region};
    EngineLayers l;
    l.element = EngineElement::kFloat16;
    l.block_tokens = kBlockTokens;
    l.head_dim = kDim;
    l.head_count = kHeads;
    l.page_tokens = kBlockTokens;
    l.page_count = blocks;
    l.page_bytes = l.page_stride_bytes = page_bytes;
    l.head_stride_bytes = std::uint64_t{2} * kDim;
    l.token_stride_bytes = l.head_stride_bytes * kHeads;
    l.keys.assign(layers, {0, 0});
    l.values.assign(layers, {0, half});
    geometry.layers = {l};
  }
  SharedMemory memory;
  EngineGeometry geometry;
};

BlockKey KeyOf(std::uint32_t round, std::uint32_t block) {
  std::string bytes = absl::StrCat("round ", round, " block ", block);
  bytes.resize(32, '.');
  return *BlockKey::FromBytes(bytes);
}

double Millis(steady_clock::duration time) {
  return std::chrono::duration<double, std::milli>(time).count();
}

struct Times {
  double stored = 0, whole = 0, sealed = 0;  // Stored after computed; the others after stored.
};

Times Round(const Options& options, std::uint32_t round, Node& producer, Node& consumer,
            std::uint64_t registration) {
  const std::uint32_t count = options.tokens / kBlockTokens;
  std::vector<PromisedBlock> promised(count);
  std::vector<std::uint64_t> pages(count);
  std::vector<PageNumbers> lists(count);
  std::vector<PageBlock> blocks(count);
  for (std::uint32_t b = 0; b < count; ++b) {
    pages[b] = b;
    lists[b] = absl::MakeConstSpan(&pages[b], 1);
    PageBlock& block = blocks[b];
    block.key = KeyOf(round, b);
    if (b > 0) block.parent = KeyOf(round, b - 1);
    block.token_count = kBlockTokens;
    block.block_index = b;
    block.pages = absl::MakeConstSpan(&lists[b], 1);
    promised[b] = {block.key, block.parent, block.token_count, block.block_index};
  }
  CallOptions call;
  call.timeout = absl::Minutes(5);
  const std::string ticket = Need(producer.client->CreateTicket(producer.ns, promised));
  steady_clock::time_point whole, sealed;
  std::promise<RedeemResult> redeemed;
  std::size_t complete = 0;
  consumer.client->RedeemTicketAsync(
      consumer.ns, ticket,
      [&](absl::Span<const RedeemedBlock> all, absl::Span<const std::uint32_t>) {
        if (complete == all.size()) return;
        complete = static_cast<std::size_t>(std::count_if(
            all.begin(), all.end(),
            [](const RedeemedBlock& block) { return block.layers_here == block.layer_count; }));
        if (complete == all.size()) whole = steady_clock::now();
      },
      call,
      [&](RedeemResult result) {
        sealed = steady_clock::now();
        redeemed.set_value(std::move(result));
      });
  std::promise<steady_clock::time_point> done;
  producer.client->StorePagesAsync(producer.ns, registration, blocks,
                                   {.request = round + 1, .ready_layers = 0}, call,
                                   [&](const absl::StatusOr<StoreResult>& result) {
                                     const auto now = steady_clock::now();
                                     if (!result.ok() || result->blocks_stored != blocks.size()) {
                                       Fail("the store failed");
                                     }
                                     done.set_value(now);
                                   });
  auto next = steady_clock::now();
  for (std::uint32_t layer = 0; layer < options.layers; ++layer) {
    next += std::chrono::milliseconds(options.layer_ms);
    std::this_thread::sleep_until(next);
    producer.client->ReadyPages(round + 1, layer + 1);
  }
  const auto computed = steady_clock::now();
  const auto stored = done.get_future().get();
  const RedeemResult result = redeemed.get_future().get();
  if (!result.status.ok()) Fail(result.status.ToString());
  for (const RedeemedBlock& block : result.blocks) {
    if (block.fate == TicketFate::kMissed) {
      Fail(absl::StrCat(result.missed, " blocks were missed, block ", block.block_index, ": ",
                        NameOf(block.miss)));
    }
  }
  return {Millis(stored - computed), Millis(whole - stored), Millis(sealed - stored)};
}

void Print(const char* what, std::vector<double> values) {
  std::sort(values.begin(), values.end());
  std::printf("%-44s median %7.1f ms  (%.1f to %.1f)\n", what, values[values.size() / 2],
              values.front(), values.back());
}

void Run(const Options& options) {
  EtcdProcess etcd;
  if (!etcd.Start()) Fail("etcd does not start");
  TemporaryDirectory directory;
  const NamespaceSpec spec = Spec(options.layers);
  Node producer = StartNode(etcd, "prefill", directory / "prefill/kvmill.sock", spec);
  Node consumer = StartNode(etcd, "decode", directory / "decode/kvmill.sock", spec);
  for (int i = 0; Need(consumer.client->Cluster()).members.size() < 2; ++i) {
    if (i == 3000) Fail("the nodes do not find each other");
    usleep(10'000);
  }
  EngineMemory memory(options.tokens / kBlockTokens, options.layers);
  const std::uint64_t registration =
      Need(producer.client->RegisterMemory(producer.ns, memory.geometry));
  std::vector<double> stored, whole, sealed;
  for (std::uint32_t round = 0; round <= options.rounds; ++round) {
    const Times times = Round(options, round, producer, consumer, registration);
    for (Node* node : {&producer, &consumer}) Need(node->client->Clear(node->ns));
    if (round == 0) continue;  // Connections are made, memory is touched.
    stored.push_back(times.stored);
    whole.push_back(times.whole);
    sealed.push_back(times.sealed);
  }
  std::printf("%u tokens, %u layers, %u heads, D %u, k4v2; a layer every %u ms; %u rounds\n",
              options.tokens, options.layers, kHeads, kDim, options.layer_ms, options.rounds);
  Print("stored at the producer, after computed:", stored);
  Print("every layer at the consumer, after stored:", whole);
  Print("sealed at the consumer, after stored:", sealed);
}

int Main(int argc, char** argv) {
  Options options;
  CLI::App app(
      "How soon a prompt is on the decode node when the prefill node has stored it.\n\n"
      "Starts an etcd and two daemons with UCX over the loopback. A prefill \"computes\" a layer "
      "of\n"
      "all blocks every --layer-ms and stores it from shared memory; a ticket brings layers to "
      "the\n"
      "other daemon meanwhile. Each round is another prompt; a first one is not counted.\n\n"
      "Prints, as median and range over the rounds:\n"
      "  stored   when the producer had stored the last layer, after it was computed\n"
      "  layers   when the consumer had every layer, after that (negative: it was told before the\n"
      "           engine that stores)\n"
      "  sealed   when the consumer had sealed every block, after that\n\n"
      "Without tickets the consumer could begin to copy when the prompt is stored. A prompt of\n"
      "--tokens has (tokens / 128) blocks and (tokens / 128 * layers) pages of 105 KB.",
      "ticket_bench");
  app.add_option("--layer-ms", options.layer_ms, "Milliseconds that a layer takes to compute")
      ->capture_default_str()
      ->check(CLI::Range(1, 60'000));
  app.add_option("--rounds", options.rounds, "Prompts that are measured")
      ->capture_default_str()
      ->check(CLI::Range(1, 10'000));
  app.add_option("--tokens", options.tokens, "Tokens of a prompt, a multiple of 128")
      ->capture_default_str()
      ->check(CLI::Range(128, 1 << 17))
      ->check([](const std::string& text) {
        return std::atol(text.c_str()) % kBlockTokens == 0 ? "" : text + " is no multiple of 128";
      });
  app.add_option("--layers", options.layers, "Layers of the model")
      ->capture_default_str()
      ->check(CLI::Range(1, 512));
  CLI11_PARSE(app, argc, argv);
  Run(options);
  return 0;
}

}  // namespace
}  // namespace kvmill::testing

int main(int argc, char** argv) { return kvmill::testing::Main(argc, argv); }
