#include "storage/device/cuda_stream.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "storage/core/status_macros.h"
#include "storage/device/enqueue_checks.h"

namespace kvmill {
namespace {

// Large enough for the bandwidth of a copy, small enough for every stream to have one.
constexpr std::size_t kStagingBytes = std::size_t{1} << 20;

}  // namespace

absl::StatusOr<std::unique_ptr<CudaDeviceEvent>> CudaDeviceEvent::Create(CudaContext* context) {
  KVMILL_RETURN_IF_ERROR(context->error());
  const CudaContext::Use use(*context);
  KVMILL_ASSIGN_OR_RETURN(CudaEventHandle event, MakeCudaEvent(*context));
  return std::unique_ptr<CudaDeviceEvent>(new CudaDeviceEvent(context, std::move(event)));
}

bool CudaDeviceEvent::Done() {
  const CudaContext::Use use(*context_);
  const cudaError_t result = cudaEventQuery(event_.get());
  if (result == cudaErrorNotReady) {
    cudaGetLastError();
    return false;
  }
  context_->CheckWait("event", result).IgnoreError();  // Whoever waits for it hears of it.
  return true;
}

absl::Status CudaDeviceEvent::Synchronize() {
  KVMILL_RETURN_IF_ERROR(context_->error());
  const CudaContext::Use use(*context_);
  KVMILL_RETURN_IF_ERROR(context_->CheckWait("event", cudaEventSynchronize(event_.get())));
  return context_->error();
}

absl::Status HostCopies::Enqueue(CudaContext& context, cudaStream_t stream, void* to,
                                 const void* from, std::size_t bytes) {
  std::list<Copy>::iterator copy;
  {
    MutexLock lock(mu_);
    copy = pending_.insert(pending_.end(), {this, to, from, bytes, {}});
    copy->self = copy;
  }
  const absl::Status status =
      context.Check("copy in host memory", cudaLaunchHostFunc(stream, &HostCopies::Run, &*copy));
  if (!status.ok()) Remove(copy);
  return status;
}

void HostCopies::Run(void* copy) {
  const Copy& c = *static_cast<Copy*>(copy);
  std::memcpy(c.to, c.from, c.bytes);
  c.owner->Remove(c.self);
}

void HostCopies::Remove(std::list<Copy>::iterator copy) {
  MutexLock lock(mu_);
  pending_.erase(copy);
}

absl::StatusOr<std::unique_ptr<CudaStream>> CudaStream::Create(CudaContext* context) {
  KVMILL_RETURN_IF_ERROR(context->error());
  const CudaContext::Use use(*context);
  KVMILL_ASSIGN_OR_RETURN(CudaHostBuffer staging, MakeCudaHostBuffer(*context, kStagingBytes));
  KVMILL_ASSIGN_OR_RETURN(CudaEventHandle ended, MakeCudaEvent(*context));
  KVMILL_ASSIGN_OR_RETURN(CudaStreamHandle stream, MakeCudaStream(*context));
  return std::unique_ptr<CudaStream>(
      new CudaStream(context, std::move(staging), std::move(ended), std::move(stream)));
}

CudaStream::~CudaStream() {
  Synchronize().IgnoreError();  // Its calls have been told.
  --context_->alive();
}

absl::StatusOr<CudaStream::Place> CudaStream::PlaceOf(const void* start, std::size_t bytes) const {
  const KnownMemory::View known = context_->known().Look();
  const KnownMemory::Range* range = known.FindAnyOf(start, bytes);
  const auto begin = reinterpret_cast<std::uintptr_t>(start);
  if (range != nullptr) {
    const bool whole = begin >= range->begin && begin + bytes <= range->end;
    if (IsPinned(range->use)) return whole ? Place::kPinned : Place::kPageable;
    if (whole) return Place::kDevice;
    return absl::InvalidArgumentError(
        absl::StrFormat("%s: copy of %d bytes at %p, which leaves the device's memory",
                        context_->name(), bytes, start));
  }
  // Memory of others: an engine's, or what another library has pinned.
  const auto* first = static_cast<const std::byte*>(start);
  for (const std::byte* end : {first, first + bytes - 1}) {
    cudaPointerAttributes attributes{};
    KVMILL_RETURN_IF_ERROR(context_->Check("copy", cudaPointerGetAttributes(&attributes, end)));
    if (attributes.type == cudaMemoryTypeUnregistered) return Place::kPageable;
    if (attributes.type != cudaMemoryTypeHost) return Place::kDevice;
  }
  return Place::kPinned;
}

absl::Status CudaStream::CopyDirectly(void* to, const void* from, std::size_t bytes) {
  return context_->Check("copy",
                         cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream_.get()));
}

absl::Status CudaStream::CopyToDevice(std::byte* to, const std::byte* from, std::size_t bytes) {
  for (std::size_t done = 0; done < bytes; done += kStagingBytes) {
    const std::size_t chunk = std::min(kStagingBytes, bytes - done);
    KVMILL_RETURN_IF_ERROR(
        host_copies_.Enqueue(*context_, stream_.get(), staging_.get(), from + done, chunk));
    KVMILL_RETURN_IF_ERROR(CopyDirectly(to + done, staging_.get(), chunk));
  }
  return absl::OkStatus();
}

absl::Status CudaStream::CopyFromDevice(std::byte* to, const std::byte* from, std::size_t bytes) {
  for (std::size_t done = 0; done < bytes; done += kStagingBytes) {
    const std::size_t chunk = std::min(kStagingBytes, bytes - done);
    KVMILL_RETURN_IF_ERROR(CopyDirectly(staging_.get(), from + done, chunk));
    KVMILL_RETURN_IF_ERROR(
        host_copies_.Enqueue(*context_, stream_.get(), to + done, staging_.get(), chunk));
  }
  return absl::OkStatus();
}

absl::Status CudaStream::Copy(void* to, const void* from, std::size_t bytes) {
  KVMILL_RETURN_IF_ERROR(CheckCopy(to, from, bytes, context_->known().Look()));
  KVMILL_RETURN_IF_ERROR(context_->error());
  if (bytes == 0) return absl::OkStatus();
  const CudaContext::Use use(*context_);
  KVMILL_ASSIGN_OR_RETURN(const Place to_place, PlaceOf(to, bytes));
  KVMILL_ASSIGN_OR_RETURN(const Place from_place, PlaceOf(from, bytes));
  if (to_place != Place::kDevice && from_place != Place::kDevice) {
    // The runtime would do it at once, and not in the stream's order.
    return host_copies_.Enqueue(*context_, stream_.get(), to, from, bytes);
  }
  auto* to_bytes = static_cast<std::byte*>(to);
  const auto* from_bytes = static_cast<const std::byte*>(from);
  if (from_place == Place::kPageable) return CopyToDevice(to_bytes, from_bytes, bytes);
  if (to_place == Place::kPageable) return CopyFromDevice(to_bytes, from_bytes, bytes);
  return CopyDirectly(to, from, bytes);
}

absl::Status CudaStream::Launched(const absl::Status& status) {
  if (status.ok()) return status;
  const absl::Status launched = context_->Check("launch", cudaGetLastError());
  if (!launched.ok()) return launched;
  return absl::Status(status.code(), absl::StrCat(context_->name(), ": ", status.message()));
}

absl::Status CudaStream::Encode(const TileFormat& format, Frame frame, const EncodeArgs* tiles,
                                std::size_t tile_count, EncodeResult* results) {
  KVMILL_RETURN_IF_ERROR(CheckEncode(format, frame, tiles, tile_count, results));
  KVMILL_RETURN_IF_ERROR(context_->error());
  if (tile_count == 0) return absl::OkStatus();
  const CudaContext::Use use(*context_);
  return Launched(EncodeTilesCuda(format, frame, tiles, tile_count, results, stream_.get()));
}

absl::Status CudaStream::Decode(const TileFormat& format, Frame frame, const DecodeArgs* tiles,
                                std::size_t tile_count) {
  KVMILL_RETURN_IF_ERROR(CheckDecode(format, frame, tiles, tile_count));
  KVMILL_RETURN_IF_ERROR(context_->error());
  if (tile_count == 0) return absl::OkStatus();
  const CudaContext::Use use(*context_);
  return Launched(DecodeTilesCuda(format, frame, tiles, tile_count, stream_.get()));
}

absl::Status CudaStream::Attend(const AttentionArgs& args, std::uint32_t worker_count,
                                std::byte* workspace) {
  KVMILL_RETURN_IF_ERROR(CheckAttend(args, worker_count, workspace));
  KVMILL_RETURN_IF_ERROR(context_->error());
  if (args.sequences.empty()) return absl::OkStatus();
  const CudaContext::Use use(*context_);
  return Launched(AttentionCuda(args, worker_count, workspace, stream_.get()));
}

absl::Status CudaStream::CheckGenerations(const GenerationCheck* checks, std::size_t check_count,
                                          std::uint32_t* changed) {
  KVMILL_RETURN_IF_ERROR(CheckGenerationChecks(checks, check_count, changed));
  KVMILL_RETURN_IF_ERROR(context_->error());
  if (check_count == 0) return absl::OkStatus();
  const CudaContext::Use use(*context_);
  return Launched(CheckGenerationsCuda(checks, check_count, changed, stream_.get()));
}

absl::Status CudaStream::Record(DeviceEvent& event) {
  auto* own = dynamic_cast<CudaDeviceEvent*>(&event);
  if (own == nullptr || own->context() != context_) return ForeignEvent();
  KVMILL_RETURN_IF_ERROR(context_->error());
  const CudaContext::Use use(*context_);
  return context_->Check("record", cudaEventRecord(own->get(), stream_.get()));
}

absl::Status CudaStream::Wait(DeviceEvent& event) {
  auto* own = dynamic_cast<CudaDeviceEvent*>(&event);
  if (own == nullptr || own->context() != context_) return ForeignEvent();
  KVMILL_RETURN_IF_ERROR(context_->error());
  const CudaContext::Use use(*context_);
  return context_->Check("wait", cudaStreamWaitEvent(stream_.get(), own->get(), 0));
}

absl::Status CudaStream::Call(std::function<void(absl::Status)> done) {
  if (done == nullptr) return absl::InvalidArgumentError("Call of no function");
  KVMILL_RETURN_IF_ERROR(context_->error());
  const CudaContext::Use use(*context_);
  return calls_.Add(stream_.get(), std::move(done));
}

absl::Status CudaStream::Synchronize() {
  const CudaContext::Use use(*context_);
  absl::Status status = context_->Check("record", cudaEventRecord(ended_.get(), stream_.get()));
  if (status.ok()) {
    status = context_->CheckWait("work of a stream", cudaEventSynchronize(ended_.get()));
  }
  calls_.Drain();
  const absl::Status broken = context_->error();
  return broken.ok() ? status : broken;
}

}  // namespace kvmill
