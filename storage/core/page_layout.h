// The bytes of a page: one layer of one block, as it lies in the pools, on disk and on the wire.
//
//   PageHeader (128 bytes) | PageSlot x heads (24 bytes each) | padding to 64 | slot contents, each
//   aligned to 64
//
// Every KV head of the model has a slot: absent, a tile (one record), or raw (16-bit K then V,
// token-major [tokens, head_dim], in the namespace's source dtype and frame). Each slot has its own
// checksum and the header one of itself and the slots. Integers are little-endian. Layout and
// version are described in docs/formats.md; the values never change meaning.
//
// Functions are pure and thread-safe; they never allocate but for error messages.
#ifndef KVMILL_STORAGE_CORE_PAGE_LAYOUT_H_
#define KVMILL_STORAGE_CORE_PAGE_LAYOUT_H_

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "storage/core/block_key.h"
#include "storage/core/namespace.h"

namespace kvmill {

inline constexpr std::uint32_t kPageMagic = 0x47504D4B;  // "KMPG" in memory.
inline constexpr std::uint16_t kPageVersion = 1;
inline constexpr std::size_t kPageAlignment = 64;

enum class SlotKind : std::uint8_t { kAbsent = 0, kTile = 1, kRaw = 2 };

struct PageHeader {
  std::uint32_t magic;
  std::uint16_t version;
  std::uint16_t head_count;
  std::uint32_t page_bytes;  // Of the whole page, a multiple of kPageAlignment.
  std::uint32_t reserved0;   // 0.
  Fingerprint fingerprint;   // Of the namespace.
  std::byte key[kBlockKeyBytesMax];
  std::uint8_t key_bytes;
  std::uint8_t group_index;   // Layer group in the namespace.
  std::uint16_t layer;        // Layer number of the model.
  std::uint16_t token_count;  // block_tokens, or less for a tail.
  std::uint16_t head_dim;
  std::uint16_t block_tokens;
  std::uint8_t key_bits;
  std::uint8_t value_bits;
  std::uint8_t source_dtype;  // DType.
  std::uint8_t frame;         // Frame of raw slots.
  std::uint16_t reserved1;    // 0.
  std::uint64_t checksum;     // XXH3-64 of header and slots with this field 0.
  std::uint64_t reserved2;    // 0.
};
static_assert(sizeof(PageHeader) == 128);

struct PageSlot {
  SlotKind kind;
  std::uint8_t reserved[3];  // 0.
  std::uint32_t
      offset_bytes;  // From the start of the page; a multiple of kPageAlignment. 0 when absent.
  std::uint32_t length_bytes;  // 0 when absent.
  std::uint32_t reserved1;     // 0.
  std::uint64_t checksum;      // XXH3-64 of the contents.
};
static_assert(sizeof(PageSlot) == 24);

// What a page is of: everything in the header that is not layout.
struct PageIdentity {
  Fingerprint fingerprint{};
  BlockKey key;
  std::uint8_t group_index = 0;
  std::uint16_t layer = 0;
  std::uint16_t head_count = 0;
  std::uint16_t token_count = 0;
  TileFormat format;
  DType source_dtype = DType::kFloat16;
  Frame frame = Frame::kModel;
};

// Bytes of a slot's contents, without alignment.
std::size_t SlotBytes(const TileFormat& format, SlotKind kind, std::size_t token_count);

// Bytes before the first slot's contents.
constexpr std::size_t PageHeaderBytes(std::size_t head_count) {
  return (sizeof(PageHeader) + head_count * sizeof(PageSlot) + kPageAlignment - 1) /
         kPageAlignment * kPageAlignment;
}

// Bytes of a page whose heads are of these kinds (kinds.size() heads).
std::size_t PageBytes(const TileFormat& format, std::size_t token_count,
                      absl::Span<const SlotKind> kinds);
// The same when all heads are of one kind.
std::size_t UniformPageBytes(const TileFormat& format, std::size_t token_count, SlotKind kind,
                             std::size_t head_count);

// Writes header and slot table for these kinds; contents and checksums are still to be filled in
// (SealPage). `page` has PageBytes() bytes, aligned to 8. Padding between contents is zeroed, so
// equal pages have equal bytes.
void InitPage(const PageIdentity& identity, absl::Span<const SlotKind> kinds,
              absl::Span<std::byte> page);

// Where the contents of head `head` go, after InitPage. Empty when absent.
absl::Span<std::byte> SlotContents(absl::Span<std::byte> page, std::size_t head);

// Computes the checksum of head `head` from its contents, which must not change afterwards.
// Different heads may be sealed concurrently, best right after their contents were written. Nothing
// to do for an absent head.
void SealSlot(absl::Span<std::byte> page, std::size_t head);
// Computes the header's checksum; after every slot was sealed. The page must not change afterwards.
void SealHeader(absl::Span<std::byte> page);
// Both, for all heads.
void SealPage(absl::Span<std::byte> page);

// A parsed page: header and slot table are checked (magic, version, bounds, checksum), contents are
// not (VerifySlot). Borrows the page.
class PageView {
 public:
  // DATA_LOSS naming the field, its value and the expected one. Any bytes may be passed in;
  // alignment does not matter.
  static absl::StatusOr<PageView> Parse(absl::Span<const std::byte> page);
  // Of a page that lies where the CPU cannot read, on a GPU: `table` is a copy of its first bytes,
  // PageHeaderBytes(head_count) of them. contents() then gives places in `page`, which is not
  // touched; VerifySlot() is not for this kind. Borrows both.
  static absl::StatusOr<PageView> ParseApart(absl::Span<const std::byte> table,
                                             absl::Span<const std::byte> page);

  const PageHeader& header() const { return header_; }
  std::size_t head_count() const { return header_.head_count; }
  PageSlot slot(std::size_t head) const;
  absl::Span<const std::byte> contents(std::size_t head) const;
  absl::Span<const std::byte> bytes() const { return page_; }  // All of it.
  PageIdentity identity() const;

  // DATA_LOSS naming head and both checksums.
  absl::Status VerifySlot(std::size_t head) const;

 private:
  PageView(absl::Span<const std::byte> table, absl::Span<const std::byte> page)
      : table_(table), page_(page) {}
  absl::Span<const std::byte> table_;  // Header and slots.
  absl::Span<const std::byte> page_;
  PageHeader header_{};
};

// All of it: parses, compares with `want` (identity of the page that the reader asked for) and
// verifies every slot. DATA_LOSS says what is wrong. This is the one read check of every tier and
// of copies from peers.
absl::Status VerifyPage(const PageIdentity& want, absl::Span<const std::byte> page);

}  // namespace kvmill

#endif  // KVMILL_STORAGE_CORE_PAGE_LAYOUT_H_
