// One chunk of a block on its way into the store, however it arrived: what it is of, whether it
// fits, and the writing. Functions are thread-safe.
#ifndef KVMILL_SERVICE_STORE_CHUNK_H_
#define KVMILL_SERVICE_STORE_CHUNK_H_

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kvmill/v1/cache.pb.h"
#include "storage/block_writer.h"
#include "storage/tiered_store.h"

namespace kvmill {

// INVALID_ARGUMENT for a layer group or token_count that the namespace does not have, or a bad key.
absl::Status IdentityOfChunk(const TieredStore::NamespaceInfo& ns, const v1::StoreChunk& head,
                             BlockId* id, BlockOrigin* origin);

// INVALID_ARGUMENT when layers, heads, kind or length do not fit. IdentityOfChunk was OK.
absl::Status CheckChunk(const TieredStore::NamespaceInfo& ns, const v1::StoreChunk& head,
                        std::uint64_t bulk_bytes);

// Encodes or copies a chunk that passed CheckChunk, on the calling thread; `pieces` are its bytes
// in order. Errors are those of BlockWriter.
absl::StatusOr<WriteResult> WriteChunk(const TieredStore::NamespaceInfo& ns,
                                       const v1::StoreChunk& head,
                                       absl::Span<const absl::Span<const std::byte>> pieces,
                                       BlockWriter& writer);

// 16-bit bytes of what the chunk holds, whatever its kind.
std::uint64_t RawBytesOfChunk(const TieredStore::NamespaceInfo& ns, const v1::StoreChunk& head);

// What a further part of the same chunk wrote.
void AddTo(const WriteResult& part, WriteResult* total);

// Into the result of a block that this write completed.
void FillSealed(const WriteResult& sealed, v1::StoreResult* result);

}  // namespace kvmill

#endif  // KVMILL_SERVICE_STORE_CHUNK_H_
