// K and V as kvmill keeps them: KVarN tiles, by the encoder of kvmilld, that the fused attention of
// kernels/attention.h reads as they are; sinks and the unfinished block in 16 bits.
#ifndef KVMILL_CLIENT_EVAL_TILE_CACHE_H_
#define KVMILL_CLIENT_EVAL_TILE_CACHE_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "client/eval/kv_cache.h"
#include "client/eval/tiny_model.h"
#include "kernels/attention.h"
#include "kernels/tile_format.h"

namespace kvmill::eval {

class TileCache : public KvCache {
 public:
  struct Options {
    std::uint32_t tokens_max = 0;
    TileFormat format;              // Of the model's head_dim.
    std::uint32_t sink_blocks = 1;  // The first blocks, which stay in 16 bits.
  };
  // Of `sink_blocks`: a 16-bit cache.
  static constexpr std::uint32_t kAllBlocks = ~std::uint32_t{0};

  TileCache(const TinyConfig& config, const Options& options);

  void Attend(const CacheChunk& chunk) override;
  std::uint32_t block_tokens() const override { return options_.format.group; }
  Size size() const override { return size_; }

 private:
  struct Layer {
    std::vector<std::uint16_t> rows;     // fp16: K of all tokens, then V of all tokens.
    std::vector<std::byte> records;      // One for each block, whether a tile or not.
    std::vector<AttentionBlock> blocks;  // Those that are complete.
  };

  void Append(Layer& layer, const CacheChunk& chunk);
  void Answer(const Layer& layer, const CacheChunk& chunk);
  void FinishBlock(Layer& layer, std::uint32_t position);
  const std::byte* KeyRow(const Layer& layer, std::uint32_t position) const;
  const std::byte* ValueRow(const Layer& layer, std::uint32_t position) const;
  HeadPages Pages(const std::byte* const* first_row) const;

  const std::uint32_t q_heads_, head_dim_;
  const Options options_;
  std::vector<Layer> layers_;
  std::vector<std::byte> scratch_;
  Size size_;
};

}  // namespace kvmill::eval

#endif  // KVMILL_CLIENT_EVAL_TILE_CACHE_H_
