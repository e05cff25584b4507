#include "client/eval/tiny_model.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "client/cli/files.h"
#include "client/eval/random.h"
#include "client/eval/tiny_header.h"
#include "kernels/float16.h"
#include "storage/core/status_macros.h"

namespace kvmill::eval {
namespace {

// `values` is [rows][columns].
std::vector<float> Transposed(const std::vector<float>& values, std::size_t rows,
                              std::size_t columns) {
  std::vector<float> out(values.size());
  for (std::size_t r = 0; r < rows; ++r) {
    for (std::size_t c = 0; c < columns; ++c) out[c * rows + r] = values[r * columns + c];
  }
  return out;
}

// Tensors of the header out of the bytes of the file of weights.
class Weights {
 public:
  Weights(const TinyHeader& header, absl::string_view bytes) : header_(header), bytes_(bytes) {}

  absl::StatusOr<std::vector<float>> Take(absl::string_view name) const {
    const TinyTensor& tensor = header_.tensors.at(std::string(name));
    std::vector<float> values(tensor.elements());
    for (std::size_t i = 0; i < values.size(); ++i) {
      const std::size_t at = tensor.offset + 2 * i;
      const auto low = static_cast<std::uint8_t>(bytes_[at]);
      const auto high = static_cast<std::uint8_t>(bytes_[at + 1]);
      values[i] = Float16ToFloat(static_cast<std::uint16_t>(low | high << 8));
      if (!std::isfinite(values[i])) {
        return absl::InvalidArgumentError(
            absl::StrCat("tensor ", name, ": element ", i, " is ", values[i]));
      }
    }
    return values;
  }

  // A matrix that the file has as [out][in].
  absl::StatusOr<std::vector<float>> TakeMatrix(absl::string_view name) const {
    KVMILL_ASSIGN_OR_RETURN(const std::vector<float> values, Take(name));
    const TinyTensor& tensor = header_.tensors.at(std::string(name));
    return Transposed(values, tensor.shape[0], tensor.shape[1]);
  }

 private:
  const TinyHeader& header_;
  absl::string_view bytes_;
};

absl::StatusOr<TinyLayer> TakeLayer(const Weights& weights, std::uint32_t number) {
  const std::string prefix = absl::StrCat("l", number, ".");
  TinyLayer layer;
  KVMILL_ASSIGN_OR_RETURN(layer.attention_norm, weights.Take(prefix + "attn_norm"));
  KVMILL_ASSIGN_OR_RETURN(layer.qkv, weights.TakeMatrix(prefix + "wqkv"));
  KVMILL_ASSIGN_OR_RETURN(layer.attention_out, weights.TakeMatrix(prefix + "wo"));
  KVMILL_ASSIGN_OR_RETURN(layer.mlp_norm, weights.Take(prefix + "mlp_norm"));
  KVMILL_ASSIGN_OR_RETURN(layer.gate_up, weights.TakeMatrix(prefix + "wgu"));
  KVMILL_ASSIGN_OR_RETURN(layer.down, weights.TakeMatrix(prefix + "wdown"));
  return layer;
}

absl::Status At(const std::string& path, const absl::Status& status) {
  return absl::Status(status.code(), absl::StrCat(path, ": ", status.message()));
}

// `count` different numbers below `limit`.
std::vector<std::size_t> Choose(Random& random, std::size_t count, std::size_t limit) {
  std::vector<std::size_t> chosen;
  while (chosen.size() < count) {
    const std::size_t one = random.Below(limit);
    if (std::find(chosen.begin(), chosen.end(), one) == chosen.end()) chosen.push_back(one);
  }
  return chosen;
}

void ScaleColumn(std::vector<float>& matrix, std::size_t columns, std::size_t column, float by) {
  for (std::size_t at = column; at < matrix.size(); at += columns) matrix[at] *= by;
}

}  // namespace

absl::StatusOr<TinyModel> TinyModel::Parse(absl::string_view header_text, absl::string_view bytes) {
  KVMILL_ASSIGN_OR_RETURN(const TinyHeader header, ParseTinyHeader(header_text));
  if (bytes.size() != header.weight_bytes) {
    return absl::InvalidArgumentError(absl::StrCat("the weights have ", bytes.size(),
                                                   " bytes, and the tensors of the header ",
                                                   header.weight_bytes));
  }
  const Weights weights(header, bytes);
  TinyModel model;
  model.config_ = header.config;
  model.alphabet_ = header.alphabet;
  KVMILL_ASSIGN_OR_RETURN(model.embedding_, weights.Take("tok_emb"));
  model.output_ = Transposed(model.embedding_, header.config.vocabulary, header.config.dim);
  KVMILL_ASSIGN_OR_RETURN(model.output_norm_, weights.Take("out_norm"));
  for (std::uint32_t i = 0; i < header.config.layers; ++i) {
    KVMILL_ASSIGN_OR_RETURN(TinyLayer layer, TakeLayer(weights, i));
    model.layers_.push_back(std::move(layer));
  }
  model.ComputeAngles();
  return model;
}

void TinyModel::ComputeAngles() {
  const std::size_t half = config_.head_dim / 2;
  std::vector<double> speeds;
  for (std::size_t i = 0; i < half; ++i) {
    const double share = static_cast<double>(i) / static_cast<double>(half);
    speeds.push_back(std::pow(config_.rope_base, -share));
  }
  for (std::size_t t = 0; t < config_.tokens_max; ++t) {
    for (const double speed : speeds) {
      cosines_.push_back(static_cast<float>(std::cos(static_cast<double>(t) * speed)));
      sines_.push_back(static_cast<float>(std::sin(static_cast<double>(t) * speed)));
    }
  }
}

absl::StatusOr<TinyModel> TinyModel::Load(const std::string& header_path) {
  KVMILL_ASSIGN_OR_RETURN(const std::string text, cli::ReadFile(header_path));
  const absl::StatusOr<TinyHeader> header = ParseTinyHeader(text);
  if (!header.ok()) return At(header_path, header.status());
  const std::size_t slash = header_path.rfind('/');
  const std::string path = absl::StrCat(
      slash == std::string::npos ? "" : header_path.substr(0, slash + 1), header->weight_file);
  KVMILL_ASSIGN_OR_RETURN(const std::string weights, cli::ReadFile(path));
  absl::StatusOr<TinyModel> model = Parse(text, weights);
  if (!model.ok()) return At(path, model.status());
  return model;
}

TinyModel TinyModel::WithOutliers(std::uint64_t seed) const {
  TinyModel model = *this;
  Random random(seed);
  const std::size_t dim = config_.head_dim, columns = config_.qkv();
  const std::size_t k = config_.q_heads * dim, v = k + dim;
  for (TinyLayer& layer : model.layers_) {
    for (const std::size_t pair : Choose(random, 4, dim / 2)) {
      for (const std::size_t channel : {pair, pair + dim / 2}) {
        ScaleColumn(layer.qkv, columns, k + channel, 8);
        for (std::size_t h = 0; h < config_.q_heads; ++h) {
          ScaleColumn(layer.qkv, columns, h * dim + channel, 0.125f);
        }
      }
    }
    for (const std::size_t channel : Choose(random, 4, dim)) {
      ScaleColumn(layer.qkv, columns, v + channel, 4);
      for (std::size_t h = 0; h < config_.q_heads; ++h) {
        float* row = layer.attention_out.data() + (h * dim + channel) * config_.dim;
        std::for_each(row, row + config_.dim, [](float& x) { x *= 0.25f; });
      }
    }
  }
  return model;
}

absl::StatusOr<std::vector<Token>> TinyModel::Encode(absl::string_view text) const {
  std::vector<Token> tokens;
  tokens.reserve(text.size());
  for (std::size_t i = 0; i < text.size(); ++i) {
    const std::size_t token = alphabet_.find(text[i]);
    if (token == std::string::npos) {
      return absl::InvalidArgumentError(absl::StrCat("character ", i, " (byte ",
                                                     static_cast<unsigned char>(text[i]),
                                                     ") is not in the model's alphabet"));
    }
    tokens.push_back(static_cast<Token>(token));
  }
  return tokens;
}

std::string TinyModel::Decode(absl::Span<const Token> tokens) const {
  std::string text;
  for (const Token token : tokens) text += token < alphabet_.size() ? alphabet_[token] : '?';
  return text;
}

}  // namespace kvmill::eval
