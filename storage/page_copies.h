// Which bytes a device must copy to bring pages from one pool to another.
//
// Internal to storage/. Pure functions.
#ifndef KVMILL_STORAGE_PAGE_COPIES_H_
#define KVMILL_STORAGE_PAGE_COPIES_H_

#include <cstdint>
#include <vector>

#include "absl/types/span.h"
#include "storage/device/device_copier.h"
#include "storage/page_pool.h"

namespace kvmill {

// The copies that bring pages of these lengths from slots of one pool to slots of another. Slots
// that are adjacent on both sides become one copy, with what lies between their pages.
void AppendPageCopies(const PagePool& from_pool, absl::Span<const SlotRef> from,
                      const PagePool& to_pool, absl::Span<const SlotRef> to,
                      absl::Span<const std::uint32_t> page_bytes,
                      std::vector<DeviceCopier::Copy>* copies);

}  // namespace kvmill

#endif  // KVMILL_STORAGE_PAGE_COPIES_H_
