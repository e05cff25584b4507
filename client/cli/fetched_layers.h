// What `kvmill get` makes of fetched pages: tensors, or records as they were stored.
#ifndef KVMILL_CLIENT_CLI_FETCHED_LAYERS_H_
#define KVMILL_CLIENT_CLI_FETCHED_LAYERS_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "client/cli/kv_files.h"
#include "client/cli/raw_heads.h"
#include "client/client.h"
#include "client/kv_sink.h"

namespace kvmill::cli {

// Tensors of a prompt's blocks (whole ones and a tail), one pair a layer of the model, filled in
// place by a KvSink.
class FetchedTensors {
 public:
  FetchedTensors(const NamespaceSpec& spec, std::uint32_t token_count);

  // For blocks first_block .. + block_count - 1 of the prompt; valid as long as this object.
  std::vector<LayerOutput> Outputs(std::uint32_t first_block, std::uint32_t block_count);

  // Drops the tokens past `token_count`.
  void Truncate(std::uint32_t token_count);
  absl::Status Save(absl::string_view prefix) const { return SaveLayers(prefix, layers_); }

 private:
  const std::vector<std::uint16_t> order_;
  const std::uint32_t block_tokens_;
  std::vector<LayerTensors> layers_;
};

// Records of a prompt's whole blocks as they lie in the pages; heads that are raw there become
// zeros and an entry of the layer's raw heads.
class FetchedRecords {
 public:
  FetchedRecords(const NamespaceSpec& spec, std::uint32_t block_count);

  // Takes the pages of blocks first_block, first_block + 1, ... of the prompt.
  class Sink : public FetchSink {
   public:
    Sink(FetchedRecords& records, std::uint32_t first_block)
        : records_(records), first_block_(first_block) {}
    absl::Status OnPage(const PageId& id, const PageView& page) override;

   private:
    FetchedRecords& records_;
    const std::uint32_t first_block_;
  };

  void Truncate(std::uint32_t block_count);
  // PREFIXL00.records, and PREFIXL00.raw for a layer with raw heads.
  absl::Status Save(absl::string_view prefix) const;

 private:
  struct Layer {
    TileFormat format;
    std::uint32_t heads = 0;
    std::string records;
    std::vector<RawHead> raw_heads;
  };
  const DType dtype_;
  std::uint32_t block_count_;
  std::vector<Layer> layers_;  // By the model's layer number.
};

}  // namespace kvmill::cli

#endif  // KVMILL_CLIENT_CLI_FETCHED_LAYERS_H_
