#include "client/mapped_blocks.h"

#include <algorithm>
#include <utility>

#include "absl/base/config.h"
#include "absl/strings/str_cat.h"
#include "client/map_calls.h"
#include "client/mapped_content.h"
#include "storage/core/status_macros.h"

namespace kvmill {
namespace {

std::int64_t NowNanos() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

std::uint64_t LoadGeneration(const std::byte* word) {
  // Written by the daemon through its own mapping of the same memory.
  return __atomic_load_n(reinterpret_cast<const std::uint64_t*>(word), __ATOMIC_ACQUIRE);
}

// Even, and not that of memory that never had a page.
bool IsWhole(std::uint64_t generation) { return generation != 0 && generation % 2 == 0; }

// Between the reads of a page's bytes and the second look at its generation.
void FenceAfterReading() {
#ifndef ABSL_HAVE_THREAD_SANITIZER
  std::atomic_thread_fence(std::memory_order_acquire);
#endif
}

}  // namespace

void MapOwner::Detach() {
  MutexLock lock(mu_);
  calls_ = nullptr;
}

void MapOwner::GiveBack(const MappedBlocks::Content& content) {
  MutexLock lock(mu_);
  if (calls_ != nullptr) calls_->GiveBack(content);
}

absl::Status MappedBlocks::Content::CheckProcess() const {
  if (getpid() == pid) return absl::OkStatus();
  return absl::FailedPreconditionError(
      "these blocks were mapped before fork(): map them again in the child");
}

absl::Status MappedBlocks::Content::CheckLeases() const {
  if (session->ended.load(std::memory_order_acquire)) {
    return absl::AbortedError("the session that the leases belong to ended");
  }
  if (released.load(std::memory_order_acquire)) {
    return absl::AbortedError("the leases were given back");
  }
  if (lost.load(std::memory_order_acquire)) {
    return absl::AbortedError("a lease had ended before it was renewed");
  }
  const std::int64_t over_nanos = NowNanos() - deadline_nanos.load(std::memory_order_acquire);
  if (over_nanos >= 0) {
    return absl::AbortedError(absl::StrCat("the leases ended ", over_nanos / 1'000'000, " ms ago"));
  }
  return absl::OkStatus();
}

absl::Status MappedBlocks::Content::CheckPage(std::size_t block, const PlacedPage& page) const {
  const std::uint64_t generation = LoadGeneration(GenerationWordOf(page.where));
  std::atomic<std::uint64_t>& first = generations[page.number];
  std::uint64_t expected = first.load(std::memory_order_relaxed);
  if (expected == 0 && IsWhole(generation) &&
      first.compare_exchange_strong(expected, generation, std::memory_order_relaxed)) {
    return absl::OkStatus();
  }
  if (expected != 0 && generation == expected) return absl::OkStatus();
  KVMILL_RETURN_IF_ERROR(CheckLeases());  // When that is why, it says more.
  return absl::AbortedError(absl::StrCat(
      "block ", block, ": the memory of a page has generation ", generation,
      expected == 0 ? std::string(", of no whole page") : absl::StrCat(" after ", expected),
      ": it is another block's"));
}

absl::Status MappedBlocks::Content::ReadTables(absl::Span<const PlacedPage> wanted,
                                               std::size_t group) const {
  DeviceReader* reader = nullptr;  // There is one device.
  for (const PlacedPage& page : wanted) {
    if (ReaderOf(page.where) != nullptr) reader = ReaderOf(page.where);
  }
  if (reader == nullptr) return absl::OkStatus();
  const std::size_t table_bytes = PageHeaderBytes(ns.spec.groups[group].kv_heads);
  std::vector<DeviceReader::Piece> pieces;
  std::vector<std::pair<std::size_t, std::unique_ptr<std::byte[]>>> read;
  {
    MutexLock lock(tables_mu);
    for (const PlacedPage& page : wanted) {
      if (ReaderOf(page.where) == nullptr || tables.contains(page.number)) continue;
      if (page.where.page_bytes < table_bytes) {
        return absl::DataLossError(absl::StrCat("a page of ", page.where.page_bytes,
                                                " bytes: the daemon mapped another page"));
      }
      read.emplace_back(page.number, std::make_unique<std::byte[]>(table_bytes));
      pieces.push_back({BytesOf(page.where).data(), {read.back().second.get(), table_bytes}});
    }
  }
  if (read.empty()) return absl::OkStatus();
  KVMILL_RETURN_IF_ERROR(reader->Read(pieces));
  MutexLock lock(tables_mu);
  for (auto& [number, table] : read) tables.try_emplace(number, std::move(table));
  return absl::OkStatus();
}

absl::StatusOr<PageView> MappedBlocks::Content::ParsePage(const PlacedPage& page,
                                                          std::size_t group) const {
  const absl::Span<const std::byte> bytes = BytesOf(page.where);
  if (ReaderOf(page.where) == nullptr) return PageView::Parse(bytes);
  KVMILL_RETURN_IF_ERROR(ReadTables({&page, 1}, group));
  const std::byte* table = nullptr;
  {
    MutexLock lock(tables_mu);
    table = tables.at(page.number).get();
  }
  return PageView::ParseApart({table, PageHeaderBytes(ns.spec.groups[group].kv_heads)}, bytes);
}

MappedBlocks::MappedBlocks(std::unique_ptr<Content> content) : content_(std::move(content)) {}

MappedBlocks::~MappedBlocks() { Release(); }

void MappedBlocks::Release() {
  if (getpid() != content_->pid || content_->released.exchange(true)) return;
  content_->owner->GiveBack(*content_);
}

const ClientNamespace& MappedBlocks::name_space() const { return content_->ns; }
std::size_t MappedBlocks::block_count() const { return content_->blocks.size(); }
const absl::Status& MappedBlocks::status(std::size_t block) const {
  return content_->blocks[block].status;
}
Tier MappedBlocks::memory(std::size_t block, std::size_t group) const {
  const Content::Entry& entry = content_->entry(block, group);
  if (!entry.status.ok()) return Tier::kHost;
  return content_->ReaderOf(content_->PageOf(entry, 0).where) == nullptr ? Tier::kHost : Tier::kGpu;
}
Tier MappedBlocks::tier(std::size_t block) const { return content_->blocks[block].tier; }
std::uint32_t MappedBlocks::token_count(std::size_t block) const {
  return content_->blocks[block].token_count;
}
const absl::Status& MappedBlocks::away() const { return content_->away; }

absl::StatusOr<PageView> MappedBlocks::Page(std::size_t block, std::size_t group,
                                            std::size_t layer_index) const {
  const Content& c = *content_;
  if (block >= c.blocks.size() || group >= c.ns.spec.groups.size() ||
      layer_index >= c.ns.spec.groups[group].layers.size()) {
    return absl::InvalidArgumentError(absl::StrCat("block ", block, ", layer group ", group,
                                                   ", layer ", layer_index, ": there is none"));
  }
  const Content::Entry& entry = c.entry(block, group);
  if (!entry.status.ok()) return entry.status;
  KVMILL_RETURN_IF_ERROR(c.CheckProcess());
  const Content::PlacedPage page = c.PageOf(entry, layer_index);
  KVMILL_RETURN_IF_ERROR(c.CheckPage(block, page));
  KVMILL_RETURN_IF_ERROR(c.CheckLeases());  // After the look.
  absl::StatusOr<PageView> view = c.ParsePage(page, group);
  // Bytes that make no sense are those of another block, unless the generation is still the same.
  if (!view.ok()) {
    FenceAfterReading();
    KVMILL_RETURN_IF_ERROR(c.CheckPage(block, page));
    return view.status();
  }
  const LayerGroup& layers = c.ns.spec.groups[group];
  const PageHeader& header = view->header();
  const TileFormat format = FormatOf(c.ns.spec, layers);
  const BlockKey& key = c.keys[block];
  const bool right =
      header.fingerprint == c.ns.fingerprint && header.key_bytes == key.view().size() &&
      std::memcmp(header.key, key.view().data(), key.view().size()) == 0 &&
      header.group_index == group && header.layer == layers.layers[layer_index] &&
      header.head_count == layers.kv_heads && header.token_count == entry.token_count &&
      header.head_dim == format.head_dim && header.block_tokens == format.group &&
      header.key_bits == format.key_bits && header.value_bits == format.value_bits;
  if (!right) {
    FenceAfterReading();
    KVMILL_RETURN_IF_ERROR(c.CheckPage(block, page));
    return absl::DataLossError(absl::StrCat("block ", block, " (", key.ToHex(), "), layer ",
                                            layers.layers[layer_index],
                                            ": the daemon mapped another page"));
  }
  return view;
}

absl::Status MappedBlocks::Check() const { return Check(0, content_->blocks.size()); }

absl::Status MappedBlocks::Check(std::size_t first_block, std::size_t count) const {
  const Content& c = *content_;
  if (first_block > c.blocks.size() || count > c.blocks.size() - first_block) {
    return absl::InvalidArgumentError(
        absl::StrCat("blocks ", first_block, " to ", first_block + count, " of ", c.blocks.size()));
  }
  KVMILL_RETURN_IF_ERROR(c.CheckProcess());
  FenceAfterReading();
  const std::size_t groups = c.ns.spec.groups.size();
  for (std::size_t i = first_block * groups; i < (first_block + count) * groups; ++i) {
    const Content::Entry& entry = c.entries[i];
    if (!entry.status.ok()) continue;
    std::size_t number = entry.first_page;
    for (std::size_t r = entry.first_run; r < entry.first_run + entry.run_count; ++r) {
      for (std::uint32_t p = 0; p < c.runs[r].page_count; ++p, ++number) {
        // What nobody looked at nobody read.
        if (c.generations[number].load(std::memory_order_relaxed) == 0) continue;
        KVMILL_RETURN_IF_ERROR(c.CheckPage(i / groups, {number, c.runs[r].page(p)}));
      }
    }
  }
  return c.CheckLeases();
}

absl::Time MappedBlocks::deadline() const {
  return absl::Now() +
         absl::Nanoseconds(content_->deadline_nanos.load(std::memory_order_acquire) - NowNanos());
}

absl::Status MappedBlocks::VerifyContents() const {
  const Content& c = *content_;
  std::vector<std::byte> copy;  // Of a page on the GPU.
  for (std::size_t block = 0; block < c.blocks.size(); ++block) {
    for (std::size_t group = 0; group < c.ns.spec.groups.size(); ++group) {
      if (!c.entry(block, group).status.ok()) continue;
      for (std::size_t layer = 0; layer < c.ns.spec.groups[group].layers.size(); ++layer) {
        KVMILL_ASSIGN_OR_RETURN(PageView page, Page(block, group, layer));
        const Content::PlacedPage placed = c.PageOf(c.entry(block, group), layer);
        absl::Status whole;
        if (DeviceReader* reader = c.ReaderOf(placed.where); reader != nullptr) {
          copy.resize(placed.where.page_bytes);
          KVMILL_RETURN_IF_ERROR(
              reader->Read({{c.BytesOf(placed.where).data(), absl::MakeSpan(copy)}}));
          const absl::StatusOr<PageView> copied = PageView::Parse(copy);
          whole = copied.status();
          if (whole.ok()) page = *copied;
        }
        for (std::size_t head = 0; head < page.head_count() && whole.ok(); ++head) {
          whole = page.VerifySlot(head);
        }
        if (whole.ok()) continue;
        FenceAfterReading();
        KVMILL_RETURN_IF_ERROR(c.CheckPage(block, placed));
        return whole;
      }
    }
  }
  return Check();
}

absl::Status MappedBlocks::CheckEntries(std::size_t group, std::size_t layer_index,
                                        std::size_t first_block, std::size_t count) const {
  const Content& c = *content_;
  if (group >= c.ns.spec.groups.size() || first_block > c.blocks.size() ||
      count > c.blocks.size() - first_block ||
      layer_index >= c.ns.spec.groups[group].layers.size()) {
    return absl::InvalidArgumentError(absl::StrCat("blocks ", first_block, " to ",
                                                   first_block + count, " of layer group ", group,
                                                   ", layer ", layer_index, ": there are none"));
  }
  for (std::size_t b = first_block; b < first_block + count; ++b) {
    KVMILL_RETURN_IF_ERROR(c.entry(b, group).status);
  }
  KVMILL_RETURN_IF_ERROR(c.CheckProcess());
  return c.CheckLeases();
}

absl::Status MappedBlocks::ReadTablesTogether(std::size_t group, std::size_t layer_index,
                                              std::size_t first_block, std::size_t count) const {
  const Content& c = *content_;
  std::vector<Content::PlacedPage> pages;
  for (std::size_t b = first_block; b < first_block + count; ++b) {
    const Content::PlacedPage page = c.PageOf(c.entry(b, group), layer_index);
    if (c.ReaderOf(page.where) == nullptr) continue;
    // A table counts when it was read after the first look.
    KVMILL_RETURN_IF_ERROR(c.CheckPage(b, page));
    pages.push_back(page);
  }
  return pages.empty() ? absl::OkStatus() : c.ReadTables(pages, group);
}

absl::Status FillAttentionBlocks(const MappedBlocks& mapped, std::size_t group,
                                 std::size_t layer_index, std::size_t first_block,
                                 std::size_t count, absl::Span<AttentionBlock> table) {
  KVMILL_RETURN_IF_ERROR(mapped.CheckEntries(group, layer_index, first_block, count));
  const NamespaceSpec& spec = mapped.name_space().spec;
  const std::size_t heads = spec.groups[group].kv_heads;
  if (table.size() < count * heads) {
    return absl::InvalidArgumentError(
        absl::StrCat("table of ", table.size(), " entries, want ", count * heads));
  }
  KVMILL_RETURN_IF_ERROR(mapped.ReadTablesTogether(group, layer_index, first_block, count));
  for (std::size_t b = 0; b < count; ++b) {
    KVMILL_ASSIGN_OR_RETURN(const PageView page, mapped.Page(first_block + b, group, layer_index));
    if (page.header().token_count != spec.block_tokens) {
      return absl::InvalidArgumentError(absl::StrCat("block ", first_block + b, " is a tail of ",
                                                     page.header().token_count,
                                                     " tokens: see MappedTail"));
    }
    for (std::size_t head = 0; head < heads; ++head) {
      AttentionBlock& entry = table[b * heads + head];
      const SlotKind kind = page.slot(head).kind;
      entry.kind = kind == SlotKind::kTile  ? BlockKind::kTile
                   : kind == SlotKind::kRaw ? BlockKind::kRaw
                                            : BlockKind::kAbsent;
      entry.data = kind == SlotKind::kAbsent ? nullptr : page.contents(head).data();
    }
  }
  return absl::OkStatus();
}

absl::Status FillGenerationChecks(const MappedBlocks& mapped, std::size_t group,
                                  std::size_t layer_index, std::size_t first_block,
                                  std::size_t count, absl::Span<GenerationCheck> checks) {
  KVMILL_RETURN_IF_ERROR(mapped.CheckEntries(group, layer_index, first_block, count));
  if (checks.size() < count) {
    return absl::InvalidArgumentError(
        absl::StrCat("list of ", checks.size(), " checks, want ", count));
  }
  const MappedBlocks::Content& content = *mapped.content_;
  for (std::size_t b = 0; b < count; ++b) {
    const MappedBlocks::Content::PlacedPage page =
        content.PageOf(content.entry(first_block + b, group), layer_index);
    if (content.ReaderOf(page.where) == nullptr) {
      return absl::FailedPreconditionError(absl::StrCat(
          "block ", first_block + b, " is in host memory, where a device cannot check it"));
    }
    // The first look, if the page's table was not made before.
    KVMILL_RETURN_IF_ERROR(content.CheckPage(first_block + b, page));
    checks[b].word = reinterpret_cast<const std::uint64_t*>(content.GenerationWordOf(page.where));
    checks[b].expected = content.generations[page.number].load(std::memory_order_relaxed);
  }
  return content.CheckLeases();  // After the looks.
}

absl::Status FillTailHeads(const MappedBlocks& mapped, std::size_t group, std::size_t layer_index,
                           std::size_t block, absl::Span<const std::byte*> rows,
                           absl::Span<TailHead> heads) {
  KVMILL_ASSIGN_OR_RETURN(const PageView page, mapped.Page(block, group, layer_index));
  if (heads.size() < page.head_count() || rows.size() < 2 * page.head_count()) {
    return absl::InvalidArgumentError(absl::StrCat("a tail of ", heads.size(), " heads and ",
                                                   rows.size(), " rows, want ", page.head_count(),
                                                   " and ", 2 * page.head_count()));
  }
  const NamespaceSpec& spec = mapped.name_space().spec;
  const std::uint32_t tokens = page.header().token_count;
  const std::size_t row_bytes = std::size_t{2} * page.header().head_dim;
  for (std::size_t head = 0; head < page.head_count(); ++head) {
    if (page.slot(head).kind != SlotKind::kRaw) {
      return absl::InvalidArgumentError(
          absl::StrCat("block ", block, ", head ", head, " is not in 16 bits: no tail"));
    }
    const std::byte* const k = page.contents(head).data();
    rows[2 * head] = k;
    rows[2 * head + 1] = k + tokens * row_bytes;
    HeadPages pages;
    pages.page_tokens = tokens;
    pages.token_stride_bytes = static_cast<std::ptrdiff_t>(row_bytes);
    pages.dtype = spec.source_dtype;
    pages.pages = &rows[2 * head];
    heads[head].k = pages;
    pages.pages = &rows[2 * head + 1];
    heads[head].v = pages;
  }
  return absl::OkStatus();
}

absl::StatusOr<MappedTail> MappedTail::Create(const MappedBlocks& mapped, std::size_t group,
                                              std::size_t layer_index, std::size_t block) {
  KVMILL_ASSIGN_OR_RETURN(const PageView page, mapped.Page(block, group, layer_index));
  MappedTail tail;
  tail.token_count_ = page.header().token_count;
  tail.rows_.resize(2 * page.head_count());
  tail.heads_.resize(page.head_count());
  KVMILL_RETURN_IF_ERROR(FillTailHeads(mapped, group, layer_index, block,
                                       absl::MakeSpan(tail.rows_), absl::MakeSpan(tail.heads_)));
  return tail;
}

}  // namespace kvmill
