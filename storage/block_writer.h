// Writing one block into the tiered store, head by head, from any number of threads.
#ifndef KVMILL_STORAGE_BLOCK_WRITER_H_
#define KVMILL_STORAGE_BLOCK_WRITER_H_

#include <cstddef>
#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kernels/engine_pages.h"
#include "storage/core/block_key.h"

namespace kvmill {

class DeviceEncoder;  // storage/device_encoder.h
class DeviceEvent;    // storage/device/device.h

// What the engine says of a block besides its key. Writers of the same block must agree.
struct BlockOrigin {
  BlockKey parent;                // Empty for the first block of a sequence.
  std::uint32_t token_count = 0;  // block_tokens, or less for a tail (which is stored raw, under
                                  // TailKey(parent, token_count, tail_key)).
  std::uint32_t block_index =
      0;  // Position in its sequence; blocks below the namespace's sink_blocks are stored raw.
  BlockKey tail_key;  // Of a tail: the engine's key. Whole blocks have it in their BlockId.

  // Of a copy from another node, whose parents need not be here.
  bool index_known = true;        // Whether block_index is; modulo kRunBlocks is enough.
  std::uint64_t anchor_hash = 0;  // KeyHash of the first block of its run; 0: not known. With a
                                  // known index only.

  friend bool operator==(const BlockOrigin&, const BlockOrigin&) = default;
};

// K and V of one head, in the namespace's source dtype and frame.
struct HeadInput {
  HeadPages k;
  HeadPages v;
};

struct WriteResult {
  std::uint32_t written_heads = 0;   // (layer, head) records that this call wrote.
  std::uint32_t existing_heads = 0;  // That another writer had written or was writing.
  std::uint32_t raw_heads = 0;  // Of the written: stored raw because a tile cannot hold the values.
  bool sealed = false;          // This call completed the block.
  std::uint64_t block_stored_bytes = 0;    // When sealed: bytes of all its pages.
  std::uint64_t block_tile_bytes = 0;      // When sealed: bytes of its records,
  std::uint64_t block_tile_raw_bytes = 0;  // and the 16-bit bytes of the same tokens and heads.
  std::uint32_t block_raw_heads = 0;       // When sealed: heads of the block that are raw.
};

// Handle to a block being assembled. Copyable; all copies and all writers of the key share the
// assembly. Dropping it keeps what was written for other writers (until the store's assembly
// timeout). Thread-safe.
class BlockWriter {
 public:
  // `layer` is the index within the layer group (not the model's layer number). Encodes heads
  // head_begin .. head_begin + heads.size() - 1 on the calling thread, straight into the page. The
  // inputs are read only during the call. INVALID_ARGUMENT: layer or head range out of bounds, or a
  // non-finite value (named by token, head, channel): the whole block is given up, nothing of it
  // becomes visible. ABORTED: the block was given up (by another writer's error, time-out or
  // removal). ALREADY_EXISTS: the block was sealed before the call.
  absl::StatusOr<WriteResult> WriteHeads(std::uint32_t layer, std::uint32_t head_begin,
                                         absl::Span<const HeadInput> heads);

  // The same for heads whose pages lie in a device's memory; only their lists of pages are in host
  // memory. They are encoded there, after what was recorded into `ready`, an event of that device,
  // before the call (null: they are complete). Other errors are the device's: then the block is
  // given up.
  absl::StatusOr<WriteResult> WriteDeviceHeads(std::uint32_t layer, std::uint32_t head_begin,
                                               absl::Span<const HeadInput> heads,
                                               DeviceEncoder& encoder, DeviceEvent* ready);

  // A head that already is a record (an engine with KVarN pages). Its scales must be finite:
  // INVALID_ARGUMENT otherwise. Only for blocks that are stored as tiles.
  absl::StatusOr<WriteResult> WriteRecord(std::uint32_t layer, std::uint32_t head,
                                          absl::Span<const std::byte> record);

 private:
  friend class AssemblyHost;
  friend class BlockHold;
  friend class TieredStore;
  struct Assembly;
  explicit BlockWriter(std::shared_ptr<Assembly> assembly);
  // Shared: writers on several threads, the store's table of assemblies and its time-out all hold
  // it.
  std::shared_ptr<Assembly> assembly_;
};

}  // namespace kvmill

#endif  // KVMILL_STORAGE_BLOCK_WRITER_H_
