#include "client/eval/kvarn.h"

#include <algorithm>
#include <cstddef>

#include "kernels/decode.h"
#include "kernels/engine_pages.h"
#include "kernels/hadamard.h"
#include "storage/core/encode_scratch.h"

namespace kvmill::eval {
namespace {

// Bits of K or of V in a record: codes, S and Z a row, T a column.
std::uint64_t HalfBits(const TileFormat& format, Half half) {
  const RecordLayout layout = LayoutOf(format);
  return std::uint64_t{8} * (half == Half::kKey ? layout.v_codes : layout.bytes - layout.v_codes);
}

class Kvarn : public Quantizer {
 public:
  Kvarn(const TileFormat& format, Algorithm algorithm) : format_(format), algorithm_(algorithm) {}

  Decoded Quantize(Half half, const HeadValues& head) const override {
    const std::size_t block_values = std::size_t{format_.group} * format_.head_dim;
    std::vector<std::uint16_t> bits(block_values);
    const std::vector<std::uint16_t> zeros(block_values, 0);
    std::vector<std::byte> record(RecordBytes(format_));
    std::vector<float> other(block_values);
    const absl::Span<std::byte> scratch = EncodeScratch(format_);
    const bool key = half == Half::kKey;
    Decoded out;
    out.values.resize(head.values.size());
    for (std::size_t at = 0; at < head.values.size(); at += block_values) {
      for (std::size_t i = 0; i < block_values; ++i) {
        bits[i] = FromFloat(head.values[at + i], head.dtype);
      }
      const auto* page = reinterpret_cast<const std::byte*>(bits.data());
      const auto* zero_page = reinterpret_cast<const std::byte*>(zeros.data());
      HeadPages mine, none;
      mine.pages = &page;
      mine.page_tokens = format_.group;
      mine.token_stride_bytes = std::ptrdiff_t{2} * format_.head_dim;
      mine.dtype = head.dtype;
      none = mine;
      none.pages = &zero_page;
      const EncodeArgs args{key ? mine : none, key ? none : mine, record.data()};
      EncodeResult result = EncodeResult::kRaw;
      const auto encode = CpuEncoderOf(algorithm_);
      encode(format_, Frame::kModel, absl::MakeConstSpan(&args, 1), absl::MakeSpan(&result, 1),
             scratch);
      const absl::Span<float> decoded = absl::MakeSpan(out.values).subspan(at, block_values);
      if (result != EncodeResult::kTile) {
        std::copy_n(head.values.begin() + static_cast<std::ptrdiff_t>(at), block_values,
                    decoded.begin());
        out.bits += 16 * block_values;
        ++out.raw_blocks;
        continue;
      }
      DecodeTileToFloatCpu(format_, Frame::kModel, record.data(),
                           key ? decoded : absl::MakeSpan(other),
                           key ? absl::MakeSpan(other) : decoded);
      out.bits += HalfBits(format_, half);
    }
    return out;
  }

 private:
  const TileFormat format_;
  const Algorithm algorithm_;
};

class KvarnWith : public Quantizer {
 public:
  KvarnWith(const TileFormat& format, const KvarnOptions& options)
      : format_(format), options_(options) {}

  Decoded Quantize(Half half, const HeadValues& head) const override {
    const bool key = half == Half::kKey;
    const std::size_t group = format_.group, dim = format_.head_dim;
    const std::uint32_t bits = key ? format_.key_bits : format_.value_bits;
    Decoded out;
    out.values.resize(head.values.size());
    for (std::size_t at = 0; at < head.values.size(); at += group * dim) {
      const absl::Span<const float> block = head.values.subspan(at, group * dim);
      float* decoded = out.values.data() + at;
      const KvarnHalf tile =
          EncodeKvarnHalf(half, block, format_.group, format_.head_dim, bits, options_);
      if (tile.raw) {
        std::copy(block.begin(), block.end(), decoded);
        out.bits += 16 * block.size();
        ++out.raw_blocks;
        continue;
      }
      const std::size_t columns = tile.across.size();
      for (std::size_t t = 0; t < group; ++t) {
        for (std::size_t d = 0; d < dim; ++d) {
          const std::size_t row = key ? d : t, column = key ? t : d;
          const auto code = static_cast<float>(tile.codes[row * columns + column]);
          decoded[t * dim + d] =
              (code * Float16ToFloat(tile.scale[row]) + Float16ToFloat(tile.zero[row])) *
              Float16ToFloat(tile.across[column]);
        }
      }
      if (options_.rotate) RotateRowsReference(decoded, group, dim);
      // T is all ones, and needs not be stored, when the axis of the columns is left alone.
      const bool across =
          options_.iterations > 0 && (key ? options_.token_axis : options_.channel_axis);
      out.bits += tile.codes.size() * bits + 32 * tile.scale.size() + (across ? 16 * columns : 0);
    }
    return out;
  }

 private:
  const TileFormat format_;
  const KvarnOptions options_;
};

}  // namespace

std::unique_ptr<Quantizer> MakeKvarn(const TileFormat& format, Algorithm algorithm) {
  return std::make_unique<Kvarn>(format, algorithm);
}

std::unique_ptr<Quantizer> MakeKvarnWith(const TileFormat& format, const KvarnOptions& options) {
  return std::make_unique<KvarnWith>(format, options);
}

}  // namespace kvmill::eval
