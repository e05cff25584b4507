// Between ticket.proto and service/cluster/ticket.h.
//
// Requests are checked here: what is out of bounds is INVALID_ARGUMENT and names value and limit.
// Of answers only what has no place in our types is refused; TicketRedeem checks the rest.
#ifndef KVMILL_SERVICE_TICKET_CODEC_H_
#define KVMILL_SERVICE_TICKET_CODEC_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "kvmill/v1/ticket.pb.h"
#include "service/cluster/member.h"
#include "service/cluster/ticket_redeem.h"
#include "service/cluster/ticket_table.h"

namespace kvmill {

// A ticket outside of its producer: bytes for engines (docs/formats.md).
struct TicketBearer {
  TicketSecret secret{};
  std::string producer;     // Node id
  std::string incarnation;  //   and boot id.
  Fingerprint fingerprint{};

  TicketName name() const { return {secret, fingerprint}; }
};
std::string Serialize(const TicketBearer& bearer);
// INVALID_ARGUMENT; FAILED_PRECONDITION: of a version that this one does not know.
absl::StatusOr<TicketBearer> ParseTicket(absl::string_view bytes);

// All layer groups of the promised blocks, block by block.
absl::StatusOr<std::vector<TicketBlock>> BlocksFromProto(const v1::CreateTicketRequest& request,
                                                         const NamespaceSpec& spec);

// Who asks for which ticket.
struct TicketHolder {
  TicketSecret secret{};
  TicketTable::Consumer consumer;
  std::optional<Fingerprint> fingerprint{};  // None: a node of an earlier version, which says none.
};
void ToProto(const TicketName& name, const Member& consumer, v1::TicketHolder* out);
absl::StatusOr<TicketHolder> FromProto(const v1::TicketHolder& holder);

// The pages that are asked for, in this order.
struct TicketPiece {
  std::uint32_t block = 0;
  LayerSet layers;
};
absl::StatusOr<std::vector<TicketPiece>> PiecesFromProto(const v1::ReadTicketRequest& request);
void AddPiece(std::uint32_t block, const LayerSet& layers, v1::ReadTicketRequest* out);

void ToProto(const absl::StatusOr<TicketNews>& news, v1::AskTicketReply* out);
// DATA_LOSS: it cannot be.
absl::StatusOr<TicketNews> FromProto(const v1::AskTicketReply& reply);

// `first`: what the block is, too.
void ToProto(std::uint32_t place, const TicketRedeem::Block& block, bool first,
             v1::RedeemedBlock* out);

}  // namespace kvmill

#endif  // KVMILL_SERVICE_TICKET_CODEC_H_
