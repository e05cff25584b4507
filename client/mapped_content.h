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
    std::size_t first_page = 0;
  };
  struct Block {
    absl::Status status;
    Tier tier = Tier::kGpu;  // The fastest; each of its groups may make it slower.
    std::uint32_t token_count = 0;
  };

  const Entry& entry(std::size_t block, std::size_t group) const {
    return entries[block * ns.spec.groups.size() + group];
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
  absl::Status ReadTables(absl::Span<const std::size_t> page_numbers, std::size_t group) const;
  absl::StatusOr<PageView> ParsePage(std::size_t page_number, std::size_t group) const;
  // OK while what was read so far may be right: everything but the generations.
  absl::Status CheckLeases() const;
  absl::Status CheckPage(std::size_t block, std::size_t page) const;

  pid_t pid = getpid();
  ClientNamespace ns;
  std::vector<BlockKey> keys;
  std::vector<Block> blocks;
  std::vector<Entry> entries;
  std::vector<PagePosition> pages;
  // By PagePosition::arena_index. Null: it could not be had, and no block lies there.
  std::vector<ArenaMappingPtr> mappings;
  SessionPtr session;
  std::shared_ptr<MapOwner> owner;
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
