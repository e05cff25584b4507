// Blocks that come in one fetch from another node: received straight into the local store's memory,
// verified and sealed one after the other. Of peer_pull.h.
#ifndef KVMILL_SERVICE_PULL_BATCH_H_
#define KVMILL_SERVICE_PULL_BATCH_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "client/client.h"
#include "storage/block_copy.h"
#include "storage/core/worker_pool.h"
#include "storage/tiered_store.h"

namespace kvmill {

// Started once, and keeps itself alive until it has ended. The client's threads call the sink, one
// at a time; blocks are sealed on the workers, so that nobody who receives waits for a checksum.
class PullBatch final : public FetchSink, public std::enable_shared_from_this<PullBatch> {
 public:
  struct Wanted {
    BlockKey key;
    BlockOrigin origin;
  };
  // One status a block, or an error of all; and what was sealed here, in either case.
  struct Result {
    absl::StatusOr<std::vector<absl::Status>> blocks = std::vector<absl::Status>();
    std::uint64_t sealed_blocks = 0;  // In one group at least.
    std::uint64_t bytes = 0;          // Of pages.
    std::string transport;            // That they came by; empty: the fetch failed.
  };

  // `ns` is the namespace `namespace_id` of the store. Blocks are taken from the process with this
  // boot id alone: what another one has under the same keys may be anything. Store and workers
  // outlive the batch.
  PullBatch(TieredStore& store, WorkerPool& workers, NamespaceId namespace_id,
            std::shared_ptr<const ClientNamespace> ns, std::string boot_id_hex,
            std::vector<Wanted> wanted);

  // Fetches. `ended` is called once, on any thread, maybe within this call: when nothing writes to
  // the store's memory any more and every block that came has its fate.
  void Start(Client& client, absl::Duration timeout, std::function<void(Result)> ended);

  // What has not begun to come is dropped as it comes. From any thread.
  void Stop() { stopped_.store(true, std::memory_order_relaxed); }

  std::size_t size() const { return wanted_.size(); }

  // FetchSink.
  absl::Status OnGroup(std::uint32_t block, std::uint8_t group, std::uint32_t token_count,
                       absl::Span<const std::uint32_t> page_bytes) override;
  absl::Span<std::byte> PageMemory(const PageId& id, std::size_t page_bytes) override;
  absl::Status OnPage(const PageId& id, const PageView& page) override;
  bool verifies() const override { return true; }

 private:
  struct Block {
    std::vector<BlockCopy> groups;  // Not valid: it is in the store already.
    std::size_t pages_left = 0;     // That have not come.
    absl::Status status;            // Of its seal.
  };

  absl::Status CheckPeer() const;
  void Seal(std::size_t index);
  void Fetched(absl::StatusOr<FetchResult> result);
  void Drop();

  TieredStore& store_;
  WorkerPool& workers_;
  const NamespaceId namespace_id_;
  const std::shared_ptr<const ClientNamespace> ns_;  // Of the pull, and its other batches.
  const std::string boot_id_hex_;
  Client* client_ = nullptr;  // Is there as long as the fetch.
  const std::vector<Wanted> wanted_;
  std::vector<BlockKey> keys_;  // Of wanted_: the client borrows them.
  std::vector<Block> blocks_;  // Each of the sink, then of the task that seals it, then of the end.
  std::atomic<bool> stopped_{false};
  std::atomic<std::uint64_t> sealed_blocks_{0}, bytes_{0};
  absl::StatusOr<FetchResult> fetched_ = absl::UnknownError("");
  std::function<void(Result)> ended_;
  std::atomic<std::size_t> open_{1};  // The fetch, and blocks that are being sealed.
};

}  // namespace kvmill

#endif  // KVMILL_SERVICE_PULL_BATCH_H_
