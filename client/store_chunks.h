// The chunks of a Store: in which order a client's blocks are cut into pieces, and the bytes of a
// piece as they travel. Internal to client/.
#ifndef KVMILL_CLIENT_STORE_CHUNKS_H_
#define KVMILL_CLIENT_STORE_CHUNKS_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "client/client.h"
#include "kvmill/v1/cache.pb.h"

namespace kvmill {

// Some layers and heads of one (block, layer group).
struct StorePiece {
  std::uint32_t block = 0;
  std::uint32_t group = 0;
  std::uint32_t layer_begin = 0;  // Within the group.
  std::uint32_t layer_count = 0;
  std::uint32_t head_begin = 0;  // Within the heads that the LayerInputs hold.
  std::uint32_t head_count = 0;
  bool records = false;
  bool last = false;  // Of its (block, layer group).
};

// What travels of a piece, or of a part of it.
struct StoreChunk {
  v1::StoreChunk head;
  std::vector<absl::Span<const std::byte>> bytes;
  std::unique_ptr<std::byte[]> own;  // What of `bytes` is not the caller's memory.
  std::uint64_t raw_bytes = 0;       // 16-bit bytes of what it holds.
};

// Pure but for its arguments' memory; thread-safe.
class StorePieces {
 public:
  // All outlive it. `bytes_max`: of one piece, unless one head of one layer has more.
  StorePieces(const ClientNamespace& ns, absl::Span<const StoreBlock> blocks,
              const StoreOptions& options, std::size_t bytes_max);

  // The piece after `piece`; false when that was the last one. Start with First.
  StorePiece First() const;
  bool Next(StorePiece* piece) const;
  // The same, but skips the rest of its (block, layer group).
  bool NextGroup(StorePiece* piece) const;

  // What stands before the piece's bytes.
  v1::StoreChunk HeadOf(const StorePiece& piece) const;

  // Whether a block is kept as tiles, so that a client may encode it.
  bool MayEncode(const StorePiece& piece) const;

  // The piece as it is. References the caller's memory where runs are long enough.
  StoreChunk Gather(const StorePiece& piece) const;
  // Encoded on the calling thread: records, and what no tile can hold in 16 bits. INVALID_ARGUMENT
  // names a value that is not finite.
  absl::Status Encode(const StorePiece& piece, std::vector<StoreChunk>* chunks) const;

 private:
  StorePiece At(std::uint32_t block, std::uint32_t group, std::uint32_t layer,
                std::uint32_t head) const;
  std::uint32_t HeadsOf(const LayerGroup& group) const;
  const LayerInput* LayersOf(const StorePiece& piece) const;

  const ClientNamespace& ns_;
  const absl::Span<const StoreBlock> blocks_;
  const StoreOptions& options_;
  const std::size_t bytes_max_;
  std::vector<std::size_t> group_begin_;  // First layer of each group.
};

}  // namespace kvmill

#endif  // KVMILL_CLIENT_STORE_CHUNKS_H_
