#include "storage/device/device_copier.h"

#include <utility>

#include "storage/core/status_macros.h"

namespace kvmill {

absl::StatusOr<std::unique_ptr<DeviceCopier>> DeviceCopier::Create(Device& device,
                                                                   std::size_t stream_count) {
  std::unique_ptr<DeviceCopier> copier(new DeviceCopier(device));
  for (std::size_t i = 0; i < stream_count; ++i) {
    KVMILL_ASSIGN_OR_RETURN(std::unique_ptr<DeviceStream> stream, device.CreateStream());
    copier->ReturnStream(std::move(stream));
  }
  return copier;
}

DeviceCopier::~DeviceCopier() = default;

std::unique_ptr<DeviceStream> DeviceCopier::TakeStream() {
  MutexLock lock(mu_);
  while (streams_.empty()) returned_.Wait(mu_);
  std::unique_ptr<DeviceStream> stream = std::move(streams_.back());
  streams_.pop_back();
  return stream;
}

void DeviceCopier::ReturnStream(std::unique_ptr<DeviceStream> stream) {
  {
    MutexLock lock(mu_);
    streams_.push_back(std::move(stream));
  }
  returned_.NotifyOne();
}

absl::Status DeviceCopier::Run(absl::Span<const Copy> copies) {
  std::unique_ptr<DeviceStream> stream = TakeStream();
  absl::Status status;
  if (stream == nullptr) {
    absl::StatusOr<std::unique_ptr<DeviceStream>> created = device_.CreateStream();
    status = created.status();
    if (created.ok()) stream = *std::move(created);
  }
  for (std::size_t i = 0; i < copies.size() && status.ok(); ++i) {
    status = stream->Copy(copies[i].to, copies[i].from, copies[i].bytes);
  }
  if (status.ok()) status = stream->Synchronize();
  // An error stays with a stream. Its end waits for what still runs.
  if (!status.ok()) stream = nullptr;
  ReturnStream(std::move(stream));
  return status;
}

}  // namespace kvmill
