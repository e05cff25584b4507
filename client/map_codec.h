// The answer to Cache.Map, written by the service and read by the client: pages as runs.
//
// Internal to client/ and service/. The reader takes any bytes: what it gives lies within the
// arenas that it names.
#ifndef KVMILL_CLIENT_MAP_CODEC_H_
#define KVMILL_CLIENT_MAP_CODEC_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kvmill/v1/cache.pb.h"
#include "storage/core/namespace.h"
#include "storage/core/tier.h"

namespace kvmill {

struct ArenaId {
  Tier tier = Tier::kHost;
  std::uint32_t arena = 0;
  std::uint64_t epoch = 0;

  friend auto operator<=>(const ArenaId&, const ArenaId&) = default;
};

// One page as the wire names it.
struct PagePosition {
  std::uint32_t arena_index = 0;  // Into the arenas of the reply.
  std::uint32_t page_bytes = 0;
  std::uint64_t offset_bytes = 0;
  std::uint64_t generation = 0;
  std::uint64_t generation_offset_bytes = 0;

  friend bool operator==(const PagePosition&, const PagePosition&) = default;
};

class MapReplyWriter {
 public:
  explicit MapReplyWriter(v1::MapReply* reply) : reply_(reply) {}

  // Number of an arena in the reply, for the pages that follow.
  // `generation_bytes`: of the memory of its own that has the generations of a GPU's arena, else 0.
  std::uint32_t AddArena(const ArenaId& arena, std::uint64_t arena_bytes,
                         std::uint64_t generation_bytes = 0);
  // The next (block, layer group), which is mapped.
  void AddBlock(Tier found_in, std::uint32_t token_count, absl::Span<const PagePosition> pages);
  // ... or not.
  void AddFailure(std::uint32_t index, const absl::Status& status);

 private:
  v1::MapReply* const reply_;
  std::vector<ArenaId> arenas_;
};

struct MappedArenaInfo {
  ArenaId id;
  std::uint64_t arena_bytes = 0;
  std::uint64_t generation_bytes = 0;  // 0: generations are in the arena.
};

// One (block, layer group) of a reply.
struct MapReplyBlock {
  absl::Status status;
  Tier tier = Tier::kHost;
  std::uint32_t token_count = 0;
  std::uint64_t lease = 0;
  std::size_t first_page = 0;  // Into MapReplyContent::pages; one page a layer of the group.
};

struct MapReplyContent {
  std::vector<MappedArenaInfo> arenas;
  std::vector<MapReplyBlock> blocks;
  std::vector<PagePosition> pages;
};

// INTERNAL naming what is wrong with a reply that is not one to a request for `block_count` blocks
// of this namespace.
absl::StatusOr<MapReplyContent> ReadMapReply(const v1::MapReply& reply, const NamespaceSpec& spec,
                                             std::size_t block_count);

}  // namespace kvmill

#endif  // KVMILL_CLIENT_MAP_CODEC_H_
