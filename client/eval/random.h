// Numbers that look random and are the same on every machine.
#ifndef KVMILL_CLIENT_EVAL_RANDOM_H_
#define KVMILL_CLIENT_EVAL_RANDOM_H_

#include <cmath>
#include <cstdint>

namespace kvmill::eval {

// splitmix64. One thread.
class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed) {}

  std::uint64_t Next() {
    state_ += 0x9E3779B97F4A7C15u;
    std::uint64_t x = state_;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
  }
  std::uint64_t Below(std::uint64_t limit) { return Next() % limit; }
  // In (0, 1).
  double Uniform() { return (static_cast<double>(Next() >> 11) + 0.5) * 0x1p-53; }
  double Gaussian() {  // Box-Muller.
    const double radius = std::sqrt(-2 * std::log(Uniform()));
    return radius * std::cos(6.283185307179586 * Uniform());
  }

 private:
  std::uint64_t state_;
};

}  // namespace kvmill::eval

#endif  // KVMILL_CLIENT_EVAL_RANDOM_H_
