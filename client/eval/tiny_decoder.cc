#include "client/eval/tiny_decoder.h"

#include <algorithm>
#include <cmath>
#include <cstddef>

#include "kernels/dense.h"
#include "storage/core/check.h"

namespace kvmill::eval {
namespace {

// out = rows · matrix, all without gaps.
void Multiply(const float* rows, std::size_t count, absl::Span<const float> matrix,
              std::size_t columns, float* out) {
  const std::size_t depth = matrix.size() / columns;
  MultiplyCpu({rows, matrix.data(), out, count, depth, columns, depth, columns, columns});
}

void Normalize(const float* rows, std::size_t count, absl::Span<const float> weight, float epsilon,
               float* out) {
  const std::size_t dim = weight.size();
  for (; count > 0; --count, rows += dim, out += dim) {
    double squares = 0;
    for (std::size_t d = 0; d < dim; ++d) {
      squares += static_cast<double>(rows[d]) * static_cast<double>(rows[d]);
    }
    const auto mean = static_cast<float>(squares / static_cast<double>(dim));
    const float root = std::sqrt(mean + epsilon);
    for (std::size_t d = 0; d < dim; ++d) out[d] = rows[d] / root * weight[d];
  }
}

// Pair i is the channels i and i + half.
void Rotate(float* head, const float* cosines, const float* sines, std::size_t half) {
  for (std::size_t i = 0; i < half; ++i) {
    const float a = head[i], b = head[i + half];
    head[i] = a * cosines[i] - b * sines[i];
    head[i + half] = b * cosines[i] + a * sines[i];
  }
}

void Add(const std::vector<float>& what, std::size_t count, std::vector<float>& to) {
  for (std::size_t i = 0; i < count; ++i) to[i] += what[i];
}

}  // namespace

Token Likeliest(absl::Span<const float> logits) {
  return static_cast<Token>(std::max_element(logits.begin(), logits.end()) - logits.begin());
}

TinyDecoder::TinyDecoder(const TinyModel& model, KvCache& cache, std::uint32_t position)
    : model_(model), cache_(cache), position_(position) {
  const TinyConfig& c = model.config();
  const std::size_t chunk = cache.block_tokens();
  stream_.resize(chunk * c.dim);
  normed_.resize(chunk * c.dim);
  added_.resize(chunk * c.dim);
  qkv_.resize(chunk * c.qkv());
  q_.resize(chunk * c.q_heads * c.head_dim);
  attended_.resize(q_.size());
  k_.resize(chunk * c.head_dim);
  v_.resize(k_.size());
  gate_up_.resize(chunk * 2 * c.hidden);
  hidden_.resize(chunk * c.hidden);
}

std::uint32_t TinyDecoder::ChunkOf(std::size_t tokens) const {
  const std::uint32_t block = cache_.block_tokens();
  return static_cast<std::uint32_t>(std::min<std::size_t>(block - position_ % block, tokens));
}

void TinyDecoder::Feed(absl::Span<const Token> tokens, absl::Span<float> logits) {
  const std::size_t vocabulary = model_.config().vocabulary;
  KVMILL_CHECK(position_ + tokens.size() <= model_.config().tokens_max);
  KVMILL_CHECK(logits.empty() || logits.size() == tokens.size() * vocabulary);
  for (std::size_t at = 0; at < tokens.size();) {
    const std::uint32_t count = ChunkOf(tokens.size() - at);
    FeedChunk(tokens.subspan(at, count),
              logits.empty() ? nullptr : logits.data() + at * vocabulary);
    at += count;
  }
}

void TinyDecoder::FeedChunk(absl::Span<const Token> tokens, float* logits) {
  const TinyConfig& c = model_.config();
  const auto count = static_cast<std::uint32_t>(tokens.size());
  for (std::size_t t = 0; t < count; ++t) {
    KVMILL_CHECK(tokens[t] < c.vocabulary);
    const float* row = model_.embedding().data() + std::size_t{tokens[t]} * c.dim;
    std::copy_n(row, c.dim, stream_.begin() + static_cast<std::ptrdiff_t>(t * c.dim));
  }
  // Without logits nobody asks what the last layer makes of these tokens.
  const std::uint32_t whole = logits == nullptr ? c.layers - 1 : c.layers;
  for (std::uint32_t i = 0; i < whole; ++i) {
    Attention(model_.layers()[i], i, count);
    Mlp(model_.layers()[i], count);
  }
  if (logits == nullptr) OnlyKeysAndValues(model_.layers().back(), whole, count);
  position_ += count;
  if (logits == nullptr) return;
  Normalize(stream_.data(), count, model_.output_norm(), c.norm_epsilon, normed_.data());
  Multiply(normed_.data(), count, model_.output(), c.vocabulary, logits);
}

void TinyDecoder::Attention(const TinyLayer& layer, std::uint32_t number, std::uint32_t count) {
  const TinyConfig& c = model_.config();
  const std::size_t dim = c.head_dim, heads = c.q_heads;
  Normalize(stream_.data(), count, layer.attention_norm, c.norm_epsilon, normed_.data());
  Multiply(normed_.data(), count, layer.qkv, c.qkv(), qkv_.data());
  for (std::size_t t = 0; t < count; ++t) {
    const float* row = qkv_.data() + t * c.qkv();
    const float* cosines = model_.Cosines(position_ + t);
    const float* sines = model_.Sines(position_ + t);
    float* q = std::copy_n(row, heads * dim, q_.data() + t * heads * dim) - heads * dim;
    for (std::size_t h = 0; h < heads; ++h) Rotate(q + h * dim, cosines, sines, dim / 2);
    float* k = std::copy_n(row + heads * dim, dim, k_.data() + t * dim) - dim;
    Rotate(k, cosines, sines, dim / 2);
    std::copy_n(row + heads * dim + dim, dim, v_.data() + t * dim);
  }
  cache_.Attend({number, position_, count, k_.data(), v_.data(), q_.data(), attended_.data()});
  Multiply(attended_.data(), count, layer.attention_out, c.dim, added_.data());
  Add(added_, std::size_t{count} * c.dim, stream_);
}

void TinyDecoder::OnlyKeysAndValues(const TinyLayer& layer, std::uint32_t number,
                                    std::uint32_t count) {
  const TinyConfig& c = model_.config();
  const std::size_t dim = c.head_dim, queries = std::size_t{c.q_heads} * dim;
  Normalize(stream_.data(), count, layer.attention_norm, c.norm_epsilon, normed_.data());
  MultiplyCpu({normed_.data(), layer.qkv.data() + queries, qkv_.data() + queries, count, c.dim,
               2 * dim, c.dim, c.qkv(), c.qkv()});
  for (std::size_t t = 0; t < count; ++t) {
    const float* row = qkv_.data() + t * c.qkv() + queries;
    float* k = std::copy_n(row, dim, k_.data() + t * dim) - dim;
    Rotate(k, model_.Cosines(position_ + t), model_.Sines(position_ + t), dim / 2);
    std::copy_n(row + dim, dim, v_.data() + t * dim);
  }
  cache_.Attend({number, position_, count, k_.data(), v_.data()});
}

void TinyDecoder::Mlp(const TinyLayer& layer, std::uint32_t count) {
  const TinyConfig& c = model_.config();
  Normalize(stream_.data(), count, layer.mlp_norm, c.norm_epsilon, normed_.data());
  Multiply(normed_.data(), count, layer.gate_up, std::size_t{2} * c.hidden, gate_up_.data());
  for (std::size_t t = 0; t < count; ++t) {
    const float* gate = gate_up_.data() + t * 2 * c.hidden;
    GateCpu(gate, gate + c.hidden, c.hidden, hidden_.data() + t * c.hidden);
  }
  Multiply(hidden_.data(), count, layer.down, c.dim, added_.data());
  Add(added_, std::size_t{count} * c.dim, stream_);
}

void TinyDecoder::Skip(std::uint32_t count) {
  KVMILL_CHECK(position_ + count <= model_.config().tokens_max);
  while (count > 0) {
    const std::uint32_t some = ChunkOf(count);
    for (std::uint32_t i = 0; i < model_.config().layers; ++i) {
      cache_.Attend({.layer = i, .position = position_, .count = some});
    }
    position_ += some;
    count -= some;
  }
}

std::vector<Token> TinyDecoder::Continue(absl::Span<const float> logits, std::uint32_t count) {
  std::vector<Token> tokens;
  std::vector<float> next(logits.begin(), logits.end());
  while (tokens.size() < count) {
    tokens.push_back(Likeliest(next));
    if (tokens.size() < count) Feed(absl::MakeConstSpan(&tokens.back(), 1), absl::MakeSpan(next));
  }
  return tokens;
}

}  // namespace kvmill::eval
