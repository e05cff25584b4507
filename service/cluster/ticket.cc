#include "service/cluster/ticket.h"

#include <string>

#include "absl/strings/cord.h"
#include "absl/types/optional.h"

namespace kvmill {
namespace {

constexpr char kEndPayload[] = "kvmill/ticket_end";

const char* TextOf(TicketEnd end) {
  switch (end) {
    case TicketEnd::kAcknowledged:
      return "the ticket was acknowledged";
    case TicketEnd::kRevoked:
      return "the ticket was revoked";
    case TicketEnd::kDeadline:
      return "the ticket's time is over";
    case TicketEnd::kUnsaid:
      break;
  }
  return "the ticket has ended";
}

}  // namespace

absl::Status NoSuchTicketError() {
  return absl::NotFoundError("no such ticket of this namespace, or not any more");
}

absl::Status TicketEndedError(TicketEnd end) {
  absl::Status status = absl::AbortedError(TextOf(end));
  status.SetPayload(kEndPayload, absl::Cord(std::string(1, static_cast<char>(end))));
  return status;
}

TicketEnd EndOf(const absl::Status& status) {
  const absl::optional<absl::Cord> payload = status.GetPayload(kEndPayload);
  return payload.has_value() && payload->size() == 1 ? static_cast<TicketEnd>((*payload)[0])
                                                     : TicketEnd::kUnsaid;
}

bool ValidNews(std::uint64_t seen, const std::vector<TicketBlock>& known, const TicketNews& news) {
  if (news.version == 0 || news.version < seen) return false;
  const bool first = seen == 0;
  const std::vector<TicketBlock>& blocks = first ? news.blocks : known;
  if (!first && !news.blocks.empty()) return false;
  if (blocks.empty() || blocks.size() > kTicketBlocksMax) return false;
  if (first) {
    for (const TicketBlock& block : blocks) {
      if (block.key.empty() || block.layer_count == 0 || block.layer_count > kLayersMax) {
        return false;
      }
    }
  }
  if (news.changed.size() > blocks.size()) return false;
  for (const TicketBlockNews& change : news.changed) {
    if (change.block >= blocks.size()) return false;
    const std::size_t layers = blocks[change.block].layer_count;
    if (change.finished.end() > layers) return false;
    switch (change.state) {
      case TicketBlockState::kOpen:
      case TicketBlockState::kFailed:
        break;
      case TicketBlockState::kSealed:
        if (change.finished.count() != layers) return false;
        break;
      default:
        return false;
    }
  }
  return true;
}

}  // namespace kvmill
