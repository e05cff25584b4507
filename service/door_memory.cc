#include "service/door_memory.h"

#include <fcntl.h>

#include <cerrno>
#include <memory>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "service/device_regions.h"
#include "service/engine_memory.h"
#include "storage/core/status_macros.h"

namespace kvmill {

absl::StatusOr<DoorClient::ArenaMemory> DoorMemory::ArenaFor(DoorClientId client,
                                                             const DoorArenaRequest& request) {
  // A lease in the arena is what says that it belongs to the client's tenant, and keeps it there.
  absl::StatusOr<DoorClient::ArenaMemory> memory = absl::AbortedError(
      absl::StrCat("lease ", request.lease, " is not one of this client, or it ended"));
  sessions_.WithLease(client, request.lease, [&](const BlockRef& block) {
    std::vector<TieredStore::PageRun> runs;
    store_.Locate(block, &runs);
    for (const TieredStore::PageRun& run : runs) {
      if (run.arena != request.arena || run.arena_epoch != request.arena_epoch ||
          static_cast<std::uint8_t>(run.tier) != request.tier) {
        continue;
      }
      const TieredStore::Arena arena = store_.ArenaOf(run);
      DoorClient::ArenaMemory copy;
      copy.arena_bytes = arena.bytes;
      copy.fd = OwnedFd(fcntl(arena.fd, F_DUPFD_CLOEXEC, 0));
      bool copied = copy.fd.valid();
      if (run.tier == Tier::kGpu) {
        copy.generations = OwnedFd(fcntl(store_.GenerationsOf(run).fd, F_DUPFD_CLOEXEC, 0));
        copied = copied && copy.generations.valid();
      }
      if (copied) {
        memory = std::move(copy);
      } else {
        memory = absl::ErrnoToStatus(errno, "descriptor of an arena");
      }
      return;
    }
    memory = absl::NotFoundError(absl::StrCat("lease ", request.lease, " has no page in arena ",
                                              request.arena, " of epoch ", request.arena_epoch));
  });
  return memory;
}

absl::Status DoorMemory::TakeRegion(const DoorPeer& peer, const DoorRegion& region, int fd) {
  if (region.kind != static_cast<std::uint8_t>(DoorRegionKind::kMemfd)) {
    return absl::UnimplementedError(
        absl::StrCat("region kind ", region.kind, ": this daemon takes memfds only"));
  }
  if (fd < 0) return absl::InvalidArgumentError("a region without a descriptor");
  // The daemon's own user and root could end it anyhow; they may share memory before they touch it.
  const bool trusted = peer.uid == own_uid_ || peer.uid == 0;
  KVMILL_ASSIGN_OR_RETURN(
      std::unique_ptr<const SharedRegion> memory,
      SharedRegion::Map(fd, region.offset_bytes, region.bytes,
                        trusted ? SharedRegion::Holes::kAllowed : SharedRegion::Holes::kNone));
  return sessions_.Share(peer.client, region.registration, region.region, std::move(memory));
}

absl::Status DoorMemory::TakeDeviceRegion(const DoorPeer& peer, const DoorDeviceRegion& region) {
  if (device_regions_ == nullptr) {
    return absl::FailedPreconditionError(
        absl::StrCat("memory of a GPU: this daemon (device ", device_name_, ") has none"));
  }
  KVMILL_ASSIGN_OR_RETURN(const std::shared_ptr<const EngineMemory> registered,
                          sessions_.MemoryOf(peer.client, region.registration));
  KVMILL_ASSIGN_OR_RETURN(std::unique_ptr<const SharedRegion> memory,
                          device_regions_->Open(peer, region, *registered));
  return sessions_.Share(peer.client, region.registration, region.region, std::move(memory));
}

}  // namespace kvmill
