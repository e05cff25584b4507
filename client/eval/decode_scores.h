// What the model says at the right answers of a text, over one cache, compared with what it says
// over an unquantized one.
#ifndef KVMILL_CLIENT_EVAL_DECODE_SCORES_H_
#define KVMILL_CLIENT_EVAL_DECODE_SCORES_H_

#include <cstdint>
#include <vector>

#include "absl/types/span.h"
#include "client/eval/kv_cache.h"
#include "client/eval/tiny_model.h"
#include "client/eval/tiny_tasks.h"

namespace kvmill::eval {

// Of one answer; one entry a token. Tokens are given (teacher forcing), so entries of later tokens
// come from the same text whatever was said before.
struct AnswerScores {
  std::vector<float> kl;            // KL(unquantized | this), natural logarithm, of the next token.
  std::vector<float> surprise;      // -ln of the probability of the right token.
  std::vector<std::uint8_t> agree;  // The likeliest token is that of the unquantized run.
  // The first token whose likeliest is not the right one; the length when there is none. A greedy
  // run of its own writes the same tokens over the same cache up to there: it is right exactly when
  // this is the length.
  std::uint32_t first_wrong = 0;
};

// K and V of the first tokens of a text, which no method quantizes before they have been answered:
// the blocks that stay in 16 bits, and the first that does not.
struct DecodeStart {
  std::uint32_t tokens = 0;
  Recording recording;
};

// The unquantized run over a text.
class DecodeReference {
 public:
  DecodeReference(const TinyModel& model, const TaskText& text, absl::Span<const Token> tokens);

  // The same for every method with these blocks, in a cache of 16 bits. At most up to the first
  // answer, in whole blocks.
  DecodeStart Start(std::uint32_t block_tokens, std::uint32_t sink_blocks) const;
  // `cache` is empty and has room for the text. With a start, which must be that of the cache's
  // blocks, the run goes on behind it.
  std::vector<AnswerScores> Score(KvCache& cache, const DecodeStart& start = {}) const;
  // Every token sees K and V of the unquantized run, quantized as `cache` does it, and none that
  // another token's error has reached: what one pass over a prompt would show. Empty cache, too.
  std::vector<AnswerScores> ScoreWithoutFeedback(KvCache& cache) const;
  // Of the unquantized run itself.
  const std::vector<AnswerScores>& own() const { return own_; }

 private:
  std::vector<AnswerScores> ScoreLogits(absl::Span<const float> logits) const;

  const TinyModel& model_;
  const std::vector<TaskText::Range>& answers_;
  absl::Span<const Token> tokens_;
  std::uint32_t first_;            // The token whose logits are for the first token of an answer.
  std::vector<double> log_share_;  // [tokens from first_ on][vocabulary], ln of probabilities.
  Recording recording_;
  std::vector<AnswerScores> own_;
};

}  // namespace kvmill::eval

#endif  // KVMILL_CLIENT_EVAL_DECODE_SCORES_H_
