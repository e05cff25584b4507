#include "storage/device/host_stream.h"

#include <atomic>
#include <cstring>
#include <system_error>

#include "absl/strings/str_cat.h"
#include "storage/core/check.h"
#include "storage/core/status_macros.h"
#include "storage/device/enqueue_checks.h"

namespace kvmill {

void HostPoint::Pass(const absl::Status& status) {
  MutexLock lock(mu_);
  passed_ = true;
  status_ = status;
  passes_.NotifyAll();
}

bool HostPoint::passed() const {
  MutexLock lock(mu_);
  return passed_;
}

absl::Status HostPoint::Wait() const {
  MutexLock lock(mu_);
  while (!passed_) passes_.Wait(mu_);
  return status_;
}

bool HostEvent::Done() {
  const std::shared_ptr<HostPoint> last = point();
  return last == nullptr || last->passed();
}

absl::Status HostEvent::Synchronize() {
  const std::shared_ptr<HostPoint> last = point();
  return last == nullptr ? absl::OkStatus() : last->Wait();
}

std::shared_ptr<HostPoint> HostEvent::point() const {
  MutexLock lock(mu_);
  return point_;
}

void HostEvent::set_point(std::shared_ptr<HostPoint> point) {
  MutexLock lock(mu_);
  point_ = std::move(point);
}

absl::StatusOr<absl::Span<std::byte>> HostStream::Scratch::Get(std::size_t bytes) {
  if (bytes > bytes_) {
    data_.reset();
    bytes_ = 0;
    data_.reset(static_cast<std::byte*>(operator new (bytes, std::align_val_t{64}, std::nothrow)));
    if (data_ == nullptr) {
      return absl::ResourceExhaustedError(
          absl::StrCat("host: no ", bytes, " bytes of scratch for a kernel"));
    }
    bytes_ = bytes;
  }
  return absl::MakeSpan(data_.get(), bytes_);
}

HostStream::~HostStream() {
  {
    MutexLock lock(mu_);
    stop_ = true;
    work_there_.NotifyAll();
  }
  if (thread_.joinable()) thread_.join();
  --device_->alive;
}

absl::Status HostStream::Enqueue(Work work) {
  if (!thread_.joinable()) {
    try {
      thread_ = std::thread([this] { Main(); });
    } catch (const std::system_error& error) {
      return absl::ResourceExhaustedError(
          absl::StrCat("host: no thread for a stream: ", error.what()));
    }
  }
  MutexLock lock(mu_);
  while (queue_.size() >= queue_max_ && error_.ok()) room_there_.Wait(mu_);
  KVMILL_RETURN_IF_ERROR(error_);
  queue_.push_back(std::move(work));
  work_there_.NotifyOne();
  return absl::OkStatus();
}

absl::Status HostStream::Copy(void* to, const void* from, std::size_t bytes) {
  KVMILL_RETURN_IF_ERROR(CheckCopy(to, from, bytes, device_->known.Look()));
  if (bytes == 0) return absl::OkStatus();
  return Enqueue(CopyWork{to, from, bytes});
}

absl::Status HostStream::Encode(const TileFormat& format, Frame frame, const EncodeArgs* tiles,
                                std::size_t tile_count, EncodeResult* results) {
  KVMILL_RETURN_IF_ERROR(CheckEncode(format, frame, tiles, tile_count, results));
  if (tile_count == 0) return absl::OkStatus();
  return Enqueue(EncodeWork{format, frame, {tiles, tile_count}, results});
}

absl::Status HostStream::Decode(const TileFormat& format, Frame frame, const DecodeArgs* tiles,
                                std::size_t tile_count) {
  KVMILL_RETURN_IF_ERROR(CheckDecode(format, frame, tiles, tile_count));
  if (tile_count == 0) return absl::OkStatus();
  return Enqueue(DecodeWork{format, frame, {tiles, tile_count}});
}

absl::Status HostStream::Attend(const AttentionArgs& args, std::uint32_t worker_count,
                                std::byte* workspace) {
  KVMILL_RETURN_IF_ERROR(CheckAttend(args, worker_count, workspace));
  if (args.sequences.empty()) return absl::OkStatus();
  return Enqueue(AttendWork{args, worker_count, workspace});
}

absl::Status HostStream::CheckGenerations(const GenerationCheck* checks, std::size_t check_count,
                                          std::uint32_t* changed) {
  KVMILL_RETURN_IF_ERROR(CheckGenerationChecks(checks, check_count, changed));
  if (check_count == 0) return absl::OkStatus();
  return Enqueue(CheckWork{{checks, check_count}, changed});
}

absl::Status HostStream::Record(DeviceEvent& event) {
  auto* own = dynamic_cast<HostEvent*>(&event);
  if (own == nullptr || own->device() != device_) return ForeignEvent();
  auto point = std::make_shared<HostPoint>();
  KVMILL_RETURN_IF_ERROR(Enqueue(RecordWork{point}));
  own->set_point(std::move(point));
  return absl::OkStatus();
}

absl::Status HostStream::Wait(DeviceEvent& event) {
  auto* own = dynamic_cast<HostEvent*>(&event);
  if (own == nullptr || own->device() != device_) return ForeignEvent();
  std::shared_ptr<HostPoint> point = own->point();
  if (point == nullptr) {  // Never recorded: nothing to wait for.
    MutexLock lock(mu_);
    return error_;
  }
  return Enqueue(WaitWork{std::move(point)});
}

absl::Status HostStream::Call(std::function<void(absl::Status)> done) {
  if (done == nullptr) return absl::InvalidArgumentError("Call of no function");
  return Enqueue(CallWork{std::move(done)});
}

absl::Status HostStream::Synchronize() {
  MutexLock lock(mu_);
  while (busy_ || !queue_.empty()) idle_.Wait(mu_);
  return error_;
}

void HostStream::Main() {
  MutexLock lock(mu_);
  for (;;) {
    while (queue_.empty() && !stop_) work_there_.Wait(mu_);
    if (queue_.empty()) return;
    Work work = std::move(queue_.front());
    queue_.pop_front();
    busy_ = true;
    const absl::Status before = error_;
    room_there_.NotifyOne();
    mu_.Unlock();
    const absl::Status after = Run(work, before);
    work = Work();  // What it owns goes here, not under the lock.
    mu_.Lock();
    error_ = after;
    busy_ = false;
    if (!error_.ok()) room_there_.NotifyOne();
    if (queue_.empty()) idle_.NotifyAll();
  }
}

absl::Status HostStream::Run(Work& work, const absl::Status& error) {
  if (auto* record = std::get_if<RecordWork>(&work)) {
    record->point->Pass(error);
    return error;
  }
  if (auto* call = std::get_if<CallWork>(&work)) {
    call->done(error);
    return error;
  }
  if (!error.ok()) return error;
  // What was to come from the other stream is not there: this one cannot go on either.
  if (auto* wait = std::get_if<WaitWork>(&work)) return wait->point->Wait();
  return std::visit(
      [this](const auto& w) -> absl::Status {
        if constexpr (requires { RunWork(w); }) {
          return RunWork(w);
        } else {
          return absl::OkStatus();
        }
      },
      work);
}

absl::Status HostStream::RunWork(const CopyWork& work) {
  std::memcpy(work.to, work.from, work.bytes);
  return absl::OkStatus();
}

absl::Status HostStream::RunWork(const EncodeWork& work) {
  KVMILL_RETURN_IF_ERROR(CheckReach(device_->known.Look(), work.format, work.tiles, work.results));
  KVMILL_ASSIGN_OR_RETURN(const absl::Span<std::byte> scratch,
                          scratch_.Get(EncodeScratchBytes(work.format)));
  EncodeTilesCpu(work.format, work.frame, work.tiles,
                 absl::MakeSpan(work.results, work.tiles.size()), scratch);
  return absl::OkStatus();
}

absl::Status HostStream::RunWork(const DecodeWork& work) {
  KVMILL_RETURN_IF_ERROR(CheckReach(device_->known.Look(), work.format, work.tiles));
  KVMILL_ASSIGN_OR_RETURN(const absl::Span<std::byte> scratch,
                          scratch_.Get(DecodeScratchBytes(work.format)));
  DecodeTilesCpu(work.format, work.frame, work.tiles, scratch);
  return absl::OkStatus();
}

absl::Status HostStream::RunWork(const AttendWork& work) {
  KnownMemory::View known = device_->known.Look();
  KVMILL_RETURN_IF_ERROR(CheckReach(known, work.args));
  if (!known.Holds(work.workspace, kHostAttendWorkspaceBytes, /*written=*/true)) {
    return absl::InvalidArgumentError("the workspace of Attend is not memory of the device");
  }
  KVMILL_ASSIGN_OR_RETURN(const absl::Span<std::byte> scratch,
                          scratch_.Get(AttentionScratchBytes(work.args, work.worker_count)));
  // The kernel needs no workspace; that of a GPU would break here.
  std::atomic_ref<std::uint32_t> in_use(*reinterpret_cast<std::uint32_t*>(work.workspace));
  if (in_use.exchange(1) != 0) {
    return absl::InvalidArgumentError(
        "the workspace of Attend was not zeroed, or serves another call at this time");
  }
  struct Lent {
    HostWorkers* workers;
    std::uint32_t count;
  } lent{&device_->workers, work.worker_count};
  const AttentionWorkers workers{work.worker_count,
                                 [](void* self, void (*call)(void*, std::uint32_t), void* context) {
                                   const auto* l = static_cast<Lent*>(self);
                                   l->workers->Run(l->count, call, context);
                                 },
                                 &lent};
  AttentionCpu(work.args, workers, scratch);
  in_use.store(0);
  return absl::OkStatus();
}

absl::Status HostStream::RunWork(const CheckWork& work) {
  KVMILL_RETURN_IF_ERROR(CheckReach(device_->known.Look(), work.checks, work.changed));
  CheckGenerationsReference(work.checks.data(), work.checks.size(), work.changed);
  return absl::OkStatus();
}

}  // namespace kvmill
