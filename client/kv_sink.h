// A FetchSink that decodes fetched pages into the engine's 16-bit memory.
#ifndef KVMILL_CLIENT_KV_SINK_H_
#define KVMILL_CLIENT_KV_SINK_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "client/client.h"

namespace kvmill {

// Where K or V of one layer of one block goes: as KvView, but written.
struct MutableKvView {
  std::byte* data = nullptr;
  std::byte* const* pages = nullptr;
  std::size_t offset_bytes = 0;
  std::uint32_t page_tokens = 0;
  std::ptrdiff_t token_stride_bytes = 0;
  std::ptrdiff_t head_stride_bytes = 0;

  static MutableKvView Array(void* base, std::uint32_t heads, std::uint32_t head_dim) {
    MutableKvView view;
    view.data = static_cast<std::byte*>(base);
    view.head_stride_bytes = std::ptrdiff_t{2} * head_dim;
    view.token_stride_bytes = view.head_stride_bytes * heads;
    return view;
  }
};

struct LayerOutput {
  MutableKvView k;
  MutableKvView v;
};

// Decodes heads head_begin .. head_begin + head_count - 1 of a verified page (head_count 0: all)
// into `out`, in the dtype of the page's source and in `frame`: tiles are decoded, raw heads
// copied. UNIMPLEMENTED for a raw head whose frame is not `frame`; FAILED_PRECONDITION for an
// absent head. `scratch` is reused from call to call.
absl::Status DecodePage(const PageView& page, Frame frame, std::uint32_t head_begin,
                        std::uint32_t head_count, const LayerOutput& out,
                        std::vector<std::byte>* scratch);

// `outputs[block * layer_count + layer]`, layers in the order of the namespace's groups and of the
// layers in them; borrowed, as is the memory behind it, until the Fetch is done.
class KvSink : public FetchSink {
 public:
  KvSink(const NamespaceSpec& spec, Frame frame, absl::Span<const LayerOutput> outputs);

  absl::Status OnPage(const PageId& id, const PageView& page) override;

 private:
  const Frame frame_;
  const absl::Span<const LayerOutput> outputs_;
  std::vector<std::size_t> group_begin_;  // First layer of each group; the last entry is the total.
  std::vector<std::byte> scratch_;
};

}  // namespace kvmill

#endif  // KVMILL_CLIENT_KV_SINK_H_
