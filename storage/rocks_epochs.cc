#include "storage/rocks_epochs.h"

#include <algorithm>
#include <chrono>
#include <iterator>
#include <utility>

#include "absl/strings/str_format.h"
#include "storage/core/check.h"
#include "storage/core/status_macros.h"

namespace kvmill {
namespace {

constexpr std::uint8_t kNeverRead = 0;

}  // namespace

RocksEpochs::RocksEpochs(Options options) : options_(std::move(options)) {}

void RocksEpochs::Census::Add(std::uint64_t block_number) {
  first_block_number = block_count == 0 ? block_number : std::min(first_block_number, block_number);
  last_block_number = std::max(last_block_number, block_number);
  ++block_count;
}

void RocksEpochs::AddEpoch(std::uint64_t epoch, ColumnFamily family, std::uint64_t file_bytes,
                           const Census& census) {
  MutexLock lock(mutex_);
  KVMILL_CHECK(epochs_.empty() || epochs_.rbegin()->first < epoch);
  if (!epochs_.empty()) sealed_bytes_ += epochs_.rbegin()->second.bytes;
  Epoch entry{.family = std::move(family), .bytes = file_bytes, .block_count = census.block_count};
  if (census.block_count > 0) {
    entry.first_block_number = census.first_block_number;
    entry.last_read.resize(census.last_block_number - census.first_block_number + 1, kNeverRead);
    next_block_number_ = std::max(next_block_number_, census.last_block_number + 1);
  }
  epochs_.emplace(epoch, std::move(entry));
}

absl::Status RocksEpochs::Start() {
  const std::uint64_t other_bytes = options_.other_bytes();
  {
    MutexLock lock(mutex_);
    other_bytes_ = other_bytes;
    reinsert_left_bytes_ = options_.reinsert_bytes;
    if (!epochs_.empty()) return absl::OkStatus();
    beginning_ = true;
  }
  return BeginEpoch(1);
}

bool RocksEpochs::MustDropLocked() const {
  return epochs_.size() > 1 &&
         sealed_bytes_ + options_.epoch_bytes + other_bytes_ > options_.capacity_bytes;
}

absl::StatusOr<RocksEpochs::Place> RocksEpochs::Acquire(std::uint64_t bytes, bool reinsert) {
  const auto deadline =
      std::chrono::steady_clock::now() + std::chrono::milliseconds(options_.wait_ms);
  while (true) {
    std::uint64_t next_epoch = 0;
    {
      MutexLock lock(mutex_);
      while (true) {
        if (stopped_) return absl::UnavailableError("disk tier: closing");
        auto& [number, newest] = *epochs_.rbegin();
        if (reinsert && reinsert_left_bytes_ < bytes) {
          return absl::ResourceExhaustedError("disk tier: enough was carried over");
        }
        const bool must_drop = MustDropLocked();
        const std::uint64_t kept_bytes = must_drop && !reinsert ? reinsert_left_bytes_ : 0;
        if (newest.bytes + bytes + kept_bytes <= options_.epoch_bytes) {
          newest.bytes += bytes;
          ++newest.writers;
          if (newest.last_read.empty()) newest.first_block_number = next_block_number_;
          newest.last_read.resize(next_block_number_ - newest.first_block_number + 1, kNeverRead);
          if (reinsert) reinsert_left_bytes_ -= bytes;
          return Place{.epoch = number,
                       .block_number = next_block_number_++,
                       .bytes = bytes,
                       .family = newest.family};
        }
        if (reinsert) return absl::ResourceExhaustedError("disk tier: newest epoch is full");
        if (!must_drop && !beginning_) {
          beginning_ = true;
          next_epoch = number + 1;
          break;
        }
        const auto left = deadline - std::chrono::steady_clock::now();
        if (left <= std::chrono::nanoseconds(0)) {
          return absl::ResourceExhaustedError(absl::StrFormat(
              "disk tier: oldest epoch not dropped within %d ms; sealed epochs %d bytes, cap %d "
              "bytes",
              options_.wait_ms, sealed_bytes_, options_.capacity_bytes));
        }
        changed_.WaitFor(mutex_, left);
      }
    }
    KVMILL_RETURN_IF_ERROR(BeginEpoch(next_epoch));
  }
}

absl::Status RocksEpochs::BeginEpoch(std::uint64_t epoch) {
  absl::StatusOr<ColumnFamily> family = options_.begin(epoch);
  const std::uint64_t other_bytes = options_.other_bytes();
  MutexLock lock(mutex_);
  beginning_ = false;
  changed_.NotifyAll();
  if (!family.ok()) return family.status();
  if (!epochs_.empty()) sealed_bytes_ += epochs_.rbegin()->second.bytes;
  other_bytes_ = other_bytes;
  reinsert_left_bytes_ = options_.reinsert_bytes;
  epochs_.emplace(epoch, Epoch{.family = *std::move(family)});
  return absl::OkStatus();
}

void RocksEpochs::Complete(const Place& place, bool written) {
  MutexLock lock(mutex_);
  Epoch& epoch = epochs_.at(place.epoch);  // An epoch with writers is never dropped.
  --epoch.writers;
  if (written) {
    ++epoch.block_count;
  } else {
    epoch.bytes -= place.bytes;
    if (place.epoch != epochs_.rbegin()->first) sealed_bytes_ -= place.bytes;
  }
  if (place.epoch != epochs_.rbegin()->first) changed_.NotifyAll();
}

ColumnFamily RocksEpochs::Family(std::uint64_t epoch) const {
  MutexLock lock(mutex_);
  const auto it = epochs_.find(epoch);
  return it == epochs_.end() ? nullptr : it->second.family;
}

std::vector<ColumnFamily> RocksEpochs::Families() const {
  MutexLock lock(mutex_);
  std::vector<ColumnFamily> families;
  for (const auto& [number, epoch] : epochs_) families.push_back(epoch.family);
  return families;
}

absl::flat_hash_set<std::uint64_t> RocksEpochs::Numbers() const {
  MutexLock lock(mutex_);
  absl::flat_hash_set<std::uint64_t> numbers;
  for (const auto& [number, epoch] : epochs_) numbers.insert(number);
  return numbers;
}

void RocksEpochs::Touch(std::uint64_t epoch, std::uint64_t block_number) {
  MutexLock lock(mutex_);
  const auto it = epochs_.find(epoch);
  if (it == epochs_.end()) return;
  const std::uint64_t index = block_number - it->second.first_block_number;
  if (index >= it->second.last_read.size()) return;
  const std::uint64_t age = epochs_.rbegin()->first - epoch;
  it->second.last_read[index] = static_cast<std::uint8_t>(std::min<std::uint64_t>(age + 1, 255));
}

void RocksEpochs::Removed(std::uint64_t epoch) {
  MutexLock lock(mutex_);
  const auto it = epochs_.find(epoch);
  if (it == epochs_.end()) return;
  --it->second.block_count;
  if (it->second.block_count == 0) changed_.NotifyAll();
}

std::optional<std::uint32_t> RocksEpochs::EpochsSinceRead(std::uint64_t epoch,
                                                          std::uint64_t block_number) const {
  MutexLock lock(mutex_);
  const auto it = epochs_.find(epoch);
  if (it == epochs_.end()) return std::nullopt;
  const std::uint64_t index = block_number - it->second.first_block_number;
  if (index >= it->second.last_read.size()) return std::nullopt;
  const std::uint8_t last_read = it->second.last_read[index];
  if (last_read == kNeverRead) return std::nullopt;
  const std::uint64_t age = epochs_.rbegin()->first - (epoch + last_read - 1);
  if (age > options_.reinsert_window_epochs) return std::nullopt;
  return static_cast<std::uint32_t>(age);
}

std::map<std::uint64_t, RocksEpochs::Epoch>::iterator RocksEpochs::DoomedLocked() {
  const auto newest = std::prev(epochs_.end());
  // One in which nothing lives any more costs nobody anything: before the oldest, whoever's that
  // is.
  for (auto it = epochs_.begin(); it != newest; ++it) {
    if (it->second.block_count == 0 && it->second.writers == 0) return it;
  }
  if (MustDropLocked() && epochs_.begin()->second.writers == 0) return epochs_.begin();
  return epochs_.end();
}

std::optional<RocksEpochs::Doomed> RocksEpochs::WaitForDoomed() {
  MutexLock lock(mutex_);
  while (!stopped_) {
    const auto it = DoomedLocked();
    if (it != epochs_.end()) return Doomed{.epoch = it->first, .family = it->second.family};
    changed_.Wait(mutex_);
  }
  return std::nullopt;
}

void RocksEpochs::Dropped(std::uint64_t epoch) {
  ColumnFamily family;  // Its files are deleted with the last owner: not under the lock.
  const std::uint64_t other_bytes = options_.other_bytes();
  MutexLock lock(mutex_);
  const auto it = epochs_.find(epoch);
  KVMILL_CHECK(it != epochs_.end() && it != std::prev(epochs_.end()) && it->second.writers == 0);
  sealed_bytes_ -= it->second.bytes;
  other_bytes_ = other_bytes;
  family = std::move(it->second.family);
  epochs_.erase(it);
  changed_.NotifyAll();
}

void RocksEpochs::Pause(std::uint32_t milliseconds) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::milliseconds(milliseconds);
  MutexLock lock(mutex_);
  while (!stopped_) {
    const auto left = deadline - std::chrono::steady_clock::now();
    if (left <= std::chrono::nanoseconds(0)) return;
    changed_.WaitFor(mutex_, left);
  }
}

bool RocksEpochs::stopped() const {
  MutexLock lock(mutex_);
  return stopped_;
}

void RocksEpochs::Stop() {
  MutexLock lock(mutex_);
  stopped_ = true;
  changed_.NotifyAll();
}

}  // namespace kvmill
