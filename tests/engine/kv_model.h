// The "model": its shape, and K and V as a pure function of a token's prefix.
//
// K and V of a token depend on every token up to it (its prefix hash), on layer, head and channel,
// and on nothing else. So whoever knows the tokens of a sequence knows every byte that its pages
// must hold, at any time and in any process.
#ifndef KVMILL_TESTS_ENGINE_KV_MODEL_H_
#define KVMILL_TESTS_ENGINE_KV_MODEL_H_

#include <cstdint>
#include <nlohmann/json.hpp>

#include "storage/core/block_key.h"
#include "storage/core/namespace.h"

namespace kvmill::engine {

inline constexpr std::uint32_t kPageTokens = 16;

// A well-mixed function of its argument (splitmix64), for everything here that wants a seeded
// choice.
inline std::uint64_t Mix(std::uint64_t x) {
  x += 0x9E3779B97F4A7C15u;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

struct ModelShape {
  bool bfloat16 = false;
  std::uint16_t layers = 2;
  std::uint16_t heads = 4;
  std::uint16_t head_dim = 64;
  std::uint32_t block_tokens = 64;
  std::uint32_t sink_blocks = 0;

  DType dtype() const { return bfloat16 ? DType::kBFloat16 : DType::kFloat16; }
  std::size_t row_bytes() const { return std::size_t{2} * head_dim; }
  std::uint32_t block_pages() const { return block_tokens / kPageTokens; }
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(ModelShape, bfloat16, layers, heads, head_dim, block_tokens,
                                   sink_blocks)

NamespaceSpec SpecOf(const ModelShape& shape);

// The prefix hash after one more token; 0 is the empty prefix.
std::uint64_t Extend(std::uint64_t prefix, std::uint32_t token);
// The one token that this model generates after a prefix.
std::uint32_t NextToken(std::uint64_t prefix);
// Key of the block whose last token has this prefix hash.
BlockKey KeyOf(std::uint64_t prefix);

// One row, head_dim values of 16 bits, all finite. With bfloat16 the values of head 0 of layer 1
// are beyond what a tile's fp16 scales can hold: the store keeps that head raw.
void FillRow(const ModelShape& shape, std::uint64_t prefix, std::uint32_t layer, std::uint32_t head,
             bool value, std::uint16_t* row);

}  // namespace kvmill::engine

#endif  // KVMILL_TESTS_ENGINE_KV_MODEL_H_
