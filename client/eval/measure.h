// What quantizing one head changed: its K, its V, and what attention makes of them.
#ifndef KVMILL_CLIENT_EVAL_MEASURE_H_
#define KVMILL_CLIENT_EVAL_MEASURE_H_

#include <cstdint>
#include <vector>

#include "absl/types/span.h"
#include "client/eval/quantizer.h"

namespace kvmill::eval {

// Errors of K or of V, x before and y after, all relative to the Frobenius norm of x (0/0 = 0). A
// token's error splits into one of magnitude and one of direction:
//
//   E_M = (|y| - |x|) * x / |x|          E_D = y - x - E_M
//
// (arXiv:2606.03458). They are not orthogonal: their squares need not add up to that of the whole.
struct HalfError {
  double relative = 0;
  double magnitude = 0;
  double direction = 0;
  // |y - x| / |x| of tokens: how many have less. Infinite where x = 0 and y is not.
  double token_p50 = 0, token_p95 = 0, token_p99 = 0;
};
HalfError MeasureHalf(const HeadValues& before, absl::Span<const float> after);

// Queries of one KV head.
struct Queries {
  std::vector<float> values;              // [count][head_dim].
  std::vector<std::uint32_t> token_ends;  // Query i sees the tokens before token_ends[i].
  bool given = false;                     // A model's own; otherwise made up.
};

// Made up where there are none: like keys, since what matters of a key's error is the part along
// queries. Each is a random key of the head less the mean key, plus Gaussian noise with each
// channel's own spread, and so long that its logits over the tokens have a standard deviation of
// kSurrogateSpread: neither uniform attention, which averages errors away, nor all on one token. It
// sees all tokens.
inline constexpr double kSurrogateSpread = 2;
Queries SurrogateQueries(const HeadValues& keys, std::uint32_t count, std::uint64_t seed);

// Outputs [count][head_dim] of softmax(q k / sqrt(head_dim)) v, in fp64.
std::vector<double> Attend(const Queries& queries, absl::Span<const float> keys,
                           absl::Span<const float> values, std::uint32_t head_dim);

// |after - before| / |before| over all outputs; 0/0 = 0.
double OutputError(absl::Span<const double> before, absl::Span<const double> after);

}  // namespace kvmill::eval

#endif  // KVMILL_CLIENT_EVAL_MEASURE_H_
