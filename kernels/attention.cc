// What every implementation of attention shares: the check of the arguments and the merge.
#include "kernels/attention.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "absl/strings/str_cat.h"
#include "kernels/attention_range.h"

namespace kvmill {
namespace {

absl::Status Bad(const std::string& what) { return absl::InvalidArgumentError(what); }

absl::Status ValidateShape(const AttentionShape& s, bool* has_raw_layout) {
  absl::Status format = ValidateTileFormat(s.format);
  if (!format.ok()) return format;
  if (s.kv_heads == 0 || s.q_heads == 0 || s.q_heads > kAttentionHeadsMax ||
      s.q_heads % s.kv_heads != 0) {
    return Bad(absl::StrCat("q_heads ", s.q_heads, ", kv_heads ", s.kv_heads,
                            ": want 1 or more KV heads and a multiple of that, at most ",
                            kAttentionHeadsMax, ", of query heads"));
  }
  if (!std::isfinite(s.scale)) {
    return Bad(absl::StrCat("scale ", s.scale, ": want a finite number"));
  }
  if (!std::isfinite(s.soft_cap) || s.soft_cap < 0) {
    return Bad(absl::StrCat("soft_cap ", s.soft_cap, ": want 0 (none) or a positive number"));
  }
  *has_raw_layout = s.raw.token_stride_bytes != 0 && s.raw.value_offset_bytes != 0;
  return absl::OkStatus();
}

absl::Status ValidateTail(const HeadPages& pages, const std::string& where) {
  if (pages.pages == nullptr) return Bad(absl::StrCat(where, ": no pages"));
  if (pages.page_tokens == 0) return Bad(absl::StrCat(where, ": page_tokens 0: want 1 or more"));
  return absl::OkStatus();
}

absl::Status ValidateSequence(const AttentionShape& shape, const AttentionSequence& s,
                              std::size_t index, bool has_raw_layout) {
  const std::string where = absl::StrCat("sequence ", index);
  const std::uint64_t block_tokens = std::uint64_t{s.block_count} * shape.format.group;
  if (s.token_begin > s.token_end) {
    return Bad(
        absl::StrCat(where, ": token_begin ", s.token_begin, " is behind token_end ", s.token_end));
  }
  constexpr std::uint64_t kPositionMax = std::uint64_t{1} << 62;
  if (s.token_end > kPositionMax || s.query_position > kPositionMax) {
    return Bad(absl::StrCat(where, ": token_end ", s.token_end, ", query_position ",
                            s.query_position, ": want at most 2^62"));
  }
  const TokenRange seen = SeenBySequence(shape, s);
  if (seen.empty()) return absl::OkStatus();
  if (seen.end > block_tokens) {
    if (s.tail == nullptr) {
      return Bad(absl::StrCat(where, ": token_end ", s.token_end, " is beyond ", s.block_count,
                              " blocks of ", shape.format.group, " tokens, and there is no tail"));
    }
    for (std::uint32_t h = 0; h < shape.kv_heads; ++h) {
      absl::Status k = ValidateTail(s.tail[h].k, absl::StrCat(where, ", head ", h, ", K tail"));
      if (!k.ok()) return k;
      absl::Status v = ValidateTail(s.tail[h].v, absl::StrCat(where, ", head ", h, ", V tail"));
      if (!v.ok()) return v;
    }
  }
  const std::uint64_t last = (std::min(seen.end, block_tokens) + shape.format.group - 1) /
                             shape.format.group;  // One past the last block that is seen.
  if (seen.begin / shape.format.group < last && s.blocks == nullptr) {
    return Bad(absl::StrCat(where, ": block_count ", s.block_count, " without a table"));
  }
  for (std::uint64_t b = seen.begin / shape.format.group; b < last; ++b) {
    for (std::uint32_t h = 0; h < shape.kv_heads; ++h) {
      const AttentionBlock& block = s.blocks[b * shape.kv_heads + h];
      const auto entry = [&] { return absl::StrCat(where, ", block ", b, ", head ", h); };
      switch (block.kind) {
        case BlockKind::kAbsent:
          return Bad(absl::StrCat(entry(), ": absent, but its tokens are seen"));
        case BlockKind::kRaw:
          if (!has_raw_layout) {
            return Bad(absl::StrCat(entry(), ": raw, but the raw layout has token_stride_bytes ",
                                    shape.raw.token_stride_bytes, " and value_offset_bytes ",
                                    shape.raw.value_offset_bytes));
          }
          break;
        case BlockKind::kTile:
          break;
        default:
          return Bad(absl::StrCat(entry(), ": kind ", static_cast<int>(block.kind),
                                  ": want 1 (tile) or 2 (raw)"));
      }
      if (block.data == nullptr) return Bad(absl::StrCat(entry(), ": data is null"));
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status ValidateAttention(const AttentionArgs& args) {
  bool has_raw_layout = false;
  absl::Status shape = ValidateShape(args.shape, &has_raw_layout);
  if (!shape.ok()) return shape;
  for (const VectorType type : {args.query_type, args.output_type}) {
    if (type > VectorType::kBFloat16) {
      return Bad(absl::StrCat("vector type ", static_cast<int>(type), ": want 0, 1 or 2"));
    }
  }
  std::uint64_t rows = 0;
  for (std::size_t i = 0; i < args.sequences.size(); ++i) {
    absl::Status sequence = ValidateSequence(args.shape, args.sequences[i], i, has_raw_layout);
    if (!sequence.ok()) return sequence;
    rows += args.sequences[i].query_count;
  }
  if (rows != 0 && (args.query == nullptr || args.output == nullptr)) {
    return Bad(absl::StrCat("query or output is null, with ", rows, " queries"));
  }
  return absl::OkStatus();
}

void MergeAttention(absl::Span<const AttentionPart> parts, std::size_t row_count,
                    std::size_t head_dim, float* output, float* log_sum_exp) {
  constexpr float kNothing = -std::numeric_limits<float>::infinity();
  for (std::size_t r = 0; r < row_count; ++r) {
    float largest = kNothing;
    for (const AttentionPart& part : parts) largest = std::max(largest, part.log_sum_exp[r]);
    float* row = output + r * head_dim;
    if (largest == kNothing) {  // Also keeps -inf - -inf, which is NaN, from being computed.
      std::fill_n(row, head_dim, 0.0f);
      if (log_sum_exp != nullptr) log_sum_exp[r] = kNothing;
      continue;
    }
    double total = 0;
    for (const AttentionPart& part : parts) {
      total += std::exp(static_cast<double>(part.log_sum_exp[r]) - static_cast<double>(largest));
    }
    const double merged = static_cast<double>(largest) + std::log(total);
    // `output` may be one of the parts: a piece is read from all of them before it is written, and
    // log_sum_exp[r] comes last.
    constexpr std::size_t kPiece = 64;
    for (std::size_t first = 0; first < head_dim; first += kPiece) {
      const std::size_t count = std::min(kPiece, head_dim - first);
      double sums[kPiece] = {};
      for (const AttentionPart& part : parts) {
        const double weight = std::exp(static_cast<double>(part.log_sum_exp[r]) - merged);
        const float* from = part.output + r * head_dim + first;
        for (std::size_t d = 0; d < count; ++d) sums[d] += weight * static_cast<double>(from[d]);
      }
      for (std::size_t d = 0; d < count; ++d) row[first + d] = static_cast<float>(sums[d]);
    }
    if (log_sum_exp != nullptr) log_sum_exp[r] = static_cast<float>(merged);
  }
}

}  // namespace kvmill
