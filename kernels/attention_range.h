// Which tokens a query sees: the one place where causality, window and range meet. C++17; included
// by device code.
#ifndef KVMILL_KERNELS_ATTENTION_RANGE_H_
#define KVMILL_KERNELS_ATTENTION_RANGE_H_

#include <cstdint>

#include "kernels/attention.h"

namespace kvmill {

struct TokenRange {
  std::uint64_t begin = 0;
  std::uint64_t end = 0;  // One past the last.
  bool empty() const { return begin >= end; }
};

// The tokens that query `i` of the sequence sees.
inline TokenRange SeenByQuery(const AttentionShape& shape, const AttentionSequence& s,
                              std::uint32_t i) {
  TokenRange range{s.token_begin, s.query_position + i + 1};
  if (shape.window != 0 && range.end > shape.window && range.end - shape.window > range.begin) {
    range.begin = range.end - shape.window;
  }
  if (range.end > s.token_end) range.end = s.token_end;
  if (range.begin > range.end) range.begin = range.end;
  return range;
}

// The smallest range that holds what the queries first .. last - 1 see. Ranges move forward with
// the query, so the ends decide.
inline TokenRange SeenByQueries(const AttentionShape& shape, const AttentionSequence& s,
                                std::uint32_t first, std::uint32_t last) {
  if (first >= last) return {};
  const TokenRange a = SeenByQuery(shape, s, first);
  const TokenRange b = SeenByQuery(shape, s, last - 1);
  return {a.begin, b.end};
}

inline TokenRange SeenBySequence(const AttentionShape& shape, const AttentionSequence& s) {
  return SeenByQueries(shape, s, 0, s.query_count);
}

}  // namespace kvmill

#endif  // KVMILL_KERNELS_ATTENTION_RANGE_H_
