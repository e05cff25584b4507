// bench disk: how fast the disk tier is on this machine, without a daemon.
#include <unistd.h>

#include <memory>
#include <string>

#include "absl/strings/str_cat.h"
#include "client/cli/commands.h"
#include "client/cli/human.h"
#include "client/cli/output.h"
#include "storage/core/status_macros.h"
#include "storage/disk_benchmark.h"

namespace kvmill::cli {
namespace {

constexpr const char* kDiskHelp =
    "Writes blocks through the disk tier into a new folder of --dir, flushes, opens it again with\n"
    "nothing cached, and reads every block once in random order. 1 GB = 1e9 bytes of pages. The\n"
    "folder is removed afterwards. With --encrypt its files are encrypted with a key of this run.\n"
    "\n"
    "Example:\n"
    "  kvmill bench disk --bytes 2GiB --dir /var/lib/kvmill\n";

struct DiskFlags {
  std::uint64_t bytes = std::uint64_t{1} << 30;
  std::string directory = ".";
  std::uint32_t threads = 1;
  bool encrypt = false;
};

absl::Status BenchDisk(const CommonFlags& common, const DiskFlags& flags) {
  DiskBenchmarkOptions options;
  options.directory = absl::StrCat(flags.directory, "/kvmill-bench-", getpid());
  options.bytes = flags.bytes;
  options.read_threads = flags.threads;
  options.write_threads = flags.threads;
  options.encrypt = flags.encrypt;
  KVMILL_ASSIGN_OR_RETURN(const DiskBenchmarkResult result, RunDiskBenchmark(options));
  if (common.json) {
    PrintJson({{"write_gb_per_s", result.write_gb_per_s},
               {"read_gb_per_s", result.read_gb_per_s},
               {"open_s", result.open_s},
               {"scan_s", result.scan_s},
               {"blocks", result.block_count},
               {"encrypted", flags.encrypt}});
    return absl::OkStatus();
  }
  Report report;
  report.Add("blocks", HumanCount(result.block_count),
             absl::StrCat(HumanBytes(flags.bytes), " below ", flags.directory,
                          flags.encrypt ? ", encrypted" : ""));
  report.Add("write", absl::StrCat(HumanNumber(result.write_gb_per_s, 2), " GB/s"),
             "first write to the end of the flush");
  report.Add("read", absl::StrCat(HumanNumber(result.read_gb_per_s, 2), " GB/s"),
             "every block once, random order, nothing cached");
  report.Add("open", HumanSeconds(result.open_s),
             absl::StrCat("and ", HumanSeconds(result.scan_s), " to list the blocks"));
  report.Print();
  return absl::OkStatus();
}

}  // namespace

void AddBenchDisk(CommandLine& line, CLI::App& bench) {
  auto disk = std::make_shared<DiskFlags>();
  CLI::App* app = line.Add(bench, "disk", "Speed of the disk tier", kDiskHelp,
                           [&line, disk] { return BenchDisk(line.flags(), *disk); });
  AddBytes(*app, "--bytes", disk->bytes, "How much to write and read (default 1GiB)");
  app->add_option("--dir", disk->directory, "Where; a folder that is there")
      ->check(CLI::ExistingDirectory)
      ->type_name("DIR")
      ->capture_default_str();
  app->add_option("--threads", disk->threads, "Threads that write, and that read")
      ->check(CLI::Range(1u, 64u))
      ->capture_default_str();
  app->add_flag("--encrypt", disk->encrypt, "Encrypt the files");
}

}  // namespace kvmill::cli
