#include "storage/device/cuda_calls.h"

#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "storage/core/status_macros.h"

namespace kvmill {

CudaCalls::~CudaCalls() {
  {
    MutexLock lock(mu_);
    stop_ = true;
    pending_there_.NotifyAll();
  }
  if (thread_.joinable()) thread_.join();
}

absl::Status CudaCalls::Start() {
  if (thread_.joinable()) return absl::OkStatus();
  try {
    thread_ = std::thread([this] { Main(); });
  } catch (const std::system_error& error) {
    return absl::ResourceExhaustedError(
        absl::StrCat(context_->name(), ": no thread for calls: ", error.what()));
  }
  return absl::OkStatus();
}

absl::StatusOr<CudaEventHandle> CudaCalls::TakeEvent() {
  {
    MutexLock lock(mu_);
    if (!unused_events_.empty()) {
      CudaEventHandle event = std::move(unused_events_.back());
      unused_events_.pop_back();
      return event;
    }
  }
  return MakeCudaEvent(*context_);
}

absl::Status CudaCalls::Add(cudaStream_t stream, std::function<void(absl::Status)> done) {
  KVMILL_RETURN_IF_ERROR(Start());
  KVMILL_ASSIGN_OR_RETURN(CudaEventHandle event, TakeEvent());
  KVMILL_RETURN_IF_ERROR(context_->Check("call", cudaEventRecord(event.get(), stream)));
  MutexLock lock(mu_);
  pending_.push_back({std::move(event), std::move(done)});
  pending_there_.NotifyOne();
  return absl::OkStatus();
}

void CudaCalls::Drain() {
  MutexLock lock(mu_);
  while (busy_ || !pending_.empty()) idle_.Wait(mu_);
}

void CudaCalls::Main() {
  const CudaContext::Use use(*context_);
  MutexLock lock(mu_);
  for (;;) {
    while (pending_.empty() && !stop_) pending_there_.Wait(mu_);
    if (pending_.empty()) return;
    Pending call = std::move(pending_.front());
    pending_.pop_front();
    busy_ = true;
    mu_.Unlock();
    absl::Status status =
        context_->CheckWait("work before a call", cudaEventSynchronize(call.event.get()));
    if (status.ok()) status = context_->error();
    call.done(status);
    call.done = nullptr;
    mu_.Lock();
    unused_events_.push_back(std::move(call.event));
    busy_ = false;
    if (pending_.empty()) idle_.NotifyAll();
  }
}

}  // namespace kvmill
