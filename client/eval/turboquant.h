// TurboQuant (Zandieh et al., arXiv:2504.19874, section 3.1, Algorithm 1, the mean-square-error
// form): a vector is its norm, and the direction multiplied by a random orthogonal matrix, each
// coordinate of which goes to the nearest entry of a codebook. A coordinate of a random direction
// in d dimensions has the density
//
//   f(x) = Gamma(d/2) / (sqrt(pi) Gamma((d-1)/2)) * (1 - x^2)^((d-3)/2)        on [-1, 1]
//
// and the codebook is the one with the least mean square error for it (Lloyd-Max), computed here. A
// token stores head_dim * bits + 16 bits (its norm, fp16); matrix and codebook are the same for all
// data.
//
// Ours differs: no bit of QJL on the residual of keys (Algorithm 2), and no second instance with
// more bits for outlier channels, which is how the paper reaches 2.5 and 3.5 bits (section 4.3).
#ifndef KVMILL_CLIENT_EVAL_TURBOQUANT_H_
#define KVMILL_CLIENT_EVAL_TURBOQUANT_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "client/eval/quantizer.h"

namespace kvmill::eval {

// Ascending, 2^bits entries; symmetric around 0. dim >= 3, bits 1 to 8.
std::vector<double> SphereCodebook(std::uint32_t dim, std::uint32_t bits);

// E[(x - nearest entry)^2] under f.
double SphereDistortion(std::uint32_t dim, const std::vector<double>& codebook);

// A random orthogonal matrix [dim][dim]: Gaussian rows, made orthonormal one after the other.
std::vector<float> RandomOrthogonal(std::uint32_t dim, std::uint64_t seed);

std::unique_ptr<Quantizer> MakeTurboQuant(std::uint32_t key_bits, std::uint32_t value_bits,
                                          std::uint32_t head_dim);

}  // namespace kvmill::eval

#endif  // KVMILL_CLIENT_EVAL_TURBOQUANT_H_
