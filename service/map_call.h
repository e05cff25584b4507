// One Map call: finds or loads the blocks, leases them to the caller's session, says where they
// lie.
//
// Blocks that are in the memory where the reader wants them are found at once, on gRPC's thread,
// which must not wait; when some have to be brought there the rest is a task of the I/O pool, after
// the peers (ClusterBlocks) gave what this node lacks.
#ifndef KVMILL_SERVICE_MAP_CALL_H_
#define KVMILL_SERVICE_MAP_CALL_H_

#include <grpcpp/support/server_callback.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kvmill/v1/cache.pb.h"
#include "service/service_context.h"
#include "storage/tiered_store.h"

namespace kvmill {

inline constexpr std::uint32_t kMapBlocksMax = 8192;  // (Block, layer group) pairs of one call.
inline constexpr std::uint32_t kMapLoadsMax = 64;     // Calls at once that wait for disk or peers.

class MapCall final : public grpc::ServerUnaryReactor {
 public:
  // The reactor for gRPC; it owns itself. `request` and `reply` live as long.
  static MapCall* Start(ServiceContext& context, const absl::StatusOr<Caller>& caller,
                        std::chrono::system_clock::time_point deadline,
                        const v1::MapRequest* request, v1::MapReply* reply);

  void OnCancel() override { cancelled_.store(true, std::memory_order_relaxed); }
  void OnDone() override { delete this; }

 private:
  MapCall(ServiceContext& context, const v1::MapRequest* request, v1::MapReply* reply)
      : context_(context), request_(*request), reply_(*reply) {}
  // False: a task of the I/O pool goes on.
  absl::StatusOr<bool> Begin(const absl::StatusOr<Caller>& caller,
                             std::chrono::system_clock::time_point deadline);
  // In namespace_.
  absl::StatusOr<bool> Find(const Elsewhere& elsewhere,
                            std::chrono::system_clock::time_point deadline);
  void End(const absl::StatusOr<bool>& complete);
  BlockId IdOf(std::size_t entry) const;
  void LoadMissing();
  void LoadLater();  // By a task of the I/O pool, which answers.
  absl::Status Answer();

  ServiceContext& context_;
  const v1::MapRequest& request_;
  v1::MapReply& reply_;
  Caller caller_;
  TieredStore::NamespaceInfo namespace_;
  PageMemory memory_ = PageMemory::kHost;
  std::vector<BlockKey> keys_;
  std::vector<absl::StatusOr<BlockRef>> entries_;  // [key][layer group]
  std::vector<std::size_t> missing_;
  std::atomic<bool> cancelled_{false};  // A late true costs a lease that expires.
};

}  // namespace kvmill

#endif  // KVMILL_SERVICE_MAP_CALL_H_
