// K and V as floats: the unquantized run, and every method by what its decoder would give back.
#ifndef KVMILL_CLIENT_EVAL_FLOAT_CACHE_H_
#define KVMILL_CLIENT_EVAL_FLOAT_CACHE_H_

#include <cstdint>
#include <vector>

#include "client/eval/kv_cache.h"
#include "client/eval/quantizer.h"
#include "client/eval/tiny_model.h"

namespace kvmill::eval {

class FloatCache : public KvCache {
 public:
  struct Options {
    std::uint32_t tokens_max = 0;
    std::uint32_t block_tokens = 128;
    std::uint32_t sink_blocks = 1;  // The first blocks, which stay in 16 bits.
    // Null: K and V stay in fp32. Otherwise they are rounded to fp16 as they come, and a block that
    // is complete is replaced by what comes back from this; must outlive the cache.
    const Quantizer* quantizer = nullptr;
    bool keep_fp16 = false;  // Rounded to fp16 as they come without a quantizer, too.
  };
  FloatCache(const TinyConfig& config, const Options& options);

  void Attend(const CacheChunk& chunk) override;
  std::uint32_t block_tokens() const override { return options_.block_tokens; }
  Size size() const override { return size_; }

 private:
  struct Layer {
    std::vector<float> keys;    // [head_dim][stride_]: scores are a product, too.
    std::vector<float> values;  // [stride_][head_dim]
  };

  void Append(Layer& layer, const CacheChunk& chunk);
  void Answer(const Layer& layer, const CacheChunk& chunk);
  void QuantizeBlock(Layer& layer, std::uint32_t position);

  const std::uint32_t q_heads_, head_dim_;
  const float scale_;
  const Options options_;
  std::size_t stride_;  // Tokens that there is room for.
  std::vector<Layer> layers_;
  std::vector<float> scores_;  // [tokens answered together * q_heads][stride_]
  Size size_;
};

}  // namespace kvmill::eval

#endif  // KVMILL_CLIENT_EVAL_FLOAT_CACHE_H_
