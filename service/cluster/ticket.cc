#include "service/cluster/ticket.h"

namespace kvmill {

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
