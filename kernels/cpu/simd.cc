#include "kernels/simd.h"

#include <cstdint>

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

void Use(std::int64_t target_or_zero) {
  hwy::SetSupportedTargetsForTest(target_or_zero);
  hwy::GetChosenTarget().Update(hwy::SupportedTargets());
}

}  // namespace

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
