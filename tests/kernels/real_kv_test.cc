// Real K and V through every encoder and decoder.
//
// Goal: what holds for made-up tiles holds for what models compute: the cpu encoder is the
// reference at every SIMD level, decoders agree, no head needs to stay raw, the error is what the
// bits allow. Method: every layer of tests/data/tiny-lm-kv (D 128), and of $KVMILL_EXTRA_DATA/kv (D
// 64) when that is set, in every format of its head_dim.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "client/cli/npy.h"
#include "tests/kernels/encode_budget.h"
#include "tests/kernels/implementations.h"
#include "tests/kernels/tile_testing.h"

namespace kvmill {
namespace {

struct Layer {
  std::string name;
  cli::Tensor k, v;
};

std::vector<Layer> LoadLayers(const std::string& folder) {
  std::vector<std::string> paths;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    const std::string path = entry.path().string();
    if (path.ends_with("_k.npy")) paths.push_back(path);
  }
  std::sort(paths.begin(), paths.end());
  std::vector<Layer> layers;
  for (std::string path : paths) {
    absl::StatusOr<cli::Tensor> k = cli::ReadNpy(path, DType::kFloat16);
    EXPECT_TRUE(k.ok()) << k.status();
    const std::string name = std::filesystem::path(path).stem().string();
    path.replace(path.size() - 5, 1, "v");
    absl::StatusOr<cli::Tensor> v = cli::ReadNpy(path, DType::kFloat16);
    EXPECT_TRUE(v.ok()) << v.status();
    if (!k.ok() || !v.ok()) continue;
    EXPECT_EQ(k->ShapeString(), v->ShapeString()) << path;
    layers.push_back({name, *std::move(k), *std::move(v)});
  }
  return layers;
}

// The tile of one head that starts at `token`.
TileInput TileOf(const Layer& layer, std::uint32_t token, std::uint32_t head, std::uint32_t group) {
  const auto rows = [&](const cli::Tensor& tensor) {
    std::vector<std::uint16_t> values;
    for (std::uint32_t t = token; t < token + group; ++t) {
      const auto row =
          tensor.values.begin() +
          static_cast<std::ptrdiff_t>((std::size_t{t} * tensor.heads + head) * tensor.head_dim);
      values.insert(values.end(), row, row + tensor.head_dim);
    }
    return values;
  };
  return {layer.k.dtype, rows(layer.k), rows(layer.v)};
}

std::vector<float> ToFloats(const std::vector<std::uint16_t>& values) {
  std::vector<float> floats(values.size());
  std::transform(values.begin(), values.end(), floats.begin(), Float16ToFloat);
  return floats;
}

// Relative Frobenius error of the K or V of many tiles together.
struct ErrorSum {
  double difference = 0;
  double norm = 0;

  void Add(const std::vector<float>& decoded, const std::vector<float>& original) {
    for (std::size_t i = 0; i < original.size(); ++i) {
      const double x = static_cast<double>(original[i]);
      const double d = static_cast<double>(decoded[i]) - x;
      difference += d * d;
      norm += x * x;
    }
  }
  double value() const { return std::sqrt(difference / norm); }
};

// What 4 and 2 bits may cost, of all tiles of one set of data together.
double ErrorMax(std::uint8_t bits) { return bits == 4 ? 0.12 : 0.50; }

struct Result {
  std::size_t tiles = 0;
  std::size_t record_bytes = 0;
  std::size_t engine_bytes = 0;
  double compression() const {
    return static_cast<double>(engine_bytes) / static_cast<double>(record_bytes);
  }
};

// Every tile of `layers` in `format`.
Result ExpectRealTilesHold(const std::vector<Layer>& layers, const TileFormat& format) {
  Result result;
  std::map<std::string, Tally> tallies;
  std::map<std::string, std::pair<ErrorSum, ErrorSum>> errors;
  for (const Layer& layer : layers) {
    for (std::uint32_t token = 0; token + format.group <= layer.k.tokens; token += format.group) {
      for (std::uint32_t head = 0; head < layer.k.heads; ++head) {
        SCOPED_TRACE(testing::Message() << layer.name << ", token " << token << ", head " << head);
        const TileInput input = TileOf(layer, token, head, format.group);
        const std::vector<float> k = ToFloats(input.k);
        const std::vector<float> v = ToFloats(input.v);
        const Encoded want = Encode(ReferenceImplementation(), format, input);
        EXPECT_EQ(want.result, EncodeResult::kTile);
        ++result.tiles;
        result.record_bytes += want.record.size();
        result.engine_bytes += 2 * (input.k.size() + input.v.size());
        const Decoded reference = Decode(ReferenceImplementation(), format, want.record);
        errors["reference"].first.Add(reference.k, k);
        errors["reference"].second.Add(reference.v, v);
        for (const Implementation& cpu : CpuImplementations()) {
          // As slow as the reference, and held to it by encode_equivalence_test.
          if (cpu.simd == "SCALAR") continue;
          SCOPED_TRACE(cpu.name);
          cpu.Select();
          const Encoded got = Encode(cpu, format, input);
          EXPECT_EQ(got.result, EncodeResult::kTile);
          Compare(format, want, got, tallies[cpu.name]);
          const Decoded decoded = Decode(cpu, format, want.record);
          EXPECT_LE(RelativeError(decoded.k, reference.k), 1e-6);
          EXPECT_LE(RelativeError(decoded.v, reference.v), 1e-6);
          const Decoded own = Decode(cpu, format, got.record);
          errors[cpu.name].first.Add(own.k, k);
          errors[cpu.name].second.Add(own.v, v);
        }
      }
    }
  }
  for (auto& [name, tally] : tallies) {
    SCOPED_TRACE(name);
    ExpectWithinBudget(tally);
  }
  for (const auto& [name, error] : errors) {
    EXPECT_LE(error.first.value(), ErrorMax(format.key_bits)) << name << ": K";
    EXPECT_LE(error.second.value(), ErrorMax(format.value_bits)) << name << ": V";
  }
  if (!errors.empty()) {
    const auto& [k, v] = errors.at("reference");
    std::printf("%s d %u: %zu tiles, %.3fx, error K %.4f V %.4f\n", ToString(format).c_str(),
                unsigned{format.head_dim}, result.tiles, result.compression(), k.value(),
                v.value());
  }
  return result;
}

void ExpectEveryFormatHolds(const std::vector<Layer>& layers) {
  const std::uint32_t head_dim = layers.front().k.head_dim;
  for (const Layer& layer : layers) ASSERT_EQ(layer.k.head_dim, head_dim) << layer.name;
  for (std::size_t i = 0; i < kTileFormatCount; ++i) {
    const TileFormat format = TileFormatAt(i);
    if (format.head_dim != head_dim) continue;
    SCOPED_TRACE(ToString(format));
    const Result result = ExpectRealTilesHold(layers, format);
    EXPECT_GT(result.tiles, 0u);
    if (ToString(format) == "k4v2_g128") {
      EXPECT_NEAR(result.compression(), head_dim == 64 ? 4.49 : 4.74, 0.005);
    }
  }
}

TEST(RealKvTest, EveryLayerOfTheOwnModelHolds) {
  const std::vector<Layer> layers =
      LoadLayers(std::string(KVMILL_SOURCE_DIR) + "/tests/data/tiny-lm-kv");
  ASSERT_EQ(layers.size(), 4u);
  ExpectEveryFormatHolds(layers);
}

TEST(RealKvTest, EveryLayerOfTheExtraDataHolds) {
  const char* folder = std::getenv("KVMILL_EXTRA_DATA");
  if (folder == nullptr || *folder == '\0') {
    GTEST_SKIP() << "KVMILL_EXTRA_DATA is not set: the folder with kv/*_k.npy and kv/*_v.npy";
  }
  const std::vector<Layer> layers = LoadLayers(std::string(folder) + "/kv");
  ASSERT_FALSE(layers.empty()) << folder << "/kv has no *_k.npy";
  ExpectEveryFormatHolds(layers);
}

}  // namespace
}  // namespace kvmill
