// Stores one block of K and V, looks it up and fetches it back: store_and_fetch ADDRESS
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "client/client.h"
#include "client/kv_sink.h"
#include "kernels/float16.h"

using namespace kvmill;  // NOLINT(google-build-using-namespace): the program is short.

template <typename T>
T Need(absl::StatusOr<T> result) {
  if (result.ok()) return *std::move(result);
  std::fprintf(stderr, "store_and_fetch: %s\n", result.status().ToString().c_str());
  std::exit(1);
}

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: %s ADDRESS, as unix:/run/kvmill/kvmill.sock\n", argv[0]);
    return 2;
  }
  const auto client = Need(Client::Create({.address = argv[1]}));

  // What must be equal before bytes may be reused. Two layers, 8 KV heads, head_dim 128.
  NamespaceSpec spec;
  spec.model = "example-model";
  spec.revision = "1";
  spec.hash_scheme = "example";  // How the key below is made.
  spec.groups = {LayerGroup{.layers = {0, 1}, .kv_heads = 8, .head_dim = 128}};
  const ClientNamespace ns = Need(client->OpenNamespace("example", spec));

  // The engine's memory: K and V of each layer, fp16 [128 tokens, 8, 128]. Here made-up waves.
  std::vector<std::vector<std::uint16_t>> kv(4, std::vector<std::uint16_t>(128 * 8 * 128));
  for (std::size_t i = 0; i < kv.size() * kv[0].size(); ++i) {
    const double value = std::sin(0.37 * static_cast<double>(i * i % 10007));
    kv[i % 4][i / 4] = FromFloat(static_cast<float>(value), DType::kFloat16);
  }

  // Store. The transport reads the engine's memory in place.
  const std::vector<LayerInput> inputs = {
      {.k = KvView::Array(kv[0].data(), 8, 128), .v = KvView::Array(kv[1].data(), 8, 128)},
      {.k = KvView::Array(kv[2].data(), 8, 128), .v = KvView::Array(kv[3].data(), 8, 128)}};
  const BlockKey key = Need(BlockKey::FromBytes("hash of all tokens up to here"));
  const StoreBlock block = {.key = key, .token_count = 128, .layers = inputs};
  const StoreResult stored = Need(client->Store(ns, {&block, 1}, StoreOptions{}));
  if (!stored.blocks[0].status.ok()) Need<int>(stored.blocks[0].status);

  // Another request with the same prefix: how much of it is there?
  const LookupResult found = Need(client->Lookup(ns, {&key, 1}));

  // Fetch, decoded on the way into the engine's memory. outputs[block * layers + layer].
  std::vector<std::vector<std::uint16_t>> out(4, std::vector<std::uint16_t>(kv[0].size()));
  const std::vector<LayerOutput> outputs = {
      {MutableKvView::Array(out[0].data(), 8, 128), MutableKvView::Array(out[1].data(), 8, 128)},
      {MutableKvView::Array(out[2].data(), 8, 128), MutableKvView::Array(out[3].data(), 8, 128)}};
  KvSink sink(ns.spec, Frame::kModel, outputs);
  const FetchResult fetched = Need(client->Fetch(ns, {&key, 1}, sink));
  if (!fetched.blocks[0].status.ok()) return 3;  // A miss: the engine computes K and V itself.

  double difference = 0, norm = 0;
  for (std::size_t i = 0; i < kv[0].size(); ++i) {
    const double want = ToFloat(kv[0][i], DType::kFloat16);
    difference += std::pow(ToFloat(out[0][i], DType::kFloat16) - want, 2);
    norm += want * want;
  }
  std::printf("stored %d, found %d, fetched %d tokens; 4-bit keys are off by %.1f %%\n",
              static_cast<int>(stored.blocks_stored), static_cast<int>(found.hit_blocks),
              static_cast<int>(fetched.blocks[0].token_count), 100 * std::sqrt(difference / norm));
  return 0;
}
