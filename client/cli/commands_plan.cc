// replay and capacity: what a cache would do, without a daemon.
#include <cmath>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "client/cli/commands.h"
#include "client/cli/human.h"
#include "client/cli/output.h"
#include "client/cli/trace.h"
#include "storage/core/status_macros.h"
#include "storage/eviction/policy.h"
#include "storage/eviction/replay.h"

namespace kvmill::cli {
namespace {

constexpr const char* kReplayHelp =
    "The trace is JSON lines, one request each, with \"hash_ids\": the ids of its blocks in "
    "prefix\n"
    "order (the format of the Mooncake traces). A request's hits are the consecutive prefix that "
    "is\n"
    "present before it; then every id is touched or inserted, first to last, and a full tier "
    "evicts.\n"
    "  hit_rate = hits / lookups, from 0 to 1\n"
    "--leaf-first keeps policies from evicting a block before the blocks that continue it, as the\n"
    "daemon does; without it they run as published.\n"
    "\n"
    "Example:\n"
    "  kvmill replay --trace conversation.jsonl --blocks 10000 --policy lru\n";

constexpr const char* kCapacityHelp =
    "How many tokens of KV cache fit into a memory, as tiles and in fp16:\n"
    "  record               = D*G*kb/8 + 2(2D+G) + D*G*vb/8 + 2(D+2G) bytes   (docs/formats.md)\n"
    "  bytes_per_token      = layers * kv_heads * record / G\n"
    "  bytes_per_token_fp16 = layers * kv_heads * 4 * D                       (K and V, 2 bytes "
    "each)\n"
    "  tokens               = floor(memory / bytes_per_token); tokens_fp16 likewise\n"
    "  gain                 = bytes_per_token_fp16 / bytes_per_token\n"
    "with D = head_dim, G = tokens of a block, kb and vb = bits of K and V. Page headers (128 "
    "bytes a\n"
    "layer and block, and 24 a head, rounded up to 64) come on top: 2 % with one KV head, 0.3 % "
    "with 8.\n"
    "\n"
    "Example:\n"
    "  kvmill capacity --layers 36 --kv-heads 8 --head-dim 128 --format k4v2_g128 --memory 16GiB\n";

struct ReplayFlags {
  std::string trace;
  ReplayOptions options;
};

absl::Status Replay(const CommonFlags& common, const ReplayFlags& flags) {
  KVMILL_ASSIGN_OR_RETURN(const std::vector<std::vector<std::uint64_t>> requests,
                          ReadTrace(flags.trace));
  KVMILL_ASSIGN_OR_RETURN(const ReplayResult result, ReplayTrace(requests, flags.options));
  if (common.json) {
    PrintJson({{"lookups", result.lookups},
               {"hits", result.hits},
               {"hit_rate", result.hit_rate},
               {"blocks", result.blocks},
               {"policy", result.policy},
               {"requests", requests.size()}});
    return absl::OkStatus();
  }
  Report report;
  report.Add("requests", HumanCount(requests.size()), flags.trace);
  report.Add("policy", result.policy,
             absl::StrCat("tier of ", HumanCount(result.blocks), " blocks"));
  report.Add("looked up", HumanCount(result.lookups), "blocks");
  report.Add("hits", HumanCount(result.hits), "blocks of a prefix that was there");
  report.Add("hit rate", HumanPercent(result.hit_rate));
  report.Print();
  return absl::OkStatus();
}

struct CapacityFlags {
  std::uint32_t layers = 0, kv_heads = 0, head_dim = 0;
  std::string format;
  std::uint64_t memory = 0;
};

absl::Status Capacity(const CommonFlags& common, const CapacityFlags& flags) {
  KVMILL_ASSIGN_OR_RETURN(const TileFormat format, FormatFlag(flags.format, flags.head_dim));
  const double heads = static_cast<double>(flags.layers) * flags.kv_heads;
  const std::size_t record_bytes = RecordBytes(format);
  const double bytes_per_token = heads * static_cast<double>(record_bytes) / format.group;
  const double bytes_per_token_fp16 = heads * 4 * format.head_dim;
  const auto memory = static_cast<double>(flags.memory);
  const auto tokens = static_cast<std::uint64_t>(std::floor(memory / bytes_per_token));
  const auto tokens_fp16 = static_cast<std::uint64_t>(std::floor(memory / bytes_per_token_fp16));
  const double gain = bytes_per_token_fp16 / bytes_per_token;
  if (common.json) {
    PrintJson({{"tokens", tokens},
               {"tokens_fp16", tokens_fp16},
               {"gain", gain},
               {"bytes_per_token", bytes_per_token},
               {"bytes_per_token_fp16", bytes_per_token_fp16}});
    return absl::OkStatus();
  }
  Report report;
  report.Add("record", absl::StrCat(record_bytes, " B"),
             absl::StrCat("K and V of ", format.group, " tokens of one head"));
  report.Add("a token", absl::StrCat(HumanNumber(bytes_per_token, 1), " B"),
             absl::StrCat(flags.layers, " layers x ", flags.kv_heads, " heads x ", record_bytes,
                          " / ", format.group));
  report.Add(
      "  in fp16", absl::StrCat(HumanNumber(bytes_per_token_fp16, 1), " B"),
      absl::StrCat(flags.layers, " layers x ", flags.kv_heads, " heads x 4 x ", format.head_dim));
  report.Add("tokens", HumanCount(tokens), absl::StrCat("in ", HumanBytes(flags.memory)));
  report.Add("  in fp16", HumanCount(tokens_fp16));
  report.Add("gain", HumanNumber(gain, 2), "times the context in the same memory");
  report.Print();
  return absl::OkStatus();
}

}  // namespace

void AddPlanCommands(CommandLine& line) {
  auto replay = std::make_shared<ReplayFlags>();
  CLI::App* app = line.Add(line.root(), "replay", "Replay a trace against an eviction policy",
                           kReplayHelp, [&line, replay] { return Replay(line.flags(), *replay); });
  app->add_option("--trace", replay->trace, "JSON lines with hash_ids")
      ->required()
      ->type_name("FILE");
  app->add_option("--blocks", replay->options.blocks, "Capacity of the tier")
      ->required()
      ->check(CLI::Range(1u, 1u << 31));
  std::vector<std::string> names;
  for (const std::string_view name : EvictionPolicyNames()) names.emplace_back(name);
  app->add_option("--policy", replay->options.policy,
                  absl::StrCat("One of ", absl::StrJoin(names, ", "), " (default ", names[0], ")"))
      ->check(CLI::IsMember(names));
  app->add_flag("--leaf-first", replay->options.leaf_first,
                "A block never leaves before those that continue it");

  auto capacity = std::make_shared<CapacityFlags>();
  app = line.Add(line.root(), "capacity", "Tokens that fit into a memory", kCapacityHelp,
                 [&line, capacity] { return Capacity(line.flags(), *capacity); });
  app->add_option("--layers", capacity->layers, "Layers of the model")
      ->required()
      ->check(CLI::Range(1u, 65535u));
  app->add_option("--kv-heads", capacity->kv_heads, "KV heads of a layer")
      ->required()
      ->check(CLI::Range(1u, 65535u));
  app->add_option("--head-dim", capacity->head_dim, "64, 128 or 256")->required();
  app->add_option("--format", capacity->format, std::string(kFormatHelp))
      ->required()
      ->type_name("FORMAT");
  AddBytes(*app, "--memory", capacity->memory, "Memory for the cache, as 16GiB")->required();
}

}  // namespace kvmill::cli
