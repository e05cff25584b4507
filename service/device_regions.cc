#include "service/device_regions.h"

#include <cstring>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "storage/core/status_macros.h"

namespace kvmill {
namespace {

template <typename Bytes>
std::string Hex(const Bytes& bytes) {
  return absl::BytesToHexString(
      absl::string_view(reinterpret_cast<const char*>(bytes.data()), bytes.size()));
}

}  // namespace

absl::Status DeviceRegions::CheckPeer(const DoorPeer& peer) const {
  if (gpu_.info().knows_ipc_owner) {
    // Its number is still its own: whoever has it now is asked for the memory.
    if (peer.pid > 0 && peer.IsAlive()) return absl::OkStatus();
    return absl::PermissionDeniedError(
        "the process behind this client cannot be seen: nobody knows whose memory it is");
  }
  if (peer.uid == own_uid_ || peer.uid == 0) return absl::OkStatus();
  return absl::PermissionDeniedError(
      absl::StrCat("uid ", peer.uid, ": ", gpu_.info().name,
                   " does not tell whose memory a handle is of, so it "
                   "is taken from the daemon's own user, ",
                   own_uid_, ", and root only"));
}

absl::StatusOr<DeviceEncoder*> DeviceRegions::Encoder() {
  MutexLock lock(mu_);
  if (encoder_ == nullptr) {
    KVMILL_ASSIGN_OR_RETURN(encoder_, DeviceEncoder::Create(gpu_, lane_count_));
  }
  return encoder_.get();
}

absl::StatusOr<std::unique_ptr<const SharedRegion>> DeviceRegions::Open(
    const DoorPeer& peer, const DoorDeviceRegion& region, const EngineMemory& memory) {
  KVMILL_RETURN_IF_ERROR(CheckPeer(peer));
  const std::array<std::byte, 16>& own = gpu_.info().uuid;
  const bool said = region.device != decltype(region.device){};
  if (said && own != std::array<std::byte, 16>{} &&
      std::memcmp(region.device.data(), own.data(), own.size()) != 0) {
    return absl::FailedPreconditionError(absl::StrCat("memory of GPU ", Hex(region.device),
                                                      ": the daemon's is ", gpu_.info().name, ", ",
                                                      Hex(own)));
  }
  IpcHandle handle;
  static_assert(sizeof(handle) == sizeof(region.handle));
  std::memcpy(handle.data(), region.handle.data(), sizeof(handle));
  std::shared_ptr<const DeviceAllocation> allocation = memory.FindAllocation(handle);
  if (allocation == nullptr) {
    auto opened = std::make_shared<DeviceAllocation>();
    opened->handle = handle;
    KVMILL_ASSIGN_OR_RETURN(opened->encoder, Encoder());
    KVMILL_ASSIGN_OR_RETURN(opened->memory,
                            gpu_.OpenIpc(handle, region.allocation_bytes, peer.pid));
    if (gpu_.info().knows_ipc_owner && !peer.IsAlive()) {
      return absl::PermissionDeniedError("the process behind this client has ended");
    }
    allocation = std::move(opened);
  }
  return SharedRegion::In(std::move(allocation), region.offset_bytes, region.bytes);
}

}  // namespace kvmill
