// DataPlane: pages of tickets.
#include <memory>
#include <utility>
#include <vector>

#include "service/cluster_tickets.h"
#include "service/data_plane_calls.h"
#include "service/peer_codec.h"
#include "storage/core/status_macros.h"

namespace kvmill {
namespace {

std::vector<std::byte> HeaderOf(const ClusterTickets::Pages& pages) {
  v1::TicketPages sizes;
  for (const StoreTicketHolds::Page& page : pages.pages) {
    sizes.add_page_bytes(static_cast<std::uint32_t>(page.bytes.size()));
  }
  std::vector<std::byte> header(sizes.ByteSizeLong());
  sizes.SerializeWithCachedSizesToArray(reinterpret_cast<std::uint8_t*>(header.data()));
  return header;
}

}  // namespace

void DataPlane::StartTicketRead(const PeerPtr& peer, const v1::ReadTicketRequest& request,
                                std::unique_ptr<IncomingCall> call,
                                std::unique_ptr<Running> running) {
  struct TicketRead {
    std::unique_ptr<Running> running;  // First: destroyed last.
    PeerPtr peer;
    std::unique_ptr<IncomingCall> call;
    ClusterTickets::Pages pages;  // Held until the transport is done with them.
    std::int64_t start_nanos = 0;
  };
  const auto read = std::make_shared<TicketRead>();  // Of the loop's task, then of the answer.
  read->running = std::move(running);
  read->peer = peer;
  read->call = std::move(call);
  const absl::Status status = [&]() -> absl::Status {
    KVMILL_RETURN_IF_ERROR(CheckMeantFor(request.incarnation(), context_.boot_id));
    ClusterTickets* const tickets = context_.tickets.load(std::memory_order_acquire);
    // As PeerService has it.
    if (peer->caller.door_client != 0 || !peer->caller.node) {
      return absl::PermissionDeniedError("pages of tickets are for nodes, which come by --listen");
    }
    if (tickets == nullptr) return context_.NoCluster();
    KVMILL_ASSIGN_OR_RETURN(const TicketHolder holder, FromProto(request.holder()));
    KVMILL_ASSIGN_OR_RETURN(std::vector<TicketPiece> pieces, PiecesFromProto(request));
    tickets->Read(holder, std::move(pieces), [read](absl::StatusOr<ClusterTickets::Pages> pages) {
      const std::unique_ptr<IncomingCall> answered = std::move(read->call);
      if (!pages.ok()) return answered->Respond({.status = pages.status()});
      read->pages = *std::move(pages);
      SourceSpans payload;
      std::uint64_t bytes = 0;
      for (const StoreTicketHolds::Page& page : read->pages.pages) {
        payload.push_back(page.bytes);
        bytes += page.bytes.size();
      }
      DataPlane* const plane = read->running->plane();
      read->peer->bytes->out.fetch_add(bytes, std::memory_order_relaxed);
      read->start_nanos = plane->transport_->NowNanos();
      answered->Respond(
          {.header = HeaderOf(read->pages),
           .payload = std::move(payload),
           .done = [read, plane](const absl::Status& sent) {
             if (!sent.ok()) return;
             plane->fetch_seconds_.Observe(
                 static_cast<double>(plane->transport_->NowNanos() - read->start_nanos) * 1e-9);
           }});
    });
    return absl::OkStatus();
  }();
  if (!status.ok()) read->call->Respond({.status = status});
}

}  // namespace kvmill
