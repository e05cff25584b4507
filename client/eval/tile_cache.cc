#include "client/eval/tile_cache.h"

#include <cmath>
#include <cstring>
#include <memory>

#include "kernels/encode.h"
#include "kernels/float16.h"
#include "storage/core/check.h"
#include "storage/core/encode_scratch.h"

namespace kvmill::eval {
namespace {

constexpr std::size_t kScratchAlignment = 64;

}  // namespace

TileCache::TileCache(const TinyConfig& config, const Options& options)
    : q_heads_(config.q_heads),
      head_dim_(config.head_dim),
      options_(options),
      layers_(config.layers) {
  KVMILL_CHECK(options.format.head_dim == config.head_dim);
  for (Layer& layer : layers_) {
    layer.rows.assign(std::size_t{2} * options.tokens_max * head_dim_, 0);
    layer.records.resize(options.tokens_max / options.format.group * RecordBytes(options.format));
  }
}

const std::byte* TileCache::KeyRow(const Layer& layer, std::uint32_t position) const {
  return reinterpret_cast<const std::byte*>(layer.rows.data() + std::size_t{position} * head_dim_);
}

const std::byte* TileCache::ValueRow(const Layer& layer, std::uint32_t position) const {
  return KeyRow(layer, options_.tokens_max + position);
}

HeadPages TileCache::Pages(const std::byte* const* first_row) const {
  HeadPages pages;
  pages.pages = first_row;
  pages.page_tokens = options_.format.group;
  pages.token_stride_bytes = std::ptrdiff_t{2} * head_dim_;
  return pages;
}

void TileCache::Attend(const CacheChunk& chunk) {
  const std::uint32_t end = chunk.position + chunk.count, group = options_.format.group;
  KVMILL_CHECK(end <= options_.tokens_max && chunk.count > 0 &&
               chunk.position / group == (end - 1) / group);
  Layer& layer = layers_[chunk.layer];
  Append(layer, chunk);
  if (chunk.q != nullptr) Answer(layer, chunk);
  if (end % group == 0) FinishBlock(layer, end - group);
}

void TileCache::Append(Layer& layer, const CacheChunk& chunk) {
  const std::size_t count = std::size_t{chunk.count} * head_dim_;
  std::uint16_t* k = layer.rows.data() + std::size_t{chunk.position} * head_dim_;
  std::uint16_t* v = k + std::size_t{options_.tokens_max} * head_dim_;
  for (std::size_t i = 0; i < count; ++i) {
    k[i] = FloatToFloat16(chunk.k[i]);
    v[i] = FloatToFloat16(chunk.v[i]);
  }
}

void TileCache::Answer(const Layer& layer, const CacheChunk& chunk) {
  const auto block_count = static_cast<std::uint32_t>(layer.blocks.size());
  const std::byte* const k = KeyRow(layer, block_count * options_.format.group);
  const std::byte* const v = ValueRow(layer, block_count * options_.format.group);
  const TailHead tail{Pages(&k), Pages(&v)};
  AttentionSequence sequence;
  sequence.blocks = layer.blocks.data();
  sequence.block_count = block_count;
  sequence.tail = &tail;
  sequence.token_end = chunk.position + chunk.count;
  sequence.query_count = chunk.count;
  sequence.query_position = chunk.position;
  AttentionArgs args;
  args.shape.format = options_.format;
  args.shape.q_heads = q_heads_;
  args.shape.kv_heads = 1;
  args.shape.scale = 1.0f / std::sqrt(static_cast<float>(head_dim_));
  args.shape.raw = PackedRawLayout(options_.format, DType::kFloat16, options_.tokens_max);
  args.sequences = absl::MakeConstSpan(&sequence, 1);
  args.query = chunk.q;
  args.output = chunk.out;
  KVMILL_DCHECK(ValidateAttention(args).ok());
  const std::size_t want = AttentionScratchBytes(args, 1);
  if (scratch_.size() < want + kScratchAlignment) scratch_.resize(want + kScratchAlignment);
  void* aligned = scratch_.data();
  std::size_t room = scratch_.size();
  KVMILL_CHECK(std::align(kScratchAlignment, want, aligned, room) != nullptr);
  AttentionCpu(args, {}, absl::MakeSpan(static_cast<std::byte*>(aligned), want));
}

void TileCache::FinishBlock(Layer& layer, std::uint32_t position) {
  const std::byte* const k = KeyRow(layer, position);
  const std::byte* const v = ValueRow(layer, position);
  const std::size_t number = layer.blocks.size();
  if (number >= options_.sink_blocks) {
    std::byte* const record = layer.records.data() + number * RecordBytes(options_.format);
    const EncodeArgs args{Pages(&k), Pages(&v), record};
    EncodeResult result = EncodeResult::kRaw;
    EncodeTilesCpu(options_.format, Frame::kModel, absl::MakeConstSpan(&args, 1),
                   absl::MakeSpan(&result, 1), EncodeScratch(options_.format));
    if (result == EncodeResult::kTile) {
      AddBlock(layer, BlockKind::kTile, record);
      return;
    }
  }
  AddBlock(layer, BlockKind::kRaw, k);
}

void TileCache::AddBlock(Layer& layer, BlockKind kind, const std::byte* data) {
  const TileFormat& format = options_.format;
  if (layer.blocks.size() >= options_.sink_blocks) {
    const bool tile = kind == BlockKind::kTile;
    size_.bits += 8 * (tile ? RecordBytes(format) : RawBytes(format, format.group));
    size_.elements += std::size_t{2} * format.group * head_dim_;
    if (!tile) size_.raw_blocks += 2;
  }
  layer.blocks.push_back({kind, data});
}

void TileCache::Restore(std::uint32_t number, BlockKind kind, std::uint32_t count,
                        absl::Span<const std::byte> contents) {
  const TileFormat& format = options_.format;
  Layer& layer = layers_[number];
  const std::size_t block = layer.blocks.size(), position = block * format.group;
  KVMILL_CHECK(count > 0 && count <= format.group && position + count <= options_.tokens_max);
  if (kind == BlockKind::kTile) {
    KVMILL_CHECK(count == format.group && contents.size() == RecordBytes(format));
    std::byte* const record = layer.records.data() + block * RecordBytes(format);
    std::memcpy(record, contents.data(), contents.size());
    AddBlock(layer, kind, record);
    return;
  }
  const std::size_t row_values = head_dim_, half_bytes = 2 * row_values * count;
  KVMILL_CHECK(kind == BlockKind::kRaw && contents.size() == 2 * half_bytes);
  std::uint16_t* const k = layer.rows.data() + position * row_values;
  std::memcpy(k, contents.data(), half_bytes);
  std::memcpy(k + row_values * options_.tokens_max, contents.data() + half_bytes, half_bytes);
  if (count < format.group) return;  // Its rows are where Attend expects those of a tail.
  AddBlock(layer, kind, reinterpret_cast<const std::byte*>(k));
}

std::vector<absl::Span<const std::byte>> TileCache::Records() const {
  std::vector<absl::Span<const std::byte>> records;
  for (const Layer& layer : layers_) {
    for (const AttentionBlock& block : layer.blocks) {
      if (block.kind != BlockKind::kTile) continue;
      records.push_back(absl::MakeConstSpan(block.data, RecordBytes(options_.format)));
    }
  }
  return records;
}

}  // namespace kvmill::eval
