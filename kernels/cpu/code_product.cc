// Which product runs.
#include "kernels/cpu/code_product.h"

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
  const CodeProduct* product;
  std::int64_t targets;  // Levels that have what the product needs, apart from is_supported.
};

#if defined(__x86_64__)
constexpr Candidate kCandidates[] = {
    {&kCodeProductAmx, HWY_AVX3},
    {&kCodeProductVnni, HWY_AVX3},
    {&kCodeProductAvx2, HWY_AVX2 | HWY_AVX3},
};
#else
constexpr Candidate kCandidates[] = {{nullptr, 0}};
#endif

bool IsSupported(const CodeProduct& product) {
  // Asked once: the answer may take a system call.
  static const std::vector<const CodeProduct*> supported = [] {
    std::vector<const CodeProduct*> all;
    for (const Candidate& c : kCandidates) {
      if (c.product != nullptr && c.product->is_supported()) all.push_back(c.product);
    }
    return all;
  }();
  for (const CodeProduct* p : supported) {
    if (p == &product) return true;
  }
  return false;
}

bool CanRun(const Candidate& candidate) {
  const std::int64_t level = LevelInUse();
  return candidate.product != nullptr && (candidate.targets & level) != 0 &&
         IsSupported(*candidate.product);
}

// The name of a product, or null for the best.
std::atomic<const char*> forced{nullptr};

}  // namespace

bool LevelHasVectors() { return LevelInUse() != HWY_SCALAR; }

const CodeProduct* ChosenCodeProduct() {
  const char* name = forced.load(std::memory_order_relaxed);
  if (name == kPortable.data()) return nullptr;
  const CodeProduct* best = nullptr;
  for (const Candidate& candidate : kCandidates) {
    if (!CanRun(candidate)) continue;
    if (name == candidate.product->name) return candidate.product;
    if (best == nullptr) best = candidate.product;
  }
  return best;
}

std::vector<std::string_view> CpuAttentionNames() {
  std::vector<std::string_view> names;
  for (const Candidate& candidate : kCandidates) {
    if (CanRun(candidate)) names.emplace_back(candidate.product->name);
  }
  names.push_back(kPortable);
  return names;
}

std::string_view CpuAttentionName() {
  const CodeProduct* product = ChosenCodeProduct();
  return product == nullptr ? kPortable : product->name;
}

bool ForceCpuAttention(std::string_view name) {
  const char* found = nullptr;
  if (name == kPortable) found = kPortable.data();
  for (const Candidate& candidate : kCandidates) {
    if (CanRun(candidate) && name == candidate.product->name) found = candidate.product->name;
  }
  if (found == nullptr && !name.empty()) return false;
  forced.store(found, std::memory_order_relaxed);
  return true;
}

}  // namespace kvmill
