#include "client/cli/npy.h"

#include <cstring>
#include <limits>
#include <optional>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "client/cli/files.h"
#include "storage/core/status_macros.h"

namespace kvmill::cli {
namespace {

constexpr absl::string_view kMagic("\x93NUMPY", 6);
// Bounds the parse of a hostile header; NumPy writes some 120 bytes.
constexpr std::size_t kHeaderBytesMax = std::size_t{1} << 16;

struct Header {
  std::string descr;
  bool fortran_order = false;
  std::vector<std::uint64_t> shape;
};

// Reads the one Python dictionary literal that a header may be: the keys descr, fortran_order and
// shape, each once, in any order. Not Python: nothing else is understood.
class HeaderParser {
 public:
  explicit HeaderParser(absl::string_view text) : text_(text) {}

  absl::StatusOr<Header> Parse() {
    Header header;
    bool seen_descr = false, seen_order = false, seen_shape = false;
    if (!Eat('{')) return Bad("'{'");
    while (!Eat('}')) {
      const std::optional<std::string> key = String();
      if (!key || !Eat(':')) return Bad("a key and ':'");
      if (*key == "descr" && !seen_descr) {
        const std::optional<std::string> descr = String();
        if (!descr) {
          return absl::InvalidArgumentError(
              "the dtype is not a plain one (structured arrays are refused); want '<f2'");
        }
        header.descr = *descr;
        seen_descr = true;
      } else if (*key == "fortran_order" && !seen_order) {
        if (EatWord("True")) {
          header.fortran_order = true;
        } else if (!EatWord("False")) {
          return Bad("True or False");
        }
        seen_order = true;
      } else if (*key == "shape" && !seen_shape) {
        KVMILL_RETURN_IF_ERROR(Shape(header.shape));
        seen_shape = true;
      } else {
        return absl::InvalidArgumentError(
            absl::StrCat("header has an unknown or repeated key '", absl::CHexEscape(*key), "'"));
      }
      if (!Eat(',') && Peek() != '}') return Bad("',' or '}'");
    }
    if (!Rest().empty()) return Bad("the end");
    if (!seen_descr || !seen_order || !seen_shape) {
      return absl::InvalidArgumentError("header lacks descr, fortran_order or shape");
    }
    return header;
  }

 private:
  absl::string_view Rest() {
    text_ = absl::StripLeadingAsciiWhitespace(text_);
    return text_;
  }
  char Peek() { return Rest().empty() ? '\0' : text_[0]; }
  bool Eat(char c) {
    if (Peek() != c) return false;
    text_.remove_prefix(1);
    return true;
  }
  bool EatWord(absl::string_view word) {
    Rest();
    return absl::ConsumePrefix(&text_, word);
  }
  std::optional<std::string> String() {
    const char quote = Peek();
    if (quote != '\'' && quote != '"') return std::nullopt;
    const std::size_t end = text_.find(quote, 1);
    if (end == absl::string_view::npos) return std::nullopt;
    std::string value(text_.substr(1, end - 1));
    text_.remove_prefix(end + 1);
    return value;
  }
  absl::Status Shape(std::vector<std::uint64_t>& shape) {
    if (!Eat('(')) return Bad("'('");
    while (!Eat(')')) {
      Rest();
      std::size_t digits = 0;
      while (digits < text_.size() &&
             absl::ascii_isdigit(static_cast<unsigned char>(text_[digits])))
        ++digits;
      std::uint64_t value = 0;
      if (!absl::SimpleAtoi(text_.substr(0, digits), &value)) return Bad("a dimension");
      text_.remove_prefix(digits);
      shape.push_back(value);
      if (!Eat(',') && Peek() != ')') return Bad("',' or ')'");
    }
    return absl::OkStatus();
  }
  absl::Status Bad(absl::string_view want) {
    return absl::InvalidArgumentError(absl::StrCat("header is not what NumPy writes: want ", want,
                                                   " at '", absl::CHexEscape(Rest().substr(0, 16)),
                                                   "'"));
  }

  absl::string_view text_;
};

absl::Status CheckDescr(const std::string& descr, DType dtype) {
  if (dtype == DType::kFloat16 && descr == "<f2") return absl::OkStatus();
  if (dtype == DType::kBFloat16 && (descr == "<u2" || descr == "<V2" || descr == "|V2")) {
    return absl::OkStatus();
  }
  std::string hint;
  if (descr.find('O') != std::string::npos) {
    hint = "; object arrays run code when they are loaded and are refused";
  } else if (!descr.empty() && descr[0] == '>') {
    hint = "; big-endian values are refused, save with .astype('<f2')";
  } else if (dtype == DType::kFloat16 && (descr == "<u2" || descr == "<V2" || descr == "|V2")) {
    hint = "; pass --bf16 if these are bfloat16 bits";
  } else if (dtype == DType::kBFloat16 && descr == "<f2") {
    hint = "; leave --bf16 away for fp16";
  } else {
    hint = "; save with .astype('<f2')";
  }
  return absl::InvalidArgumentError(absl::StrCat(
      "dtype '", absl::CHexEscape(descr), "', want ",
      dtype == DType::kFloat16 ? "'<f2' (fp16)" : "'<u2' or '<V2' (bfloat16 bits)", hint));
}

std::string ShapeToString(absl::string_view open, absl::string_view close,
                          const std::vector<std::uint64_t>& shape) {
  std::string text(open);
  for (std::size_t i = 0; i < shape.size(); ++i) absl::StrAppend(&text, i ? ", " : "", shape[i]);
  return absl::StrCat(text, close);
}

}  // namespace

std::string Tensor::ShapeString() const {
  return ShapeToString("[", "]", {tokens, heads, head_dim});
}

absl::StatusOr<Tensor> ParseNpy(absl::string_view bytes, DType dtype) {
  if (bytes.size() < 10) {
    return absl::InvalidArgumentError(
        absl::StrCat("truncated: ", bytes.size(), " bytes, a .npy header has at least 10"));
  }
  if (!absl::ConsumePrefix(&bytes, kMagic)) {
    return absl::InvalidArgumentError("not a .npy file: it does not start with \\x93NUMPY");
  }
  const int version = static_cast<unsigned char>(bytes[0]);
  const int minor = static_cast<unsigned char>(bytes[1]);
  if ((version != 1 && version != 2) || minor != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("format version ", version, ".", minor, ", want 1.0 or 2.0"));
  }
  const std::size_t length_bytes = version == 1 ? 2 : 4;
  bytes.remove_prefix(2);
  if (bytes.size() < length_bytes) return absl::InvalidArgumentError("truncated header length");
  std::size_t header_bytes = 0;
  for (std::size_t i = 0; i < length_bytes; ++i) {
    header_bytes |= std::size_t{static_cast<unsigned char>(bytes[i])} << (8 * i);
  }
  bytes.remove_prefix(length_bytes);
  if (header_bytes > kHeaderBytesMax) {
    return absl::InvalidArgumentError(
        absl::StrCat("header of ", header_bytes, " bytes, at most ", kHeaderBytesMax));
  }
  if (bytes.size() < header_bytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("truncated: header of ", header_bytes, " bytes, the file has ", bytes.size()));
  }
  KVMILL_ASSIGN_OR_RETURN(const Header header, HeaderParser(bytes.substr(0, header_bytes)).Parse());
  bytes.remove_prefix(header_bytes);

  KVMILL_RETURN_IF_ERROR(CheckDescr(header.descr, dtype));
  if (header.fortran_order) {
    return absl::InvalidArgumentError(
        "fortran_order is True, want C order; save with numpy.ascontiguousarray");
  }
  const std::string shape = ShapeToString("(", ")", header.shape);
  if (header.shape.size() != 3) {
    return absl::InvalidArgumentError(absl::StrCat("shape ", shape, " has ", header.shape.size(),
                                                   " dimensions, want [tokens, heads, head_dim]"));
  }
  std::uint64_t count = 1;
  for (const std::uint64_t dimension : header.shape) {
    constexpr std::uint64_t kDimensionMax = std::numeric_limits<std::uint32_t>::max();
    if (dimension < 1 || dimension > kDimensionMax ||
        count > std::numeric_limits<std::uint64_t>::max() / 2 / dimension) {
      return absl::InvalidArgumentError(absl::StrCat("shape ", shape, ": dimensions are 1 to ",
                                                     kDimensionMax,
                                                     " and their product must fit the file"));
    }
    count *= dimension;
  }
  if (bytes.size() != 2 * count) {
    return absl::InvalidArgumentError(
        absl::StrCat(bytes.size() < 2 * count ? "truncated: " : "trailing bytes: ", bytes.size(),
                     " bytes of values, shape ", shape, " needs ", 2 * count));
  }
  Tensor tensor;
  tensor.tokens = static_cast<std::uint32_t>(header.shape[0]);
  tensor.heads = static_cast<std::uint32_t>(header.shape[1]);
  tensor.head_dim = static_cast<std::uint32_t>(header.shape[2]);
  tensor.dtype = dtype;
  tensor.values.resize(count);
  std::memcpy(tensor.values.data(), bytes.data(), bytes.size());
  return tensor;
}

absl::StatusOr<Tensor> ReadNpy(const std::string& path, DType dtype) {
  KVMILL_ASSIGN_OR_RETURN(const std::string bytes, ReadFile(path));
  absl::StatusOr<Tensor> tensor = ParseNpy(bytes, dtype);
  if (!tensor.ok()) {
    return absl::Status(tensor.status().code(),
                        absl::StrCat(path, ": ", tensor.status().message()));
  }
  return tensor;
}

absl::Status WriteNpy(const std::string& path, const Tensor& tensor) {
  std::string header =
      absl::StrCat("{'descr': '", tensor.dtype == DType::kFloat16 ? "<f2" : "<u2",
                   "', 'fortran_order': False, 'shape': ",
                   ShapeToString("(", ")", {tensor.tokens, tensor.heads, tensor.head_dim}), ", }");
  // Magic, version and length take 10 bytes; values start at a multiple of 64.
  while ((10 + header.size() + 1) % 64 != 0) header.push_back(' ');
  header.push_back('\n');
  std::string prefix = absl::StrCat(kMagic, absl::string_view("\x01\x00", 2));
  prefix.push_back(static_cast<char>(header.size() & 0xFF));
  prefix.push_back(static_cast<char>(header.size() >> 8));
  return WriteFile(path, {prefix, header,
                          absl::string_view(reinterpret_cast<const char*>(tensor.values.data()),
                                            2 * tensor.values.size())});
}

}  // namespace kvmill::cli
