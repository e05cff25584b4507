#include "client/arena_mappings.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "storage/core/status_macros.h"

namespace kvmill {

namespace {

constexpr std::size_t kHugePageBytes = std::size_t{2} << 20;

absl::Status WrongSize(std::uint64_t bytes, std::uint64_t want) {
  return absl::FailedPreconditionError(
      absl::StrCat("arena of ", bytes, " bytes, the daemon spoke of ", want));
}

// Memory that can only be read, and that a child does not have.
absl::StatusOr<const std::byte*> MapToRead(int fd, std::uint64_t bytes) {
  struct stat info {};
  if (fstat(fd, &info) != 0) return absl::ErrnoToStatus(errno, "fstat of an arena");
  if (bytes == 0 || static_cast<std::uint64_t>(info.st_size) != bytes) {
    return WrongSize(static_cast<std::uint64_t>(info.st_size), bytes);
  }
  const int seals = fcntl(fd, F_GET_SEALS);
  if (seals < 0 || (seals & F_SEAL_SHRINK) == 0) {
    return absl::FailedPreconditionError("an arena that could shrink under its readers");
  }
  // Where huge pages of the daemon's are huge pages here, too: aligned as they are.
  const std::size_t reserved_bytes = bytes + kHugePageBytes;
  void* reserved =
      mmap(nullptr, reserved_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (reserved == MAP_FAILED) {
    return absl::ErrnoToStatus(errno, absl::StrCat("addresses for an arena of ", bytes, " bytes"));
  }
  auto* const begin = static_cast<std::byte*>(reserved);
  std::byte* const aligned =
      begin + (kHugePageBytes - reinterpret_cast<std::uintptr_t>(begin) % kHugePageBytes);
  void* data = mmap(aligned, bytes, PROT_READ, MAP_SHARED | MAP_FIXED, fd, 0);
  const int map_error = errno;
  munmap(begin, static_cast<std::size_t>(aligned - begin));
  if (data == MAP_FAILED) {
    munmap(aligned, reserved_bytes - static_cast<std::size_t>(aligned - begin));
    return absl::ErrnoToStatus(map_error, absl::StrCat("mmap of an arena of ", bytes, " bytes"));
  }
  const auto page_bytes = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  std::byte* const end = aligned + (bytes + page_bytes - 1) / page_bytes * page_bytes;
  if (end < begin + reserved_bytes) {
    munmap(end, static_cast<std::size_t>(begin + reserved_bytes - end));
  }
  // A child must not look at memory whose leases are its parent's; prompt data has no place in a
  // core file.
  if (madvise(data, bytes, MADV_DONTFORK) != 0) {
    const int error = errno;
    munmap(data, bytes);
    return absl::ErrnoToStatus(error, "madvise of an arena");
  }
  madvise(data, bytes, MADV_DONTDUMP);
  return static_cast<const std::byte*>(data);
}

}  // namespace

absl::StatusOr<std::shared_ptr<const ArenaMapping>> ArenaMapping::Create(
    const DoorClient::ArenaMemory& memory, const MappedArenaInfo& arena) {
  if (memory.arena_bytes != arena.arena_bytes) {
    return WrongSize(memory.arena_bytes, arena.arena_bytes);
  }
  KVMILL_ASSIGN_OR_RETURN(const std::byte* mapped, MapToRead(memory.fd.get(), arena.arena_bytes));
  return std::shared_ptr<const ArenaMapping>(new ArenaMapping(mapped, arena.arena_bytes));
}

absl::StatusOr<std::shared_ptr<const ArenaMapping>> ArenaMapping::CreateOnDevice(
    const DoorClient::ArenaMemory& memory, const MappedArenaInfo& arena,
    std::shared_ptr<DeviceReader> reader) {
  if (memory.arena_bytes != arena.arena_bytes) {
    return WrongSize(memory.arena_bytes, arena.arena_bytes);
  }
  if (!memory.generations.valid()) {
    return absl::FailedPreconditionError("an arena of a GPU came without its generations");
  }
  KVMILL_ASSIGN_OR_RETURN(const std::byte* mapped,
                          MapToRead(memory.generations.get(), arena.generation_bytes));
  std::shared_ptr<ArenaMapping> mapping(new ArenaMapping(mapped, arena.generation_bytes));
  KVMILL_ASSIGN_OR_RETURN(mapping->imported_,
                          ImportedArena::Create(*reader, memory.fd.get(), arena.arena_bytes,
                                                {mapped, arena.generation_bytes}));
  mapping->data_ = mapping->imported_->address();
  mapping->reader_ = std::move(reader);
  return mapping;
}

ArenaMapping::ArenaMapping(const std::byte* mapped, std::uint64_t bytes)
    : mapped_(mapped), bytes_(bytes), pid_(getpid()) {}

ArenaMapping::~ArenaMapping() {
  // In a forked child something else may lie there, and the device is the parent's.
  if (getpid() != pid_) {
    static_cast<void>(imported_.release());
    return;
  }
  imported_ = nullptr;  // Which has pinned what is unmapped.
  munmap(const_cast<std::byte*>(mapped_), bytes_);
}

ArenaMappingPtr ArenaMappings::Find(const ArenaId& id) {
  MutexLock lock(mu_);
  const auto it = entries_.find(id);
  if (it == entries_.end()) return nullptr;
  it->second.used_at = std::chrono::steady_clock::now();
  return it->second.mapping;
}

ArenaMappingPtr ArenaMappings::Add(const ArenaId& id, ArenaMappingPtr mapping) {
  MutexLock lock(mu_);
  Entry& entry = entries_[id];
  if (entry.mapping == nullptr) entry.mapping = std::move(mapping);
  entry.used_at = std::chrono::steady_clock::now();
  return entry.mapping;
}

std::size_t ArenaMappings::DropIdle(std::chrono::steady_clock::time_point now) {
  std::vector<ArenaMappingPtr> dropped;  // Unmapped without the lock.
  MutexLock lock(mu_);
  for (auto it = entries_.begin(); it != entries_.end();) {
    if (it->second.mapping.use_count() > 1) it->second.used_at = now;
    if (now - it->second.used_at >= kIdleMax) {
      dropped.push_back(std::move(it->second.mapping));
      it = entries_.erase(it);
    } else {
      ++it;
    }
  }
  return entries_.size();
}

void ArenaMappings::Clear() {
  std::map<ArenaId, Entry> dropped;
  MutexLock lock(mu_);
  dropped.swap(entries_);
}

}  // namespace kvmill
