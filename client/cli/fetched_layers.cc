#include "client/cli/fetched_layers.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "client/cli/files.h"
#include "storage/core/status_macros.h"

namespace kvmill::cli {
namespace {

std::size_t LayerCount(const NamespaceSpec& spec) {
  std::size_t count = 0;
  for (const std::uint16_t layer : LayerOrder(spec))
    count = std::max<std::size_t>(count, layer + 1);
  return count;
}

}  // namespace

FetchedTensors::FetchedTensors(const NamespaceSpec& spec, std::uint32_t token_count)
    : order_(LayerOrder(spec)), block_tokens_(spec.block_tokens), layers_(LayerCount(spec)) {
  for (const LayerGroup& group : spec.groups) {
    for (const std::uint16_t layer : group.layers) {
      for (Tensor* tensor : {&layers_[layer].k, &layers_[layer].v}) {
        tensor->tokens = token_count;
        tensor->heads = group.kv_heads;
        tensor->head_dim = group.head_dim;
        tensor->dtype = spec.source_dtype;
        tensor->values.resize(std::size_t{token_count} * group.kv_heads * group.head_dim);
      }
    }
  }
}

std::vector<LayerOutput> FetchedTensors::Outputs(std::uint32_t first_block,
                                                 std::uint32_t block_count) {
  const auto view = [](Tensor& tensor, std::size_t first_token) {
    return MutableKvView::Array(tensor.values.data() + first_token * tensor.heads * tensor.head_dim,
                                tensor.heads, tensor.head_dim);
  };
  std::vector<LayerOutput> outputs;
  for (std::uint32_t b = first_block; b < first_block + block_count; ++b) {
    const std::size_t first_token = std::size_t{b} * block_tokens_;
    for (const std::uint16_t layer : order_) {
      outputs.push_back({view(layers_[layer].k, first_token), view(layers_[layer].v, first_token)});
    }
  }
  return outputs;
}

void FetchedTensors::Truncate(std::uint32_t token_count) {
  for (LayerTensors& layer : layers_) {
    for (Tensor* tensor : {&layer.k, &layer.v}) {
      tensor->tokens = std::min(tensor->tokens, token_count);
      tensor->values.resize(std::size_t{tensor->tokens} * tensor->heads * tensor->head_dim);
    }
  }
}

FetchedRecords::FetchedRecords(const NamespaceSpec& spec, std::uint32_t block_count)
    : dtype_(spec.source_dtype), block_count_(block_count), layers_(LayerCount(spec)) {
  for (const LayerGroup& group : spec.groups) {
    for (const std::uint16_t number : group.layers) {
      Layer& layer = layers_[number];
      layer.format = FormatOf(spec, group);
      layer.heads = group.kv_heads;
      layer.records.resize(RecordBytes(layer.format) * layer.heads * block_count);
    }
  }
}

absl::Status FetchedRecords::Sink::OnPage(const PageId& id, const PageView& page) {
  Layer& layer = records_.layers_[page.header().layer];
  const std::uint32_t block = first_block_ + id.block;
  const std::size_t record_bytes = RecordBytes(layer.format);
  for (std::uint32_t head = 0; head < layer.heads; ++head) {
    const absl::Span<const std::byte> contents = page.contents(head);
    if (page.slot(head).kind == SlotKind::kTile) {
      std::memcpy(layer.records.data() + (std::size_t{block} * layer.heads + head) * record_bytes,
                  contents.data(), record_bytes);
      continue;
    }
    RawHead raw;
    raw.block = block;
    raw.head = head;
    raw.k.resize(contents.size() / 4);
    raw.v.resize(contents.size() / 4);
    std::memcpy(raw.k.data(), contents.data(), contents.size() / 2);
    std::memcpy(raw.v.data(), contents.data() + contents.size() / 2, contents.size() / 2);
    layer.raw_heads.push_back(std::move(raw));
  }
  return absl::OkStatus();
}

void FetchedRecords::Truncate(std::uint32_t block_count) {
  block_count_ = std::min(block_count_, block_count);
  for (Layer& layer : layers_) {
    layer.records.resize(RecordBytes(layer.format) * layer.heads * block_count_);
    layer.raw_heads.erase(
        std::remove_if(layer.raw_heads.begin(), layer.raw_heads.end(),
                       [&](const RawHead& raw) { return raw.block >= block_count_; }),
        layer.raw_heads.end());
  }
}

absl::Status FetchedRecords::Save(absl::string_view prefix) const {
  for (std::size_t n = 0; n < layers_.size(); ++n) {
    const Layer& layer = layers_[n];
    KVMILL_RETURN_IF_ERROR(WriteFile(LayerPath(prefix, n, ".records"), {layer.records}));
    if (layer.raw_heads.empty()) continue;
    KVMILL_RETURN_IF_ERROR(WriteFile(
        LayerPath(prefix, n, ".raw"),
        {SerializeRawHeads(layer.raw_heads, layer.format, dtype_, layer.heads, block_count_)}));
  }
  return absl::OkStatus();
}

}  // namespace kvmill::cli
