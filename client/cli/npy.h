// NumPy .npy files of 16-bit tensors [tokens, heads, head_dim]: what the command line reads and
// writes.
//
// The reader is strict, because these bytes are stored and shared: format version 1 or 2, C order,
// three dimensions of at least 1, `'<f2'` for fp16 or, when the caller says that the values are
// bfloat16, `'<u2'` or `'<V2'` (NumPy has no bfloat16 of its own), and exactly as many bytes as the
// shape says. Values are not looked at: encoding refuses NaN and infinity later.
#ifndef KVMILL_CLIENT_CLI_NPY_H_
#define KVMILL_CLIENT_CLI_NPY_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "kernels/float16.h"

namespace kvmill::cli {

// K or V of one layer. values[(token * heads + head) * head_dim + channel].
struct Tensor {
  std::uint32_t tokens = 0;
  std::uint32_t heads = 0;
  std::uint32_t head_dim = 0;
  DType dtype = DType::kFloat16;
  std::vector<std::uint16_t> values;

  std::string ShapeString() const;  // "[284, 2, 64]"
};

// FAILED_PRECONDITION when it cannot be read; INVALID_ARGUMENT naming the path and what is wrong
// with it.
absl::StatusOr<Tensor> ReadNpy(const std::string& path, DType dtype);

// The same from the bytes of a file; errors do not name the path.
absl::StatusOr<Tensor> ParseNpy(absl::string_view bytes, DType dtype);

// Version 1; `'<f2'` or `'<u2'` by the tensor's dtype. The file appears whole or not at all.
absl::Status WriteNpy(const std::string& path, const Tensor& tensor);

}  // namespace kvmill::cli

#endif  // KVMILL_CLIENT_CLI_NPY_H_
