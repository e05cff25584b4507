// A reader of the daemon's GPU in a process of its own:
//   device_probe unix:PATH DEVICE place|gpu NAME COUNT MS
// Maps COUNT blocks of sequence NAME in namespace "n" with leases of MS, which it renews ("place":
// where they are; "gpu": on the GPU), attends to both layers on DEVICE where the blocks lie and
// over copies of its own, says "attended to N blocks on the GPU" when every output is the same bit
// by bit, and goes on attending until something is wrong, says what, and exits with its code. Exit
// code 102: a wrong output passed every check; 103: only the check on the stream failed.
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "client/client.h"
#include "client/mapped_blocks.h"
#include "tests/integration/device_attention.h"

namespace kvmill::testing {
namespace {

constexpr std::uint32_t kLayers = 2;

template <typename T>
T Need(absl::StatusOr<T> result) {
  if (result.ok()) return *std::move(result);
  std::printf("%s\n", result.status().ToString().c_str());
  std::fflush(stdout);
  std::_Exit(static_cast<int>(result.status().code()));
}

void NeedOk(const absl::Status& status) { Need(status.ok() ? absl::StatusOr<int>(0) : status); }

BlockKey KeyOf(const std::string& name, std::uint32_t index) {
  std::string bytes = name + '/' + std::to_string(index);
  bytes.resize(32, '.');
  return *BlockKey::FromBytes(bytes);
}

int Main(const std::vector<std::string>& arguments) {
  if (arguments.size() != 6) return 101;
  const auto device = Need(OpenDevice(arguments[1]));
  Client::Options options;
  options.address = arguments[0];
  options.timeout = absl::Seconds(30);
  options.device = device.get();
  const auto client = Need(Client::Create(options));
  const ClientNamespace ns = Need(client->FindNamespace("n"));
  std::vector<BlockKey> keys;
  for (int i = 0; i < std::atoi(arguments[4].c_str()); ++i) {
    keys.push_back(KeyOf(arguments[3], static_cast<std::uint32_t>(i)));
  }
  const absl::Duration lease = absl::Milliseconds(std::atoi(arguments[5].c_str()));
  const auto mapped = Need(client->Map(
      ns, keys,
      {.lease = lease, .memory = arguments[2] == "gpu" ? PageMemory::kGpu : PageMemory::kInPlace}));
  int on_gpu = 0;
  for (std::size_t b = 0; b < keys.size(); ++b) {
    NeedOk(mapped->status(b));
    on_gpu += mapped->memory(b, 0) == Tier::kGpu ? 1 : 0;
  }
  HeadCollector copies;
  for (const FetchBlockResult& block : Need(client->Fetch(ns, keys, copies)).blocks) {
    NeedOk(block.status);
  }
  const auto attention =
      Need(DeviceAttention::Create(*device, ns.spec, static_cast<std::uint32_t>(keys.size())));
  std::vector<std::vector<float>> wanted;
  for (std::uint32_t layer = 0; layer < kLayers; ++layer) {
    wanted.push_back(Need(attention->OverCopies(copies, layer)).output);
  }
  const auto attend = [&]() -> int {
    for (std::uint32_t layer = 0; layer < kLayers; ++layer) {
      NeedOk(attention->Prepare(*mapped, layer));
      const DeviceAttention::Result result = Need(attention->Run());
      NeedOk(mapped->Check());
      if (result.changed != 0) return 103;
      if (result.output != wanted[layer]) return 102;
    }
    return 0;
  };
  bool first = true;
  for (;;) {
    const int wrong = attend();
    if (wrong != 0) return wrong;
    if (first) std::printf("attended to %d blocks on the GPU\n", on_gpu);
    std::fflush(stdout);
    first = false;
    NeedOk(client->Renew(*mapped, lease));
    usleep(1000);
  }
}

}  // namespace
}  // namespace kvmill::testing

int main(int argc, char** argv) {
  return kvmill::testing::Main(std::vector<std::string>(argv + 1, argv + argc));
}
