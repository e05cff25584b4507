#include "storage/page_copies.h"

#include "storage/core/check.h"

namespace kvmill {

void AppendPageCopies(const PagePool& from_pool, absl::Span<const SlotRef> from,
                      const PagePool& to_pool, absl::Span<const SlotRef> to,
                      absl::Span<const std::uint32_t> page_bytes,
                      std::vector<DeviceCopier::Copy>* copies) {
  KVMILL_DCHECK(from.size() == page_bytes.size() && to.size() == page_bytes.size());
  absl::Span<std::byte> from_before;
  absl::Span<std::byte> to_before;
  for (std::size_t i = 0; i < page_bytes.size(); ++i) {
    const absl::Span<std::byte> from_slot = from_pool.Bytes(from[i]);
    const absl::Span<std::byte> to_slot = to_pool.Bytes(to[i]);
    // Arenas may be next to each other, and are yet different memory to a device.
    const bool adjacent = i > 0 && from_slot.data() == from_before.data() + from_before.size() &&
                          to_slot.data() == to_before.data() + to_before.size() &&
                          from_before.size() == to_before.size() &&
                          from_pool.Locate(from[i]).arena == from_pool.Locate(from[i - 1]).arena &&
                          to_pool.Locate(to[i]).arena == to_pool.Locate(to[i - 1]).arena;
    if (adjacent) {
      DeviceCopier::Copy& copy = copies->back();
      copy.bytes = static_cast<std::size_t>(from_slot.data() - copy.from) + page_bytes[i];
    } else {
      copies->push_back({to_slot.data(), from_slot.data(), page_bytes[i]});
    }
    from_before = from_slot;
    to_before = to_slot;
  }
}

}  // namespace kvmill
