// Map of blocks of a real kvmilld against an empty call to it, and attention on the mapped tiles
// against private copies of them.
//
// Prints the medians and their ratios. 8 KV heads, head_dim 128, k4v2_g128; every map after an
// empty call; attention over the first layers, 8 queries a KV head, one thread, processor time.
//
// A private copy is what an engine of its own would have: the same bytes at the same distances, in
// anonymous memory of this process. One with pages of 4 KiB, as malloc gives them where huge pages
// are given on request, and one with huge pages (on request: MADV_HUGEPAGE). In place, copy and
// copy take turns, beginning with another one each round.
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "CLI/CLI.hpp"
#include "absl/strings/str_cat.h"
#include "client/client.h"
#include "client/mapped_blocks.h"
#include "kernels/attention.h"
#include "kernels/float16.h"
#include "storage/core/page_layout.h"
#include "storage/core/status_macros.h"
#include "tests/integration/daemon_process.h"

namespace kvmill {
namespace {

constexpr std::uint32_t kTokens = 128;
constexpr std::uint32_t kQueriesPerHead = 8;
constexpr std::uint32_t kWarmUps = 3;

struct MapBenchOptions {
  std::uint32_t blocks = 64;
  std::uint32_t count = 500;
  std::uint32_t layers = 36;
  std::uint32_t attention_layers = 1;
  std::uint32_t attention_rounds = 31;
  std::string huge_pages = "auto";
  std::uint32_t kv_heads = 8;
  std::uint32_t head_dim = 128;
};

// Where the tiles are that attention goes over.
enum Memory { kInPlace, kSmallPages, kHugePages, kMemoryCount };

struct MapBenchResult {
  std::vector<double> map_us, empty_rpc_us;
  std::array<std::vector<double>, kMemoryCount> attention_us;  // By round.
};

// Anonymous memory like `span`: as large, and as far from a boundary of 2 MiB.
class PrivateMemory {
 public:
  static constexpr std::size_t kAlignment = std::size_t{2} << 20;

  PrivateMemory(absl::Span<const std::byte> like, bool huge_pages)
      : bytes_(like.size() + 2 * kAlignment) {
    void* memory = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) return;
    memory_ = static_cast<std::byte*>(memory);
    madvise(memory_, bytes_, huge_pages ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
    const auto at = reinterpret_cast<std::uintptr_t>(memory_);
    const auto want = reinterpret_cast<std::uintptr_t>(like.data());
    begin_ = memory_ + (want - at) % kAlignment;
  }
  ~PrivateMemory() {
    if (memory_ != nullptr) munmap(memory_, bytes_);
  }
  PrivateMemory(const PrivateMemory&) = delete;
  PrivateMemory& operator=(const PrivateMemory&) = delete;

  std::byte* begin() const { return begin_; }  // Null: there is none.

 private:
  const std::size_t bytes_;
  std::byte* memory_ = nullptr;
  std::byte* begin_ = nullptr;
};

double Micros(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - begin)
      .count();
}

double CpuMicros() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return 1e6 * static_cast<double>(now.tv_sec) + 1e-3 * static_cast<double>(now.tv_nsec);
}

NamespaceSpec SpecOf(const MapBenchOptions& options) {
  NamespaceSpec spec;
  spec.model = "kvmill-bench-fetch";
  spec.revision = absl::StrCat(options.layers, "x", options.kv_heads, "x", options.head_dim);
  spec.hash_scheme = "kvmill-bench";
  spec.block_tokens = kTokens;
  LayerGroup group;
  for (std::uint32_t i = 0; i < options.layers; ++i) {
    group.layers.push_back(static_cast<std::uint16_t>(i));
  }
  group.kv_heads = static_cast<std::uint16_t>(options.kv_heads);
  group.head_dim = static_cast<std::uint16_t>(options.head_dim);
  spec.groups = {group};
  return spec;
}

absl::StatusOr<std::vector<BlockKey>> StoreBlocks(Client& client, const ClientNamespace& ns,
                                                  std::size_t count) {
  const LayerGroup& group = ns.spec.groups[0];
  // One block's worth of values, other ones for K and V; what they are does not matter here.
  const std::size_t values = std::size_t{kTokens} * group.kv_heads * group.head_dim;
  std::vector<std::uint16_t> kv(2 * values);
  for (std::size_t i = 0; i < kv.size(); ++i) {
    const double value = std::sin(0.37 * static_cast<double>(i * i % 10007));
    kv[i] = FloatToFloat16(static_cast<float>(value));
  }
  LayerInput layer;
  layer.k = KvView::Array(kv.data(), group.kv_heads, group.head_dim);
  layer.v = KvView::Array(kv.data() + values, group.kv_heads, group.head_dim);
  const std::vector<LayerInput> layers(group.layers.size(), layer);
  const std::string run = absl::StrCat("bench-", getpid(), "-");
  std::vector<BlockKey> keys;
  std::vector<StoreBlock> blocks;
  for (std::size_t i = 0; i < count; ++i) {
    KVMILL_ASSIGN_OR_RETURN(keys.emplace_back(),
                            BlockKey::FromBytes(absl::StrCat(run, absl::Dec(i, absl::kZeroPad12))));
    StoreBlock block;
    block.key = keys.back();
    if (i > 0) block.parent = keys[i - 1];
    block.token_count = kTokens;
    block.block_index = static_cast<std::uint32_t>(i);
    block.layers = layers;
    blocks.push_back(block);
  }
  KVMILL_ASSIGN_OR_RETURN(const StoreResult stored, client.Store(ns, blocks, {}));
  for (const StoreBlockResult& block : stored.blocks) KVMILL_RETURN_IF_ERROR(block.status);
  return keys;
}

// [memory][layer]: tables of the mapped blocks' first layers.
using Tables = std::array<std::vector<std::vector<AttentionBlock>>, kMemoryCount>;

// Fills the tables in place, and copies the pages to where they lie in the private ones.
absl::Status FillTables(const MappedBlocks& mapped, std::size_t layers, Tables* tables,
                        std::vector<std::unique_ptr<PrivateMemory>>* memories) {
  const LayerGroup& group = mapped.name_space().spec.groups[0];
  std::vector<absl::Span<const std::byte>> pages;
  for (std::size_t layer = 0; layer < layers; ++layer) {
    std::vector<AttentionBlock>& table = (*tables)[kInPlace].emplace_back();
    table.resize(mapped.block_count() * group.kv_heads);
    KVMILL_RETURN_IF_ERROR(
        FillAttentionBlocks(mapped, 0, layer, 0, mapped.block_count(), absl::MakeSpan(table)));
    for (std::size_t b = 0; b < mapped.block_count(); ++b) {
      KVMILL_ASSIGN_OR_RETURN(const PageView page, mapped.Page(b, 0, layer));
      pages.push_back(page.bytes());
    }
  }
  const auto by_begin = [](const auto& a, const auto& b) { return a.data() < b.data(); };
  const auto [first, last] = std::minmax_element(pages.begin(), pages.end(), by_begin);
  const absl::Span<const std::byte> all(
      first->data(), static_cast<std::size_t>(last->data() + last->size() - first->data()));
  for (const Memory memory : {kSmallPages, kHugePages}) {
    memories->push_back(std::make_unique<PrivateMemory>(all, memory == kHugePages));
    std::byte* const begin = memories->back()->begin();
    if (begin == nullptr) return absl::ResourceExhaustedError("no memory for a private copy");
    for (const auto& page : pages) {
      std::memcpy(begin + (page.data() - all.data()), page.data(), page.size());
    }
    (*tables)[memory] = (*tables)[kInPlace];
    for (std::vector<AttentionBlock>& table : (*tables)[memory]) {
      for (AttentionBlock& entry : table) {
        if (entry.kind == BlockKind::kAbsent) continue;
        entry.data = begin + (static_cast<const std::byte*>(entry.data) - all.data());
      }
    }
  }
  return absl::OkStatus();
}

absl::Status MeasureAttention(const MappedBlocks& mapped, const MapBenchOptions& options,
                              MapBenchResult* result) {
  const NamespaceSpec& spec = mapped.name_space().spec;
  const LayerGroup& group = spec.groups[0];
  Tables tables;
  std::vector<std::unique_ptr<PrivateMemory>> memories;
  KVMILL_RETURN_IF_ERROR(
      FillTables(mapped, std::min(options.attention_layers, options.layers), &tables, &memories));
  AttentionSequence sequence;
  sequence.block_count = static_cast<std::uint32_t>(mapped.block_count());
  sequence.token_end = mapped.block_count() * kTokens;
  sequence.query_position = sequence.token_end - 1;
  AttentionArgs args;
  args.shape.format = FormatOf(spec, group);
  args.shape.kv_heads = group.kv_heads;
  args.shape.q_heads = kQueriesPerHead * group.kv_heads;
  args.shape.scale = 1 / std::sqrt(static_cast<float>(group.head_dim));
  args.shape.raw = PackedRawLayout(args.shape.format, spec.source_dtype, kTokens);
  args.sequences = absl::MakeConstSpan(&sequence, 1);
  std::vector<float> query(std::size_t{args.shape.q_heads} * group.head_dim, 0.5f);
  std::vector<float> output(query.size());
  args.query = query.data();
  args.output = output.data();
  std::vector<std::byte> scratch;
  constexpr std::uint32_t kAttentionWarmUps = 2;  // Page tables and caches.
  for (std::uint32_t round = 0; round < options.attention_rounds + kAttentionWarmUps; ++round) {
    for (std::uint32_t turn = 0; turn < kMemoryCount; ++turn) {
      const std::uint32_t memory = (turn + round) % kMemoryCount;
      double us = 0;
      for (const std::vector<AttentionBlock>& table : tables[memory]) {
        sequence.blocks = table.data();
        KVMILL_RETURN_IF_ERROR(ValidateAttention(args));
        scratch.resize(AttentionScratchBytes(args, 1) + 64);
        const std::size_t off = reinterpret_cast<std::uintptr_t>(scratch.data()) % 64;
        const double begin = CpuMicros();
        AttentionCpu(args, {}, absl::MakeSpan(scratch).subspan(64 - off));
        us += CpuMicros() - begin;
      }
      if (round >= kAttentionWarmUps) result->attention_us[memory].push_back(us);
    }
  }
  return mapped.Check();
}

absl::Status Measure(Client& client, const ClientNamespace& ns, const std::vector<BlockKey>& keys,
                     const MapBenchOptions& options, MapBenchResult* result) {
  const std::uint32_t count = options.count;
  for (std::uint32_t i = 0; i < count + kWarmUps; ++i) {
    auto begin = std::chrono::steady_clock::now();
    KVMILL_RETURN_IF_ERROR(client.Touch(ns, {}).status());
    const double empty_us = Micros(begin);
    begin = std::chrono::steady_clock::now();
    KVMILL_ASSIGN_OR_RETURN(const Client::MappedPtr mapped, client.Map(ns, keys));
    const double map_us = Micros(begin);
    for (std::size_t b = 0; b < keys.size(); ++b) KVMILL_RETURN_IF_ERROR(mapped->status(b));
    if (i + 1 == count + kWarmUps)
      KVMILL_RETURN_IF_ERROR(MeasureAttention(*mapped, options, result));
    if (i < kWarmUps) continue;  // Connections, sessions, mappings.
    result->map_us.push_back(map_us);
    result->empty_rpc_us.push_back(empty_us);
  }
  return absl::OkStatus();
}

double Median(std::vector<double>& values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

absl::Status Run(const MapBenchOptions& options) {
  const testing::TemporaryDirectory directory;
  testing::DaemonProcess daemon(testing::DaemonBinary(),
                                {"--socket", directory / "run/kvmill.sock", "--host-bytes", "1GiB",
                                 "--huge-pages", options.huge_pages});
  const nlohmann::json ready = daemon.WaitReady();
  if (ready.is_null()) return absl::UnavailableError(daemon.standard_error());
  KVMILL_ASSIGN_OR_RETURN(
      const std::unique_ptr<Client> client,
      Client::Create({.address = absl::StrCat("unix:", ready["socket"].get<std::string>()),
                      .timeout = absl::Seconds(120)}));
  KVMILL_ASSIGN_OR_RETURN(const ClientNamespace ns,
                          client->OpenNamespace("bench", SpecOf(options)));
  KVMILL_ASSIGN_OR_RETURN(const std::vector<BlockKey> keys,
                          StoreBlocks(*client, ns, options.blocks));
  MapBenchResult result;
  KVMILL_RETURN_IF_ERROR(Measure(*client, ns, keys, options, &result));
  const double map_us = Median(result.map_us);
  const double empty_us = Median(result.empty_rpc_us);
  std::printf("map of %u blocks of %u layers %.1f us (p99 %.1f)  empty call %.1f us  ratio %.2f\n",
              options.blocks, options.layers, map_us,
              result.map_us[result.map_us.size() * 99 / 100], empty_us, map_us / empty_us);
  for (const auto& [memory, name] :
       {std::pair(kSmallPages, "4 KiB pages"), std::pair(kHugePages, "huge pages")}) {
    // Of every round: what else the machine does changes between them.
    std::vector<double> ratios;
    for (std::size_t i = 0; i < options.attention_rounds; ++i) {
      ratios.push_back(result.attention_us[kInPlace][i] / result.attention_us[memory][i]);
    }
    std::vector<double> in_place = result.attention_us[kInPlace];
    std::printf("attention in place %.1f us  over a private copy in %s %.1f us  ratio %.3f\n",
                Median(in_place), name, Median(result.attention_us[memory]), Median(ratios));
  }
  return absl::OkStatus();
}

int Main(int argc, char** argv) {
  MapBenchOptions options;
  CLI::App app(
      "Map of blocks of a kvmilld of its own against an empty call, and attention over them in "
      "place against a private copy.");
  const auto add = [&app](const char* name, std::uint32_t& value, std::uint32_t max) {
    app.add_option(name, value)->check(CLI::Range(1u, max))->capture_default_str();
  };
  add("--blocks", options.blocks, 4096);
  add("--layers", options.layers, kLayersMax);
  add("--count", options.count, 1000000);
  add("--attention-layers", options.attention_layers, kLayersMax);
  add("--attention-rounds", options.attention_rounds, 10000);
  app.add_option("--huge-pages", options.huge_pages, "The daemon's")->capture_default_str();
  CLI11_PARSE(app, argc, argv);
  const absl::Status status = Run(options);
  if (status.ok()) return 0;
  std::fprintf(stderr, "%s\n", status.ToString().c_str());
  return 1;
}

}  // namespace
}  // namespace kvmill

int main(int argc, char** argv) { return kvmill::Main(argc, argv); }
