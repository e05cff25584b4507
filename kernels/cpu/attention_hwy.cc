// One unit of attention: its rows against a run of blocks, tiles and raw ones alike.
#include <cmath>
#include <cstddef>
#include <cstring>
#include <limits>

#include "kernels/attention_range.h"
#include "kernels/cpu/ahead.h"
#include "kernels/cpu/attention_unit.h"
#include "kernels/cpu/row_walk.h"
#include "kernels/cpu/targets.h"
#include "kernels/hadamard.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/attention_hwy.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
#include "hwy/highway.h"         // After foreach_target.h.

// After highway.h.
#if HWY_TARGET != HWY_SCALAR
#include "kernels/cpu/attention_raw-inl.h"
#include "kernels/cpu/attention_rows-inl.h"
#include "kernels/cpu/three_bits-inl.h"
#include "kernels/cpu/tile_portable-inl.h"
#include "kernels/cpu/vectors-inl.h"
#endif

HWY_BEFORE_NAMESPACE();
namespace kvmill {
namespace HWY_NAMESPACE {

#if HWY_TARGET == HWY_SCALAR

// Never called: AttentionCpu is the reference at this level.
void AttendUnitAt(const AttentionArgs&, const AttentionUnit&, const TileMethod*,
                  const UnitWorkspace&, const UnitResult&) {}

#else

class UnitKernel {
 public:
  UnitKernel(const AttentionArgs& args, const AttentionUnit& unit, const TileMethod* method,
             const UnitWorkspace& ws)
      : shape_(args.shape),
        unit_(unit),
        method_(method),
        ws_(ws),
        layout_(LayoutOf(args.shape.format)),
        dim_(args.shape.format.head_dim),
        group_(args.shape.format.group),
        axis_(HWY_MAX(dim_, group_)),
        rows_(unit.row_count) {
    constexpr float kLog2E = 1.44269504f;
    rule_.cap = shape_.soft_cap;
    rule_.scale = rule_.cap > 0 ? shape_.scale : shape_.scale * kLog2E;
    rule_.cap_of_log2 = rule_.cap * kLog2E;
    rule_.cap_inverse = rule_.cap > 0 ? 1 / rule_.cap : 0;
    const std::uint32_t sharing = shape_.q_heads / shape_.kv_heads;
    for (std::size_t r = 0; r < rows_; ++r) {
      const std::uint32_t row = unit.first_row + static_cast<std::uint32_t>(r);
      seen_[r] = SeenByQuery(shape_, *unit.sequence, row / sharing);
      const std::size_t index = (unit.first_query + row / sharing) * shape_.q_heads +
                                unit.kv_head * sharing + row % sharing;
      LoadQuery(args, index * dim_, ws.query_of_raw + r * dim_);
      ws.softmax.largest[r] = -std::numeric_limits<float>::infinity();
    }
    std::memcpy(ws.query_of_tiles, ws.query_of_raw, rows_ * dim_ * sizeof(float));
    if (shape_.frame == Frame::kModel) RotateRowsCpu(ws.query_of_tiles, rows_, dim_);
    std::memset(ws.from_raw, 0, rows_ * dim_ * sizeof(float));
    std::memset(ws.from_tiles, 0, rows_ * dim_ * sizeof(float));
    std::memset(ws.softmax.total, 0, rows_ * 16 * sizeof(float));
  }

  void Run() {
    // Queries see ranges that move forward, so the first and the last row bound them all.
    const std::uint64_t begin = HWY_MAX(unit_.block_begin, seen_[0].begin / group_);
    const std::uint64_t end =
        HWY_MIN(unit_.block_end, (seen_[rows_ - 1].end + group_ - 1) / group_);
    const AttentionSequence& s = *unit_.sequence;
    for (std::uint64_t b = begin; b < end; ++b) {
      LookAt(b);
      if (b >= s.block_count) {
        ahead_ = Ahead();
        AttendTail(b);
      } else {
        const AttentionBlock& block = s.blocks[b * shape_.kv_heads + unit_.kv_head];
        const AttentionBlock* next = b + 1 < end && b + 1 < s.block_count
                                         ? &s.blocks[(b + 1) * shape_.kv_heads + unit_.kv_head]
                                         : nullptr;
        LookAhead(block, next);
        next_record_ = next != nullptr && next->kind == BlockKind::kTile ? next->data : block.data;
        if (block.kind == BlockKind::kTile) {
          AttendTile(block.data);
        } else {
          const RawLayout& raw = shape_.raw;
          AttendRaw({block.data, raw.token_stride_bytes, raw.dtype},
                    {block.data + raw.value_offset_bytes, raw.token_stride_bytes, raw.dtype});
        }
      }
    }
  }

  void Finish(const UnitResult& result) {
    constexpr float kLn2 = 0.693147181f;
    for (std::size_t r = 0; r < rows_; ++r) {
      float total = 0;
      for (std::size_t i = 0; i < kLanes; ++i) total += ws_.softmax.total[r * 16 + i];
      const bool nothing = !(total > 0);
      const float inverse = nothing ? 0 : 1 / total;
      ScaleRow(dim_, inverse, ws_.from_raw + r * dim_);
      ScaleRow(dim_, inverse, ws_.from_tiles + r * dim_);
      result.log_sum_exp[r] = nothing ? -std::numeric_limits<float>::infinity()
                                      : (ws_.softmax.largest[r] + std::log2(total)) * kLn2;
    }
    if (in_plane_order_) Reorder();
    if (shape_.frame == Frame::kModel) RotateRowsCpu(ws_.from_tiles, rows_, dim_);
    for (std::size_t i = 0; i < rows_ * dim_; i += kLanes) {
      const Df d;
      hn::Store(hn::Add(hn::Load(d, ws_.from_raw + i), hn::Load(d, ws_.from_tiles + i)), d,
                result.output + i);
    }
  }

 private:
  // Of raw rows this much is asked for before their block begins, the rest while it is worked on.
  // Of a tile everything is asked for before.
  static constexpr std::size_t kRawBytesAhead = 8192;
  bool RawByMethod() const { return method_ != nullptr && method_->attend_raw != nullptr; }

  // What to ask for while `block` is worked on.
  void LookAhead(const AttentionBlock& block, const AttentionBlock* next) {
    ahead_ = Ahead();
    const std::size_t row_bytes = 2 * dim_;
    const std::size_t rows_ahead = kRawBytesAhead / row_bytes;
    const RawLayout& raw = shape_.raw;
    if (block.kind == BlockKind::kRaw && RawByMethod()) {
      if (tokens_ > rows_ahead) {
        const auto rows = static_cast<std::ptrdiff_t>(rows_ahead);
        ahead_.Add(block.data + rows * raw.token_stride_bytes, raw.token_stride_bytes, row_bytes,
                   tokens_ - rows_ahead);
      }
      if (tokens_ != 0) {
        ahead_.Add(block.data + raw.value_offset_bytes, raw.token_stride_bytes, row_bytes, tokens_);
      }
    }
    if (next == nullptr) return;
    if (next->kind == BlockKind::kTile) {
      ahead_.Add(next->data, 0, layout_.bytes, 1);
    } else {
      ahead_.Add(next->data, raw.token_stride_bytes, row_bytes,
                 RawByMethod() ? rows_ahead : ConvertedTokens(dim_));
    }
  }

  void LoadQuery(const AttentionArgs& args, std::size_t offset, float* to) const {
    if (args.query_type == VectorType::kFloat32) {
      std::memcpy(to, static_cast<const float*>(args.query) + offset, dim_ * sizeof(float));
      return;
    }
    const auto* from = static_cast<const std::uint16_t*>(args.query) + offset;
    const DType dtype =
        args.query_type == VectorType::kFloat16 ? DType::kFloat16 : DType::kBFloat16;
    for (std::size_t d = 0; d < dim_; ++d) to[d] = ToFloat(from[d], dtype);
  }

  // Which tokens of block b each row sees.
  void LookAt(std::uint64_t b) {
    const std::uint64_t first = b * group_;
    tokens_ = 0;
    for (std::size_t r = 0; r < rows_; ++r) {
      const std::uint64_t begin = HWY_MAX(seen_[r].begin, first);
      const std::uint64_t end = HWY_MIN(seen_[r].end, first + group_);
      spans_[r] = begin < end ? TokenSpan{begin - first, end - first} : TokenSpan{0, 0};
      tokens_ = HWY_MAX(tokens_, spans_[r].end);
    }
  }

  // Codes of K that a product can have.
  CodeMatrix KeysOf(const std::byte* record) const {
    const std::byte* const codes = record + layout_.k_codes;
    const std::uint32_t bits = shape_.format.key_bits;
    if (bits != 3) return {codes, bits, dim_, group_};
    WidenRows(codes, dim_, group_, ws_.keys);
    return {ws_.keys, 4, dim_, group_};
  }

  void Multiply(const CodeMatrix& matrix) {
    if (method_ == nullptr) {
      MultiplyCodes(matrix, ws_.folded, rows_, ws_.product);
    } else {
      method_->multiply(matrix, ws_.folded, rows_, ws_.product, ws_.scratch);
    }
  }

  // Products to weights: logits, a new maximum, p, the sum of p.
  void Weigh(std::size_t r, float bias, const float* across) {
    float* row = ws_.product + r * group_;
    const float here = LogitsOfRow(row, bias, across, group_, rule_, spans_[r]);
    const float before = ws_.softmax.largest[r];
    const float largest = HWY_MAX(before, here);
    // While nothing was seen, any shift will do: all weights and sums are 0.
    const float shift = largest == -std::numeric_limits<float>::infinity() ? 0 : largest;
    ws_.softmax.correction[r] = before == largest ? 1 : std::exp2(before - shift);
    ws_.softmax.largest[r] = largest;
    WeightsOfRow(row, shift, group_, ws_.softmax.correction[r], ws_.softmax.total + r * 16);
  }

  // The whole tile by the method.
  void AttendTileByMethod(const std::byte* record) {
    in_plane_order_ = true;
    TileStep step;
    step.format = &shape_.format;
    step.layout = &layout_;
    step.record = record;
    step.keys = KeysOf(record);
    step.next_record = next_record_;
    step.row_count = rows_;
    step.query = ws_.query_of_tiles;
    step.from_tiles = ws_.from_tiles;
    step.softmax = ws_.softmax;
    step.rule = &rule_;
    step.spans = spans_;
    step.scratch = ws_.scratch;
    method_->attend(step);
    for (std::size_t r = 0; r < rows_; ++r) ScaleRaw(r);
  }

  void AttendTile(const std::byte* record) {
    if (method_ != nullptr && method_->attend != nullptr) {
      AttendTileByMethod(record);
      return;
    }
    float* const k_scale = ws_.scales;
    float* const k_zero = ws_.scales + axis_;
    float* const k_token = ws_.scales + 2 * axis_;
    float* const v_channel = ws_.scales + 3 * axis_;
    float* const v_scale = ws_.scales + 4 * axis_;
    float* const v_zero = ws_.scales + 5 * axis_;
    LoadScales(record + layout_.k_scale, dim_, k_scale);
    LoadScales(record + layout_.k_zero, dim_, k_zero);
    LoadScales(record + layout_.k_token, group_, k_token);
    LoadScales(record + layout_.v_channel, dim_, v_channel);
    LoadScales(record + layout_.v_scale, group_, v_scale);
    LoadScales(record + layout_.v_zero, group_, v_zero);

    // The next record in as many parts as there are stops here.
    const std::size_t lines = layout_.bytes / 64 / (3 * rows_) + 1;
    for (std::size_t r = 0; r < rows_; ++r) {
      ahead_.Take(lines);
      ws_.bias[r] =
          FoldRow(ws_.query_of_tiles + r * dim_, k_scale, k_zero, dim_, ws_.folded + r * dim_);
    }
    Multiply(KeysOf(record));
    for (std::size_t r = 0; r < rows_; ++r) {
      ahead_.Take(lines);
      Weigh(r, ws_.bias[r], k_token);
      ws_.bias[r] =
          FoldRow(ws_.product + r * group_, v_scale, v_zero, group_, ws_.folded + r * group_);
    }
    Multiply({record + layout_.v_codes, shape_.format.value_bits, group_, dim_});
    for (std::size_t r = 0; r < rows_; ++r) {
      ahead_.Take(lines);
      AddRow(ws_.product + r * dim_, ws_.bias[r], v_channel, dim_, ws_.softmax.correction[r],
             ws_.from_tiles + r * dim_);
      ScaleRaw(r);
    }
  }

  // Channels of from_tiles back to their places.
  void Reorder() {
    const std::uint32_t bits = shape_.format.value_bits;
    const std::size_t planes = 8 / bits;
    for (std::size_t r = 0; r < rows_; ++r) {
      float* row = ws_.from_tiles + r * dim_;
      for (std::size_t v = 0; v < dim_; v += 16) {
        float* to = ws_.folded + PlaneColumn(v, bits);
        for (std::size_t i = 0; i < 16; ++i) to[i * planes] = row[v + i];
      }
      std::memcpy(row, ws_.folded, dim_ * sizeof(float));
    }
  }

  void AttendRawByMethod(const RawHalf& k, const RawHalf& v) {
    if (!has_raw_) method_->prepare_raw(ws_.query_of_raw, rows_, dim_, ws_.raw_query);
    RawStep step;
    step.k = k;
    step.v = v;
    step.token_count = tokens_;
    step.dim = dim_;
    step.row_count = rows_;
    step.query = ws_.raw_query;
    step.from_raw = ws_.from_raw;
    step.softmax = ws_.softmax;
    step.rule = &rule_;
    step.spans = spans_;
    step.ahead = &ahead_;
    step.scratch = ws_.scratch;
    method_->attend_raw(step);
    for (std::size_t r = 0; r < rows_; ++r) {
      if (ws_.softmax.correction[r] == 1) continue;
      ScaleRow(dim_, ws_.softmax.correction[r], ws_.from_tiles + r * dim_);
    }
  }

  void AttendRaw(const RawHalf& k, const RawHalf& v) {
    if (tokens_ == 0) return;
    if (RawByMethod()) {
      AttendRawByMethod(k, v);
      has_raw_ = true;
      return;
    }
    has_raw_ = true;
    ScoreRaw(k, tokens_, group_, ws_.query_of_raw, rows_, dim_, ws_.converted, ws_.product,
             Ahead(v.first, v.stride_bytes, 2 * dim_, ConvertedTokens(dim_)));
    for (std::size_t r = 0; r < rows_; ++r) {
      // What ScoreRaw did not reach holds older numbers, and may as well be NaN: it is masked.
      Weigh(r, 0, nullptr);
      if (ws_.softmax.correction[r] == 1) continue;
      ScaleRow(dim_, ws_.softmax.correction[r], ws_.from_raw + r * dim_);
      ScaleRow(dim_, ws_.softmax.correction[r], ws_.from_tiles + r * dim_);
    }
    AddRaw(v, tokens_, group_, ws_.product, rows_, dim_, ws_.converted, ws_.from_raw, ahead_);
  }

  void ScaleRaw(std::size_t r) {
    if (has_raw_ && ws_.softmax.correction[r] != 1) {
      ScaleRow(dim_, ws_.softmax.correction[r], ws_.from_raw + r * dim_);
    }
  }

  // A piece of the tail, made adjacent first: it is at most a block, read by all rows.
  void AttendTail(std::uint64_t b) {
    const AttentionSequence& s = *unit_.sequence;
    const TailHead& tail = s.tail[unit_.kv_head];
    const std::uint64_t first = (b - s.block_count) * group_;
    const std::size_t row_bytes = 2 * dim_;
    std::byte* k = ws_.gathered;
    std::byte* v = ws_.gathered + group_ * row_bytes;
    Gather(tail.k, first, k);
    Gather(tail.v, first, v);
    const auto stride = static_cast<std::ptrdiff_t>(row_bytes);
    AttendRaw({k, stride, tail.k.dtype}, {v, stride, tail.v.dtype});
  }

  void Gather(const HeadPages& pages, std::uint64_t first, std::byte* to) const {
    for (std::size_t t = 0; t < tokens_; ++t, to += 2 * dim_) {
      const std::byte* row = pages.Row(static_cast<std::uint32_t>(first + t));
      if (pages.channel_stride_bytes == 2) {
        std::memcpy(to, row, 2 * dim_);
        continue;
      }
      for (std::size_t d = 0; d < dim_; ++d) {
        std::memcpy(to + 2 * d, row + static_cast<std::ptrdiff_t>(d) * pages.channel_stride_bytes,
                    2);
      }
    }
  }

  const AttentionShape& shape_;
  const AttentionUnit& unit_;
  const TileMethod* const method_;
  const UnitWorkspace& ws_;
  const RecordLayout layout_;
  const std::size_t dim_, group_, axis_, rows_;
  LogitRule rule_;
  bool has_raw_ = false;
  bool in_plane_order_ = false;  // from_tiles, see tile_method.h.
  std::size_t tokens_ = 0;       // Of the block: one past the last that any row sees.
  Ahead ahead_;
  const std::byte* next_record_ = nullptr;  // The record in hand if no tile comes next.
  TokenRange seen_[kUnitRowsMax];
  TokenSpan spans_[kUnitRowsMax];
};

void AttendUnitAt(const AttentionArgs& args, const AttentionUnit& unit, const TileMethod* method,
                  const UnitWorkspace& workspace, const UnitResult& result) {
  UnitKernel kernel(args, unit, method, workspace);
  kernel.Run();
  kernel.Finish(result);
}

#endif

}  // namespace HWY_NAMESPACE
}  // namespace kvmill
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kvmill {

HWY_EXPORT(AttendUnitAt);

void AttendUnit(const AttentionArgs& args, const AttentionUnit& unit, const TileMethod* method,
                const UnitWorkspace& workspace, const UnitResult& result) {
  HWY_DYNAMIC_DISPATCH(AttendUnitAt)(args, unit, method, workspace, result);
}

}  // namespace kvmill
#endif  // HWY_ONCE
