// A client in a process of its own, for tests that need another user's, or one to kill.
//   client_probe unix:PATH COMMAND ...
//     status                 Makes an admin call and exits with its status code.
//     store NAME COUNT       Stores COUNT blocks of sequence NAME and says how many were stored.
//     find NAME COUNT        Says "hits H listed L blocks B".
// The namespace is "n" of a small model; keys are those of daemon_fixture.cc.
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "client/client.h"

namespace kvmill {
namespace {

constexpr std::uint32_t kTokens = 64;
constexpr std::uint32_t kHeads = 2;
constexpr std::uint32_t kHeadDim = 64;

template <typename T>
T Need(absl::StatusOr<T> result) {
  if (result.ok()) return *std::move(result);
  std::printf("%s\n", result.status().ToString().c_str());
  std::fflush(stdout);
  std::_Exit(static_cast<int>(result.status().code()));
}

NamespaceSpec SmallSpec() {
  NamespaceSpec spec;
  spec.model = "tiny";
  spec.revision = "r1";
  spec.hash_scheme = "test";
  spec.block_tokens = kTokens;
  spec.groups = {LayerGroup{.layers = {0, 1}, .kv_heads = kHeads, .head_dim = kHeadDim}};
  return spec;
}

BlockKey KeyOf(const std::string& name, std::uint32_t index) {
  std::string bytes = name + '/' + std::to_string(index);
  bytes.resize(32, '.');
  return *BlockKey::FromBytes(bytes);
}

int Main(const std::vector<std::string>& arguments) {
  if (arguments.size() < 2) return 101;
  const auto client = Need(Client::Create({.address = arguments[0], .timeout = absl::Seconds(30)}));
  const std::string& command = arguments[1];
  if (command == "status") {
    Need(client->Status());
    return 0;
  }
  if (arguments.size() < 4) return 101;
  const ClientNamespace ns = Need(client->OpenNamespace("n", SmallSpec()));
  const std::string& name = arguments[2];
  const auto count = static_cast<std::uint32_t>(std::atoi(arguments[3].c_str()));
  std::vector<BlockKey> keys;
  for (std::uint32_t i = 0; i < count; ++i) keys.push_back(KeyOf(name, i));
  if (command == "store") {
    // Bytes that say whose they are: all values of a user are its uid's.
    std::vector<std::uint16_t> values(std::size_t{kTokens} * kHeads * kHeadDim);
    for (std::size_t i = 0; i < values.size(); ++i) {
      values[i] = static_cast<std::uint16_t>(0x3000 + (getuid() + i) % 0x800);
    }
    const LayerInput layer = {.k = KvView::Array(values.data(), kHeads, kHeadDim),
                              .v = KvView::Array(values.data(), kHeads, kHeadDim)};
    const std::vector<LayerInput> layers = {layer, layer};
    std::vector<StoreBlock> blocks;
    for (std::uint32_t i = 0; i < count; ++i) {
      blocks.push_back({.key = keys[i],
                        .parent = i == 0 ? BlockKey() : keys[i - 1],
                        .token_count = kTokens,
                        .block_index = i,
                        .layers = layers});
    }
    const StoreResult result = Need(client->Store(ns, blocks, {}));
    std::printf("stored %d\n", static_cast<int>(result.blocks_stored));
  } else if (command == "find") {
    const LookupResult found = Need(client->Lookup(ns, keys, false));
    const auto listed = Need(client->List(""));
    const ServerStat stat = Need(client->Stat());
    std::printf("hits %d listed %d blocks %d\n", static_cast<int>(found.hit_blocks),
                static_cast<int>(listed.size()), static_cast<int>(stat.blocks));
  } else {
    return 101;
  }
  return 0;
}

}  // namespace
}  // namespace kvmill

int main(int argc, char** argv) {
  return kvmill::Main(std::vector<std::string>(argv + 1, argv + argc));
}
