// Walks the rows of a head in token order, without a division per row.
#ifndef KVMILL_KERNELS_CPU_ROW_WALK_H_
#define KVMILL_KERNELS_CPU_ROW_WALK_H_

#include <cstddef>
#include <cstdint>

#include "kernels/engine_pages.h"

namespace kvmill {

// `Byte` as in BasicHeadPages. The pages must outlive the walk.
template <typename Byte>
class RowWalk {
 public:
  explicit RowWalk(const BasicHeadPages<Byte>& pages)
      : pages_(pages), row_(pages.Row(0)), left_(pages.page_tokens) {}

  // The row of the next token. `more` says whether another one will be asked for: the page list is
  // not read beyond its end.
  Byte* Next(bool more) {
    Byte* const row = row_;
    if (!more) return row;
    if (--left_ != 0) {
      row_ += pages_.token_stride_bytes;
    } else {
      row_ = pages_.pages[++page_index_] + pages_.offset_bytes;
      left_ = pages_.page_tokens;
    }
    return row;
  }

 private:
  const BasicHeadPages<Byte>& pages_;
  std::size_t page_index_ = 0;
  Byte* row_;
  std::uint32_t left_;
};

}  // namespace kvmill

#endif  // KVMILL_KERNELS_CPU_ROW_WALK_H_
