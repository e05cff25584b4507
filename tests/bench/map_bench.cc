// Map of blocks of a real kvmilld against an empty call to it, and attention on the mapped tiles
// against a private copy of them.
//
// Prints the medians and their ratios. 8 KV heads, head_dim 128, k4v2_g128; every map after an
// empty call; attention over one layer, 8 queries a KV head, one thread, processor time.
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <memory>
#include <string>
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
constexpr std::uint32_t kAttentionRounds = 31;
constexpr std::uint32_t kWarmUps = 3;

struct MapBenchOptions {
  std::uint32_t blocks = 64;
  std::uint32_t count = 500;
  std::uint32_t layers = 36;
  std::uint32_t kv_heads = 8;
  std::uint32_t head_dim = 128;
};

struct MapBenchResult {
  std::vector<double> map_us, empty_rpc_us, attention_mapped_us, attention_private_us;
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

absl::Status MeasureAttention(const MappedBlocks& mapped, MapBenchResult* result) {
  const NamespaceSpec& spec = mapped.name_space().spec;
  const LayerGroup& group = spec.groups[0];
  std::vector<AttentionBlock> in_place(mapped.block_count() * group.kv_heads);
  KVMILL_RETURN_IF_ERROR(
      FillAttentionBlocks(mapped, 0, 0, 0, mapped.block_count(), absl::MakeSpan(in_place)));
  // The private copy lies as in the daemon, where the pages of a block are neighbours: what is
  // compared is the memory, not how near to each other the pages of a layer are.
  const std::size_t layers = group.layers.size();
  std::unique_ptr<std::byte[]> memory;
  std::vector<AttentionBlock> copied = in_place;
  for (std::size_t b = 0; b < mapped.block_count(); ++b) {
    KVMILL_ASSIGN_OR_RETURN(const PageView page, mapped.Page(b, 0, 0));
    const std::byte* const begin = page.contents(0).data() - page.slot(0).offset_bytes;
    const std::size_t page_bytes = page.header().page_bytes;
    if (memory == nullptr) {
      memory.reset(new std::byte[mapped.block_count() * layers * page_bytes]);
    }
    std::byte* const copy = memory.get() + b * layers * page_bytes;
    std::memcpy(copy, begin, page_bytes);
    for (std::size_t h = 0; h < group.kv_heads; ++h) {
      AttentionBlock& entry = copied[b * group.kv_heads + h];
      if (entry.kind != BlockKind::kAbsent) {
        entry.data = copy + page.slot(h).offset_bytes;
      }
    }
  }
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
  for (std::uint32_t round = 0; round < kAttentionRounds + 2; ++round) {
    // Whoever goes first does so every second time only.
    for (const std::uint32_t which : {round % 2, 1 - round % 2}) {
      sequence.blocks = which == 0 ? in_place.data() : copied.data();
      KVMILL_RETURN_IF_ERROR(ValidateAttention(args));
      scratch.resize(AttentionScratchBytes(args, 1) + 64);
      const std::size_t off = reinterpret_cast<std::uintptr_t>(scratch.data()) % 64;
      const double begin = CpuMicros();
      AttentionCpu(args, {}, absl::MakeSpan(scratch).subspan(64 - off));
      const double us = CpuMicros() - begin;
      if (round < 2) continue;  // Page tables and caches.
      (which == 0 ? result->attention_mapped_us : result->attention_private_us).push_back(us);
    }
  }
  return mapped.Check();
}

absl::Status Measure(Client& client, const ClientNamespace& ns, const std::vector<BlockKey>& keys,
                     std::uint32_t count, MapBenchResult* result) {
  for (std::uint32_t i = 0; i < count + kWarmUps; ++i) {
    auto begin = std::chrono::steady_clock::now();
    KVMILL_RETURN_IF_ERROR(client.Touch(ns, {}).status());
    const double empty_us = Micros(begin);
    begin = std::chrono::steady_clock::now();
    KVMILL_ASSIGN_OR_RETURN(const Client::MappedPtr mapped, client.Map(ns, keys));
    const double map_us = Micros(begin);
    for (std::size_t b = 0; b < keys.size(); ++b) KVMILL_RETURN_IF_ERROR(mapped->status(b));
    if (i + 1 == count + kWarmUps) KVMILL_RETURN_IF_ERROR(MeasureAttention(*mapped, result));
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
  testing::DaemonProcess daemon(
      testing::DaemonBinary(), {"--socket", directory / "run/kvmill.sock", "--host-bytes", "1GiB"});
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
  KVMILL_RETURN_IF_ERROR(Measure(*client, ns, keys, options.count, &result));
  const double map_us = Median(result.map_us);
  const double empty_us = Median(result.empty_rpc_us);
  const double mapped_us = Median(result.attention_mapped_us);
  const double private_us = Median(result.attention_private_us);
  std::printf(
      "map of %u blocks of %u layers %.1f us (p99 %.1f)  empty call %.1f us  ratio %.2f\n"
      "attention in place %.1f us  over a private copy %.1f us  ratio %.3f\n",
      options.blocks, options.layers, map_us, result.map_us[result.map_us.size() * 99 / 100],
      empty_us, map_us / empty_us, mapped_us, private_us, mapped_us / private_us);
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
  CLI11_PARSE(app, argc, argv);
  const absl::Status status = Run(options);
  if (status.ok()) return 0;
  std::fprintf(stderr, "%s\n", status.ToString().c_str());
  return 1;
}

}  // namespace
}  // namespace kvmill

int main(int argc, char** argv) { return kvmill::Main(argc, argv); }
