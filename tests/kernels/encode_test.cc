// What the encoders promise apart from the codes: where they read and write, what they refuse.
// Every test runs on the reference, on the cpu encoder at every SIMD level, and on the CUDA
// encoder.
#include "kernels/encode.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "tests/kernels/implementations.h"
#include "tests/kernels/tile_inputs.h"
#include "tests/kernels/tile_testing.h"

namespace kvmill {
namespace {

constexpr std::uint16_t kHalfInfinity = 0x7C00;
constexpr std::uint16_t kHalfNan = 0x7E01;

class EncodeTest : public testing::TestWithParam<std::size_t> {
 protected:
  EncodeTest() { with().Select(); }

  static const Implementation& with() { return AllImplementations()[GetParam()]; }

  // K is what the caller made; V is Gaussian. And the other way round.
  EncodeResult EncodeKeys(const std::vector<float>& values, DType dtype = DType::kFloat16,
                          Frame frame = Frame::kModel) {
    return EncodeWith(values, dtype, frame, &TileInput::k);
  }
  EncodeResult EncodeValues(const std::vector<float>& values, DType dtype = DType::kFloat16,
                            Frame frame = Frame::kModel) {
    return EncodeWith(values, dtype, frame, &TileInput::v);
  }

  std::vector<float> Gaussian(float deviation, std::uint32_t seed = 3) const {
    std::mt19937 random(seed);
    std::vector<float> values = MakeValues(format_, InputKind::kGaussian, random);
    for (float& x : values) x *= deviation;
    return values;
  }
  std::vector<float> All(float value) const {
    return std::vector<float>(std::size_t{format_.group} * format_.head_dim, value);
  }

  TileFormat format_;  // k4v2_g128, head_dim 128.
  Encoded encoded_;    // Of the last EncodeKeys or EncodeValues.

 private:
  EncodeResult EncodeWith(const std::vector<float>& values, DType dtype, Frame frame,
                          std::vector<std::uint16_t> TileInput::*half) {
    TileInput input = MakeInput(format_, InputKind::kGaussian, dtype, 5);
    std::transform(values.begin(), values.end(), (input.*half).begin(),
                   [&](float x) { return FromFloat(x, dtype); });
    encoded_ = Encode(with(), format_, input, frame);
    return encoded_.result;
  }
};

// ---- Where it reads and writes. ----

struct Geometry {
  const char* name;
  std::uint32_t page_tokens;
  std::ptrdiff_t channel_stride_bytes;
  std::size_t row_padding_bytes;   // After the channels of a token.
  std::size_t page_padding_bytes;  // After the tokens of a page.
  std::size_t offset_bytes;        // Of the head in its page; odd: nothing is aligned.
};

constexpr Geometry kGeometries[] = {
    {"one page", 128, 2, 0, 0, 0},
    {"pages of 16", 16, 2, 0, 0, 0},
    {"pages of 1", 1, 2, 0, 64, 0},
    {"padded rows and pages", 16, 2, 30, 126, 64},
    {"nothing aligned", 16, 2, 3, 7, 5},
    {"channels apart", 16, 6, 0, 0, 2},
    {"pages that do not divide the block", 48, 2, 0, 0, 0},
};

// One half laid out in pages, the way `g` says; the padding is NaN, so that reading it shows.
struct PagedHalf {
  std::vector<std::vector<std::byte>> storage;
  std::vector<const std::byte*> pages;
  HeadPages view;

  PagedHalf(const Geometry& g, const TileFormat& format, const std::vector<std::uint16_t>& values,
            DType dtype) {
    const std::size_t row_bytes =
        format.head_dim * static_cast<std::size_t>(g.channel_stride_bytes) + g.row_padding_bytes;
    const std::size_t page_bytes =
        g.offset_bytes + g.page_tokens * row_bytes + g.page_padding_bytes;
    for (std::uint32_t t = 0; t < format.group; ++t) {
      if (t % g.page_tokens == 0) storage.emplace_back(page_bytes, std::byte{0xFF});
      for (std::size_t d = 0; d < format.head_dim; ++d) {
        std::memcpy(storage.back().data() + g.offset_bytes + t % g.page_tokens * row_bytes +
                        d * static_cast<std::size_t>(g.channel_stride_bytes),
                    &values[t * format.head_dim + d], 2);
      }
    }
    for (const std::vector<std::byte>& page : storage) pages.push_back(page.data());
    view = {pages.data(),           g.offset_bytes,
            g.page_tokens,          static_cast<std::ptrdiff_t>(row_bytes),
            g.channel_stride_bytes, dtype};
  }
};

TEST_P(EncodeTest, TheRecordDoesNotDependOnHowThePagesLie) {
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
    const TileInput input = MakeInput(format_, InputKind::kOutlierChannels, dtype, 1);
    const Encoded want = Encode(with(), format_, input);
    ASSERT_EQ(want.result, EncodeResult::kTile);
    for (const Geometry& g : kGeometries) {
      SCOPED_TRACE(g.name);
      const PagedHalf k(g, format_, input.k, dtype);
      const PagedHalf v(g, format_, input.v, dtype);
      std::vector<std::byte> record(RecordBytes(format_));
      const EncodeArgs args{k.view, v.view, record.data()};
      EncodeResult result = EncodeResult::kRaw;
      Scratch scratch(EncodeScratchBytes(format_));
      with().encode(format_, Frame::kModel, {&args, 1}, {&result, 1}, scratch.span());
      EXPECT_EQ(result, EncodeResult::kTile);
      EXPECT_EQ(record, want.record);
    }
  }
}

TEST_P(EncodeTest, KeysAndValuesMayHaveDifferentTypesAndLayouts) {
  const TileInput fp16 = MakeInput(format_, InputKind::kGaussian, DType::kFloat16, 1);
  const TileInput bf16 = MakeInput(format_, InputKind::kGaussian, DType::kBFloat16, 2);
  const PagedHalf k(kGeometries[3], format_, fp16.k, DType::kFloat16);
  const PagedHalf v(kGeometries[4], format_, bf16.v, DType::kBFloat16);
  std::vector<std::byte> record(RecordBytes(format_));
  const EncodeArgs args{k.view, v.view, record.data()};
  EncodeResult result = EncodeResult::kRaw;
  Scratch scratch(EncodeScratchBytes(format_));
  with().encode(format_, Frame::kModel, {&args, 1}, {&result, 1}, scratch.span());
  ASSERT_EQ(result, EncodeResult::kTile);

  const std::size_t v_codes = LayoutOf(format_).v_codes;
  const Encoded want_k = Encode(with(), format_, fp16);
  const Encoded want_v = Encode(with(), format_, bf16);
  EXPECT_TRUE(std::equal(record.begin(), record.begin() + static_cast<std::ptrdiff_t>(v_codes),
                         want_k.record.begin()));
  EXPECT_TRUE(std::equal(record.begin() + static_cast<std::ptrdiff_t>(v_codes), record.end(),
                         want_v.record.begin() + static_cast<std::ptrdiff_t>(v_codes)));
}

TEST_P(EncodeTest, WritesTheRecordAndNothingAroundIt) {
  constexpr std::size_t kGuard = 64;
  for (std::size_t i = 0; i < FormatCount(); i += 5) {  // Every width, group and head_dim.
    const TileFormat format = TileFormatAt(i);
    SCOPED_TRACE(testing::Message() << ToString(format) << " d" << format.head_dim);
    const TileInput input = MakeInput(format, InputKind::kGaussian, DType::kFloat16, 1);
    const Encoded want = Encode(with(), format, input);
    const PagedHalf k(kGeometries[0], format, input.k, DType::kFloat16);
    const PagedHalf v(kGeometries[0], format, input.v, DType::kFloat16);
    for (const std::size_t misalignment : {0u, 1u, 2u, 31u}) {
      std::vector<std::byte> around(kGuard + misalignment + RecordBytes(format) + kGuard,
                                    std::byte{0xA5});
      std::byte* record = around.data() + kGuard + misalignment;
      const EncodeArgs args{k.view, v.view, record};
      EncodeResult result = EncodeResult::kRaw;
      Scratch scratch(EncodeScratchBytes(format));
      with().encode(format, Frame::kModel, {&args, 1}, {&result, 1}, scratch.span());
      EXPECT_EQ(result, EncodeResult::kTile);
      EXPECT_EQ(std::memcmp(record, want.record.data(), want.record.size()), 0);
      const auto untouched = [](std::byte b) { return b == std::byte{0xA5}; };
      EXPECT_TRUE(std::all_of(around.data(), record, untouched));
      EXPECT_TRUE(
          std::all_of(record + RecordBytes(format), around.data() + around.size(), untouched));
    }
  }
}

TEST_P(EncodeTest, ABatchIsItsTilesOneByOne) {
  const InputKind kinds[] = {InputKind::kGaussian, InputKind::kHugeToken, InputKind::kZero,
                             InputKind::kOutlierChannels};
  std::vector<TileInput> inputs;
  std::vector<PagedHalf> halves;
  std::vector<std::vector<std::byte>> records;
  std::vector<EncodeArgs> args;
  for (const InputKind kind : kinds) {
    inputs.push_back(MakeInput(format_, kind, DType::kFloat16, 1));
    halves.emplace_back(kGeometries[1], format_, inputs.back().k, DType::kFloat16);
    halves.emplace_back(kGeometries[1], format_, inputs.back().v, DType::kFloat16);
    records.emplace_back(RecordBytes(format_));
  }
  for (std::size_t i = 0; i < records.size(); ++i) {
    args.push_back({halves[2 * i].view, halves[2 * i + 1].view, records[i].data()});
    args.back().k.pages = halves[2 * i].pages.data();
    args.back().v.pages = halves[2 * i + 1].pages.data();
  }
  inputs[1].v[17] = kHalfNan;  // A refused tile leaves its neighbours alone.
  std::memcpy(halves[3].storage[0].data() + 2 * 17, &inputs[1].v[17], 2);
  std::vector<EncodeResult> results(args.size());
  Scratch scratch(EncodeScratchBytes(format_));
  with().encode(format_, Frame::kModel, args, absl::MakeSpan(results), scratch.span());
  for (std::size_t i = 0; i < args.size(); ++i) {
    SCOPED_TRACE(i);
    const Encoded want = Encode(with(), format_, inputs[i]);
    EXPECT_EQ(results[i], i == 1 ? EncodeResult::kNonFinite : EncodeResult::kTile);
    EXPECT_EQ(results[i], want.result);
    if (want.result == EncodeResult::kTile) {
      EXPECT_EQ(records[i], want.record);
    }
  }
}

TEST_P(EncodeTest, DecodingGivesTheInputBack) {
  for (const std::uint8_t bits : {std::uint8_t{4}, std::uint8_t{2}}) {
    format_.key_bits = format_.value_bits = bits;
    const std::vector<float> values = Gaussian(1);
    ASSERT_EQ(EncodeKeys(values), EncodeResult::kTile);
    const double bound = bits == 4 ? 0.12 : 0.55;  // Uniform error of a step: range / 15 or / 3.
    EXPECT_LE(RelativeError(Decode(with(), format_, encoded_.record).k, values), bound);
    ASSERT_EQ(EncodeValues(values), EncodeResult::kTile);
    EXPECT_LE(RelativeError(Decode(with(), format_, encoded_.record).v, values), bound);
  }
}

// ---- What it refuses. ----

TEST_P(EncodeTest, OneNonFiniteValueAnywhereRefusesTheTile) {
  for (const std::size_t i : {std::size_t{0}, std::size_t{6}, format_.group * std::size_t{64},
                              std::size_t{format_.group} * format_.head_dim - 1}) {
    for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
      const std::uint16_t infinity = dtype == DType::kFloat16 ? kHalfInfinity : 0x7F80;
      for (const std::uint16_t bad :
           {infinity, static_cast<std::uint16_t>(infinity | 0x8000),
            static_cast<std::uint16_t>(infinity + 1), static_cast<std::uint16_t>(0xFFFF)}) {
        for (std::vector<std::uint16_t> TileInput::*half : {&TileInput::k, &TileInput::v}) {
          TileInput input = MakeInput(format_, InputKind::kGaussian, dtype, 5);
          (input.*half)[i] = bad;
          const Frame frame = i % 2 == 0 ? Frame::kModel : Frame::kRotated;
          ASSERT_EQ(Encode(with(), format_, input, frame).result, EncodeResult::kNonFinite)
              << "value " << i << " bits " << bad;
        }
      }
    }
  }
}

TEST_P(EncodeTest, NonFiniteValuesWinOverKeysThatStayRaw) {
  TileInput input = MakeInput(format_, InputKind::kGaussian, DType::kFloat16, 5);
  std::fill(input.k.begin(), input.k.end(), FloatToFloat16(60000));
  ASSERT_EQ(Encode(with(), format_, input, Frame::kRotated).result, EncodeResult::kRaw);
  input.v.back() = kHalfInfinity;
  EXPECT_EQ(Encode(with(), format_, input, Frame::kRotated).result, EncodeResult::kNonFinite);
}

TEST_P(EncodeTest, LargestFiniteValuesAreNotTakenForInfinities) {
  TileInput input = MakeInput(format_, InputKind::kGaussian, DType::kFloat16, 5);
  input.k[100] = 0x7BFF;
  input.v[100] = 0xFBFF;
  EXPECT_NE(Encode(with(), format_, input).result, EncodeResult::kNonFinite);
  input = MakeInput(format_, InputKind::kGaussian, DType::kBFloat16, 5);
  input.k[100] = 0x7F7F;
  input.v[100] = 0xFF7F;
  EXPECT_EQ(Encode(with(), format_, input).result, EncodeResult::kRaw);
}

// Nothing varies, so normalization only makes it larger (the clamp at exp(-0.3)): Z overflows fp16.
TEST_P(EncodeTest, ATileOf60000StaysRaw) {
  EXPECT_EQ(EncodeKeys(All(60000), DType::kFloat16, Frame::kRotated), EncodeResult::kRaw);
  EXPECT_EQ(EncodeValues(All(60000), DType::kFloat16, Frame::kRotated), EncodeResult::kRaw);
}

// Rotated it is channel 0 alone, sqrt(128) times as large. The tokens of K then have a deviation
// that T takes up; the channels of V, which come first there, have none.
TEST_P(EncodeTest, ATileOf60000InTheModelFrameIsATileInKAndRawInV) {
  ASSERT_EQ(EncodeKeys(All(60000)), EncodeResult::kTile);
  EXPECT_LE(RelativeError(Decode(with(), format_, encoded_.record).k, All(60000)), 1e-2);
  EXPECT_EQ(EncodeValues(All(60000)), EncodeResult::kRaw);
}

// S and Z near 1e-7 are fp16 subnormals of one or two digits.
TEST_P(EncodeTest, ATileOfDeviation1e6thStaysRaw) {
  EXPECT_EQ(EncodeKeys(Gaussian(1e-6f)), EncodeResult::kRaw);
  EXPECT_EQ(EncodeValues(Gaussian(1e-6f)), EncodeResult::kRaw);
  EXPECT_EQ(EncodeKeys(Gaussian(1e-6f), DType::kBFloat16), EncodeResult::kRaw);
}

TEST_P(EncodeTest, ATileOfDeviation1e3rdIsATile) {
  EXPECT_EQ(EncodeKeys(Gaussian(1e-3f)), EncodeResult::kTile);
  EXPECT_EQ(EncodeValues(Gaussian(1e-3f)), EncodeResult::kTile);
}

// What fp32 squares cannot hold must not look exact.
TEST_P(EncodeTest, BFloatsFarOutsideTheRangeOfFp16StayRaw) {
  for (const float deviation :
       {1e-38f, 1e-30f, 1e-20f, 1e-12f, 1e12f, 1e18f, 1e20f, 1e30f, 1e37f}) {
    SCOPED_TRACE(deviation);
    EXPECT_EQ(EncodeKeys(Gaussian(deviation), DType::kBFloat16), EncodeResult::kRaw);
    EXPECT_EQ(EncodeValues(Gaussian(deviation), DType::kBFloat16), EncodeResult::kRaw);
  }
}

TEST_P(EncodeTest, AZeroTileIsATileAndDecodesToZero) {
  ASSERT_EQ(EncodeKeys(All(0)), EncodeResult::kTile);
  EXPECT_EQ(Decode(with(), format_, encoded_.record).k, All(0));
  ASSERT_EQ(EncodeValues(All(0)), EncodeResult::kTile);
  EXPECT_EQ(Decode(with(), format_, encoded_.record).v, All(0));
}

// A row of one value has scale 1e-10, which is 0 in fp16; the value lives in the zero.
TEST_P(EncodeTest, AConstantRowKeepsItsValueInTheZero) {
  const RecordLayout l = LayoutOf(format_);
  for (const float value : {1.0f, -3.5f, 100.0f}) {
    SCOPED_TRACE(value);
    ASSERT_EQ(EncodeKeys(All(value), DType::kFloat16, Frame::kRotated), EncodeResult::kTile);
    EXPECT_EQ(Float16At(encoded_.record.data() + l.k_scale, 5), 0.0f);
    EXPECT_LE(
        RelativeError(Decode(with(), format_, encoded_.record, Frame::kRotated).k, All(value)),
        1e-3);
    ASSERT_EQ(EncodeValues(All(value), DType::kFloat16, Frame::kRotated), EncodeResult::kTile);
    EXPECT_EQ(Float16At(encoded_.record.data() + l.v_scale, 5), 0.0f);
    EXPECT_LE(
        RelativeError(Decode(with(), format_, encoded_.record, Frame::kRotated).v, All(value)),
        1e-3);
  }
}

// Without the floor of 1e-10 (before the row's scale of 0.74) this row would use all its codes.
TEST_P(EncodeTest, RowsBelowTheSmallestScaleHaveNoCodes) {
  const std::size_t channels = format_.head_dim;
  const RecordLayout l = LayoutOf(format_);
  std::vector<float> values = Gaussian(1);
  for (std::size_t t = 0; t < format_.group; ++t) {
    values[t * channels + 9] = t % 2 == 0 ? 0.0f : 1e-11f;
  }
  ASSERT_EQ(EncodeKeys(values, DType::kBFloat16, Frame::kRotated), EncodeResult::kTile);
  const std::byte* k_row = encoded_.record.data() + l.k_codes + 9 * format_.group / 2;
  for (std::size_t t = 0; t < format_.group; ++t) ASSERT_EQ(CodeAt(k_row, t, 4, format_.group), 0u);

  values = Gaussian(1);
  for (std::size_t d = 0; d < channels; ++d) values[9 * channels + d] = d % 2 == 0 ? 0.0f : 1e-11f;
  ASSERT_EQ(EncodeValues(values, DType::kBFloat16, Frame::kRotated), EncodeResult::kTile);
  const std::byte* v_row = encoded_.record.data() + l.v_codes + 9 * channels / 4;
  for (std::size_t d = 0; d < channels; ++d) ASSERT_EQ(CodeAt(v_row, d, 2, channels), 0u);
}

// In the model frame only channel 0 of its rotation is not zero.
TEST_P(EncodeTest, AConstantTileIsATile) {
  for (const float value : {1.0f, -3.5f, 100.0f}) {
    SCOPED_TRACE(value);
    ASSERT_EQ(EncodeKeys(All(value)), EncodeResult::kTile);
    EXPECT_LE(RelativeError(Decode(with(), format_, encoded_.record).k, All(value)), 1e-2);
    ASSERT_EQ(EncodeValues(All(value)), EncodeResult::kTile);
    EXPECT_LE(RelativeError(Decode(with(), format_, encoded_.record).v, All(value)), 1e-2);
  }
}

// The rule, from the record alone: what is accepted has finite vectors, and fp16 may not have moved
// it by more than 1e-2. Deviations across the edge, where subnormal scales lose their digits.
TEST_P(EncodeTest, TheEdgeBetweenTileAndRawIsWhereTheReferencePutsIt) {
  std::size_t tiles = 0;
  std::size_t raws = 0;
  for (int step = 0; step <= 24; ++step) {
    const float deviation = 1e-6f * std::pow(10.0f, static_cast<float>(step) / 8.0f);
    const std::vector<float> values = Gaussian(deviation, 100u + static_cast<std::uint32_t>(step));
    TileInput input = MakeInput(format_, InputKind::kGaussian, DType::kBFloat16, 5);
    std::transform(values.begin(), values.end(), input.k.begin(), FloatToBFloat16);
    const EncodeResult want = Encode(ReferenceImplementation(), format_, input).result;
    EXPECT_EQ(Encode(with(), format_, input).result, want) << deviation;
    ++(want == EncodeResult::kTile ? tiles : raws);
  }
  EXPECT_GE(tiles, 5u);
  EXPECT_GE(raws, 5u);
}

INSTANTIATE_TEST_SUITE_P(AllImplementations, EncodeTest,
                         testing::Range(std::size_t{0}, AllImplementations().size()),
                         [](const auto& param) { return AllImplementations()[param.param].name; });

// ---- FindNonFinite. ----

struct NonFiniteCase {
  std::uint32_t token, channel;
  bool in_value;
};

TEST(FindNonFiniteTest, NamesTheFirstByTokenThenKeysThenChannel) {
  TileFormat format;
  for (const Geometry& g : kGeometries) {
    SCOPED_TRACE(g.name);
    TileInput input = MakeInput(format, InputKind::kGaussian, DType::kFloat16, 5);
    const auto find = [&] {
      const PagedHalf k(g, format, input.k, DType::kFloat16);
      const PagedHalf v(g, format, input.v, DType::kFloat16);
      return FindNonFinite(k.view, v.view, format.group, format.head_dim);
    };
    EXPECT_FALSE(find().found);
    // Each is found before the ones that were put in earlier.
    for (const NonFiniteCase& c :
         {NonFiniteCase{127, 127, true}, NonFiniteCase{127, 3, true},
          NonFiniteCase{127, 127, false}, NonFiniteCase{50, 127, true}, NonFiniteCase{50, 9, false},
          NonFiniteCase{0, 0, true}, NonFiniteCase{0, 0, false}}) {
      (c.in_value ? input.v : input.k)[c.token * format.head_dim + c.channel] = kHalfNan;
      const NonFinite found = find();
      EXPECT_TRUE(found.found);
      EXPECT_EQ(found.token, c.token);
      EXPECT_EQ(found.channel, c.channel);
      EXPECT_EQ(found.in_value, c.in_value);
    }
  }
}

TEST(FindNonFiniteTest, LooksNoFurtherThanTheTokensOfATail) {
  TileFormat format;
  TileInput input = MakeInput(format, InputKind::kGaussian, DType::kFloat16, 5);
  input.k[5 * format.head_dim] = kHalfInfinity;
  const PagedHalf k(kGeometries[1], format, input.k, DType::kFloat16);
  const PagedHalf v(kGeometries[1], format, input.v, DType::kFloat16);
  EXPECT_FALSE(FindNonFinite(k.view, v.view, 5, format.head_dim).found);
  EXPECT_TRUE(FindNonFinite(k.view, v.view, 6, format.head_dim).found);
}

}  // namespace
}  // namespace kvmill
