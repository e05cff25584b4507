// A prompt of the small model from the process that computed its K and V to one that goes on,
// through a daemon, as engines do it.
#ifndef KVMILL_CLIENT_EVAL_HANDOVER_H_
#define KVMILL_CLIENT_EVAL_HANDOVER_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "client/client.h"
#include "client/eval/kv_cache.h"
#include "client/eval/tile_cache.h"
#include "client/eval/tiny_model.h"

namespace kvmill::eval {

// key(n) = SHA-256("kvmill-tiny-1" | 0x00 | key(n-1) | tokens of block n, a byte each); the last
// one is an unfinished block's own when there is one.
std::vector<BlockKey> TokenKeys(absl::Span<const Token> tokens, std::uint32_t block_tokens);

// K and V of `tokens`, the first of the recording, in 16 bits: whole blocks and a tail. The first
// failure of a block is the call's.
absl::StatusOr<StoreResult> StorePrompt(Client& client, const ClientNamespace& ns,
                                        absl::Span<const Token> tokens, const Recording& recording,
                                        const StoreOptions& options);

struct FetchedPrompt {
  std::uint32_t tokens = 0;  // That `cache` has now; 0: a miss.
  std::vector<Tier> tiers;   // Of the whole blocks among them, where the lookup found them.
  std::uint64_t page_bytes = 0;
};
// What is there of `tokens` goes into `cache`, which is empty and of the namespace's format.
absl::StatusOr<FetchedPrompt> FetchPrompt(Client& client, const ClientNamespace& ns,
                                          absl::Span<const Token> tokens, TileCache& cache);

}  // namespace kvmill::eval

#endif  // KVMILL_CLIENT_EVAL_HANDOVER_H_
