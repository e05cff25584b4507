// The JSON header of the small model's weights, checked.
#ifndef KVMILL_CLIENT_EVAL_TINY_HEADER_H_
#define KVMILL_CLIENT_EVAL_TINY_HEADER_H_

#include <cstddef>
#include <map>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "client/eval/tiny_model.h"

namespace kvmill::eval {

struct TinyTensor {
  std::vector<std::size_t> shape;
  std::size_t offset = 0;  // Bytes in the file of weights.

  std::size_t elements() const {
    std::size_t count = 1;
    for (const std::size_t n : shape) count *= n;
    return count;
  }
};

struct TinyHeader {
  TinyConfig config;
  std::string alphabet;     // One character a token; the first of two same ones is meant.
  std::string weight_file;  // A name without a folder.
  std::size_t weight_bytes = 0;
  std::map<std::string, TinyTensor> tensors;  // Exactly those of the configuration.
};

// INVALID_ARGUMENT naming the field, its value and what it must be. Tensors fill the file without
// gap or overlap.
absl::StatusOr<TinyHeader> ParseTinyHeader(absl::string_view text);

}  // namespace kvmill::eval

#endif  // KVMILL_CLIENT_EVAL_TINY_HEADER_H_
