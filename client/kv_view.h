// The bytes of a KvView in the order in which they travel. Internal to client/.
#ifndef KVMILL_CLIENT_KV_VIEW_H_
#define KVMILL_CLIENT_KV_VIEW_H_

#include <cstddef>
#include <cstdint>

#include "absl/functional/function_ref.h"
#include "client/client.h"

namespace kvmill {

// A range of the heads of a view's first tokens: [token_count, head_count, head_bytes].
struct KvPart {
  std::uint32_t token_count = 0;
  std::uint32_t head_begin = 0;
  std::uint32_t head_count = 0;
  std::size_t head_bytes = 0;  // Of one head of one token.
};

// Where runs of adjacent bytes have `run_bytes_min` or more, calls `borrow` with each of them, in
// order. Else calls `room` once with the size of the part, and copies the part to where it says.
void VisitKvPart(const KvView& view, const KvPart& part, std::size_t run_bytes_min,
                 absl::FunctionRef<void(const std::byte* data, std::size_t bytes)> borrow,
                 absl::FunctionRef<std::byte*(std::size_t bytes)> room);

}  // namespace kvmill

#endif  // KVMILL_CLIENT_KV_VIEW_H_
