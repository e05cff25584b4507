// The oracle: every head decoded, every score kept, everything in fp64.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "kernels/attention.h"
#include "kernels/attention_range.h"
#include "kernels/decode.h"

namespace kvmill {
namespace {

using Row = std::vector<double>;

// row · H, with H[i][j] = (-1)^popcount(i & j) / sqrt(n), by butterflies.
Row Rotated(Row row) {
  for (std::size_t half = 1; half < row.size(); half *= 2) {
    for (std::size_t i = 0; i < row.size(); ++i) {
      if ((i & half) != 0) continue;
      const double a = row[i];
      const double b = row[i + half];
      row[i] = a + b;
      row[i + half] = a - b;
    }
  }
  const double norm = 1.0 / std::sqrt(static_cast<double>(row.size()));
  for (double& x : row) x *= norm;
  return row;
}

// K and V of the tokens that one KV head shows to any query, each token in the frame that it is
// stored in.
struct Head {
  std::uint64_t first_token = 0;
  std::vector<float> k, v;    // [tokens][head_dim].
  std::vector<bool> in_tile;  // [tokens]: in the rotated frame.
};

void AppendRow(const std::byte* row, std::ptrdiff_t channel_stride_bytes, DType dtype,
               std::size_t dim, std::vector<float>& to) {
  for (std::size_t d = 0; d < dim; ++d) {
    std::uint16_t bits;
    std::memcpy(&bits, row + static_cast<std::ptrdiff_t>(d) * channel_stride_bytes, sizeof(bits));
    to.push_back(ToFloat(bits, dtype));
  }
}

Head ReadHead(const AttentionShape& shape, const AttentionSequence& s, std::uint32_t head) {
  const std::size_t dim = shape.format.head_dim;
  const std::uint64_t group = shape.format.group;
  const TokenRange seen = SeenBySequence(shape, s);
  Head out;
  if (seen.empty()) return out;
  out.first_token = seen.begin / group * group;
  std::vector<float> k(group * dim);
  std::vector<float> v(group * dim);
  for (std::uint64_t t = out.first_token; t < seen.end;) {
    const std::uint64_t b = t / group;
    if (b >= s.block_count) {
      const auto in_tail = static_cast<std::uint32_t>(t - s.block_count * group);
      const TailHead& tail = s.tail[head];
      AppendRow(tail.k.Row(in_tail), tail.k.channel_stride_bytes, tail.k.dtype, dim, out.k);
      AppendRow(tail.v.Row(in_tail), tail.v.channel_stride_bytes, tail.v.dtype, dim, out.v);
      out.in_tile.push_back(false);
      ++t;
      continue;
    }
    const AttentionBlock& block = s.blocks[b * shape.kv_heads + head];
    if (block.kind == BlockKind::kTile) {
      DecodeTileToFloatReference(shape.format, Frame::kRotated, block.data, absl::MakeSpan(k),
                                 absl::MakeSpan(v));
      out.k.insert(out.k.end(), k.begin(), k.end());
      out.v.insert(out.v.end(), v.begin(), v.end());
    } else {
      // The tokens beyond the last one that is seen need not exist.
      for (std::uint64_t i = 0; i < group && t + i < seen.end; ++i) {
        const std::byte* row =
            block.data + static_cast<std::ptrdiff_t>(i) * shape.raw.token_stride_bytes;
        AppendRow(row, 2, shape.raw.dtype, dim, out.k);
        AppendRow(row + shape.raw.value_offset_bytes, 2, shape.raw.dtype, dim, out.v);
      }
    }
    out.in_tile.resize(out.k.size() / dim, block.kind == BlockKind::kTile);
    t += group;
  }
  return out;
}

double Dot(const Row& q, const float* k) {
  double sum = 0;
  for (std::size_t d = 0; d < q.size(); ++d) sum += q[d] * static_cast<double>(k[d]);
  return sum;
}

void AddScaled(double weight, const float* v, Row& to) {
  for (std::size_t d = 0; d < to.size(); ++d) to[d] += weight * static_cast<double>(v[d]);
}

// One query of one head. Returns the log-sum-exp.
double Attend(const AttentionShape& shape, const Head& head, TokenRange seen, const Row& query,
              Row& output) {
  const std::size_t dim = query.size();
  const bool rotate = shape.frame == Frame::kModel;
  const Row query_of_tiles = rotate ? Rotated(query) : query;
  Row from_tiles(dim, 0.0);
  Row from_raw(dim, 0.0);
  output.assign(dim, 0.0);
  if (seen.empty()) return -std::numeric_limits<double>::infinity();

  std::vector<double> scores;
  for (std::uint64_t t = seen.begin; t < seen.end; ++t) {
    const std::size_t i = t - head.first_token;
    double score = Dot(head.in_tile[i] ? query_of_tiles : query, &head.k[i * dim]);
    score *= static_cast<double>(shape.scale);
    if (shape.soft_cap > 0) {
      const double cap = static_cast<double>(shape.soft_cap);
      score = cap * std::tanh(score / cap);
    }
    scores.push_back(score);
  }
  const double largest = *std::max_element(scores.begin(), scores.end());
  double total = 0;
  for (const double score : scores) total += std::exp(score - largest);
  for (std::uint64_t t = seen.begin; t < seen.end; ++t) {
    const std::size_t i = t - head.first_token;
    const double p = std::exp(scores[t - seen.begin] - largest) / total;
    AddScaled(p, &head.v[i * dim], head.in_tile[i] ? from_tiles : from_raw);
  }
  if (rotate) from_tiles = Rotated(from_tiles);
  for (std::size_t d = 0; d < dim; ++d) output[d] = from_tiles[d] + from_raw[d];
  return largest + std::log(total);
}

float Load(const void* base, VectorType type, std::size_t index) {
  if (type == VectorType::kFloat32) return static_cast<const float*>(base)[index];
  const std::uint16_t bits = static_cast<const std::uint16_t*>(base)[index];
  return ToFloat(bits, type == VectorType::kFloat16 ? DType::kFloat16 : DType::kBFloat16);
}

void Store(double value, void* base, VectorType type, std::size_t index) {
  const auto x = static_cast<float>(value);
  if (type == VectorType::kFloat32) {
    static_cast<float*>(base)[index] = x;
  } else {
    static_cast<std::uint16_t*>(base)[index] =
        FromFloat(x, type == VectorType::kFloat16 ? DType::kFloat16 : DType::kBFloat16);
  }
}

}  // namespace

void AttentionReference(const AttentionArgs& args) {
  const AttentionShape& shape = args.shape;
  const std::size_t dim = shape.format.head_dim;
  const std::uint32_t sharing = shape.q_heads / shape.kv_heads;
  std::size_t first_row = 0;
  Row query(dim);
  Row output;
  for (const AttentionSequence& s : args.sequences) {
    for (std::uint32_t kv_head = 0; kv_head < shape.kv_heads && s.query_count != 0; ++kv_head) {
      const Head head = ReadHead(shape, s, kv_head);
      for (std::uint32_t i = 0; i < s.query_count; ++i) {
        for (std::uint32_t q_head = kv_head * sharing; q_head < (kv_head + 1) * sharing; ++q_head) {
          const std::size_t row = (first_row + i) * shape.q_heads + q_head;
          for (std::size_t d = 0; d < dim; ++d) {
            query[d] = static_cast<double>(Load(args.query, args.query_type, row * dim + d));
          }
          const double lse = Attend(shape, head, SeenByQuery(shape, s, i), query, output);
          for (std::size_t d = 0; d < dim; ++d) {
            Store(output[d], args.output, args.output_type, row * dim + d);
          }
          if (args.log_sum_exp != nullptr) args.log_sum_exp[row] = static_cast<float>(lse);
        }
      }
    }
    first_row += s.query_count;
  }
}

}  // namespace kvmill
