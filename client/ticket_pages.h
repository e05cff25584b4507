// How a daemon reads finished pages of a ticket from the daemon that made it: over UCX where both
// have it, else with gRPC messages. Client::ReadTicketPagesAsync; not for engines.
#ifndef KVMILL_CLIENT_TICKET_PAGES_H_
#define KVMILL_CLIENT_TICKET_PAGES_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "client/connection.h"
#include "client/data_link.h"
#include "kvmill/v1/ticket.pb.h"

namespace kvmill {

inline constexpr std::size_t kTicketPagesMax = 256;             // Of one request.
inline constexpr std::uint32_t kTicketPageBytesMax = 64 << 20;  // Of each.

struct TicketPagesRequest {
  v1::ReadTicketRequest request;
  std::size_t page_count = 0;  // Of all its pieces.
};

// Where the pages go. Called on threads of the client, which must not wait.
class TicketPageSink {
 public:
  virtual ~TicketPageSink() = default;
  // Before all else: `grpc`, or what UCX negotiated, as "tcp/eth0".
  virtual void ComesBy(absl::string_view /*transport*/) {}
  // For the i-th page that was asked for, once: exactly that many bytes, used until the call's
  // `done`; or empty: the page is dropped.
  virtual absl::Span<std::byte> PageMemory(std::size_t page, std::uint32_t page_bytes) = 0;
};

// Internal to client/: what ReadTicketPagesAsync does when it knows the way. `link.Begin()` was
// called for the first, which ends what that began. When `done` is called nobody writes into the
// sink's memory any more.
void StartDataTicketRead(DataLink& link, ConnectionPtr connection,
                         const TicketPagesRequest& request, TicketPageSink& sink,
                         DataLink::Deadline deadline, std::function<void(absl::Status)> done);
void StartTicketReadStream(Connection& connection, const TicketPagesRequest& request,
                           TicketPageSink& sink, Connection::Deadline deadline,
                           std::function<void(absl::Status)> done);

}  // namespace kvmill

#endif  // KVMILL_CLIENT_TICKET_PAGES_H_
