// One chunk of a store of pages: layers and heads of a block that lie in the engine's shared
// memory, or on the GPU, encoded from there. Functions are thread-safe.
#ifndef KVMILL_SERVICE_PAGE_CHUNK_H_
#define KVMILL_SERVICE_PAGE_CHUNK_H_

#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kvmill/v1/cache.pb.h"
#include "service/engine_memory.h"
#include "storage/block_writer.h"
#include "storage/tiered_store.h"

namespace kvmill {

// INVALID_ARGUMENT when the memory has not these layers and heads in one of its entries, or not
// these pages, or the chunk is of another kind; FAILED_PRECONDITION when their region is not
// shared, or K and V of a layer are not both on the GPU. IdentityOfChunk (store_chunk.h) was OK.
absl::Status CheckPageChunk(const TieredStore::NamespaceInfo& ns, const EngineMemory& memory,
                            const v1::StoreChunk& head);

// Of a chunk that passed, on the calling thread, or on a stream of the GPU that it waits for. The
// values are read in place, once, before it returns; the engine may write there meanwhile, and then
// has a block of its own garbage, but a well-formed one. Errors are those of BlockWriter.
absl::StatusOr<WriteResult> WritePageChunk(const TieredStore::NamespaceInfo& ns,
                                           const EngineMemory& memory, const v1::StoreChunk& head,
                                           BlockWriter& writer);

// Whether the (first) layer of a chunk that passed is on the GPU.
bool IsOnGpu(const EngineMemory& memory, const v1::StoreChunk& head);

// Bytes that WritePageChunk reads.
std::uint64_t BytesOfPageChunk(const TieredStore::NamespaceInfo& ns, const v1::StoreChunk& head);

}  // namespace kvmill

#endif  // KVMILL_SERVICE_PAGE_CHUNK_H_
