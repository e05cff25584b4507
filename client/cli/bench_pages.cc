#include "client/cli/bench_pages.h"

#include <cstring>
#include <utility>

#include "kernels/tile_format.h"
#include "storage/core/page_layout.h"
#include "storage/core/status_macros.h"

namespace kvmill::cli {
namespace {

constexpr std::uint32_t kPageTokens = 16;

}  // namespace

absl::StatusOr<BenchPages> BenchPages::Create(const NamespaceSpec& spec,
                                              absl::Span<const std::uint16_t> k,
                                              absl::Span<const std::uint16_t> v,
                                              absl::Span<const std::byte> records) {
  const LayerGroup& group = spec.groups[0];
  const bool tiles = !records.empty();
  const std::size_t value_bytes = k.size() * sizeof(k[0]);
  BenchPages pages;
  KVMILL_ASSIGN_OR_RETURN(pages.memory_,
                          SharedMemory::Create(tiles ? records.size() : 2 * value_bytes));
  EngineLayers layers;
  layers.block_tokens = spec.block_tokens;
  layers.head_dim = group.head_dim;
  layers.head_count = group.kv_heads;
  layers.keys.assign(group.layers.size(), {0, 0});
  if (tiles) {
    std::memcpy(pages.memory_.data(), records.data(), records.size());
    layers.element = EngineElement::kRecords;
    layers.page_tokens = spec.block_tokens;
    layers.page_bytes = records.size();
    layers.head_stride_bytes = RecordBytes(FormatOf(spec, group));
  } else {
    std::memcpy(pages.memory_.data(), k.data(), value_bytes);
    std::memcpy(pages.memory_.data() + value_bytes, v.data(), value_bytes);
    layers.element =
        spec.source_dtype == DType::kFloat16 ? EngineElement::kFloat16 : EngineElement::kBFloat16;
    layers.values.assign(group.layers.size(), {0, value_bytes});
    layers.page_tokens = kPageTokens;
    layers.head_stride_bytes = std::uint64_t{2} * group.head_dim;
    layers.token_stride_bytes = layers.head_stride_bytes * group.kv_heads;
    layers.page_bytes = layers.token_stride_bytes * kPageTokens;
  }
  layers.page_count = spec.block_tokens / layers.page_tokens;
  layers.page_stride_bytes = layers.page_bytes;
  EngineRegion region;
  region.base = reinterpret_cast<std::uintptr_t>(pages.memory_.data());
  region.bytes = pages.memory_.bytes();
  region.fd = pages.memory_.fd();
  pages.geometry_.regions = {region};
  for (std::uint64_t page = 0; page < layers.page_count; ++page) pages.numbers_.push_back(page);
  pages.geometry_.layers = {std::move(layers)};
  pages.lists_ = {pages.numbers_};
  return pages;
}

PageBlock BenchPages::Block(const BlockKey& key, std::uint32_t token_count) const {
  PageBlock block;
  block.key = key;
  block.token_count = token_count;
  block.pages = lists_;
  return block;
}

}  // namespace kvmill::cli
