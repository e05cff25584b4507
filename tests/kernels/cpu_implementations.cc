#include "tests/kernels/implementations.h"

namespace kvmill {

const std::vector<Implementation>& FastImplementations() { return CpuImplementations(); }

const std::vector<Implementation>& AllImplementations() {
  static const std::vector<Implementation> all = [] {
    std::vector<Implementation> both{ReferenceImplementation()};
    both.insert(both.end(), CpuImplementations().begin(), CpuImplementations().end());
    return both;
  }();
  return all;
}

std::size_t FormatCount() { return kTileFormatCount; }

}  // namespace kvmill
