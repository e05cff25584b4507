#include "storage/core/page_layout.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "absl/container/inlined_vector.h"
#include "absl/strings/str_cat.h"
#include "storage/core/check.h"
#include "storage/core/checksum.h"
#include "storage/core/status_macros.h"

namespace kvmill {
namespace {

static_assert(std::endian::native == std::endian::little,
              "pages are written as they lie in memory");

constexpr std::size_t Align(std::size_t bytes) {
  return (bytes + kPageAlignment - 1) / kPageAlignment * kPageAlignment;
}

PageSlot LoadSlot(absl::Span<const std::byte> page, std::size_t head) {
  PageSlot slot;
  std::memcpy(&slot, page.data() + sizeof(PageHeader) + head * sizeof(PageSlot), sizeof(slot));
  return slot;
}

void StoreSlot(absl::Span<std::byte> page, std::size_t head, const PageSlot& slot) {
  std::memcpy(page.data() + sizeof(PageHeader) + head * sizeof(PageSlot), &slot, sizeof(slot));
}

PageHeader LoadHeader(absl::Span<const std::byte> page) {
  PageHeader header;
  std::memcpy(&header, page.data(), sizeof(header));
  return header;
}

// XXH3 of header and slots with the checksum field zero. Copies to the stack: pages may be
// read-only and shared.
std::uint64_t HeaderChecksum(absl::Span<const std::byte> page, std::size_t head_count) {
  const std::size_t bytes = sizeof(PageHeader) + head_count * sizeof(PageSlot);
  absl::InlinedVector<std::byte, sizeof(PageHeader) + 32 * sizeof(PageSlot)> copy(
      page.data(), page.data() + bytes);
  std::memset(copy.data() + offsetof(PageHeader, checksum), 0, sizeof(std::uint64_t));
  return Checksum(absl::MakeConstSpan(copy.data(), bytes));
}

template <typename A, typename B>
absl::Status Mismatch(absl::string_view field, A got, B want) {
  return absl::DataLossError(absl::StrCat("page ", field, " ", got, ", want ", want));
}

TileFormat FormatIn(const PageHeader& header) {
  TileFormat format;
  format.key_bits = header.key_bits;
  format.value_bits = header.value_bits;
  format.group = header.block_tokens;
  format.head_dim = header.head_dim;
  return format;
}

}  // namespace

std::size_t SlotBytes(const TileFormat& format, SlotKind kind, std::size_t token_count) {
  switch (kind) {
    case SlotKind::kAbsent:
      return 0;
    case SlotKind::kTile:
      return RecordBytes(format);
    case SlotKind::kRaw:
      return RawBytes(format, token_count);
  }
  return 0;
}

std::size_t PageBytes(const TileFormat& format, std::size_t token_count,
                      absl::Span<const SlotKind> kinds) {
  std::size_t bytes = PageHeaderBytes(kinds.size());
  for (SlotKind kind : kinds) bytes += Align(SlotBytes(format, kind, token_count));
  return bytes;
}

std::size_t UniformPageBytes(const TileFormat& format, std::size_t token_count, SlotKind kind,
                             std::size_t head_count) {
  return PageHeaderBytes(head_count) + head_count * Align(SlotBytes(format, kind, token_count));
}

void InitPage(const PageIdentity& identity, absl::Span<const SlotKind> kinds,
              absl::Span<std::byte> page) {
  KVMILL_CHECK(kinds.size() == identity.head_count);
  KVMILL_CHECK(page.size() == PageBytes(identity.format, identity.token_count, kinds));
  const std::size_t header_bytes = PageHeaderBytes(kinds.size());
  std::memset(page.data(), 0, header_bytes);
  PageHeader header{};
  header.magic = kPageMagic;
  header.version = kPageVersion;
  header.head_count = identity.head_count;
  header.page_bytes = static_cast<std::uint32_t>(page.size());
  header.fingerprint = identity.fingerprint;
  std::memcpy(header.key, identity.key.data(), identity.key.size());
  header.key_bytes = static_cast<std::uint8_t>(identity.key.size());
  header.group_index = identity.group_index;
  header.layer = identity.layer;
  header.token_count = identity.token_count;
  header.head_dim = identity.format.head_dim;
  header.block_tokens = identity.format.group;
  header.key_bits = identity.format.key_bits;
  header.value_bits = identity.format.value_bits;
  header.source_dtype = static_cast<std::uint8_t>(identity.source_dtype);
  header.frame = static_cast<std::uint8_t>(identity.frame);
  std::memcpy(page.data(), &header, sizeof(header));
  std::size_t offset = header_bytes;
  for (std::size_t head = 0; head < kinds.size(); ++head) {
    const std::size_t bytes = SlotBytes(identity.format, kinds[head], identity.token_count);
    PageSlot slot{};
    slot.kind = kinds[head];
    if (bytes != 0) {
      slot.offset_bytes = static_cast<std::uint32_t>(offset);
      slot.length_bytes = static_cast<std::uint32_t>(bytes);
      std::memset(page.data() + offset + bytes, 0, Align(bytes) - bytes);
      offset += Align(bytes);
    }
    StoreSlot(page, head, slot);
  }
}

absl::Span<std::byte> SlotContents(absl::Span<std::byte> page, std::size_t head) {
  const PageSlot slot = LoadSlot(page, head);
  return page.subspan(slot.offset_bytes, slot.length_bytes);
}

void SealSlot(absl::Span<std::byte> page, std::size_t head) {
  PageSlot slot = LoadSlot(page, head);
  if (slot.kind == SlotKind::kAbsent) return;
  slot.checksum = Checksum(page.subspan(slot.offset_bytes, slot.length_bytes));
  StoreSlot(page, head, slot);
}

void SealHeader(absl::Span<std::byte> page) {
  PageHeader header = LoadHeader(page);
  header.checksum = HeaderChecksum(page, header.head_count);
  std::memcpy(page.data(), &header, sizeof(header));
}

void SealPage(absl::Span<std::byte> page) {
  const std::size_t head_count = LoadHeader(page).head_count;
  for (std::size_t head = 0; head < head_count; ++head) SealSlot(page, head);
  SealHeader(page);
}

absl::StatusOr<PageView> PageView::Parse(absl::Span<const std::byte> page) {
  return ParseApart(page, page);
}

absl::StatusOr<PageView> PageView::ParseApart(absl::Span<const std::byte> table,
                                              absl::Span<const std::byte> page) {
  if (table.size() < sizeof(PageHeader)) return Mismatch("bytes", table.size(), ">= 128");
  PageView view(table, page);
  view.header_ = LoadHeader(table);
  const PageHeader& h = view.header_;
  if (h.magic != kPageMagic) return Mismatch("magic", absl::Hex(h.magic), absl::Hex(kPageMagic));
  if (h.version != kPageVersion) return Mismatch("version", h.version, kPageVersion);
  if (h.page_bytes != page.size()) return Mismatch("length", page.size(), h.page_bytes);
  if (h.head_count == 0 || PageHeaderBytes(h.head_count) > std::min(table.size(), page.size())) {
    return Mismatch("head count", h.head_count,
                    absl::StrCat("1 to what ", std::min(table.size(), page.size()), " bytes hold"));
  }
  const std::uint64_t checksum = HeaderChecksum(table, h.head_count);
  if (checksum != h.checksum) {
    return Mismatch("header checksum", absl::Hex(checksum), absl::Hex(h.checksum));
  }
  // A right checksum does not make a right page: whoever wrote it may have been wrong.
  const TileFormat format = FormatIn(h);
  if (!ValidateTileFormat(format).ok()) return Mismatch("format", ToString(format), "a known one");
  if (h.key_bytes == 0 || h.key_bytes > kBlockKeyBytesMax)
    return Mismatch("key bytes", int{h.key_bytes}, "1 to 64");
  if (h.token_count == 0 || h.token_count > h.block_tokens) {
    return Mismatch("token count", h.token_count, absl::StrCat("1 to ", h.block_tokens));
  }
  if (h.source_dtype > 1) return Mismatch("source dtype", int{h.source_dtype}, "0 or 1");
  if (h.frame > 1) return Mismatch("frame", int{h.frame}, "0 or 1");
  for (std::size_t head = 0; head < h.head_count; ++head) {
    const PageSlot slot = LoadSlot(table, head);
    if (slot.kind > SlotKind::kRaw) {
      return Mismatch(absl::StrCat("slot ", head, " kind"), static_cast<int>(slot.kind), "0 to 2");
    }
    if (slot.kind == SlotKind::kAbsent) {
      if (slot.offset_bytes == 0 && slot.length_bytes == 0) continue;
      return Mismatch(absl::StrCat("slot ", head, " is absent and its place"),
                      absl::StrCat(slot.offset_bytes, "+", slot.length_bytes), "0+0");
    }
    const std::size_t want = SlotBytes(format, slot.kind, h.token_count);
    if (slot.length_bytes != want) {
      return Mismatch(absl::StrCat("slot ", head, " length"), slot.length_bytes, want);
    }
    if (slot.offset_bytes < PageHeaderBytes(h.head_count) || slot.offset_bytes > page.size() ||
        slot.length_bytes > page.size() - slot.offset_bytes) {
      return Mismatch(absl::StrCat("slot ", head, " offset"), slot.offset_bytes,
                      absl::StrCat("contents within ", page.size(), " bytes"));
    }
  }
  return view;
}

PageSlot PageView::slot(std::size_t head) const { return LoadSlot(table_, head); }

absl::Span<const std::byte> PageView::contents(std::size_t head) const {
  const PageSlot s = slot(head);
  return page_.subspan(s.offset_bytes, s.length_bytes);
}

PageIdentity PageView::identity() const {
  PageIdentity identity;
  identity.fingerprint = header_.fingerprint;
  identity.key = *BlockKey::FromBytes(
      absl::string_view(reinterpret_cast<const char*>(header_.key), header_.key_bytes));
  identity.group_index = header_.group_index;
  identity.layer = header_.layer;
  identity.head_count = header_.head_count;
  identity.token_count = header_.token_count;
  identity.format = FormatIn(header_);
  identity.source_dtype = static_cast<DType>(header_.source_dtype);
  identity.frame = static_cast<Frame>(header_.frame);
  return identity;
}

absl::Status PageView::VerifySlot(std::size_t head) const {
  const PageSlot s = slot(head);
  if (s.kind == SlotKind::kAbsent) return absl::OkStatus();
  const std::uint64_t checksum = Checksum(contents(head));
  if (checksum != s.checksum) {
    return absl::DataLossError(absl::StrCat("layer ", header_.layer, " head ", head, ": xxh3 0x",
                                            absl::Hex(checksum), ", want 0x",
                                            absl::Hex(s.checksum)));
  }
  return absl::OkStatus();
}

absl::Status VerifyPage(const PageIdentity& want, absl::Span<const std::byte> page) {
  KVMILL_ASSIGN_OR_RETURN(const PageView view, PageView::Parse(page));
  const PageIdentity got = view.identity();
  if (got.fingerprint != want.fingerprint) {
    return Mismatch("namespace", ToHex(got.fingerprint), ToHex(want.fingerprint));
  }
  if (!(got.key == want.key)) return Mismatch("key", got.key.ToHex(), want.key.ToHex());
  if (got.group_index != want.group_index) {
    return Mismatch("layer group", int{got.group_index}, int{want.group_index});
  }
  if (got.layer != want.layer) return Mismatch("layer", got.layer, want.layer);
  if (got.head_count != want.head_count)
    return Mismatch("head count", got.head_count, want.head_count);
  if (got.token_count != want.token_count) {
    return Mismatch("token count", got.token_count, want.token_count);
  }
  if (got.format != want.format) {
    return Mismatch("format", absl::StrCat(ToString(got.format), " D ", got.format.head_dim),
                    absl::StrCat(ToString(want.format), " D ", want.format.head_dim));
  }
  if (got.source_dtype != want.source_dtype || got.frame != want.frame) {
    return absl::DataLossError("page source dtype or frame differs from the namespace's");
  }
  for (std::size_t head = 0; head < view.head_count(); ++head) {
    KVMILL_RETURN_IF_ERROR(view.VerifySlot(head));
  }
  return absl::OkStatus();
}

}  // namespace kvmill
