// The file that takes the heads which a tile cannot hold (`kvmill encode --raw-out FILE`, `kvmill
// decode --raw-in FILE`).
//
//   RawHeadsHeader (48 bytes) | raw_head_count x { u32 block, u32 head, K values, V values }
//
// K and V are 16-bit values, token-major [group, head_dim], in the dtype of the input and in its
// frame. Entries ascend by block, then head. Everything is little-endian; docs/formats.md has the
// same.
#ifndef KVMILL_CLIENT_CLI_RAW_HEADS_H_
#define KVMILL_CLIENT_CLI_RAW_HEADS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "kernels/float16.h"
#include "kernels/tile_format.h"

namespace kvmill::cli {

inline constexpr std::uint32_t kRawHeadsMagic = 0x57524D4B;  // "KMRW" in memory.
inline constexpr std::uint16_t kRawHeadsVersion = 1;

struct RawHeadsHeader {
  std::uint32_t magic;
  std::uint16_t version;
  std::uint16_t dtype;  // DType.
  std::uint32_t block_tokens;
  std::uint32_t head_dim;
  std::uint32_t head_count;   // Heads of the tensors.
  std::uint32_t block_count;  // Blocks of the records file.
  std::uint64_t raw_head_count;
  std::uint64_t reserved;  // 0.
  std::uint64_t checksum;  // XXH3-64 of the whole file with this field 0.
};
static_assert(sizeof(RawHeadsHeader) == 48);

struct RawHead {
  std::uint32_t block = 0;
  std::uint32_t head = 0;
  std::vector<std::uint16_t> k;  // [group, head_dim]
  std::vector<std::uint16_t> v;
};

// The bytes of the file. `format` gives block_tokens and head_dim.
std::string SerializeRawHeads(const std::vector<RawHead>& raw_heads, const TileFormat& format,
                              DType dtype, std::uint32_t heads, std::uint32_t block_count);

struct RawHeads {
  DType dtype = DType::kFloat16;
  std::uint32_t block_count = 0;
  std::vector<RawHead> heads;
};

// INVALID_ARGUMENT when the bytes are not such a file or of another geometry than `format` and
// `heads`; DATA_LOSS when the checksum differs.
absl::StatusOr<RawHeads> ParseRawHeads(absl::string_view bytes, const TileFormat& format,
                                       std::uint32_t heads);

}  // namespace kvmill::cli

#endif  // KVMILL_CLIENT_CLI_RAW_HEADS_H_
