#include "client/cli/kv_files.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "client/cli/files.h"
#include "client/cli/output.h"
#include "storage/core/status_macros.h"

namespace kvmill::cli {

std::string LayerPath(absl::string_view prefix, std::size_t layer, absl::string_view suffix) {
  return absl::StrFormat("%sL%02d%s", prefix, layer, suffix);
}

absl::StatusOr<std::vector<LayerTensors>> LoadLayers(absl::string_view prefix, DType dtype) {
  std::vector<LayerTensors> layers;
  Progress progress("reading");
  for (std::size_t n = 0; n < kLayersMax; ++n) {
    const std::string k_path = LayerPath(prefix, n, "_k.npy");
    const std::string v_path = LayerPath(prefix, n, "_v.npy");
    if (!FileExists(k_path) && !FileExists(v_path)) break;
    LayerTensors layer;
    KVMILL_ASSIGN_OR_RETURN(layer.k, ReadNpy(k_path, dtype));
    KVMILL_ASSIGN_OR_RETURN(layer.v, ReadNpy(v_path, dtype));
    if (layer.k.ShapeString() != layer.v.ShapeString()) {
      return absl::InvalidArgumentError(absl::StrCat(v_path, ": shape ", layer.v.ShapeString(),
                                                     ", but K is ", layer.k.ShapeString()));
    }
    if (!layers.empty() && layer.k.tokens != layers[0].k.tokens) {
      return absl::InvalidArgumentError(absl::StrCat(
          k_path, ": ", layer.k.tokens, " tokens, but layer 0 has ", layers[0].k.tokens));
    }
    layers.push_back(std::move(layer));
    progress.Update(n + 1, 0, "layers");
  }
  if (layers.empty()) {
    return absl::FailedPreconditionError(absl::StrCat(
        "there is no ", LayerPath(prefix, 0, "_k.npy"),
        "; --kv takes what stands before L00_k.npy, a folder with its slash included"));
  }
  return layers;
}

absl::Status SaveLayers(absl::string_view prefix, const std::vector<LayerTensors>& layers) {
  for (std::size_t n = 0; n < layers.size(); ++n) {
    KVMILL_RETURN_IF_ERROR(WriteNpy(LayerPath(prefix, n, "_k.npy"), layers[n].k));
    KVMILL_RETURN_IF_ERROR(WriteNpy(LayerPath(prefix, n, "_v.npy"), layers[n].v));
  }
  return absl::OkStatus();
}

std::vector<LayerGroup> GroupLayers(const std::vector<LayerTensors>& layers) {
  std::vector<LayerGroup> groups;
  for (std::size_t n = 0; n < layers.size(); ++n) {
    const Tensor& k = layers[n].k;
    auto group = std::find_if(groups.begin(), groups.end(), [&](const LayerGroup& g) {
      return g.kv_heads == k.heads && g.head_dim == k.head_dim;
    });
    if (group == groups.end()) {
      group = groups.emplace(groups.end());
      group->kv_heads = static_cast<std::uint16_t>(k.heads);
      group->head_dim = static_cast<std::uint16_t>(k.head_dim);
    }
    group->layers.push_back(static_cast<std::uint16_t>(n));
  }
  return groups;
}

std::vector<std::uint16_t> LayerOrder(const NamespaceSpec& spec) {
  std::vector<std::uint16_t> order;
  for (const LayerGroup& group : spec.groups) {
    order.insert(order.end(), group.layers.begin(), group.layers.end());
  }
  return order;
}

std::uint64_t RawTokenBytes(const NamespaceSpec& spec) {
  std::uint64_t bytes = 0;
  for (const LayerGroup& group : spec.groups) {
    bytes += std::uint64_t{4} * group.kv_heads * group.head_dim * group.layers.size();
  }
  return bytes;
}

}  // namespace kvmill::cli
