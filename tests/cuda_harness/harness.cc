#include "tests/cuda_harness/harness.h"

#include "tests/cuda_harness/executor.h"

namespace kvmill {
namespace cuda_harness {

std::string ToString(FaultKind kind) {
  switch (kind) {
    case FaultKind::kRace:
      return "race";
    case FaultKind::kDivergentBarrier:
      return "divergent barrier";
    case FaultKind::kWarpMask:
      return "wrong mask";
    case FaultKind::kSharedOutOfBounds:
      return "shared memory out of bounds";
    case FaultKind::kGlobalOutOfBounds:
      return "global memory out of bounds";
    case FaultKind::kMisaligned:
      return "misaligned access";
    case FaultKind::kSharedUninitialized:
      return "shared memory read before it was written";
    case FaultKind::kAsyncCopyPending:
      return "access before the wait for an asynchronous copy";
    case FaultKind::kBadLaunch:
      return "bad launch";
  }
  return "?";
}

Harness::Harness(std::uint32_t seed) : executor_(std::make_unique<Executor>(seed)) {}
Harness::~Harness() = default;

void* Harness::AllocateBytes(std::size_t bytes, const std::string& name) {
  return executor_->memory().Allocate(bytes, name);
}

bool Harness::LimitSharedBytes(std::size_t bytes_max) {
  executor_->set_shared_bytes_max(bytes_max);
  return true;
}

absl::Status Harness::Finish() { return absl::OkStatus(); }

const std::vector<Fault>& Harness::faults() const { return executor_->faults(); }

}  // namespace cuda_harness
}  // namespace kvmill
