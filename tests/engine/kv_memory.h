// The engine's memory. KvMemory is what a worker has: paged K/V buffers with explicit strides and
// padding. PageTable is what the scheduler has: who uses which page, and which pages can be reused
// by prefix.
#ifndef KVMILL_TESTS_ENGINE_KV_MEMORY_H_
#define KVMILL_TESTS_ENGINE_KV_MEMORY_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "client/engine_geometry.h"
#include "client/shared_memory.h"
#include "tests/engine/kv_model.h"

namespace kvmill::engine {

using PageId = std::uint32_t;

enum class Layout : std::uint8_t {
  kNhdApart,     // [page][token][head][channel], a buffer for K and one for V of each layer.
  kHndApart,     // [page][head][token][channel].
  kNhdTogether,  // [page][K, V][token][head][channel], a buffer for each layer.
  kHndTogether,  // [page][K, V][head][token][channel].
  kAllLayers,    // [page][layer][K, V][token][head][channel], one buffer.
};
inline constexpr int kLayoutCount = 5;

// K/V of the heads of one rank. Rows are padded, and so are pages; the padding holds a pattern that
// nobody may change.
class KvMemory {
 public:
  KvMemory(const ModelShape& shape, Layout layout, std::uint32_t head_count,
           std::uint32_t page_count);

  std::uint32_t head_count() const { return head_count_; }
  std::ptrdiff_t token_stride_bytes() const { return token_stride_; }
  std::ptrdiff_t head_stride_bytes() const { return head_stride_; }
  std::size_t page_bytes() const { return page_stride_; }
  // First row of K or V of a layer in a page.
  std::byte* Page(std::uint32_t layer, bool value, PageId page);
  // The same in memory of page_bytes() that is no page of this: where unwanted tokens go.
  std::byte* InPage(std::byte* memory, std::uint32_t layer, bool value) const {
    return memory + OffsetInPage(layer, value);
  }
  std::byte* Row(std::uint32_t layer, bool value, PageId page, std::uint32_t token,
                 std::uint32_t head) {
    return Page(layer, value, page) + static_cast<std::ptrdiff_t>(token) * token_stride_ +
           static_cast<std::ptrdiff_t>(head) * head_stride_;
  }
  // For RegisterMemory: this memory, which is shared, as heads from `head_begin` on.
  EngineGeometry Geometry(std::uint32_t head_begin) const;
  // Empty, or where padding was written.
  std::string CheckPadding() const;

 private:
  std::size_t BufferOf(std::uint32_t layer, bool value) const;
  std::size_t OffsetInPage(std::uint32_t layer, bool value) const;

  const ModelShape shape_;
  const Layout layout_;
  const std::uint32_t head_count_;
  std::ptrdiff_t token_stride_ = 0;
  std::ptrdiff_t head_stride_ = 0;
  std::size_t half_bytes_ = 0;  // K or V of one layer in a page.
  std::size_t page_stride_ = 0;
  std::size_t buffer_bytes_ = 0;  // Of what is used of a buffer.
  std::vector<SharedMemory> buffers_;
};

// Reference-counted pages with a prefix cache. A page without users keeps what it holds, and can be
// found by its prefix, until it is given out again; the longest unused goes first.
class PageTable {
 public:
  explicit PageTable(std::uint32_t page_count);

  // Fresh pages with one user each, or nothing.
  std::optional<std::vector<PageId>> Allocate(std::size_t count);
  void AddUser(PageId page);
  void RemoveUser(PageId page);
  std::size_t free_count() const { return free_.size(); }
  std::size_t page_count() const { return pages_.size(); }

  // Makes a full page findable by the prefix hash of its last token. The first page of a prefix
  // stays.
  void Cache(PageId page, std::uint64_t prefix);
  std::optional<PageId> Find(std::uint64_t prefix) const;

  // Where the content comes from: 0 computed (or raw, which is the same bytes), else decoded from
  // the tile of the block with this prefix hash.
  void SetSource(PageId page, std::uint64_t block) { pages_[page].source = block; }
  std::uint64_t source(PageId page) const { return pages_[page].source; }

 private:
  struct Page {
    std::uint32_t users = 0;
    std::uint64_t cached_as = 0;  // 0: not in the prefix cache.
    std::uint64_t source = 0;
  };
  std::vector<Page> pages_;
  std::deque<PageId> free_;  // Next one first.
  std::unordered_map<std::uint64_t, PageId> by_prefix_;
};

}  // namespace kvmill::engine

#endif  // KVMILL_TESTS_ENGINE_KV_MEMORY_H_
