#include "client/c_api/fetch_outputs.h"

#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/kv_sink.h"
#include "storage/core/status_macros.h"

namespace kvmill::c_api {
namespace {

MutableKvView ViewOf(const kvmill_mutable_kv& kv) {
  MutableKvView view;
  view.data = static_cast<std::byte*>(kv.data);
  view.pages = reinterpret_cast<std::byte* const*>(kv.pages);
  view.offset_bytes = kv.offset_bytes;
  view.page_tokens = kv.page_tokens;
  view.token_stride_bytes = kv.token_stride_bytes;
  view.head_stride_bytes = kv.head_stride_bytes;
  return view;
}

bool HasMemory(const kvmill_mutable_kv& kv) {
  return kv.page_tokens == 0 ? kv.data != nullptr : kv.pages != nullptr;
}

absl::Status TooSmall(absl::string_view what, std::size_t want, std::size_t got) {
  return absl::OutOfRangeError(
      absl::StrCat(what, " of ", want, ", the caller's memory has room for ", got));
}

}  // namespace

FetchOutputs::FetchOutputs(std::shared_ptr<const NamespaceData> ns,
                           const kvmill_fetch_options& options,
                           std::vector<kvmill_fetch_output> outputs,
                           std::vector<std::size_t>* page_bytes)
    : ns_(std::move(ns)),
      options_(options),
      outputs_(std::move(outputs)),
      page_bytes_(page_bytes) {}

absl::Status FetchOutputs::Check(std::size_t key_count) const {
  if (options_.form > KVMILL_FORM_PAGES) {
    return absl::InvalidArgumentError(absl::StrCat("form ", options_.form, ", want 0 to 2"));
  }
  if (options_.frame > KVMILL_FRAME_ROTATED) {
    return absl::InvalidArgumentError(absl::StrCat("frame ", options_.frame, ", want 0 or 1"));
  }
  const bool some_heads = options_.head_begin != 0 || options_.head_count != 0;
  if (some_heads && options_.form == KVMILL_FORM_PAGES) {
    return absl::InvalidArgumentError("pages have all heads: head_begin and head_count must be 0");
  }
  for (const LayerGroup& group : ns_->ns.spec.groups) {
    const std::uint64_t head_end = std::uint64_t{options_.head_begin} + options_.head_count;
    if (head_end > group.kv_heads || (options_.head_count == 0 && options_.head_begin != 0)) {
      return absl::InvalidArgumentError(absl::StrCat(
          "heads ", options_.head_begin, " to ", head_end, ": the namespace has ", group.kv_heads));
    }
  }
  const std::size_t layers = ns_->layer_count();
  if (outputs_.size() != key_count * layers) {
    return absl::InvalidArgumentError(absl::StrCat(outputs_.size(), " outputs for ", key_count,
                                                   " keys of ", layers, " layers, want ",
                                                   key_count * layers));
  }
  for (std::size_t i = 0; i < outputs_.size(); ++i) {
    const kvmill_fetch_output& out = outputs_[i];
    if (options_.form == KVMILL_FORM_VALUES16 ? !(HasMemory(out.k) && HasMemory(out.v))
                                              : out.data == nullptr) {
      return absl::InvalidArgumentError(absl::StrCat("output ", i, " has no memory"));
    }
    if (options_.form != KVMILL_FORM_RECORDS) continue;
    const LayerGroup& group = ns_->group_of(i % layers);
    const std::size_t heads = options_.head_count == 0 ? group.kv_heads : options_.head_count;
    const std::size_t want = heads * RecordBytes(FormatOf(ns_->ns.spec, group));
    if (out.data_bytes < want) {
      return TooSmall(absl::StrCat("output ", i, ": records"), want, out.data_bytes);
    }
  }
  return absl::OkStatus();
}

std::size_t FetchOutputs::IndexOf(const PageId& id) const {
  return id.block * ns_->layer_count() + ns_->group_begin[id.group] + id.layer_index;
}

absl::Span<std::byte> FetchOutputs::PageMemory(const PageId& id, std::size_t page_bytes) {
  if (options_.form != KVMILL_FORM_PAGES) return {};
  const kvmill_fetch_output& out = outputs_[IndexOf(id)];
  if (out.data_bytes < page_bytes) return {};  // OnPage says so.
  return absl::MakeSpan(static_cast<std::byte*>(out.data), page_bytes);
}

absl::Status FetchOutputs::OnPage(const PageId& id, const PageView& page) {
  const std::size_t index = IndexOf(id);
  const kvmill_fetch_output& out = outputs_[index];
  switch (options_.form) {
    case KVMILL_FORM_VALUES16:
      return Decode(page, out);
    case KVMILL_FORM_RECORDS:
      return CopyRecords(page, out);
    default:
      const std::size_t bytes = page.header().page_bytes;
      if (out.data_bytes < bytes) return TooSmall("page", bytes, out.data_bytes);
      (*page_bytes_)[index] = bytes;
      return absl::OkStatus();
  }
}

absl::Status FetchOutputs::Decode(const PageView& page, const kvmill_fetch_output& out) {
  const std::uint32_t tokens = page.identity().token_count;
  for (const kvmill_mutable_kv* kv : {&out.k, &out.v}) {
    const std::uint32_t room = kv->tokens == 0 ? ns_->ns.spec.block_tokens : kv->tokens;
    if (tokens > room) return TooSmall("tokens: a block", tokens, room);
  }
  const LayerOutput to = {ViewOf(out.k), ViewOf(out.v)};
  return DecodePage(page, static_cast<Frame>(options_.frame), options_.head_begin,
                    options_.head_count, to, &scratch_);
}

absl::Status FetchOutputs::CopyRecords(const PageView& page, const kvmill_fetch_output& out) const {
  const std::size_t heads = options_.head_count == 0 ? page.head_count() : options_.head_count;
  auto* to = static_cast<std::byte*>(out.data);
  for (std::size_t head = options_.head_begin; head < options_.head_begin + heads; ++head) {
    if (page.slot(head).kind != SlotKind::kTile) {
      return absl::FailedPreconditionError(
          absl::StrCat("head ", head, " is kept in 16 bits and has no record"));
    }
    const absl::Span<const std::byte> record = page.contents(head);
    std::memcpy(to, record.data(), record.size());
    to += record.size();
  }
  return absl::OkStatus();
}

}  // namespace kvmill::c_api
