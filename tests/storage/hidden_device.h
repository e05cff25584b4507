// A device like a GPU: its memory has addresses that nobody can touch, only its streams, which copy
// and encode. Copies can be told to fail, to corrupt what they copy, or to take a while.
#ifndef KVMILL_TESTS_STORAGE_HIDDEN_DEVICE_H_
#define KVMILL_TESTS_STORAGE_HIDDEN_DEVICE_H_

#include <sys/mman.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "kernels/encode.h"
#include "storage/core/encode_scratch.h"
#include "storage/core/mutex.h"
#include "storage/device/device.h"

namespace kvmill {

// Thread-safe, faults included: they may be set while calls run.
class HiddenDevice : public Device {
 public:
  // How many of the next copies in that direction fail, or arrive with one bit flipped.
  std::atomic<int> fail_to_device{0};
  std::atomic<int> fail_to_host{0};
  std::atomic<int> flip_to_device{0};
  std::atomic<int> flip_to_host{0};
  std::atomic<bool> no_streams{false};
  std::atomic<bool> no_memory{false};
  std::atomic<int> copy_ms{0};  // How long each copy takes at least.
  // While set copies that have begun do not end, for a minute at most; how many have begun so.
  std::atomic<bool> hold_copies{false};
  std::atomic<int> held_copies{0};

  std::atomic<int> allocations{0};
  std::atomic<int> unpinned_copies{0};  // Whose end in host memory was not pinned.

  HiddenDevice() : inner_(MakeHostDevice()), info_(inner_->info()) {
    info_.kind = DeviceKind::kCuda;
    info_.name = "hidden";
    info_.host_accessible = false;
  }

  // Where the byte at a device address really is, for tests that look at it or damage it.
  std::byte* Real(const void* address) const {
    MutexLock lock(mu_);
    return RealLocked(static_cast<const std::byte*>(address));
  }
  std::size_t pinned_ranges() const {
    MutexLock lock(mu_);
    return pinned_.size();
  }

  const DeviceInfo& info() const override { return info_; }

  absl::StatusOr<std::unique_ptr<DeviceMemory>> Allocate(std::size_t bytes,
                                                         absl::string_view name) override {
    if (no_memory) return absl::ResourceExhaustedError("told to have no memory");
    auto real = inner_->Allocate(bytes, name);
    if (!real.ok()) return real.status();
    allocations.fetch_add(1);
    return std::unique_ptr<DeviceMemory>(new Memory(*this, *std::move(real)));
  }
  absl::StatusOr<std::unique_ptr<DeviceMemory>> Import(int fd, std::size_t bytes) override {
    return inner_->Import(fd, bytes);
  }
  absl::StatusOr<IpcMemory> ExportIpc(const void*, std::size_t) override {
    return absl::UnimplementedError("export");
  }
  absl::StatusOr<std::unique_ptr<DeviceMemory>> OpenIpc(const IpcHandle&, std::size_t,
                                                        pid_t) override {
    return absl::UnimplementedError("open");
  }
  absl::Status Pin(absl::Span<std::byte> memory) override {
    MutexLock lock(mu_);
    pinned_[memory.data()] = memory.size();
    return absl::OkStatus();
  }
  absl::Status PinToRead(absl::Span<const std::byte> memory) override {
    MutexLock lock(mu_);
    pinned_[memory.data()] = memory.size();
    return absl::OkStatus();
  }
  void Unpin(absl::Span<const std::byte> memory) override {
    MutexLock lock(mu_);
    pinned_.erase(memory.data());
  }
  absl::StatusOr<std::unique_ptr<DeviceStream>> CreateStream() override {
    if (no_streams) return absl::UnavailableError("told to have no streams");
    auto inner = inner_->CreateStream();
    if (!inner.ok()) return inner.status();
    return std::unique_ptr<DeviceStream>(new Stream(*this, *std::move(inner)));
  }
  absl::StatusOr<std::unique_ptr<DeviceEvent>> CreateEvent() override {
    return inner_->CreateEvent();
  }
  std::size_t AttendWorkspaceBytes(const AttentionShape& shape, std::size_t sequence_count,
                                   std::size_t row_count,
                                   std::uint32_t worker_count) const override {
    return inner_->AttendWorkspaceBytes(shape, sequence_count, row_count, worker_count);
  }

 private:
  class Memory : public DeviceMemory {
   public:
    Memory(HiddenDevice& device, std::unique_ptr<DeviceMemory> real)
        : device_(device), real_(std::move(real)) {
      void* hidden = mmap(nullptr, real_->bytes(), PROT_NONE,
                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
      hidden_ = static_cast<std::byte*>(hidden);
      MutexLock lock(device_.mu_);
      device_.memories_[hidden_] = {real_->bytes(), real_->address()};
    }
    ~Memory() override {
      {
        MutexLock lock(device_.mu_);
        device_.memories_.erase(hidden_);
      }
      munmap(hidden_, real_->bytes());
    }
    std::byte* address() const override { return hidden_; }
    std::size_t bytes() const override { return real_->bytes(); }
    int fd() const override { return real_->fd(); }

   private:
    HiddenDevice& device_;
    const std::unique_ptr<DeviceMemory> real_;
    std::byte* hidden_ = nullptr;
  };

  class Stream : public DeviceStream {
   public:
    Stream(HiddenDevice& device, std::unique_ptr<DeviceStream> inner)
        : device_(device), inner_(std::move(inner)) {}

    absl::Status Copy(void* to, const void* from, std::size_t bytes) override {
      std::byte* real_to = nullptr;
      const std::byte* real_from = nullptr;
      bool to_device = false;
      {
        MutexLock lock(device_.mu_);
        real_to = device_.RealLocked(static_cast<std::byte*>(to));
        real_from = device_.RealLocked(static_cast<const std::byte*>(from));
        to_device = real_to != nullptr;
        const std::byte* host =
            to_device ? static_cast<const std::byte*>(from) : static_cast<const std::byte*>(to);
        if (!device_.IsPinnedLocked(host, bytes)) device_.unpinned_copies.fetch_add(1);
      }
      if (Take(to_device ? device_.fail_to_device : device_.fail_to_host)) {
        return absl::InternalError("copy: told to fail");
      }
      const bool flip = Take(to_device ? device_.flip_to_device : device_.flip_to_host);
      std::byte* end_to = to_device ? real_to : static_cast<std::byte*>(to);
      const absl::Status status =
          inner_->Copy(end_to, real_from != nullptr ? real_from : from, bytes);
      if (!status.ok()) return status;
      const int milliseconds = device_.copy_ms;
      const bool hold = device_.hold_copies;
      if (!flip && milliseconds == 0 && !hold) return status;
      return inner_->Call([=, &device = device_](absl::Status) {
        if (hold) device.held_copies.fetch_add(1);
        for (int i = 0; i < 60'000 && hold && device.hold_copies; ++i) {
          std::this_thread::sleep_for(std::chrono::milliseconds(1));
        }
        if (milliseconds > 0) std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds));
        // Another bit each way: a copy and its copy back must not undo each other's damage.
        if (flip) end_to[bytes / 3] ^= to_device ? std::byte{1} : std::byte{2};
      });
    }
    absl::Status Encode(const TileFormat& format, Frame frame, const EncodeArgs* tiles,
                        std::size_t tile_count, EncodeResult* results) override {
      return inner_->Call([=, &device = device_](const absl::Status& status) {
        for (std::size_t i = 0; status.ok() && i < tile_count; ++i) {
          device.EncodeOne(format, frame, tiles + i, results + i);
        }
      });
    }
    absl::Status Decode(const TileFormat&, Frame, const DecodeArgs*, std::size_t) override {
      return absl::UnimplementedError("decode");
    }
    absl::Status Attend(const AttentionArgs&, std::uint32_t, std::byte*) override {
      return absl::UnimplementedError("attend");
    }
    absl::Status CheckGenerations(const GenerationCheck*, std::size_t, std::uint32_t*) override {
      return absl::UnimplementedError("check");
    }
    absl::Status Record(DeviceEvent& event) override { return inner_->Record(event); }
    absl::Status Wait(DeviceEvent& event) override { return inner_->Wait(event); }
    absl::Status Call(std::function<void(absl::Status)> done) override {
      return inner_->Call(std::move(done));
    }
    absl::Status Synchronize() override { return inner_->Synchronize(); }

   private:
    static bool Take(std::atomic<int>& left) {
      int value = left.load();
      while (value > 0 && !left.compare_exchange_weak(value, value - 1)) {
      }
      return value > 0;
    }
    HiddenDevice& device_;
    const std::unique_ptr<DeviceStream> inner_;
  };

  // All addresses are the device's.
  void EncodeOne(const TileFormat& format, Frame frame, const EncodeArgs* tile,
                 EncodeResult* result) const {
    EncodeArgs real = *reinterpret_cast<const EncodeArgs*>(Real(tile));
    std::vector<const std::byte*> lists[2];
    for (HeadPages* half : {&real.k, &real.v}) {
      std::vector<const std::byte*>& pages = lists[half == &real.v ? 1 : 0];
      const auto* list = reinterpret_cast<const std::byte* const*>(Real(half->pages));
      for (std::uint32_t token = 0; token < format.group; token += half->page_tokens) {
        pages.push_back(Real(list[token / half->page_tokens]));
      }
      half->pages = pages.data();
    }
    real.record = Real(real.record);
    EncodeTilesCpu(format, frame, {&real, 1}, {reinterpret_cast<EncodeResult*>(Real(result)), 1},
                   EncodeScratch(format));
  }

  struct RealMemory {
    std::size_t bytes = 0;
    std::byte* address = nullptr;
  };

  std::byte* RealLocked(const std::byte* address) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    auto it = memories_.upper_bound(address);
    if (it == memories_.begin()) return nullptr;
    --it;
    const auto offset = static_cast<std::size_t>(address - it->first);
    return offset < it->second.bytes ? it->second.address + offset : nullptr;
  }
  bool IsPinnedLocked(const std::byte* address, std::size_t bytes) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    auto it = pinned_.upper_bound(address);
    if (it == pinned_.begin()) return false;
    --it;
    return address + bytes <= it->first + it->second;
  }

  const std::unique_ptr<Device> inner_;
  DeviceInfo info_;
  mutable Mutex mu_;
  std::map<const std::byte*, RealMemory> memories_ ABSL_GUARDED_BY(mu_);  // By hidden address.
  std::map<const std::byte*, std::size_t> pinned_ ABSL_GUARDED_BY(mu_);
};

}  // namespace kvmill

#endif  // KVMILL_TESTS_STORAGE_HIDDEN_DEVICE_H_
