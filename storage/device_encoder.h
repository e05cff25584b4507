// Encodes heads whose pages lie in a device's memory, on streams of the device, for callers that
// wait until it has ended.
//
// The store's way for engine pages that a CPU cannot, or should not, read: those of an engine on
// the same GPU (Device::OpenIpc), or in this process. Only records travel from there.
//
// For storage/ and service/. Thread-safe.
#ifndef KVMILL_STORAGE_DEVICE_ENCODER_H_
#define KVMILL_STORAGE_DEVICE_ENCODER_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kernels/encode.h"
#include "kernels/engine_pages.h"
#include "storage/core/mutex.h"
#include "storage/device/device.h"

namespace kvmill {

class DeviceEncoder {
 public:
  // As many callers as there are lanes encode at once, further ones wait; a lane takes 2 MiB of the
  // device's memory. `device` outlives it.
  static absl::StatusOr<std::unique_ptr<DeviceEncoder>> Create(Device& device,
                                                               std::size_t lane_count);
  ~DeviceEncoder();

  // EncodeTilesCpu for pages on the device: the lists of their addresses are in host memory, and
  // each record goes to host memory or to the device's. Pages are read after what was recorded into
  // `ready`, an event of this device, before the call; null: they are complete. When it returns
  // nothing touches pages or records any more. After an error, which is the device's, records hold
  // anything. Who names pages for others has looked that they lie in memory which the device
  // reaches: on a GPU anything else is its end.
  absl::Status Encode(const TileFormat& format, Frame frame, absl::Span<const EncodeArgs> tiles,
                      DeviceEvent* ready, absl::Span<EncodeResult> results);

  // Pages of one head in host memory.
  struct HostHead {
    std::vector<std::byte> bytes;
    std::vector<const std::byte*> pages;
    HeadPages head;  // Their view.
  };
  // Copies `token_count` tokens of one head from the device, under the same conditions.
  absl::Status ReadHead(const HeadPages& head, std::uint32_t token_count, std::uint32_t head_dim,
                        DeviceEvent* ready, HostHead* copy);

  // Copies bytes, under the same conditions.
  absl::Status ReadBytes(const std::byte* from, std::size_t bytes, DeviceEvent* ready,
                         std::byte* to);

  Device& device() const { return device_; }

 private:
  class Lane;
  explicit DeviceEncoder(Device& device);
  std::unique_ptr<Lane> TakeLane();
  // Null: it broke, and the next caller makes one.
  void ReturnLane(std::unique_ptr<Lane> lane);
  // `work` on a lane; one that fails is not used again.
  template <typename Work>
  absl::Status OnLane(const Work& work);

  Device& device_;
  Mutex mu_;
  CondVar returned_;
  std::vector<std::unique_ptr<Lane>> lanes_ ABSL_GUARDED_BY(mu_);
};

}  // namespace kvmill

#endif  // KVMILL_STORAGE_DEVICE_ENCODER_H_
