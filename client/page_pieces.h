// In which order a store of pages sends its blocks: layer by layer as they become ready, and what
// is left of each block. Internal to client/.
#ifndef KVMILL_CLIENT_PAGE_PIECES_H_
#define KVMILL_CLIENT_PAGE_PIECES_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "client/engine_geometry.h"
#include "client/page_store.h"
#include "kvmill/v1/cache.pb.h"
#include "storage/core/namespace.h"

namespace kvmill {

// INVALID_ARGUMENT for blocks that cannot be of this namespace and memory; page numbers are checked
// by the daemon.
absl::Status CheckPageBlocks(const NamespaceSpec& spec, const EngineGeometry& geometry,
                             absl::Span<const PageBlock> blocks);

// Not thread-safe. A part is a (block, layer group).
class PagePieces {
 public:
  // Blocks passed the check; both references outlive it.
  PagePieces(const NamespaceSpec& spec, const EngineGeometry& geometry,
             absl::Span<const PageBlock> blocks);

  std::size_t block_count() const { return blocks_.size(); }
  const BlockKey& key(std::size_t block) const { return blocks_[block].name; }

  // Values of layers below `layers` are there; never fewer than before.
  void Ready(std::uint32_t layers) { ready_layers_ = std::max(ready_layers_, layers); }
  bool all_ready() const { return ready_layers_ >= layers_end_; }

  // The next chunk of what is ready, or the news that no more comes of a part. False: nothing now.
  bool Next(v1::StoreChunk* chunk);
  // Next() will say no more, whatever becomes ready.
  bool finished() const { return open_parts_ == 0 && ends_.empty(); }

  // The daemon gave the part's result: nothing of it is read any more.
  void Closed(std::uint32_t block, std::uint32_t group);
  // More of the part would be sent.
  bool open(std::uint32_t block, std::uint32_t group) const { return PartOf(block, group).open; }
  // No more of the part is sent. True when nothing of it ever was: no result will come.
  bool GiveUp(std::uint32_t block, std::uint32_t group);
  // Nobody reads the block's pages, as long as nothing more is sent of it.
  bool AtRest(std::size_t block) const;
  bool sent_anything() const { return sent_anything_; }

 private:
  struct Block {
    BlockKey name;  // What it is stored under: of a tail TailKey, else the key.
    BlockKey key;
    BlockKey parent;
    std::uint32_t token_count = 0;
    std::uint32_t block_index = 0;
  };
  struct Part {
    std::size_t pages_begin = 0;  // In pages_.
    std::size_t pages_count = 0;
    std::uint64_t left = 0;  // (layer, head) pairs that were not sent.
    bool sent = false;       // Something of it was.
    bool open = false;       // More of it will be sent.
    bool result = false;     // The daemon has none of it in its hands.
  };
  Part& PartOf(std::size_t block, std::size_t group) {
    return parts_[block * spec_.groups.size() + group];
  }
  const Part& PartOf(std::size_t block, std::size_t group) const {
    return parts_[block * spec_.groups.size() + group];
  }
  void StopSending(std::uint32_t block, std::uint32_t group);
  void FillHead(std::uint32_t block, std::uint32_t group, v1::StoreChunk* chunk) const;
  void NextEntry();

  const NamespaceSpec& spec_;
  const EngineGeometry& geometry_;
  std::vector<Block> blocks_;
  std::vector<std::uint64_t> pages_;
  std::vector<Part> parts_;
  std::size_t open_parts_ = 0;
  std::deque<std::pair<std::uint32_t, std::uint32_t>> ends_;  // Parts whose end is to be told.
  bool sent_anything_ = false;
  std::uint32_t layers_end_ = 0;
  std::uint32_t ready_layers_ = 0;
  // A pass goes over all blocks with layers [pass_begin_, pass_end_) of the model.
  std::uint32_t pass_begin_ = 0;
  std::uint32_t pass_end_ = 0;
  std::size_t block_ = 0;
  std::size_t entry_ = 0;    // Of geometry_.layers.
  std::uint32_t layer_ = 0;  // Within the entry.
  std::uint32_t head_ = 0;   // Within the entry.
};

}  // namespace kvmill

#endif  // KVMILL_CLIENT_PAGE_PIECES_H_
