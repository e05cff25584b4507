// Include before any Highway header in every file of kernels/cpu. The kernels are written for
// vectors whose length is known when they are compiled; where a CPU also has scalable ones, Highway
// then uses its fixed-length target.
#ifndef KVMILL_KERNELS_CPU_TARGETS_H_
#define KVMILL_KERNELS_CPU_TARGETS_H_

// What a build leaves out besides: kernels/CMakeLists.txt.
#ifndef KVMILL_MORE_DISABLED_TARGETS
#define KVMILL_MORE_DISABLED_TARGETS 0
#endif

#define HWY_DISABLED_TARGETS \
  (HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128 | HWY_RVV | KVMILL_MORE_DISABLED_TARGETS)

#endif  // KVMILL_KERNELS_CPU_TARGETS_H_
