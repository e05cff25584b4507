#include "client/eval/handover.h"

#include <algorithm>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "kernels/float16.h"
#include "storage/core/check.h"
#include "storage/core/sha256.h"
#include "storage/core/status_macros.h"

namespace kvmill::eval {
namespace {

// Copies of pages, by block and layer: they come in any order, and caches are filled in theirs.
class Pages : public FetchSink {
 public:
  struct Page {
    BlockKind kind = BlockKind::kAbsent;
    std::vector<std::byte> contents;
  };
  Pages(std::size_t blocks, std::size_t layers) : layers_(layers), pages_(blocks * layers) {}

  absl::Status OnPage(const PageId& id, const PageView& page) override {
    const SlotKind kind = page.slot(0).kind;
    if (kind == SlotKind::kAbsent) return absl::DataLossError("a page without its head");
    const absl::Span<const std::byte> contents = page.contents(0);
    pages_[id.block * layers_ + id.layer_index] = {
        kind == SlotKind::kTile ? BlockKind::kTile : BlockKind::kRaw,
        {contents.begin(), contents.end()}};
    return absl::OkStatus();
  }
  const Page& page(std::size_t block, std::size_t layer) const {
    return pages_[block * layers_ + layer];
  }

 private:
  const std::size_t layers_;
  std::vector<Page> pages_;
};

}  // namespace

std::vector<BlockKey> TokenKeys(absl::Span<const Token> tokens, std::uint32_t block_tokens) {
  std::vector<BlockKey> keys;
  for (std::size_t at = 0; at < tokens.size(); at += block_tokens) {
    std::string input("kvmill-tiny-1");
    input.push_back('\0');
    if (!keys.empty()) absl::StrAppend(&input, keys.back().view());
    for (const Token token : tokens.subspan(at, block_tokens)) {
      input.push_back(static_cast<char>(token));
    }
    const Sha256Digest digest = Sha256(input);
    const absl::StatusOr<BlockKey> key = BlockKey::FromBytes(
        absl::string_view(reinterpret_cast<const char*>(digest.data()), digest.size()));
    KVMILL_CHECK(key.ok());
    keys.push_back(*key);
  }
  return keys;
}

absl::StatusOr<StoreResult> StorePrompt(Client& client, const ClientNamespace& ns,
                                        absl::Span<const Token> tokens, const Recording& recording,
                                        const StoreOptions& options) {
  const std::size_t layers = recording.k.size(), group = ns.spec.block_tokens;
  const std::uint32_t head_dim = ns.spec.groups[0].head_dim;
  std::vector<std::vector<std::uint16_t>> halves;  // K and V of each layer.
  for (std::size_t layer = 0; layer < layers; ++layer) {
    for (const std::vector<float>* values : {&recording.k[layer], &recording.v[layer]}) {
      std::vector<std::uint16_t>& half = halves.emplace_back(tokens.size() * head_dim);
      for (std::size_t i = 0; i < half.size(); ++i) half[i] = FloatToFloat16((*values)[i]);
    }
  }
  const std::vector<BlockKey> keys = TokenKeys(tokens, ns.spec.block_tokens);
  std::vector<LayerInput> inputs(keys.size() * layers);
  std::vector<StoreBlock> blocks(keys.size());
  for (std::size_t b = 0; b < keys.size(); ++b) {
    for (std::size_t layer = 0; layer < layers; ++layer) {
      const std::size_t at = b * group * head_dim;
      inputs[b * layers + layer].k = KvView::Array(halves[2 * layer].data() + at, 1, head_dim);
      inputs[b * layers + layer].v = KvView::Array(halves[2 * layer + 1].data() + at, 1, head_dim);
    }
    blocks[b].key = keys[b];
    if (b > 0) blocks[b].parent = keys[b - 1];
    blocks[b].token_count = static_cast<std::uint32_t>(std::min(group, tokens.size() - b * group));
    blocks[b].block_index = static_cast<std::uint32_t>(b);
    blocks[b].layers = absl::MakeConstSpan(inputs).subspan(b * layers, layers);
  }
  KVMILL_ASSIGN_OR_RETURN(StoreResult result, client.Store(ns, blocks, options));
  for (const StoreBlockResult& block : result.blocks) KVMILL_RETURN_IF_ERROR(block.status);
  return result;
}

absl::StatusOr<FetchedPrompt> FetchPrompt(Client& client, const ClientNamespace& ns,
                                          absl::Span<const Token> tokens, TileCache& cache) {
  const std::uint32_t group = ns.spec.block_tokens;
  const auto count = static_cast<std::uint32_t>(tokens.size());
  const std::uint32_t whole = count / group;
  std::vector<BlockKey> keys = TokenKeys(tokens, group);
  std::vector<TailCandidate> tails;
  if (count % group > 0) tails.push_back({keys.back(), count % group, whole});
  keys.resize(whole);
  KVMILL_ASSIGN_OR_RETURN(const LookupResult found, client.Lookup(ns, keys, tails));
  keys.resize(found.hit_blocks);
  if (found.tail_tokens > 0) keys.push_back(found.tail_key);
  FetchedPrompt prompt;
  if (keys.empty()) return prompt;
  const std::size_t layers = ns.spec.groups[0].layers.size();
  Pages pages(keys.size(), layers);
  KVMILL_ASSIGN_OR_RETURN(const FetchResult fetched, client.Fetch(ns, keys, pages));
  prompt.page_bytes = fetched.page_bytes;
  for (std::size_t b = 0; b < keys.size(); ++b) {
    const FetchBlockResult& block = fetched.blocks[b];
    // A block of another length than its key stands for would shift all behind it.
    const std::uint32_t want = b < found.hit_blocks ? group : found.tail_tokens;
    if (!block.status.ok() || block.token_count != want) break;
    for (std::size_t layer = 0; layer < layers; ++layer) {
      const Pages::Page& page = pages.page(b, layer);
      cache.Restore(static_cast<std::uint32_t>(layer), page.kind, block.token_count, page.contents);
    }
    prompt.tokens += block.token_count;
    if (b < found.hit_blocks) prompt.tiers.push_back(found.tiers[b]);
  }
  return prompt;
}

}  // namespace kvmill::eval
