// How the command line names blocks. Engines hash tokens; kvmill's own commands only see K and V,
// so they derive keys from the name of a sequence and the block's number in it:
//
//   key(n) = SHA-256( "kvmill-cli-1" | 0x00 | u64le(length of ID) | ID | key(n-1) | u64le(n) )
//
// with nothing in place of key(-1): 32 bytes, chained, so that a key stands for the whole prefix.
// The namespace says hash_scheme = "kvmill-cli-1". The content is not in the key: one sequence name
// must always mean the same tokens.
#ifndef KVMILL_CLIENT_CLI_BLOCK_KEYS_H_
#define KVMILL_CLIENT_CLI_BLOCK_KEYS_H_

#include <cstddef>
#include <vector>

#include "absl/strings/string_view.h"
#include "storage/core/block_key.h"

namespace kvmill::cli {

inline constexpr absl::string_view kHashScheme = "kvmill-cli-1";

// Keys of blocks 0 .. block_count - 1 of a sequence, in order.
std::vector<BlockKey> SequenceKeys(absl::string_view sequence, std::size_t block_count);

}  // namespace kvmill::cli

#endif  // KVMILL_CLIENT_CLI_BLOCK_KEYS_H_
