// The decoders where golden tiles do not reach: every format at every SIMD level against the
// reference, and where they write.
#include "kernels/decode.h"

#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "kernels/hadamard.h"
#include "tests/kernels/implementations.h"
#include "tests/kernels/tile_testing.h"

namespace kvmill {
namespace {

// Random codes; scales of either sign and of very different size, subnormals included.
std::vector<std::byte> RandomRecord(const TileFormat& format, std::uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<std::byte> record(RecordBytes(format));
  for (std::byte& b : record) b = static_cast<std::byte>(random());
  const RecordLayout l = LayoutOf(format);
  const auto scales = [&](std::size_t offset, std::size_t count, float size) {
    std::normal_distribution<float> gauss(0, size);
    for (std::size_t i = 0; i < count; ++i) {
      PutFloat16(record.data() + offset, i, FloatToFloat16(gauss(random)));
    }
  };
  scales(l.k_scale, format.head_dim, 0.3f);
  scales(l.k_zero, format.head_dim, 2.0f);
  scales(l.k_token, format.group, 1.0f);
  scales(l.v_channel, format.head_dim, 1e-4f);
  scales(l.v_scale, format.group, 1e-5f);
  scales(l.v_zero, format.group, 1e-4f);
  return record;
}

class DecodeTest : public testing::TestWithParam<std::size_t> {
 protected:
  DecodeTest() { with().Select(); }
  static const Implementation& with() { return AllImplementations()[GetParam()]; }
};

TEST_P(DecodeTest, EveryFormatDecodesAsTheReferenceDoes) {
  for (std::size_t i = 0; i < kTileFormatCount; ++i) {
    const TileFormat format = TileFormatAt(i);
    SCOPED_TRACE(testing::Message() << ToString(format) << " d" << format.head_dim);
    const std::vector<std::byte> record = RandomRecord(format, static_cast<std::uint32_t>(i));
    for (const Frame frame : {Frame::kModel, Frame::kRotated}) {
      const Decoded want = Decode(ReferenceImplementation(), format, record, frame);
      const Decoded got = Decode(with(), format, record, frame);
      EXPECT_LE(RelativeError(got.k, want.k), 1e-6);
      EXPECT_LE(RelativeError(got.v, want.v), 1e-6);
    }
  }
}

// The formula of the header, straight from the record.
TEST_P(DecodeTest, RotatedValuesAreCodeTimesScalePlusZeroTimesTheOtherAxis) {
  TileFormat format;
  format.key_bits = 2;
  format.value_bits = 4;
  format.group = 64;
  format.head_dim = 256;
  const RecordLayout l = LayoutOf(format);
  const std::vector<std::byte> record = RandomRecord(format, 1);
  const Decoded got = Decode(with(), format, record, Frame::kRotated);
  const std::byte* r = record.data();
  for (const std::size_t t : {0u, 1u, 17u, 63u}) {
    for (const std::size_t d : {0u, 1u, 100u, 255u}) {
      const auto k_byte = static_cast<unsigned>(r[l.k_codes + d * 16 + t / 4]);
      const auto k_code = static_cast<float>((k_byte >> (t % 4 * 2)) & 3);
      EXPECT_FLOAT_EQ(got.k[t * 256 + d],
                      (k_code * Float16At(r + l.k_scale, d) + Float16At(r + l.k_zero, d)) *
                          Float16At(r + l.k_token, t));
      const auto v_byte = static_cast<unsigned>(r[l.v_codes + t * 128 + d / 2]);
      const auto v_code = static_cast<float>((v_byte >> (d % 2 * 4)) & 15);
      EXPECT_FLOAT_EQ(got.v[t * 256 + d],
                      (v_code * Float16At(r + l.v_scale, t) + Float16At(r + l.v_zero, t)) *
                          Float16At(r + l.v_channel, d));
    }
  }
}

struct Geometry {
  const char* name;
  std::uint32_t page_tokens;
  std::ptrdiff_t channel_stride_bytes;
  std::size_t row_padding_bytes, page_padding_bytes, offset_bytes;
};

constexpr Geometry kGeometries[] = {
    {"one page", 128, 2, 0, 0, 0},
    {"padded pages of 16", 16, 2, 30, 126, 64},
    {"nothing aligned", 16, 2, 3, 7, 5},
    {"channels apart", 32, 6, 0, 0, 2},
    {"pages that do not divide the block", 48, 2, 0, 0, 0},
};

constexpr std::byte kUntouched{0xA5};

struct PagedOutput {
  std::vector<std::vector<std::byte>> storage;
  std::vector<std::byte*> pages;
  MutableHeadPages view;

  PagedOutput(const Geometry& g, const TileFormat& format, DType dtype) {
    const std::size_t row_bytes =
        format.head_dim * static_cast<std::size_t>(g.channel_stride_bytes) + g.row_padding_bytes;
    for (std::uint32_t t = 0; t < format.group; t += g.page_tokens) {
      storage.emplace_back(g.offset_bytes + g.page_tokens * row_bytes + g.page_padding_bytes,
                           kUntouched);
    }
    for (std::vector<std::byte>& page : storage) pages.push_back(page.data());
    view = {pages.data(),           g.offset_bytes,
            g.page_tokens,          static_cast<std::ptrdiff_t>(row_bytes),
            g.channel_stride_bytes, dtype};
  }

  // Takes the values out, leaving kUntouched behind.
  std::vector<std::uint16_t> Take(const TileFormat& format) {
    std::vector<std::uint16_t> values;
    for (std::uint32_t t = 0; t < format.group; ++t) {
      for (std::uint32_t d = 0; d < format.head_dim; ++d) {
        std::byte* at = view.Row(t) + static_cast<std::ptrdiff_t>(d) * view.channel_stride_bytes;
        std::uint16_t bits;
        std::memcpy(&bits, at, 2);
        values.push_back(bits);
        at[0] = at[1] = kUntouched;
      }
    }
    return values;
  }

  bool IsUntouched() const {
    for (const std::vector<std::byte>& page : storage) {
      for (const std::byte b : page) {
        if (b != kUntouched) return false;
      }
    }
    return true;
  }
};

std::vector<std::uint16_t> Rounded(const std::vector<float>& values, DType dtype) {
  std::vector<std::uint16_t> out;
  for (const float x : values) out.push_back(FromFloat(x, dtype));
  return out;
}

TEST_P(DecodeTest, PagesHoldTheRoundedFloatsAndNothingElseIsWritten) {
  for (const std::size_t i : {1u, 7u, 12u, 18u}) {
    const TileFormat format = TileFormatAt(i);
    const std::vector<std::byte> record = RandomRecord(format, 3);
    for (const Frame frame : {Frame::kModel, Frame::kRotated}) {
      const Decoded want = Decode(with(), format, record, frame);
      for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
        for (const Geometry& g : kGeometries) {
          SCOPED_TRACE(testing::Message() << ToString(format) << ", " << g.name);
          PagedOutput k(g, format, dtype);
          PagedOutput v(g, format, dtype);
          const DecodeArgs args{record.data(), k.view, v.view};
          Scratch scratch(DecodeScratchBytes(format));
          with().decode(format, frame, {&args, 1}, scratch.span());
          EXPECT_EQ(k.Take(format), Rounded(want.k, dtype));
          EXPECT_EQ(v.Take(format), Rounded(want.v, dtype));
          EXPECT_TRUE(k.IsUntouched());
          EXPECT_TRUE(v.IsUntouched());
        }
      }
    }
  }
}

TEST_P(DecodeTest, RecordsNeedNoAlignmentAndABatchIsItsTilesOneByOne) {
  const TileFormat format;
  std::vector<std::byte> bytes(1);
  constexpr std::size_t kTiles = 3;
  for (std::uint32_t seed = 0; seed < kTiles; ++seed) {
    const std::vector<std::byte> record = RandomRecord(format, seed);
    bytes.insert(bytes.end(), record.begin(), record.end());
    bytes.emplace_back();  // The next one is off by another byte.
  }
  std::vector<PagedOutput> outputs;
  for (std::size_t i = 0; i < 2 * kTiles; ++i) {
    outputs.emplace_back(kGeometries[1], format, DType::kFloat16);
  }
  std::vector<DecodeArgs> args(kTiles);
  for (std::size_t i = 0; i < kTiles; ++i) {
    args[i] = {bytes.data() + 1 + i * (RecordBytes(format) + 1), outputs[2 * i].view,
               outputs[2 * i + 1].view};
  }
  Scratch scratch(DecodeScratchBytes(format));
  with().decode(format, Frame::kModel, args, scratch.span());
  for (std::size_t i = 0; i < kTiles; ++i) {
    const Decoded want =
        Decode(with(), format, RandomRecord(format, static_cast<std::uint32_t>(i)), Frame::kModel);
    EXPECT_EQ(outputs[2 * i].Take(format), Rounded(want.k, DType::kFloat16));
    EXPECT_EQ(outputs[2 * i + 1].Take(format), Rounded(want.v, DType::kFloat16));
  }
}

// Halves overflow to infinity and vanish to zero as the scalar conversion does, at every level.
TEST_P(DecodeTest, ValuesOutsideTheRangeOfHalvesRoundAsTheScalarConversion) {
  const TileFormat format;
  const RecordLayout l = LayoutOf(format);
  std::vector<std::byte> record = RandomRecord(format, 9);
  for (std::size_t d = 0; d < format.head_dim; ++d) {
    PutFloat16(record.data() + l.k_scale, d, FloatToFloat16(static_cast<float>(d + 1) * 50.0f));
    PutFloat16(record.data() + l.v_channel, d, static_cast<std::uint16_t>(d + 1));  // Subnormal.
  }
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
    const Decoded want = Decode(with(), format, record, Frame::kRotated);
    PagedOutput k(kGeometries[0], format, dtype);
    PagedOutput v(kGeometries[0], format, dtype);
    const DecodeArgs args{record.data(), k.view, v.view};
    Scratch scratch(DecodeScratchBytes(format));
    with().decode(format, Frame::kRotated, {&args, 1}, scratch.span());
    EXPECT_EQ(k.Take(format), Rounded(want.k, dtype));
    EXPECT_EQ(v.Take(format), Rounded(want.v, dtype));
  }
}

INSTANTIATE_TEST_SUITE_P(AllImplementations, DecodeTest,
                         testing::Range(std::size_t{0}, AllImplementations().size()),
                         [](const auto& param) { return AllImplementations()[param.param].name; });

}  // namespace
}  // namespace kvmill
