// Whole tensors to records and back: what `kvmill encode` and `kvmill decode` do, without a daemon.
#ifndef KVMILL_CLIENT_CLI_TILE_CODEC_H_
#define KVMILL_CLIENT_CLI_TILE_CODEC_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "client/cli/npy.h"
#include "client/cli/raw_heads.h"
#include "kernels/encode.h"
#include "kernels/refine.h"
#include "kernels/tile_format.h"
#include "storage/device/device.h"

namespace kvmill::cli {

enum class Encoder : std::uint8_t { kReference, kCpu, kDevice };

struct EncodedTensors {
  std::uint32_t block_count = 0;  // Whole blocks; the tail is not encoded.
  std::uint32_t tail_tokens = 0;
  std::string records;             // Block-major, then head-major; zeros for a head that stays raw.
  std::vector<RawHead> raw_heads;  // Ascending by block, then head.
  double rel_error_k = 0;  // Frobenius norm of the difference over all heads in tiles / of the
  double rel_error_v = 0;  // input, in the model frame; 0 when both are 0.
};

// K and V must have the same shape, and head_dim that of the format. INVALID_ARGUMENT otherwise,
// and for NaN or infinity (naming token, head and channel). kDevice encodes on `device`, and passes
// on its errors; UNIMPLEMENTED with kRefined.
absl::StatusOr<EncodedTensors> EncodeTensors(const Tensor& k, const Tensor& v,
                                             const TileFormat& format, Encoder encoder,
                                             Device* device = nullptr,
                                             Algorithm algorithm = Algorithm::kKvarn);

struct DecodedTensors {
  std::uint32_t block_count = 0;
  Tensor k;
  Tensor v;
};

// `raw_heads` replace the records of their block and head. INVALID_ARGUMENT when `records` is not a
// whole number of blocks, or holds a scale that is not finite: then it is damaged, or not records
// of this format.
absl::StatusOr<DecodedTensors> DecodeRecords(absl::string_view records, const TileFormat& format,
                                             std::uint32_t heads, DType dtype, Frame frame,
                                             const std::vector<RawHead>& raw_heads);

}  // namespace kvmill::cli

#endif  // KVMILL_CLIENT_CLI_TILE_CODEC_H_
