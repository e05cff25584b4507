#include "storage/quantization_errors.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/decode.h"
#include "kernels/encode.h"

namespace kvmill {
namespace {

constexpr TileFormat kFormat{.key_bits = 4, .value_bits = 2, .group = 64, .head_dim = 64};

// One head of one block: its values, and its record.
class Head {
 public:
  explicit Head(float deviation, std::uint32_t seed = 1) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal(0, deviation);
    for (auto& half : values_) {
      half.resize(std::size_t{kFormat.group} * kFormat.head_dim);
      for (std::uint16_t& value : half) {
        value = deviation == 0 ? std::uint16_t{0} : FloatToFloat16(normal(random));
      }
    }
    record_.resize(RecordBytes(kFormat));
    std::vector<std::byte> scratch(EncodeScratchBytes(kFormat) + 64);
    void* aligned = scratch.data();
    std::size_t room = scratch.size();
    std::align(64, EncodeScratchBytes(kFormat), aligned, room);
    const HeadInput input = this->input();
    const EncodeArgs args{input.k, input.v, record_.data()};
    EncodeResult result = EncodeResult::kRaw;
    EncodeTilesReference(
        kFormat, Frame::kModel, {&args, 1}, {&result, 1},
        absl::MakeSpan(static_cast<std::byte*>(aligned), EncodeScratchBytes(kFormat)));
    EXPECT_EQ(result, EncodeResult::kTile);
  }

  HeadInput input() {
    HeadInput input;
    for (int half = 0; half < 2; ++half) {
      pages_[half] = reinterpret_cast<const std::byte*>(values_[half].data());
      HeadPages& pages = half == 0 ? input.k : input.v;
      pages.pages = &pages_[half];
      pages.page_tokens = kFormat.group;
      pages.token_stride_bytes = 2 * kFormat.head_dim;
    }
    return input;
  }
  const std::byte* record() const { return record_.data(); }
  std::uint16_t& value(int half, std::size_t index) { return values_[half][index]; }

  // By another decoder, and another loop.
  double Error(int half) const {
    std::vector<float> decoded[2];
    for (auto& one : decoded) one.resize(values_[0].size());
    DecodeTileToFloatReference(kFormat, Frame::kModel, record_.data(), absl::MakeSpan(decoded[0]),
                               absl::MakeSpan(decoded[1]));
    std::vector<double> off(decoded[half].size()), own(off.size());
    for (std::size_t i = 0; i < off.size(); ++i) {
      own[i] = Float16ToFloat(values_[half][i]);
      off[i] = decoded[half][i] - own[i];
    }
    return std::sqrt(std::inner_product(off.begin(), off.end(), off.begin(), 0.0) /
                     std::inner_product(own.begin(), own.end(), own.begin(), 0.0));
  }

 private:
  std::vector<std::uint16_t> values_[2];
  const std::byte* pages_[2] = {};
  std::vector<std::byte> record_;
};

OpenedNamespace Space(NamespaceId id, const std::string& name) {
  OpenedNamespace space;
  space.id = id;
  space.name = name;
  space.spec.tenant = "default";
  return space;
}

std::uint64_t CountOf(const QuantizationErrorHistogram::Snapshot& snapshot) {
  return std::accumulate(snapshot.counts.begin(), snapshot.counts.end(), std::uint64_t{0});
}

TEST(QuantizationErrorsTest, OneOfIntervalTilesIsASampleWhateverTheBatches) {
  QuantizationErrors errors({.sample_interval = 7});
  std::mt19937 random(1);
  std::vector<std::uint64_t> samples;
  std::uint64_t tiles = 0;
  while (tiles < 1000) {
    const std::size_t batch = random() % 20;
    const QuantizationErrors::Samples of = errors.SamplesOf(batch);
    for (std::size_t t = of.first; t < batch; t += of.interval) samples.push_back(tiles + t);
    tiles += batch;
  }
  for (std::size_t i = 0; i < samples.size(); ++i) EXPECT_EQ(samples[i], 7 * i);
  EXPECT_EQ(samples.size(), (tiles + 6) / 7);
}

TEST(QuantizationErrorsTest, TheIntervalAndTheNumberOfNamespacesCanChange) {
  QuantizationErrors errors({.sample_interval = 0, .namespaces_max = 1});
  EXPECT_EQ(errors.SamplesOf(1000).first, 1000u) << "no samples";
  errors.SetOptions({.sample_interval = 5, .namespaces_max = 1});
  EXPECT_EQ(errors.SamplesOf(7).first, 0u);
  EXPECT_EQ(errors.SamplesOf(7).first, 3u);
  EXPECT_EQ(errors.SamplesOf(7).interval, 5u);
  Head head(1);
  errors.Observe(Space(0, "a"), kFormat, head.input(), head.record());
  errors.Observe(Space(1, "b"), kFormat, head.input(), head.record());
  ASSERT_EQ(errors.snapshot().size(), 2u);
  EXPECT_EQ(errors.snapshot()[1].name, "") << "shared";
  errors.SetOptions({.sample_interval = 5, .namespaces_max = 2});
  errors.Observe(Space(1, "b"), kFormat, head.input(), head.record());
  errors.SetOptions({.sample_interval = 5, .namespaces_max = 0});
  errors.Observe(Space(1, "b"), kFormat, head.input(), head.record());
  errors.Observe(Space(2, "c"), kFormat, head.input(), head.record());
  const auto all = errors.snapshot();
  ASSERT_EQ(all.size(), 3u);
  EXPECT_EQ(all[1].name, "b");
  EXPECT_EQ(CountOf(all[1].k), 2u) << "it keeps its own";
  EXPECT_EQ(CountOf(all[2].k), 2u);
}

TEST(QuantizationErrorsTest, ErrorsAreThoseOfTheRecordAgainstTheValues) {
  QuantizationErrors errors({.sample_interval = 1});
  Head head(1, 5);
  errors.Observe(Space(0, "n"), kFormat, head.input(), head.record());
  const auto all = errors.snapshot();
  ASSERT_EQ(all.size(), 1u);
  EXPECT_EQ(all[0].name, "n");
  EXPECT_EQ(all[0].tenant, "default");
  EXPECT_EQ(CountOf(all[0].k), 1u);
  EXPECT_NEAR(all[0].k.sum, head.Error(0), 1e-6);
  EXPECT_NEAR(all[0].v.sum, head.Error(1), 1e-6);
  EXPECT_GT(all[0].v.sum, all[0].k.sum) << "2 bits lose more than 4";
}

TEST(QuantizationErrorsTest, ZerosLoseNothingAndValuesThatAreNotFiniteArePassedOver) {
  QuantizationErrors errors({.sample_interval = 1});
  Head zero(0);
  errors.Observe(Space(0, "n"), kFormat, zero.input(), zero.record());
  EXPECT_EQ(errors.snapshot()[0].k.counts[0], 1u);
  EXPECT_EQ(errors.snapshot()[0].v.sum, 0);
  Head spoiled(1);
  spoiled.value(1, 77) = 0x7E00;  // NaN, written after it was encoded.
  errors.Observe(Space(0, "n"), kFormat, spoiled.input(), spoiled.record());
  EXPECT_EQ(CountOf(errors.snapshot()[0].k), 1u);
  EXPECT_EQ(CountOf(errors.snapshot()[0].v), 1u);
}

TEST(QuantizationErrorsTest, NamespacesBeyondTheLimitShareOne) {
  QuantizationErrors errors({.sample_interval = 1, .namespaces_max = 2});
  EXPECT_TRUE(errors.snapshot().empty());
  Head head(1);
  for (const NamespaceId id : {4, 2, 900, 2, 0}) {
    errors.Observe(Space(id, absl::StrCat("n", id)), kFormat, head.input(), head.record());
  }
  const auto all = errors.snapshot();
  ASSERT_EQ(all.size(), 3u);
  EXPECT_EQ(all[0].name, "n4");
  EXPECT_EQ(CountOf(all[0].k), 1u);
  EXPECT_EQ(all[1].name, "n2");
  EXPECT_EQ(CountOf(all[1].k), 2u);
  EXPECT_EQ(all[2].name, "");
  EXPECT_EQ(CountOf(all[2].k), 2u);
}

}  // namespace
}  // namespace kvmill
