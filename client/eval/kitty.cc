#include "client/eval/kitty.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "client/eval/round_to_nearest.h"

namespace kvmill::eval {
namespace {

class Kitty : public Quantizer {
 public:
  Kitty(std::uint32_t key_bits, std::uint32_t value_bits, std::uint32_t page, double share)
      : key_bits_(key_bits), value_bits_(value_bits), page_(page), share_(share) {}

  Decoded Quantize(Half half, const HeadValues& head) const override {
    const std::size_t dim = head.head_dim;
    Decoded out;
    out.values.assign(head.values.begin(), head.values.end());
    if (half == Half::kValue) {
      out.bits =
          RoundGroups(out.values.data(), head.tokens, dim, Axis::kPerToken, page_, value_bits_);
      return out;
    }
    for (std::size_t begin = 0; begin < head.tokens; begin += page_) {
      const std::size_t count = std::min<std::size_t>(page_, head.tokens - begin);
      float* page = out.values.data() + begin * dim;
      const std::vector<bool> boosted = BoostedChannels(page, count, dim, share_);
      for (std::size_t d = 0; d < dim; ++d) {
        out.bits += RoundGroup(page + d, count, dim, boosted[d] ? 2 * key_bits_ : key_bits_) + 1;
      }
    }
    return out;
  }

 private:
  const std::uint32_t key_bits_, value_bits_, page_;
  const double share_;
};

}  // namespace

std::vector<bool> BoostedChannels(const float* values, std::size_t tokens, std::size_t head_dim,
                                  double share) {
  std::vector<double> magnitude(head_dim, 0);
  for (std::size_t t = 0; t < tokens; ++t) {
    for (std::size_t d = 0; d < head_dim; ++d) {
      magnitude[d] += std::abs(static_cast<double>(values[t * head_dim + d]));
    }
  }
  std::vector<std::size_t> order(head_dim);
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](std::size_t a, std::size_t b) { return magnitude[a] > magnitude[b]; });
  std::vector<bool> boosted(head_dim, false);
  const auto count = static_cast<std::size_t>(static_cast<double>(head_dim) * share + 1e-6);
  for (std::size_t i = 0; i < count; ++i) boosted[order[i]] = true;
  return boosted;
}

std::unique_ptr<Quantizer> MakeKitty(std::uint32_t key_bits, std::uint32_t value_bits,
                                     std::uint32_t page_tokens, double share) {
  return std::make_unique<Kitty>(key_bits, value_bits, page_tokens, share);
}

}  // namespace kvmill::eval
