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

absl::Status MappedBlocks::Content::CheckLeases() const {
  if (getpid() != pid) {
    return absl::FailedPreconditionError(
        "these blocks were mapped before fork(): map them again in the child");
  }
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

absl::Status MappedBlocks::Content::CheckPage(std::size_t block, std::size_t page) const {
  const PagePosition& p = pages[page];
  const std::uint64_t generation =
      LoadGeneration(mappings[p.arena_index]->data() + p.generation_offset_bytes);
  if (generation == p.generation) return absl::OkStatus();
  return absl::AbortedError(absl::StrCat("block ", block, ": the memory of a page has generation ",
                                         generation, ", the lease was on ", p.generation,
                                         ": it is another block's"));
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
Tier MappedBlocks::tier(std::size_t block) const { return content_->blocks[block].tier; }
std::uint32_t MappedBlocks::token_count(std::size_t block) const {
  return content_->blocks[block].token_count;
}

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
  KVMILL_RETURN_IF_ERROR(c.CheckLeases());
  const std::size_t page = entry.first_page + layer_index;
  KVMILL_RETURN_IF_ERROR(c.CheckPage(block, page));
  absl::StatusOr<PageView> view = PageView::Parse(c.BytesOf(c.pages[page]));
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

absl::StatusOr<absl::Span<const std::byte>> MappedBlocks::PageBytes(std::size_t block,
                                                                    std::size_t group,
                                                                    std::size_t layer_index) const {
  KVMILL_RETURN_IF_ERROR(Page(block, group, layer_index).status());
  return content_->BytesOf(content_->pages[content_->entry(block, group).first_page + layer_index]);
}

absl::Status MappedBlocks::Check() const { return Check(0, content_->blocks.size()); }

absl::Status MappedBlocks::Check(std::size_t first_block, std::size_t count) const {
  const Content& c = *content_;
  if (first_block > c.blocks.size() || count > c.blocks.size() - first_block) {
    return absl::InvalidArgumentError(
        absl::StrCat("blocks ", first_block, " to ", first_block + count, " of ", c.blocks.size()));
  }
  if (getpid() != c.pid) return c.CheckLeases();
  FenceAfterReading();
  const std::size_t groups = c.ns.spec.groups.size();
  for (std::size_t i = first_block * groups; i < (first_block + count) * groups; ++i) {
    const Content::Entry& entry = c.entries[i];
    if (!entry.status.ok()) continue;
    const std::size_t end = entry.first_page + c.ns.spec.groups[i % groups].layers.size();
    for (std::size_t page = entry.first_page; page < end; ++page) {
      KVMILL_RETURN_IF_ERROR(c.CheckPage(i / groups, page));
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
  for (std::size_t block = 0; block < c.blocks.size(); ++block) {
    for (std::size_t group = 0; group < c.ns.spec.groups.size(); ++group) {
      if (!c.entry(block, group).status.ok()) continue;
      for (std::size_t layer = 0; layer < c.ns.spec.groups[group].layers.size(); ++layer) {
        KVMILL_ASSIGN_OR_RETURN(const PageView page, Page(block, group, layer));
        for (std::size_t head = 0; head < page.head_count(); ++head) {
          const absl::Status whole = page.VerifySlot(head);
          if (whole.ok()) continue;
          FenceAfterReading();
          KVMILL_RETURN_IF_ERROR(c.CheckPage(block, c.entry(block, group).first_page + layer));
          return whole;
        }
      }
    }
  }
  return Check();
}

absl::Status FillAttentionBlocks(const MappedBlocks& mapped, std::size_t group,
                                 std::size_t layer_index, std::size_t first_block,
                                 std::size_t count, absl::Span<AttentionBlock> table) {
  const NamespaceSpec& spec = mapped.name_space().spec;
  if (group >= spec.groups.size() || first_block > mapped.block_count() ||
      count > mapped.block_count() - first_block) {
    return absl::InvalidArgumentError(absl::StrCat("blocks ", first_block, " to ",
                                                   first_block + count, " of layer group ", group,
                                                   ": there are none"));
  }
  const std::size_t heads = spec.groups[group].kv_heads;
  if (table.size() < count * heads) {
    return absl::InvalidArgumentError(
        absl::StrCat("table of ", table.size(), " entries, want ", count * heads));
  }
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

absl::StatusOr<MappedTail> MappedTail::Create(const MappedBlocks& mapped, std::size_t group,
                                              std::size_t layer_index, std::size_t block) {
  KVMILL_ASSIGN_OR_RETURN(const PageView page, mapped.Page(block, group, layer_index));
  const NamespaceSpec& spec = mapped.name_space().spec;
  const std::uint32_t tokens = page.header().token_count;
  const std::size_t row_bytes = std::size_t{2} * page.header().head_dim;
  MappedTail tail;
  tail.token_count_ = tokens;
  tail.rows_.resize(2 * page.head_count());
  tail.heads_.resize(page.head_count());
  for (std::size_t head = 0; head < page.head_count(); ++head) {
    if (page.slot(head).kind != SlotKind::kRaw) {
      return absl::InvalidArgumentError(
          absl::StrCat("block ", block, ", head ", head, " is not in 16 bits: no tail"));
    }
    const std::byte* const k = page.contents(head).data();
    tail.rows_[2 * head] = k;
    tail.rows_[2 * head + 1] = k + tokens * row_bytes;
    HeadPages pages;
    pages.page_tokens = tokens;
    pages.token_stride_bytes = static_cast<std::ptrdiff_t>(row_bytes);
    pages.dtype = spec.source_dtype;
    pages.pages = &tail.rows_[2 * head];
    tail.heads_[head].k = pages;
    pages.pages = &tail.rows_[2 * head + 1];
    tail.heads_[head].v = pages;
  }
  return tail;
}

}  // namespace kvmill
