// Map, Renew and Release of a client: leases of its session, and the mappings behind them.
//
// Internal to client/. Thread-safe. Uses the threads of its Connection, which must be destroyed
// first.
#ifndef KVMILL_CLIENT_MAP_CALLS_H_
#define KVMILL_CLIENT_MAP_CALLS_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "client/arena_mappings.h"
#include "client/client_session.h"
#include "client/map_codec.h"
#include "client/mapped_content.h"

namespace kvmill {

class MapCalls {
 public:
  using Deadline = Connection::Deadline;
  using Mapped = std::function<void(absl::StatusOr<std::unique_ptr<MappedBlocks::Content>>)>;

  // `device` reads what is mapped on the daemon's GPU; may be null, outlives everything mapped.
  MapCalls(Connection& connection, ClientSession& session, Device* device)
      : connection_(connection),
        session_(session),
        device_(device),
        owner_(std::make_shared<MapOwner>(this)) {}

  void Map(const ClientNamespace& ns, absl::Span<const BlockKey> keys, std::uint32_t lease_ms,
           PageMemory memory, const Elsewhere& elsewhere, Deadline deadline, Mapped done);
  // `content` must live until `done`.
  void Renew(MappedBlocks::Content& content, std::uint32_t lease_ms, Deadline deadline,
             std::function<void(absl::Status)> done);
  // Tells the daemon, without waiting.
  void GiveBack(const MappedBlocks::Content& content);

  void PassLost() { mappings_.Clear(); }
  // No GiveBack after it returned.
  void Stop() { owner_->Detach(); }

 private:
  struct Call;
  void Send(const std::shared_ptr<Call>& call, bool again);
  void GetArenas(const std::shared_ptr<Call>& call);
  absl::StatusOr<ArenaMappingPtr> MappingOf(const DoorClient::ArenaMemory& memory,
                                            const MappedArenaInfo& arena);
  // The reader of device_, made when it is first wanted, and again after that failed.
  absl::StatusOr<std::shared_ptr<DeviceReader>> Reader();
  // The leases of blocks that cannot be used here, whose statuses now say why.
  static std::vector<std::uint64_t> GiveUpUnreachable(Call& call);
  void Complete(const std::shared_ptr<Call>& call);
  void Release(const SessionPtr& session, const std::vector<std::uint64_t>& leases);
  void DropIdleLater();
  void DropIdle();

  Connection& connection_;
  ClientSession& session_;
  Device* const device_;
  const std::shared_ptr<MapOwner> owner_;  // Shared with every MappedBlocks.
  ArenaMappings mappings_;
  std::atomic<bool> drop_is_due_{false};
  Mutex reader_mu_;
  // Shared with every mapping of an arena on the GPU.
  std::shared_ptr<DeviceReader> reader_ ABSL_GUARDED_BY(reader_mu_);
};

}  // namespace kvmill

#endif  // KVMILL_CLIENT_MAP_CALLS_H_
