// Moves a sequence of the command line from one daemon to another, both over UCX, as it is: tiles
// as records, 16-bit heads as 16-bit heads.
//   relay_probe FROM TO NAMESPACE SEQUENCE
// Says "moved BLOCKS of BYTES" when every block arrived.
#include <cstdio>
#include <cstdlib>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "client/cli/block_keys.h"
#include "client/cli/sequence_lookup.h"
#include "client/client.h"
#include "storage/core/page_layout.h"

namespace kvmill {
namespace {

template <typename T>
T Need(absl::StatusOr<T> result) {
  if (result.ok()) return *std::move(result);
  std::fprintf(stderr, "relay_probe: %s\n", result.status().ToString().c_str());
  std::exit(1);
}

// A layer of a block: the contents of its slots, one head after the other.
struct Layer {
  bool raw = false;
  std::vector<std::byte> contents;
};

class LayerKeeper : public FetchSink {
 public:
  absl::Status OnPage(const PageId& id, const PageView& page) override {
    Layer& layer = layers[{id.block, id.layer_index}];
    for (std::size_t head = 0; head < page.head_count(); ++head) {
      const bool raw = page.slot(head).kind == SlotKind::kRaw;
      if (head > 0 && raw != layer.raw) return absl::UnimplementedError("a page of both kinds");
      layer.raw = raw;
      const absl::Span<const std::byte> contents = page.contents(head);
      layer.contents.insert(layer.contents.end(), contents.begin(), contents.end());
    }
    return absl::OkStatus();
  }
  std::map<std::pair<std::uint32_t, std::uint32_t>, Layer> layers;
};

// Slots of one head are [tokens, head_dim] of K, then of V.
LayerInput InputOf(const Layer& layer, std::uint32_t tokens, std::uint32_t head_dim) {
  LayerInput input;
  if (!layer.raw) {
    input.records = layer.contents.data();
    return input;
  }
  const std::ptrdiff_t half_bytes = std::ptrdiff_t{2} * tokens * head_dim;
  input.k.data = layer.contents.data();
  input.k.token_stride_bytes = std::ptrdiff_t{2} * head_dim;
  input.k.head_stride_bytes = 2 * half_bytes;
  input.v = input.k;
  input.v.data += half_bytes;
  return input;
}

int Main(const std::vector<std::string>& arguments) {
  if (arguments.size() != 4) return 2;
  Client::Options options;
  options.path = DataPath::kUcx;
  options.timeout = absl::Seconds(60);
  options.address = arguments[0];
  const auto from = Need(Client::Create(options));
  options.address = arguments[1];
  const auto to = Need(Client::Create(options));

  const ClientNamespace source = Need(from->FindNamespace(arguments[2]));
  const cli::FoundSequence found = Need(cli::FindSequence(*from, source, arguments[3], 0));
  std::vector<BlockKey> keys = found.keys;
  // What a tail is stored under is not what it is stored by.
  const std::vector<BlockKey> own_keys = cli::SequenceKeys(arguments[3], keys.size() + 1);
  if (found.tail_tokens > 0) keys.push_back(found.tail_key);
  LayerKeeper keeper;
  const FetchResult fetched = Need(from->Fetch(source, keys, keeper));
  const ClientNamespace target = Need(to->OpenNamespace(arguments[2], source.spec));
  const LayerGroup& group = source.spec.groups[0];
  std::vector<std::vector<LayerInput>> inputs(keys.size());
  std::vector<StoreBlock> blocks(keys.size());
  for (std::uint32_t b = 0; b < keys.size(); ++b) {
    if (!fetched.blocks[b].status.ok()) {
      std::fprintf(stderr, "relay_probe: %s\n", fetched.blocks[b].status.ToString().c_str());
      return 1;
    }
    blocks[b].key = own_keys[b];
    if (b > 0) blocks[b].parent = keys[b - 1];
    blocks[b].token_count = fetched.blocks[b].token_count;
    blocks[b].block_index = b;
    for (std::uint32_t layer = 0; layer < group.layers.size(); ++layer) {
      inputs[b].push_back(
          InputOf(keeper.layers[{b, layer}], blocks[b].token_count, group.head_dim));
    }
    blocks[b].layers = inputs[b];
  }
  const StoreResult stored = Need(to->Store(target, blocks, {}));
  if (stored.blocks_stored != blocks.size()) {
    std::fprintf(stderr, "relay_probe: %d of %d blocks were stored\n",
                 static_cast<int>(stored.blocks_stored), static_cast<int>(blocks.size()));
    return 1;
  }
  std::printf("moved %d of %lld\n", static_cast<int>(blocks.size()),
              static_cast<long long>(fetched.page_bytes));
  return 0;
}

}  // namespace
}  // namespace kvmill

int main(int argc, char** argv) {
  return kvmill::Main(std::vector<std::string>(argv + 1, argv + argc));
}
