#include "service/engine_memory.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"

namespace kvmill {

absl::StatusOr<std::unique_ptr<const SharedRegion>> SharedRegion::Map(int fd,
                                                                      std::uint64_t offset_bytes,
                                                                      std::uint64_t bytes,
                                                                      Holes holes) {
  // Of an unknown file only its seals are asked: that never waits, whatever it is.
  struct stat info {};
  struct statfs file_system {};
  const int seals = fcntl(fd, F_GET_SEALS);
  // Pages of other file systems, huge ones among them, may be missing at the moment of a read.
  if (seals < 0 || fstat(fd, &info) != 0 || fstatfs(fd, &file_system) != 0 ||
      file_system.f_type != TMPFS_MAGIC) {
    return absl::InvalidArgumentError("shared memory must be a memfd of ordinary pages");
  }
  const int flags = fcntl(fd, F_GETFL);
  if (flags < 0 || (flags & O_ACCMODE) == O_WRONLY) {
    return absl::InvalidArgumentError(
        "shared memory whose descriptor is open for writing only: it must be readable");
  }
  if ((seals & F_SEAL_SHRINK) == 0) {
    return absl::InvalidArgumentError(
        "shared memory without F_SEAL_SHRINK: it could shrink while it is read");
  }
  std::uint64_t end = 0;
  if (bytes == 0 || __builtin_add_overflow(offset_bytes, bytes, &end) ||
      end > static_cast<std::uint64_t>(info.st_size)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "shared memory of ", info.st_size, " bytes, want ", bytes, " from ", offset_bytes, " on"));
  }
  if (holes == Holes::kNone) {
    if ((seals & F_SEAL_FUTURE_WRITE) == 0) {
      return absl::InvalidArgumentError(
          "shared memory without F_SEAL_FUTURE_WRITE: a user other than the daemon's could punch "
          "holes, and reading would fill them at the daemon's cost");
    }
    // Not SEEK_HOLE, which waits for a lock that whoever writes to the file holds.
    constexpr std::uint64_t kBlockBytes = 512;
    const std::uint64_t present = static_cast<std::uint64_t>(info.st_blocks) * kBlockBytes;
    if (present < static_cast<std::uint64_t>(info.st_size)) {
      return absl::InvalidArgumentError(absl::StrCat(
          "shared memory of ", info.st_size, " bytes, ", present, " of them allocated: a user ",
          "other than the daemon's allocates all before it is shared (fallocate)"));
    }
  }
  const auto page = static_cast<std::uint64_t>(sysconf(_SC_PAGESIZE));
  const std::uint64_t lead = offset_bytes % page;
  void* mapping = mmap(nullptr, lead + bytes, PROT_READ, MAP_SHARED, fd,
                       static_cast<off_t>(offset_bytes - lead));
  if (mapping == MAP_FAILED) {
    return absl::ResourceExhaustedError(
        absl::StrCat("mmap of ", bytes, " bytes of shared memory: ", std::strerror(errno)));
  }
  madvise(mapping, lead + bytes, MADV_DONTDUMP);
  return std::unique_ptr<const SharedRegion>(
      new SharedRegion(static_cast<std::byte*>(mapping), lead, bytes));
}

absl::StatusOr<std::unique_ptr<const SharedRegion>> SharedRegion::In(
    std::shared_ptr<const DeviceAllocation> allocation, std::uint64_t offset_bytes,
    std::uint64_t bytes) {
  const std::uint64_t all = allocation->memory->bytes();
  if (bytes == 0 || offset_bytes > all || bytes > all - offset_bytes) {
    return absl::InvalidArgumentError(absl::StrCat("memory of a GPU of ", all, " bytes, want ",
                                                   bytes, " from ", offset_bytes, " on"));
  }
  const std::byte* data = allocation->memory->address() + offset_bytes;
  return std::unique_ptr<const SharedRegion>(new SharedRegion(std::move(allocation), data, bytes));
}

SharedRegion::~SharedRegion() {
  if (mapping_ == nullptr) return;
  munmap(mapping_, static_cast<std::uint64_t>(data_ - mapping_) + bytes_);
}

absl::Status EngineMemory::Share(std::uint32_t region,
                                 std::unique_ptr<const SharedRegion>* memory) {
  if (region >= geometry_.regions.size()) {
    return absl::InvalidArgumentError(
        absl::StrCat("region ", region, ", want below ", geometry_.regions.size()));
  }
  if ((*memory)->bytes() != geometry_.regions[region].bytes) {
    return absl::InvalidArgumentError(absl::StrCat("region ", region, " of ", (*memory)->bytes(),
                                                   " bytes, it was registered with ",
                                                   geometry_.regions[region].bytes));
  }
  // Clients that do not say what it will be have nothing but shared memory.
  const EngineRegionKind registered = geometry_.regions[region].kind;
  const EngineRegionKind kind = (*memory)->kind();
  if (registered != kind &&
      !(registered == EngineRegionKind::kUnsaid && kind == EngineRegionKind::kMemfd)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "region ", region, " is ", kind == EngineRegionKind::kMemfd ? "a memfd" : "a GPU's memory",
        ", it was registered as kind ", static_cast<int>(registered)));
  }
  MutexLock lock(mu_);
  if (regions_[region] != nullptr) {
    return absl::AlreadyExistsError(absl::StrCat("region ", region, " is shared already"));
  }
  ++shared_regions_;
  shared_bytes_ += (*memory)->bytes();
  regions_[region] = std::move(*memory);
  return absl::OkStatus();
}

const SharedRegion* EngineMemory::shared(std::uint32_t region) const {
  MutexLock lock(mu_);
  return regions_[region].get();
}

std::shared_ptr<const DeviceAllocation> EngineMemory::FindAllocation(
    const IpcHandle& handle) const {
  MutexLock lock(mu_);
  for (const auto& region : regions_) {
    if (region == nullptr || region->allocation() == nullptr) continue;
    if (region->allocation()->handle == handle) return region->allocation();
  }
  return nullptr;
}

std::uint64_t EngineMemory::shared_regions() const {
  MutexLock lock(mu_);
  return shared_regions_;
}

std::uint64_t EngineMemory::shared_bytes() const {
  MutexLock lock(mu_);
  return shared_bytes_;
}

}  // namespace kvmill
