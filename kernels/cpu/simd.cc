#include "kernels/simd.h"

#include <cstdint>

#include "kernels/cpu/targets.h"

// After targets.h.
#include "hwy/highway.h"

namespace kvmill {

std::vector<std::string_view> CpuSimdNames() {
  std::vector<std::string_view> names;
  // Lower bits are better targets.
  for (const std::int64_t target : hwy::SupportedAndGeneratedTargets()) {
    names.emplace_back(hwy::TargetName(target));
  }
  return names;
}

std::string_view CpuSimdName() { return CpuSimdNames().front(); }

bool ForceCpuSimd(std::string_view name) {
  hwy::SetSupportedTargetsForTest(0);
  hwy::GetChosenTarget().Update(hwy::SupportedTargets());
  if (name.empty()) return true;
  for (const std::int64_t target : hwy::SupportedAndGeneratedTargets()) {
    if (name != hwy::TargetName(target)) continue;
    hwy::SetSupportedTargetsForTest(target);
    hwy::GetChosenTarget().Update(hwy::SupportedTargets());
    return true;
  }
  return false;
}

}  // namespace kvmill
