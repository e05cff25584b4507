#include "client/cli/attention_files.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <random>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "client/cli/files.h"
#include "client/cli/kv_files.h"
#include "client/cli/relative_error.h"
#include "kernels/attention.h"
#include "storage/core/status_macros.h"

namespace kvmill::cli {
namespace {

// K and V of one layer as 16-bit blocks and as tiles, and one sequence over all of its full blocks.
class LayerAttention {
 public:
  static absl::StatusOr<LayerAttention> Load(const AttentionFilesOptions& options,
                                             const LayerTensors& tensors, std::size_t number) {
    LayerAttention layer;
    AttentionShape& shape = layer.shape_;
    shape.format = options.format;
    shape.format.head_dim = static_cast<std::uint16_t>(tensors.k.head_dim);
    KVMILL_RETURN_IF_ERROR(ValidateTileFormat(shape.format));
    const std::size_t block_count = tensors.k.tokens / shape.format.group;
    const std::size_t heads = tensors.k.heads;
    const std::string path = LayerPath(options.records, number, ".records");
    KVMILL_ASSIGN_OR_RETURN(layer.records_, ReadFile(path));
    const std::size_t record_bytes = RecordBytes(shape.format);
    if (block_count == 0 || layer.records_.size() != block_count * heads * record_bytes) {
      return absl::InvalidArgumentError(absl::StrCat(
          path, ": ", layer.records_.size(), " bytes; the K and V files need ", block_count,
          " blocks of ", heads, " heads, ", block_count * heads * record_bytes, " bytes"));
    }
    shape.kv_heads = static_cast<std::uint32_t>(heads);
    shape.q_heads = shape.kv_heads * options.q_heads_per_kv_head;
    shape.scale = 1 / std::sqrt(static_cast<float>(tensors.k.head_dim));
    const std::size_t tokens = block_count * shape.format.group;
    const std::size_t row_values = heads * tensors.k.head_dim;
    layer.rows_.assign(tensors.k.values.begin(),
                       tensors.k.values.begin() + static_cast<std::ptrdiff_t>(tokens * row_values));
    layer.rows_.insert(layer.rows_.end(), tensors.v.values.begin(),
                       tensors.v.values.begin() + static_cast<std::ptrdiff_t>(tokens * row_values));
    shape.raw.token_stride_bytes = static_cast<std::ptrdiff_t>(2 * row_values);
    shape.raw.value_offset_bytes = static_cast<std::ptrdiff_t>(2 * tokens * row_values);
    layer.tokens_ = static_cast<std::uint32_t>(tokens);
    return layer;
  }

  std::uint32_t tokens() const { return tokens_; }
  const AttentionShape& shape() const { return shape_; }
  std::size_t query_values() const { return std::size_t{shape_.q_heads} * shape_.format.head_dim; }

  // Makes the tables; the object stays where it is from now on.
  void Prepare() {
    const std::size_t head_bytes = std::size_t{2} * shape_.format.head_dim;
    const auto* rows = reinterpret_cast<const std::byte*>(rows_.data());
    const auto* records = reinterpret_cast<const std::byte*>(records_.data());
    const std::size_t block_count = tokens_ / shape_.format.group;
    for (std::size_t b = 0; b < block_count; ++b) {
      for (std::size_t h = 0; h < shape_.kv_heads; ++h) {
        tiles_.push_back(
            {BlockKind::kTile, records + (b * shape_.kv_heads + h) * RecordBytes(shape_.format)});
        const std::size_t row_bytes = head_bytes * shape_.kv_heads;
        raws_.push_back(
            {BlockKind::kRaw, rows + b * shape_.format.group * row_bytes + h * head_bytes});
      }
    }
  }

  // One query token at `position`, over tiles or over 16-bit rows.
  AttentionArgs Args(bool tiles, std::uint32_t position, const float* query, float* output,
                     AttentionSequence* sequence) const {
    *sequence = AttentionSequence();
    sequence->blocks = tiles ? tiles_.data() : raws_.data();
    sequence->block_count = tokens_ / shape_.format.group;
    sequence->token_end = tokens_;
    sequence->query_position = position;
    AttentionArgs args;
    args.shape = shape_;
    args.sequences = absl::MakeConstSpan(sequence, 1);
    args.query = query;
    args.output = output;
    return args;
  }

 private:
  AttentionShape shape_;
  std::uint32_t tokens_ = 0;
  std::string records_;
  std::vector<std::uint16_t> rows_;  // K of all tokens, then V.
  std::vector<AttentionBlock> tiles_, raws_;
};

// Scratch of AttentionCpu, aligned.
class Scratch {
 public:
  absl::Span<std::byte> For(const AttentionArgs& args) {
    const std::size_t bytes = AttentionScratchBytes(args, 1);
    if (memory_.size() < bytes + 64) memory_.resize(bytes + 64);
    const auto at = reinterpret_cast<std::uintptr_t>(memory_.data());
    return absl::MakeSpan(memory_.data() + (64 - at % 64) % 64, bytes);
  }

 private:
  std::vector<std::byte> memory_;
};

double Median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2),
                   values.end());
  return values[values.size() / 2];
}

template <class Work>
double Microseconds(const Work& work) {
  const auto start = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - start)
      .count();
}

}  // namespace

absl::StatusOr<AttentionFilesResult> RunAttentionOnFiles(const AttentionFilesOptions& options) {
  KVMILL_ASSIGN_OR_RETURN(const std::vector<LayerTensors> tensors,
                          LoadLayers(options.kv, DType::kFloat16));
  std::vector<LayerAttention> layers;
  for (std::size_t l = 0; l < tensors.size(); ++l) {
    KVMILL_ASSIGN_OR_RETURN(LayerAttention layer, LayerAttention::Load(options, tensors[l], l));
    layers.push_back(std::move(layer));
  }
  for (LayerAttention& layer : layers) layer.Prepare();

  AttentionFilesResult result;
  result.layers = layers.size();
  result.tokens = layers.front().tokens();
  std::mt19937 random(1);
  std::normal_distribution<float> gauss;
  Scratch scratch;
  AttentionSequence sequence;
  SquareSums from_tiles, from_values;
  for (const LayerAttention& layer : layers) {
    std::vector<float> query(layer.query_values()), output(query.size()), want(query.size());
    for (std::uint32_t i = 0; i < options.queries; ++i) {
      for (float& q : query) q = gauss(random);
      const std::uint32_t half = layer.tokens() / 2;
      const std::uint32_t position = half + (layer.tokens() - half - 1) * (i + 1) / options.queries;
      AttentionArgs args = layer.Args(true, position, query.data(), output.data(), &sequence);
      KVMILL_RETURN_IF_ERROR(ValidateAttention(args));
      AttentionCpu(args, AttentionWorkers(), scratch.For(args));
      args.output = want.data();
      AttentionReference(args);
      from_tiles.Add(output, want);
      AttentionReference(layer.Args(false, position, query.data(), want.data(), &sequence));
      from_values.Add(output, want);
    }
  }
  result.rel_error = from_tiles.RelativeError();
  result.output_error = from_values.RelativeError();

  std::vector<double> tiles_us, fp16_us, ratio;
  for (std::uint32_t r = 0; r < options.repetitions; ++r) {
    const LayerAttention& layer = layers[r % layers.size()];
    std::vector<float> query(layer.query_values()), output(query.size());
    for (float& q : query) q = gauss(random);
    const auto time = [&](bool tiles) {
      const AttentionArgs args =
          layer.Args(tiles, layer.tokens() - 1, query.data(), output.data(), &sequence);
      const absl::Span<std::byte> memory = scratch.For(args);
      return Microseconds([&] { AttentionCpu(args, AttentionWorkers(), memory); });
    };
    tiles_us.push_back(time(true));
    fp16_us.push_back(time(false));
    ratio.push_back(fp16_us.back() / tiles_us.back());
  }
  result.tiles_us = Median(std::move(tiles_us));
  result.fp16_us = Median(std::move(fp16_us));
  result.ratio = Median(std::move(ratio));
  return result;
}

}  // namespace kvmill::cli
