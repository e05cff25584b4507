// disk_bench DIRECTORY BYTES [PAGES PAGE_BYTES [WRITE_THREADS READ_THREADS [DIRECT [MEMTABLE]]]]
// One run of the disk tier's benchmark, as one line of JSON.
#include <malloc.h>

#include <cstdio>
#include <cstdlib>

#include "storage/disk_benchmark.h"

int main(int argc, char** argv) {
  if (argc < 3) {
    std::fprintf(stderr,
                 "usage: %s DIRECTORY BYTES [PAGES PAGE_BYTES [WRITE_THREADS READ_THREADS [DIRECT "
                 "[MEMTABLE_BYTES]]]]\n",
                 argv[0]);
    return 2;
  }
  // As in kvmilld: memory that was touched once is kept, since touching fresh pages is what costs.
  mallopt(M_MMAP_THRESHOLD, 32 << 20);
  mallopt(M_TRIM_THRESHOLD, 1 << 30);
  const auto number = [&](int index, std::size_t fallback) -> std::size_t {
    return argc > index ? std::strtoull(argv[index], nullptr, 10) : fallback;
  };
  kvmill::DiskBenchmarkOptions options;
  options.directory = argv[1];
  options.bytes = number(2, 0);
  options.pages_per_block = number(3, options.pages_per_block);
  options.page_bytes = number(4, options.page_bytes);
  options.write_threads = number(5, options.write_threads);
  options.read_threads = number(6, options.read_threads);
  options.direct_io = number(7, 1) != 0;
  options.memtable_bytes = number(8, 0);
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
