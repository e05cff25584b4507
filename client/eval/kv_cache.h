// Where the small model's decoder keeps K and V, and what answers its queries from them.
#ifndef KVMILL_CLIENT_EVAL_KV_CACHE_H_
#define KVMILL_CLIENT_EVAL_KV_CACHE_H_

#include <cstddef>
#include <cstdint>
#include <vector>

namespace kvmill::eval {

// Some more tokens of one layer.
struct CacheChunk {
  std::uint32_t layer = 0;
  std::uint32_t position = 0;  // Of the first.
  std::uint32_t count = 0;
  const float* k = nullptr;  // [count][head_dim], after RoPE.
  const float* v = nullptr;  // [count][head_dim]
  const float* q = nullptr;  // [count][q_heads][head_dim], after RoPE; null: nothing is asked.
  float* out = nullptr;      // [count][q_heads][head_dim], of attention; null with `q`.
};

// K and V of one sequence. One thread.
class KvCache {
 public:
  virtual ~KvCache() = default;

  // Appends the tokens and answers their queries, each of which sees the tokens up to its own: all
  // layers of a chunk in order, then those of the next chunk, which begins where this one ends. A
  // chunk does not reach over the end of a block of `block_tokens`. What a block loses by being
  // quantized it loses after its last token was answered, as in a decode that goes token by token:
  // the outputs do not depend on how a text is cut into chunks (but for rounding in the sums).
  virtual void Attend(const CacheChunk& chunk) = 0;
  virtual std::uint32_t block_tokens() const = 0;

  // Of what is quantized by now, over all layers.
  struct Size {
    std::uint64_t bits = 0;        // Metadata included.
    std::uint64_t elements = 0;    // Of K and of V.
    std::uint64_t raw_blocks = 0;  // Halves of blocks that the method could not hold.
  };
  virtual Size size() const = 0;
};

// K and V of a whole run.
struct Recording {
  std::vector<std::vector<float>> k, v;  // One a layer, [tokens][head_dim].
};

// Passes everything on to `inner`, and writes down what comes by.
class RecordingCache : public KvCache {
 public:
  RecordingCache(KvCache& inner, std::uint32_t layers, std::uint32_t head_dim)
      : inner_(inner), head_dim_(head_dim) {
    recording_.k.resize(layers);
    recording_.v.resize(layers);
  }

  void Attend(const CacheChunk& chunk) override {
    const std::size_t values = std::size_t{chunk.count} * head_dim_;
    std::vector<float>& k = recording_.k[chunk.layer];
    std::vector<float>& v = recording_.v[chunk.layer];
    k.insert(k.end(), chunk.k, chunk.k + values);
    v.insert(v.end(), chunk.v, chunk.v + values);
    inner_.Attend(chunk);
  }
  std::uint32_t block_tokens() const override { return inner_.block_tokens(); }
  Size size() const override { return inner_.size(); }
  const Recording& recording() const { return recording_; }

 private:
  KvCache& inner_;
  std::uint32_t head_dim_;
  Recording recording_;
};

// Gives `inner` the K and V of a recording in place of what it is handed (which may be null), as
// far as the recording goes: a cache as if the recorded run had filled it. Of a whole unquantized
// run: no error of a token reaches the K and V of those after it. A chunk lies before the
// recording's end or after it. `recording` must outlive it.
class RecordedCache : public KvCache {
 public:
  RecordedCache(KvCache& inner, const Recording& recording, std::uint32_t head_dim)
      : inner_(inner), recording_(recording), head_dim_(head_dim) {}

  void Attend(const CacheChunk& chunk) override {
    CacheChunk replaced = chunk;
    const std::size_t from = std::size_t{chunk.position} * head_dim_;
    if (from >= recording_.k[chunk.layer].size()) return inner_.Attend(chunk);
    replaced.k = recording_.k[chunk.layer].data() + from;
    replaced.v = recording_.v[chunk.layer].data() + from;
    inner_.Attend(replaced);
  }
  std::uint32_t block_tokens() const override { return inner_.block_tokens(); }
  Size size() const override { return inner_.size(); }

 private:
  KvCache& inner_;
  const Recording& recording_;
  std::uint32_t head_dim_;
};

}  // namespace kvmill::eval

#endif  // KVMILL_CLIENT_EVAL_KV_CACHE_H_
