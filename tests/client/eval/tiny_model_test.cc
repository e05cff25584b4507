// The small model against what its training program said: golden outputs with their margins
// (tests/data/tiny-lm/golden.json), and the K and V of a prompt (tests/data/tiny-lm-kv). And what
// its loader refuses.
#include "client/eval/tiny_model.h"

#include <algorithm>
#include <cmath>
#include <fstream>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "client/cli/kv_files.h"
#include "client/eval/float_cache.h"
#include "client/eval/tiny_decoder.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"

namespace kvmill::eval {
namespace {

using ::testing::HasSubstr;

const std::string kData = std::string(KVMILL_SOURCE_DIR) + "/tests/data/";

std::string Read(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  text << file.rdbuf();
  EXPECT_FALSE(text.str().empty()) << path;
  return text.str();
}

const TinyModel& Shipped() {
  static const TinyModel* const model =
      new TinyModel(*TinyModel::Load(kData + "tiny-lm/tiny-lm.json"));
  return *model;
}

class TinyGoldenTest : public ::testing::Test {
 protected:
  struct Sample {
    std::vector<Token> prompt, output;
    double margin = 0;
  };

  TinyGoldenTest() {
    const nlohmann::json json = nlohmann::json::parse(Read(kData + "tiny-lm/golden.json"));
    for (const auto& one : json) {
      samples_.push_back({*Shipped().Encode(one["prompt"].get<std::string>()),
                          *Shipped().Encode(one["output"].get<std::string>()),
                          one["min_top1_margin"].get<double>()});
    }
  }

  std::vector<Sample> samples_;
};

TEST_F(TinyGoldenTest, EveryTokenAndTheSmallestMarginAreThoseOfTheTrainingProgram) {
  ASSERT_EQ(samples_.size(), 20u);
  const std::size_t vocabulary = Shipped().config().vocabulary;
  for (std::size_t s = 0; s < samples_.size(); ++s) {
    SCOPED_TRACE(s);
    const Sample& sample = samples_[s];
    std::vector<Token> text = sample.prompt;
    text.insert(text.end(), sample.output.begin(), sample.output.end());
    FloatCache cache(Shipped().config(), {.tokens_max = static_cast<std::uint32_t>(text.size())});
    TinyDecoder decoder(Shipped(), cache);
    std::vector<float> logits(text.size() * vocabulary);
    decoder.Feed(text, absl::MakeSpan(logits));
    double margin = 1e9;
    for (std::size_t i = 0; i < sample.output.size(); ++i) {
      float* const row = logits.data() + (sample.prompt.size() + i - 1) * vocabulary;
      ASSERT_EQ(Likeliest(absl::MakeConstSpan(row, vocabulary)), sample.output[i]) << "token " << i;
      std::sort(row, row + vocabulary);
      margin = std::min(margin, static_cast<double>(row[vocabulary - 1] - row[vocabulary - 2]));
    }
    EXPECT_NEAR(margin, sample.margin, 2e-3);
  }
}

TEST_F(TinyGoldenTest, AGreedyRunTokenByTokenWritesTheSame) {
  for (std::size_t s = 0; s < samples_.size(); ++s) {
    const Sample& sample = samples_[s];
    if (sample.output.size() > 200) continue;  // Long ones token by token would take seconds each.
    SCOPED_TRACE(s);
    FloatCache cache(
        Shipped().config(),
        {.tokens_max = static_cast<std::uint32_t>(sample.prompt.size() + sample.output.size())});
    TinyDecoder decoder(Shipped(), cache);
    std::vector<float> logits(Shipped().config().vocabulary);
    decoder.Feed(absl::MakeConstSpan(sample.prompt).first(sample.prompt.size() - 1));
    decoder.Feed(absl::MakeConstSpan(sample.prompt).last(1), absl::MakeSpan(logits));
    EXPECT_EQ(decoder.Continue(logits, static_cast<std::uint32_t>(sample.output.size())),
              sample.output);
  }
}

TEST(TinyModelTest, KAndVOfAPromptAreThoseOfTheTrainingProgram) {
  const std::vector<Token> text = *Shipped().Encode(Read(kData + "tiny-lm-kv/retrieval.txt"));
  const auto layers = cli::LoadLayers(kData + "tiny-lm-kv/retrieval_", DType::kFloat16);
  ASSERT_TRUE(layers.ok()) << layers.status();
  const TinyConfig& config = Shipped().config();
  FloatCache cache(config, {.tokens_max = static_cast<std::uint32_t>(text.size())});
  RecordingCache recording(cache, config.layers, config.head_dim);
  TinyDecoder(Shipped(), recording).Feed(text);
  for (std::size_t layer = 0; layer < config.layers; ++layer) {
    for (const bool key : {true, false}) {
      const cli::Tensor& want = key ? (*layers)[layer].k : (*layers)[layer].v;
      const std::vector<float>& got =
          (key ? recording.recording().k : recording.recording().v)[layer];
      ASSERT_EQ(got.size(), want.values.size());
      double error = 0, all = 0;
      for (std::size_t i = 0; i < got.size(); ++i) {
        const double x = static_cast<double>(Float16ToFloat(want.values[i]));
        error += (static_cast<double>(got[i]) - x) * (static_cast<double>(got[i]) - x);
        all += x * x;
      }
      // Rounding to fp16 alone is about 2e-4.
      EXPECT_LT(std::sqrt(error / all), 5e-4) << "layer " << layer << (key ? " K" : " V");
    }
  }
}

TEST(TinyModelTest, OutliersChangeNoBitOfALogitAndManyOfKAndV) {
  const TinyModel hard = Shipped().WithOutliers(7);
  const std::vector<Token> text =
      *Shipped().Encode(Read(kData + "tiny-lm-kv/retrieval.txt").substr(0, 300));
  std::vector<std::vector<float>> logits, keys, values;
  for (const TinyModel* model : {&Shipped(), &hard}) {
    FloatCache cache(model->config(), {.tokens_max = 300});
    RecordingCache recording(cache, model->config().layers, model->config().head_dim);
    logits.emplace_back(300 * model->config().vocabulary);
    TinyDecoder(*model, recording).Feed(text, absl::MakeSpan(logits.back()));
    keys.push_back(recording.recording().k[2]);
    values.push_back(recording.recording().v[2]);
  }
  EXPECT_EQ(logits[0], logits[1]);
  int channels = 0;
  for (std::size_t d = 0; d < 128; ++d) {
    if (keys[1][d] == keys[0][d]) continue;
    EXPECT_EQ(keys[1][d], 8 * keys[0][d]);
    ++channels;
  }
  EXPECT_EQ(channels, 8);  // 4 pairs.
  channels = 0;
  for (std::size_t d = 0; d < 128; ++d) channels += values[1][d] == 4 * values[0][d];
  EXPECT_EQ(channels, 4);
}

TEST(TinyModelTest, TextToTokensAndBack) {
  const auto tokens = Shipped().Encode("^^\nab01+~");
  ASSERT_TRUE(tokens.ok());
  EXPECT_EQ((*tokens)[0], 0);
  EXPECT_EQ((*tokens)[3], 3);
  EXPECT_EQ(Shipped().Decode(*tokens), "^^\nab01+~");
  EXPECT_THAT(std::string(Shipped().Encode("ab\tc").status().message()),
              HasSubstr("character 2 (byte 9)"));
}

// One fault in the header, or in the weights, each with the words that must name it.
TEST(TinyModelTest, TheLoaderNamesEveryFault) {
  const std::string header = Read(kData + "tiny-lm/tiny-lm.json");
  const std::string weights = Read(kData + "tiny-lm/tiny-lm.bin");
  ASSERT_TRUE(TinyModel::Parse(header, weights).ok());
  const auto broken = [&](const std::vector<std::pair<std::string, std::string>>& changes) {
    nlohmann::json json = nlohmann::json::parse(header);
    for (const auto& [pointer, value] : changes) {
      const nlohmann::json::json_pointer at(pointer);
      if (value.empty()) {
        json[at.parent_pointer()].erase(at.back());
      } else {
        json[at] = nlohmann::json::parse(value);
      }
    }
    return json.dump();
  };
  const struct {
    std::string header;
    std::vector<std::string> words;
  } cases[] = {
      {"", {"no JSON object"}},
      {"[1]", {"no JSON object"}},
      {header.substr(0, 500), {"no JSON object"}},
      {broken({{"/config", ""}}), {"config.vocab", "null"}},
      {broken({{"/config/vocab", "63"}}), {"config.vocab", "63", "multiple of 16"}},
      {broken({{"/config/vocab", "512"}}), {"config.vocab", "512", "256"}},
      {broken({{"/config/hk", "2"}}), {"config.hk", "2"}},
      {broken({{"/config/hd", "192"}}), {"config.hd", "192", "64, 128 or 256"}},
      {broken({{"/config/dim", "-256"}}), {"config.dim", "-256"}},
      {broken({{"/config/dim", "1e30"}}), {"config.dim"}},
      {broken({{"/config/layers", "0"}}), {"config.layers", "0"}},
      {broken({{"/config/layers", "5"}}), {"tensor l4.", "missing"}},
      {broken({{"/config/layers", "3"}}), {"tensor l3.", "no part"}},
      {broken({{"/config/eps", "0"}}), {"config.eps", "above 0"}},
      {broken({{"/config/maxT", "9999999"}}), {"config.maxT"}},
      {broken({{"/vocab/3", "\"ab\""}}), {"vocab", "one byte"}},
      {broken({{"/vocab", "[]"}}), {"vocab", "64"}},
      {broken({{"/bin", "\"../x\""}}), {"bin", "../x"}},
      {broken({{"/dtype", "\"float32\""}}), {"dtype", "float32"}},
      {broken({{"/tensors", "7"}}), {"tensors", "7"}},
      {broken({{"/tensors/l1.wo", ""}}), {"l1.wo", "missing"}},
      {broken({{"/tensors/l1.wo/shape", "[512, 256]"}}), {"l1.wo", "[512,256]", "[256, 512]"}},
      {broken({{"/tensors/l1.wo/shape", "\"x\""}}), {"shape", "l1.wo"}},
      {broken({{"/tensors/l1.wo/offset_bytes", "-4"}}), {"offset_bytes", "l1.wo", "-4"}},
      {broken({{"/tensors/l1.wo/offset_bytes", "1771010"}}), {"l1.wo", "1771010", "1771008"}},
      {broken({{"/tensors/l1.wo/offset_bytes", "0"}}), {"offset_bytes", "ends at"}},
  };
  for (const auto& one : cases) {
    const auto model = TinyModel::Parse(one.header, weights);
    ASSERT_FALSE(model.ok()) << one.words[0];
    EXPECT_EQ(model.status().code(), absl::StatusCode::kInvalidArgument);
    for (const std::string& word : one.words) {
      EXPECT_THAT(std::string(model.status().message()), HasSubstr(word));
    }
  }
  for (const std::size_t size : {std::size_t{0}, weights.size() - 1, weights.size() + 1}) {
    std::string other = weights;
    other.resize(size);
    EXPECT_THAT(std::string(TinyModel::Parse(header, other).status().message()),
                HasSubstr(std::to_string(weights.size())));
  }
  std::string infinite = weights;
  infinite[1771008 + 6] = 0;
  infinite[1771008 + 7] = 0x7C;
  const std::string said(TinyModel::Parse(header, infinite).status().message());
  EXPECT_THAT(said, HasSubstr("tensor l1.wo: element 3 is inf"));
  EXPECT_EQ(TinyModel::Load("/nowhere/tiny.json").status().code(),
            absl::StatusCode::kFailedPrecondition);
}

}  // namespace
}  // namespace kvmill::eval
