// Made-up attention calls: sequences of tiles, raw blocks and tails, which own their memory.
#ifndef KVMILL_TESTS_KERNELS_ATTENTION_PROBLEM_H_
#define KVMILL_TESTS_KERNELS_ATTENTION_PROBLEM_H_

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <limits>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "kernels/attention.h"
#include "kernels/decode.h"
#include "kernels/encode.h"
#include "tests/kernels/tile_testing.h"

namespace kvmill {

struct SequenceSpec {
  std::uint64_t length = 0;
  std::uint32_t query_count = 1;
  bool last_block_in_table =
      false;  // The unfinished block is a raw entry of the table, not a tail.
};

struct ProblemSpec {
  TileFormat format;
  std::uint32_t kv_heads = 1;
  std::uint32_t sharing = 1;  // Query heads per KV head.
  std::vector<SequenceSpec> sequences;
  double raw_fraction = 0;  // Of the blocks of a head.
  DType dtype = DType::kFloat16;
  std::uint32_t window = 0;
  float soft_cap = 0;
  Frame frame = Frame::kModel;
  float query_size = 1;  // Standard deviation; larger ones make sharper attention.
  std::uint32_t tail_page_tokens = 16;
  std::ptrdiff_t tail_channel_stride_bytes = 2;
  VectorType query_type = VectorType::kFloat32;
  std::uint32_t seed = 1;
};

class AttentionProblem {
 public:
  explicit AttentionProblem(const ProblemSpec& spec) : spec_(spec), random_(spec.seed) {
    AttentionShape& shape = args_.shape;
    shape.format = spec.format;
    shape.kv_heads = spec.kv_heads;
    shape.q_heads = spec.kv_heads * spec.sharing;
    shape.scale = 1 / std::sqrt(static_cast<float>(spec.format.head_dim));
    shape.soft_cap = spec.soft_cap;
    shape.window = spec.window;
    shape.frame = spec.frame;
    // Padded on purpose: nothing may depend on rows being adjacent.
    const std::ptrdiff_t row_bytes = std::ptrdiff_t{2} * spec.format.head_dim + 6;
    shape.raw = {spec.dtype, row_bytes, row_bytes * spec.format.group + 10};
    for (const SequenceSpec& sequence : spec.sequences) AddSequence(sequence);
    args_.sequences = sequences_;
    std::normal_distribution<float> gauss(0, spec.query_size);
    const std::size_t values = row_count() * spec.format.head_dim;
    for (std::size_t i = 0; i < values; ++i) query_.push_back(gauss(random_));
    for (const float q : query_) {
      query16_.push_back(FromFloat(
          q, spec.query_type == VectorType::kBFloat16 ? DType::kBFloat16 : DType::kFloat16));
    }
    args_.query_type = spec.query_type;
    args_.query = spec.query_type == VectorType::kFloat32 ? static_cast<const void*>(query_.data())
                                                          : query16_.data();
  }
  AttentionProblem(const AttentionProblem&) = delete;
  AttentionProblem& operator=(const AttentionProblem&) = delete;

  // Rows of the output: queries times heads.
  std::size_t row_count() const {
    std::size_t queries = 0;
    for (const AttentionSequence& s : sequences_) queries += s.query_count;
    return queries * args_.shape.q_heads;
  }
  std::uint32_t dim() const { return spec_.format.head_dim; }
  AttentionArgs& args() { return args_; }
  AttentionShape& shape() { return args_.shape; }
  std::vector<AttentionSequence>& sequences() { return sequences_; }
  std::vector<float>& query() { return query_; }
  std::vector<AttentionBlock>& table(std::size_t sequence) { return tables_[sequence]; }

  // K and V of one token as the model sees them, decoded from wherever they are.
  std::vector<float> KeyOf(std::size_t sequence, std::uint64_t token, std::uint32_t head) const {
    return RowOf(sequence, token, head, false);
  }
  std::vector<float> ValueOf(std::size_t sequence, std::uint64_t token, std::uint32_t head) const {
    return RowOf(sequence, token, head, true);
  }

 private:
  std::vector<std::uint16_t> Gaussian(std::size_t count) {
    std::normal_distribution<float> gauss;
    std::vector<std::uint16_t> values(count);
    for (std::uint16_t& v : values) v = FromFloat(gauss(random_), spec_.dtype);
    return values;
  }

  const std::byte* AddTile() {
    TileInput input;
    input.dtype = spec_.dtype;
    const std::size_t count = std::size_t{spec_.format.group} * spec_.format.head_dim;
    input.k = Gaussian(count);
    input.v = Gaussian(count);
    // Channels of different width and mean, as keys have.
    for (std::size_t i = 0; i < count; ++i) {
      const std::size_t d = i % spec_.format.head_dim;
      const float x = ToFloat(input.k[i], spec_.dtype) * (d % 31 == 7 ? 6.0f : 1.0f) +
                      (d % 17 == 3 ? 2.0f : 0.0f);
      input.k[i] = FromFloat(x, spec_.dtype);
    }
    Encoded encoded = Encode(CpuImplementations().front(), spec_.format, input, spec_.frame);
    if (encoded.result != EncodeResult::kTile) throw std::runtime_error("not a tile");
    // At an odd address: records may be anywhere.
    bytes_.emplace_back(encoded.record.size() + 1);
    std::memcpy(bytes_.back().data() + 1, encoded.record.data(), encoded.record.size());
    return bytes_.back().data() + 1;
  }

  const std::byte* AddRaw(std::uint32_t tokens) {
    const RawLayout& raw = args_.shape.raw;
    const std::size_t bytes = static_cast<std::size_t>(
        raw.value_offset_bytes + static_cast<std::ptrdiff_t>(tokens) * raw.token_stride_bytes);
    bytes_.emplace_back(bytes, std::byte{0x7E});  // NaN between and behind the rows.
    for (std::uint32_t t = 0; t < tokens; ++t) {
      for (const std::ptrdiff_t half : {std::ptrdiff_t{0}, raw.value_offset_bytes}) {
        const std::vector<std::uint16_t> row = Gaussian(spec_.format.head_dim);
        std::memcpy(
            bytes_.back().data() + half + static_cast<std::ptrdiff_t>(t) * raw.token_stride_bytes,
            row.data(), row.size() * 2);
      }
    }
    return bytes_.back().data();
  }

  HeadPages AddTailHalf(std::uint32_t tokens) {
    HeadPages pages;
    pages.page_tokens = spec_.tail_page_tokens;
    pages.channel_stride_bytes = spec_.tail_channel_stride_bytes;
    pages.token_stride_bytes = pages.channel_stride_bytes * spec_.format.head_dim + 4;
    pages.offset_bytes = 12;
    pages.dtype = spec_.dtype;
    page_lists_.emplace_back();
    for (std::uint32_t first = 0; first < tokens; first += pages.page_tokens) {
      bytes_.emplace_back(pages.offset_bytes + static_cast<std::size_t>(pages.token_stride_bytes) *
                                                   std::min(pages.page_tokens, tokens - first),
                          std::byte{0x7E});
      page_lists_.back().push_back(bytes_.back().data());
      for (std::uint32_t t = first; t < tokens && t < first + pages.page_tokens; ++t) {
        const std::vector<std::uint16_t> row = Gaussian(spec_.format.head_dim);
        for (std::size_t d = 0; d < row.size(); ++d) {
          std::memcpy(bytes_.back().data() + pages.offset_bytes +
                          (t - first) * static_cast<std::size_t>(pages.token_stride_bytes) +
                          d * static_cast<std::size_t>(pages.channel_stride_bytes),
                      &row[d], 2);
        }
      }
    }
    pages.pages = page_lists_.back().data();
    return pages;
  }

  void AddSequence(const SequenceSpec& spec) {
    const std::uint32_t group = spec_.format.group;
    AttentionSequence s;
    s.token_end = spec.length;
    s.query_count = spec.query_count;
    s.query_position = spec.length < spec.query_count ? 0 : spec.length - spec.query_count;
    s.block_count = static_cast<std::uint32_t>(spec.length / group);
    std::bernoulli_distribution raw(spec_.raw_fraction);
    std::vector<AttentionBlock>& table = tables_.emplace_back();
    for (std::uint32_t b = 0; b < s.block_count; ++b) {
      for (std::uint32_t h = 0; h < spec_.kv_heads; ++h) {
        if (raw(random_)) {
          table.push_back({BlockKind::kRaw, AddRaw(group)});
        } else {
          table.push_back({BlockKind::kTile, AddTile()});
        }
      }
    }
    const auto rest = static_cast<std::uint32_t>(spec.length % group);
    std::vector<TailHead>& tail = tails_.emplace_back();
    if (rest != 0 && spec.last_block_in_table) {
      ++s.block_count;
      for (std::uint32_t h = 0; h < spec_.kv_heads; ++h) {
        table.push_back({BlockKind::kRaw, AddRaw(rest)});
      }
    } else if (rest != 0) {
      for (std::uint32_t h = 0; h < spec_.kv_heads; ++h) {
        const HeadPages k = AddTailHalf(rest);
        tail.push_back({k, AddTailHalf(rest)});
      }
    }
    s.blocks = table.data();
    s.tail = tail.empty() ? nullptr : tail.data();
    sequences_.push_back(s);
  }

  std::vector<float> RowOf(std::size_t sequence, std::uint64_t token, std::uint32_t head,
                           bool value) const {
    const AttentionSequence& s = sequences_[sequence];
    const std::uint64_t group = spec_.format.group;
    const std::uint64_t b = token / group;
    std::vector<float> out;
    if (b < s.block_count) {
      const AttentionBlock& block = s.blocks[b * spec_.kv_heads + head];
      if (block.kind == BlockKind::kTile) {
        const std::vector<std::byte> record(block.data, block.data + RecordBytes(spec_.format));
        const Decoded tile = Decode(ReferenceImplementation(), spec_.format, record, Frame::kModel);
        const std::vector<float>& half = value ? tile.v : tile.k;
        const auto first = half.begin() + static_cast<std::ptrdiff_t>(token % group * dim());
        return {first, first + dim()};
      }
      const RawLayout& raw = args_.shape.raw;
      const std::byte* row = block.data + (value ? raw.value_offset_bytes : 0) +
                             static_cast<std::ptrdiff_t>(token % group) * raw.token_stride_bytes;
      for (std::uint32_t d = 0; d < dim(); ++d) {
        out.push_back(ToFloat(Float16BitsAt(row, d), raw.dtype));
      }
      return out;
    }
    const HeadPages& pages = value ? s.tail[head].v : s.tail[head].k;
    const std::byte* row = pages.Row(static_cast<std::uint32_t>(token - s.block_count * group));
    for (std::uint32_t d = 0; d < dim(); ++d) {
      out.push_back(ToFloat(
          Float16BitsAt(row + static_cast<std::ptrdiff_t>(d) * pages.channel_stride_bytes, 0),
          pages.dtype));
    }
    return out;
  }

  const ProblemSpec spec_;
  std::mt19937 random_;
  AttentionArgs args_;
  std::deque<std::vector<std::byte>> bytes_;  // Never move.
  std::deque<std::vector<const std::byte*>> page_lists_;
  std::deque<std::vector<AttentionBlock>> tables_;
  std::deque<std::vector<TailHead>> tails_;
  std::vector<AttentionSequence> sequences_;
  std::vector<float> query_;
  std::vector<std::uint16_t> query16_;
};

struct AttentionResult {
  std::vector<float> output;       // [rows][dim]
  std::vector<float> log_sum_exp;  // [rows]
};

// Runs `attend(args)` with fp32 outputs that start out as NaN.
template <class Attend>
AttentionResult RunAttention(AttentionProblem& problem, const Attend& attend) {
  AttentionResult result;
  result.output.assign(problem.row_count() * problem.dim(),
                       std::numeric_limits<float>::quiet_NaN());
  result.log_sum_exp.assign(problem.row_count(), std::numeric_limits<float>::quiet_NaN());
  AttentionArgs args = problem.args();
  args.sequences = problem.sequences();
  args.output = result.output.data();
  args.output_type = VectorType::kFloat32;
  args.log_sum_exp = result.log_sum_exp.data();
  const absl::Status valid = ValidateAttention(args);
  if (!valid.ok()) throw std::runtime_error(std::string(valid.message()));
  attend(args);
  return result;
}

inline AttentionResult RunReference(AttentionProblem& problem) {
  return RunAttention(problem, [](const AttentionArgs& args) { AttentionReference(args); });
}

}  // namespace kvmill

#endif  // KVMILL_TESTS_KERNELS_ATTENTION_PROBLEM_H_
