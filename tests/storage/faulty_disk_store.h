// A DiskStore in memory that keeps the contract and can be told to break it: the next writes fail,
// the disk is full or slow, reads come back flipped or short, and a crash forgets what was not
// flushed.
#ifndef KVMILL_TESTS_STORAGE_FAULTY_DISK_STORE_H_
#define KVMILL_TESTS_STORAGE_FAULTY_DISK_STORE_H_

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_format.h"
#include "storage/core/mutex.h"
#include "storage/disk_keys.h"
#include "storage/disk_store.h"

namespace kvmill {

// Thread-safe, faults included: they may be set while calls run.
class FaultyDiskStore : public DiskStore {
 public:
  // Counted down by each call of that kind: at 1 the call fails with UNAVAILABLE, 0 is off.
  std::atomic<int> fail_write{0};
  std::atomic<int> fail_flush{0};
  std::atomic<int> fail_read{0};
  std::atomic<bool> full{false};          // Write and Flush answer RESOURCE_EXHAUSTED.
  std::atomic<bool> flip_read{false};     // Read flips one bit in the middle of its first page.
  std::atomic<bool> short_read{false};    // Read answers DATA_LOSS, as for a page that was cut.
  std::atomic<bool> hold_writes{false};   // While set each Write waits, for a minute at most.
  std::atomic<bool> hold_removes{false};  // The same for each Remove.
  std::atomic<int> write_ms{0};           // How long each call takes at least.
  std::atomic<int> read_ms{0};
  std::atomic<int> flush_ms{0};
  std::atomic<int> remove_ms{0};
  std::atomic<std::uint64_t> capacity_bytes{std::uint64_t{1} << 40};

  // How often each call was made.
  std::atomic<std::uint64_t> writes{0};
  std::atomic<std::uint64_t> reads{0};
  std::atomic<std::uint64_t> flushes{0};
  std::atomic<std::uint64_t> removes{0};

  // Runs once, in the next Flush, before it does anything.
  void InNextFlush(std::function<void()> meanwhile) {
    MutexLock lock(mutex_);
    in_next_flush_ = std::move(meanwhile);
  }

  // The process dies: what no Flush covered is gone.
  void Crash() {
    MutexLock lock(mutex_);
    blocks_ = durable_blocks_;
  }

  // The cap drops these blocks.
  void Evict(absl::Span<const DiskBlockId> ids) {
    EvictedCallback callback;
    {
      MutexLock lock(mutex_);
      for (const DiskBlockId& id : ids) {
        evicted_blocks_ += blocks_.erase(EncodeMetaKey(id));
        durable_blocks_.erase(EncodeMetaKey(id));
      }
      callback = callback_;
    }
    if (callback) callback(ids);
  }

  void SetEvictedCallback(EvictedCallback callback) override {
    MutexLock lock(mutex_);
    callback_ = std::move(callback);
  }

  void SetKeepAdvice(KeepAdviceCallback advice) override {
    MutexLock lock(mutex_);
    advice_ = std::move(advice);
  }
  // What the store advises now.
  KeepAdvice Advice(const DiskBlockId& id) {
    KeepAdviceCallback advice;
    {
      MutexLock lock(mutex_);
      advice = advice_;
    }
    return advice ? advice(id) : KeepAdvice::kNone;
  }

  absl::Status Write(const DiskBlockMeta& meta,
                     absl::Span<const absl::Span<const std::byte>> pages) override {
    writes.fetch_add(1);
    for (int i = 0; i < 60'000 && hold_writes; ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    Sleep(write_ms);
    if (Fails(fail_write)) return absl::UnavailableError("write: told to fail");
    if (pages.empty() || pages.size() != meta.page_bytes.size()) {
      return absl::InvalidArgumentError("pages and page lengths differ");
    }
    Block block{.meta = meta, .pages = {}};
    block.meta.epoch = 1;
    std::uint64_t bytes = 0;
    for (std::size_t i = 0; i < pages.size(); ++i) {
      if (pages[i].empty() || pages[i].size() != meta.page_bytes[i]) {
        return absl::InvalidArgumentError(absl::StrFormat("page %d has another length", i));
      }
      block.pages.emplace_back(pages[i].begin(), pages[i].end());
      bytes += pages[i].size();
    }
    MutexLock lock(mutex_);
    const std::string key = EncodeMetaKey(meta.id);
    if (blocks_.contains(key)) return absl::AlreadyExistsError("block is on disk");
    if (full || UsedLocked() + bytes > capacity_bytes) {
      return absl::ResourceExhaustedError(
          absl::StrFormat("disk is full: %d bytes, cap %d", UsedLocked(), capacity_bytes.load()));
    }
    blocks_.emplace(key, std::move(block));
    return absl::OkStatus();
  }

  absl::Status Flush() override {
    flushes.fetch_add(1);
    std::function<void()> meanwhile;
    {
      MutexLock lock(mutex_);
      meanwhile = std::exchange(in_next_flush_, nullptr);
    }
    if (meanwhile) meanwhile();
    Sleep(flush_ms);
    const bool fails = Fails(fail_flush);
    MutexLock lock(mutex_);
    if (fails || full) ++failed_flushes_;
    if (fails) return absl::UnavailableError("flush: told to fail");
    if (full) return absl::ResourceExhaustedError("flush: disk is full");
    durable_blocks_ = blocks_;
    return absl::OkStatus();
  }

  absl::StatusOr<DiskBlockMeta> Find(const DiskBlockId& id) override {
    MutexLock lock(mutex_);
    const auto it = blocks_.find(EncodeMetaKey(id));
    if (it == blocks_.end()) return absl::NotFoundError("no such block");
    return it->second.meta;
  }

  absl::Status Read(const DiskBlockId& id, std::size_t first_page,
                    absl::Span<const absl::Span<std::byte>> out) override {
    reads.fetch_add(1);
    Sleep(read_ms);
    if (Fails(fail_read)) return absl::UnavailableError("read: told to fail");
    MutexLock lock(mutex_);
    const auto it = blocks_.find(EncodeMetaKey(id));
    if (it == blocks_.end()) return absl::NotFoundError("no such block");
    if (short_read) return absl::DataLossError("page 0: told to be short");
    for (std::size_t i = 0; i < out.size(); ++i) {
      if (first_page + i >= it->second.pages.size() ||
          out[i].size() != it->second.pages[first_page + i].size()) {
        return absl::DataLossError(absl::StrFormat("page %d has another length", first_page + i));
      }
      const std::vector<std::byte>& page = it->second.pages[first_page + i];
      std::copy(page.begin(), page.end(), out[i].begin());
    }
    if (flip_read && !out.empty()) out[0][out[0].size() / 2] ^= std::byte{1};
    return absl::OkStatus();
  }

  absl::Status Remove(absl::Span<const DiskBlockId> ids) override {
    removes.fetch_add(1);
    for (int i = 0; i < 60'000 && hold_removes; ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    Sleep(remove_ms);
    MutexLock lock(mutex_);
    for (const DiskBlockId& id : ids) blocks_.erase(EncodeMetaKey(id));
    return absl::OkStatus();
  }

  absl::Status Scan(absl::FunctionRef<bool(const DiskBlockMeta&)> visit) override {
    std::vector<DiskBlockMeta> metas;
    {
      MutexLock lock(mutex_);
      for (const auto& [key, block] : blocks_) metas.push_back(block.meta);
    }
    for (const DiskBlockMeta& meta : metas) {
      if (!visit(meta)) break;
    }
    return absl::OkStatus();
  }

  absl::Status PutNamespace(const NamespaceRecord& record) override {
    MutexLock lock(mutex_);
    if (full) return absl::ResourceExhaustedError("namespace: disk is full");
    namespaces_[record.name] = record.encoding;
    return absl::OkStatus();
  }

  absl::StatusOr<std::vector<NamespaceRecord>> Namespaces() override {
    MutexLock lock(mutex_);
    std::vector<NamespaceRecord> records;
    for (const auto& [name, encoding] : namespaces_) {
      records.push_back({.name = name, .encoding = encoding});
    }
    return records;
  }

  Stats stats() const override {
    MutexLock lock(mutex_);
    return {.used_bytes = UsedLocked(),
            .capacity_bytes = capacity_bytes,
            .block_count = blocks_.size(),
            .evicted_blocks = evicted_blocks_,
            .reinserted_blocks = 0,
            .failed_flushes = failed_flushes_};
  }

 private:
  struct Block {
    DiskBlockMeta meta;
    std::vector<std::vector<std::byte>> pages;
  };

  static bool Fails(std::atomic<int>& countdown) {
    int value = countdown.load();
    while (value > 0 && !countdown.compare_exchange_weak(value, value - 1)) {
    }
    return value == 1;
  }
  static void Sleep(const std::atomic<int>& milliseconds) {
    if (milliseconds > 0) std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds));
  }
  std::uint64_t UsedLocked() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    std::uint64_t bytes = 0;
    for (const auto& [key, block] : blocks_) {
      for (const std::vector<std::byte>& page : block.pages) bytes += page.size();
    }
    return bytes;
  }

  mutable Mutex mutex_;
  std::map<std::string, Block> blocks_ ABSL_GUARDED_BY(mutex_);
  std::map<std::string, Block> durable_blocks_ ABSL_GUARDED_BY(mutex_);
  std::map<std::string, std::string> namespaces_ ABSL_GUARDED_BY(mutex_);
  std::uint64_t evicted_blocks_ ABSL_GUARDED_BY(mutex_) = 0;
  std::uint64_t failed_flushes_ ABSL_GUARDED_BY(mutex_) = 0;
  EvictedCallback callback_ ABSL_GUARDED_BY(mutex_);
  KeepAdviceCallback advice_ ABSL_GUARDED_BY(mutex_);
  std::function<void()> in_next_flush_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace kvmill

#endif  // KVMILL_TESTS_STORAGE_FAULTY_DISK_STORE_H_
