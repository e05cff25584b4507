// The Highway target in use, for code that chooses instructions outside of Highway.
#ifndef KVMILL_KERNELS_CPU_LEVEL_H_
#define KVMILL_KERNELS_CPU_LEVEL_H_

#include <cstdint>

namespace kvmill {

// One HWY_* target bit. A load; asking Highway itself takes CPUID instructions, which cost tens of
// microseconds in a virtual machine.
std::int64_t LevelInUse();

}  // namespace kvmill

#endif  // KVMILL_KERNELS_CPU_LEVEL_H_
