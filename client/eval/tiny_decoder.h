// Runs the small model over a KV cache: any number of tokens at a time, each of which sees those
// before it. Arithmetic in fp32, as the model was trained (tests/data/tiny-lm/README.md).
#ifndef KVMILL_CLIENT_EVAL_TINY_DECODER_H_
#define KVMILL_CLIENT_EVAL_TINY_DECODER_H_

#include <cstdint>
#include <vector>

#include "absl/types/span.h"
#include "client/eval/kv_cache.h"
#include "client/eval/tiny_model.h"

namespace kvmill::eval {

// One sequence. One thread. Model and cache must outlive it.
class TinyDecoder {
 public:
  // `position`: tokens whose K and V the cache has already, of all layers.
  TinyDecoder(const TinyModel& model, KvCache& cache, std::uint32_t position = 0);

  // Feeds tokens after those before. `logits`: of the token that follows each,
  // [tokens][vocabulary]; or empty. At most as many in all as the cache
  // has room for and the model was made for (TinyConfig::tokens_max).
  void Feed(absl::Span<const Token> tokens, absl::Span<float> logits = {});

  // As if that many tokens had been fed, over a cache that needs no K and V (RecordedCache).
  void Skip(std::uint32_t count);

  // The likeliest token after those fed, fed in its turn, `count` times; the first follows
  // `logits`, one row of Feed's.
  std::vector<Token> Continue(absl::Span<const float> logits, std::uint32_t count);

  std::uint32_t position() const { return position_; }

 private:
  std::uint32_t ChunkOf(std::size_t tokens) const;
  void FeedChunk(absl::Span<const Token> tokens, float* logits);
  void Attention(const TinyLayer& layer, std::uint32_t number, std::uint32_t count);
  void OnlyKeysAndValues(const TinyLayer& layer, std::uint32_t number, std::uint32_t count);
  void Mlp(const TinyLayer& layer, std::uint32_t count);

  const TinyModel& model_;
  KvCache& cache_;
  std::uint32_t position_ = 0;
  // Of a chunk.
  std::vector<float> stream_, normed_, qkv_, q_, k_, v_, attended_, gate_up_, hidden_, added_;
};

// The greatest; the first of equal ones.
Token Likeliest(absl::Span<const float> logits);

}  // namespace kvmill::eval

#endif  // KVMILL_CLIENT_EVAL_TINY_DECODER_H_
