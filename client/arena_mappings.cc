#include "client/arena_mappings.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"

namespace kvmill {

absl::StatusOr<std::shared_ptr<const ArenaMapping>> ArenaMapping::Create(
    const DoorClient::ArenaMemory& memory, std::uint64_t arena_bytes) {
  struct stat info {};
  if (fstat(memory.fd.get(), &info) != 0) return absl::ErrnoToStatus(errno, "fstat of an arena");
  if (arena_bytes == 0 || memory.arena_bytes != arena_bytes ||
      static_cast<std::uint64_t>(info.st_size) != arena_bytes) {
    return absl::FailedPreconditionError(
        absl::StrCat("arena of ", info.st_size, " bytes, the daemon spoke of ", arena_bytes));
  }
  const int seals = fcntl(memory.fd.get(), F_GET_SEALS);
  if (seals < 0 || (seals & F_SEAL_SHRINK) == 0) {
    return absl::FailedPreconditionError("an arena that could shrink under its readers");
  }
  void* data = mmap(nullptr, arena_bytes, PROT_READ, MAP_SHARED, memory.fd.get(), 0);
  if (data == MAP_FAILED) {
    return absl::ErrnoToStatus(errno, absl::StrCat("mmap of an arena of ", arena_bytes, " bytes"));
  }
  // A child must not look at memory whose leases are its parent's; prompt data has no place in a
  // core file.
  if (madvise(data, arena_bytes, MADV_DONTFORK) != 0) {
    const int error = errno;
    munmap(data, arena_bytes);
    return absl::ErrnoToStatus(error, "madvise of an arena");
  }
  madvise(data, arena_bytes, MADV_DONTDUMP);
  return std::shared_ptr<const ArenaMapping>(
      new ArenaMapping(static_cast<const std::byte*>(data), arena_bytes));
}

ArenaMapping::ArenaMapping(const std::byte* data, std::uint64_t bytes)
    : data_(data), bytes_(bytes), pid_(getpid()) {}

ArenaMapping::~ArenaMapping() {
  // In a forked child something else may lie there.
  if (getpid() == pid_) munmap(const_cast<std::byte*>(data_), bytes_);
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
