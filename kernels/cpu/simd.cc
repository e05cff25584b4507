#include "kernels/simd.h"

#include <atomic>
#include <cstdint>

#include "kernels/cpu/level.h"
#include "kernels/cpu/targets.h"

// After targets.h.
#include "hwy/highway.h"

namespace kvmill {
namespace {

// Best first: lower bits are better targets. Looked at before anything is forced, since forcing
// hides the others.
const std::vector<std::int64_t>& Targets() {
  static const std::vector<std::int64_t> targets = hwy::SupportedAndGeneratedTargets();
  return targets;
}

std::atomic<std::int64_t>& Level() {
  static std::atomic<std::int64_t> level{Targets().front()};
  return level;
}

void Use(std::int64_t target_or_zero) {
  hwy::SetSupportedTargetsForTest(target_or_zero);
  hwy::GetChosenTarget().Update(hwy::SupportedTargets());
  Level().store(hwy::SupportedAndGeneratedTargets().front(), std::memory_order_relaxed);
}

}  // namespace

std::int64_t LevelInUse() { return Level().load(std::memory_order_relaxed); }

std::vector<std::string_view> CpuSimdNames() {
  std::vector<std::string_view> names;
  for (const std::int64_t target : Targets()) names.emplace_back(hwy::TargetName(target));
  return names;
}

std::string_view CpuSimdName() {
  return hwy::TargetName(hwy::SupportedAndGeneratedTargets().front());
}

bool ForceCpuSimd(std::string_view name) {
  const std::vector<std::int64_t>& targets = Targets();
  if (name.empty()) {
    Use(0);
    return true;
  }
  for (const std::int64_t target : targets) {
    if (name != hwy::TargetName(target)) continue;
    Use(target);
    return true;
  }
  return false;
}

}  // namespace kvmill
