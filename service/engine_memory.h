// An engine's memory in the daemon: what a registration describes, and the regions that the client
// shared: shared memory, mapped, or memory of the daemon's GPU, opened.
//
// Whoever reads holds the EngineMemory; with its last holder the mappings and openings go. What is
// in the pages may change at any moment: the other process writes there.
#ifndef KVMILL_SERVICE_ENGINE_MEMORY_H_
#define KVMILL_SERVICE_ENGINE_MEMORY_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/engine_geometry.h"
#include "storage/core/mutex.h"
#include "storage/device/device.h"
#include "storage/device_encoder.h"
#include "storage/tiered_store.h"

namespace kvmill {

// An allocation on a GPU of another process, opened to be read (service/device_regions.h), and who
// encodes from it, who outlives it. Constant; closed with its last owner.
struct DeviceAllocation {
  IpcHandle handle{};
  std::unique_ptr<const DeviceMemory> memory;
  DeviceEncoder* encoder = nullptr;
};

// Memory of another process, to be read. Constant; unmapped with its owner.
class SharedRegion {
 public:
  // Whether reading may make pages, which the kernel accounts to whoever touches them first.
  enum class Holes : std::uint8_t {
    kAllowed,
    kNone,  // All pages are there, and F_SEAL_FUTURE_WRITE keeps them: nobody can punch holes.
  };
  // `bytes` from `offset_bytes` on of the memory behind `fd`, which may be closed afterwards. Takes
  // nothing that the other process could make end this one: INVALID_ARGUMENT when it is no memfd of
  // ordinary pages, cannot be read, lacks F_SEAL_SHRINK, or is too small, and by `holes`.
  // RESOURCE_EXHAUSTED when it cannot be mapped. Never waits for the other process.
  static absl::StatusOr<std::unique_ptr<const SharedRegion>> Map(int fd, std::uint64_t offset_bytes,
                                                                 std::uint64_t bytes, Holes holes);
  // `bytes` from `offset_bytes` on of an allocation, whose owners are all regions in it.
  // INVALID_ARGUMENT when it ends before.
  static absl::StatusOr<std::unique_ptr<const SharedRegion>> In(
      std::shared_ptr<const DeviceAllocation> allocation, std::uint64_t offset_bytes,
      std::uint64_t bytes);
  ~SharedRegion();
  SharedRegion(const SharedRegion&) = delete;
  SharedRegion& operator=(const SharedRegion&) = delete;

  const std::byte* data() const { return data_; }
  std::uint64_t bytes() const { return bytes_; }
  EngineRegionKind kind() const {
    return allocation_ == nullptr ? EngineRegionKind::kMemfd : EngineRegionKind::kDeviceIpc;
  }
  // Of memory of a GPU, whose addresses data() has; null: the CPU reads it.
  DeviceEncoder* encoder() const { return allocation_ == nullptr ? nullptr : allocation_->encoder; }
  const std::shared_ptr<const DeviceAllocation>& allocation() const { return allocation_; }

 private:
  SharedRegion(std::byte* mapping, std::uint64_t lead_bytes, std::uint64_t bytes)
      : mapping_(mapping), data_(mapping + lead_bytes), bytes_(bytes) {}
  SharedRegion(std::shared_ptr<const DeviceAllocation> allocation, const std::byte* data,
               std::uint64_t bytes)
      : allocation_(std::move(allocation)), mapping_(nullptr), data_(data), bytes_(bytes) {}
  const std::shared_ptr<const DeviceAllocation> allocation_;  // Shared with its other regions.
  std::byte* const mapping_;                                  // Null: in an allocation.
  const std::byte* const data_;
  const std::uint64_t bytes_;
};

// Thread-safe.
class EngineMemory {
 public:
  // `geometry` passed CheckGeometry for the namespace.
  EngineMemory(NamespaceId namespace_id, const EngineGeometry& geometry)
      : namespace_id_(namespace_id), geometry_(geometry), regions_(geometry.regions.size()) {}

  NamespaceId namespace_id() const { return namespace_id_; }
  const EngineGeometry& geometry() const { return geometry_; }

  // Once a region. INVALID_ARGUMENT: there is no such region, or it has another size, or it was
  // registered as one of another kind; ALREADY_EXISTS.
  absl::Status Share(std::uint32_t region, std::unique_ptr<const SharedRegion>* memory);
  // Null when the region is not shared. Lives as long as this.
  const SharedRegion* shared(std::uint32_t region) const;
  // Of the regions that are shared, the allocation with this handle; null.
  std::shared_ptr<const DeviceAllocation> FindAllocation(const IpcHandle& handle) const;
  std::uint64_t shared_regions() const;
  std::uint64_t shared_bytes() const;

 private:
  const NamespaceId namespace_id_;
  const EngineGeometry geometry_;
  mutable Mutex mu_;
  std::vector<std::unique_ptr<const SharedRegion>> regions_ ABSL_GUARDED_BY(mu_);
  std::uint64_t shared_regions_ ABSL_GUARDED_BY(mu_) = 0;
  std::uint64_t shared_bytes_ ABSL_GUARDED_BY(mu_) = 0;
};

}  // namespace kvmill

#endif  // KVMILL_SERVICE_ENGINE_MEMORY_H_
