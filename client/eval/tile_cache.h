// K and V as kvmill keeps them: KVarN tiles, by the encoder of kvmilld, that the fused attention of
// kernels/attention.h reads as they are; sinks and the unfinished block in 16 bits.
#ifndef KVMILL_CLIENT_EVAL_TILE_CACHE_H_
#define KVMILL_CLIENT_EVAL_TILE_CACHE_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/types/span.h"
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

  // In place of Attend, for tokens that another cache held: `count` more of a layer, a whole block
  // (kTile: its record; kRaw: fp16, K and then V, [count][head_dim]) or, last and kRaw, what there
  // is of an unfinished one. `contents` is copied and has the bytes that this takes.
  void Restore(std::uint32_t layer, BlockKind kind, std::uint32_t count,
               absl::Span<const std::byte> contents);

  // The records, layer by layer; good to read until the next Attend or Restore.
  std::vector<absl::Span<const std::byte>> Records() const;

 private:
  struct Layer {
    std::vector<std::uint16_t> rows;     // fp16: K of all tokens, then V of all tokens.
    std::vector<std::byte> records;      // One for each block, whether a tile or not.
    std::vector<AttentionBlock> blocks;  // Those that are complete.
  };

  void Append(Layer& layer, const CacheChunk& chunk);
  void Answer(const Layer& layer, const CacheChunk& chunk);
  void FinishBlock(Layer& layer, std::uint32_t position);
  void AddBlock(Layer& layer, BlockKind kind, const std::byte* data);
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
