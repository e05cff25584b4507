// The small language model that comes with kvmill (tests/data/tiny-lm): its weights as the decoder
// wants them, and its alphabet. A Llama-style decoder: RMSNorm before each part, one KV head,
// half-split RoPE, SwiGLU, embedding and output share a matrix, one token a character.
#ifndef KVMILL_CLIENT_EVAL_TINY_MODEL_H_
#define KVMILL_CLIENT_EVAL_TINY_MODEL_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace kvmill::eval {

struct TinyConfig {
  std::uint32_t vocabulary = 0;
  std::uint32_t dim = 0;
  std::uint32_t layers = 0;
  std::uint32_t q_heads = 0;
  std::uint32_t head_dim = 0;  // Of the one KV head, too.
  std::uint32_t hidden = 0;    // Of the MLP.
  std::uint32_t tokens_max = 0;
  double rope_base = 0;
  float norm_epsilon = 0;

  std::uint32_t qkv() const { return (q_heads + 2) * head_dim; }
};

// Matrices are [in][out]: a row of inputs times the matrix is a row of outputs.
struct TinyLayer {
  std::vector<float> attention_norm;  // [dim]
  std::vector<float> qkv;             // [dim][qkv()]: query heads, then k, then v.
  std::vector<float> attention_out;   // [q_heads * head_dim][dim]
  std::vector<float> mlp_norm;        // [dim]
  std::vector<float> gate_up;         // [dim][2 * hidden]: gate, then up.
  std::vector<float> down;            // [hidden][dim]
};

using Token = std::uint8_t;

// Immutable: thread-safe.
class TinyModel {
 public:
  // A header (JSON: configuration, alphabet, and name, shape and offset of each tensor) and the
  // file of fp16 weights that it names, in the header's folder. FAILED_PRECONDITION when a file
  // cannot be read; INVALID_ARGUMENT naming the file, and in it what is missing, unknown, of
  // another shape, out of bounds, overlapping or not finite.
  static absl::StatusOr<TinyModel> Load(const std::string& header_path);
  static absl::StatusOr<TinyModel> Parse(absl::string_view header, absl::string_view weights);

  // The same function with K and V that are harder to quantize: in each layer 4 RoPE pairs of K by
  // 8 and their queries by 1/8, 4 channels of V by 4 and their rows of the output by 1/4. Powers of
  // two: without quantization not a bit of any logit changes.
  TinyModel WithOutliers(std::uint64_t seed) const;

  const TinyConfig& config() const { return config_; }
  absl::Span<const TinyLayer> layers() const { return layers_; }
  absl::Span<const float> embedding() const { return embedding_; }  // [vocabulary][dim]
  absl::Span<const float> output() const { return output_; }  // [dim][vocabulary], the transpose.
  absl::Span<const float> output_norm() const { return output_norm_; }  // [dim]

  // Of a position's RoPE angles, [head_dim / 2] each; position < tokens_max.
  const float* Cosines(std::size_t position) const { return Angles(cosines_, position); }
  const float* Sines(std::size_t position) const { return Angles(sines_, position); }

  // Characters to tokens and back. INVALID_ARGUMENT naming a character that is not in the alphabet
  // and where it is.
  absl::StatusOr<std::vector<Token>> Encode(absl::string_view text) const;
  std::string Decode(absl::Span<const Token> tokens) const;

 private:
  TinyModel() = default;
  void ComputeAngles();
  const float* Angles(const std::vector<float>& of, std::size_t position) const {
    return of.data() + position * (config_.head_dim / 2);
  }

  TinyConfig config_;
  std::string alphabet_;
  std::vector<TinyLayer> layers_;
  std::vector<float> embedding_, output_, output_norm_;
  std::vector<float> cosines_, sines_;  // [tokens_max][head_dim / 2]
};

}  // namespace kvmill::eval

#endif  // KVMILL_CLIENT_EVAL_TINY_MODEL_H_
