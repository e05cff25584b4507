// Which SIMD level the cpu kernels run at. Chosen once from what the CPU can do; named as Highway
// names its targets
// ("AVX3", "AVX2", "SSE4", ...; "SCALAR" is the reference implementation).
#ifndef KVMILL_KERNELS_SIMD_H_
#define KVMILL_KERNELS_SIMD_H_

#include <string_view>
#include <vector>

namespace kvmill {

// The level in use.
std::string_view CpuSimdName();

// The levels that this build and this CPU can run, best first.
std::vector<std::string_view> CpuSimdNames();

// For tests and benchmarks: from now on use the level `name`; "" goes back to the best one. False,
// and nothing changes, if the name is not one of CpuSimdNames(). Process-wide: not while another
// thread runs a cpu kernel.
bool ForceCpuSimd(std::string_view name);

}  // namespace kvmill

#endif  // KVMILL_KERNELS_SIMD_H_
