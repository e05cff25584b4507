#include "service/read_ticket_call.h"

#include <algorithm>
#include <utility>

#include "service/status_grpc.h"

namespace kvmill {
namespace {

constexpr std::size_t kMessageBytes = 1 << 20;

}  // namespace

ReadTicketCall* ReadTicketCall::Start(const absl::StatusOr<ClusterTickets*>& tickets,
                                      const v1::ReadTicketRequest& request) {
  const auto call = std::make_shared<ReadTicketCall>();
  call->self_ = call;
  absl::Status status = tickets.status();
  const auto holder = FromProto(request.holder());
  if (status.ok()) status = holder.status();
  auto pieces = PiecesFromProto(request);
  if (status.ok()) status = pieces.status();
  if (status.ok()) {
    (*tickets)->Read(
        *holder, *std::move(pieces),
        [call](absl::StatusOr<ClusterTickets::Pages> pages) { call->Found(std::move(pages)); });
  } else {
    call->Finish(StatusToGrpc(status));
  }
  return call.get();
}

void ReadTicketCall::Found(absl::StatusOr<ClusterTickets::Pages> pages) {
  if (!pages.ok()) return Finish(StatusToGrpc(pages.status()));
  pages_ = *std::move(pages);
  for (const StoreTicketHolds::Page& page : pages_.pages) {
    message_.add_page_bytes(static_cast<std::uint32_t>(page.bytes.size()));
  }
  WriteNext();
}

void ReadTicketCall::WriteNext() {
  std::string* const bytes = message_.mutable_bytes();
  bytes->clear();
  while (page_ < pages_.pages.size() && bytes->size() < kMessageBytes) {
    const absl::Span<const std::byte> rest = pages_.pages[page_].bytes.subspan(offset_);
    const std::size_t count = std::min(rest.size(), kMessageBytes - bytes->size());
    bytes->append(reinterpret_cast<const char*>(rest.data()), count);
    offset_ += count;
    if (count < rest.size()) continue;
    ++page_;
    offset_ = 0;
  }
  StartWrite(&message_);
}

void ReadTicketCall::OnWriteDone(bool ok) {
  message_.clear_page_bytes();
  if (ok && page_ < pages_.pages.size()) return WriteNext();
  Finish(ok ? grpc::Status::OK : grpc::Status(grpc::StatusCode::CANCELLED, ""));
}

}  // namespace kvmill
