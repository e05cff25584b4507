// The daemon's memory in this process: read-only mappings of arenas, one for each arena and epoch.
//
// Internal to client/. Thread-safe.
#ifndef KVMILL_CLIENT_ARENA_MAPPINGS_H_
#define KVMILL_CLIENT_ARENA_MAPPINGS_H_

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>

#include "absl/status/statusor.h"
#include "client/door_client.h"
#include "client/map_codec.h"
#include "storage/core/mutex.h"

namespace kvmill {

// Unmapped with its owner. A forked child does not have it.
class ArenaMapping {
 public:
  // FAILED_PRECONDITION when the memory is not of that size, or could be changed in size: then a
  // read could end the process. `memory` may be closed afterwards.
  static absl::StatusOr<std::shared_ptr<const ArenaMapping>> Create(
      const DoorClient::ArenaMemory& memory, std::uint64_t arena_bytes);
  ~ArenaMapping();
  ArenaMapping(const ArenaMapping&) = delete;
  ArenaMapping& operator=(const ArenaMapping&) = delete;

  const std::byte* data() const { return data_; }
  std::uint64_t bytes() const { return bytes_; }

 private:
  ArenaMapping(const std::byte* data, std::uint64_t bytes);
  const std::byte* const data_;
  const std::uint64_t bytes_;
  const int pid_;
};
using ArenaMappingPtr = std::shared_ptr<const ArenaMapping>;  // Every MappedBlocks uses several.

// Keeps mappings that nobody uses for a while: the next Map wants them again.
class ArenaMappings {
 public:
  static constexpr std::chrono::seconds kIdleMax{30};

  // Null when it is not there.
  ArenaMappingPtr Find(const ArenaId& id);
  // The one that was there, if another thread was faster.
  ArenaMappingPtr Add(const ArenaId& id, ArenaMappingPtr mapping);
  // Drops those that nobody used for kIdleMax; the number that is left.
  std::size_t DropIdle(std::chrono::steady_clock::time_point now);
  // The daemon is another one: nothing of this is asked for again. Those in use stay with their
  // users.
  void Clear();

 private:
  struct Entry {
    ArenaMappingPtr mapping;
    std::chrono::steady_clock::time_point used_at;
  };
  Mutex mu_;
  std::map<ArenaId, Entry> entries_ ABSL_GUARDED_BY(mu_);
};

}  // namespace kvmill

#endif  // KVMILL_CLIENT_ARENA_MAPPINGS_H_
