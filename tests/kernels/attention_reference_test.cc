// The contract of attention and its oracle: what a query sees, the frames, the merge, the messages.
// The oracle is compared with the textbook formula over K and V in the model's frame, which knows
// nothing of rotation.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "kernels/attention_range.h"
#include "kernels/hadamard.h"
#include "tests/kernels/attention_problem.h"

namespace kvmill {
namespace {

constexpr float kNothing = -std::numeric_limits<float>::infinity();

ProblemSpec Spec(std::vector<SequenceSpec> sequences) {
  ProblemSpec spec;
  spec.format = {4, 2, 64, 64};
  spec.kv_heads = 2;
  spec.sharing = 3;
  spec.sequences = std::move(sequences);
  return spec;
}

// softmax(q·K) V, one row of the output.
std::vector<double> Textbook(const AttentionProblem& problem, const AttentionShape& shape,
                             std::size_t sequence, TokenRange seen, std::uint32_t kv_head,
                             const float* query, double* log_sum_exp) {
  std::vector<double> out(problem.dim(), 0.0);
  double total = 0;
  for (std::uint64_t t = seen.begin; t < seen.end; ++t) {
    const std::vector<float> k = problem.KeyOf(sequence, t, kv_head);
    const std::vector<float> v = problem.ValueOf(sequence, t, kv_head);
    double score = 0;
    for (std::size_t d = 0; d < k.size(); ++d) score += double{query[d]} * double{k[d]};
    score *= double{shape.scale};
    if (shape.soft_cap > 0) {
      score = double{shape.soft_cap} * std::tanh(score / double{shape.soft_cap});
    }
    const double p = std::exp(score);
    total += p;
    for (std::size_t d = 0; d < v.size(); ++d) out[d] += p * double{v[d]};
  }
  for (double& x : out) x = seen.empty() ? 0 : x / total;
  *log_sum_exp = std::log(total);
  return out;
}

void ExpectTextbook(AttentionProblem& problem) {
  const AttentionResult got = RunReference(problem);
  const AttentionShape& shape = problem.shape();
  std::size_t row = 0;
  for (std::size_t s = 0; s < problem.sequences().size(); ++s) {
    for (std::uint32_t i = 0; i < problem.sequences()[s].query_count; ++i) {
      const std::uint64_t position = problem.sequences()[s].query_position + i;
      TokenRange seen;
      seen.end = std::min(position + 1, problem.sequences()[s].token_end);
      if (shape.window != 0 && position + 1 > shape.window)
        seen.begin = position + 1 - shape.window;
      for (std::uint32_t h = 0; h < shape.q_heads; ++h, ++row) {
        SCOPED_TRACE(testing::Message() << "sequence " << s << ", query " << i << ", head " << h);
        double lse = 0;
        const std::vector<double> want =
            Textbook(problem, shape, s, seen, h / (shape.q_heads / shape.kv_heads),
                     &problem.query()[row * problem.dim()], &lse);
        for (std::size_t d = 0; d < want.size(); ++d) {
          ASSERT_NEAR(double{got.output[row * problem.dim() + d]}, want[d], 2e-5);
        }
        ASSERT_NEAR(double{got.log_sum_exp[row]}, lse, 2e-5);
      }
    }
  }
}

TEST(AttentionReferenceTest, IsTheTextbookFormulaOverDecodedKeysAndValues) {
  AttentionProblem problem(Spec({{1, 1}, {63, 1}, {64, 1}, {65, 1}, {200, 1}}));
  ExpectTextbook(problem);
}

TEST(AttentionReferenceTest, RawBlocksAndTilesMixWithinAHead) {
  ProblemSpec spec = Spec({{300, 1, true}, {129, 2}});
  spec.raw_fraction = 0.5;
  spec.dtype = DType::kBFloat16;
  AttentionProblem problem(spec);
  ExpectTextbook(problem);
}

TEST(AttentionReferenceTest, QueriesOfOneSequenceAreCausalAmongThemselves) {
  AttentionProblem problem(Spec({{5, 5}, {140, 7}, {64, 1}}));
  ExpectTextbook(problem);
}

TEST(AttentionReferenceTest, TheWindowAndTheCapApply) {
  ProblemSpec spec = Spec({{200, 4}, {10, 2}});
  spec.window = 50;
  spec.soft_cap = 2;
  AttentionProblem problem(spec);
  ExpectTextbook(problem);
}

// An engine that keeps everything rotated gets the rotated result of the same attention.
TEST(AttentionReferenceTest, InTheRotatedFrameNothingIsRotatedAgain) {
  ProblemSpec spec = Spec({{150, 1}});
  spec.frame = Frame::kRotated;
  spec.raw_fraction = 0.5;
  AttentionProblem problem(spec);
  const AttentionResult got = RunReference(problem);
  // Rotate what the engine holds: queries, and, through kModel, what tiles decode to.
  for (std::uint32_t h = 0; h < problem.shape().q_heads; ++h) {
    std::vector<double> want(problem.dim(), 0.0);
    double total = 0;
    for (std::uint64_t t = 0; t < 150; ++t) {
      std::vector<float> k = problem.KeyOf(0, t, h / 3);
      std::vector<float> v = problem.ValueOf(0, t, h / 3);
      const bool tile = t < 128 && problem.table(0)[t / 64 * 2 + h / 3].kind == BlockKind::kTile;
      if (tile) {  // RowOf un-rotated it.
        RotateRowsReference(k.data(), 1, k.size());
        RotateRowsReference(v.data(), 1, v.size());
      }
      double score = 0;
      for (std::size_t d = 0; d < k.size(); ++d) {
        score += double{problem.query()[h * problem.dim() + d]} * double{k[d]};
      }
      const double p = std::exp(score * double{problem.shape().scale});
      total += p;
      for (std::size_t d = 0; d < v.size(); ++d) want[d] += p * double{v[d]};
    }
    for (std::size_t d = 0; d < want.size(); ++d) {
      ASSERT_NEAR(double{got.output[h * problem.dim() + d]}, want[d] / total, 2e-5);
    }
  }
}

TEST(AttentionReferenceTest, WhereNothingIsSeenTheOutputIsZeroAndTheLogSumExpMinusInfinity) {
  AttentionProblem problem(Spec({{0, 1}, {70, 1}, {70, 1}}));
  problem.sequences()[1].token_begin = 70;       // An empty range.
  problem.sequences()[2].query_position = 1000;  // Everything is out of the window.
  problem.shape().window = 100;
  const AttentionResult got = RunReference(problem);
  EXPECT_THAT(got.output, testing::Each(0.0f));
  EXPECT_THAT(got.log_sum_exp, testing::Each(kNothing));
}

TEST(AttentionReferenceTest, OneTokenGivesItsValue) {
  AttentionProblem problem(Spec({{1, 1}}));
  const AttentionResult got = RunReference(problem);
  for (std::uint32_t h = 0; h < 6; ++h) {
    const std::vector<float> v = problem.ValueOf(0, 0, h / 3);
    for (std::size_t d = 0; d < v.size(); ++d) EXPECT_FLOAT_EQ(got.output[h * v.size() + d], v[d]);
  }
}

TEST(AttentionReferenceTest, SixteenBitQueriesAndOutputsAreRoundedOnce) {
  for (const VectorType type : {VectorType::kFloat16, VectorType::kBFloat16}) {
    const DType dtype = type == VectorType::kFloat16 ? DType::kFloat16 : DType::kBFloat16;
    AttentionProblem problem(Spec({{100, 1}}));
    std::vector<std::uint16_t> query;
    for (float& q : problem.query()) {
      query.push_back(FromFloat(q, dtype));
      q = ToFloat(query.back(), dtype);
    }
    const AttentionResult want = RunReference(problem);
    std::vector<std::uint16_t> output(query.size());
    AttentionArgs args = problem.args();
    args.query = query.data();
    args.query_type = type;
    args.output = output.data();
    args.output_type = type;
    ASSERT_EQ(ValidateAttention(args), absl::OkStatus());
    AttentionReference(args);
    for (std::size_t i = 0; i < output.size(); ++i) {
      ASSERT_EQ(output[i], FromFloat(want.output[i], dtype));
    }
  }
}

// ---- Merge. ----

TEST(MergeAttentionTest, SplitsOfASequenceMergeToTheWhole) {
  ProblemSpec spec = Spec({{300, 3}});
  spec.window = 250;
  AttentionProblem problem(spec);
  const AttentionResult whole = RunReference(problem);
  for (const std::vector<std::uint64_t>& cuts : {std::vector<std::uint64_t>{0, 300},
                                                 {0, 1, 300},
                                                 {0, 64, 128, 300},
                                                 {0, 40, 299, 300},
                                                 {0, 0, 150, 150, 300}}) {
    std::vector<AttentionResult> results;
    for (std::size_t i = 0; i + 1 < cuts.size(); ++i) {
      problem.sequences()[0].token_begin = cuts[i];
      problem.sequences()[0].token_end = cuts[i + 1];
      results.push_back(RunReference(problem));
    }
    std::vector<AttentionPart> parts;
    for (const AttentionResult& r : results) {
      parts.push_back({r.output.data(), r.log_sum_exp.data()});
    }
    std::vector<float> output(whole.output.size());
    std::vector<float> lse(whole.log_sum_exp.size());
    MergeAttention(parts, lse.size(), problem.dim(), output.data(), lse.data());
    for (std::size_t i = 0; i < output.size(); ++i) ASSERT_NEAR(output[i], whole.output[i], 1e-6f);
    for (std::size_t i = 0; i < lse.size(); ++i) ASSERT_NEAR(lse[i], whole.log_sum_exp[i], 1e-5f);
    // In place, over the first part.
    MergeAttention(parts, lse.size(), problem.dim(), results[0].output.data(),
                   results[0].log_sum_exp.data());
    EXPECT_EQ(results[0].output, output);
    EXPECT_EQ(results[0].log_sum_exp, lse);
  }
}

TEST(MergeAttentionTest, PartsThatSawNothingChangeNothing) {
  const std::vector<float> output{1, 2, 3, 4};
  const std::vector<float> lse{0.5f, kNothing};
  const std::vector<float> zero(4, 0.0f);
  const std::vector<float> nothing(2, kNothing);
  const AttentionPart parts[] = {
      {zero.data(), nothing.data()}, {output.data(), lse.data()}, {zero.data(), nothing.data()}};
  std::vector<float> merged(4);
  std::vector<float> merged_lse(2);
  MergeAttention(parts, 2, 2, merged.data(), merged_lse.data());
  EXPECT_EQ(merged, (std::vector<float>{1, 2, 0, 0}));
  EXPECT_EQ(merged_lse, lse);
  MergeAttention({}, 2, 2, merged.data(), merged_lse.data());
  EXPECT_THAT(merged, testing::Each(0.0f));
  EXPECT_THAT(merged_lse, testing::Each(kNothing));
}

TEST(MergeAttentionTest, FarApartLogSumExpsNeitherOverflowNorVanish) {
  const std::vector<float> a{1.0f}, b{3.0f}, high{1000.0f}, low{-1000.0f};
  const AttentionPart parts[] = {{a.data(), high.data()}, {b.data(), low.data()}};
  float output = 0;
  float lse = 0;
  MergeAttention(parts, 1, 1, &output, &lse);
  EXPECT_EQ(output, 1.0f);
  EXPECT_EQ(lse, 1000.0f);
}

// ---- Validation. ----

class ValidateAttentionTest : public testing::Test {
 protected:
  ValidateAttentionTest() : problem_(MakeSpec()) {
    output_.resize(problem_.row_count() * problem_.dim());
    problem_.args().output = output_.data();
  }
  static ProblemSpec MakeSpec() {
    ProblemSpec spec = Spec({{64, 1}, {200, 2}});
    spec.raw_fraction = 0.3;
    return spec;
  }
  std::string Message() {
    AttentionArgs args = problem_.args();
    args.sequences = problem_.sequences();
    const absl::Status status = ValidateAttention(args);
    if (status.ok()) return "ok";
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    return std::string(status.message());
  }
  AttentionProblem problem_;
  std::vector<float> output_;
};

TEST_F(ValidateAttentionTest, AcceptsWhatIsRight) { EXPECT_EQ(Message(), "ok"); }

TEST_F(ValidateAttentionTest, NamesTheBadFieldOfTheShape) {
  const AttentionShape good = problem_.shape();
  const auto expect = [&](auto change, const std::string& part) {
    problem_.shape() = good;
    change(problem_.shape());
    EXPECT_THAT(Message(), testing::HasSubstr(part));
  };
  using S = AttentionShape;
  expect([](S& s) { s.format.head_dim = 96; }, "head_dim 96");
  expect([](S& s) { s.kv_heads = 0; }, "kv_heads 0");
  expect([](S& s) { s.q_heads = 7; }, "q_heads 7, kv_heads 2");
  expect([](S& s) { s.q_heads = 2048; }, "q_heads 2048");
  expect([](S& s) { s.scale = std::nanf(""); }, "scale nan");
  expect([](S& s) { s.soft_cap = -1; }, "soft_cap -1");
  expect([](S& s) { s.soft_cap = -kNothing; }, "soft_cap inf");
  expect([](S& s) { s.raw.token_stride_bytes = 0; }, "raw, but the raw layout");
}

TEST_F(ValidateAttentionTest, NamesTheSequenceTheBlockAndTheHead) {
  problem_.table(1)[2 * 2 + 1].kind = BlockKind::kAbsent;
  EXPECT_EQ(Message(), "sequence 1, block 2, head 1: absent, but its tokens are seen");
  problem_.sequences()[1].token_begin = 192;  // Nobody looks any more.
  EXPECT_EQ(Message(), "ok");
  problem_.sequences()[1].token_begin = 191;
  EXPECT_EQ(Message(), "sequence 1, block 2, head 1: absent, but its tokens are seen");
  problem_.table(1)[2 * 2 + 1] = {BlockKind::kTile, nullptr};
  EXPECT_EQ(Message(), "sequence 1, block 2, head 1: data is null");
  problem_.table(1)[2 * 2 + 1].kind = static_cast<BlockKind>(9);
  EXPECT_EQ(Message(), "sequence 1, block 2, head 1: kind 9: want 1 (tile) or 2 (raw)");
}

TEST_F(ValidateAttentionTest, BlocksOutOfTheWindowMayBeAbsent) {
  problem_.shape().window = 70;  // The first query is at 198: it sees 129 and later.
  problem_.table(1)[0 * 2].kind = BlockKind::kAbsent;
  problem_.table(1)[1 * 2].kind = BlockKind::kAbsent;
  EXPECT_EQ(Message(), "ok");
  problem_.shape().window = 72;
  EXPECT_EQ(Message(), "sequence 1, block 1, head 0: absent, but its tokens are seen");
}

TEST_F(ValidateAttentionTest, NamesABadRangeOrTail) {
  problem_.sequences()[0].token_begin = 65;
  EXPECT_EQ(Message(), "sequence 0: token_begin 65 is behind token_end 64");
  problem_.sequences()[0].token_begin = 0;
  problem_.sequences()[1].tail = nullptr;
  EXPECT_EQ(Message(),
            "sequence 1: token_end 200 is beyond 3 blocks of 64 tokens, and there is no tail");
  TailHead tail[2];
  problem_.sequences()[1].tail = tail;
  EXPECT_EQ(Message(), "sequence 1, head 0, K tail: no pages");
  const std::byte* page = nullptr;
  tail[0].k.pages = &page;
  EXPECT_EQ(Message(), "sequence 1, head 0, K tail: page_tokens 0: want 1 or more");
}

TEST_F(ValidateAttentionTest, NullVectorsAreFineOnlyWithoutQueries) {
  problem_.args().output = nullptr;
  EXPECT_EQ(Message(), "query or output is null, with 3 queries");
  problem_.sequences()[0].query_count = 0;
  problem_.sequences()[1].query_count = 0;
  EXPECT_EQ(Message(), "ok");
}

}  // namespace
}  // namespace kvmill
