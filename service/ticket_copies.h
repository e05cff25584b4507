// TicketCopies for real: blocks that come layer by layer, in memory of this node's store.
//
// Each is a BlockCopy (storage/block_copy.h). Pulls share it: they ask where a page goes, let it be
// received there, and check it; what is sealed was checked once more.
#ifndef KVMILL_SERVICE_TICKET_COPIES_H_
#define KVMILL_SERVICE_TICKET_COPIES_H_

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>

#include "service/cluster/loop.h"
#include "service/cluster/ticket.h"
#include "service/loop_mail.h"
#include "service/tenants.h"
#include "service/ticket_bytes.h"
#include "storage/block_copy.h"
#include "storage/core/mutex.h"
#include "storage/core/worker_pool.h"
#include "storage/tiered_store.h"

namespace kvmill {

// Lives on the loop, or ends when the loop has stopped. Store and workers outlive it, and what
// pulls share of it.
class StoreTicketCopies final : public TicketCopies {
 public:
  // Memory of a copy. Thread-safe.
  class Pages {
   public:
    ~Pages() { used_->GiveBack(tenant_, bytes_); }
    Pages(const Pages&) = delete;
    Pages& operator=(const Pages&) = delete;

    // Where a page of so many bytes goes, which nobody else receives meanwhile. Valid until Commit,
    // and as long as this object. Errors as of BlockCopy::ResizePage.
    absl::StatusOr<absl::Span<std::byte>> Place(std::uint32_t layer, std::uint32_t page_bytes);
    // The page came; DATA_LOSS when it is not what it should be.
    absl::Status Check(std::uint32_t layer) const;

   private:
    friend class StoreTicketCopies;
    using Used = std::shared_ptr<TicketBytes>;  // Of all, as the last may stay long.
    Pages(Used used, std::string tenant, std::uint64_t bytes)
        : used_(std::move(used)), tenant_(std::move(tenant)), bytes_(bytes) {}

    const Used used_;
    const std::string tenant_;
    const std::uint64_t bytes_;
    mutable Mutex mu_;
    BlockCopy copy_ ABSL_GUARDED_BY(mu_);  // Not valid: not begun, or committed.
  };
  using PagesPtr = std::shared_ptr<Pages>;  // Of the copy, and of pulls into it.

  // Copies have up to `bytes_max` at a time (TicketBytes), counted as if tiles held every head;
  // they are memory of the store that cannot be evicted. Blocks are those of the tenants that are
  // `shared`, and count for their quotas.
  StoreTicketCopies(Loop& loop, TieredStore& store, WorkerPool& workers, std::uint64_t bytes_max,
                    const SharedTenants& shared = SharedTenants())
      : store_(store),
        workers_(workers),
        shared_(shared),
        mail_(std::make_shared<LoopMail>(loop)),
        used_(std::make_shared<TicketBytes>("copies for tickets have", bytes_max)) {}
  ~StoreTicketCopies() override { mail_->Close(); }

  // RESOURCE_EXHAUSTED: too much is being copied, or there is no room in the store, of which it
  // evicts what it may and does not wait.
  CopyId Begin(const Fingerprint& fingerprint, const TicketBlock& block, Done done) override;
  void Commit(CopyId copy, std::uint64_t digest, Done done) override;
  void Abandon(CopyId copy) override { copies_.erase(copy); }

  // Of a copy that has begun. Null: there is none.
  PagesPtr Find(CopyId copy) const;

  std::size_t size() const { return copies_.size(); }
  std::uint64_t bytes() const { return used_->bytes(); }

 private:
  struct Copy {
    PagesPtr pages;
    Done done;  // Of Begin, then of Commit.
  };
  void Ended(CopyId copy, const absl::Status& status, bool stays);

  TieredStore& store_;
  WorkerPool& workers_;
  const SharedTenants shared_;
  const std::shared_ptr<LoopMail> mail_;
  const Pages::Used used_;
  CopyId next_ = 1;
  std::map<CopyId, Copy> copies_;
};

}  // namespace kvmill

#endif  // KVMILL_SERVICE_TICKET_COPIES_H_
