// The oracle: (q * S + Z) * T in fp32, one value at a time.
#include <cstring>

#include "kernels/decode.h"
#include "kernels/hadamard.h"
#include "kernels/packed_codes.h"

namespace kvmill {
namespace {

void DecodeKeys(const TileFormat& format, Frame frame, const std::byte* record, float* out) {
  const RecordLayout layout = LayoutOf(format);
  const std::size_t row_bytes = std::size_t{format.group} * format.key_bits / 8;
  for (std::size_t t = 0; t < format.group; ++t) {
    const float across = Float16At(record + layout.k_token, t);
    for (std::size_t d = 0; d < format.head_dim; ++d) {
      const auto q = static_cast<float>(
          CodeAt(record + layout.k_codes + d * row_bytes, t, format.key_bits, format.group));
      const float scale = Float16At(record + layout.k_scale, d);
      const float zero = Float16At(record + layout.k_zero, d);
      out[t * format.head_dim + d] = (q * scale + zero) * across;
    }
  }
  if (frame == Frame::kModel) RotateRowsReference(out, format.group, format.head_dim);
}

void DecodeValues(const TileFormat& format, Frame frame, const std::byte* record, float* out) {
  const RecordLayout layout = LayoutOf(format);
  const std::size_t row_bytes = std::size_t{format.head_dim} * format.value_bits / 8;
  for (std::size_t t = 0; t < format.group; ++t) {
    const float scale = Float16At(record + layout.v_scale, t);
    const float zero = Float16At(record + layout.v_zero, t);
    for (std::size_t d = 0; d < format.head_dim; ++d) {
      const auto q = static_cast<float>(
          CodeAt(record + layout.v_codes + t * row_bytes, d, format.value_bits, format.head_dim));
      const float across = Float16At(record + layout.v_channel, d);
      out[t * format.head_dim + d] = (q * scale + zero) * across;
    }
  }
  if (frame == Frame::kModel) RotateRowsReference(out, format.group, format.head_dim);
}

void Scatter(const TileFormat& format, const float* rows, const MutableHeadPages& pages) {
  for (std::uint32_t t = 0; t < format.group; ++t) {
    std::byte* row = pages.Row(t);
    for (std::uint32_t d = 0; d < format.head_dim; ++d) {
      const std::uint16_t bits = FromFloat(rows[std::size_t{t} * format.head_dim + d], pages.dtype);
      std::memcpy(row + static_cast<std::ptrdiff_t>(d) * pages.channel_stride_bytes, &bits,
                  sizeof(bits));
    }
  }
}

}  // namespace

void DecodeTilesReference(const TileFormat& format, Frame frame, absl::Span<const DecodeArgs> tiles,
                          absl::Span<std::byte> scratch) {
  auto* rows = reinterpret_cast<float*>(scratch.data());
  for (const DecodeArgs& tile : tiles) {
    DecodeKeys(format, frame, tile.record, rows);
    Scatter(format, rows, tile.k);
    DecodeValues(format, frame, tile.record, rows);
    Scatter(format, rows, tile.v);
  }
}

void DecodeTileToFloatReference(const TileFormat& format, Frame frame, const std::byte* record,
                                absl::Span<float> k, absl::Span<float> v) {
  DecodeKeys(format, frame, record, k.data());
  DecodeValues(format, frame, record, v.data());
}

}  // namespace kvmill
