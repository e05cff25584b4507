// Which layers of a layer group: a set of places in the group, below kLayersMax. A value type.
#ifndef KVMILL_SERVICE_CLUSTER_LAYER_SET_H_
#define KVMILL_SERVICE_CLUSTER_LAYER_SET_H_

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <optional>

#include "absl/types/span.h"
#include "storage/core/namespace.h"

namespace kvmill {

class LayerSet {
 public:
  static constexpr std::size_t kWords = kLayersMax / 64;

  LayerSet() = default;
  // Layers 0 to count - 1; at most kLayersMax.
  static LayerSet First(std::size_t count) {
    LayerSet set;
    for (std::size_t w = 0; w < count / 64; ++w) set.words_[w] = ~std::uint64_t{0};
    if (count % 64 != 0) set.words_[count / 64] = (std::uint64_t{1} << count % 64) - 1;
    return set;
  }
  // Bit i of word w stands for layer 64 w + i. Nothing when there are more than kWords.
  static std::optional<LayerSet> FromWords(absl::Span<const std::uint64_t> words) {
    if (words.size() > kWords) return std::nullopt;
    LayerSet set;
    std::copy(words.begin(), words.end(), set.words_.begin());
    return set;
  }
  // Without zeros at the end.
  absl::Span<const std::uint64_t> words() const {
    return absl::MakeConstSpan(words_.data(), (end() + 63) / 64);
  }

  bool empty() const { return end() == 0; }
  std::size_t count() const {
    std::size_t count = 0;
    for (const std::uint64_t word : words_) count += static_cast<std::size_t>(std::popcount(word));
    return count;
  }
  // One more than the last layer; 0 of an empty set.
  std::size_t end() const {
    for (std::size_t w = kWords; w-- > 0;) {
      if (words_[w] != 0) return w * 64 + static_cast<std::size_t>(std::bit_width(words_[w]));
    }
    return 0;
  }
  bool Has(std::size_t layer) const {
    return layer < kLayersMax && (words_[layer / 64] >> layer % 64 & 1) != 0;
  }
  bool HasAll(const LayerSet& other) const { return other.Without(*this).empty(); }

  void Add(std::size_t layer) { words_[layer / 64] |= std::uint64_t{1} << layer % 64; }
  void Add(const LayerSet& other) {
    for (std::size_t w = 0; w < kWords; ++w) words_[w] |= other.words_[w];
  }
  void Remove(const LayerSet& other) {
    for (std::size_t w = 0; w < kWords; ++w) words_[w] &= ~other.words_[w];
  }
  LayerSet Without(const LayerSet& other) const {
    LayerSet rest = *this;
    rest.Remove(other);
    return rest;
  }
  // The first `count` of its layers.
  LayerSet Leading(std::size_t count) const {
    LayerSet some;
    for (std::size_t layer = 0, all = end(); layer < all && count > 0; ++layer) {
      if (!Has(layer)) continue;
      some.Add(layer);
      --count;
    }
    return some;
  }

  friend bool operator==(const LayerSet&, const LayerSet&) = default;

 private:
  std::array<std::uint64_t, kWords> words_{};
};
static_assert(kLayersMax % 64 == 0);

}  // namespace kvmill

#endif  // KVMILL_SERVICE_CLUSTER_LAYER_SET_H_
