// Attention over mapped blocks, on the calling thread.
#include <cmath>
#include <memory>
#include <new>
#include <optional>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/c_api/border.h"
#include "client/c_api/mapped.h"
#include "kernels/attention.h"
#include "kernels/attention_range.h"
#include "storage/core/status_macros.h"

namespace kvmill::c_api {
namespace {

constexpr std::uint32_t kQueriesMax = 65536;
constexpr std::int64_t kOffsetMax = std::int64_t{1} << 40;
constexpr std::align_val_t kScratchAlignment{64};

struct ScratchDeleter {
  void operator()(std::byte* scratch) const { ::operator delete(scratch, kScratchAlignment); }
};

// What is attended to: some consecutive blocks of a mapping, as one sequence.
class Attention {
 public:
  Attention(const MappedData& mapped, std::size_t layer, const kvmill_attention& from)
      : mapped_(mapped), layer_(layer), from_(from), group_(mapped.ns->group_of(layer)) {}

  // What would be attended to; the memory of the blocks is not looked at.
  absl::Status Plan() {
    const NamespaceSpec& spec = mapped_.ns->ns.spec;
    const std::size_t count = mapped_.blocks->block_count();
    if (from_.first_block > count || from_.block_count > count - from_.first_block) {
      return absl::OutOfRangeError(absl::StrCat(from_.block_count, " blocks from block ",
                                                from_.first_block, " on, there are ", count));
    }
    block_count_ = from_.block_count == 0 ? count - from_.first_block : from_.block_count;
    head_count_ = from_.head_count == 0 ? group_.kv_heads : from_.head_count;
    if (from_.head_begin > group_.kv_heads || head_count_ > group_.kv_heads - from_.head_begin ||
        (from_.head_count == 0 && from_.head_begin != 0)) {
      return absl::InvalidArgumentError(absl::StrCat("head_begin ", from_.head_begin,
                                                     ", head_count ", from_.head_count, " of ",
                                                     group_.kv_heads, " heads"));
    }
    AttentionShape& shape = args_.shape;
    shape.format = FormatOf(spec, group_);
    shape.q_heads = from_.q_heads;
    shape.kv_heads = static_cast<std::uint32_t>(head_count_);
    shape.scale =
        from_.scale != 0 ? from_.scale : 1 / std::sqrt(static_cast<float>(group_.head_dim));
    shape.soft_cap = from_.soft_cap;
    shape.window = from_.window_tokens;
    if (shape.window == 0 && group_.attention == AttentionKind::kWindow) {
      shape.window = group_.window_tokens;
    }
    shape.raw = PackedRawLayout(shape.format, spec.source_dtype, spec.block_tokens);
    shape.frame = spec.frame;
    KVMILL_RETURN_IF_ERROR(
        ToEnum("query_type", from_.query_type, VectorType::kBFloat16, &args_.query_type));
    KVMILL_RETURN_IF_ERROR(
        ToEnum("output_type", from_.output_type, VectorType::kBFloat16, &args_.output_type));
    args_.query = from_.query;
    args_.output = from_.output;
    args_.log_sum_exp = from_.log_sum_exp;
    return PlanSequence(spec.block_tokens);
  }

  // Where the heads of the blocks that are seen lie.
  absl::Status FillTable() {
    const std::uint32_t block_tokens = mapped_.ns->ns.spec.block_tokens;
    const TokenRange seen = SeenBySequence(args_.shape, sequence_);
    seen_begin_ = seen.empty() ? block_count_ : seen.begin / block_tokens;
    table_.resize(sequence_.block_count * head_count_);
    for (std::size_t b = seen_begin_; b < sequence_.block_count; ++b) {
      KVMILL_ASSIGN_OR_RETURN(const PageView page, mapped_.Page(from_.first_block + b, layer_));
      KVMILL_RETURN_IF_ERROR(CheckOnHost(from_.first_block + b));
      if (page.header().token_count != block_tokens) {
        return absl::InvalidArgumentError(absl::StrCat("block ", from_.first_block + b,
                                                       " is a tail of ", page.header().token_count,
                                                       " tokens: only the last block may be one"));
      }
      for (std::size_t h = 0; h < head_count_; ++h) {
        const std::size_t head = from_.head_begin + h;
        const SlotKind kind = page.slot(head).kind;
        if (kind == SlotKind::kAbsent) continue;
        table_[b * head_count_ + h] = {kind == SlotKind::kTile ? BlockKind::kTile : BlockKind::kRaw,
                                       page.contents(head).data()};
      }
    }
    sequence_.blocks = table_.data();
    if (sequence_.block_count == block_count_ || seen_begin_ == block_count_) {
      return absl::OkStatus();
    }
    const std::size_t group = mapped_.ns->layer_groups[layer_];
    KVMILL_RETURN_IF_ERROR(CheckOnHost(from_.first_block + block_count_ - 1));
    KVMILL_ASSIGN_OR_RETURN(
        tail_, MappedTail::Create(*mapped_.blocks, group, layer_ - mapped_.ns->group_begin[group],
                                  from_.first_block + block_count_ - 1));
    sequence_.tail = tail_->heads() + from_.head_begin;
    return absl::OkStatus();
  }

  absl::Status Run() {
    args_.sequences = {&sequence_, 1};
    KVMILL_RETURN_IF_ERROR(ValidateAttention(args_));
    const std::size_t bytes = AttentionScratchBytes(args_, 1);
    const std::unique_ptr<std::byte, ScratchDeleter> scratch(
        static_cast<std::byte*>(::operator new(bytes, kScratchAlignment)));
    AttentionCpu(args_, {}, {scratch.get(), bytes});
    return mapped_.blocks->Check(from_.first_block + seen_begin_, block_count_ - seen_begin_);
  }

 private:
  absl::Status CheckOnHost(std::size_t block) const {
    if (mapped_.blocks->memory(block, mapped_.ns->layer_groups[layer_]) != Tier::kGpu) {
      return absl::OkStatus();
    }
    return absl::FailedPreconditionError(
        absl::StrCat("block ", block,
                     " is on the GPU, and attention here is the CPU's: map it in "
                     "host memory, or attend with kernels of your own"));
  }

  absl::Status PlanSequence(std::uint32_t block_tokens) {
    if (from_.query_count > kQueriesMax) {
      return absl::InvalidArgumentError(
          absl::StrCat("query_count ", from_.query_count, ", at most ", kQueriesMax));
    }
    std::uint64_t tokens = std::uint64_t{block_tokens} * block_count_;
    sequence_.block_count = static_cast<std::uint32_t>(block_count_);
    if (block_count_ > 0) {
      const std::size_t last = from_.first_block + block_count_ - 1;
      KVMILL_RETURN_IF_ERROR(mapped_.blocks->status(last));
      const std::uint32_t last_tokens = mapped_.blocks->token_count(last);
      if (last_tokens < block_tokens) {
        tokens -= block_tokens - last_tokens;
        --sequence_.block_count;
      }
    }
    if (from_.query_offset > kOffsetMax ||
        from_.query_offset < -static_cast<std::int64_t>(tokens)) {
      return absl::InvalidArgumentError(absl::StrCat("query_offset ", from_.query_offset,
                                                     ", want -", tokens, " to ", kOffsetMax));
    }
    sequence_.token_end = tokens;
    sequence_.query_count = from_.query_count == 0 ? 1 : from_.query_count;
    sequence_.query_position =
        static_cast<std::uint64_t>(static_cast<std::int64_t>(tokens) + from_.query_offset);
    return absl::OkStatus();
  }

  const MappedData& mapped_;
  const std::size_t layer_;
  const kvmill_attention& from_;
  const LayerGroup& group_;
  std::size_t block_count_ = 0;  // A tail included.
  std::size_t head_count_ = 0;
  std::size_t seen_begin_ = 0;  // Of these blocks, the first that a query sees.
  AttentionArgs args_;
  AttentionSequence sequence_;
  std::vector<AttentionBlock> table_;
  std::optional<MappedTail> tail_;
};

}  // namespace
}  // namespace kvmill::c_api

using namespace kvmill;         // NOLINT(google-build-using-namespace): the function is C's.
using namespace kvmill::c_api;  // NOLINT(google-build-using-namespace)

extern "C" kvmill_code kvmill_attend(const kvmill_mapped* mapped, size_t layer,
                                     const kvmill_attention* attention) {
  return Guard([&]() -> absl::Status {
    if (mapped == nullptr) return Null("mapped");
    kvmill_attention from;
    constexpr std::size_t kLeast = offsetof(kvmill_attention, q_heads) + sizeof(from.q_heads);
    KVMILL_RETURN_IF_ERROR(ReadStruct("attention", attention, kLeast, &from));
    const MappedData& data = *mapped->data;
    if (layer >= data.ns->layer_count()) return OutOfRange("layer", layer, data.ns->layer_count());
    // Before anything is looked at: a lease that is over is that, whatever else is wrong.
    KVMILL_RETURN_IF_ERROR(data.blocks->Check(0, 0));
    Attention attend(data, layer, from);
    KVMILL_RETURN_IF_ERROR(attend.Plan());
    KVMILL_RETURN_IF_ERROR(attend.FillTable());
    return attend.Run();
  });
}
