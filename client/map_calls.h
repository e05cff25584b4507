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

  MapCalls(Connection& connection, ClientSession& session)
      : connection_(connection), session_(session), owner_(std::make_shared<MapOwner>(this)) {}

  void Map(const ClientNamespace& ns, absl::Span<const BlockKey> keys, std::uint32_t lease_ms,
           Deadline deadline, Mapped done);
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
  void Complete(const std::shared_ptr<Call>& call);
  void Release(const SessionPtr& session, const std::vector<std::uint64_t>& leases);
  void DropIdleLater();
  void DropIdle();

  Connection& connection_;
  ClientSession& session_;
  const std::shared_ptr<MapOwner> owner_;  // Shared with every MappedBlocks.
  ArenaMappings mappings_;
  std::atomic<bool> drop_is_due_{false};
};

}  // namespace kvmill

#endif  // KVMILL_CLIENT_MAP_CALLS_H_
