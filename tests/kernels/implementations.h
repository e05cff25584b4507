// The implementations of encode and decode that this machine can run: the reference, and the cpu
// one on each SIMD target. And those that a test program is about, which a source file of it
// decides: cpu_implementations.cc takes all of these, cuda_implementations.cc the CUDA kernels
// under the harness of tests/cuda_harness.
#ifndef KVMILL_TESTS_KERNELS_IMPLEMENTATIONS_H_
#define KVMILL_TESTS_KERNELS_IMPLEMENTATIONS_H_

#include <cstddef>
#include <stdexcept>
#include <string>
#include <vector>

#include "kernels/decode.h"
#include "kernels/encode.h"
#include "kernels/simd.h"

namespace kvmill {

struct Implementation {
  std::string name;  // "reference", or the SIMD level.
  decltype(&EncodeTilesReference) encode;
  decltype(&DecodeTilesReference) decode;
  decltype(&DecodeTileToFloatReference) decode_to_float;
  std::string simd;        // What Select() forces; empty for the reference.
  bool simulated = false;  // Runs under the harness, a thousand times slower than a device.

  // Call before the functions: the cpu ones run at the level selected last.
  void Select() const {
    if (!simd.empty() && !ForceCpuSimd(simd)) throw std::runtime_error("cannot run at " + simd);
  }
};

inline const Implementation& ReferenceImplementation() {
  static const Implementation reference{"reference", EncodeTilesReference, DecodeTilesReference,
                                        DecodeTileToFloatReference, ""};
  return reference;
}

inline const std::vector<Implementation>& CpuImplementations() {
  static const std::vector<Implementation> levels = [] {
    std::vector<Implementation> all;
    for (const std::string_view simd : CpuSimdNames()) {
      all.push_back({"cpu_" + std::string(simd), EncodeTilesCpu, DecodeTilesCpu,
                     DecodeTileToFloatCpu, std::string(simd)});
    }
    return all;
  }();
  return levels;
}

// What must agree with the reference.
const std::vector<Implementation>& FastImplementations();
// What must keep the contract's promises.
const std::vector<Implementation>& AllImplementations();
// They have TileFormatAt(i) for i below this.
std::size_t FormatCount();

}  // namespace kvmill

#endif  // KVMILL_TESTS_KERNELS_IMPLEMENTATIONS_H_
