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

// Where a page lies.
struct PagePosition {
  std::uint32_t arena_index = 0;  // Into the arenas of the reply.
  std::uint32_t page_bytes = 0;
  std::uint64_t offset_bytes = 0;
  std::uint64_t generation_offset_bytes = 0;

  friend bool operator==(const PagePosition&, const PagePosition&) = default;
};

// Pages at equal distances, as the wire names them; their generations follow one another.
struct MappedRun {
  std::uint32_t arena_index = 0;  // Into the arenas of the reply.
  std::uint32_t page_count = 0;
  std::uint32_t page_bytes = 0;
  std::uint32_t stride_bytes = 0;  // 0 of a single page.
  std::uint64_t offset_bytes = 0;
  std::uint64_t generation_offset_bytes = 0;

  PagePosition page(std::uint32_t i) const {
    return {arena_index, page_bytes, offset_bytes + std::uint64_t{i} * stride_bytes,
            generation_offset_bytes + std::uint64_t{i} * sizeof(std::uint64_t)};
  }
  friend bool operator==(const MappedRun&, const MappedRun&) = default;
};

class MapReplyWriter {
 public:
  explicit MapReplyWriter(v1::MapReply* reply) : reply_(reply) {}

  // Number of an arena in the reply, for the pages that follow.
  // `generation_bytes`: of the memory of its own that has the generations of a GPU's arena, else 0.
  std::uint32_t AddArena(const ArenaId& arena, std::uint64_t arena_bytes,
                         std::uint64_t generation_bytes = 0);
  // The next (block, layer group), which is mapped.
  void AddBlock(Tier found_in, std::uint32_t token_count, absl::Span<const MappedRun> runs);
  // Of the block's pages, for a caller that does not load them (MapRequest.loads_generations).
  void AddGenerations(absl::Span<const std::uint64_t> generations);
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
  // Its pages, one a layer of the group, are those of these runs; first_page is the number of the
  // first among all pages of the reply.
  std::size_t first_run = 0;
  std::size_t run_count = 0;
  std::size_t first_page = 0;
};

struct MapReplyContent {
  std::vector<MappedArenaInfo> arenas;
  std::vector<MapReplyBlock> blocks;
  std::vector<MappedRun> runs;
  std::size_t page_count = 0;
};

// INTERNAL naming what is wrong with a reply that is not one to a request for `block_count` blocks
// of this namespace.
absl::StatusOr<MapReplyContent> ReadMapReply(const v1::MapReply& reply, const NamespaceSpec& spec,
                                             std::size_t block_count);

}  // namespace kvmill

#endif  // KVMILL_CLIENT_MAP_CODEC_H_
