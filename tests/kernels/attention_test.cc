// The cpu attention against the fp64 reference: every SIMD level and every way to multiply codes,
// every format, head sharing, lengths around a block, masks, mixtures of tiles and raw blocks.
#include "kernels/attention.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <fstream>
#include <iterator>
#include <limits>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "kernels/simd.h"
#include "tests/kernels/attention_problem.h"
#include "tests/kernels/tile_inputs.h"

namespace kvmill {
namespace {

constexpr float kNothing = -std::numeric_limits<float>::infinity();
// The goal is 1e-3, whatever the product. Of the integer products, whose fixed point is the error,
// 10 seeds of every format, sharing and level have 7.3e-4 at most, and mostly less than 4e-4.
constexpr double kErrorMax = 8e-4;

// A SIMD level and a way to multiply codes on it.
struct Level {
  std::string simd, product;
  void Select() const {
    if (!ForceCpuSimd(simd) || !ForceCpuAttention(product)) {
      throw std::runtime_error("cannot run " + simd + " " + product);
    }
  }
};

std::vector<Level> Levels() {
  std::vector<Level> levels;
  for (const std::string_view simd : CpuSimdNames()) {
    ForceCpuSimd(simd);
    for (const std::string_view product : CpuAttentionNames()) {
      levels.push_back({std::string(simd), std::string(product)});
    }
  }
  ForceCpuSimd("");
  return levels;
}

void RunWorkersOnThreads(void* self, void (*work)(void*, std::uint32_t), void* context) {
  std::vector<std::thread> threads;
  for (std::uint32_t w = 0; w < *static_cast<const std::uint32_t*>(self); ++w) {
    threads.emplace_back(work, context, w);
  }
  for (std::thread& t : threads) t.join();
}

AttentionResult RunCpu(AttentionProblem& problem, std::uint32_t worker_count = 1,
                       bool on_threads = false) {
  return RunAttention(problem, [&](const AttentionArgs& args) {
    const std::size_t bytes = AttentionScratchBytes(args, worker_count);
    Scratch scratch(bytes);
    std::fill(scratch.span().begin(), scratch.span().end(), std::byte{0xFF});  // NaN everywhere.
    AttentionWorkers workers{worker_count, nullptr, nullptr};
    if (on_threads) {
      workers.run = RunWorkersOnThreads;
      workers.self = &worker_count;
    }
    AttentionCpu(args, workers, scratch.span());
  });
}

// One query over arguments without outputs, by the reference and by AttentionCpu.
void RunBoth(AttentionArgs args, std::size_t output_values, std::size_t heads,
             AttentionResult* want, AttentionResult* got) {
  *want = {std::vector<float>(output_values), std::vector<float>(heads)};
  *got = *want;
  args.output = want->output.data();
  args.log_sum_exp = want->log_sum_exp.data();
  ASSERT_EQ(ValidateAttention(args), absl::OkStatus());
  AttentionReference(args);
  args.output = got->output.data();
  args.log_sum_exp = got->log_sum_exp.data();
  Scratch scratch(AttentionScratchBytes(args, 1));
  AttentionCpu(args, {}, scratch.span());
}

void ExpectClose(const AttentionResult& got, const AttentionResult& want) {
  ASSERT_EQ(got.output.size(), want.output.size());
  for (const float x : got.output) ASSERT_TRUE(std::isfinite(x));
  EXPECT_LE(RelativeError(got.output, want.output), kErrorMax);
  for (std::size_t i = 0; i < want.log_sum_exp.size(); ++i) {
    if (want.log_sum_exp[i] == kNothing) {
      ASSERT_EQ(got.log_sum_exp[i], kNothing);
    } else {
      ASSERT_NEAR(got.log_sum_exp[i], want.log_sum_exp[i],
                  5e-4f * std::max(1.0f, std::fabs(want.log_sum_exp[i])));
    }
  }
}

// The values of a version 1 .npy file of '<f2'.
std::vector<std::uint16_t> ReadNpyValues(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  const std::string bytes((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  if (bytes.size() < 10 || bytes.find("'<f2'") == std::string::npos) {
    throw std::runtime_error("cannot read " + path);
  }
  const std::size_t header =
      10 + static_cast<unsigned char>(bytes[8]) + 256u * static_cast<unsigned char>(bytes[9]);
  std::vector<std::uint16_t> values((bytes.size() - header) / 2);
  std::memcpy(values.data(), bytes.data() + header, values.size() * 2);
  return values;
}

class AttentionTest : public testing::TestWithParam<std::size_t> {
 protected:
  AttentionTest() { Levels()[GetParam()].Select(); }
  ~AttentionTest() override {
    ForceCpuSimd("");
    ForceCpuAttention("");
  }
  static void Check(const ProblemSpec& spec) {
    AttentionProblem problem(spec);
    ExpectClose(RunCpu(problem), RunReference(problem));
  }
};

TEST_P(AttentionTest, EveryFormatAndHeadSharing) {
  for (std::size_t i = 0; i < kTileFormatCount; ++i) {
    ProblemSpec spec;
    spec.format = TileFormatAt(i);
    spec.sequences = {{3 * spec.format.group + 5u, 1}};
    spec.kv_heads = 1;
    spec.seed = static_cast<std::uint32_t>(i);
    for (const std::uint32_t sharing : {1u, 4u, 6u, 7u, 8u}) {
      spec.sharing = sharing;
      SCOPED_TRACE(testing::Message() << ToString(spec.format) << ", head_dim "
                                      << spec.format.head_dim << ", sharing " << sharing);
      Check(spec);
    }
  }
}

TEST_P(AttentionTest, ManyQueryHeadsOnOneKvHead) {
  for (const std::uint32_t sharing : {32u, 33u, 71u}) {
    ProblemSpec spec;
    spec.format = {4, 2, 128, 128};
    spec.sharing = sharing;
    spec.sequences = {{300, 1}, {20, 1}};
    SCOPED_TRACE(sharing);
    Check(spec);
  }
}

TEST_P(AttentionTest, EveryLengthAroundABlock) {
  ProblemSpec spec;
  spec.format = {4, 2, 128, 64};
  spec.kv_heads = 2;
  spec.sharing = 4;
  for (const std::uint64_t length :
       {0, 1, 2, 3, 5, 16, 63, 64, 65, 127, 128, 129, 255, 256, 1000}) {
    spec.sequences.push_back({length, 1, length % 2 == 0});
  }
  Check(spec);
}

TEST_P(AttentionTest, TilesRawBlocksAndTailsMix) {
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
    for (const Frame frame : {Frame::kModel, Frame::kRotated}) {
      ProblemSpec spec;
      spec.format = {4, 4, 64, 128};
      spec.kv_heads = 3;
      spec.sharing = 7;
      spec.raw_fraction = 0.4;
      spec.dtype = dtype;
      spec.frame = frame;
      spec.query_size = 3;
      spec.sequences = {{700, 1}, {64, 1}, {389, 1, true}, {40, 1}};
      spec.tail_page_tokens = dtype == DType::kFloat16 ? 16 : 5;
      spec.tail_channel_stride_bytes = dtype == DType::kFloat16 ? 2 : 6;
      SCOPED_TRACE(testing::Message() << static_cast<int>(dtype) << static_cast<int>(frame));
      Check(spec);
    }
  }
}

TEST_P(AttentionTest, OnlyRawBlocks) {
  for (const std::uint16_t dim : {std::uint16_t{64}, std::uint16_t{128}, std::uint16_t{256}}) {
    ProblemSpec spec;
    spec.format = {4, 2, 128, dim};
    spec.kv_heads = 2;
    spec.sharing = 5;
    spec.raw_fraction = 1;
    spec.sequences = {{600, 1}, {130, 3, true}};
    SCOPED_TRACE(dim);
    Check(spec);
  }
}

// However small or large all K or all V are: nothing is lost where fp16 has its bits. Only below
// 2^-14, where fp16 itself has fewer, may there be less.
TEST_P(AttentionTest, RawRowsOfAnySizeStayAccurate) {
  const TileFormat format{4, 2, 64, 64};
  constexpr std::size_t kTokens = 150;
  constexpr std::size_t kRows = 8;
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
    for (const float size : {1e-3f, 0.02f, 1.0f, 50.0f, 9000.0f}) {
      SCOPED_TRACE(testing::Message() << static_cast<int>(dtype) << " " << size);
      std::mt19937 random(3);
      std::normal_distribution<float> gauss;
      std::vector<std::uint16_t> k(kTokens * 64);
      std::vector<std::uint16_t> v(kTokens * 64);
      for (std::uint16_t& x : k) x = FromFloat(gauss(random) * size, dtype);
      for (std::uint16_t& x : v) x = FromFloat(gauss(random) * size, dtype);
      std::vector<float> query(kRows * 64);
      for (float& x : query) x = gauss(random) / size;
      const auto* const k_page = reinterpret_cast<const std::byte*>(k.data());
      const auto* const v_page = reinterpret_cast<const std::byte*>(v.data());
      TailHead tail;
      tail.k.pages = &k_page;
      tail.k.page_tokens = kTokens;
      tail.k.token_stride_bytes = 128;
      tail.k.dtype = dtype;
      tail.v = tail.k;
      tail.v.pages = &v_page;
      AttentionSequence sequence;
      sequence.tail = &tail;
      sequence.token_end = kTokens;
      sequence.query_position = kTokens - 1;
      AttentionArgs args;
      args.shape.format = format;
      args.shape.q_heads = kRows;
      args.shape.kv_heads = 1;
      args.shape.scale = 0.125f;
      args.shape.raw = PackedRawLayout(format, dtype, format.group);
      args.sequences = {&sequence, 1};
      args.query = query.data();
      AttentionResult want;
      AttentionResult got;
      RunBoth(args, kRows * 64, kRows, &want, &got);
      ExpectClose(got, want);
    }
  }
}

TEST_P(AttentionTest, QueriesOfAChunkAreCausal) {
  ProblemSpec spec;
  spec.format = {2, 2, 64, 64};
  spec.kv_heads = 2;
  spec.sharing = 6;
  spec.sequences = {{300, 40}, {8, 8}, {128, 3}, {65, 1}, {1, 5}, {70, 0}};
  Check(spec);
}

TEST_P(AttentionTest, WindowsAndCaps) {
  for (const std::uint32_t window : {1u, 50u, 128u, 129u, 5000u}) {
    for (const float cap : {0.0f, 1.5f, 50.0f}) {
      ProblemSpec spec;
      spec.format = {4, 2, 128, 64};
      spec.kv_heads = 1;
      spec.sharing = 4;
      spec.window = window;
      spec.soft_cap = cap;
      spec.query_size = 4;
      spec.raw_fraction = 0.3;
      spec.sequences = {{500, 9}, {64, 1}};
      SCOPED_TRACE(testing::Message() << "window " << window << ", cap " << cap);
      Check(spec);
    }
  }
}

TEST_P(AttentionTest, SharpAttentionStaysAccurate) {
  ProblemSpec spec;
  spec.format = {4, 4, 128, 128};
  spec.sharing = 8;
  spec.query_size = 12;  // Logits of a few hundred: nearly all weight on one token.
  spec.sequences = {{1000, 1}};
  AttentionProblem problem(spec);
  const AttentionResult want = RunReference(problem);
  const AttentionResult got = RunCpu(problem);
  EXPECT_LE(RelativeError(got.output, want.output), 1e-3);
}

TEST_P(AttentionTest, WhereNothingIsSeenTheOutputIsZeroAndTheLogSumExpMinusInfinity) {
  ProblemSpec spec;
  spec.format = {4, 2, 64, 64};
  spec.kv_heads = 2;
  spec.sharing = 3;
  spec.sequences = {{0, 1}, {200, 1}, {200, 2}, {200, 1}};
  spec.window = 100;
  AttentionProblem problem(spec);
  problem.sequences()[1].token_begin = 200;
  problem.sequences()[2].query_position = 10000;
  problem.sequences()[3].token_begin = 199;  // One token.
  const AttentionResult got = RunCpu(problem, 3);
  ExpectClose(got, RunReference(problem));
  const std::size_t seeing = got.log_sum_exp.size() - 6;
  for (std::size_t i = 0; i < seeing; ++i) EXPECT_EQ(got.log_sum_exp[i], kNothing);
  for (std::size_t i = 0; i < seeing * 64; ++i) EXPECT_EQ(got.output[i], 0.0f);
  for (std::size_t i = seeing; i < seeing + 6; ++i) EXPECT_TRUE(std::isfinite(got.log_sum_exp[i]));
}

TEST_P(AttentionTest, ZeroQueriesAverageTheValues) {
  ProblemSpec spec;
  spec.format = {4, 2, 128, 128};
  spec.sharing = 2;
  spec.query_size = 1e-30f;
  spec.sequences = {{400, 1}};
  AttentionProblem problem(spec);
  std::fill(problem.query().begin(), problem.query().end(), 0.0f);
  const AttentionResult got = RunCpu(problem);
  ExpectClose(got, RunReference(problem));
  for (const float lse : got.log_sum_exp) EXPECT_NEAR(lse, std::log(400.0f), 1e-4f);
}

TEST_P(AttentionTest, AnyNumberOfWorkersGivesTheSame) {
  ProblemSpec spec;
  spec.format = {4, 2, 64, 64};
  spec.kv_heads = 2;
  spec.sharing = 4;
  spec.raw_fraction = 0.1;
  spec.sequences = {{2500, 1}, {70, 1}, {0, 1}, {5, 0}, {1100, 10}};
  AttentionProblem problem(spec);
  const AttentionResult want = RunReference(problem);
  for (const std::uint32_t workers : {1u, 2u, 3u, 8u}) {
    for (const bool threads : {false, true}) {
      SCOPED_TRACE(testing::Message() << workers << " workers, threads " << threads);
      ExpectClose(RunCpu(problem, workers, threads), want);
    }
  }
}

TEST_P(AttentionTest, SixteenBitQueriesAndOutputs) {
  for (const VectorType type : {VectorType::kFloat16, VectorType::kBFloat16}) {
    const DType dtype = type == VectorType::kFloat16 ? DType::kFloat16 : DType::kBFloat16;
    ProblemSpec spec;
    spec.format = {4, 2, 64, 64};
    spec.sharing = 4;
    spec.query_type = type;
    spec.sequences = {{200, 2}};
    AttentionProblem problem(spec);
    const AttentionResult want = RunReference(problem);
    std::vector<std::uint16_t> output(want.output.size());
    AttentionArgs args = problem.args();
    args.output = output.data();
    args.output_type = type;
    ASSERT_EQ(ValidateAttention(args), absl::OkStatus());
    Scratch scratch(AttentionScratchBytes(args, 1));
    AttentionCpu(args, {}, scratch.span());
    std::vector<float> got;
    for (const std::uint16_t h : output) got.push_back(ToFloat(h, dtype));
    EXPECT_LE(RelativeError(got, want.output), type == VectorType::kFloat16 ? 5e-4 : 4e-3);
  }
}

// Tiles of every kind of input that has broken a quantizer: scales of 0, zeros only, values near
// the end of fp16. Where logits get so large that all weight is on one token, only finite is asked
// for.
TEST_P(AttentionTest, StrangeTilesGiveFiniteOutputsAndNearlyAllOfThemExactOnes) {
  const TileFormat format{4, 2, 64, 64};
  for (const InputKind kind : kInputKinds) {
    SCOPED_TRACE(ToString(kind));
    std::vector<Encoded> records;
    std::vector<AttentionBlock> table;
    for (std::uint32_t seed = 1; seed <= 3; ++seed) {
      records.push_back(Encode(CpuImplementations().front(), format,
                               MakeInput(format, kind, DType::kFloat16, seed)));
      if (records.back().result != EncodeResult::kTile) records.pop_back();
    }
    Levels()[GetParam()].Select();  // Encode may have chosen another.
    if (records.empty()) continue;
    for (const Encoded& e : records) table.push_back({BlockKind::kTile, e.record.data()});
    AttentionSequence sequence;
    sequence.blocks = table.data();
    sequence.block_count = static_cast<std::uint32_t>(table.size());
    sequence.token_end = std::uint64_t{64} * table.size();
    sequence.query_position = sequence.token_end - 1;
    constexpr std::size_t kHeads = 5;
    std::mt19937 random(7);
    std::normal_distribution<float> gauss;
    std::vector<float> query(kHeads * format.head_dim);
    for (float& q : query) q = gauss(random);
    AttentionArgs args;
    args.shape.format = format;
    args.shape.q_heads = kHeads;
    args.shape.kv_heads = 1;
    args.shape.scale = 0.125f;
    args.sequences = {&sequence, 1};
    args.query = query.data();
    AttentionResult want, got;
    ASSERT_NO_FATAL_FAILURE(RunBoth(args, query.size(), kHeads, &want, &got));
    for (const float x : got.output) ASSERT_TRUE(std::isfinite(x));
    for (const float x : got.log_sum_exp) ASSERT_TRUE(std::isfinite(x));
    if (kind == InputKind::kNearFp16Max || kind == InputKind::kHugeToken) continue;
    EXPECT_LE(RelativeError(got.output, want.output), 1e-3);
  }
}

// K and V of a real model (head_dim 128, one KV head, 14 blocks and a tail of 126), with its own
// keys as queries: what attention is about.
TEST_P(AttentionTest, KeysAndValuesOfARealModel) {
  for (const int layer : {0, 1, 2, 3}) {
    const std::string stem = std::string(KVMILL_SOURCE_DIR "/tests/data/tiny-lm-kv/retrieval_L0") +
                             std::to_string(layer);
    const std::vector<std::uint16_t> k = ReadNpyValues(stem + "_k.npy");
    const std::vector<std::uint16_t> v = ReadNpyValues(stem + "_v.npy");
    constexpr std::size_t kDim = 128;
    const std::size_t tokens = k.size() / kDim;
    ASSERT_EQ(tokens, 1918u);
    for (const TileFormat& format : {TileFormat{4, 2, 128, 128}, TileFormat{2, 2, 64, 128}}) {
      SCOPED_TRACE(testing::Message() << "layer " << layer << ", " << ToString(format));
      const std::uint32_t group = format.group;
      const std::size_t blocks = tokens / group;
      std::vector<Encoded> records;
      std::vector<AttentionBlock> table;
      for (std::size_t b = 0; b < blocks; ++b) {
        const auto first = static_cast<std::ptrdiff_t>(b * group * kDim);
        const auto last = first + static_cast<std::ptrdiff_t>(group * kDim);
        const TileInput input{DType::kFloat16,
                              {k.begin() + first, k.begin() + last},
                              {v.begin() + first, v.begin() + last}};
        records.push_back(Encode(CpuImplementations().front(), format, input));
        Levels()[GetParam()].Select();
        ASSERT_EQ(records.back().result, EncodeResult::kTile);
      }
      for (const Encoded& e : records) table.push_back({BlockKind::kTile, e.record.data()});
      const auto* k_page = reinterpret_cast<const std::byte*>(k.data() + blocks * group * kDim);
      const auto* v_page = reinterpret_cast<const std::byte*>(v.data() + blocks * group * kDim);
      const TailHead tail{{&k_page, 0, group, 2 * kDim, 2, DType::kFloat16},
                          {&v_page, 0, group, 2 * kDim, 2, DType::kFloat16}};
      AttentionSequence sequence;
      sequence.blocks = table.data();
      sequence.block_count = static_cast<std::uint32_t>(blocks);
      sequence.tail = &tail;
      sequence.token_end = tokens;
      sequence.query_position = tokens - 1;
      std::vector<float> query;
      constexpr std::size_t kHeads = 8;
      for (std::size_t h = 0; h < kHeads; ++h) {
        for (std::size_t d = 0; d < kDim; ++d) {
          query.push_back(Float16ToFloat(k[(h * 237 + 11) * kDim + d]));
        }
      }
      AttentionArgs args;
      args.shape.format = format;
      args.shape.q_heads = kHeads;
      args.shape.kv_heads = 1;
      args.shape.scale = 1 / std::sqrt(static_cast<float>(kDim));
      args.sequences = {&sequence, 1};
      args.query = query.data();
      AttentionResult want, got;
      ASSERT_NO_FATAL_FAILURE(RunBoth(args, query.size(), kHeads, &want, &got));
      ExpectClose(got, want);
      RecordProperty("error_layer" + std::to_string(layer) + "_" + ToString(format),
                     std::to_string(RelativeError(got.output, want.output)));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(AllLevels, AttentionTest, testing::Range(std::size_t{0}, Levels().size()),
                         [](const auto& param) {
                           const Level level = Levels()[param.param];
                           return level.simd + "_" + level.product;
                         });

TEST(CpuAttentionTest, ForcingAProductHoldsWhereTheLevelHasIt) {
  const std::string_view best = CpuAttentionName();
  EXPECT_EQ(CpuAttentionNames().front(), best);
  EXPECT_FALSE(ForceCpuAttention("MMX"));
  EXPECT_EQ(CpuAttentionName(), best);
  for (const std::string_view name : CpuAttentionNames()) {
    EXPECT_TRUE(ForceCpuAttention(name));
    EXPECT_EQ(CpuAttentionName(), name);
  }
  EXPECT_TRUE(ForceCpuAttention(best));
  ASSERT_TRUE(ForceCpuSimd(CpuSimdNames().back()));
  EXPECT_EQ(CpuAttentionName(), CpuAttentionNames().front());  // What is left.
  ForceCpuSimd("");
  EXPECT_TRUE(ForceCpuAttention(""));
  EXPECT_EQ(CpuAttentionName(), best);
}

}  // namespace
}  // namespace kvmill
