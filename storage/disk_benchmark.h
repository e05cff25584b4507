// How fast the disk tier writes and reads on this machine's disk: what `kvmill bench disk` prints
// and tests/bench/disk_vs_fio.sh compares with fio.
#ifndef KVMILL_STORAGE_DISK_BENCHMARK_H_
#define KVMILL_STORAGE_DISK_BENCHMARK_H_

#include <cstddef>
#include <cstdint>
#include <string>

#include "absl/status/statusor.h"

namespace kvmill {

struct DiskBenchmarkOptions {
  std::string directory;    // Must not exist; removed afterwards.
  std::uint64_t bytes = 0;  // Of pages; rounded up to whole blocks.
  // Defaults: 36 layers, 8 KV heads, D 128, k4v2_g128: blocks of about 4 MB.
  std::size_t pages_per_block = 36;
  std::size_t page_bytes = 110912;
  std::size_t write_threads = 1;
  std::size_t read_threads = 1;
  bool direct_io = true;
  std::uint64_t memtable_bytes = 0;  // As in RocksDiskStoreOptions.
  bool encrypt = false;              // With a key of this run.
};

struct DiskBenchmarkResult {
  double write_gb_per_s = 0;  // First Write to the end of Flush. 1 GB = 1e9 bytes of pages.
  double read_gb_per_s = 0;   // Every block once, whole, in random order, nothing cached.
  double open_s = 0;          // Of the store that holds all blocks.
  double scan_s = 0;
  std::uint64_t block_count = 0;
};

// Writes incompressible blocks through a RocksDiskStore, flushes, opens it again with empty caches,
// and reads. INVALID_ARGUMENT for bad options; otherwise what the store says; DATA_LOSS when a page
// read back is not the one written.
absl::StatusOr<DiskBenchmarkResult> RunDiskBenchmark(const DiskBenchmarkOptions& options);

}  // namespace kvmill

#endif  // KVMILL_STORAGE_DISK_BENCHMARK_H_
