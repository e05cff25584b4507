#include "client/eval/tiny_header.h"

#include <algorithm>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kernels/dense.h"
#include "nlohmann/json.hpp"
#include "storage/core/status_macros.h"

namespace kvmill::eval {
namespace {

using Json = nlohmann::json;

constexpr std::size_t kNumberMax = 1 << 20;  // No product of four of them overflows.

absl::Status Bad(absl::string_view what, const Json& value, absl::string_view want) {
  return absl::InvalidArgumentError(absl::StrCat(
      "header: ", what, " is ", value.dump(-1, ' ', true, Json::error_handler_t::replace),
      "; it must be ", want));
}

// The member of an object, null when it has none.
const Json& Member(const Json& object, const std::string& name) {
  static const Json* const null = new Json();
  if (!object.is_object()) return *null;
  const auto found = object.find(name);
  return found == object.end() ? *null : *found;
}

absl::StatusOr<std::uint32_t> Count(const Json& config, const std::string& name,
                                    std::size_t multiple = 1) {
  const Json& value = Member(config, name);
  const std::string want =
      absl::StrCat("a whole number from 1 to ", kNumberMax,
                   multiple > 1 ? absl::StrCat(", a multiple of ", multiple) : "");
  if (!value.is_number_unsigned()) return Bad("config." + name, value, want);
  const auto count = value.get<std::uint64_t>();
  if (count == 0 || count > kNumberMax || count % multiple != 0) {
    return Bad("config." + name, value, want);
  }
  return static_cast<std::uint32_t>(count);
}

absl::StatusOr<double> Positive(const Json& config, const std::string& name) {
  const Json& value = Member(config, name);
  if (!value.is_number() || !(value.get<double>() > 0)) {
    return Bad("config." + name, value, "a number above 0");
  }
  return value.get<double>();
}

absl::StatusOr<TinyConfig> ParseConfig(const Json& json) {
  TinyConfig config;
  KVMILL_ASSIGN_OR_RETURN(config.vocabulary, Count(json, "vocab", kDenseColumns));
  if (config.vocabulary > 256) return Bad("config.vocab", json["vocab"], "at most 256");
  KVMILL_ASSIGN_OR_RETURN(config.dim, Count(json, "dim", kDenseColumns));
  KVMILL_ASSIGN_OR_RETURN(config.layers, Count(json, "layers"));
  if (config.layers > 100) return Bad("config.layers", json["layers"], "at most 100");
  KVMILL_ASSIGN_OR_RETURN(config.q_heads, Count(json, "hq"));
  KVMILL_ASSIGN_OR_RETURN(const std::uint32_t kv_heads, Count(json, "hk"));
  if (kv_heads != 1) return Bad("config.hk", json["hk"], "1: this runtime has one KV head");
  KVMILL_ASSIGN_OR_RETURN(config.head_dim, Count(json, "hd", 64));
  if (config.head_dim != 64 && config.head_dim != 128 && config.head_dim != 256) {
    return Bad("config.hd", json["hd"], "64, 128 or 256");
  }
  KVMILL_ASSIGN_OR_RETURN(config.hidden, Count(json, "ff", kDenseColumns));
  KVMILL_ASSIGN_OR_RETURN(config.tokens_max, Count(json, "maxT"));
  if (config.tokens_max > 65536) return Bad("config.maxT", json["maxT"], "at most 65536");
  KVMILL_ASSIGN_OR_RETURN(config.rope_base, Positive(json, "theta"));
  KVMILL_ASSIGN_OR_RETURN(const double epsilon, Positive(json, "eps"));
  config.norm_epsilon = static_cast<float>(epsilon);
  return config;
}

absl::StatusOr<std::string> ParseAlphabet(const Json& json, std::uint32_t count) {
  const std::string want = absl::StrCat("a list of ", count, " strings of one byte");
  if (!json.is_array() || json.size() != count) return Bad("vocab", json, want);
  std::string alphabet;
  for (const Json& one : json) {
    if (!one.is_string() || one.get_ref<const std::string&>().size() != 1) {
      return Bad("an entry of vocab", one, want);
    }
    alphabet += one.get_ref<const std::string&>();
  }
  return alphabet;
}

// What the configuration asks for, by name.
std::map<std::string, std::vector<std::size_t>> Shapes(const TinyConfig& c) {
  const std::size_t heads = std::size_t{c.q_heads} * c.head_dim;
  std::map<std::string, std::vector<std::size_t>> shapes = {{"tok_emb", {c.vocabulary, c.dim}},
                                                            {"out_norm", {c.dim}}};
  for (std::uint32_t i = 0; i < c.layers; ++i) {
    const std::string layer = absl::StrCat("l", i, ".");
    shapes[layer + "attn_norm"] = {c.dim};
    shapes[layer + "wqkv"] = {c.qkv(), c.dim};
    shapes[layer + "wo"] = {c.dim, heads};
    shapes[layer + "mlp_norm"] = {c.dim};
    shapes[layer + "wgu"] = {2 * std::size_t{c.hidden}, c.dim};
    shapes[layer + "wdown"] = {c.dim, c.hidden};
  }
  return shapes;
}

absl::StatusOr<TinyTensor> ParseTensor(const std::string& name, const Json& json,
                                       const std::vector<std::size_t>& shape) {
  const std::string want = absl::StrCat("[", absl::StrJoin(shape, ", "), "]");
  const Json& said = Member(json, "shape");
  bool same = said.is_array() && said.size() == shape.size();
  for (std::size_t i = 0; same && i < shape.size(); ++i) {
    same = said[i].is_number_unsigned() && said[i].get<std::uint64_t>() == shape[i];
  }
  if (!same) return Bad(absl::StrCat("the shape of tensor ", name), said, want);
  const Json& offset = Member(json, "offset_bytes");
  if (!offset.is_number_unsigned()) {
    return Bad(absl::StrCat("offset_bytes of tensor ", name), offset, "a whole number");
  }
  return TinyTensor{shape, offset.get<std::size_t>()};
}

// One after the other from 0 on. The number of bytes.
absl::StatusOr<std::size_t> CheckOffsets(const std::map<std::string, TinyTensor>& tensors) {
  std::vector<std::pair<std::size_t, std::string>> starts;
  for (const auto& [name, tensor] : tensors) starts.emplace_back(tensor.offset, name);
  std::sort(starts.begin(), starts.end());
  std::size_t end = 0;
  for (const auto& [start, name] : starts) {
    if (start != end) {
      return absl::InvalidArgumentError(absl::StrCat("header: offset_bytes of tensor ", name,
                                                     " is ", start, ", and the one before ends at ",
                                                     end));
    }
    end += 2 * tensors.at(name).elements();
  }
  return end;
}

}  // namespace

absl::StatusOr<TinyHeader> ParseTinyHeader(absl::string_view text) {
  const Json json = Json::parse(text.begin(), text.end(), nullptr, /*allow_exceptions=*/false);
  if (!json.is_object()) return absl::InvalidArgumentError("header: it is no JSON object");
  TinyHeader header;
  KVMILL_ASSIGN_OR_RETURN(header.config, ParseConfig(Member(json, "config")));
  KVMILL_ASSIGN_OR_RETURN(header.alphabet,
                          ParseAlphabet(Member(json, "vocab"), header.config.vocabulary));
  const Json& file = Member(json, "bin");
  if (!file.is_string() || file.get_ref<const std::string&>().empty() ||
      file.get_ref<const std::string&>().find('/') != std::string::npos) {
    return Bad("bin", file, "the name of a file beside the header");
  }
  header.weight_file = file.get<std::string>();
  const Json& dtype = Member(json, "dtype");
  if (!dtype.is_string() || dtype.get_ref<const std::string&>() != "float16-le") {
    return Bad("dtype", dtype, "\"float16-le\"");
  }
  const Json& tensors = Member(json, "tensors");
  if (!tensors.is_object()) return Bad("tensors", tensors, "an object");
  const std::map<std::string, std::vector<std::size_t>> shapes = Shapes(header.config);
  for (const auto& [name, tensor] : tensors.items()) {
    if (shapes.count(name) == 0) {
      return absl::InvalidArgumentError(
          absl::StrCat("header: tensor ", name, " belongs to no part of this configuration"));
    }
  }
  for (const auto& [name, shape] : shapes) {
    const Json& tensor = Member(tensors, name);
    if (tensor.is_null()) {
      return absl::InvalidArgumentError(absl::StrCat("header: tensor ", name, " is missing"));
    }
    KVMILL_ASSIGN_OR_RETURN(header.tensors[name], ParseTensor(name, tensor, shape));
  }
  KVMILL_ASSIGN_OR_RETURN(header.weight_bytes, CheckOffsets(header.tensors));
  return header;
}

}  // namespace kvmill::eval
