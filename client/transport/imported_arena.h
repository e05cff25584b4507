// A daemon's memory on a GPU, in this process: imported into a device that the engine brought, with
// the generation words of its slots, which are in host memory, where the device can look at them.
//
// Thread-safe. In a forked child nothing of this may be used, nor an ImportedArena be destroyed.
#ifndef KVMILL_CLIENT_TRANSPORT_IMPORTED_ARENA_H_
#define KVMILL_CLIENT_TRANSPORT_IMPORTED_ARENA_H_

#include <sys/types.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "storage/core/mutex.h"
#include "storage/device/device.h"
#include "storage/device/device_copier.h"

namespace kvmill {

// Brings bytes that only a device can read to host memory, through a pinned buffer.
class DeviceReader {
 public:
  // `device` outlives it. An error is the device's.
  static absl::StatusOr<std::unique_ptr<DeviceReader>> Create(Device& device);
  ~DeviceReader();

  struct Piece {
    const std::byte* from = nullptr;  // On the device.
    absl::Span<std::byte> to;
  };
  // Returns when all of it is there. After an error, the device's, the destinations may hold
  // anything.
  absl::Status Read(absl::Span<const Piece> pieces);

  Device& device() const { return device_; }

 private:
  explicit DeviceReader(Device& device) : device_(device) {}

  Device& device_;
  const pid_t pid_ = getpid();
  std::unique_ptr<DeviceCopier> copier_;
  Mutex mu_;
  // Of pages that it shares with nothing: they can be pinned once only.
  struct AlignedFree {
    void operator()(std::byte* memory) const;
  };
  std::unique_ptr<std::byte, AlignedFree> buffer_ ABSL_GUARDED_BY(mu_);
  bool is_pinned_ = false;
};

class ImportedArena {
 public:
  // `fd` and what the descriptor is of may go afterwards; `generations` and `reader` outlive it.
  // FAILED_PRECONDITION saying what the device said when it cannot have the memory: it is another
  // GPU's, there are too many mappings, or generation words cannot be pinned.
  static absl::StatusOr<std::unique_ptr<ImportedArena>> Create(
      DeviceReader& reader, int fd, std::uint64_t bytes, absl::Span<const std::byte> generations);
  ~ImportedArena();

  const std::byte* address() const { return memory_->address(); }  // For the device's streams.

 private:
  ImportedArena(DeviceReader& reader, absl::Span<const std::byte> generations,
                std::unique_ptr<DeviceMemory> memory)
      : reader_(reader), generations_(generations), memory_(std::move(memory)) {}

  DeviceReader& reader_;
  const absl::Span<const std::byte> generations_;
  const std::unique_ptr<DeviceMemory> memory_;
};

}  // namespace kvmill

#endif  // KVMILL_CLIENT_TRANSPORT_IMPORTED_ARENA_H_
