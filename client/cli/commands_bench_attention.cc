// bench attention: attention over tiles against 16-bit attention, without a daemon.
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "client/cli/attention_bench.h"
#include "client/cli/attention_files.h"
#include "client/cli/commands.h"
#include "client/cli/device_arena.h"
#include "client/cli/human.h"
#include "client/cli/output.h"
#include "kernels/attention.h"
#include "kernels/simd.h"
#include "storage/core/status_macros.h"

namespace kvmill::cli {
namespace {

constexpr const char* kAttentionHelp =
    "One query token of one sequence attends to --context tokens of one layer, over tiles and "
    "over\n"
    "fp16, as a decoding step does; every repetition takes another layer, so that K and V come "
    "from\n"
    "memory. Both have the same driver and threads, and each the fastest instructions of the "
    "level.\n"
    "Medians of the repetitions; 1 GB = 1e9 bytes.\n"
    "  ratio              fp16_us / tiles_us within a repetition\n"
    "  *_cpu*             the same in processor time per thread: on a busy machine look at these\n"
    "  read_gb_per_s      as many threads that only read, in the same repetitions\n"
    "  rel_error          over all outputs, against fp64 on the decoded tiles\n"
    "\n"
    "With --device cuda or cuda:N one call attends to a batch of sequences, 1 GiB of records "
    "together;\n"
    "times are divided by their number, which 'layers' has. read_gb_per_s is then what a copy "
    "within "
    "the\n"
    "GPU's memory reads and writes; there is no processor time, and --threads means nothing.\n"
    "\n"
    "With --kv and --records (a prompt's K and V in fp16, and the records that 'get --tiles' "
    "wrote)\n"
    "the tokens in tiles of every layer are attended to instead; --heads-q counts for one KV head "
    "there.\n"
    "The files hold no queries: they are Gaussian.\n"
    "  output_error       over all outputs, against fp64 on the K and V before encoding\n"
    "\n"
    "Examples:\n"
    "  kvmill bench attention --kv p_ --records fetched_ --heads-q 8\n"
    "  kvmill bench attention --context 32768 --heads-q 64 --heads-kv 8 --head-dim 128 --format "
    "k4v2_g128\n";

struct AttentionFlags {
  AttentionBenchOptions options;
  std::string format = "k4v2_g128";
  std::string device = "host";
  std::string simd;
  std::uint32_t head_dim = 128;
  std::string kv, records;
};

// "AVX3+AMX": the level and how codes are multiplied.
std::string SimdInUse() {
  return absl::StrCat(std::string(CpuSimdName()), "+", std::string(CpuAttentionName()));
}

// LEVEL, METHOD or LEVEL+METHOD, as SimdInUse says it.
absl::Status Force(const std::string& simd) {
  const std::size_t plus = simd.find('+');
  const std::string first = simd.substr(0, plus);
  const bool level = ForceCpuSimd(first);
  if (plus == std::string::npos && (level || ForceCpuAttention(first))) return absl::OkStatus();
  if (level && plus != std::string::npos && ForceCpuAttention(simd.substr(plus + 1))) {
    return absl::OkStatus();
  }
  std::vector<std::string> known;
  for (const std::string_view name : CpuSimdNames()) {
    ForceCpuSimd(name);
    for (const std::string_view method : CpuAttentionNames()) {
      known.push_back(absl::StrCat(std::string(name), "+", std::string(method)));
    }
  }
  ForceCpuSimd("");
  return UsageError(
      absl::StrCat("--simd ", simd, ": this machine has ", absl::StrJoin(known, ", ")));
}

double Median(const std::vector<double>& ascending) { return ascending[ascending.size() / 2]; }

// A device has no processor time.
Json MedianOrNull(const std::vector<double>& ascending) {
  return ascending.empty() ? Json() : Json(Median(ascending));
}
Json MinOrNull(const std::vector<double>& ascending) {
  return ascending.empty() ? Json() : Json(ascending.front());
}

std::string Spread(const std::vector<double>& ascending, int digits) {
  return absl::StrCat(HumanNumber(ascending.front(), digits), " to ",
                      HumanNumber(ascending.back(), digits), " in ", ascending.size(), " runs");
}

std::string OfProcessor(const std::vector<double>& ascending_us) {
  if (ascending_us.empty()) return "";
  return absl::StrCat("; ", HumanNumber(Median(ascending_us) / 1e3, 2), " ms of processor");
}

// Attention over a prompt in files.
absl::Status BenchFiles(const CommonFlags& common, const AttentionFlags& flags) {
  AttentionFilesOptions options;
  options.kv = flags.kv;
  options.records = flags.records;
  options.format = flags.options.format;
  options.q_heads_per_kv_head = flags.options.q_heads;
  options.repetitions = flags.options.repetitions;
  KVMILL_ASSIGN_OR_RETURN(const AttentionFilesResult result, RunAttentionOnFiles(options));
  if (common.json) {
    PrintJson({{"tiles_us", result.tiles_us},
               {"fp16_us", result.fp16_us},
               {"ratio", result.ratio},
               {"rel_error", result.rel_error},
               {"simd", SimdInUse()},
               {"output_error", result.output_error},
               {"layers", result.layers},
               {"tokens", result.tokens}});
    return absl::OkStatus();
  }
  Report report;
  report.Add("attention", absl::StrCat(HumanCount(result.tokens), " tokens"),
             absl::StrCat(result.layers, " layers, ", options.q_heads_per_kv_head,
                          " query heads for each KV head, ", SimdInUse()));
  report.Add("tiles", absl::StrCat(HumanNumber(result.tiles_us, 1), " us"), "one query, one layer");
  report.Add("fp16", absl::StrCat(HumanNumber(result.fp16_us, 1), " us"));
  report.Add("ratio", HumanNumber(result.ratio, 2));
  report.Add("output error", absl::StrCat(HumanNumber(100 * result.output_error, 2), " %"),
             "relative, against fp64 on the K and V before encoding");
  report.Add("kernel error", absl::StrCat(HumanNumber(result.rel_error * 1e6, 0), "e-6"),
             "relative, against fp64 on decoded tiles");
  report.Print();
  return absl::OkStatus();
}

absl::Status BenchAttention(const CommonFlags& common, AttentionFlags& flags) {
  const bool host = flags.device == "host";
  if (!host && !(flags.simd.empty() && flags.kv.empty() && flags.records.empty())) {
    return UsageError("--simd, --kv and --records go with --device host");
  }
  AttentionBenchOptions& options = flags.options;
  KVMILL_ASSIGN_OR_RETURN(options.format, FormatFlag(flags.format, flags.head_dim));
  if (flags.kv.empty() != flags.records.empty()) {
    return UsageError("--kv and --records belong together");
  }
  if (!flags.kv.empty()) {
    if (!flags.simd.empty()) KVMILL_RETURN_IF_ERROR(Force(flags.simd));
    return BenchFiles(common, flags);
  }
  if (options.kv_heads == 0 || options.q_heads % options.kv_heads != 0) {
    return UsageError(absl::StrCat("--heads-q ", options.q_heads, " --heads-kv ", options.kv_heads,
                                   ": want a multiple"));
  }
  if (!flags.simd.empty()) KVMILL_RETURN_IF_ERROR(Force(flags.simd));
  AttentionBenchResult result;
  std::string simd;
  if (host) {
    KVMILL_ASSIGN_OR_RETURN(result, RunAttentionBench(options));
    simd = SimdInUse();
  } else {
    KVMILL_ASSIGN_OR_RETURN(const std::unique_ptr<Device> device, OpenDeviceFlag(flags.device));
    KVMILL_ASSIGN_OR_RETURN(result, RunAttentionBenchOn(*device, options));
    simd = DeviceInUse(device->info());
  }
  const double tiles_us = Median(result.tiles_us);
  const double fp16_us = Median(result.fp16_us);
  if (common.json) {
    PrintJson({{"tiles_us", tiles_us},
               {"fp16_us", fp16_us},
               {"ratio", Median(result.ratio)},
               {"tiles_gb_per_s", result.tiles_gb_per_s},
               {"fp16_gb_per_s", result.fp16_gb_per_s},
               {"read_gb_per_s", result.read_gb_per_s},
               {"rel_error", result.rel_error},
               {"simd", simd},
               {"rel_error_fp16", result.rel_error_fp16},
               {"ratio_min", result.ratio.front()},
               {"ratio_max", result.ratio.back()},
               {"tiles_us_min", result.tiles_us.front()},
               {"fp16_us_min", result.fp16_us.front()},
               {"tiles_cpu_us", MedianOrNull(result.tiles_cpu_us)},
               {"fp16_cpu_us", MedianOrNull(result.fp16_cpu_us)},
               {"tiles_cpu_us_min", MinOrNull(result.tiles_cpu_us)},
               {"fp16_cpu_us_min", MinOrNull(result.fp16_cpu_us)},
               {"ratio_cpu", MedianOrNull(result.ratio_cpu)},
               {"ratio_cpu_min", MinOrNull(result.ratio_cpu)},
               {"ratio_cpu_max", host ? Json(result.ratio_cpu.back()) : Json()},
               {"read_cpu_gb_per_s", MedianOrNull(result.read_cpu_gb_per_s)},
               {"threads", options.threads},
               {"layers", result.layers}});
    return absl::OkStatus();
  }
  Report report;
  report.Add("attention", absl::StrCat(HumanCount(options.context), " tokens"),
             absl::StrCat(options.q_heads, " query and ", options.kv_heads, " KV heads, head_dim ",
                          flags.head_dim, ", ", ToString(options.format), ", ",
                          host ? absl::StrCat(options.threads,
                                              options.threads == 1 ? " thread, " : " threads, ")
                               : absl::StrCat("one of ", result.layers, " sequences, "),
                          simd));
  report.Add("tiles", absl::StrCat(HumanNumber(tiles_us / 1e3, host ? 2 : 4), " ms"),
             absl::StrCat(HumanNumber(result.tiles_gb_per_s, 2), " GB/s of records",
                          OfProcessor(result.tiles_cpu_us)));
  report.Add(
      "fp16", absl::StrCat(HumanNumber(fp16_us / 1e3, host ? 2 : 4), " ms"),
      absl::StrCat(HumanNumber(result.fp16_gb_per_s, 2), " GB/s", OfProcessor(result.fp16_cpu_us)));
  report.Add("ratio", HumanNumber(Median(result.ratio), 2),
             absl::StrCat(Spread(result.ratio, 2),
                          host ? absl::StrCat("; of processor time ",
                                              HumanNumber(Median(result.ratio_cpu), 2))
                               : ""));
  report.Add("memory", absl::StrCat(HumanNumber(result.read_gb_per_s, 2), " GB/s"),
             host ? "reading only, as many threads" : "read and written by a copy");
  report.Add("error", absl::StrCat(HumanNumber(result.rel_error * 1e6, 0), "e-6"),
             absl::StrCat("relative, against fp64 on decoded tiles; fp16 ",
                          HumanNumber(result.rel_error_fp16 * 1e6, 1), "e-6"));
  report.Print();
  return absl::OkStatus();
}

}  // namespace

void AddBenchAttention(CommandLine& line, CLI::App& bench) {
  auto flags = std::make_shared<AttentionFlags>();
  CLI::App* app = line.Add(bench, "attention", "Speed of attention over tiles", kAttentionHelp,
                           [&line, flags] { return BenchAttention(line.flags(), *flags); });
  app->add_option("--context", flags->options.context, "Tokens of the sequence")
      ->check(CLI::Range(std::uint64_t{1}, std::uint64_t{1} << 24))
      ->capture_default_str();
  app->add_option("--heads-q", flags->options.q_heads, "Query heads, a multiple of --heads-kv")
      ->check(CLI::Range(1u, kAttentionHeadsMax))
      ->capture_default_str();
  app->add_option("--heads-kv", flags->options.kv_heads, "KV heads")
      ->check(CLI::Range(1u, kAttentionHeadsMax))
      ->capture_default_str();
  app->add_option("--head-dim", flags->head_dim, "64, 128 or 256")->capture_default_str();
  app->add_option("--format", flags->format, std::string(kFormatHelp))
      ->type_name("FORMAT")
      ->capture_default_str();
  app->add_option("--threads", flags->options.threads, "Threads")
      ->check(CLI::Range(1u, 1024u))
      ->capture_default_str();
  app->add_option("--repetitions", flags->options.repetitions, "Measurements")
      ->check(CLI::Range(1u, 10000u))
      ->capture_default_str();
  app->add_option("--simd", flags->simd,
                  "Level, method or LEVEL+METHOD to use, as AVX2, VNNI or AVX3+AMX (default: the "
                  "best)")
      ->type_name("NAME");
  app->add_option("--kv", flags->kv, "K and V in files: PREFIXL00_k.npy, PREFIXL00_v.npy, ...")
      ->type_name("PREFIX");
  app->add_option("--records", flags->records, "Their records: PREFIXL00.records, ...")
      ->type_name("PREFIX");
  app->add_option("--device", flags->device, "host, cuda (the first GPU) or cuda:N")
      ->check(CheckDeviceFlag)
      ->capture_default_str();
}

}  // namespace kvmill::cli
