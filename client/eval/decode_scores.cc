#include "client/eval/decode_scores.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <utility>

#include "client/eval/float_cache.h"
#include "client/eval/tiny_decoder.h"
#include "storage/core/check.h"

namespace kvmill::eval {
namespace {

// ln of the softmax of each row.
std::vector<double> LogShares(absl::Span<const float> logits, std::size_t vocabulary) {
  std::vector<double> shares(logits.begin(), logits.end());
  for (std::size_t at = 0; at < shares.size(); at += vocabulary) {
    const auto begin = shares.begin() + static_cast<std::ptrdiff_t>(at);
    const auto end = begin + static_cast<std::ptrdiff_t>(vocabulary);
    const double most = *std::max_element(begin, end);
    double sum = 0;
    for (auto i = begin; i != end; ++i) sum += std::exp(*i - most);
    const double shift = most + std::log(sum);
    for (auto i = begin; i != end; ++i) *i -= shift;
  }
  return shares;
}

double Divergence(const double* of, const double* from, std::size_t count) {
  double sum = 0;
  for (std::size_t i = 0; i < count; ++i) sum += std::exp(of[i]) * (of[i] - from[i]);
  return std::max(sum, 0.0);  // Rounding.
}

}  // namespace

DecodeReference::DecodeReference(const TinyModel& model, const TaskText& text,
                                 absl::Span<const Token> tokens)
    : model_(model), answers_(text.answers), tokens_(tokens) {
  KVMILL_CHECK(!answers_.empty() && answers_.front().begin > 0 &&
               answers_.back().end <= tokens.size());
  first_ = answers_.front().begin - 1;
  const TinyConfig& config = model.config();
  FloatCache cache(config, {.tokens_max = static_cast<std::uint32_t>(tokens.size())});
  RecordingCache recording(cache, config.layers, config.head_dim);
  TinyDecoder decoder(model, recording);
  decoder.Feed(tokens_.first(first_));
  const absl::Span<const Token> asked = tokens_.subspan(first_);
  std::vector<float> logits(asked.size() * config.vocabulary);
  decoder.Feed(asked, absl::MakeSpan(logits));
  recording_ = recording.recording();
  log_share_ = LogShares(logits, config.vocabulary);
  own_ = ScoreLogits(logits);
}

DecodeStart DecodeReference::Start(std::uint32_t block_tokens, std::uint32_t sink_blocks) const {
  const TinyConfig& config = model_.config();
  DecodeStart start;
  const std::uint32_t blocks = std::min(first_ / block_tokens, sink_blocks + 1);
  start.tokens = blocks * block_tokens;
  FloatCache cache(config, {.tokens_max = start.tokens,
                            .block_tokens = block_tokens,
                            .sink_blocks = blocks,
                            .keep_fp16 = true});
  RecordingCache recording(cache, config.layers, config.head_dim);
  TinyDecoder decoder(model_, recording);
  decoder.Feed(tokens_.first(start.tokens));
  start.recording = recording.recording();
  return start;
}

std::vector<AnswerScores> DecodeReference::Score(KvCache& cache, const DecodeStart& start) const {
  // Without a start the recording is empty, and has no layers to ask.
  RecordedCache started(cache, start.recording, model_.config().head_dim);
  TinyDecoder decoder(model_, start.tokens > 0 ? static_cast<KvCache&>(started) : cache);
  decoder.Skip(start.tokens);
  decoder.Feed(tokens_.subspan(start.tokens, first_ - start.tokens));
  const absl::Span<const Token> asked = tokens_.subspan(first_);
  std::vector<float> logits(asked.size() * model_.config().vocabulary);
  decoder.Feed(asked, absl::MakeSpan(logits));
  return ScoreLogits(logits);
}

std::vector<AnswerScores> DecodeReference::ScoreWithoutFeedback(KvCache& cache) const {
  RecordedCache recorded(cache, recording_, model_.config().head_dim);
  TinyDecoder decoder(model_, recorded);
  decoder.Skip(first_);
  const absl::Span<const Token> asked = tokens_.subspan(first_);
  std::vector<float> logits(asked.size() * model_.config().vocabulary);
  decoder.Feed(asked, absl::MakeSpan(logits));
  return ScoreLogits(logits);
}

std::vector<AnswerScores> DecodeReference::ScoreLogits(absl::Span<const float> logits) const {
  const std::size_t vocabulary = model_.config().vocabulary;
  const std::vector<double> shares = LogShares(logits, vocabulary);
  const auto likeliest = [&](const double* row) {
    return static_cast<Token>(std::max_element(row, row + vocabulary) - row);
  };
  std::vector<AnswerScores> scores;
  for (const TaskText::Range& answer : answers_) {
    AnswerScores one;
    one.first_wrong = answer.end - answer.begin;
    for (std::uint32_t at = answer.begin; at < answer.end; ++at) {
      const std::size_t row = (at - 1 - first_) * vocabulary;
      const double* const mine = shares.data() + row;
      const double* const reference = log_share_.data() + row;
      one.kl.push_back(static_cast<float>(Divergence(reference, mine, vocabulary)));
      one.surprise.push_back(static_cast<float>(-mine[tokens_[at]]));
      one.agree.push_back(likeliest(mine) == likeliest(reference));
      if (likeliest(mine) != tokens_[at]) {
        one.first_wrong = std::min(one.first_wrong, at - answer.begin);
      }
    }
    scores.push_back(std::move(one));
  }
  return scores;
}

}  // namespace kvmill::eval
