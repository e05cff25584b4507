// Copies between host memory and a device's memory, for callers that wait until they have ended.
//
// For storage/ and client/transport. Thread-safe.
#ifndef KVMILL_STORAGE_DEVICE_DEVICE_COPIER_H_
#define KVMILL_STORAGE_DEVICE_DEVICE_COPIER_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "storage/core/mutex.h"
#include "storage/device/device.h"

namespace kvmill {

class DeviceCopier {
 public:
  struct Copy {
    std::byte* to = nullptr;
    const std::byte* from = nullptr;
    std::size_t bytes = 0;
  };

  // As many callers as there are streams copy at once; further ones wait. `device` outlives it.
  static absl::StatusOr<std::unique_ptr<DeviceCopier>> Create(Device& device,
                                                              std::size_t stream_count);
  ~DeviceCopier();

  // Does all copies, in any order. When it returns nothing touches the memory any more; after an
  // error (the device's) the destinations may hold anything.
  absl::Status Run(absl::Span<const Copy> copies);

 private:
  explicit DeviceCopier(Device& device) : device_(device) {}
  // Null after an error on it, and when there was no other: the next caller tries again.
  std::unique_ptr<DeviceStream> TakeStream();
  void ReturnStream(std::unique_ptr<DeviceStream> stream);

  Device& device_;
  Mutex mu_;
  CondVar returned_;
  std::vector<std::unique_ptr<DeviceStream>> streams_ ABSL_GUARDED_BY(mu_);  // Not in use.
};

}  // namespace kvmill

#endif  // KVMILL_STORAGE_DEVICE_DEVICE_COPIER_H_
