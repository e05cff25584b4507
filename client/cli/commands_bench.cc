// bench: how fast the parts are on this machine, without a daemon.
#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "client/cli/commands.h"
#include "client/cli/device_arena.h"
#include "client/cli/encode_bench.h"
#include "client/cli/human.h"
#include "client/cli/lookup_bench.h"
#include "client/cli/output.h"
#include "kernels/simd.h"
#include "storage/core/status_macros.h"

namespace kvmill::cli {
namespace {

constexpr const char* kEncodeHelp =
    "Encodes Gaussian tiles, 2 MiB of them a thread, over and over; the median of the repetitions\n"
    "counts. 1 GB = 1e9 bytes of 16-bit input.\n"
    "  us_per_tile        time of one thread for one tile (K and V)\n"
    "  reference_gb_per_s one thread of the reference encoder, in the same run\n"
    "  memcpy_gb_per_s    as many threads copying 64 MiB each\n"
    "  bound_us           the passes of the normalization alone, which an encoder cannot do "
    "without\n"
    "--algorithm refined: the encoder of `kvmill encode --algorithm refined`; the bound is the "
    "same.\n"
    "With --device cuda or cuda:N all of 1 GiB of tiles are encoded by one call, and what counts "
    "is "
    "its\n"
    "time divided by the tiles: memcpy copies within the GPU's memory, the bound is a tile's bytes "
    "at\n"
    "that speed, and --threads means nothing.\n"
    "\n"
    "Example:\n"
    "  kvmill bench encode --format k4v2_g128 --head-dim 128 --threads 1\n"
    "  kvmill bench encode --device cuda:0\n";
constexpr const char* kLookupHelp =
    "Fills an index with --keys blocks (32-byte keys) and looks them up in batches of one prompt, "
    "in\n"
    "random order, on one core, in this process. Median of the repetitions. Needs some 250 bytes "
    "of\n"
    "memory a key.\n"
    "\n"
    "Example:\n"
    "  kvmill bench lookup --keys 10000000\n";
std::string Spread(const std::vector<double>& ascending, int digits) {
  return absl::StrCat(HumanNumber(ascending.front(), digits), " to ",
                      HumanNumber(ascending.back(), digits), " in ", ascending.size(), " runs");
}

struct EncodeFlags {
  std::string format = "k4v2_g128";
  std::string algorithm = "kvarn";
  std::string device = "host";
  std::string simd;
  std::uint32_t head_dim = 128;
  std::uint32_t threads = 1;
  std::uint32_t repetitions = 15;
};

absl::Status BenchEncode(const CommonFlags& common, const EncodeFlags& flags) {
  EncodeBenchOptions options;
  if (flags.algorithm == "refined") {
    if (flags.device != "host") {
      return absl::UnimplementedError(
          "--algorithm refined has no GPU kernel: the host does it; use --device host");
    }
    options.algorithm = Algorithm::kRefined;
  }
  KVMILL_ASSIGN_OR_RETURN(options.format, FormatFlag(flags.format, flags.head_dim));
  options.threads = flags.threads;
  options.repetitions = flags.repetitions;
  if (!flags.simd.empty() && !ForceCpuSimd(flags.simd)) {
    std::vector<std::string> known;
    for (const std::string_view name : CpuSimdNames()) known.emplace_back(name);
    return UsageError(
        absl::StrCat("--simd ", flags.simd, ": this machine has ", absl::StrJoin(known, ", ")));
  }
  EncodeBenchResult result;
  std::string simd;
  if (flags.device == "host") {
    result = RunEncodeBench(options);
    simd = CpuSimdName();
  } else {
    if (!flags.simd.empty()) return UsageError("--simd goes with --device host");
    KVMILL_ASSIGN_OR_RETURN(const std::unique_ptr<Device> device, OpenDeviceFlag(flags.device));
    KVMILL_ASSIGN_OR_RETURN(result, RunEncodeBenchOn(*device, options));
    simd = DeviceInUse(device->info());
  }
  if (common.json) {
    PrintJson({{"gb_per_s", result.gb_per_s},
               {"us_per_tile", result.median_us},
               {"reference_gb_per_s", result.reference_gb_per_s},
               {"memcpy_gb_per_s", result.memcpy_gb_per_s},
               {"simd", simd},
               {"bound_us", result.bound_us},
               {"us_per_tile_min", result.us_per_tile.front()},
               {"us_per_tile_max", result.us_per_tile.back()},
               {"threads", flags.threads}});
    return absl::OkStatus();
  }
  Report report;
  const bool host = flags.device == "host";
  const std::string threads =
      absl::StrCat(flags.threads, flags.threads == 1 ? " thread, " : " threads, ");
  const int digits = host ? 1 : 3;
  report.Add("format", ToString(options.format),
             absl::StrCat("head_dim ", flags.head_dim, ", ", host ? threads : "", simd));
  report.Add("a tile", absl::StrCat(HumanNumber(result.median_us, digits), " us"),
             absl::StrCat("K and V, ", host ? "one thread; " : "of a large call; ",
                          Spread(result.us_per_tile, digits)));
  report.Add("  bound", absl::StrCat(HumanNumber(result.bound_us, digits), " us"),
             host ? "the passes of the normalization alone" : "its bytes at the speed of memcpy");
  report.Add("encode", absl::StrCat(HumanNumber(result.gb_per_s, 2), " GB/s"),
             host ? "16-bit input, all threads" : "16-bit input");
  report.Add("  reference", absl::StrCat(HumanNumber(result.reference_gb_per_s, 3), " GB/s"),
             "one thread of the host");
  report.Add("  memcpy", absl::StrCat(HumanNumber(result.memcpy_gb_per_s, 2), " GB/s"),
             host ? "all threads" : "within the device's memory");
  report.Print();
  return absl::OkStatus();
}

absl::Status BenchLookup(const CommonFlags& common, const LookupBenchOptions& options) {
  KVMILL_ASSIGN_OR_RETURN(const LookupBenchResult result, RunLookupBench(options));
  const double keys_per_s = result.keys_per_s[result.keys_per_s.size() / 2];
  if (common.json) {
    PrintJson({{"keys_per_s", keys_per_s},
               {"keys_per_s_min", result.keys_per_s.front()},
               {"keys_per_s_max", result.keys_per_s.back()},
               {"keys", options.keys},
               {"batch", options.batch},
               {"metadata_bytes_per_key", result.metadata_bytes_per_key}});
    return absl::OkStatus();
  }
  std::vector<double> millions;
  for (const double rate : result.keys_per_s) millions.push_back(rate / 1e6);
  Report report;
  report.Add("entries", HumanCount(options.keys),
             absl::StrCat(HumanNumber(result.metadata_bytes_per_key, 1), " bytes each, one page"));
  report.Add("lookup", absl::StrCat(HumanNumber(keys_per_s / 1e6, 2), " M keys/s"),
             absl::StrCat("one core, ", options.batch, " keys a batch; ", Spread(millions, 2)));
  report.Print();
  return absl::OkStatus();
}

}  // namespace

void AddBenchCommands(CommandLine& line) {
  CLI::App* bench = line.root().add_subcommand(
      "bench",
      "Measure encode, attention, lookup and disk on this machine, fetch and store of a daemon");
  bench->require_subcommand(1);

  auto encode = std::make_shared<EncodeFlags>();
  CLI::App* app = line.Add(*bench, "encode", "Speed of the encoder", kEncodeHelp,
                           [&line, encode] { return BenchEncode(line.flags(), *encode); });
  app->add_option("--format", encode->format, std::string(kFormatHelp))
      ->type_name("FORMAT")
      ->capture_default_str();
  app->add_option("--head-dim", encode->head_dim, "64, 128 or 256")->capture_default_str();
  app->add_option("--threads", encode->threads, "Threads")
      ->check(CLI::Range(1u, 1024u))
      ->capture_default_str();
  app->add_option("--repetitions", encode->repetitions, "Measurements of about 50 ms")
      ->check(CLI::Range(1u, 10000u))
      ->capture_default_str();
  app->add_option("--simd", encode->simd, "Level to use, as AVX2 (default: the best)")
      ->type_name("LEVEL");
  app->add_option("--algorithm", encode->algorithm, "kvarn or refined")
      ->check(CLI::IsMember({"kvarn", "refined"}))
      ->capture_default_str();
  app->add_option("--device", encode->device, "host, cuda (the first GPU) or cuda:N")
      ->check(CheckDeviceFlag)
      ->capture_default_str();

  auto lookup = std::make_shared<LookupBenchOptions>();
  app = line.Add(*bench, "lookup", "Speed of the index", kLookupHelp,
                 [&line, lookup] { return BenchLookup(line.flags(), *lookup); });
  app->add_option("--keys", lookup->keys, "Blocks in the index")
      ->check(CLI::Range(1u, 1u << 30))
      ->capture_default_str();
  app->add_option("--batch", lookup->batch, "Keys of one lookup")
      ->check(CLI::Range(1u, 32768u))
      ->capture_default_str();

  AddBenchAttention(line, *bench);
  AddBenchData(line, *bench);
  AddBenchDisk(line, *bench);
}

}  // namespace kvmill::cli
