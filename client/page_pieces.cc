#include "client/page_pieces.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "storage/core/page_layout.h"

namespace kvmill {
namespace {

// What one chunk makes the daemon read: its encoders' unit of work.
constexpr std::size_t kPieceBytes = std::size_t{512} << 10;

}  // namespace

absl::Status CheckPageBlocks(const NamespaceSpec& spec, const EngineGeometry& geometry,
                             absl::Span<const PageBlock> blocks) {
  if (blocks.size() * spec.groups.size() > kPageStoreBlocksMax) {
    return absl::InvalidArgumentError(absl::StrCat(blocks.size(), " blocks of ", spec.groups.size(),
                                                   " layer groups in one store of pages: at most ",
                                                   kPageStoreBlocksMax));
  }
  std::vector<std::uint32_t> page_tokens(spec.groups.size(), 0);
  for (const EngineLayers& entry : geometry.layers) {
    std::uint32_t& tokens = page_tokens[entry.group];
    if (tokens != 0 && tokens != entry.page_tokens) {
      return absl::InvalidArgumentError(
          absl::StrCat("layer group ", entry.group, " is registered with pages of ", tokens,
                       " and of ", entry.page_tokens, " tokens: a store of pages wants one size"));
    }
    tokens = entry.page_tokens;
  }
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    const PageBlock& block = blocks[i];
    if (block.token_count == 0 || block.token_count > spec.block_tokens) {
      return absl::InvalidArgumentError(absl::StrCat(
          "block ", i, ": token_count ", block.token_count, ", want 1 to ", spec.block_tokens));
    }
    if (block.key.empty()) {
      return absl::InvalidArgumentError(
          absl::StrCat("block ", i, ": no key, want 1 to ", kBlockKeyBytesMax,
                       " bytes that stand for its tokens and all before them",
                       block.token_count < spec.block_tokens ? "; a tail needs one as well" : ""));
    }
    if (block.pages.size() != spec.groups.size()) {
      return absl::InvalidArgumentError(absl::StrCat("block ", i, ": ", block.pages.size(),
                                                     " lists of pages, the namespace has ",
                                                     spec.groups.size(), " layer groups"));
    }
    for (std::size_t group = 0; group < spec.groups.size(); ++group) {
      const std::size_t want =
          page_tokens[group] == 0
              ? 0
              : (block.token_count + page_tokens[group] - 1) / page_tokens[group];
      if (block.pages[group].size() != want) {
        return absl::InvalidArgumentError(
            absl::StrCat("block ", i, ", layer group ", group, ": ", block.pages[group].size(),
                         " pages, want ", want, " for ", block.token_count, " tokens"));
      }
    }
  }
  return absl::OkStatus();
}

PagePieces::PagePieces(const NamespaceSpec& spec, const EngineGeometry& geometry,
                       absl::Span<const PageBlock> blocks)
    : spec_(spec), geometry_(geometry) {
  std::vector<std::uint64_t> heads(spec.groups.size(), 0);
  for (const EngineLayers& entry : geometry.layers) {
    heads[entry.group] += std::uint64_t{entry.head_count} * entry.keys.size();
    const std::size_t last = entry.layer_begin + entry.keys.size() - 1;
    layers_end_ = std::max(layers_end_, std::uint32_t{spec.groups[entry.group].layers[last]} + 1);
  }
  blocks_.reserve(blocks.size());
  parts_.reserve(blocks.size() * spec.groups.size());
  for (const PageBlock& block : blocks) {
    blocks_.push_back({StoredKey(spec.block_tokens, block.parent, block.token_count, block.key),
                       block.key, block.parent, block.token_count, block.block_index});
    for (std::size_t group = 0; group < spec.groups.size(); ++group) {
      Part& part = parts_.emplace_back();
      part.pages_begin = pages_.size();
      part.pages_count = block.pages[group].size();
      part.left = heads[group];
      part.open = part.left > 0;
      open_parts_ += part.open ? 1 : 0;
      pages_.insert(pages_.end(), block.pages[group].begin(), block.pages[group].end());
    }
  }
  block_ = blocks_.size();  // No pass yet.
}

void PagePieces::FillHead(std::uint32_t block, std::uint32_t group, v1::StoreChunk* chunk) const {
  const Block& b = blocks_[block];
  const Part& part = PartOf(block, group);
  chunk->Clear();
  chunk->set_sequence(block);
  chunk->set_group(group);
  chunk->set_key(std::string(b.key.view()));
  chunk->set_parent(std::string(b.parent.view()));
  chunk->set_token_count(b.token_count);
  chunk->set_block_index(b.block_index);
  const auto first = pages_.begin() + static_cast<std::ptrdiff_t>(part.pages_begin);
  chunk->mutable_pages()->mutable_numbers()->Add(
      first, first + static_cast<std::ptrdiff_t>(part.pages_count));
}

void PagePieces::NextEntry() {
  layer_ = head_ = 0;
  if (++entry_ < geometry_.layers.size()) return;
  entry_ = 0;
  ++block_;
}

bool PagePieces::Next(v1::StoreChunk* chunk) {
  if (!ends_.empty()) {
    const auto [block, group] = ends_.front();
    ends_.pop_front();
    FillHead(block, group, chunk);
    chunk->set_last(true);
    return true;
  }
  for (;;) {
    if (block_ == blocks_.size()) {
      pass_begin_ = pass_end_;
      pass_end_ = std::min(ready_layers_, layers_end_);
      if (pass_begin_ == pass_end_ || open_parts_ == 0) return false;
      block_ = entry_ = 0;
      layer_ = head_ = 0;
    }
    const EngineLayers& entry = geometry_.layers[entry_];
    const LayerGroup& group = spec_.groups[entry.group];
    Part& part = PartOf(block_, entry.group);
    const auto layers = static_cast<std::uint32_t>(entry.keys.size());
    const auto number = [&](std::uint32_t layer) {
      return std::uint32_t{group.layers[entry.layer_begin + layer]};
    };
    if (!part.open || layer_ == layers || number(layer_) >= pass_end_) {
      NextEntry();
      continue;
    }
    if (number(layer_) < pass_begin_) {
      ++layer_;
      continue;
    }
    const auto block = static_cast<std::uint32_t>(block_);
    const bool records = entry.element == EngineElement::kRecords;
    const TileFormat format = FormatOf(spec_, group);
    const std::size_t head_bytes =
        records ? RecordBytes(format) : RawBytes(format, blocks_[block_].token_count);
    const auto heads_max =
        static_cast<std::uint32_t>(std::max<std::size_t>(1, kPieceBytes / head_bytes));
    const std::uint32_t heads = std::min(entry.head_count - head_, heads_max);
    std::uint32_t count = 1;
    if (heads == entry.head_count) {  // Whole layers.
      const std::size_t layers_max = std::max<std::size_t>(1, kPieceBytes / (head_bytes * heads));
      while (count < layers_max && layer_ + count < layers && number(layer_ + count) < pass_end_) {
        ++count;
      }
    }
    FillHead(block, entry.group, chunk);
    chunk->set_layer_begin(entry.layer_begin + layer_);
    chunk->set_layer_count(count);
    chunk->set_head_begin(entry.head_begin + head_);
    chunk->set_head_count(heads);
    chunk->set_kind(records ? v1::CHUNK_RECORDS : v1::CHUNK_PAGES16);
    head_ += heads;
    if (head_ == entry.head_count) {
      head_ = 0;
      layer_ += count;
    }
    part.left -= std::uint64_t{count} * heads;
    part.sent = sent_anything_ = true;
    if (part.left == 0) {
      chunk->set_last(true);
      part.open = false;
      --open_parts_;
    }
    return true;
  }
}

void PagePieces::StopSending(std::uint32_t block, std::uint32_t group) {
  Part& part = PartOf(block, group);
  if (!part.open) return;
  part.open = false;
  --open_parts_;
  // The daemon waits to hear that no more comes.
  if (part.sent) ends_.emplace_back(block, group);
}

void PagePieces::Closed(std::uint32_t block, std::uint32_t group) {
  if (block >= blocks_.size() || group >= spec_.groups.size()) return;
  PartOf(block, group).result = true;
  StopSending(block, group);
}

bool PagePieces::GiveUp(std::uint32_t block, std::uint32_t group) {
  const Part& part = PartOf(block, group);
  const bool was_open = part.open;
  StopSending(block, group);
  return was_open && !part.sent;
}

bool PagePieces::AtRest(std::size_t block) const {
  for (std::size_t group = 0; group < spec_.groups.size(); ++group) {
    const Part& part = PartOf(block, group);
    if (part.open || (part.sent && !part.result)) return false;
  }
  return true;
}

}  // namespace kvmill
