// Host memory that can be handed to another process: a memfd, mapped here and sealed.
//
// Internal to storage/device. Immutable after construction.
#ifndef KVMILL_STORAGE_DEVICE_HOST_MEMORY_H_
#define KVMILL_STORAGE_DEVICE_HOST_MEMORY_H_

#include <cstddef>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "storage/device/device.h"
#include "storage/device/known_memory.h"

namespace kvmill {

// What device memory is aligned to, and a multiple of.
inline constexpr std::size_t kDeviceMemoryStep = std::size_t{2} << 20;

// INVALID_ARGUMENT for none, and for more than there are addresses.
absl::StatusOr<std::size_t> RoundUpDeviceMemory(std::size_t bytes);

// Whether every page of it is mapped.
bool IsMapped(absl::Span<const std::byte> memory);
// INVALID_ARGUMENT when it is not, for Device::Pin.
absl::Status CheckMapped(absl::string_view device, absl::Span<const std::byte> memory);

class HostMemory : public DeviceMemory {
 public:
  // All of it is there when this returns (nothing fails at the first touch). `known` is told of it
  // and outlives it.
  static absl::StatusOr<std::unique_ptr<HostMemory>> Allocate(std::size_t bytes,
                                                              absl::string_view name,
                                                              KnownMemory* known);
  // Only what cannot be made smaller, or be written by us.
  static absl::StatusOr<std::unique_ptr<HostMemory>> Import(int fd, std::size_t bytes,
                                                            KnownMemory* known,
                                                            MemoryUse use = MemoryUse::kImported);
  ~HostMemory() override;

  std::byte* address() const override { return address_; }
  std::size_t bytes() const override { return bytes_; }
  int fd() const override { return fd_; }

 private:
  HostMemory(std::size_t bytes, KnownMemory* known, MemoryUse use)
      : known_(known), use_(use), bytes_(bytes) {}
  absl::Status Reserve();
  absl::Status Create(absl::string_view name);
  absl::Status Map(int fd, int protection);
  absl::Status Populate() const;
  absl::Status Seal() const;

  KnownMemory* const known_;
  const MemoryUse use_;
  const std::size_t bytes_;
  void* reserved_ = nullptr;  // What was reserved: `address_` is the first boundary in it.
  std::byte* address_ = nullptr;
  int fd_ = -1;
  bool is_known_ = false;
};

}  // namespace kvmill

#endif  // KVMILL_STORAGE_DEVICE_HOST_MEMORY_H_
