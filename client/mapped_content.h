// What a MappedBlocks holds. Internal to client/.
#ifndef KVMILL_CLIENT_MAPPED_CONTENT_H_
#define KVMILL_CLIENT_MAPPED_CONTENT_H_

#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "client/arena_mappings.h"
#include "client/client_session.h"
#include "client/map_codec.h"
#include "client/mapped_blocks.h"
#include "storage/core/mutex.h"

namespace kvmill {

class MapCalls;

// How a MappedBlocks finds the client that made it, as long as there is one. Thread-safe.
class MapOwner {
 public:
  explicit MapOwner(MapCalls* calls) : calls_(calls) {}
  // The client goes.
  void Detach();
  void GiveBack(const MappedBlocks::Content& content);

 private:
  Mutex mu_;
  MapCalls* calls_ ABSL_GUARDED_BY(mu_);
};

struct MappedBlocks::Content {
  struct Entry {  // One (block, layer group).
    absl::Status status;
    Tier tier = Tier::kHost;
    std::uint32_t token_count = 0;
    std::uint64_t lease = 0;
    std::size_t first_run = 0;  // As MapReplyBlock has them.
    std::size_t run_count = 0;
    std::size_t first_page = 0;
  };
  struct PlacedPage {
    std::size_t number = 0;  // Among all pages.
    PagePosition where;
  };
  struct Block {
    absl::Status status;
    Tier tier = Tier::kGpu;  // The fastest; each of its groups may make it slower.
    std::uint32_t token_count = 0;
  };

  const Entry& entry(std::size_t block, std::size_t group) const {
    return entries[block * ns.spec.groups.size() + group];
  }
  // Of an entry that is there.
  PlacedPage PageOf(const Entry& entry, std::size_t layer_index) const {
    std::size_t run = entry.first_run;
    std::size_t i = layer_index;
    while (i >= runs[run].page_count) i -= runs[run++].page_count;
    return {entry.first_page + layer_index, runs[run].page(static_cast<std::uint32_t>(i))};
  }
  absl::Span<const std::byte> BytesOf(const PagePosition& page) const {
    return {mappings[page.arena_index]->data() + page.offset_bytes, page.page_bytes};
  }
  const std::byte* GenerationWordOf(const PagePosition& page) const {
    return mappings[page.arena_index]->generations() + page.generation_offset_bytes;
  }
  // Null: the CPU can read the page.
  DeviceReader* ReaderOf(const PagePosition& page) const {
    return mappings[page.arena_index]->reader();
  }
  // Brings the tables (header and slots) of these pages of one layer group here, where the CPU
  // cannot read them in place. An error is the device's.
  absl::Status ReadTables(absl::Span<const PlacedPage> pages, std::size_t group) const;
  absl::StatusOr<PageView> ParsePage(const PlacedPage& page, std::size_t group) const;
  // The memory is here: before anything in it is touched.
  absl::Status CheckProcess() const;
  // OK while what was read so far may be right: everything but the generations.
  absl::Status CheckLeases() const;
  // Whether the page's memory has been one content since it was first looked at, which this call
  // does if nobody did. The first look counts when CheckLeases says OK after it.
  absl::Status CheckPage(std::size_t block, const PlacedPage& page) const;

  pid_t pid = getpid();
  ClientNamespace ns;
  std::vector<BlockKey> keys;
  std::vector<Block> blocks;
  std::vector<Entry> entries;
  std::vector<MappedRun> runs;
  // By page: its generation when it was first looked at; 0: nobody has. Set once. (Decision 0020.)
  std::unique_ptr<std::atomic<std::uint64_t>[]> generations;
  // By PagePosition::arena_index. Null: it could not be had, and no block lies there.
  std::vector<ArenaMappingPtr> mappings;
  SessionPtr session;
  std::shared_ptr<MapOwner> owner;
  absl::Status away;  // Not OK: no daemon was asked, and nothing is leased.
  // steady_clock; a renewal moves it. A stale value is an earlier end.
  std::atomic<std::int64_t> deadline_nanos{0};
  std::atomic<bool> lost{false};      // The daemon said that a lease had ended. Never cleared.
  std::atomic<bool> released{false};  // The leases were given back. Never cleared.
  // By page: tables that ReadTables brought, unchanged from then on.
  mutable Mutex tables_mu;
  mutable absl::flat_hash_map<std::size_t, std::unique_ptr<std::byte[]>> tables
      ABSL_GUARDED_BY(tables_mu);
};

}  // namespace kvmill

#endif  // KVMILL_CLIENT_MAPPED_CONTENT_H_
