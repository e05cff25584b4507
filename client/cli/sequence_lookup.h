// Finding the blocks of a sequence without knowing how many there are.
#ifndef KVMILL_CLIENT_CLI_SEQUENCE_LOOKUP_H_
#define KVMILL_CLIENT_CLI_SEQUENCE_LOOKUP_H_

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "client/client.h"
#include "storage/core/block_key.h"

namespace kvmill::cli {

// 4 million tokens in blocks of 128; what a daemon takes in one lookup.
inline constexpr std::uint32_t kSequenceBlocksMax = 32768;

struct FoundSequence {
  std::vector<BlockKey> keys;  // Of the hit blocks.
  std::uint64_t hit_tokens = 0;
  std::vector<Tier> tiers;  // One per key.
  std::uint32_t tail_tokens = 0;
  BlockKey tail_key;
};

// `blocks_max` 0: as many as there are, and the tail behind them. Otherwise at most so many, and no
// tail.
absl::StatusOr<FoundSequence> FindSequence(Client& client, const ClientNamespace& ns,
                                           absl::string_view sequence, std::uint32_t blocks_max);

// Tier name -> number of blocks, in the order gpu, host, disk, peer; absent tiers left out.
std::vector<std::pair<std::string, std::uint64_t>> CountTiers(const std::vector<Tier>& tiers);

}  // namespace kvmill::cli

#endif  // KVMILL_CLIENT_CLI_SEQUENCE_LOOKUP_H_
