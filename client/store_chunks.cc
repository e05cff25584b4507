#include "client/store_chunks.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/container/inlined_vector.h"
#include "absl/strings/str_cat.h"
#include "client/kv_view.h"
#include "kernels/encode.h"
#include "kernels/refine.h"
#include "storage/core/encode_scratch.h"
#include "storage/core/page_layout.h"

namespace kvmill {
namespace {

// Runs of adjacent bytes below this are gathered into a buffer: a span of its own costs more.
constexpr std::size_t kSpanBytesMin = 4096;

// One head of the view as the encoder sees it. `*data` outlives the result.
HeadPages PagesOf(const KvView& view, std::uint32_t head, std::uint32_t tokens, DType dtype,
                  const std::byte** data) {
  HeadPages pages;
  const bool one_page = view.page_tokens == 0;
  *data = view.data;
  pages.pages = one_page ? data : view.pages;
  // A negative stride wraps around, and back when it is added to a pointer.
  pages.offset_bytes =
      (one_page ? 0 : view.offset_bytes) +
      static_cast<std::size_t>(static_cast<std::ptrdiff_t>(head) * view.head_stride_bytes);
  pages.page_tokens = one_page ? tokens : view.page_tokens;
  pages.token_stride_bytes = view.token_stride_bytes;
  pages.dtype = dtype;
  return pages;
}

}  // namespace

StorePieces::StorePieces(const ClientNamespace& ns, absl::Span<const StoreBlock> blocks,
                         const StoreOptions& options, std::size_t bytes_max)
    : ns_(ns), blocks_(blocks), options_(options), bytes_max_(bytes_max) {
  std::size_t begin = 0;
  for (const LayerGroup& group : ns.spec.groups) {
    group_begin_.push_back(begin);
    begin += group.layers.size();
  }
}

std::uint32_t StorePieces::HeadsOf(const LayerGroup& group) const {
  return options_.head_count == 0 ? group.kv_heads : options_.head_count;
}

const LayerInput* StorePieces::LayersOf(const StorePiece& piece) const {
  return blocks_[piece.block].layers.data() + group_begin_[piece.group];
}

StorePiece StorePieces::At(std::uint32_t block, std::uint32_t group, std::uint32_t layer,
                           std::uint32_t head) const {
  StorePiece piece;
  piece.block = block;
  piece.group = group;
  piece.layer_begin = layer;
  piece.head_begin = head;
  const LayerGroup& g = ns_.spec.groups[group];
  const TileFormat format = FormatOf(ns_.spec, g);
  const LayerInput* const layers = LayersOf(piece);
  piece.records = layers[layer].records != nullptr;
  const std::size_t head_bytes =
      piece.records ? RecordBytes(format) : RawBytes(format, blocks_[block].token_count);
  const auto heads_max =
      static_cast<std::uint32_t>(std::max<std::size_t>(1, bytes_max_ / head_bytes));
  const std::uint32_t heads = HeadsOf(g);
  piece.head_count = std::min(heads - head, heads_max);
  piece.layer_count = 1;
  const auto layer_count = static_cast<std::uint32_t>(g.layers.size());
  if (piece.head_count == heads) {  // Whole layers.
    const std::size_t layers_max = std::max<std::size_t>(1, bytes_max_ / (head_bytes * heads));
    while (layer + piece.layer_count < layer_count && piece.layer_count < layers_max &&
           (layers[layer + piece.layer_count].records != nullptr) == piece.records) {
      ++piece.layer_count;
    }
  }
  piece.last = layer + piece.layer_count == layer_count && head + piece.head_count == heads;
  return piece;
}

StorePiece StorePieces::First() const { return At(0, 0, 0, 0); }

bool StorePieces::Next(StorePiece* piece) const {
  if (piece->last) return NextGroup(piece);
  const std::uint32_t heads = HeadsOf(ns_.spec.groups[piece->group]);
  const std::uint32_t head_end = piece->head_begin + piece->head_count;
  *piece = head_end < heads
               ? At(piece->block, piece->group, piece->layer_begin, head_end)
               : At(piece->block, piece->group, piece->layer_begin + piece->layer_count, 0);
  return true;
}

bool StorePieces::NextGroup(StorePiece* piece) const {
  std::uint32_t block = piece->block;
  std::uint32_t group = piece->group + 1;
  if (group == ns_.spec.groups.size()) {
    group = 0;
    if (++block == blocks_.size()) return false;
  }
  *piece = At(block, group, 0, 0);
  return true;
}

bool StorePieces::MayEncode(const StorePiece& piece) const {
  const StoreBlock& block = blocks_[piece.block];
  return !piece.records && block.token_count == ns_.spec.block_tokens &&
         block.block_index >= ns_.spec.sink_blocks;
}

v1::StoreChunk StorePieces::HeadOf(const StorePiece& piece) const {
  const StoreBlock& block = blocks_[piece.block];
  v1::StoreChunk head;
  head.set_sequence(piece.block);
  head.set_group(piece.group);
  head.set_key(std::string(block.key.view()));
  head.set_parent(std::string(block.parent.view()));
  head.set_token_count(block.token_count);
  head.set_block_index(block.block_index);
  head.set_layer_begin(piece.layer_begin);
  head.set_layer_count(piece.layer_count);
  head.set_head_begin(options_.head_begin + piece.head_begin);
  head.set_head_count(piece.head_count);
  head.set_kind(piece.records ? v1::CHUNK_RECORDS : v1::CHUNK_PAGES16);
  return head;
}

StoreChunk StorePieces::Gather(const StorePiece& piece) const {
  const TileFormat format = FormatOf(ns_.spec, ns_.spec.groups[piece.group]);
  const std::uint32_t token_count = blocks_[piece.block].token_count;
  const std::uint64_t heads = std::uint64_t{piece.layer_count} * piece.head_count;
  StoreChunk chunk;
  chunk.head = HeadOf(piece);
  chunk.raw_bytes = heads * RawBytes(format, token_count);
  const LayerInput* const layers = LayersOf(piece) + piece.layer_begin;
  std::byte* own = nullptr;
  if (!piece.records) {
    // More than what is copied, at times; untouched memory costs nothing.
    chunk.own.reset(new std::byte[chunk.raw_bytes]);
    own = chunk.own.get();
  }
  const KvPart part = {token_count, piece.head_begin, piece.head_count,
                       std::size_t{2} * format.head_dim};
  const auto borrow = [&chunk](const std::byte* data, std::size_t bytes) {
    chunk.bytes.emplace_back(data, bytes);
  };
  const auto room = [&chunk, &own](std::size_t bytes) {
    chunk.bytes.emplace_back(own, bytes);
    return std::exchange(own, own + bytes);
  };
  for (std::uint32_t l = 0; l < piece.layer_count; ++l) {
    if (piece.records) {
      chunk.bytes.emplace_back(layers[l].records + RecordBytes(format) * piece.head_begin,
                               RecordBytes(format) * piece.head_count);
      continue;
    }
    for (const KvView* view : {&layers[l].k, &layers[l].v}) {
      VisitKvPart(*view, part, kSpanBytesMin, borrow, room);
    }
  }
  return chunk;
}

absl::Status StorePieces::Encode(const StorePiece& piece, std::vector<StoreChunk>* chunks) const {
  const LayerGroup& group = ns_.spec.groups[piece.group];
  const TileFormat format = FormatOf(ns_.spec, group);
  const std::uint32_t tokens = ns_.spec.block_tokens;
  const std::size_t record_bytes = RecordBytes(format);
  const LayerInput* const layers = LayersOf(piece) + piece.layer_begin;
  const std::size_t heads = piece.head_count;
  const std::size_t count = piece.layer_count * heads;

  StoreChunk chunk;
  chunk.own.reset(new std::byte[count * record_bytes]);
  absl::InlinedVector<EncodeArgs, 32> tiles(count);
  absl::InlinedVector<EncodeResult, 32> outcomes(count);
  absl::InlinedVector<const std::byte*, 64> data(2 * count);
  for (std::size_t i = 0; i < count; ++i) {
    const LayerInput& layer = layers[i / heads];
    const auto head = static_cast<std::uint32_t>(piece.head_begin + i % heads);
    tiles[i].k = PagesOf(layer.k, head, tokens, ns_.spec.source_dtype, &data[2 * i]);
    tiles[i].v = PagesOf(layer.v, head, tokens, ns_.spec.source_dtype, &data[2 * i + 1]);
    tiles[i].record = chunk.own.get() + i * record_bytes;
  }
  CpuEncoderOf(ns_.algorithm)(format, ns_.spec.frame, tiles, absl::MakeSpan(outcomes),
                              EncodeScratch(format));
  bool all_tiles = true;
  for (std::size_t i = 0; i < count; ++i) {
    all_tiles = all_tiles && outcomes[i] == EncodeResult::kTile;
    if (outcomes[i] != EncodeResult::kNonFinite) continue;
    const NonFinite where = FindNonFinite(tiles[i].k, tiles[i].v, tokens, format.head_dim);
    return absl::InvalidArgumentError(
        absl::StrCat("not finite: ", where.in_value ? "V" : "K", " of layer ",
                     group.layers[piece.layer_begin + i / heads], " head ",
                     options_.head_begin + piece.head_begin + i % heads, " token ", where.token,
                     " channel ", where.channel, "; a block must hold finite values only"));
  }
  StorePiece part = piece;
  part.records = true;
  if (all_tiles) {
    chunk.head = HeadOf(part);
    chunk.bytes.emplace_back(chunk.own.get(), count * record_bytes);
    chunk.raw_bytes = count * RawBytes(format, tokens);
    chunks->push_back(std::move(chunk));
    return absl::OkStatus();
  }
  // Runs of heads of one layer that are all tiles, or all not.
  for (std::size_t i = 0; i < count;) {
    std::size_t end = i + 1;
    while (end < count && end % heads != 0 && outcomes[end] == outcomes[i]) ++end;
    part = piece;
    part.layer_begin = static_cast<std::uint32_t>(piece.layer_begin + i / heads);
    part.layer_count = 1;
    part.head_begin = static_cast<std::uint32_t>(piece.head_begin + i % heads);
    part.head_count = static_cast<std::uint32_t>(end - i);
    part.records = outcomes[i] == EncodeResult::kTile;
    if (!part.records) {
      chunks->push_back(Gather(part));
    } else {
      StoreChunk run;
      const std::size_t bytes = (end - i) * record_bytes;
      run.own.reset(new std::byte[bytes]);
      std::memcpy(run.own.get(), chunk.own.get() + i * record_bytes, bytes);
      run.bytes.emplace_back(run.own.get(), bytes);
      run.head = HeadOf(part);
      run.raw_bytes = (end - i) * RawBytes(format, tokens);
      chunks->push_back(std::move(run));
    }
    i = end;
  }
  return absl::OkStatus();
}

}  // namespace kvmill
