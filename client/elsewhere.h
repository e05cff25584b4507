// Where a daemon of a cluster looks for blocks that it does not have itself.
#ifndef KVMILL_CLIENT_ELSEWHERE_H_
#define KVMILL_CLIENT_ELSEWHERE_H_

#include <cstddef>
#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "storage/core/block_key.h"

namespace kvmill {

// Of a lookup, fetch or map. By default it looks wherever the keys say. Without effect on a daemon
// that is in no cluster, and for callers of a tenant that its nodes do not share.
struct Elsewhere {
  bool local_only = false;  // Nowhere.
  std::string hint;         // Node id of who probably has them, and is asked first; empty: nobody.
  // Of the sequence that the keys are consecutive blocks of: the position of the first one, and the
  // key of block first_block / 32 * 32 when that is not among them. With an empty anchor such
  // blocks are found only if a lookup found them lately, or at the hint. Without effect in a
  // lookup, whose keys begin with block 0.
  std::uint32_t first_block = 0;
  BlockKey anchor;

  friend bool operator==(const Elsewhere&, const Elsewhere&) = default;
};

inline constexpr std::size_t kHintBytesMax = 64;
// INVALID_ARGUMENT: the hint is longer.
absl::Status CheckElsewhere(const Elsewhere& elsewhere);

// The same for the keys from `first_key` on.
Elsewhere From(const Elsewhere& of_all, absl::Span<const BlockKey> keys, std::size_t first_key);

}  // namespace kvmill

#endif  // KVMILL_CLIENT_ELSEWHERE_H_
