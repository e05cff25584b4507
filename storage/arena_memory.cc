#include "storage/arena_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <string>
#include <thread>

#include "absl/strings/str_cat.h"
#include "storage/core/memory_limit.h"
#include "storage/core/mutex.h"
#include "storage/core/status_macros.h"
#include "storage/page_pool.h"

namespace kvmill {
namespace {

// Large enough that threads rarely meet at the counter, small enough for a progress line.
constexpr std::size_t kPrefaultStepBytes = std::size_t{32} << 20;
constexpr unsigned kPrefaultThreadsMax = 16;
constexpr std::chrono::seconds kTellEvery{2};
// Where free memory is scattered every attempt costs milliseconds of moving pages about.
constexpr std::uint32_t kHugeRefusalsMax = 16;

absl::Status NoMemory(absl::string_view what, std::uint64_t bytes, int error) {
  std::string message =
      absl::StrCat(what, " of ", bytes, " bytes of host memory: ", std::strerror(error));
  if (error == EMFILE || error == ENFILE) {
    absl::StrAppend(&message, " (one file an arena: raise the limit of open files (ulimit -n ",
                    sysconf(_SC_OPEN_MAX), ") or take larger arenas)");
  }
  return absl::ResourceExhaustedError(message);
}

}  // namespace

ArenaMemory::ArenaMemory(const Options& options)
    : arena_bytes_(options.arena_bytes),
      prefault_(options.prefault),
      huge_pages_(options.huge_pages),
      pin_for_(options.pin_for),
      fds_(options.arena_count, -1),
      pinned_(options.arena_count, 0),
      huge_extents_(std::make_unique<std::atomic<std::uint32_t>[]>(options.arena_count)) {}

ArenaMemory::~ArenaMemory() {
  for (std::uint32_t arena = 0; arena < pinned_.size(); ++arena) Unpin(arena);
  if (reserved_ != nullptr) munmap(reserved_, fds_.size() * arena_bytes_ + kExtentBytes);
  for (int fd : fds_) {
    if (fd >= 0) close(fd);
  }
}

absl::StatusOr<std::unique_ptr<ArenaMemory>> ArenaMemory::Create(const Options& options) {
  const std::uint64_t total_bytes = std::uint64_t{options.arena_count} * options.arena_bytes;
  // Asked first: memory that is promised but not there ends in the out-of-memory killer.
  const std::uint64_t limit_bytes = MemoryLimitBytes();
  if (total_bytes > limit_bytes) {
    return absl::ResourceExhaustedError(
        absl::StrCat("page pool of ", total_bytes, " bytes: only ", limit_bytes,
                     " bytes of host memory are available to this process"));
  }
  std::unique_ptr<ArenaMemory> memory(new ArenaMemory(options));
  KVMILL_RETURN_IF_ERROR(memory->Reserve());
  for (std::uint32_t arena = 0; arena < options.arena_count; ++arena) {
    KVMILL_RETURN_IF_ERROR(memory->MapArena(arena));
  }
  if (options.prefault) {
    KVMILL_RETURN_IF_ERROR(memory->PrefaultAll(options.progress));
    if (options.huge_pages == HugePages::kOn && memory->huge_bytes() < total_bytes) {
      return absl::ResourceExhaustedError(absl::StrCat(
          memory->huge_bytes() / kExtentBytes, " of ", total_bytes / kExtentBytes,
          " huge pages (2 MiB) could be had: ", std::strerror(memory->huge_error()),
          " (free memory is scattered; or the kernel is older than Linux 6.1, or forbids them: "
          "/sys/kernel/mm/transparent_hugepage/shmem_enabled is deny)"));
    }
  }
  for (std::uint32_t arena = 0; arena < options.arena_count; ++arena) {
    KVMILL_RETURN_IF_ERROR(memory->Pin(arena));
  }
  return memory;
}

absl::Status ArenaMemory::Reserve() {
  const std::size_t bytes = fds_.size() * arena_bytes_;
  void* reserved = mmap(nullptr, bytes + kExtentBytes, PROT_NONE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (reserved == MAP_FAILED) return NoMemory("address range", bytes, errno);
  reserved_ = static_cast<std::byte*>(reserved);
  const std::uintptr_t start = reinterpret_cast<std::uintptr_t>(reserved);
  base_ = reserved_ + (kExtentBytes - start % kExtentBytes) % kExtentBytes;
  return absl::OkStatus();
}

absl::Status ArenaMemory::MapArena(std::uint32_t arena) {
  const int fd = memfd_create("kvmill-arena", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (fd < 0) return NoMemory("memfd_create for an arena", arena_bytes_, errno);
  fds_[arena] = fd;
  if (ftruncate(fd, static_cast<off_t>(arena_bytes_)) != 0) {
    return NoMemory("ftruncate of an arena", arena_bytes_, errno);
  }
  if (mmap(address(arena), arena_bytes_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0) ==
      MAP_FAILED) {
    return NoMemory("mmap of an arena", arena_bytes_, errno);
  }
  // Hints; without them everything works. Prompt data has no place in a core file.
  if (huge_pages_ != HugePages::kOff) madvise(address(arena), arena_bytes_, MADV_HUGEPAGE);
  madvise(address(arena), arena_bytes_, MADV_DONTDUMP);
  // After our own mapping, which stays writable. From here on it can be shared.
  if (fcntl(fd, F_ADD_SEALS, F_SEAL_FUTURE_WRITE | F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) !=
      0) {
    return absl::FailedPreconditionError(
        absl::StrCat("cannot seal shared memory (Linux 5.1 or later): ", std::strerror(errno)));
  }
  return absl::OkStatus();
}

void ArenaMemory::GatherHugePages(std::uint32_t arena, std::size_t offset_bytes,
                                  std::size_t bytes) {
  for (std::size_t i = 0; i < bytes; i += kExtentBytes) {
    if (huge_refusals_.load(std::memory_order_relaxed) >= kHugeRefusalsMax) return;
    const int error = GatherHugePage(address(arena) + offset_bytes + i);
    if (error == 0) {
      huge_extents_[arena].fetch_add(1, std::memory_order_relaxed);
      continue;
    }
    huge_error_.store(error, std::memory_order_relaxed);
    huge_refusals_.fetch_add(error == EINVAL ? kHugeRefusalsMax : 1, std::memory_order_relaxed);
  }
}

std::uint64_t ArenaMemory::huge_bytes() const {
  std::uint64_t extents = 0;
  for (std::size_t arena = 0; arena < fds_.size(); ++arena) {
    extents += huge_extents_[arena].load(std::memory_order_relaxed);
  }
  return extents * kExtentBytes;
}

absl::Status ArenaMemory::Prefault(std::uint32_t arena, std::size_t offset_bytes,
                                   std::size_t bytes) {
  std::byte* start = address(arena) + offset_bytes;
  if (huge_pages_ != HugePages::kOff) GatherHugePages(arena, offset_bytes, bytes);
  int result = 0;
  do {
    result = madvise(start, bytes, MADV_POPULATE_WRITE);
  } while (result != 0 && errno == EINTR);
  if (result == 0) return absl::OkStatus();
  if (errno != EINVAL) return NoMemory("prefault", bytes, errno);
  // Before Linux 5.14: allocate (fallocate fails where a touch would raise SIGBUS), then touch.
  if (fallocate(fd(arena), 0, static_cast<off_t>(offset_bytes), static_cast<off_t>(bytes)) != 0) {
    return NoMemory("fallocate", bytes, errno);
  }
  for (std::size_t i = 0; i < bytes; i += 4096) {
    *reinterpret_cast<volatile std::byte*>(start + i) = std::byte{0};
  }
  return absl::OkStatus();
}

absl::Status ArenaMemory::PrefaultAll(
    const std::function<void(std::uint64_t, std::uint64_t)>& progress) {
  const std::uint64_t total_bytes = fds_.size() * arena_bytes_;
  const std::uint64_t steps_per_arena =
      (arena_bytes_ + kPrefaultStepBytes - 1) / kPrefaultStepBytes;
  const std::uint64_t steps = steps_per_arena * fds_.size();
  std::atomic<std::uint64_t> next_step{0};
  std::atomic<std::uint64_t> done_bytes{0};  // For the progress line: any stale value is fine.

  Mutex mu;
  CondVar finished;
  unsigned running = static_cast<unsigned>(std::min<std::uint64_t>(
      {steps, kPrefaultThreadsMax, std::max(1u, std::thread::hardware_concurrency())}));
  absl::Status status;  // The first error. Guarded by mu, as is `running` once threads run.

  const auto work = [&] {
    absl::Status result;
    for (;;) {
      const std::uint64_t step = next_step.fetch_add(1, std::memory_order_relaxed);
      if (step >= steps) break;
      const std::size_t offset = step % steps_per_arena * kPrefaultStepBytes;
      const std::size_t bytes = std::min(kPrefaultStepBytes, arena_bytes_ - offset);
      result = Prefault(static_cast<std::uint32_t>(step / steps_per_arena), offset, bytes);
      if (!result.ok()) {
        next_step.store(steps, std::memory_order_relaxed);  // The others need not go on.
        break;
      }
      done_bytes.fetch_add(bytes, std::memory_order_relaxed);
    }
    MutexLock lock(mu);
    if (status.ok()) status = result;
    --running;
    finished.NotifyAll();
  };
  std::vector<std::thread> threads;
  const unsigned thread_count = running;
  for (unsigned i = 0; i < thread_count; ++i) threads.emplace_back(work);
  for (bool waiting = true; waiting;) {
    const auto tell = std::chrono::steady_clock::now() + kTellEvery;
    {
      MutexLock lock(mu);
      for (; running > 0; finished.WaitFor(mu, tell - std::chrono::steady_clock::now())) {
        if (std::chrono::steady_clock::now() >= tell) break;
      }
      waiting = running > 0;
    }
    if (progress) progress(done_bytes.load(std::memory_order_relaxed), total_bytes);
  }
  for (std::thread& thread : threads) thread.join();
  return status;
}

absl::Status ArenaMemory::Pin(std::uint32_t arena) {
  if (pin_for_ == nullptr) return absl::OkStatus();
  KVMILL_RETURN_IF_ERROR(pin_for_->Pin(absl::MakeSpan(address(arena), arena_bytes_)));
  pinned_[arena] = 1;
  return absl::OkStatus();
}

void ArenaMemory::Unpin(std::uint32_t arena) {
  if (pinned_[arena] == 0) return;
  pin_for_->Unpin(absl::MakeSpan(address(arena), arena_bytes_));
  pinned_[arena] = 0;
}

absl::Status ArenaMemory::Renew(std::uint32_t arena) {
  // Old memory goes first: at no time may the pool hold more than its budget.
  Unpin(arena);
  if (fds_[arena] >= 0) {
    // Mapping over the old memory unmaps it without leaving a hole that someone else's mmap could
    // get.
    if (mmap(address(arena), arena_bytes_, PROT_NONE,
             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0) == MAP_FAILED) {
      return NoMemory("unmap of an arena", arena_bytes_, errno);
    }
    close(fds_[arena]);
    fds_[arena] = -1;
  }
  huge_extents_[arena].store(0, std::memory_order_relaxed);
  huge_refusals_.store(0, std::memory_order_relaxed);  // Free memory is other memory by now.
  absl::Status status = MapArena(arena);
  if (status.ok() && prefault_) status = Prefault(arena, 0, arena_bytes_);
  if (status.ok()) status = Pin(arena);
  if (!status.ok() && fds_[arena] >= 0) {
    mmap(address(arena), arena_bytes_, PROT_NONE,
         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    close(fds_[arena]);
    fds_[arena] = -1;
  }
  return status;
}

}  // namespace kvmill
