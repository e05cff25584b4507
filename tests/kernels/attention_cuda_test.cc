// The CUDA attention, under the harness or on a device, against the fp64 reference: every format,
// head sharing, ragged batches over any number of workers, masks, mixtures of tiles and raw blocks.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/attention.h"
#include "kernels/cuda_formats.h"
#include "tests/cuda_harness/harness.h"
#include "tests/kernels/attention_problem.h"

namespace kvmill {
namespace {

using cuda_harness::DeviceBuffer;
using cuda_harness::Harness;

// The goal is 1e-3; the products have 22 bits of queries and probabilities.
constexpr double kErrorMax = 1e-4;

struct Options {
  std::uint32_t workers = 3;
  bool packed = false;  // Everything adjacent and aligned: the fast ways to load.
  int launches = 1;
  VectorType output_type = VectorType::kFloat32;
  std::size_t shared_bytes_max = 0;  // Of the harness; 0: as it is.
};

std::uint32_t NextSeed() {
  static std::uint32_t seed = 0;
  return ++seed;
}

// A call in the memory of a device, exactly as large as the contract says.
class DeviceCall {
 public:
  DeviceCall(Harness& harness, const AttentionArgs& host, const Options& options)
      : harness_(harness), options_(options), args_(host) {
    const AttentionShape& shape = host.shape;
    if (options.packed) {
      args_.shape.raw = PackedRawLayout(shape.format, shape.raw.dtype, shape.format.group);
    }
    std::vector<AttentionSequence> sequences;
    std::size_t rows = 0;
    for (const AttentionSequence& s : host.sequences) {
      sequences.push_back(CopySequence(host.shape, s));
      rows += std::size_t{s.query_count} * shape.q_heads;
    }
    args_.sequences = absl::MakeConstSpan(
        harness.Copy(absl::MakeConstSpan(sequences), "sequences").data(), sequences.size());
    const std::size_t values = rows * shape.format.head_dim;
    args_.query =
        Bytes(host.query, values * (host.query_type == VectorType::kFloat32 ? 4 : 2), 0, "query");
    args_.output_type = options.output_type;
    output_bytes_ = values * (options.output_type == VectorType::kFloat32 ? 4 : 2);
    args_.output = harness.AllocateBytes(output_bytes_, "output");
    args_.log_sum_exp = harness.Allocate<float>(rows, "log_sum_exp").data();
    workspace_ = harness.AllocateBytes(
        AttentionCudaWorkspaceBytes(shape.format, sequences.size(), options.workers), "workspace");
  }

  absl::Status Run() {
    for (int i = 0; i < options_.launches; ++i) {
      std::memset(args_.output, 0xFF, output_bytes_);  // NaN.
      absl::Status status = AttentionCuda(args_, options_.workers, workspace_, nullptr);
      status.Update(harness_.Finish());
      if (!status.ok()) return status;
    }
    return absl::OkStatus();
  }
  const AttentionArgs& args() const { return args_; }

 private:
  std::byte* Bytes(const void* from, std::size_t bytes, std::size_t misalignment,
                   const std::string& name) {
    const DeviceBuffer<std::byte> buffer = harness_.Allocate<std::byte>(misalignment + bytes, name);
    if (bytes != 0) std::memcpy(buffer.data() + misalignment, from, bytes);
    return buffer.data() + misalignment;
  }

  const std::byte* CopyRaw(const AttentionShape& shape, const std::byte* from, std::size_t rows) {
    const std::size_t row_bytes = std::size_t{2} * shape.format.head_dim;
    const RawLayout& to = args_.shape.raw;
    const auto bytes =
        static_cast<std::size_t>(to.value_offset_bytes +
                                 static_cast<std::ptrdiff_t>(rows - 1) * to.token_stride_bytes) +
        row_bytes;
    std::byte* const data = harness_.Allocate<std::byte>(bytes, "raw block").data();
    for (std::size_t t = 0; t < rows; ++t) {
      const auto i = static_cast<std::ptrdiff_t>(t);
      std::memcpy(data + i * to.token_stride_bytes, from + i * shape.raw.token_stride_bytes,
                  row_bytes);
      std::memcpy(data + to.value_offset_bytes + i * to.token_stride_bytes,
                  from + shape.raw.value_offset_bytes + i * shape.raw.token_stride_bytes,
                  row_bytes);
    }
    return data;
  }

  HeadPages CopyTail(const AttentionShape& shape, const HeadPages& from, std::uint32_t tokens) {
    HeadPages to = from;
    if (options_.packed) {
      to.offset_bytes = 0;
      to.channel_stride_bytes = 2;
      to.token_stride_bytes = std::ptrdiff_t{2} * shape.format.head_dim;
    }
    std::vector<const std::byte*> pages;
    for (std::uint32_t first = 0; first < tokens; first += to.page_tokens) {
      const std::uint32_t count = std::min(to.page_tokens, tokens - first);
      const auto bytes =
          to.offset_bytes +
          static_cast<std::size_t>((count - 1) * to.token_stride_bytes +
                                   (shape.format.head_dim - 1) * to.channel_stride_bytes) +
          2;
      std::byte* const page = harness_.Allocate<std::byte>(bytes, "tail page").data();
      for (std::uint32_t t = 0; t < count; ++t) {
        for (std::uint32_t d = 0; d < shape.format.head_dim; ++d) {
          std::memcpy(
              page + to.offset_bytes + t * to.token_stride_bytes + d * to.channel_stride_bytes,
              from.Row(first + t) + d * from.channel_stride_bytes, 2);
        }
      }
      pages.push_back(page);
    }
    to.pages = harness_.Copy(absl::MakeConstSpan(pages), "tail pages").data();
    return to;
  }

  AttentionSequence CopySequence(const AttentionShape& shape, const AttentionSequence& s) {
    AttentionSequence out = s;
    const std::uint64_t group = shape.format.group;
    std::vector<AttentionBlock> table;
    for (std::size_t i = 0; i < std::size_t{s.block_count} * shape.kv_heads; ++i) {
      AttentionBlock block = s.blocks[i];
      const std::uint64_t first = i / shape.kv_heads * group;
      if (block.kind == BlockKind::kTile) {
        block.data =
            Bytes(block.data, RecordBytes(shape.format), options_.packed ? 0 : 1, "record");
      } else if (block.kind == BlockKind::kRaw && first < s.token_end) {
        block.data = CopyRaw(shape, block.data, std::min(group, s.token_end - first));
      }
      table.push_back(block);
    }
    out.blocks = harness_.Copy(absl::MakeConstSpan(table), "table").data();
    if (s.tail != nullptr && s.token_end > s.block_count * group) {
      const auto tokens = static_cast<std::uint32_t>(s.token_end - s.block_count * group);
      std::vector<TailHead> tail;
      for (std::uint32_t h = 0; h < shape.kv_heads; ++h) {
        const HeadPages k = CopyTail(shape, s.tail[h].k, tokens);
        tail.push_back({k, CopyTail(shape, s.tail[h].v, tokens)});
      }
      out.tail = harness_.Copy(absl::MakeConstSpan(tail), "tail").data();
    }
    return out;
  }

  Harness& harness_;
  const Options options_;
  AttentionArgs args_;
  std::size_t output_bytes_ = 0;
  void* workspace_ = nullptr;
};

absl::StatusOr<AttentionResult> TryCuda(AttentionProblem& problem, const Options& options) {
  absl::Status status;
  AttentionResult result = RunAttention(problem, [&](const AttentionArgs& args) {
    Harness harness(NextSeed());
    if (options.shared_bytes_max != 0) harness.LimitSharedBytes(options.shared_bytes_max);
    DeviceCall call(harness, args, options);
    status = call.Run();
    const std::size_t rows = problem.row_count();
    auto* const output = static_cast<float*>(args.output);
    for (std::size_t i = 0; i < rows * problem.dim(); ++i) {
      if (options.output_type == VectorType::kFloat32) {
        output[i] = static_cast<const float*>(call.args().output)[i];
      } else {
        output[i] = ToFloat(
            static_cast<const std::uint16_t*>(call.args().output)[i],
            options.output_type == VectorType::kFloat16 ? DType::kFloat16 : DType::kBFloat16);
      }
    }
    std::copy_n(call.args().log_sum_exp, rows, args.log_sum_exp);
  });
  if (!status.ok()) return status;
  return result;
}

AttentionResult RunCuda(AttentionProblem& problem, const Options& options = {}) {
  absl::StatusOr<AttentionResult> result = TryCuda(problem, options);
  if (!result.ok()) throw std::runtime_error(std::string(result.status().message()));
  return *std::move(result);
}

void ExpectClose(const AttentionResult& got, const AttentionResult& want,
                 double error_max = kErrorMax) {
  ASSERT_EQ(got.output.size(), want.output.size());
  for (const float x : got.output) ASSERT_TRUE(std::isfinite(x));
  EXPECT_LE(RelativeError(got.output, want.output), error_max);
  for (std::size_t i = 0; i < want.log_sum_exp.size(); ++i) {
    if (std::isinf(want.log_sum_exp[i])) {
      ASSERT_EQ(got.log_sum_exp[i], want.log_sum_exp[i]);
    } else {
      ASSERT_NEAR(got.log_sum_exp[i], want.log_sum_exp[i],
                  1e-4f * std::max(1.0f, std::fabs(want.log_sum_exp[i])));
    }
  }
}

void Check(const ProblemSpec& spec, const Options& options = {}) {
  AttentionProblem problem(spec);
  ExpectClose(RunCuda(problem, options), RunReference(problem));
}

class AttentionCudaFormatTest : public testing::TestWithParam<std::size_t> {};

TEST_P(AttentionCudaFormatTest, TilesRawBlocksAndATailOfEveryFormat) {
  constexpr std::uint32_t kSharings[] = {1, 8, 4, 7, 6, 16, 2};
  ProblemSpec spec;
  spec.format = TileFormatAt(GetParam());
  spec.sharing = kSharings[GetParam() % std::size(kSharings)];
  spec.kv_heads = 1 + static_cast<std::uint32_t>(GetParam() % 2);
  spec.sequences = {{3u * spec.format.group + 5}};
  spec.raw_fraction = 0.3;
  spec.dtype = GetParam() % 3 == 0 ? DType::kBFloat16 : DType::kFloat16;
  spec.seed = static_cast<std::uint32_t>(GetParam()) + 1;
  Options options;
  options.packed = GetParam() / 2 % 2 == 0;
  Check(spec, options);
}

INSTANTIATE_TEST_SUITE_P(AllFormats, AttentionCudaFormatTest,
                         testing::Range(std::size_t{0}, kCudaTileFormatCount),
                         [](const auto& param) {
                           const TileFormat f = TileFormatAt(param.param);
                           return ToString(f) + "_d" + std::to_string(f.head_dim);
                         });

ProblemSpec Small() {
  ProblemSpec spec;
  spec.format = {4, 2, 64, 64};
  spec.sharing = 4;
  return spec;
}

TEST(AttentionCudaTest, RaggedBatchesOverAnyNumberOfWorkers) {
  ProblemSpec spec = Small();
  spec.kv_heads = 2;
  spec.sequences = {{0}, {1}, {64}, {65}, {700}, {0}, {63}, {129}};
  AttentionProblem problem(spec);
  const AttentionResult want = RunReference(problem);
  for (const std::uint32_t workers : {1u, 2u, 3u, 5u, 8u, 13u, 40u, 100u}) {
    SCOPED_TRACE(workers);
    Options options;
    options.workers = workers;
    options.packed = workers % 2 == 0;
    options.launches = workers == 5 ? 3 : 1;  // The workspace is ready for the next call.
    ExpectClose(RunCuda(problem, options), want);
  }
}

TEST(AttentionCudaTest, ManySequencesArePlannedInPieces) {
  ProblemSpec spec = Small();
  spec.sharing = 1;
  for (std::uint32_t i = 0; i < 300; ++i) spec.sequences.push_back({i % 5 == 0 ? 0u : 1 + i % 3});
  Options options;
  options.workers = 7;
  Check(spec, options);
}

TEST(AttentionCudaTest, SeveralQueriesAreCausalAmongThemselves) {
  for (const std::uint32_t queries : {2u, 9u, 33u}) {
    ProblemSpec spec = Small();
    spec.sharing = 3;
    spec.sequences = {{150, queries}, {queries, queries}, {70, 1}};
    Check(spec);
  }
}

TEST(AttentionCudaTest, WindowsAndRanges) {
  for (const std::uint32_t window : {1u, 63u, 64u, 65u, 200u}) {
    ProblemSpec spec = Small();
    spec.window = window;
    spec.raw_fraction = 0.5;
    spec.sequences = {{300, 5}, {40}};
    Check(spec);
  }
  ProblemSpec spec = Small();
  spec.sequences = {{400}};
  AttentionProblem part(spec);
  part.sequences()[0].token_begin = 100;
  part.sequences()[0].token_end = 230;
  part.table(0)[0].kind = BlockKind::kAbsent;  // Nobody looks there.
  ExpectClose(RunCuda(part), RunReference(part));
}

TEST(AttentionCudaTest, UnfinishedBlocksInTheTable) {
  ProblemSpec spec = Small();
  spec.sequences = {{64 + 17, 1, true}, {5, 1, true}};
  Check(spec);
  Options packed;
  packed.packed = true;
  Check(spec, packed);
}

TEST(AttentionCudaTest, RawBlocksAloneAre16BitAttention) {
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
    for (const std::uint16_t dim : {std::uint16_t{64}, std::uint16_t{128}, std::uint16_t{256}}) {
      ProblemSpec spec;
      spec.format = {4, 2, 64, dim};
      spec.sharing = 8;
      spec.dtype = dtype;
      spec.raw_fraction = 1;
      spec.sequences = {{200}};
      Options options;
      options.packed = true;
      Check(spec, options);
    }
  }
}

TEST(AttentionCudaTest, SoftCapsFramesTypesAndSharpAttention) {
  ProblemSpec spec = Small();
  spec.raw_fraction = 0.3;
  spec.sequences = {{200}};
  spec.soft_cap = 5;
  Check(spec);
  spec.soft_cap = 0;
  spec.frame = Frame::kRotated;
  Check(spec);
  spec.frame = Frame::kModel;
  spec.query_type = VectorType::kBFloat16;
  Check(spec);
  spec.query_type = VectorType::kFloat16;
  Check(spec);
  spec.query_type = VectorType::kFloat32;
  spec.query_size = 6;
  AttentionProblem sharp(spec);
  const AttentionResult want = RunReference(sharp);
  ExpectClose(RunCuda(sharp), want, 4e-4);
  for (const VectorType type : {VectorType::kFloat16, VectorType::kBFloat16}) {
    Options options;
    options.output_type = type;
    ExpectClose(RunCuda(sharp, options), want, type == VectorType::kFloat16 ? 6e-4 : 4e-3);
  }
}

TEST(AttentionCudaTest, LargeAndTinyQueriesKeepTheirDigits) {
  for (const float size : {1e-6f, 1e-3f, 50.0f}) {
    ProblemSpec spec = Small();
    spec.sequences = {{128}};
    spec.query_size = size;
    AttentionProblem problem(spec);
    ExpectClose(RunCuda(problem), RunReference(problem), 1e-3);
  }
}

// Every format runs in the shared memory of the smallest devices, which is what the harness has; in
// quarters where a device has less than halves need, in halves where it has more.
TEST(AttentionCudaTest, HalvesAndQuartersGiveTheSame) {
  for (const std::uint16_t dim : {std::uint16_t{64}, std::uint16_t{128}, std::uint16_t{256}}) {
    for (const std::uint16_t group : {std::uint16_t{64}, std::uint16_t{128}}) {
      ProblemSpec spec;
      spec.format = {4, 4, group, dim};
      spec.sharing = 3;
      spec.raw_fraction = 0.2;
      spec.sequences = {{5u * group + 40}};
      AttentionProblem problem(spec);
      const AttentionResult want = RunReference(problem);
      std::size_t fitting = 0;
      for (const std::size_t kib : {227, 99, 90, 70, 60, 45, 39}) {
        SCOPED_TRACE(testing::Message() << dim << " " << group << " " << kib);
        Options options;
        options.shared_bytes_max = kib << 10;
        options.packed = kib % 2 == 0;
        const absl::StatusOr<AttentionResult> got = TryCuda(problem, options);
        if (kib >= 99) {
          ASSERT_TRUE(got.ok()) << got.status();
        }
        if (got.ok()) {
          ++fitting;
          ExpectClose(*got, want);
        } else {
          EXPECT_EQ(got.status().code(), absl::StatusCode::kInvalidArgument);
        }
      }
      EXPECT_GE(fitting, 2u);
    }
  }
}

TEST(AttentionCudaTest, TooLittleSharedMemoryIsSaidBeforeTheLaunch) {
  ProblemSpec spec = Small();
  spec.format = {4, 2, 128, 256};
  spec.sequences = {{128}};
  AttentionProblem problem(spec);
  RunAttention(problem, [&](const AttentionArgs& args) {
    Harness harness(NextSeed());
    if (!harness.LimitSharedBytes(48 << 10)) GTEST_SKIP() << "a real device";
    const absl::Status status = DeviceCall(harness, args, {}).Run();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_NE(status.message().find("k4v2_g128, head_dim 256"), std::string::npos) << status;
    EXPECT_NE(status.message().find("the device has 49152"), std::string::npos) << status;
    EXPECT_TRUE(harness.faults().empty());  // Not even tried.
  });
}

TEST(AttentionCudaTest, BadShapesAreRefused) {
  AttentionArgs args;
  args.shape.q_heads = 3;
  args.shape.kv_heads = 2;
  EXPECT_EQ(AttentionCuda(args, 1, nullptr, nullptr).code(), absl::StatusCode::kInvalidArgument);
  args.shape.kv_heads = 1;
  EXPECT_EQ(AttentionCuda(args, 0, nullptr, nullptr).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_TRUE(AttentionCuda(args, 1, nullptr, nullptr).ok());  // No sequences.
  args.shape.format.group = 32;
  EXPECT_EQ(AttentionCuda(args, 1, nullptr, nullptr).code(), absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace kvmill
