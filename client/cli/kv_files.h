// The K and V of a whole prompt as files: PREFIXL00_k.npy, PREFIXL00_v.npy, PREFIXL01_k.npy, ...
#ifndef KVMILL_CLIENT_CLI_KV_FILES_H_
#define KVMILL_CLIENT_CLI_KV_FILES_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "client/cli/npy.h"
#include "kernels/float16.h"
#include "storage/core/namespace.h"

namespace kvmill::cli {

struct LayerTensors {
  Tensor k;
  Tensor v;
};

// Layers 0, 1, ... up to the first number that has no file. All have the same number of tokens; K
// and V of a layer the same shape. INVALID_ARGUMENT naming the file otherwise, also when K is there
// and V is not; FAILED_PRECONDITION when there is no layer 0.
absl::StatusOr<std::vector<LayerTensors>> LoadLayers(absl::string_view prefix, DType dtype);

absl::Status SaveLayers(absl::string_view prefix, const std::vector<LayerTensors>& layers);

// PREFIXL07SUFFIX
std::string LayerPath(absl::string_view prefix, std::size_t layer, absl::string_view suffix);

// One full-attention group per geometry (KV heads and head_dim), in the order in which each first
// appears.
std::vector<LayerGroup> GroupLayers(const std::vector<LayerTensors>& layers);

// The model's layer numbers in the order in which the client library wants them: group by group.
std::vector<std::uint16_t> LayerOrder(const NamespaceSpec& spec);

// 16-bit bytes of one token over all layers.
std::uint64_t RawTokenBytes(const NamespaceSpec& spec);

}  // namespace kvmill::cli

#endif  // KVMILL_CLIENT_CLI_KV_FILES_H_
