#include "tests/engine/kv_model.h"

#include <cstring>

#include "storage/core/check.h"

namespace kvmill::engine {

NamespaceSpec SpecOf(const ModelShape& shape) {
  NamespaceSpec spec;
  spec.model = "reference-engine";
  spec.revision = "r1";
  spec.hash_scheme = "mix64";
  spec.source_dtype = shape.dtype();
  spec.block_tokens = shape.block_tokens;
  spec.sink_blocks = shape.sink_blocks;
  LayerGroup group;
  for (std::uint16_t layer = 0; layer < shape.layers; ++layer) group.layers.push_back(layer);
  group.kv_heads = shape.heads;
  group.head_dim = shape.head_dim;
  spec.groups = {group};
  return spec;
}

std::uint64_t Extend(std::uint64_t prefix, std::uint32_t token) {
  return Mix(prefix ^ (std::uint64_t{token} << 32 | 0x5EEDu));
}

std::uint32_t NextToken(std::uint64_t prefix) {
  return static_cast<std::uint32_t>(Mix(prefix ^ 0x70CE) % 50'000);
}

BlockKey KeyOf(std::uint64_t prefix) {
  const std::uint64_t words[2] = {prefix, Mix(prefix ^ 0x6B6579)};
  const absl::StatusOr<BlockKey> key =
      BlockKey::FromBytes(absl::string_view(reinterpret_cast<const char*>(words), sizeof(words)));
  KVMILL_CHECK(key.ok());
  return *key;
}

void FillRow(const ModelShape& shape, std::uint64_t prefix, std::uint32_t layer, std::uint32_t head,
             bool value, std::uint16_t* row) {
  const std::uint64_t seed =
      Mix(prefix ^ (std::uint64_t{layer} << 40) ^ (std::uint64_t{head} << 8) ^ (value ? 1u : 0u));
  // Random sign and mantissa, an exponent of four: magnitudes from 1/4 to 4. fp16 has 5 bits of
  // exponent with bias 15 and 10 of mantissa, bf16 has 8 with bias 127 and 7. Four values at once.
  constexpr std::uint64_t kLanes = 0x0001000100010001u;
  const std::uint32_t mantissa_bits = shape.bfloat16 ? 7 : 10;
  std::uint64_t exponent = shape.bfloat16 ? 125 : 13;
  if (shape.bfloat16 && layer == 1 && head == 0) exponent += 40;
  const std::uint64_t random_mask = kLanes * (0x8000u | ((1u << mantissa_bits) - 1));
  const std::uint64_t magnitude_mask = kLanes * (3u << mantissa_bits);
  const std::uint64_t base = kLanes * (exponent << mantissa_bits);
  for (std::uint32_t channel = 0; channel < shape.head_dim; channel += 4) {
    const std::uint64_t bits = Mix(seed + channel);
    const std::uint64_t magnitudes = (bits >> 23 | bits << 41) & magnitude_mask;
    const std::uint64_t values = (bits & random_mask) | (base + magnitudes);
    std::memcpy(row + channel, &values, sizeof(values));
  }
}

}  // namespace kvmill::engine
