#include "storage/head_source.h"

#include "kernels/refine.h"
#include "storage/core/encode_scratch.h"
#include "storage/core/status_macros.h"

namespace kvmill {

absl::Status HostHeads::Encode(const TileFormat& format, Frame frame,
                               absl::Span<const EncodeArgs> tiles,
                               absl::Span<EncodeResult> results) {
  CpuEncoderOf(algorithm_)(format, frame, tiles, results, EncodeScratch(format));
  return absl::OkStatus();
}

absl::StatusOr<HeadInput> HostHeads::OnHost(const HeadInput& input, std::uint32_t, std::uint32_t) {
  return input;
}

absl::Status DeviceHeads::Encode(const TileFormat& format, Frame frame,
                                 absl::Span<const EncodeArgs> tiles,
                                 absl::Span<EncodeResult> results) {
  return encoder_.Encode(format, frame, tiles, ready_, results);
}

absl::StatusOr<HeadInput> DeviceHeads::OnHost(const HeadInput& input, std::uint32_t token_count,
                                              std::uint32_t head_dim) {
  KVMILL_RETURN_IF_ERROR(encoder_.ReadHead(input.k, token_count, head_dim, ready_, &k_));
  KVMILL_RETURN_IF_ERROR(encoder_.ReadHead(input.v, token_count, head_dim, ready_, &v_));
  return HeadInput{k_.head, v_.head};
}

}  // namespace kvmill
