// Measures by hand, the study over small tensors, and the report.
#include <cmath>
#include <random>

#include "client/eval/error_study.h"
#include "client/eval/report_html.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace kvmill::eval {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

TEST(StatisticsTest, QuartilesAndSigns) {
  const Spread spread = SpreadOf({5, 1, 2, 4, 3});
  EXPECT_EQ(spread.n, 5u);
  EXPECT_EQ(spread.min, 1);
  EXPECT_EQ(spread.lower, 2);
  EXPECT_EQ(spread.median, 3);
  EXPECT_EQ(spread.upper, 4);
  EXPECT_EQ(spread.max, 5);
  EXPECT_EQ(SpreadOf({1, 2}).median, 1.5);
  // 1 of 6 the other way: 2 (1 + 6) / 2^6.
  const SignTest test = TestSigns({1, 1, 1, 1, 1, 3, 2}, {2, 2, 2, 2, 2, 2, 2});
  EXPECT_EQ(test.smaller, 5u);
  EXPECT_EQ(test.greater, 1u);
  EXPECT_NEAR(test.p, 14.0 / 64, 1e-12);
  EXPECT_EQ(TestSigns({1}, {1}).p, 1);
  // Wilson's interval of 27 of 100, and of none and all of 10.
  EXPECT_NEAR(ShareInterval(27, 100).from, 0.1927, 1e-4);
  EXPECT_NEAR(ShareInterval(27, 100).to, 0.3643, 1e-4);
  EXPECT_EQ(ShareInterval(0, 10).from, 0);
  EXPECT_NEAR(ShareInterval(10, 10).from, 0.7225, 1e-4);
  EXPECT_NEAR(ShareInterval(10, 10).to, 1, 1e-12);
  const std::vector<double> zeros(40, 0), ones(40, 1);
  EXPECT_NEAR(TestSigns(zeros, ones).p, std::pow(2.0, -39), 1e-20);
}

TEST(MeasureTest, MagnitudeAndDirectionByHand) {
  // One token is stretched by half, one turned by a right angle, one exact, one zero.
  const std::vector<float> x = {3, 4, 1, 0, 2, 2, 0, 0};
  const std::vector<float> y = {4.5f, 6, 0, 1, 2, 2, 0, 0};
  const HalfError error = MeasureHalf({x, 4, 2}, y);
  const double all = 25 + 1 + 8;
  EXPECT_NEAR(error.relative, std::sqrt((6.25 + 2) / all), 1e-9);
  EXPECT_NEAR(error.magnitude, std::sqrt(6.25 / all), 1e-9);
  EXPECT_NEAR(error.direction, std::sqrt(2 / all), 1e-9);
  // Tokens: 0, 0, 0.5, sqrt 2.
  EXPECT_NEAR(error.token_p50, 0.25, 1e-9);
  EXPECT_NEAR(error.token_p95, 0.5 + 0.85 * (std::sqrt(2.0) - 0.5), 1e-9);
}

TEST(MeasureTest, AttentionByHand) {
  Queries queries;
  // Logits 2 ln 3 / sqrt 4 = ln 3 and 0: weights 3/4, 1/4; a query of the first token sees it
  // alone.
  const float q = static_cast<float>(2 * std::log(3.0));
  queries.values = {q, 0, 0, 0, q, 0, 0, 0};
  queries.token_ends = {2, 1};
  const std::vector<float> k = {1, 0, 0, 0, 0, 1, 0, 0}, v = {8, 0, 0, 4, 0, 4, 0, 0};
  const std::vector<double> out = Attend(queries, k, v, 4);
  EXPECT_NEAR(out[0], 6, 1e-6);
  EXPECT_NEAR(out[1], 1, 1e-6);
  EXPECT_NEAR(out[3], 3, 1e-6);
  EXPECT_NEAR(out[4], 8, 1e-6);
  EXPECT_NEAR(out[5], 0, 1e-6);
  EXPECT_NEAR(OutputError({3, 4}, {3, 4.5}), 0.1, 1e-12);
  EXPECT_EQ(OutputError({0, 0}, {0, 0}), 0);
}

cli::Tensor Gaussian(std::uint32_t tokens, std::uint32_t heads, std::uint32_t dim, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> gauss;
  cli::Tensor tensor{tokens, heads, dim, DType::kFloat16, {}};
  for (std::size_t i = 0; i < std::size_t{tokens} * heads * dim; ++i) {
    tensor.values.push_back(FloatToFloat16(gauss(random)));
  }
  return tensor;
}

TEST(MeasureTest, SurrogateQueriesHaveTheirSpreadAndAreAlwaysTheSame) {
  const cli::Tensor k = Gaussian(128, 1, 64, 1);
  std::vector<float> keys;
  // A large mean, as keys have: logits must not depend on it.
  for (const std::uint16_t bits : k.values) keys.push_back(Float16ToFloat(bits) + 5);
  const HeadValues head{keys, 128, 64};
  const Queries queries = SurrogateQueries(head, 8, 3);
  for (std::size_t i = 0; i < 8; ++i) {
    double sum = 0, squares = 0;
    for (std::size_t t = 0; t < 128; ++t) {
      double logit = 0;
      for (std::size_t d = 0; d < 64; ++d) {
        logit += static_cast<double>(queries.values[i * 64 + d]) *
                 static_cast<double>(keys[t * 64 + d]) / 8;
      }
      sum += logit;
      squares += logit * logit;
    }
    EXPECT_NEAR(std::sqrt(squares / 128 - sum / 128 * (sum / 128)), kSurrogateSpread, 1e-3);
  }
  EXPECT_FALSE(queries.given);
  EXPECT_EQ(queries.values, SurrogateQueries(head, 8, 3).values);
  EXPECT_NE(queries.values, SurrogateQueries(head, 8, 4).values);
}

ErrorStudy Study(const std::vector<std::string>& methods, const std::vector<std::string>& formats) {
  ErrorStudy study;
  study.methods = *FindMethods(methods);
  study.formats = formats;
  study.queries_per_head = 8;
  return study;
}

std::vector<std::optional<cli::Tensor>> None(std::size_t layers) {
  return std::vector<std::optional<cli::Tensor>>(layers);
}

TEST(ErrorStudyTest, ARowForEveryMethodFormatLayerAndHead) {
  const std::vector<cli::LayerTensors> layers = {
      {Gaussian(200, 2, 64, 1), Gaussian(200, 2, 64, 2)},
      {Gaussian(200, 2, 64, 3), Gaussian(200, 2, 64, 4)},
      {Gaussian(200, 1, 128, 5), Gaussian(200, 1, 128, 6)}};
  const ErrorStudy study = Study({"kvarn", "kitty", "rtn"}, {"k4v2_g128", "k2v2_g64"});
  const auto rows = MeasureErrors(study, layers, None(3));
  ASSERT_TRUE(rows.ok()) << rows.status();
  // kitty has 2-bit keys only; 5 heads.
  ASSERT_EQ(rows->size(), (2 + 3) * 5u);
  EXPECT_EQ(rows->front().method, "kvarn");
  EXPECT_EQ(rows->front().format, "k4v2_g128");
  for (const ErrorRow& row : *rows) {
    EXPECT_EQ(row.n, 128u);  // Of 200, for both formats.
    EXPECT_GT(row.attention_error, 0.01);
    EXPECT_LT(row.attention_error, 1);
    EXPECT_LT(row.v.relative, 0.7);
    EXPECT_FALSE(row.given_queries);
  }
  // By arithmetic: a record of 7,296 bytes for 2 x 128 x 64 elements.
  EXPECT_NEAR((*rows)[0].bits_per_element, 7296 * 8 / (2.0 * 128 * 64), 1e-9);
  EXPECT_EQ((*rows)[1].layer, 0u);
  EXPECT_EQ((*rows)[1].head, 1u);
  const std::vector<MethodSummary> summaries = Summarize(*rows);
  ASSERT_EQ(summaries.size(), 5u);
  EXPECT_EQ(summaries[0].spreads[0].n, 5u);
  for (std::size_t i = 1; i < 5; ++i) {
    if (summaries[i].format != summaries[i - 1].format) continue;
    EXPECT_GE(summaries[i].bits_per_element, summaries[i - 1].bits_per_element);
  }
  for (const MethodSummary& summary : summaries) {
    if (summary.method == "kvarn") {
      EXPECT_EQ(summary.signs[0].p, 1);
    }
    if (summary.method == "rtn") {
      EXPECT_EQ(summary.signs[0].smaller + summary.signs[0].greater, 5u);
    }
  }
}

TEST(ErrorStudyTest, GivenQueriesAreTheOnesOfTheirHeadAndToken) {
  std::vector<cli::LayerTensors> layers = {{Gaussian(128, 2, 64, 1), Gaussian(128, 2, 64, 2)}};
  const ErrorStudy study = Study({"kvarn"}, {"k4v4_g128"});
  auto queries = None(1);
  queries[0] = Gaussian(128, 4, 64, 9);
  const auto rows = MeasureErrors(study, layers, queries);
  ASSERT_TRUE(rows.ok()) << rows.status();
  EXPECT_TRUE(rows->front().given_queries);
  // 8 of 128 tokens: 15, 31, ... The queries of others are not looked at.
  auto same = queries;
  for (std::size_t i = 0; i < 4 * 64 * 15; ++i) same[0]->values[i] = 0;
  EXPECT_EQ(MeasureErrors(study, layers, same)->front().attention_error,
            rows->front().attention_error);
  // Other queries of the second KV head's: only its error changes.
  for (std::size_t i = 0; i < queries[0]->values.size(); ++i) {
    if (i / 64 % 4 >= 2) queries[0]->values[i] = FloatToFloat16(0.25f);
  }
  const auto others = MeasureErrors(study, layers, queries);
  ASSERT_TRUE(others.ok());
  EXPECT_EQ((*others)[0].attention_error, (*rows)[0].attention_error);
  EXPECT_NE((*others)[1].attention_error, (*rows)[1].attention_error);
  // Query heads are a multiple of KV heads.
  for (std::uint32_t bad : {3u, 6u}) {
    queries[0] = Gaussian(128, bad, 64, 9);
    const auto refused = MeasureErrors(study, layers, queries);
    EXPECT_EQ(refused.ok(), bad == 6) << bad;
  }
  queries[0] = Gaussian(127, 4, 64, 9);
  EXPECT_THAT(std::string(MeasureErrors(study, layers, queries).status().message()),
              HasSubstr("queries of layer 0 are [127, 4, 64], K is [128, 2, 64]"));
}

TEST(ErrorStudyTest, BadInputIsOneClearError) {
  std::vector<cli::LayerTensors> layers = {{Gaussian(128, 2, 64, 1), Gaussian(128, 2, 64, 2)}};
  const auto message = [&](const ErrorStudy& study) {
    return std::string(MeasureErrors(study, layers, None(layers.size())).status().message());
  };
  EXPECT_THAT(message(Study({"kitty"}, {"k4v2_g128"})), HasSubstr("2-bit keys"));
  EXPECT_THAT(message(Study({"kvarn"}, {"k5v2_g128"})), HasSubstr("k5v2_g128"));
  layers[0].v.values[(37 * 2 + 1) * 64 + 5] = 0x7E00;
  EXPECT_THAT(message(Study({"kvarn"}, {"k4v2_g128"})),
              HasSubstr("V of layer 0: token 37 head 1 channel 5 is nan"));
  layers = {{Gaussian(100, 1, 64, 1), Gaussian(100, 1, 64, 2)}};
  EXPECT_THAT(message(Study({"kvarn"}, {"k4v2_g64", "k4v2_g128"})),
              HasSubstr("100 tokens, and a tile of these formats has 128"));
  layers = {{Gaussian(128, 1, 96, 1), Gaussian(128, 1, 96, 2)}};
  EXPECT_THAT(message(Study({"kvarn"}, {"k4v2_g128"})), HasSubstr("96"));
}

TEST(ReportTest, SaysEveryNumberAndEscapesNames) {
  const std::vector<cli::LayerTensors> layers = {{Gaussian(64, 3, 64, 1), Gaussian(64, 3, 64, 2)}};
  const auto rows = MeasureErrors(Study({"kvarn", "rtn"}, {"k4v2_g64"}), layers, None(1));
  ASSERT_TRUE(rows.ok());
  const std::string report = ErrorReport({"a title", {"<file> & \"others\""}}, *rows);
  EXPECT_THAT(report, HasSubstr("&lt;file&gt; &amp; &quot;others&quot;"));
  EXPECT_THAT(report, Not(HasSubstr("<file>")));
  EXPECT_THAT(report, HasSubstr("n = 3"));
  EXPECT_THAT(report, HasSubstr("p = "));
  EXPECT_THAT(report, HasSubstr("Direction error of K, k4v2_g64"));
  EXPECT_THAT(report, Not(HasSubstr("http")));
  EXPECT_THAT(report, Not(HasSubstr("nan")));
}

}  // namespace
}  // namespace kvmill::eval
