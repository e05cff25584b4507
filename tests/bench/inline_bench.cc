// Put and get through a real kvmilld over its unix socket, bytes inline, against encoding in
// process with the same number of threads.
//
// Prints one line per round: put and encode in GB/s of 16-bit bytes and their ratio, the same for a
// put that the daemon reads from shared memory, get in GB/s of records. Shape: 36 layers, 8 KV
// heads, head_dim 128, k4v2_g128, 32-byte keys.
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "CLI/CLI.hpp"
#include "client/client.h"
#include "client/shared_memory.h"
#include "kernels/encode.h"
#include "kernels/float16.h"
#include "tests/integration/daemon_process.h"

namespace kvmill {
namespace {

constexpr std::uint32_t kLayers = 36;
constexpr std::uint32_t kHeads = 8;
constexpr std::uint32_t kHeadDim = 128;
constexpr std::uint32_t kTokens = 128;
constexpr std::uint32_t kPageRounds = 1 << 20;  // Added to a round's number: keys of its own.

double Seconds(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

// Processor time of this process and of the daemon so far: what a loaded machine distorts least.
double CpuSeconds(pid_t daemon) {
  rusage self{};
  getrusage(RUSAGE_SELF, &self);
  const auto seconds = [](const timeval& t) {
    return static_cast<double>(t.tv_sec) + 1e-6 * static_cast<double>(t.tv_usec);
  };
  double total = seconds(self.ru_utime) + seconds(self.ru_stime);
  std::ifstream file("/proc/" + std::to_string(daemon) + "/stat");
  std::string field;
  for (int i = 1; i <= 15 && file >> field; ++i) {  // 14 and 15: user and system time in ticks.
    if (i >= 14) total += std::stod(field) / static_cast<double>(sysconf(_SC_CLK_TCK));
  }
  return total;
}

NamespaceSpec Spec() {
  NamespaceSpec spec;
  spec.model = "bench";
  spec.hash_scheme = "bench";
  LayerGroup group;
  for (std::uint16_t layer = 0; layer < kLayers; ++layer) group.layers.push_back(layer);
  group.kv_heads = kHeads;
  group.head_dim = kHeadDim;
  spec.groups.push_back(group);
  return spec;
}

BlockKey KeyOf(std::uint32_t round, std::uint32_t block) {
  std::string bytes(32, '\0');
  std::memcpy(bytes.data(), &round, sizeof(round));
  std::memcpy(bytes.data() + 4, &block, sizeof(block));
  return *BlockKey::FromBytes(bytes);
}

// The store's inner loop without a store: tiles of one layer, [tokens, heads, dim] in place.
double EncodeSeconds(absl::Span<const std::uint16_t> values, std::size_t layer_values,
                     std::size_t layer_count, int threads) {
  TileFormat format;
  const std::size_t pages_in_memory = values.size() / (2 * layer_values);
  const auto begin = std::chrono::steady_clock::now();
  std::vector<std::thread> workers;
  for (int t = 0; t < threads; ++t) {
    workers.emplace_back([&, t] {
      std::vector<std::byte> scratch(EncodeScratchBytes(format) + 64);
      const auto misaligned = reinterpret_cast<std::uintptr_t>(scratch.data()) % 64;
      const auto aligned = absl::MakeSpan(scratch).subspan((64 - misaligned) % 64);
      std::vector<std::byte> record(RecordBytes(format));
      for (std::size_t l = static_cast<std::size_t>(t); l < layer_count;
           l += static_cast<std::size_t>(threads)) {
        const std::uint16_t* k = values.data() + (l % pages_in_memory) * 2 * layer_values;
        for (std::uint32_t head = 0; head < kHeads; ++head) {
          const std::byte* const base[2] = {reinterpret_cast<const std::byte*>(k),
                                            reinterpret_cast<const std::byte*>(k + layer_values)};
          EncodeArgs args;
          args.k.pages = &base[0];
          args.v.pages = &base[1];
          for (HeadPages* pages : {&args.k, &args.v}) {
            pages->offset_bytes = std::size_t{head} * kHeadDim * 2;
            pages->page_tokens = kTokens;
            pages->token_stride_bytes = kHeads * kHeadDim * 2;
          }
          args.record = record.data();
          EncodeResult result;
          EncodeTilesCpu(format, Frame::kModel, absl::MakeConstSpan(&args, 1),
                         absl::MakeSpan(&result, 1), aligned);
        }
      }
    });
  }
  for (std::thread& worker : workers) worker.join();
  return Seconds(begin);
}

// Puts records into memory of its own, as an engine would.
class RecordSink : public FetchSink {
 public:
  explicit RecordSink(std::size_t page_bytes) : memory_(page_bytes * kLayers) {}
  absl::Span<std::byte> PageMemory(const PageId& id, std::size_t page_bytes) override {
    return absl::MakeSpan(memory_).subspan(id.layer_index * page_bytes, page_bytes);
  }
  absl::Status OnPage(const PageId&, const PageView&) override { return absl::OkStatus(); }

 private:
  std::vector<std::byte> memory_;
};

int Main(int argc, char** argv) {
  int threads = 1;
  std::uint32_t blocks = 32;
  std::uint32_t rounds = 5;
  std::uint32_t gets = 1;
  int callers = 1;
  CLI::App app("Put and get through a kvmilld of its own, inline, against encoding alone.");
  const auto add = [&app](const char* name, auto& value, int max, const char* help) {
    app.add_option(name, value, help)->check(CLI::Range(1, max))->capture_default_str();
  };
  add("--threads", threads, 256, "Encode threads, of the daemon and alone");
  add("--blocks", blocks, 4096, "Of a put");
  add("--gets", gets, 1000000, "Of the blocks, in every round");
  add("--callers", callers, 64, "Of gets: clients with a connection each, which share the blocks");
  add("--rounds", rounds, 1000000, "");
  CLI11_PARSE(app, argc, argv);
  // Eight blocks of distinct values, larger than the caches together, used in turn.
  const std::size_t layer_values = std::size_t{kTokens} * kHeads * kHeadDim;
  const std::uint32_t distinct = std::min(blocks, 8u);
  const std::size_t block_values = layer_values * 2 * kLayers;
  absl::StatusOr<SharedMemory> memory = SharedMemory::Create(2 * block_values * distinct);
  if (!memory.ok()) return 1;
  const absl::Span<std::uint16_t> values(reinterpret_cast<std::uint16_t*>(memory->data()),
                                         block_values * distinct);
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  std::vector<std::uint16_t> pattern(1 << 20);
  for (std::uint16_t& v : pattern) v = FloatToFloat16(normal(random));
  for (std::size_t i = 0; i < values.size(); ++i)
    values[i] = pattern[(i * 7 + i / 4099) % pattern.size()];

  testing::TemporaryDirectory directory;
  testing::DaemonProcess daemon(testing::DaemonBinary(),
                                {"--socket", directory / "run/kvmill.sock", "--host-bytes", "2GiB",
                                 "--encode-threads", std::to_string(threads)});
  const nlohmann::json ready = daemon.WaitReady();
  if (ready.is_null()) {
    std::fprintf(stderr, "kvmilld did not start: %s\n", daemon.standard_error().c_str());
    return 1;
  }
  Client::Options options;
  options.address = "unix:" + ready["socket"].get<std::string>();
  options.timeout = absl::Seconds(120);
  const auto client = Client::Create(options);
  if (!client.ok()) return 1;
  const auto ns = (*client)->OpenNamespace("bench", Spec());
  if (!ns.ok()) {
    std::fprintf(stderr, "%s\n", ns.status().ToString().c_str());
    return 1;
  }
  std::vector<std::unique_ptr<Client>> others;
  for (int c = 1; c < callers; ++c) {
    auto other = Client::Create(options);
    if (!other.ok() || !(*other)->OpenNamespace("bench", Spec()).ok()) return 1;
    others.push_back(*std::move(other));
  }
  // To the daemon a block is a page: K and V of all layers.
  EngineGeometry geometry;
  EngineRegion& region = geometry.regions.emplace_back();
  region.base = reinterpret_cast<std::uintptr_t>(memory->data());
  region.bytes = 2 * block_values * distinct;
  region.fd = memory->fd();
  EngineLayers& entry = geometry.layers.emplace_back();
  entry.block_tokens = entry.page_tokens = kTokens;
  entry.head_dim = kHeadDim;
  entry.head_count = kHeads;
  entry.page_count = distinct;
  entry.page_bytes = 2 * layer_values;
  entry.page_stride_bytes = 2 * block_values;
  entry.head_stride_bytes = 2 * kHeadDim;
  entry.token_stride_bytes = 2 * kHeadDim * kHeads;
  for (std::uint64_t l = 0; l < kLayers; ++l) {
    entry.keys.push_back({0, 4 * l * layer_values});
    entry.values.push_back({0, (4 * l + 2) * layer_values});
  }
  const auto registration = (*client)->RegisterMemory(*ns, geometry);
  if (!registration.ok()) {
    std::fprintf(stderr, "register: %s\n", registration.status().ToString().c_str());
    return 1;
  }
  const std::size_t record_bytes = RecordBytes(TileFormat{});
  const std::size_t page_bytes = UniformPageBytes(TileFormat{}, kTokens, SlotKind::kTile, kHeads);
  for (std::uint32_t round = 0; round < rounds; ++round) {
    std::vector<LayerInput> layers(std::size_t{blocks} * kLayers);
    std::vector<StoreBlock> store(blocks);
    std::vector<BlockKey> keys;
    for (std::uint32_t b = 0; b < blocks; ++b) {
      for (std::uint32_t l = 0; l < kLayers; ++l) {
        const std::uint16_t* k =
            values.data() + ((std::size_t{b} % distinct) * kLayers + l) * 2 * layer_values;
        layers[b * kLayers + l].k = KvView::Array(k, kHeads, kHeadDim);
        layers[b * kLayers + l].v = KvView::Array(k + layer_values, kHeads, kHeadDim);
      }
      keys.push_back(KeyOf(round, b));
      store[b].key = keys[b];
      if (b > 0) store[b].parent = keys[b - 1];
      store[b].token_count = kTokens;
      store[b].block_index = b;
      store[b].layers = absl::MakeConstSpan(&layers[b * kLayers], kLayers);
    }
    const double raw_gb = 1e-9 * static_cast<double>(blocks) * kLayers * 2 * layer_values * 2;
    const double record_gb = 1e-9 * static_cast<double>(blocks) * kLayers * kHeads * record_bytes;

    const double encode_s =
        EncodeSeconds(values, layer_values, std::size_t{blocks} * kLayers, threads);
    const double cpu_0 = CpuSeconds(daemon.pid());
    auto begin = std::chrono::steady_clock::now();
    const auto stored = (*client)->Store(*ns, store, StoreOptions());
    const double put_s = Seconds(begin);
    const double put_cpu_s = CpuSeconds(daemon.pid()) - cpu_0;
    if (!stored.ok() || stored->blocks_stored != blocks) {
      std::fprintf(stderr, "put: %s\n",
                   stored.ok() ? stored->blocks[0].status.ToString().c_str()
                               : stored.status().ToString().c_str());
      return 1;
    }
    std::vector<std::uint64_t> numbers(blocks);
    std::vector<PageNumbers> lists(blocks);
    std::vector<PageBlock> page_blocks(blocks);
    for (std::uint32_t b = 0; b < blocks; ++b) {
      numbers[b] = b % distinct;
      lists[b] = absl::MakeConstSpan(&numbers[b], 1);
      page_blocks[b].key = KeyOf(round + kPageRounds, b);
      page_blocks[b].token_count = kTokens;
      page_blocks[b].block_index = b;
      page_blocks[b].pages = absl::MakeConstSpan(&lists[b], 1);
    }
    const double cpu_pages = CpuSeconds(daemon.pid());
    begin = std::chrono::steady_clock::now();
    const auto by_pages = (*client)->StorePages(*ns, *registration, page_blocks);
    const double pages_s = Seconds(begin);
    const double pages_cpu_s = CpuSeconds(daemon.pid()) - cpu_pages;
    if (!by_pages.ok() || by_pages->blocks_stored != blocks) {
      std::fprintf(stderr, "put from pages: %s\n",
                   by_pages.ok() ? by_pages->blocks[0].status.ToString().c_str()
                                 : by_pages.status().ToString().c_str());
      return 1;
    }
    std::vector<std::thread> getters;
    std::atomic<int> failures{0};
    const double cpu_1 = CpuSeconds(daemon.pid());
    begin = std::chrono::steady_clock::now();
    for (int c = 0; c < callers; ++c) {
      getters.emplace_back([&, c] {
        Client& caller = *(c == 0 ? *client : others[static_cast<std::size_t>(c) - 1]);
        const std::size_t first =
            keys.size() * static_cast<std::size_t>(c) / static_cast<std::size_t>(callers);
        const std::size_t end =
            keys.size() * static_cast<std::size_t>(c + 1) / static_cast<std::size_t>(callers);
        RecordSink sink(page_bytes);
        const auto mine = absl::MakeConstSpan(keys).subspan(first, end - first);
        for (std::uint32_t i = 0; i < gets; ++i) {
          const auto fetched = caller.Fetch(*ns, mine, sink);
          if (fetched.ok() && fetched->blocks.back().status.ok()) continue;
          std::fprintf(stderr, "get: %s\n", fetched.status().ToString().c_str());
          ++failures;
          return;
        }
      });
    }
    for (std::thread& getter : getters) getter.join();
    if (failures > 0) return 1;
    const double get_s = Seconds(begin) / gets;
    const double get_cpu_s = (CpuSeconds(daemon.pid()) - cpu_1) / gets;
    std::printf(
        "threads %d  encode %.2f GB/s  put %.2f GB/s (ratio %.2f, %.2f CPU ns/byte)  "
        "from pages %.2f GB/s (ratio %.2f, %.2f CPU ns/byte)  "
        "get %.2f GB/s of records (%.2f CPU ns/byte)\n",
        threads, raw_gb / encode_s, raw_gb / put_s, encode_s / put_s, put_cpu_s / raw_gb,
        raw_gb / pages_s, encode_s / pages_s, pages_cpu_s / raw_gb, record_gb / get_s,
        get_cpu_s / record_gb);
    std::fflush(stdout);
  }
  return 0;
}

}  // namespace
}  // namespace kvmill

int main(int argc, char** argv) { return kvmill::Main(argc, argv); }
