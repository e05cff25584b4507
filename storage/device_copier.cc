#include "storage/device_copier.h"

#include <utility>

#include "storage/core/check.h"
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

void AppendPageCopies(const PagePool& from_pool, absl::Span<const SlotRef> from,
                      const PagePool& to_pool, absl::Span<const SlotRef> to,
                      absl::Span<const std::uint32_t> page_bytes,
                      std::vector<DeviceCopier::Copy>* copies) {
  KVMILL_DCHECK(from.size() == page_bytes.size() && to.size() == page_bytes.size());
  absl::Span<std::byte> from_before;
  absl::Span<std::byte> to_before;
  for (std::size_t i = 0; i < page_bytes.size(); ++i) {
    const absl::Span<std::byte> from_slot = from_pool.Bytes(from[i]);
    const absl::Span<std::byte> to_slot = to_pool.Bytes(to[i]);
    // Arenas may be next to each other, and are yet different memory to a device.
    const bool adjacent = i > 0 && from_slot.data() == from_before.data() + from_before.size() &&
                          to_slot.data() == to_before.data() + to_before.size() &&
                          from_before.size() == to_before.size() &&
                          from_pool.Locate(from[i]).arena == from_pool.Locate(from[i - 1]).arena &&
                          to_pool.Locate(to[i]).arena == to_pool.Locate(to[i - 1]).arena;
    if (adjacent) {
      DeviceCopier::Copy& copy = copies->back();
      copy.bytes = static_cast<std::size_t>(from_slot.data() - copy.from) + page_bytes[i];
    } else {
      copies->push_back({to_slot.data(), from_slot.data(), page_bytes[i]});
    }
    from_before = from_slot;
    to_before = to_slot;
  }
}

}  // namespace kvmill
