// One Store stream: reads chunks, encodes them on the encode pool, answers per block.
//
// The stream keeps reading while the pool works, up to kStoreWindowBytes of chunks that are not
// encoded yet; then it stops reading, and HTTP/2 flow control stops the caller. Chunks are encoded
// straight from the memory in which the transport received them.
//
// A store of pages brings no bytes: its chunks name pages of the caller's shared memory, which are
// encoded from there. A result is sent when nothing of the block is being encoded any more; so such
// a caller knows that nobody reads its pages.
//
// Threads: gRPC calls the On... functions, the pools run the tasks. The object lives until OnDone
// was called and no task holds it.
#ifndef KVMILL_SERVICE_STORE_CALL_H_
#define KVMILL_SERVICE_STORE_CALL_H_

#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/server_callback.h>

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "client/bulk_codec.h"
#include "kvmill/v1/cache.pb.h"
#include "service/service_context.h"
#include "storage/core/mutex.h"
#include "storage/tiered_store.h"

namespace kvmill {

class StoreCall final : public grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>,
                        public std::enable_shared_from_this<StoreCall> {
 public:
  // The reactor for gRPC; it owns itself.
  static StoreCall* Start(ServiceContext& context, const absl::StatusOr<Caller>& caller);
  explicit StoreCall(ServiceContext& context) : context_(context) {}

  void OnReadDone(bool ok) override;
  void OnWriteDone(bool ok) override;
  void OnCancel() override;
  void OnDone() override;

 private:
  struct Chunk {
    v1::StoreChunk head;
    BulkMessage bulk;
  };
  using ChunkPtr = std::shared_ptr<Chunk>;  // Shared: std::function copies its captures.

  // One (block, layer group) of this stream.
  struct Block {
    enum class Phase { kNew, kStarting, kOpen, kClosed };
    Phase phase = Phase::kNew;
    BlockId id;
    BlockOrigin origin;
    std::optional<BlockWriter> writer;  // kOpen.
    std::vector<ChunkPtr> waiting;      // kStarting: chunks that came before the writer.
    std::uint32_t pending = 0;          // Chunks that are not encoded yet.
    bool last = false;                  // The caller sends no more.
    std::uint64_t raw_bytes = 0;
    std::uint32_t existing_heads = 0;
    std::optional<v1::StoreReply> result;  // kClosed, and pending: to be sent afterwards.
  };
  using BlockNumber = std::pair<std::uint32_t, std::uint32_t>;  // (sequence, group).

  absl::Status HandleBegin();
  absl::Status HandleChunk();
  absl::Status CheckFits(const Chunk& chunk) const;
  bool reads_pages() const { return pages_.memory != nullptr; }
  // What it takes of the window.
  std::uint64_t CostOf(const Chunk& chunk) const;
  absl::StatusOr<WriteResult> Encode(const Chunk& chunk, BlockWriter& writer) const;

  // Tasks of the encode pool.
  void BeginBlock(BlockNumber number, const ChunkPtr& chunk);
  void WriteChunk(BlockNumber number, const ChunkPtr& chunk);
  void MakeDurable();  // Task of the I/O pool.

  void ChunkDone(BlockNumber number, const Chunk& chunk, const absl::StatusOr<WriteResult>& result);
  void Release(Block& block, const Chunk& chunk) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Close(BlockNumber number, Block& block, v1::StoreOutcome outcome, const absl::Status& status,
             const WriteResult& sealed) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // The caller finished the block, nothing of it is pending, and it is not sealed: whose is it?
  void Settle(BlockNumber number);
  void EraseIfOver(BlockNumber number) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Advance() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);  // Reads on, completes, writes.
  void Fail(const absl::Status& status) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  ServiceContext& context_;
  std::shared_ptr<StoreCall> self_;  // Until OnDone.

  Caller caller_;  // Constant after Start.

  // Set by the first message, before any task; constant afterwards.
  bool begun_ = false;
  bool wait_durable_ = false;
  TieredStore::NamespaceInfo namespace_;
  SessionTable::PageStore pages_;  // Of a store of pages.

  grpc::ByteBuffer message_;  // Of the read in progress.

  Mutex mu_;
  std::map<BlockNumber, Block> blocks_ ABSL_GUARDED_BY(mu_);
  std::vector<BlockId> durable_ids_ ABSL_GUARDED_BY(mu_);
  std::uint64_t window_used_bytes_ ABSL_GUARDED_BY(mu_) = 0;
  std::uint32_t tasks_ ABSL_GUARDED_BY(mu_) = 0;               // Posted or running.
  std::deque<grpc::ByteBuffer> replies_ ABSL_GUARDED_BY(mu_);  // The front one is being written.
  bool writing_ ABSL_GUARDED_BY(mu_) = false;
  bool reading_ ABSL_GUARDED_BY(mu_) = true;
  bool reads_done_ ABSL_GUARDED_BY(mu_) = false;
  bool completing_ ABSL_GUARDED_BY(mu_) = false;  // All chunks are in place; the summary is due,
  bool summarized_ ABSL_GUARDED_BY(mu_) = false;  //   and queued.
  bool finished_ ABSL_GUARDED_BY(mu_) = false;    // Finish was called.
};

}  // namespace kvmill

#endif  // KVMILL_SERVICE_STORE_CALL_H_
