#include "service/ticket_copies.h"

#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "service/ticket_holds.h"
#include "storage/core/status_macros.h"

namespace kvmill {

absl::StatusOr<absl::Span<std::byte>> StoreTicketCopies::Pages::Place(std::uint32_t layer,
                                                                      std::uint32_t page_bytes) {
  MutexLock lock(mu_);
  if (!copy_.valid()) return absl::FailedPreconditionError("the copy is over");
  KVMILL_RETURN_IF_ERROR(copy_.ResizePage(layer, page_bytes, absl::ZeroDuration()));
  return copy_.pages()[layer];
}

absl::Status StoreTicketCopies::Pages::Check(std::uint32_t layer) const {
  MutexLock lock(mu_);
  if (!copy_.valid()) return absl::FailedPreconditionError("the copy is over");
  return copy_.CheckPage(layer);
}

TicketCopies::CopyId StoreTicketCopies::Begin(const Fingerprint& fingerprint,
                                              const TicketBlock& block, Done done) {
  const CopyId id = next_++;
  Copy& copy = copies_[id];
  copy.done = std::move(done);
  const auto space = shared_.Find(store_, fingerprint);
  const absl::StatusOr<StoredTicketBlock> stored =
      space.ok() ? InStore(store_, *space, block) : space.status();
  const std::string tenant = space.ok() ? ShareOf(*space) : "";
  const absl::Status status = stored.ok() ? used_->Take(tenant, stored->bytes) : stored.status();
  if (!status.ok()) {
    mail_->Post([this, id, status] { Ended(id, status, false); });
    return id;
  }
  copy.pages = PagesPtr(new Pages(used_, tenant, stored->bytes));  // Not make_shared: private.
  workers_.Post([this, &store = store_, mail = mail_, id, pages = copy.pages, stored = *stored,
                 layers = block.layer_count] {
    const std::vector<std::uint32_t> page_bytes(layers, stored.page_bytes);
    absl::StatusOr<BlockCopy> begun =
        store.BeginCopy(stored.id, stored.origin, page_bytes, absl::ZeroDuration());
    if (begun.ok()) {
      MutexLock lock(pages->mu_);
      pages->copy_ = *std::move(begun);
    }
    mail->Post([this, id, status = begun.status()] { Ended(id, status, status.ok()); });
  });
  return id;
}

void StoreTicketCopies::Commit(CopyId id, std::uint64_t digest, Done done) {
  Copy& copy = copies_.at(id);
  copy.done = std::move(done);
  workers_.Post([this, mail = mail_, id, pages = std::move(copy.pages), digest]() mutable {
    absl::Status status;
    {
      MutexLock lock(pages->mu_);
      if (pages->copy_.Digest() != digest) {
        status = absl::DataLossError("the pages are not those that the producer sealed");
        pages->copy_ = BlockCopy();
      } else {
        status = pages->copy_.Commit();
      }
    }
    pages = nullptr;  // Before anybody hears of it.
    mail->Post([this, id, status] { Ended(id, status, false); });
  });
}

void StoreTicketCopies::Ended(CopyId id, const absl::Status& status, bool stays) {
  const auto found = copies_.find(id);
  if (found == copies_.end()) return;  // Abandoned.
  const Done done = std::move(found->second.done);
  if (!stays) copies_.erase(found);
  done(status);
}

StoreTicketCopies::PagesPtr StoreTicketCopies::Find(CopyId id) const {
  const auto found = copies_.find(id);
  return found == copies_.end() ? nullptr : found->second.pages;
}

}  // namespace kvmill
