#include "client/kv_sink.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "kernels/decode.h"
#include "storage/core/status_macros.h"

namespace kvmill {
namespace {

// One head of a view. `base` keeps the pointer that a view without pages needs as its page list.
MutableHeadPages HeadOf(const MutableKvView& view, std::uint32_t head, DType dtype,
                        std::byte* const* base) {
  MutableHeadPages pages;
  const auto head_offset =
      static_cast<std::size_t>(static_cast<std::ptrdiff_t>(head) * view.head_stride_bytes);
  pages.pages = view.page_tokens == 0 ? base : view.pages;
  pages.offset_bytes = (view.page_tokens == 0 ? 0 : view.offset_bytes) + head_offset;
  pages.page_tokens = view.page_tokens == 0 ? kGroupMax : view.page_tokens;
  pages.token_stride_bytes = view.token_stride_bytes;
  pages.dtype = dtype;
  return pages;
}

void CopyRows(const std::byte* rows, std::uint32_t token_count, std::size_t row_bytes,
              const MutableHeadPages& out) {
  for (std::uint32_t token = 0; token < token_count; ++token) {
    std::memcpy(out.Row(token), rows + token * row_bytes, row_bytes);
  }
}

}  // namespace

absl::Status DecodePage(const PageView& page, Frame frame, std::uint32_t head_begin,
                        std::uint32_t head_count, const LayerOutput& out,
                        std::vector<std::byte>* scratch) {
  const PageIdentity identity = page.identity();
  const std::uint32_t heads = static_cast<std::uint32_t>(page.head_count());
  if (head_count == 0) head_count = heads - std::min(head_begin, heads);
  if (head_begin + std::uint64_t{head_count} > heads) {
    return absl::InvalidArgumentError(absl::StrCat("heads ", head_begin, " to ",
                                                   head_begin + std::uint64_t{head_count},
                                                   ": the page has ", heads));
  }
  // The decoders want scratch at a multiple of 64.
  scratch->resize(std::max(scratch->size(), DecodeScratchBytes(identity.format) + 64));
  const std::size_t misaligned = reinterpret_cast<std::uintptr_t>(scratch->data()) % 64;
  const auto aligned = absl::MakeSpan(*scratch).subspan((64 - misaligned) % 64);
  const std::size_t row_bytes = std::size_t{2} * identity.format.head_dim;
  for (std::uint32_t head = 0; head < head_count; ++head) {
    DecodeArgs args;
    args.k = HeadOf(out.k, head, identity.source_dtype, &out.k.data);
    args.v = HeadOf(out.v, head, identity.source_dtype, &out.v.data);
    const absl::Span<const std::byte> contents = page.contents(head_begin + head);
    switch (page.slot(head_begin + head).kind) {
      case SlotKind::kTile:
        args.record = contents.data();
        DecodeTilesCpu(identity.format, frame, absl::MakeConstSpan(&args, 1), aligned);
        break;
      case SlotKind::kRaw:
        if (identity.frame != frame) {
          return absl::UnimplementedError(
              "a raw head can only be read in the frame it was stored in");
        }
        CopyRows(contents.data(), identity.token_count, row_bytes, args.k);
        CopyRows(contents.data() + identity.token_count * row_bytes, identity.token_count,
                 row_bytes, args.v);
        break;
      case SlotKind::kAbsent:
        return absl::FailedPreconditionError(
            absl::StrCat("head ", head_begin + head, " is absent from the page"));
    }
  }
  return absl::OkStatus();
}

KvSink::KvSink(const NamespaceSpec& spec, Frame frame, absl::Span<const LayerOutput> outputs)
    : frame_(frame), outputs_(outputs), group_begin_(1, 0) {
  for (const LayerGroup& group : spec.groups) {
    group_begin_.push_back(group_begin_.back() + group.layers.size());
  }
}

absl::Status KvSink::OnPage(const PageId& id, const PageView& page) {
  const std::size_t index =
      id.block * group_begin_.back() + group_begin_[id.group] + id.layer_index;
  if (index >= outputs_.size()) {
    return absl::InvalidArgumentError(absl::StrCat("block ", id.block, ": ", outputs_.size(),
                                                   " outputs, want more than ", index));
  }
  return DecodePage(page, frame_, 0, 0, outputs_[index], &scratch_);
}

}  // namespace kvmill
