#include "storage/device/known_memory.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "kernels/attention_range.h"
#include "storage/core/status_macros.h"

namespace kvmill {
namespace {

std::uintptr_t AddressOf(const void* start) { return reinterpret_cast<std::uintptr_t>(start); }

// The first range that ends beyond `address`.
KnownMemory::Ranges::const_iterator FirstBeyond(const KnownMemory::Ranges& ranges,
                                                std::uintptr_t address) {
  return std::upper_bound(
      ranges.begin(), ranges.end(), address,
      [](std::uintptr_t a, const KnownMemory::Range& range) { return a < range.end; });
}

// What a list is about: "tile 3", and in it "k page 2".
struct Place {
  absl::string_view list;
  std::size_t index = 0;
  absl::string_view part;
  std::size_t part_index = 0;
};

absl::Status OutOfReach(const Place& place, const void* start, std::size_t bytes) {
  return absl::InvalidArgumentError(absl::StrFormat(
      "%s %d: %s %d (%d bytes at %p) is neither memory of the device nor pinned, or may not be "
      "written",
      place.list, place.index, place.part, place.part_index, bytes, start));
}

absl::Status Want(KnownMemory::View& memory, const Place& place, const void* start,
                  std::size_t bytes, bool written) {
  if (memory.Holds(start, bytes, written)) return absl::OkStatus();
  return OutOfReach(place, start, bytes);
}

// The pages of one head: the list, and of each page what lies between its first and last value.
template <typename Byte>
absl::Status WantPages(KnownMemory::View& memory, Place place, const BasicHeadPages<Byte>& head,
                       std::uint64_t token_begin, std::uint64_t token_end, std::uint32_t head_dim,
                       bool written) {
  if (token_begin >= token_end) return absl::OkStatus();
  if (head.page_tokens == 0) {
    return absl::InvalidArgumentError(
        absl::StrCat(place.list, " ", place.index, ": ", place.part, " has no tokens in a page"));
  }
  const std::uint64_t first_page = token_begin / head.page_tokens;
  const std::uint64_t page_end = (token_end + head.page_tokens - 1) / head.page_tokens;
  KVMILL_RETURN_IF_ERROR(Want(memory, place, head.pages + first_page,
                              (page_end - first_page) * sizeof(head.pages[0]), false));
  for (std::uint64_t page = first_page; page < page_end; ++page) {
    const std::uint64_t first = std::max(token_begin, page * head.page_tokens);
    const std::uint64_t last = std::min<std::uint64_t>(token_end, (page + 1) * head.page_tokens);
    // Strides may be negative: any of the four corners may be the lowest or the highest address.
    const auto t0 = static_cast<std::ptrdiff_t>(first % head.page_tokens) * head.token_stride_bytes;
    const auto t1 =
        static_cast<std::ptrdiff_t>((last - 1) % head.page_tokens) * head.token_stride_bytes;
    const auto d1 = static_cast<std::ptrdiff_t>(head_dim - 1) * head.channel_stride_bytes;
    const std::ptrdiff_t low = std::min(t0, t1) + std::min<std::ptrdiff_t>(0, d1);
    const std::ptrdiff_t high = std::max(t0, t1) + std::max<std::ptrdiff_t>(0, d1) + 2;
    place.part_index = page;
    KVMILL_RETURN_IF_ERROR(Want(memory, place, head.pages[page] + head.offset_bytes + low,
                                static_cast<std::size_t>(high - low), written));
  }
  return absl::OkStatus();
}

absl::Status WantBlock(KnownMemory::View& memory, const AttentionShape& shape,
                       const AttentionBlock& block, const Place& place, std::uint64_t tokens) {
  if (block.kind == BlockKind::kTile) {
    return Want(memory, place, block.data, RecordBytes(shape.format), false);
  }
  if (block.kind == BlockKind::kAbsent) return absl::OkStatus();
  const std::ptrdiff_t rows =
      static_cast<std::ptrdiff_t>(tokens - 1) * shape.raw.token_stride_bytes;
  const std::ptrdiff_t row_bytes = std::ptrdiff_t{2} * shape.format.head_dim;
  for (const std::ptrdiff_t half : {std::ptrdiff_t{0}, shape.raw.value_offset_bytes}) {
    const std::ptrdiff_t low = half + std::min<std::ptrdiff_t>(0, rows);
    const std::ptrdiff_t high = half + std::max<std::ptrdiff_t>(0, rows) + row_bytes;
    KVMILL_RETURN_IF_ERROR(
        Want(memory, place, block.data + low, static_cast<std::size_t>(high - low), false));
  }
  return absl::OkStatus();
}

absl::Status WantSequenceLists(KnownMemory::View& memory, const AttentionShape& shape,
                               const AttentionSequence& s, std::size_t index) {
  if (s.block_count != 0) {
    KVMILL_RETURN_IF_ERROR(
        Want(memory, {"sequence", index, "block table", 0}, s.blocks,
             std::size_t{s.block_count} * shape.kv_heads * sizeof(AttentionBlock), false));
  }
  if (s.token_end > std::uint64_t{s.block_count} * shape.format.group) {
    KVMILL_RETURN_IF_ERROR(Want(memory, {"sequence", index, "tail list", 0}, s.tail,
                                shape.kv_heads * sizeof(TailHead), false));
  }
  return absl::OkStatus();
}

absl::Status WantSequenceData(KnownMemory::View& memory, const AttentionShape& shape,
                              const AttentionSequence& s, std::size_t index) {
  const TokenRange seen = SeenBySequence(shape, s);
  if (seen.empty()) return absl::OkStatus();
  const std::uint64_t group = shape.format.group;
  const std::uint64_t block_end =
      std::min<std::uint64_t>(s.block_count, (seen.end + group - 1) / group);
  for (std::uint64_t b = seen.begin / group; b < block_end; ++b) {
    const std::uint64_t tokens = std::min(seen.end, (b + 1) * group) - b * group;
    for (std::uint32_t h = 0; h < shape.kv_heads; ++h) {
      KVMILL_RETURN_IF_ERROR(WantBlock(memory, shape, s.blocks[b * shape.kv_heads + h],
                                       {"sequence", index, "block", b}, tokens));
    }
  }
  const std::uint64_t tail_begin = std::uint64_t{s.block_count} * group;
  if (seen.end <= tail_begin) return absl::OkStatus();
  const std::uint64_t first = std::max(seen.begin, tail_begin) - tail_begin;
  for (std::uint32_t h = 0; h < shape.kv_heads; ++h) {
    for (const HeadPages* half : {&s.tail[h].k, &s.tail[h].v}) {
      KVMILL_RETURN_IF_ERROR(WantPages(memory, {"sequence", index, "tail page", 0}, *half, first,
                                       seen.end - tail_begin, shape.format.head_dim, false));
    }
  }
  return absl::OkStatus();
}

}  // namespace

bool KnownMemory::View::Holds(const void* start, std::size_t bytes, bool written) {
  const std::uintptr_t begin = AddressOf(start);
  if (last_ >= ranges_->size() || begin < (*ranges_)[last_].begin ||
      begin >= (*ranges_)[last_].end) {
    last_ = static_cast<std::size_t>(FirstBeyond(*ranges_, begin) - ranges_->begin());
    if (last_ >= ranges_->size() || begin < (*ranges_)[last_].begin) return false;
  }
  const Range& range = (*ranges_)[last_];
  return bytes <= range.end - begin && !(written && !MayBeWritten(range.use));
}

const KnownMemory::Range* KnownMemory::View::FindAnyOf(const void* start, std::size_t bytes) const {
  const auto range = FirstBeyond(*ranges_, AddressOf(start));
  if (range == ranges_->end() || range->begin >= AddressOf(start) + bytes) return nullptr;
  return &*range;
}

absl::Status KnownMemory::Add(const void* start, std::size_t bytes, MemoryUse use, int fd) {
  const std::uintptr_t begin = AddressOf(start);
  if (start == nullptr || bytes == 0 || begin + bytes < begin) {
    return absl::InvalidArgumentError(absl::StrFormat("no memory: %d bytes at %p", bytes, start));
  }
  MutexLock lock(mu_);
  const auto place = FirstBeyond(*ranges_, begin);
  const bool is_there = place != ranges_->end() && place->begin == begin &&
                        place->end == begin + bytes && place->use == use;
  if (is_there && use == MemoryUse::kForeign) {
    auto changed = std::make_shared<Ranges>(*ranges_);
    ++(*changed)[static_cast<std::size_t>(place - ranges_->begin())].openings;
    ranges_ = std::move(changed);
    return absl::OkStatus();
  }
  if (place != ranges_->end() && place->begin < begin + bytes) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "some of the %d bytes at %p are the device's or pinned already: %d bytes "
        "at %p",
        bytes, start, place->end - place->begin, reinterpret_cast<const void*>(place->begin)));
  }
  auto changed = std::make_shared<Ranges>(*ranges_);
  changed->insert(changed->begin() + (place - ranges_->begin()),
                  Range{begin, begin + bytes, use, fd});
  ranges_ = std::move(changed);
  return absl::OkStatus();
}

bool KnownMemory::Remove(const void* start, std::size_t bytes, MemoryUse use) {
  const std::uintptr_t begin = AddressOf(start);
  MutexLock lock(mu_);
  const auto place = FirstBeyond(*ranges_, begin);
  if (place == ranges_->end() || place->begin != begin || place->end != begin + bytes ||
      place->use != use) {
    return false;
  }
  auto changed = std::make_shared<Ranges>(*ranges_);
  const auto range = changed->begin() + (place - ranges_->begin());
  if (--range->openings == 0) changed->erase(range);
  ranges_ = std::move(changed);
  return true;
}

KnownMemory::View KnownMemory::Look() const {
  MutexLock lock(mu_);
  return View(ranges_);
}

bool KnownMemory::empty() const {
  MutexLock lock(mu_);
  return ranges_->empty();
}

absl::Status CheckReach(KnownMemory::View memory, const TileFormat& format,
                        absl::Span<const EncodeArgs> tiles, const EncodeResult* results) {
  KVMILL_RETURN_IF_ERROR(
      Want(memory, {"list", 0, "tiles", 0}, tiles.data(), tiles.size() * sizeof(tiles[0]), false));
  KVMILL_RETURN_IF_ERROR(
      Want(memory, {"list", 0, "results", 0}, results, tiles.size() * sizeof(results[0]), true));
  for (std::size_t i = 0; i < tiles.size(); ++i) {
    const EncodeArgs& tile = tiles[i];
    KVMILL_RETURN_IF_ERROR(WantPages(memory, {"tile", i, "k page", 0}, tile.k, 0, format.group,
                                     format.head_dim, false));
    KVMILL_RETURN_IF_ERROR(WantPages(memory, {"tile", i, "v page", 0}, tile.v, 0, format.group,
                                     format.head_dim, false));
    KVMILL_RETURN_IF_ERROR(
        Want(memory, {"tile", i, "record", 0}, tile.record, RecordBytes(format), true));
  }
  return absl::OkStatus();
}

absl::Status CheckReach(KnownMemory::View memory, const TileFormat& format,
                        absl::Span<const DecodeArgs> tiles) {
  KVMILL_RETURN_IF_ERROR(
      Want(memory, {"list", 0, "tiles", 0}, tiles.data(), tiles.size() * sizeof(tiles[0]), false));
  for (std::size_t i = 0; i < tiles.size(); ++i) {
    const DecodeArgs& tile = tiles[i];
    KVMILL_RETURN_IF_ERROR(
        Want(memory, {"tile", i, "record", 0}, tile.record, RecordBytes(format), false));
    KVMILL_RETURN_IF_ERROR(WantPages(memory, {"tile", i, "k page", 0}, tile.k, 0, format.group,
                                     format.head_dim, true));
    KVMILL_RETURN_IF_ERROR(WantPages(memory, {"tile", i, "v page", 0}, tile.v, 0, format.group,
                                     format.head_dim, true));
  }
  return absl::OkStatus();
}

absl::Status CheckReach(KnownMemory::View memory, const AttentionArgs& args) {
  const AttentionShape& shape = args.shape;
  KVMILL_RETURN_IF_ERROR(Want(memory, {"list", 0, "sequences", 0}, args.sequences.data(),
                              args.sequences.size() * sizeof(args.sequences[0]), false));
  std::uint64_t rows = 0;
  for (std::size_t i = 0; i < args.sequences.size(); ++i) {
    KVMILL_RETURN_IF_ERROR(WantSequenceLists(memory, shape, args.sequences[i], i));
    rows += args.sequences[i].query_count;
  }
  KVMILL_RETURN_IF_ERROR(ValidateAttention(args));
  if (rows == 0) return absl::OkStatus();
  for (std::size_t i = 0; i < args.sequences.size(); ++i) {
    KVMILL_RETURN_IF_ERROR(WantSequenceData(memory, shape, args.sequences[i], i));
  }
  const std::size_t heads = rows * shape.q_heads;
  const auto bytes = [&](VectorType type) {
    return heads * shape.format.head_dim * (type == VectorType::kFloat32 ? 4 : 2);
  };
  KVMILL_RETURN_IF_ERROR(
      Want(memory, {"list", 0, "query", 0}, args.query, bytes(args.query_type), false));
  KVMILL_RETURN_IF_ERROR(
      Want(memory, {"list", 0, "output", 0}, args.output, bytes(args.output_type), true));
  if (args.log_sum_exp == nullptr) return absl::OkStatus();
  return Want(memory, {"list", 0, "log_sum_exp", 0}, args.log_sum_exp, heads * sizeof(float), true);
}

absl::Status CheckReach(KnownMemory::View memory, absl::Span<const GenerationCheck> checks,
                        const std::uint32_t* changed) {
  KVMILL_RETURN_IF_ERROR(Want(memory, {"list", 0, "checks", 0}, checks.data(),
                              checks.size() * sizeof(checks[0]), false));
  KVMILL_RETURN_IF_ERROR(Want(memory, {"list", 0, "changed", 0}, changed, sizeof(*changed), true));
  for (std::size_t i = 0; i < checks.size(); ++i) {
    KVMILL_RETURN_IF_ERROR(
        Want(memory, {"check", i, "word", 0}, checks[i].word, sizeof(*checks[i].word), false));
  }
  return absl::OkStatus();
}

}  // namespace kvmill
