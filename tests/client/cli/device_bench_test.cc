// What the benchmarks and `encode` do on a GPU, on a host device: the same code but for the
// kernels.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "client/cli/attention_bench.h"
#include "client/cli/device_arena.h"
#include "client/cli/encode_bench.h"
#include "client/cli/tile_codec.h"

namespace kvmill::cli {
namespace {

TEST(DeviceBenchTest, EncodesAsManyTilesAsWereAskedFor) {
  const auto device = MakeHostDevice();
  EncodeBenchOptions options;
  options.format = *ParseTileFormat("k4v2_g64", 64);
  options.repetitions = 3;
  options.device_bytes = std::size_t{2} << 20;  // 128 tiles: more than the distinct ones.
  const auto result = RunEncodeBenchOn(*device, options);
  ASSERT_TRUE(result.ok()) << result.status();
  ASSERT_EQ(result->us_per_tile.size(), 3u);
  EXPECT_TRUE(std::is_sorted(result->us_per_tile.begin(), result->us_per_tile.end()));
  EXPECT_EQ(result->median_us, result->us_per_tile[1]);
  EXPECT_NEAR(result->gb_per_s, 16384 / result->median_us / 1e3, 1e-6 * result->gb_per_s);
  EXPECT_GT(result->reference_gb_per_s, 0);
  EXPECT_NEAR(result->bound_us, (16384 + 3840) / (2 * result->memcpy_gb_per_s * 1e3),
              1e-6 * result->bound_us);
}

TEST(DeviceBenchTest, AttendsToABatchAndIsRight) {
  const auto device = MakeHostDevice();
  AttentionBenchOptions options;
  options.format = *ParseTileFormat("k4v2_g64", 64);
  options.context = 300;
  options.q_heads = 6;
  options.kv_heads = 2;
  options.repetitions = 3;
  options.device_bytes = 10 * 3840 * 7;  // Five blocks of two heads a sequence: seven sequences.
  const auto result = RunAttentionBenchOn(*device, options);
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->layers, 7u);
  EXPECT_EQ(result->tiles_us.size(), 3u);
  EXPECT_LT(result->rel_error, 1e-3);
  EXPECT_GT(result->rel_error, 0);
  EXPECT_LT(result->rel_error_fp16, 1e-3);
  EXPECT_NEAR(result->tiles_gb_per_s, 10 * 3840 / result->tiles_us[1] / 1e3,
              1e-6 * result->tiles_gb_per_s);
  EXPECT_NEAR(result->fp16_gb_per_s, 10 * 16384 / result->fp16_us[1] / 1e3,
              1e-6 * result->fp16_gb_per_s);
  EXPECT_GT(result->read_gb_per_s, 0);
  EXPECT_TRUE(result->tiles_cpu_us.empty());
  options.kv_heads = 4;
  EXPECT_EQ(RunAttentionBenchOn(*device, options).status().code(),
            absl::StatusCode::kInvalidArgument);
}

TEST(DeviceBenchTest, TensorsBecomeTheSameRecordsAsOnTheCpu) {
  const auto device = MakeHostDevice();
  Tensor k;
  k.tokens = 300;  // Two blocks and a tail.
  k.heads = 3;
  k.head_dim = 64;
  std::mt19937 random(4);
  std::normal_distribution<float> gauss;
  k.values.resize(std::size_t{k.tokens} * k.heads * k.head_dim);
  Tensor v = k;
  for (Tensor* t : {&k, &v}) {
    for (std::uint16_t& value : t->values) value = FloatToFloat16(gauss(random));
  }
  // One head that a tile cannot hold: the smallest fp16 values.
  for (std::uint32_t t = 128; t < 256; ++t) {
    for (std::uint32_t d = 0; d < 64; ++d) {
      k.values[(t * 3 + 1) * 64 + d] = static_cast<std::uint16_t>((t * 7 + d * 5) % 11);
    }
  }
  const TileFormat format = *ParseTileFormat("k4v2_g128", 64);
  const auto cpu = EncodeTensors(k, v, format, Encoder::kCpu);
  const auto on_device = EncodeTensors(k, v, format, Encoder::kDevice, device.get());
  ASSERT_TRUE(cpu.ok()) << cpu.status();
  ASSERT_TRUE(on_device.ok()) << on_device.status();
  EXPECT_EQ(on_device->records, cpu->records);
  ASSERT_EQ(cpu->raw_heads.size(), 1u);
  ASSERT_EQ(on_device->raw_heads.size(), 1u);
  EXPECT_EQ(on_device->raw_heads[0].block, 1u);
  EXPECT_EQ(on_device->raw_heads[0].k, cpu->raw_heads[0].k);
  EXPECT_EQ(on_device->rel_error_k, cpu->rel_error_k);
  EXPECT_EQ(on_device->rel_error_v, cpu->rel_error_v);
  k.values[7] = 0x7C00;  // Infinity.
  EXPECT_THAT(
      std::string(EncodeTensors(k, v, format, Encoder::kDevice, device.get()).status().message()),
      testing::HasSubstr("token 0 head 0 channel 7"));
}

TEST(DeviceBenchTest, DeviceFlagsAreChecked) {
  for (const char* good : {"host", "cuda", "cuda:0", "cuda:15"})
    EXPECT_EQ(CheckDeviceFlag(good), "");
  for (const char* bad : {"", "auto", "cuda:", "cuda:x", "cuda:-1", "gpu", "cuda:12345"}) {
    EXPECT_NE(CheckDeviceFlag(bad), "") << bad;
  }
}

}  // namespace
}  // namespace kvmill::cli
