// PolarQuant (Wu et al., "Leveraging Polar Transformation for Key Cache Quantization and Decoding
// Acceleration", arXiv:2502.00527, section 3): the two channels of a key that RoPE turns together
// (i and i + head_dim / 2) become a radius and an angle in [0, 2 pi). Over a group of tokens, each
// pair has its own range of radii and of angles, cut into 2^bits equal bins; a code decodes to the
// middle of its bin. Radius and angle have key_bits each, as many as two elements of key_bits. A
// pair and group of n tokens stores 2 n key_bits + 64 bits (two minima, two widths, fp16).
//
// Ours differs: groups are the tiles' 64 or 128 tokens; no residual in 16 bits. The paper leaves
// values in 16 bits or takes another method for them: ours rounds them per token, as KIVI does.
// (Another method of the same name, Han et al., arXiv:2502.02617, is not this one.)
#ifndef KVMILL_CLIENT_EVAL_POLARQUANT_H_
#define KVMILL_CLIENT_EVAL_POLARQUANT_H_

#include <cstdint>
#include <memory>

#include "client/eval/quantizer.h"

namespace kvmill::eval {

std::unique_ptr<Quantizer> MakePolarQuant(std::uint32_t key_bits, std::uint32_t value_bits,
                                          std::uint32_t group_tokens);

}  // namespace kvmill::eval

#endif  // KVMILL_CLIENT_EVAL_POLARQUANT_H_
