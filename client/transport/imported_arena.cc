#include "client/transport/imported_arena.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "storage/core/status_macros.h"

namespace kvmill {
namespace {

// Headers of a thousand pages, or a good part of a page.
constexpr std::size_t kBufferBytes = std::size_t{256} << 10;
constexpr std::align_val_t kPage{4096};

absl::Status NotHere(const Device& device, const absl::Status& why) {
  return absl::FailedPreconditionError(absl::StrCat("the daemon's GPU memory cannot be used on ",
                                                    device.info().name, ": ", why.message()));
}

}  // namespace

void DeviceReader::AlignedFree::operator()(std::byte* memory) const {
  ::operator delete(memory, kPage);
}

absl::StatusOr<std::unique_ptr<DeviceReader>> DeviceReader::Create(Device& device) {
  std::unique_ptr<DeviceReader> reader(new DeviceReader(device));
  absl::StatusOr<std::unique_ptr<DeviceCopier>> copier = DeviceCopier::Create(device, 1);
  if (!copier.ok()) return NotHere(device, copier.status());
  reader->copier_ = *std::move(copier);
  MutexLock lock(reader->mu_);
  reader->buffer_.reset(static_cast<std::byte*>(::operator new(kBufferBytes, kPage)));
  const absl::Status pinned = device.Pin(absl::MakeSpan(reader->buffer_.get(), kBufferBytes));
  if (!pinned.ok()) return NotHere(device, pinned);
  reader->is_pinned_ = true;
  return reader;
}

DeviceReader::~DeviceReader() {
  MutexLock lock(mu_);
  if (getpid() != pid_) {  // The device is the parent's.
    static_cast<void>(copier_.release());
    static_cast<void>(buffer_.release());
    return;
  }
  if (is_pinned_) device_.Unpin(absl::MakeSpan(buffer_.get(), kBufferBytes));
}

absl::Status DeviceReader::Read(absl::Span<const Piece> pieces) {
  MutexLock lock(mu_);
  std::size_t piece = 0;
  std::size_t done = 0;  // Of that piece.
  std::vector<DeviceCopier::Copy> copies;
  std::vector<std::byte*> destinations;
  while (piece < pieces.size()) {
    copies.clear();
    destinations.clear();
    std::size_t used = 0;
    while (piece < pieces.size() && used < kBufferBytes) {
      const Piece& p = pieces[piece];
      const std::size_t bytes = std::min(p.to.size() - done, kBufferBytes - used);
      if (bytes != 0) {
        copies.push_back({buffer_.get() + used, p.from + done, bytes});
        destinations.push_back(p.to.data() + done);
      }
      used += bytes;
      done += bytes;
      if (done < p.to.size()) break;
      ++piece;
      done = 0;
    }
    KVMILL_RETURN_IF_ERROR(copier_->Run(copies));
    for (std::size_t i = 0; i < copies.size(); ++i) {
      std::memcpy(destinations[i], copies[i].to, copies[i].bytes);
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<ImportedArena>> ImportedArena::Create(
    DeviceReader& reader, int fd, std::uint64_t bytes, absl::Span<const std::byte> generations) {
  Device& device = reader.device();
  absl::StatusOr<std::unique_ptr<DeviceMemory>> memory = device.Import(fd, bytes);
  if (!memory.ok()) return NotHere(device, memory.status());
  const absl::Status pinned = device.PinToRead(generations);
  if (!pinned.ok()) return NotHere(device, pinned);
  return std::unique_ptr<ImportedArena>(new ImportedArena(reader, generations, *std::move(memory)));
}

ImportedArena::~ImportedArena() { reader_.device().Unpin(generations_); }

}  // namespace kvmill
