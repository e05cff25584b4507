#include "client/eval/float_cache.h"

#include <algorithm>
#include <cmath>
#include <cstddef>

#include "kernels/dense.h"
#include "kernels/float16.h"
#include "storage/core/check.h"

namespace kvmill::eval {
namespace {

std::size_t RoundedUp(std::size_t count) {
  return (count + kDenseColumns - 1) / kDenseColumns * kDenseColumns;
}

// Tokens whose queries are answered together: their scores stay in the second cache between the
// products, and the places that the causal mask leaves empty are few.
constexpr std::uint32_t kAnsweredTogether = 32;

// Rows of keys whose distance is a multiple of a page would all fall into the same lines of the
// first cache.
std::size_t Stride(std::size_t tokens) {
  const std::size_t stride = RoundedUp(tokens);
  return stride % 256 == 0 ? stride + kDenseColumns : stride;
}

}  // namespace

FloatCache::FloatCache(const TinyConfig& config, const Options& options)
    : q_heads_(config.q_heads),
      head_dim_(config.head_dim),
      scale_(1.0f / std::sqrt(static_cast<float>(config.head_dim))),
      options_(options),
      stride_(Stride(options.tokens_max)),
      layers_(config.layers),
      scores_(std::size_t{std::min(kAnsweredTogether, options.block_tokens)} * config.q_heads *
              stride_) {
  for (Layer& layer : layers_) {
    layer.keys.assign(head_dim_ * stride_, 0);
    layer.values.assign(head_dim_ * stride_, 0);
  }
}

void FloatCache::Attend(const CacheChunk& chunk) {
  const std::uint32_t end = chunk.position + chunk.count, block = options_.block_tokens;
  KVMILL_CHECK(end <= options_.tokens_max && chunk.count > 0 &&
               chunk.position / block == (end - 1) / block);
  Layer& layer = layers_[chunk.layer];
  Append(layer, chunk);
  if (chunk.q != nullptr) Answer(layer, chunk);
  if (options_.quantizer != nullptr && end % block == 0 && end / block > options_.sink_blocks) {
    QuantizeBlock(layer, end - block);
  }
}

void FloatCache::Append(Layer& layer, const CacheChunk& chunk) {
  const bool fp16 = options_.quantizer != nullptr || options_.keep_fp16;
  const auto kept = [fp16](float x) { return fp16 ? Float16ToFloat(FloatToFloat16(x)) : x; };
  for (std::size_t t = 0; t < chunk.count; ++t) {
    for (std::size_t d = 0; d < head_dim_; ++d) {
      layer.keys[d * stride_ + chunk.position + t] = kept(chunk.k[t * head_dim_ + d]);
      layer.values[(chunk.position + t) * head_dim_ + d] = kept(chunk.v[t * head_dim_ + d]);
    }
  }
}

void FloatCache::Answer(const Layer& layer, const CacheChunk& chunk) {
  const std::size_t token_values = std::size_t{q_heads_} * head_dim_;
  for (std::uint32_t first = 0; first < chunk.count; first += kAnsweredTogether) {
    const std::uint32_t count = std::min(kAnsweredTogether, chunk.count - first);
    const std::size_t before = chunk.position + first, tokens = before + count,
                      rows = std::size_t{count} * q_heads_, width = RoundedUp(tokens);
    MultiplyCpu({chunk.q + first * token_values, layer.keys.data(), scores_.data(), rows, head_dim_,
                 width, head_dim_, stride_, stride_});
    for (std::size_t r = 0; r < rows; ++r) {
      SoftmaxCpu(scores_.data() + r * stride_, before + r / q_heads_ + 1, width, scale_);
    }
    MultiplyCpu({scores_.data(), layer.values.data(), chunk.out + first * token_values, rows,
                 tokens, head_dim_, stride_, head_dim_, head_dim_});
  }
}

void FloatCache::QuantizeBlock(Layer& layer, std::uint32_t position) {
  const std::size_t tokens = options_.block_tokens;
  std::vector<float> keys(tokens * head_dim_);
  for (std::size_t t = 0; t < tokens; ++t) {
    for (std::size_t d = 0; d < head_dim_; ++d) {
      keys[t * head_dim_ + d] = layer.keys[d * stride_ + position + t];
    }
  }
  float* const values = layer.values.data() + std::size_t{position} * head_dim_;
  const HeadValues k{keys, options_.block_tokens, head_dim_};
  const HeadValues v{absl::MakeConstSpan(values, tokens * head_dim_), options_.block_tokens,
                     head_dim_};
  const Decoded decoded_k = options_.quantizer->Quantize(Half::kKey, k);
  const Decoded decoded_v = options_.quantizer->Quantize(Half::kValue, v);
  for (std::size_t t = 0; t < tokens; ++t) {
    for (std::size_t d = 0; d < head_dim_; ++d) {
      layer.keys[d * stride_ + position + t] = decoded_k.values[t * head_dim_ + d];
    }
  }
  std::copy(decoded_v.values.begin(), decoded_v.values.end(), values);
  size_.bits += decoded_k.bits + decoded_v.bits;
  size_.elements += 2 * tokens * head_dim_;
  size_.raw_blocks += decoded_k.raw_blocks + decoded_v.raw_blocks;
}

}  // namespace kvmill::eval
