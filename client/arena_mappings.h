// The daemon's memory in this process: read-only mappings of arenas, one for each arena and epoch;
// of arenas of a GPU, imports into a device.
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
#include "client/transport/imported_arena.h"
#include "storage/core/mutex.h"

namespace kvmill {

// Unmapped with its owner. A forked child does not have it.
class ArenaMapping {
 public:
  // FAILED_PRECONDITION when the memory is not of that size, or could be changed in size: then a
  // read could end the process. `memory` may be closed afterwards.
  static absl::StatusOr<std::shared_ptr<const ArenaMapping>> Create(
      const DoorClient::ArenaMemory& memory, const MappedArenaInfo& arena);
  // The same of an arena on the GPU, for the device of `reader`. FAILED_PRECONDITION also when the
  // device cannot have it.
  static absl::StatusOr<std::shared_ptr<const ArenaMapping>> CreateOnDevice(
      const DoorClient::ArenaMemory& memory, const MappedArenaInfo& arena,
      std::shared_ptr<DeviceReader> reader);
  ~ArenaMapping();
  ArenaMapping(const ArenaMapping&) = delete;
  ArenaMapping& operator=(const ArenaMapping&) = delete;

  // Where pages lie: memory of this process, or of the device.
  const std::byte* data() const { return data_; }
  // What generations lie in: always memory of this process.
  const std::byte* generations() const { return mapped_; }
  // What reads data() on a device; null: the CPU does.
  DeviceReader* reader() const { return reader_.get(); }

 private:
  ArenaMapping(const std::byte* mapped, std::uint64_t bytes);
  const std::byte* const mapped_;
  const std::byte* data_ = mapped_;
  const std::uint64_t bytes_;
  const int pid_;
  // Of an arena on the GPU; set by CreateOnDevice only. The reader is that of all such mappings.
  std::shared_ptr<DeviceReader> reader_;
  std::unique_ptr<ImportedArena> imported_;
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
