#include "tests/engine/kv_memory.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "storage/core/check.h"

namespace kvmill::engine {
namespace {

constexpr std::byte kPattern{0xC5};  // 0xC5C5 is finite in both 16-bit types.

}  // namespace

KvMemory::KvMemory(const ModelShape& shape, Layout layout, std::uint32_t head_count,
                   std::uint32_t page_count)
    : shape_(shape), layout_(layout), head_count_(head_count) {
  const auto row = static_cast<std::ptrdiff_t>(shape.row_bytes());
  const auto heads = static_cast<std::ptrdiff_t>(head_count);
  switch (layout) {
    case Layout::kHndApart:
    case Layout::kHndTogether:
      token_stride_ = row + 16;
      head_stride_ = token_stride_ * kPageTokens + 32;
      half_bytes_ = static_cast<std::size_t>(head_stride_ * heads);
      break;
    case Layout::kNhdApart:
    case Layout::kNhdTogether:
    case Layout::kAllLayers:
      head_stride_ = row;
      // Rows side by side in one layout, padded in the others.
      token_stride_ = row * heads + (layout == Layout::kNhdTogether ? 0 : 16);
      half_bytes_ = static_cast<std::size_t>(token_stride_ * kPageTokens);
      break;
  }
  const std::size_t halves = layout == Layout::kAllLayers ? std::size_t{2} * shape.layers
                             : layout == Layout::kNhdApart || layout == Layout::kHndApart ? 1
                                                                                          : 2;
  page_stride_ = half_bytes_ * halves + 64;
  const std::size_t buffers = std::size_t{2} * shape.layers / halves;
  buffer_bytes_ = page_stride_ * page_count;
  for (std::size_t i = 0; i < buffers; ++i) {
    absl::StatusOr<SharedMemory> buffer = SharedMemory::Create(buffer_bytes_);
    KVMILL_CHECK(buffer.ok());
    std::fill_n(buffer->data(), buffer_bytes_, kPattern);
    buffers_.push_back(*std::move(buffer));
  }
}

EngineGeometry KvMemory::Geometry(std::uint32_t head_begin) const {
  EngineGeometry geometry;
  for (const SharedMemory& buffer : buffers_) {
    EngineRegion& region = geometry.regions.emplace_back();
    region.base = reinterpret_cast<std::uintptr_t>(buffer.data());
    region.bytes = buffer_bytes_;
    region.fd = buffer.fd();
  }
  EngineLayers l;
  l.element = shape_.bfloat16 ? EngineElement::kBFloat16 : EngineElement::kFloat16;
  l.block_tokens = shape_.block_tokens;
  l.head_dim = shape_.head_dim;
  l.head_begin = head_begin;
  l.head_count = head_count_;
  l.page_tokens = kPageTokens;
  l.page_count = buffer_bytes_ / page_stride_;
  l.page_bytes = half_bytes_;
  l.page_stride_bytes = page_stride_;
  l.token_stride_bytes = static_cast<std::uint64_t>(token_stride_);
  l.head_stride_bytes = static_cast<std::uint64_t>(head_stride_);
  for (std::uint32_t layer = 0; layer < shape_.layers; ++layer) {
    for (const bool value : {false, true}) {
      (value ? l.values : l.keys)
          .push_back(
              {static_cast<std::uint32_t>(BufferOf(layer, value)), OffsetInPage(layer, value)});
    }
  }
  geometry.layers = {l};
  return geometry;
}

std::size_t KvMemory::BufferOf(std::uint32_t layer, bool value) const {
  switch (layout_) {
    case Layout::kNhdApart:
    case Layout::kHndApart:
      return std::size_t{2} * layer + (value ? 1 : 0);
    case Layout::kNhdTogether:
    case Layout::kHndTogether:
      return layer;
    case Layout::kAllLayers:
      break;
  }
  return 0;
}

std::size_t KvMemory::OffsetInPage(std::uint32_t layer, bool value) const {
  switch (layout_) {
    case Layout::kNhdApart:
    case Layout::kHndApart:
      return 0;
    case Layout::kNhdTogether:
    case Layout::kHndTogether:
      return value ? half_bytes_ : 0;
    case Layout::kAllLayers:
      break;
  }
  return half_bytes_ * (std::size_t{2} * layer + (value ? 1 : 0));
}

std::byte* KvMemory::Page(std::uint32_t layer, bool value, PageId page) {
  return InPage(buffers_[BufferOf(layer, value)].data() + page_stride_ * page, layer, value);
}

std::string KvMemory::CheckPadding() const {
  for (std::size_t buffer = 0; buffer < buffers_.size(); ++buffer) {
    std::vector<bool> is_row(page_stride_, false);
    for (std::uint32_t layer = 0; layer < shape_.layers; ++layer) {
      for (const bool value : {false, true}) {
        if (BufferOf(layer, value) != buffer) continue;
        for (std::ptrdiff_t token = 0; token < kPageTokens; ++token) {
          for (std::ptrdiff_t head = 0; head < head_count_; ++head) {
            const auto row = static_cast<std::ptrdiff_t>(OffsetInPage(layer, value)) +
                             token * token_stride_ + head * head_stride_;
            std::fill_n(is_row.begin() + row, shape_.row_bytes(), true);
          }
        }
      }
    }
    std::vector<std::size_t> padding;
    for (std::size_t i = 0; i < page_stride_; ++i) {
      if (!is_row[i]) padding.push_back(i);
    }
    const absl::Span<const std::byte> bytes(buffers_[buffer].data(), buffer_bytes_);
    for (std::size_t page = 0; page < bytes.size(); page += page_stride_) {
      for (const std::size_t i : padding) {
        if (bytes[page + i] == kPattern) continue;
        return absl::StrCat("padding was written: buffer ", buffer, ", page ", page / page_stride_,
                            ", byte ", i);
      }
    }
  }
  return "";
}

PageTable::PageTable(std::uint32_t page_count) : pages_(page_count) {
  for (PageId page = 0; page < page_count; ++page) free_.push_back(page);
}

std::optional<std::vector<PageId>> PageTable::Allocate(std::size_t count) {
  if (free_.size() < count) return std::nullopt;
  std::vector<PageId> pages(free_.begin(), free_.begin() + static_cast<std::ptrdiff_t>(count));
  free_.erase(free_.begin(), free_.begin() + static_cast<std::ptrdiff_t>(count));
  for (const PageId page : pages) {
    if (pages_[page].cached_as != 0) by_prefix_.erase(pages_[page].cached_as);
    pages_[page] = Page{.users = 1};
  }
  return pages;
}

void PageTable::AddUser(PageId page) {
  if (pages_[page].users++ == 0) free_.erase(std::find(free_.begin(), free_.end(), page));
}

void PageTable::RemoveUser(PageId page) {
  KVMILL_CHECK(pages_[page].users > 0);
  if (--pages_[page].users > 0) return;
  // What nobody can find is of no use: it goes first.
  if (pages_[page].cached_as == 0) {
    free_.push_front(page);
  } else {
    free_.push_back(page);
  }
}

void PageTable::Cache(PageId page, std::uint64_t prefix) {
  if (by_prefix_.emplace(prefix, page).second) pages_[page].cached_as = prefix;
}

std::optional<PageId> PageTable::Find(std::uint64_t prefix) const {
  const auto it = by_prefix_.find(prefix);
  if (it == by_prefix_.end()) return std::nullopt;
  return it->second;
}

}  // namespace kvmill::engine
