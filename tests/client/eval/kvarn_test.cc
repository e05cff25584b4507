// The ablation code is KVarN when nothing is taken away.
//
// Method: codes, S, Z and T of EncodeKvarnHalf against the record of EncodeTilesReference, bit for
// bit, on made-up tiles of every kind; then what each switch must leave as it is or take away.
#include "client/eval/kvarn.h"

#include <algorithm>
#include <cmath>
#include <random>

#include "client/eval/methods.h"
#include "gtest/gtest.h"
#include "kernels/packed_codes.h"
#include "tests/kernels/tile_inputs.h"

namespace kvmill::eval {
namespace {

std::vector<float> Floats(const std::vector<std::uint16_t>& values, DType dtype) {
  std::vector<float> floats;
  for (const std::uint16_t bits : values) floats.push_back(ToFloat(bits, dtype));
  return floats;
}

double RelativeError(const std::vector<float>& got, const std::vector<float>& want) {
  return kvmill::RelativeError(got, want);
}

kvmill::Encoded EncodeReference(const TileFormat& format, const TileInput& input) {
  kvmill::Encoded out;
  out.record.resize(RecordBytes(format));
  const auto* k = reinterpret_cast<const std::byte*>(input.k.data());
  const auto* v = reinterpret_cast<const std::byte*>(input.v.data());
  const std::ptrdiff_t stride = std::ptrdiff_t{2} * format.head_dim;
  EncodeArgs args;
  args.k = {&k, 0, format.group, stride, 2, input.dtype};
  args.v = {&v, 0, format.group, stride, 2, input.dtype};
  args.record = out.record.data();
  Scratch scratch(EncodeScratchBytes(format));
  EncodeTilesReference(format, Frame::kModel, {&args, 1}, {&out.result, 1}, scratch.span());
  return out;
}

void ExpectSameBits(const KvarnHalf& half, const std::byte* codes, const std::byte* scale,
                    const std::byte* zero, const std::byte* across, std::uint32_t bits) {
  const std::size_t columns = half.across.size();
  std::size_t different = 0;
  for (std::size_t r = 0; r < half.scale.size(); ++r) {
    for (std::size_t c = 0; c < columns; ++c) {
      different +=
          half.codes[r * columns + c] != CodeAt(codes + r * columns * bits / 8, c, bits, columns);
    }
    different += half.scale[r] != Float16BitsAt(scale, r);
    different += half.zero[r] != Float16BitsAt(zero, r);
  }
  for (std::size_t c = 0; c < columns; ++c) {
    different += half.across[c] != Float16BitsAt(across, c);
  }
  EXPECT_EQ(different, 0u);
}

TEST(KvarnTest, NothingTakenAwayIsTheReferenceEncoderBitForBit) {
  int tiles = 0;
  for (const TileFormat format :
       {TileFormat{4, 2, 128, 128}, TileFormat{2, 4, 64, 64}, TileFormat{2, 2, 64, 256}}) {
    for (const InputKind kind : kInputKinds) {
      for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
        SCOPED_TRACE(kvmill::ToString(format) + " " + kvmill::ToString(kind));
        const TileInput input = MakeInput(format, kind, dtype, 7);
        const kvmill::Encoded want = EncodeReference(format, input);
        const KvarnHalf k = EncodeKvarnHalf(Half::kKey, Floats(input.k, dtype), format.group,
                                            format.head_dim, format.key_bits, {});
        const KvarnHalf v = EncodeKvarnHalf(Half::kValue, Floats(input.v, dtype), format.group,
                                            format.head_dim, format.value_bits, {});
        EXPECT_EQ(k.raw || v.raw, want.result == EncodeResult::kRaw);
        if (k.raw || v.raw) continue;
        const RecordLayout at = LayoutOf(format);
        const std::byte* r = want.record.data();
        ExpectSameBits(k, r + at.k_codes, r + at.k_scale, r + at.k_zero, r + at.k_token,
                       format.key_bits);
        ExpectSameBits(v, r + at.v_codes, r + at.v_scale, r + at.v_zero, r + at.v_channel,
                       format.value_bits);
        ++tiles;
      }
    }
  }
  EXPECT_GE(tiles, 50);
}

// One head of several blocks, as a quantizer takes it.
struct TestHead {
  std::vector<float> values;
  HeadValues view;
};
TestHead MakeHead(const TileFormat& format, InputKind kind, int blocks) {
  TestHead head;
  for (int b = 0; b < blocks; ++b) {
    const TileInput input = MakeInput(format, kind, DType::kFloat16, static_cast<std::uint32_t>(b));
    const std::vector<float> k = Floats(input.k, DType::kFloat16);
    head.values.insert(head.values.end(), k.begin(), k.end());
  }
  head.view = {head.values, static_cast<std::uint32_t>(blocks) * format.group, format.head_dim,
               DType::kFloat16};
  return head;
}

TEST(KvarnTest, KernelsAndAblationCodeDecodeToTheSame) {
  const TileFormat format{4, 2, 64, 128};
  const TestHead head = MakeHead(format, InputKind::kOutlierChannels, 3);
  for (const Half half : {Half::kKey, Half::kValue}) {
    const eval::Decoded kernels = MakeKvarn(format)->Quantize(half, head.view);
    const eval::Decoded ours = MakeKvarnWith(format, {})->Quantize(half, head.view);
    EXPECT_LT(RelativeError(ours.values, kernels.values), 2.5e-3);
    EXPECT_EQ(ours.bits, kernels.bits);
    EXPECT_EQ(kernels.raw_blocks, 0u);
  }
}

TEST(KvarnTest, RefitsOfOneHalfLeaveTheOtherAlone) {
  const TileFormat format{2, 2, 128, 128};
  const TestHead head = MakeHead(format, InputKind::kGaussian, 2);
  const auto values = [&](Half half, const KvarnOptions& options) {
    return MakeKvarnWith(format, options)->Quantize(half, head.view).values;
  };
  for (const Half half : {Half::kKey, Half::kValue}) {
    const bool key = half == Half::kKey;
    const auto plain = values(half, {}), both = values(half, {.refit = true});
    EXPECT_EQ(values(half, {.refit_keys = true}), key ? both : plain);
    EXPECT_EQ(values(half, {.refit_values = true}), key ? plain : both);
    EXPECT_NE(both, plain);
  }
}

// Least squares leaves x'x' = x'x, which is less than xx; stretched, x'x = xx.
TEST(KvarnTest, StretchingKeepsProductsWithTheValues) {
  const TileFormat format{2, 2, 128, 128};
  const TestHead head = MakeHead(format, InputKind::kGaussian, 2);
  for (const Half half : {Half::kKey, Half::kValue}) {
    const auto share = [&](const KvarnOptions& options) {
      const auto got = MakeKvarnWith(format, options)->Quantize(half, head.view).values;
      double product = 0, square = 0;
      for (std::size_t i = 0; i < got.size(); ++i) {
        product += static_cast<double>(got[i]) * static_cast<double>(head.values[i]);
        square += static_cast<double>(head.values[i]) * static_cast<double>(head.values[i]);
      }
      return product / square;
    };
    EXPECT_LT(share({.refit = true}), 0.96);
    EXPECT_NEAR(share({.refit = true, .stretch = true}), 1, 0.005);
  }
}

// kernels/refine.h rounds S and Z at the end, the study after each fit, and tries each fit
// with either codes: the same but for rounding and ties.
TEST(KvarnTest, RefinedKernelsAreTheStretchedRefitOfTheStudy) {
  for (const TileFormat format : {TileFormat{2, 2, 128, 128}, TileFormat{4, 4, 64, 64}}) {
    for (const InputKind kind : {InputKind::kGaussian, InputKind::kOutlierChannels}) {
      SCOPED_TRACE(kvmill::ToString(format) + " " + kvmill::ToString(kind));
      const TestHead head = MakeHead(format, kind, 3);
      for (const Half half : {Half::kKey, Half::kValue}) {
        const auto plain = MakeKvarn(format)->Quantize(half, head.view);
        const auto kernels = MakeKvarn(format, Algorithm::kRefined)->Quantize(half, head.view);
        const auto study =
            MakeKvarnWith(format, {.refit = true, .stretch = true})->Quantize(half, head.view);
        const double want = RelativeError(study.values, head.values);
        EXPECT_NEAR(RelativeError(kernels.values, head.values), want, 0.02 * want);
        EXPECT_LT(RelativeError(kernels.values, head.values),
                  RelativeError(plain.values, head.values));
        EXPECT_EQ(kernels.bits, study.bits);
      }
    }
  }
}

TEST(KvarnTest, TheClampKeepsScalesOfSmallTilesAndIsAnOption) {
  const TestHead head = MakeHead({4, 4, 128, 128}, InputKind::kTiny, 1);
  const auto least = [&](const KvarnOptions& options) {
    const KvarnHalf half = EncodeKvarnHalf(Half::kKey, head.values, 128, 128, 4, options);
    EXPECT_FALSE(half.raw);
    float smallest = 2;
    for (const std::uint16_t t : half.across) smallest = std::min(smallest, Float16ToFloat(t));
    return smallest;
  };
  EXPECT_GT(least({}), 0.74f);  // exp(-0.3), or 1 when rounding decides a tie so.
  EXPECT_LT(least({.log_scale_min = -10}), 0.5f);
}

TEST(KvarnTest, ThreeBitValuesAreForStudiesAndThreeBitsLieBetweenTwoAndFour) {
  EXPECT_FALSE(ParseTileFormat("k3v3_g128", 128).ok());
  for (const char* name : {"k3v9_g128", "k1v3_g128", "k3v3", "3333", ""}) {
    EXPECT_FALSE(ParseStudyFormat(name, 128).ok()) << name;
  }
  EXPECT_EQ(*ParseStudyFormat("k4v2_g64", 128), (TileFormat{4, 2, 64, 128}));
  EXPECT_TRUE(HasTiles(*ParseStudyFormat("k4v2_g64", 128)));
  EXPECT_TRUE(HasTiles(*ParseStudyFormat("k3v2_g64", 128)));
  const TileFormat three = *ParseStudyFormat("k3v3_g128", 128);
  EXPECT_FALSE(HasTiles(three));
  const TestHead head = MakeHead({2, 2, 128, 128}, InputKind::kGaussian, 1);
  for (const char* name : {"kvarn", "refined", "rtn", "turboquant", "kvquant-1pct"}) {
    SCOPED_TRACE(name);
    const Method& method = *(*FindMethods({name}))[0];
    double last = 2, bits = 0;
    for (const TileFormat& format :
         {TileFormat{2, 2, 128, 128}, three, TileFormat{4, 4, 128, 128}}) {
      const eval::Decoded decoded = method.make(format)->Quantize(Half::kKey, head.view);
      const double error = RelativeError(decoded.values, head.values);
      EXPECT_LT(error, 0.7 * last);
      last = error;
      if (bits > 0) {  // A bit a code more, but for what KVQuant keeps of its levels.
        EXPECT_NEAR(static_cast<double>(decoded.bits) - bits, 128 * 128, 300);
      }
      bits = static_cast<double>(decoded.bits);
    }
  }
}

TEST(KvarnTest, BitsAreThoseOfTheRecord) {
  for (std::size_t i = 0; i < kTileFormatCount; ++i) {
    const TileFormat format = TileFormatAt(i);
    const TestHead head = MakeHead(format, InputKind::kGaussian, 1);
    const auto quantizer = MakeKvarn(format);
    EXPECT_EQ(quantizer->Quantize(Half::kKey, head.view).bits +
                  quantizer->Quantize(Half::kValue, head.view).bits,
              8 * RecordBytes(format));
  }
}

TEST(KvarnTest, AHalfThatATileCannotHoldStaysExactAndCounts16Bits) {
  const TileFormat format{4, 4, 64, 64};
  TestHead head = MakeHead(format, InputKind::kGaussian, 2);
  // So small that fp16 scales would be off by more than a hundredth.
  for (std::size_t i = 0; i < head.values.size() / 2; ++i) {
    head.values[i] = Float16ToFloat(FloatToFloat16(1e-6f * head.values[i]));
  }
  const std::uint64_t block_values = head.values.size() / 2;
  for (const auto& quantizer : {MakeKvarn(format), MakeKvarnWith(format, {})}) {
    const eval::Decoded decoded = quantizer->Quantize(Half::kKey, head.view);
    EXPECT_EQ(decoded.raw_blocks, 1u);
    for (std::size_t i = 0; i < block_values; ++i) {
      ASSERT_EQ(decoded.values[i], head.values[i]);
    }
    EXPECT_NE(decoded.values[block_values], head.values[block_values]);
    EXPECT_GT(decoded.bits, 16 * block_values + 4 * block_values);
    EXPECT_LT(decoded.bits, 16 * block_values + 6 * block_values);
  }
}

TEST(KvarnTest, WithoutAnAxisOrIterationsTIsOneAndNotCounted) {
  const TileFormat format{4, 2, 128, 64};
  const TestHead head = MakeHead(format, InputKind::kHeavyTails, 1);
  const std::uint64_t k_codes = 128 * 64 * 4, k_rows = 64 * 32, k_columns = 128 * 16;
  const std::uint64_t v_codes = 128 * 64 * 2, v_rows = 128 * 32, v_columns = 64 * 16;
  const auto bits = [&](Half half, const KvarnOptions& options) {
    return MakeKvarnWith(format, options)->Quantize(half, head.view).bits;
  };
  EXPECT_EQ(bits(Half::kKey, {}), k_codes + k_rows + k_columns);
  EXPECT_EQ(bits(Half::kKey, {.token_axis = false}), k_codes + k_rows);
  EXPECT_EQ(bits(Half::kKey, {.channel_axis = false}), k_codes + k_rows + k_columns);
  EXPECT_EQ(bits(Half::kKey, {.iterations = 0}), k_codes + k_rows);
  EXPECT_EQ(bits(Half::kValue, {}), v_codes + v_rows + v_columns);
  EXPECT_EQ(bits(Half::kValue, {.channel_axis = false}), v_codes + v_rows);
  EXPECT_EQ(bits(Half::kValue, {.token_axis = false}), v_codes + v_rows + v_columns);
  for (const KvarnOptions& options :
       {KvarnOptions{.token_axis = false}, KvarnOptions{.iterations = 0}}) {
    const KvarnHalf half = EncodeKvarnHalf(Half::kKey, head.values, 128, 64, 4, options);
    for (const std::uint16_t t : half.across) EXPECT_EQ(Float16ToFloat(t), 1);
  }
}

TEST(KvarnTest, EachPartIsWorthSomethingWhereItShouldBe) {
  const TileFormat format{2, 2, 128, 128};
  const auto error = [&](InputKind kind, const KvarnOptions& options) {
    const TestHead head = MakeHead(format, kind, 1);
    return RelativeError(MakeKvarnWith(format, options)->Quantize(Half::kKey, head.view).values,
                         head.values);
  };
  // The rotation spreads outlying channels; the token axis evens out a token that is huge.
  EXPECT_LT(error(InputKind::kOutlierChannels, {}),
            1.2 * error(InputKind::kOutlierChannels, {.rotate = false}));
  EXPECT_NE(error(InputKind::kOutlierChannels, {}),
            error(InputKind::kOutlierChannels, {.rotate = false}));
  const TestHead head = MakeHead(format, InputKind::kHugeToken, 1);
  const auto small_tokens = [&](const KvarnOptions& options) {
    // Of all tokens but the huge one: those have less than 100 in every channel.
    const std::vector<float> got =
        MakeKvarnWith(format, options)->Quantize(Half::kKey, head.view).values;
    double difference = 0, norm = 0;
    for (std::size_t t = 0; t < 128; ++t) {
      double token = 0, delta = 0;
      for (std::size_t i = t * 128; i < (t + 1) * 128; ++i) {
        const auto x = static_cast<double>(head.values[i]), y = static_cast<double>(got[i]);
        token += x * x;
        delta += (y - x) * (y - x);
      }
      if (token > 1e5) continue;
      difference += delta;
      norm += token;
    }
    return std::sqrt(difference / norm);
  };
  EXPECT_LT(small_tokens({}), 0.6);
  EXPECT_GT(small_tokens({.token_axis = false}), 2);
  EXPECT_GT(small_tokens({.iterations = 0}), 2);
}

TEST(KvarnTest, RefinementsNeverMakeARowWorseAndCostNoBits) {
  const TileFormat format{2, 2, 128, 128};
  for (const InputKind kind : kInputKinds) {
    SCOPED_TRACE(kvmill::ToString(kind));
    const TestHead head = MakeHead(format, kind, 1);
    for (const Half half : {Half::kKey, Half::kValue}) {
      const eval::Decoded plain = MakeKvarnWith(format, {})->Quantize(half, head.view);
      if (plain.raw_blocks > 0) continue;
      const double before = RelativeError(plain.values, head.values);
      for (const KvarnOptions& options :
           {KvarnOptions{.refit = true}, KvarnOptions{.clip_keys = true, .clip_values = true},
            KvarnOptions{.clip_keys = true, .clip_values = true, .refit = true}}) {
        const eval::Decoded refined = MakeKvarnWith(format, options)->Quantize(half, head.view);
        EXPECT_EQ(refined.bits, plain.bits);
        EXPECT_LE(RelativeError(refined.values, head.values), before * (1 + 1e-5) + 1e-7);
      }
    }
  }
  // And where there is something to win, they do.
  const TestHead head = MakeHead(format, InputKind::kGaussian, 1);
  const double before = RelativeError(
      MakeKvarnWith(format, {})->Quantize(Half::kValue, head.view).values, head.values);
  const double after = RelativeError(
      MakeKvarnWith(format, {.clip_values = true})->Quantize(Half::kValue, head.view).values,
      head.values);
  EXPECT_LT(after, 0.85 * before);
}

}  // namespace
}  // namespace kvmill::eval
