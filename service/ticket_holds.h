// TicketHolds for real: blocks that tickets promise, held in this node's store.
//
// Each block is a BlockHold (storage/block_hold.h), which follows whoever assembles the block and
// says when a layer is finished. What other threads say is brought to the loop; there it is events.
#ifndef KVMILL_SERVICE_TICKET_HOLDS_H_
#define KVMILL_SERVICE_TICKET_HOLDS_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "service/cluster/loop.h"
#include "service/cluster/ticket.h"
#include "service/loop_mail.h"
#include "service/tenants.h"
#include "service/ticket_bytes.h"
#include "storage/block_hold.h"
#include "storage/core/worker_pool.h"
#include "storage/tiered_store.h"

namespace kvmill {

// The block as the store knows it. INVALID_ARGUMENT: it does not fit its namespace.
struct StoredTicketBlock {
  BlockId id;
  BlockOrigin origin;
  std::uint32_t page_bytes = 0;  // Of each layer, when a tile holds every head of it.
  std::uint64_t bytes = 0;       // Of all layers so.
};
absl::StatusOr<StoredTicketBlock> InStore(const TieredStore& store,
                                          const TieredStore::NamespaceInfo& space,
                                          const TicketBlock& block);
// Of whose share it counts: empty for the daemons' own (TicketBytes, TicketTable).
std::string ShareOf(const TieredStore::NamespaceInfo& space);

// Lives on the loop, or ends when the loop has stopped. Store and workers outlive it.
class StoreTicketHolds final : public TicketHolds {
 public:
  // Blocks are held by the workers: one that is only on disk is read first. At most `bytes_max` are
  // promised at a time (TicketBytes), counted as if tiles held every head; what is held cannot be
  // evicted. Blocks are those of the tenants that are `shared`.
  StoreTicketHolds(Loop& loop, TieredStore& store, WorkerPool& workers, std::uint64_t bytes_max,
                   const SharedTenants& shared = SharedTenants())
      : store_(store),
        workers_(workers),
        shared_(shared),
        bytes_("tickets hold", bytes_max),
        mail_(std::make_shared<LoopMail>(loop)) {}
  ~StoreTicketHolds() override { mail_->Close(); }

  // NOT_FOUND, too: the namespace is not known here. A block that cannot be held after all (it is
  // there with another parent, or on disk and there is no room to load it) fails.
  absl::StatusOr<HoldId> Hold(const Fingerprint& fingerprint,
                              const std::vector<TicketBlock>& blocks, Events* events) override;
  void Release(HoldId hold) override;

  // Runs `done` on the loop, later, when the blocks of the last Hold are held: whatever is stored
  // under their names from then on is held from its first byte.
  void WhenHeld(std::function<void()> done);

  // Finished pages, in the order of the layers. Whoever reads one shares its hold until then. Not
  // OK: no such hold, or a layer is not finished.
  struct Page {
    std::shared_ptr<const BlockHold> hold;
    absl::Span<const std::byte> bytes;
  };
  absl::Status Read(HoldId hold, std::uint32_t block, const LayerSet& layers,
                    std::vector<Page>* pages) const;

  std::size_t size() const { return held_.size(); }
  std::uint64_t bytes() const { return bytes_.bytes(); }

 private:
  using HoldPtr = std::shared_ptr<BlockHold>;  // With who reads its pages.
  struct Block {
    std::uint16_t layer_count = 0;
    HoldPtr hold;  // Null: not yet, or it failed.
    LayerSet told;
    bool over = false;  // Sealed or failed, and told so.
  };
  struct Held {
    Events* events = nullptr;
    std::vector<Block> blocks;
    std::string tenant;  // Of whose share.
    std::uint64_t bytes = 0;
    bool placed = false;
    std::vector<std::function<void()>> when_held;
    // Also of the task that holds the blocks, which may have to load them first.
    std::shared_ptr<std::atomic<bool>> wanted = std::make_shared<std::atomic<bool>>(true);
  };

  void Placed(HoldId hold, const std::vector<absl::StatusOr<HoldPtr>>& holds);
  // Tells what is new of the block, as its hold is now.
  void Look(HoldId hold, std::uint32_t block);

  TieredStore& store_;
  WorkerPool& workers_;
  const SharedTenants shared_;
  TicketBytes bytes_;
  const std::shared_ptr<LoopMail> mail_;
  HoldId next_ = 1;
  std::map<HoldId, Held> held_;
};

}  // namespace kvmill

#endif  // KVMILL_SERVICE_TICKET_HOLDS_H_
