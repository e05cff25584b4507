#include "client/kv_view.h"

#include <algorithm>
#include <cstring>

namespace kvmill {
namespace {

const std::byte* RowOf(const KvView& view, std::uint32_t token) {
  if (view.page_tokens == 0) {
    return view.data + static_cast<std::ptrdiff_t>(token) * view.token_stride_bytes;
  }
  return view.pages[token / view.page_tokens] + view.offset_bytes +
         static_cast<std::ptrdiff_t>(token % view.page_tokens) * view.token_stride_bytes;
}

}  // namespace

void VisitKvPart(const KvView& view, const KvPart& part, std::size_t run_bytes_min,
                 absl::FunctionRef<void(const std::byte* data, std::size_t bytes)> borrow,
                 absl::FunctionRef<std::byte*(std::size_t bytes)> room) {
  const std::size_t row_bytes = part.head_bytes * part.head_count;
  const bool heads_adjacent =
      part.head_count == 1 ||
      view.head_stride_bytes == static_cast<std::ptrdiff_t>(part.head_bytes);
  const bool tokens_adjacent =
      heads_adjacent && view.token_stride_bytes == static_cast<std::ptrdiff_t>(row_bytes);
  const std::uint32_t run_tokens =
      !tokens_adjacent ? 1 : (view.page_tokens == 0 ? part.token_count : view.page_tokens);
  const std::ptrdiff_t head_offset =
      static_cast<std::ptrdiff_t>(part.head_begin) * view.head_stride_bytes;
  if (heads_adjacent && std::min(run_tokens, part.token_count) * row_bytes >= run_bytes_min) {
    for (std::uint32_t token = 0; token < part.token_count; token += run_tokens) {
      const std::size_t tokens = std::min(run_tokens, part.token_count - token);
      borrow(RowOf(view, token) + head_offset, tokens * row_bytes);
    }
    return;
  }
  std::byte* out = room(row_bytes * part.token_count);
  for (std::uint32_t token = 0; token < part.token_count; ++token) {
    const std::byte* const row = RowOf(view, token) + head_offset;
    for (std::uint32_t h = 0; h < part.head_count; ++h, out += part.head_bytes) {
      std::memcpy(out, row + static_cast<std::ptrdiff_t>(h) * view.head_stride_bytes,
                  part.head_bytes);
    }
  }
}

}  // namespace kvmill
