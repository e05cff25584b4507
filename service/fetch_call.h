// One Fetch stream: pins blocks in the order of the keys and writes their pages from where they
// lie.
//
// A task of the I/O pool runs ahead of the writer by up to kReadyBlocksMax blocks, so that a load
// from disk overlaps with writing. What this node lacks is brought from its peers first, run by run
// (ClusterBlocks); the loads follow close behind. A block stays pinned until the transport let go
// of every slice of it. Threads: gRPC calls the On... functions; the object lives until OnDone was
// called and the loader does not hold it.
#ifndef KVMILL_SERVICE_FETCH_CALL_H_
#define KVMILL_SERVICE_FETCH_CALL_H_

#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/server_callback.h>

#include <chrono>
#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "kvmill/v1/cache.pb.h"
#include "service/service_context.h"
#include "storage/core/mutex.h"
#include "storage/tiered_store.h"

namespace kvmill {

class FetchCall final : public grpc::ServerWriteReactor<grpc::ByteBuffer>,
                        public std::enable_shared_from_this<FetchCall> {
 public:
  // The reactor for gRPC; it owns itself.
  static FetchCall* Start(ServiceContext& context, const absl::StatusOr<Caller>& caller,
                          std::chrono::system_clock::time_point deadline,
                          const grpc::ByteBuffer& request);
  explicit FetchCall(ServiceContext& context) : context_(context) {}

  void OnWriteDone(bool ok) override;
  void OnCancel() override;
  void OnDone() override;

 private:
  static constexpr std::size_t kReadyBlocksMax = 4;

  // Shared: every slice that gRPC holds keeps the block pinned.
  using PinnedBlock = std::shared_ptr<const BlockRef>;
  struct ReadyBlock {
    std::uint32_t block = 0;
    std::uint32_t group = 0;
    absl::Status status;
    PinnedBlock pages;  // Null unless status is OK.
  };

  absl::Status Begin(const absl::StatusOr<Caller>& caller,
                     std::chrono::system_clock::time_point deadline,
                     const grpc::ByteBuffer& request);
  // In `space`, with the keys of keys_. Then blocks may be loaded.
  void Bring(TieredStore::NamespaceInfo space, const Caller& caller, const Elsewhere& elsewhere,
             std::chrono::system_clock::time_point deadline);
  // From the peers came what will come of the first `keys`. False: nobody waits for more.
  bool Settled(std::size_t keys);
  void Load();  // Task of the I/O pool.
  void Advance() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // The next message of the current block; empty when it has no more.
  bool NextMessage() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Fail(const absl::Status& status) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  ServiceContext& context_;
  std::shared_ptr<FetchCall> self_;  // Until OnDone.

  // Constant once begun_, and keys_ after Start.
  TieredStore::NamespaceInfo namespace_;
  std::vector<BlockKey> keys_;

  Mutex mu_;
  bool begun_ ABSL_GUARDED_BY(mu_) = false;  // Blocks may be loaded: settled_keys_ is known.
  std::size_t settled_keys_ ABSL_GUARDED_BY(mu_) = 0;  // That may be loaded.
  std::size_t next_load_ ABSL_GUARDED_BY(mu_) = 0;     // Of keys_.size() * groups.
  bool loading_ ABSL_GUARDED_BY(mu_) = false;
  std::deque<ReadyBlock> ready_ ABSL_GUARDED_BY(mu_);
  // Of the front of ready_: what was written.
  bool head_written_ ABSL_GUARDED_BY(mu_) = false;
  std::size_t page_ ABSL_GUARDED_BY(mu_) = 0;
  std::size_t page_offset_ ABSL_GUARDED_BY(mu_) = 0;
  std::uint64_t offset_bytes_ ABSL_GUARDED_BY(mu_) = 0;
  grpc::ByteBuffer message_ ABSL_GUARDED_BY(mu_);  // Being written.
  bool writing_ ABSL_GUARDED_BY(mu_) = false;
  bool finished_ ABSL_GUARDED_BY(mu_) = false;
};

}  // namespace kvmill

#endif  // KVMILL_SERVICE_FETCH_CALL_H_
