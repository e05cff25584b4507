#include "service/ticket_pulls.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/client.h"
#include "client/ticket_pages.h"
#include "service/cluster/peers.h"
#include "service/ticket_codec.h"
#include "storage/core/log.h"

namespace kvmill {

// One call for pages, and what became of each.
class TicketPulls::PagePull final : public TicketPageSink {
 public:
  PagePull(const std::vector<Piece>& pieces, const StoreTicketCopies& copies) {
    landed_.resize(pieces.size());
    for (std::size_t i = 0; i < pieces.size(); ++i) {
      const StoreTicketCopies::PagesPtr memory = copies.Find(pieces[i].copy);
      for (std::uint32_t layer = 0; layer < pieces[i].layers.end(); ++layer) {
        if (pieces[i].layers.Has(layer)) pages_.push_back({i, layer, memory, {}});
      }
    }
  }

  std::size_t page_count() const { return pages_.size(); }

  void ComesBy(absl::string_view transport) override { transport_ = std::string(transport); }

  absl::Span<std::byte> PageMemory(std::size_t page, std::uint32_t page_bytes) override {
    Page& of = pages_[page];
    if (of.memory == nullptr) return {};
    const absl::StatusOr<absl::Span<std::byte>> place = of.memory->Place(of.layer, page_bytes);
    if (place.ok()) of.place = *place;
    // No page has so many bytes; else there is no room for it.
    if (absl::IsInvalidArgument(place.status())) landed_[of.piece].damaged = true;
    return of.place;
  }

  // On a worker: all of them came, or the call failed.
  void Finish(const absl::Status& status) {
    status_ = status;
    for (Page& page : pages_) {
      if (!status.ok() || page.place.empty()) continue;
      const absl::Status checked = page.memory->Check(page.layer);
      if (checked.ok()) {
        landed_[page.piece].layers.Add(page.layer);
        bytes_ += page.place.size();
      } else {
        landed_[page.piece].damaged = true;
        if (damaged_++ == 0) why_ = std::string(checked.message());
      }
    }
    pages_.clear();
  }

  const absl::Status& status() const { return status_; }
  const std::vector<Landed>& landed() const { return landed_; }
  std::uint64_t bytes() const { return bytes_; }
  const std::string& transport() const { return transport_; }
  std::uint64_t damaged() const { return damaged_; }
  const std::string& why() const { return why_; }  // Of the first damaged one.

 private:
  struct Page {
    std::size_t piece;
    std::uint32_t layer;
    StoreTicketCopies::PagesPtr memory;  // Null: there is no such copy any more.
    absl::Span<std::byte> place;
  };
  std::vector<Page> pages_;
  absl::Status status_;
  std::vector<Landed> landed_;
  std::string transport_;
  std::uint64_t bytes_ = 0;
  std::uint64_t damaged_ = 0;
  std::string why_;
};

TicketPulls::~TicketPulls() {
  mail_->Close();
  clients_.Close();
}

TicketPeers::CallId TicketPulls::Redeem(const Member& producer, const TicketName& name,
                                        std::uint64_t seen, std::int64_t wait_nanos,
                                        std::int64_t deadline_nanos, Done<TicketNews> done) {
  return 2 * peers_.AskTicket(producer, name, seen, wait_nanos, deadline_nanos, std::move(done));
}

TicketPeers::CallId TicketPulls::Acknowledge(const Member& producer, const TicketName& name,
                                             std::int64_t deadline_nanos,
                                             std::function<void(absl::Status)> done) {
  return 2 * peers_.AcknowledgeTicket(producer, name, deadline_nanos, std::move(done));
}

TicketPeers::CallId TicketPulls::Pull(const Member& producer, const TicketName& name,
                                      std::vector<Piece> pieces, std::int64_t deadline_nanos,
                                      Done<std::vector<Landed>> done) {
  const CallId id = 2 * next_++ + 1;
  pulls_[id] = std::move(done);
  const auto pull = std::make_shared<PagePull>(pieces, copies_);  // Of the call, then of its end.
  const absl::StatusOr<PeerClients::PeerPtr> peer = clients_.Get(producer);
  if (!peer.ok()) {
    pull->Finish(peer.status());
    mail_->Post([this, id, producer, pull] { Ended(id, nullptr, producer, pull); });
    return id;
  }
  clients_.Begin(*peer);
  TicketPagesRequest request;
  request.page_count = pull->page_count();
  request.request.set_incarnation(producer.incarnation);
  ToProto(name, self_, request.request.mutable_holder());
  for (const Piece& piece : pieces) AddPiece(piece.block, piece.layers, &request.request);
  CallOptions call;
  call.timeout = absl::Nanoseconds(
      std::max<std::int64_t>(1'000'000, deadline_nanos - loop_.clock().MonotonicNanos()));
  (*peer)->client()->ReadTicketPagesAsync(
      request, *pull, call,
      [this, &workers = workers_, mail = mail_, id, pull, producer,
       peer = *peer](const absl::Status& status) {
        workers.Post([this, mail, id, pull, producer, peer, status] {
          pull->Finish(status);
          mail->Post([this, id, pull, producer, peer] { Ended(id, peer, producer, pull); });
        });
      });
  return id;
}

void TicketPulls::Ended(CallId id, const PeerClients::PeerPtr& peer, const Member& producer,
                        const std::shared_ptr<PagePull>& pull) {
  absl::Status status = pull->status();
  if (peer != nullptr) {
    clients_.End(peer);
    const absl::Status there = clients_.Check(peer);
    // Of a client that was closed, what ended before is right; the rest was cancelled.
    if (!there.ok() && (!status.ok() || IsReplaced(there))) status = there;
  }
  for (const Landed& landed : pull->landed()) counts_.pages += landed.layers.count();
  counts_.bytes += pull->bytes();
  if (pull->bytes() > 0) transports_.Came(producer.id, pull->transport(), pull->bytes());
  counts_.damaged_pages += pull->damaged();
  if (pull->damaged() > 0) {
    LogWarning(absl::StrCat("cluster: node \"", producer.id, "\" at ", producer.address, " sent ",
                            pull->damaged(),
                            " damaged pages of a ticket; they were dropped: ", pull->why()));
  }
  auto node = pulls_.extract(id);
  if (node.empty()) return;  // Cancelled.
  if (status.ok()) return node.mapped()(pull->landed());
  // The process there refuses what is meant for another one.
  node.mapped()(absl::IsAborted(status) ? ReplacedError(status.message()) : status);
}

void TicketPulls::Cancel(CallId call) {
  if (call % 2 == 0) return peers_.Cancel(call / 2);
  pulls_.erase(call);
}

}  // namespace kvmill
