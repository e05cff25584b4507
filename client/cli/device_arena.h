// What a call on a device is about - lists, values, results - in one piece of the device's memory.
#ifndef KVMILL_CLIENT_CLI_DEVICE_ARENA_H_
#define KVMILL_CLIENT_CLI_DEVICE_ARENA_H_

#include <cstddef>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "storage/device/device.h"

namespace kvmill::cli {

// "cuda" of a flag is the first GPU. FAILED_PRECONDITION when it is not there.
absl::StatusOr<std::unique_ptr<Device>> OpenDeviceFlag(const std::string& flag);
// Whether the flag is "host", "cuda" or "cuda:N"; for CLI::App::check: empty, or what is wrong.
std::string CheckDeviceFlag(const std::string& flag);

// "cuda:0, NVIDIA H200, sm_90".
std::string DeviceInUse(const DeviceInfo& info);

// Not thread-safe. Owns the memory.
class DeviceArena {
 public:
  // `bytes`: of everything that will be in it, with 256 for each piece.
  static absl::StatusOr<DeviceArena> Create(Device& device, std::size_t bytes);
  static constexpr std::size_t Padded(std::size_t bytes) { return (bytes + 255) / 256 * 256; }

  // A place on the device, zero unless somebody wrote there; aligned to 256.
  std::byte* Reserve(std::size_t bytes);
  // Where the values will be after Upload.
  template <typename T>
  T* Put(const std::vector<T>& values) {
    const std::size_t bytes = values.size() * sizeof(T);
    std::byte* const at = Reserve(bytes);
    Piece& piece = pieces_.emplace_back(Piece{at, std::vector<std::byte>(bytes)});
    if (bytes != 0) std::memcpy(piece.content.data(), values.data(), bytes);
    return reinterpret_cast<T*>(at);
  }
  // Waits until what was put is there, and whatever else was enqueued.
  absl::Status Upload(DeviceStream& stream);

 private:
  struct Piece {
    std::byte* to;
    std::vector<std::byte> content;
  };
  explicit DeviceArena(std::unique_ptr<DeviceMemory> memory) : memory_(std::move(memory)) {}

  std::unique_ptr<DeviceMemory> memory_;
  std::size_t used_ = 0;
  std::vector<Piece> pieces_;
};

// Repeats the `pattern_bytes` at `start` until `bytes` are full, on the stream: many distinct
// places, few distinct values.
absl::Status RepeatOnDevice(DeviceStream& stream, std::byte* start, std::size_t pattern_bytes,
                            std::size_t bytes);

}  // namespace kvmill::cli

#endif  // KVMILL_CLIENT_CLI_DEVICE_ARENA_H_
