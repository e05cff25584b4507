// Which method runs.
#include "kernels/cpu/tile_method.h"

#include <atomic>

#include "kernels/attention.h"
#include "kernels/cpu/level.h"
#include "kernels/cpu/targets.h"

// After targets.h.
#include "hwy/highway.h"

namespace kvmill {
namespace {

constexpr std::string_view kPortable = "PORTABLE";

struct Candidate {
  const TileMethod* method;
  std::int64_t targets;  // Levels that have what the method needs, apart from is_supported.
};

#if defined(__x86_64__)
constexpr Candidate kCandidates[] = {
    {&kTileAmx, HWY_AVX3},
    {&kTileVnni, HWY_AVX3},
    {&kTileAvx2, HWY_AVX2 | HWY_AVX3},
};
#else
constexpr Candidate kCandidates[] = {{nullptr, 0}};
#endif

bool IsSupported(const TileMethod& method) {
  // Asked once: the answer may take a system call.
  static const std::vector<const TileMethod*> supported = [] {
    std::vector<const TileMethod*> all;
    for (const Candidate& c : kCandidates) {
      if (c.method != nullptr && c.method->is_supported()) all.push_back(c.method);
    }
    return all;
  }();
  for (const TileMethod* p : supported) {
    if (p == &method) return true;
  }
  return false;
}

bool CanRun(const Candidate& candidate) {
  const std::int64_t level = LevelInUse();
  return candidate.method != nullptr && (candidate.targets & level) != 0 &&
         IsSupported(*candidate.method);
}

// The name of a method, or null for the best.
std::atomic<const char*> forced{nullptr};

}  // namespace

bool LevelHasVectors() { return LevelInUse() != HWY_SCALAR; }

const TileMethod* ChosenTileMethod() {
  const char* name = forced.load(std::memory_order_relaxed);
  if (name == kPortable.data()) return nullptr;
  const TileMethod* best = nullptr;
  for (const Candidate& candidate : kCandidates) {
    if (!CanRun(candidate)) continue;
    if (name == candidate.method->name) return candidate.method;
    if (best == nullptr) best = candidate.method;
  }
  return best;
}

std::vector<std::string_view> CpuAttentionNames() {
  std::vector<std::string_view> names;
  for (const Candidate& candidate : kCandidates) {
    if (CanRun(candidate)) names.emplace_back(candidate.method->name);
  }
  names.push_back(kPortable);
  return names;
}

std::string_view CpuAttentionName() {
  const TileMethod* method = ChosenTileMethod();
  return method == nullptr ? kPortable : method->name;
}

bool ForceCpuAttention(std::string_view name) {
  const char* found = nullptr;
  if (name == kPortable) found = kPortable.data();
  for (const Candidate& candidate : kCandidates) {
    if (CanRun(candidate) && name == candidate.method->name) found = candidate.method->name;
  }
  if (found == nullptr && !name.empty()) return false;
  forced.store(found, std::memory_order_relaxed);
  return true;
}

}  // namespace kvmill
