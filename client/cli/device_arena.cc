#include "client/cli/device_arena.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "storage/core/check.h"
#include "storage/core/status_macros.h"

namespace kvmill::cli {

absl::StatusOr<std::unique_ptr<Device>> OpenDeviceFlag(const std::string& flag) {
  absl::StatusOr<std::unique_ptr<Device>> device = OpenDevice(flag == "cuda" ? "cuda:0" : flag);
  // UNAVAILABLE is for servers: main would ask whether one is running.
  if (absl::IsUnavailable(device.status())) {
    return absl::FailedPreconditionError(device.status().message());
  }
  return device;
}

std::string CheckDeviceFlag(const std::string& flag) {
  constexpr std::size_t kPrefix = 5;  // "cuda:"
  if (flag == "host" || flag == "cuda") return "";
  if (flag.rfind("cuda:", 0) == 0 && flag.size() > kPrefix && flag.size() <= kPrefix + 4 &&
      flag.find_first_not_of("0123456789", kPrefix) == std::string::npos) {
    return "";
  }
  return absl::StrCat("'", flag, "': want host, cuda or cuda:N");
}

std::string DeviceInUse(const DeviceInfo& info) {
  return absl::StrCat(info.name, ", ", info.description);
}

absl::StatusOr<DeviceArena> DeviceArena::Create(Device& device, std::size_t bytes) {
  KVMILL_ASSIGN_OR_RETURN(std::unique_ptr<DeviceMemory> memory,
                          device.Allocate(std::max<std::size_t>(1, bytes), "cli"));
  return DeviceArena(std::move(memory));
}

std::byte* DeviceArena::Reserve(std::size_t bytes) {
  std::byte* const at = memory_->address() + used_;
  used_ += Padded(bytes);
  KVMILL_CHECK(used_ <= memory_->bytes());
  return at;
}

absl::Status DeviceArena::Upload(DeviceStream& stream) {
  absl::Status status;
  for (const Piece& piece : pieces_) {
    status.Update(stream.Copy(piece.to, piece.content.data(), piece.content.size()));
  }
  status.Update(stream.Synchronize());  // Their contents are needed until then.
  pieces_.clear();
  return status;
}

absl::Status RepeatOnDevice(DeviceStream& stream, std::byte* start, std::size_t pattern_bytes,
                            std::size_t bytes) {
  for (std::size_t full = pattern_bytes; full < bytes;) {
    const std::size_t more = std::min(full, bytes - full);
    KVMILL_RETURN_IF_ERROR(stream.Copy(start + full, start, more));
    full += more;
  }
  return absl::OkStatus();
}

}  // namespace kvmill::cli
