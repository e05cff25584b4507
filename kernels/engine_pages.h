// How a kernel sees one head of K or of V in an engine's paged cache: explicit geometry, never
// guessed.
//
// The block's tokens lie in `token_count / page_tokens` engine pages (the last one may be partly
// used). Channel d of token t is the 16-bit value at
//
//   pages[t / page_tokens] + offset_bytes
//       + (t % page_tokens) * token_stride_bytes + d * channel_stride_bytes
//
// `offset_bytes` selects K or V, layer and head inside the page, so one page list serves them all.
// Strides need not be multiples of anything (loads are unaligned), may be padded, and
// channel_stride_bytes is 2 where channels are adjacent, which is the fast case. A view owns
// nothing; the pages must stay readable (writable for decode) during the call.
#ifndef KVMILL_KERNELS_ENGINE_PAGES_H_
#define KVMILL_KERNELS_ENGINE_PAGES_H_

#include <cstddef>
#include <cstdint>

#include "kernels/float16.h"

namespace kvmill {

template <typename Byte>
struct BasicHeadPages {
  Byte* const* pages = nullptr;  // ceil(token_count / page_tokens) pointers.
  std::size_t offset_bytes = 0;
  std::uint32_t page_tokens = 0;  // Tokens of a page, >= 1.
  std::ptrdiff_t token_stride_bytes = 0;
  std::ptrdiff_t channel_stride_bytes = 2;
  DType dtype = DType::kFloat16;

  Byte* Row(std::uint32_t token) const {
    return pages[token / page_tokens] + offset_bytes +
           static_cast<std::ptrdiff_t>(token % page_tokens) * token_stride_bytes;
  }
};

using HeadPages = BasicHeadPages<const std::byte>;   // Read: encode.
using MutableHeadPages = BasicHeadPages<std::byte>;  // Written: decode.

}  // namespace kvmill

#endif  // KVMILL_KERNELS_ENGINE_PAGES_H_
