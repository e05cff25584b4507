#include "storage/disk_benchmark.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <functional>
#include <memory>
#include <numeric>
#include <random>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/types/span.h"
#include "storage/core/mutex.h"
#include "storage/core/status_macros.h"
#include "storage/rocks_disk_store.h"

namespace kvmill {
namespace {

using Seconds = std::chrono::duration<double>;

DiskBlockMeta MetaOf(std::uint64_t block, const DiskBenchmarkOptions& options) {
  DiskBlockMeta meta;
  meta.id.key = *BlockKey::FromBytes(absl::StrFormat("benchmark-block-%016x", block));
  meta.token_count = 128;
  meta.page_bytes.assign(options.pages_per_block, static_cast<std::uint32_t>(options.page_bytes));
  return meta;
}

// First bytes of every page: tells a page from all others.
void Stamp(std::uint64_t block, std::size_t page, std::byte* bytes) {
  const std::uint64_t stamp = block << 16 | page;
  std::memcpy(bytes, &stamp, sizeof(stamp));
}

// Runs `work(i)` for every i < count on `thread_count` threads; the first error ends it.
absl::Status ForEach(std::uint64_t count, std::size_t thread_count,
                     const std::function<std::function<absl::Status(std::uint64_t)>()>& worker) {
  std::atomic<std::uint64_t> next{0};
  std::atomic<bool> failed{false};
  Mutex mutex;
  absl::Status first;
  std::vector<std::thread> threads;
  for (std::size_t t = 0; t < thread_count; ++t) {
    threads.emplace_back([&] {
      const auto work = worker();
      for (std::uint64_t i = next++; i < count && !failed; i = next++) {
        absl::Status status = work(i);
        if (status.ok()) continue;
        MutexLock lock(mutex);
        if (!failed.exchange(true)) first = std::move(status);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return first;
}

// Files that were written through the page cache leave it; with direct I/O there is nothing to do.
void DropFromPageCache(const std::string& directory) {
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(directory, error)) {
    const int fd = open(entry.path().c_str(), O_RDONLY | O_CLOEXEC);
    if (fd < 0) continue;
    fdatasync(fd);
    posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
    close(fd);
  }
}

absl::StatusOr<DiskBenchmarkResult> Run(const DiskBenchmarkOptions& options) {
  const std::uint64_t block_bytes = options.pages_per_block * options.page_bytes;
  DiskBenchmarkResult result;
  result.block_count = (options.bytes + block_bytes - 1) / block_bytes;
  const double gigabytes = static_cast<double>(result.block_count * block_bytes) / 1e9;

  RocksDiskStoreOptions store_options;
  store_options.directory = options.directory;
  store_options.capacity_bytes =
      std::max(kDiskCapacityBytesMin * 4, 2 * result.block_count * block_bytes);
  store_options.memtable_bytes = options.memtable_bytes;
  store_options.direct_io = options.direct_io;
  if (options.encrypt) store_options.keys = EncryptionKeys::Random();
  KVMILL_ASSIGN_OR_RETURN(std::unique_ptr<RocksDiskStore> store,
                          RocksDiskStore::Open(store_options));

  // One block of random bytes, at another offset for every block: no two pages are equal.
  std::vector<std::byte> noise(2 * block_bytes);
  std::mt19937_64 random(1);
  for (std::size_t i = 0; i + 8 <= noise.size(); i += 8) {
    const std::uint64_t word = random();
    std::memcpy(noise.data() + i, &word, sizeof(word));
  }
  auto start = std::chrono::steady_clock::now();
  KVMILL_RETURN_IF_ERROR(ForEach(result.block_count, options.write_threads, [&] {
    return [&, bytes = noise](std::uint64_t block) mutable {
      const std::size_t shift = block * 4096 % block_bytes;
      std::vector<absl::Span<const std::byte>> pages;
      for (std::size_t page = 0; page < options.pages_per_block; ++page) {
        std::byte* at = bytes.data() + shift + page * options.page_bytes;
        Stamp(block, page, at);
        pages.emplace_back(at, options.page_bytes);
      }
      return store->Write(MetaOf(block, options), pages);
    };
  }));
  KVMILL_RETURN_IF_ERROR(store->Flush());
  result.write_gb_per_s = gigabytes / Seconds(std::chrono::steady_clock::now() - start).count();

  store.reset();
  DropFromPageCache(options.directory);
  start = std::chrono::steady_clock::now();
  KVMILL_ASSIGN_OR_RETURN(store, RocksDiskStore::Open(store_options));
  const auto opened = std::chrono::steady_clock::now();
  result.open_s = Seconds(opened - start).count();
  std::uint64_t scanned = 0;
  KVMILL_RETURN_IF_ERROR(store->Scan([&](const DiskBlockMeta&) {
    ++scanned;
    return true;
  }));
  result.scan_s = Seconds(std::chrono::steady_clock::now() - opened).count();
  if (scanned != result.block_count) {
    return absl::DataLossError(
        absl::StrFormat("found %d blocks, wrote %d", scanned, result.block_count));
  }

  std::vector<std::uint64_t> order(result.block_count);
  std::iota(order.begin(), order.end(), std::uint64_t{0});
  std::shuffle(order.begin(), order.end(), random);
  start = std::chrono::steady_clock::now();
  KVMILL_RETURN_IF_ERROR(ForEach(result.block_count, options.read_threads, [&] {
    return [&, bytes = std::vector<std::byte>(block_bytes)](std::uint64_t i) mutable {
      std::vector<absl::Span<std::byte>> out;
      for (std::size_t page = 0; page < options.pages_per_block; ++page) {
        out.emplace_back(bytes.data() + page * options.page_bytes, options.page_bytes);
      }
      absl::Status status = store->Read(MetaOf(order[i], options).id, 0, out);
      if (!status.ok()) return status;
      for (std::size_t page = 0; page < options.pages_per_block; ++page) {
        std::byte want[8];
        Stamp(order[i], page, want);
        if (std::memcmp(out[page].data(), want, sizeof(want)) != 0) {
          return absl::DataLossError(absl::StrFormat("block %d, page %d", order[i], page));
        }
      }
      return absl::OkStatus();
    };
  }));
  result.read_gb_per_s = gigabytes / Seconds(std::chrono::steady_clock::now() - start).count();
  return result;
}

}  // namespace

absl::StatusOr<DiskBenchmarkResult> RunDiskBenchmark(const DiskBenchmarkOptions& options) {
  if (options.bytes == 0 || options.pages_per_block == 0 || options.page_bytes < 8 ||
      options.write_threads == 0 || options.read_threads == 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        "disk benchmark: ", options.bytes, " bytes in blocks of ", options.pages_per_block,
        " pages of ", options.page_bytes, " bytes, ", options.write_threads, " writing and ",
        options.read_threads, " reading threads; none may be 0, pages have at least 8 bytes"));
  }
  std::error_code error;
  if (std::filesystem::exists(options.directory, error)) {
    return absl::InvalidArgumentError(
        absl::StrCat("disk benchmark: ", options.directory, " exists"));
  }
  absl::StatusOr<DiskBenchmarkResult> result = Run(options);
  std::filesystem::remove_all(options.directory, error);
  return result;
}

}  // namespace kvmill
