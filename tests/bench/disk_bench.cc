// One run of the disk tier's benchmark, as one line of JSON.
#include <malloc.h>

#include <cstdio>

#include "CLI/CLI.hpp"
#include "storage/disk_benchmark.h"

int main(int argc, char** argv) {
  kvmill::DiskBenchmarkOptions options;
  CLI::App app("One run of the disk tier's benchmark, as one line of JSON.");
  app.add_option("directory", options.directory)->required();
  app.add_option("bytes", options.bytes)->required();
  app.add_option("pages", options.pages_per_block, "Of a block")->capture_default_str();
  app.add_option("page_bytes", options.page_bytes)->capture_default_str();
  app.add_option("write_threads", options.write_threads)->capture_default_str();
  app.add_option("read_threads", options.read_threads)->capture_default_str();
  app.add_option("direct", options.direct_io, "0: through the page cache")->capture_default_str();
  app.add_option("memtable_bytes", options.memtable_bytes, "0: as in kvmilld")
      ->capture_default_str();
  app.add_flag("--encrypt", options.encrypt, "With a key of this run");
  CLI11_PARSE(app, argc, argv);
  // As in kvmilld: memory that was touched once is kept, since touching fresh pages is what costs.
  mallopt(M_MMAP_THRESHOLD, 32 << 20);
  mallopt(M_TRIM_THRESHOLD, 1 << 30);
  const auto result = kvmill::RunDiskBenchmark(options);
  if (!result.ok()) {
    std::fprintf(stderr, "%s\n", result.status().ToString().c_str());
    return 1;
  }
  std::printf(
      "{\"write_gb_per_s\":%.4f,\"read_gb_per_s\":%.4f,\"open_s\":%.4f,\"scan_s\":%.4f,"
      "\"blocks\":%llu}\n",
      result->write_gb_per_s, result->read_gb_per_s, result->open_s, result->scan_s,
      static_cast<unsigned long long>(result->block_count));
  return 0;
}
