// Every implementation of encode and decode that this machine can run: the reference, and the cpu
// one on each SIMD target.
#ifndef KVMILL_TESTS_KERNELS_IMPLEMENTATIONS_H_
#define KVMILL_TESTS_KERNELS_IMPLEMENTATIONS_H_

#include <string>
#include <vector>

#include "kernels/decode.h"
#include "kernels/encode.h"

namespace kvmill {

struct Implementation {
  std::string name;  // "reference", or the SIMD target.
  decltype(&EncodeTilesReference) encode;
  decltype(&DecodeTilesReference) decode;
  decltype(&DecodeTileToFloatReference) decode_to_float;

  void Select() const {}
};

inline const Implementation& ReferenceImplementation() {
  static const Implementation reference{"reference", EncodeTilesReference, DecodeTilesReference,
                                        DecodeTileToFloatReference};
  return reference;
}

inline const std::vector<Implementation>& AllImplementations() {
  static const std::vector<Implementation> all{ReferenceImplementation()};
  return all;
}

}  // namespace kvmill

#endif  // KVMILL_TESTS_KERNELS_IMPLEMENTATIONS_H_
