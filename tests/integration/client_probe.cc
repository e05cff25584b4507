// A client in a process of its own, for tests that need another user's, or one to kill.
//   client_probe unix:PATH COMMAND ...
//     status                 Makes an admin call and exits with its status code.
//     revoke NAME COUNT      Revokes a ticket that is none.
//     store NAME COUNT       Stores COUNT blocks of sequence NAME and says how many were stored.
//     find NAME COUNT        Says "hits H listed L blocks B".
//     map NAME COUNT MS      Maps the blocks with leases of MS, says "mapped N", looks at them,
//     until
//                            something is wrong, says what, and exits with its code.
//     renew NAME COUNT MS    The same, and renews the leases all the time.
//     fetch NAME COUNT       Fetches COUNT blocks and says how many came.
//     steal NAME COUNT FP    The same from the namespace with that fingerprint, whosever it is.
//     store_loop NAME COUNT  Stores blocks until it is killed, and says "running" first.
//     pages_loop NAME COUNT  Stores blocks from shared memory until it is killed, and says
//     "running"
//                            first; one store waits all the time for values to be ready.
//     share NAME COUNT       Says what the daemon says to shared memory: of the library, and
//     sparse. fetch_loop NAME COUNT  Stores COUNT blocks, then fetches them until it is killed.
// With --ucx before COMMAND blocks travel over UCX.
// The namespace is "n" of a small model; keys are those of daemon_fixture.cc.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "absl/strings/escaping.h"
#include "client/client.h"
#include "client/mapped_blocks.h"
#include "client/shared_memory.h"
#include "storage/device/device.h"

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

void NeedOk(const absl::Status& status) { Need(status.ok() ? absl::StatusOr<int>(0) : status); }

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

class CountingSink : public FetchSink {
 public:
  absl::Status OnPage(const PageId&, const PageView&) override { return absl::OkStatus(); }
};

std::uint32_t Fetch(Client& client, const ClientNamespace& ns, const std::vector<BlockKey>& keys) {
  CountingSink sink;
  const FetchResult result = Need(client.Fetch(ns, keys, sink));
  std::uint32_t count = 0;
  for (const FetchBlockResult& block : result.blocks) count += block.status.ok() ? 1 : 0;
  return count;
}

constexpr std::uint64_t kPageBytes = std::uint64_t{2} * kTokens * kHeads * kHeadDim;

// One page of whole blocks.
EngineGeometry GeometryOf(const EngineRegion& region) {
  EngineGeometry geometry;
  EngineLayers l;
  l.block_tokens = l.page_tokens = kTokens;
  l.head_dim = kHeadDim;
  l.head_count = kHeads;
  l.page_count = 1;
  l.page_bytes = l.page_stride_bytes = kPageBytes;
  l.head_stride_bytes = 2 * kHeadDim;
  l.token_stride_bytes = 2 * kHeadDim * kHeads;
  l.keys = {{0, 0}, {0, kPageBytes}};
  l.values = {{0, 2 * kPageBytes}, {0, 3 * kPageBytes}};
  geometry.layers = {l};
  geometry.regions = {region};
  return geometry;
}

// What the daemon says to memory of the library, and to a memfd without pages.
void ShareBoth(Client& client, const ClientNamespace& ns) {
  const SharedMemory memory = Need(SharedMemory::Create(4 * kPageBytes));
  const int sparse = memfd_create("sparse", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (ftruncate(sparse, 4 * kPageBytes) != 0 ||
      fcntl(sparse, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_FUTURE_WRITE) != 0) {
    std::exit(101);
  }
  for (const int fd : {memory.fd(), sparse}) {
    const auto taken =
        client.RegisterMemory(ns, GeometryOf({.base = 0x10000, .bytes = 4 * kPageBytes, .fd = fd}));
    std::printf("%s; ", taken.status().ToString().c_str());
  }
  std::printf("\n");
}

// Blocks from one page of whole blocks, in shared memory or on `device`.
void StorePagesForEver(Client& client, const ClientNamespace& ns, const std::string& name,
                       std::uint32_t count, Device* device) {
  SharedMemory memory;
  std::unique_ptr<DeviceMemory> on_device;
  EngineRegion region;
  region.bytes = 4 * kPageBytes;
  if (device == nullptr) {
    memory = Need(SharedMemory::Create(region.bytes));
    region.base = reinterpret_cast<std::uintptr_t>(memory.data());
    region.fd = memory.fd();
  } else {
    on_device = Need(device->Allocate(region.bytes, "engine"));
    region.base = reinterpret_cast<std::uintptr_t>(on_device->address());
    const IpcMemory exported = Need(device->ExportIpc(on_device->address(), region.bytes));
    region.device_memory = {exported.handle, exported.allocation_bytes, exported.offset_bytes};
  }
  const EngineGeometry geometry = GeometryOf(region);
  const std::uint64_t registration = Need(client.RegisterMemory(ns, geometry));
  const std::uint64_t zero = 0;
  const PageNumbers list(&zero, 1);
  std::vector<PageBlock> blocks(count);
  const auto name_them = [&](const std::string& sequence) {
    for (std::uint32_t i = 0; i < count; ++i) {
      blocks[i].key = KeyOf(sequence, i);
      blocks[i].token_count = kTokens;
      blocks[i].pages = absl::MakeConstSpan(&list, 1);
    }
  };
  name_them(name + "unready");
  client.StorePagesAsync(ns, registration, blocks, {.request = 2, .ready_layers = 1}, {},
                         [](const absl::StatusOr<StoreResult>&) {});
  for (std::uint32_t round = 0;; ++round) {
    name_them(name + std::to_string(round));
    Need(client.StorePages(ns, registration, blocks, {.request = 1}));
    if (round > 0) continue;
    std::printf("running\n");
    std::fflush(stdout);
  }
}

int Main(std::vector<std::string> arguments) {
  if (arguments.size() < 2) return 101;
  Client::Options options;
  options.address = arguments[0];
  options.timeout = absl::Seconds(30);
  if (arguments[1] == "--ucx") {
    options.path = DataPath::kUcx;
    arguments.erase(arguments.begin() + 1);
  }
  if (arguments.size() < 2) return 101;
  const auto client = Need(Client::Create(options));
  const std::string& command = arguments[1];
  if (command == "status") {
    Need(client->Status());
    return 0;
  }
  if (command == "revoke") NeedOk(client->RevokeTicket("none"));
  if (arguments.size() < 4) return 101;
  const ClientNamespace ns = Need(client->OpenNamespace("n", SmallSpec()));
  const std::unique_ptr<Device> device = MakeHostDevice();  // Stands in for a GPU.
  const std::string& name = arguments[2];
  const auto count = static_cast<std::uint32_t>(std::atoi(arguments[3].c_str()));
  std::vector<BlockKey> keys;
  for (std::uint32_t i = 0; i < count; ++i) keys.push_back(KeyOf(name, i));
  const bool loops = command == "store_loop" || command == "fetch_loop";
  if (command == "store" || loops) {
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
    if (loops) {
      std::printf("running\n");
    } else {
      std::printf("stored %d\n", static_cast<int>(result.blocks_stored));
    }
    std::fflush(stdout);
    for (std::uint32_t round = 0; loops; ++round) {
      if (command == "fetch_loop") {
        Fetch(*client, ns, keys);
        continue;
      }
      for (std::uint32_t n = 0; n < count; ++n) {
        blocks[n].key = KeyOf(name + std::to_string(round), n);
      }
      Need(client->Store(ns, blocks, {}));
    }
  } else if (command == "pages_loop") {
    StorePagesForEver(*client, ns, name, count, nullptr);
  } else if (command == "device_pages_loop") {
    StorePagesForEver(*client, ns, name, count, device.get());
  } else if (command == "share") {
    ShareBoth(*client, ns);
  } else if (command == "device_memory") {
    const auto memory = Need(device->Allocate(std::size_t{2} << 20, "engine"));
    const IpcMemory exported = Need(device->ExportIpc(memory->address(), memory->bytes()));
    const std::string handle(reinterpret_cast<const char*>(exported.handle.data()),
                             exported.handle.size());
    std::printf("%s %zu %zu\n", absl::BytesToHexString(handle).c_str(),
                static_cast<std::size_t>(exported.allocation_bytes),
                static_cast<std::size_t>(exported.offset_bytes));
    std::fflush(stdout);
    for (;;) pause();
  } else if (command == "fetch") {
    std::printf("fetched %d\n", static_cast<int>(Fetch(*client, ns, keys)));
  } else if (command == "steal") {
    if (arguments.size() < 5) return 101;
    ClientNamespace other = ns;
    const std::string bytes = absl::HexStringToBytes(arguments[4]);
    if (bytes.size() != other.fingerprint.size()) return 101;
    std::memcpy(other.fingerprint.data(), bytes.data(), bytes.size());
    std::printf("fetched %d\n", static_cast<int>(Fetch(*client, other, keys)));
  } else if (command == "find") {
    const LookupResult found = Need(client->Lookup(ns, keys));
    const auto listed = Need(client->List(""));
    const ServerStat stat = Need(client->Stat());
    std::printf("hits %d listed %d blocks %d\n", static_cast<int>(found.hit_blocks),
                static_cast<int>(listed.size()), static_cast<int>(stat.blocks));
  } else if ((command == "map" || command == "renew") && arguments.size() == 5) {
    const absl::Duration lease = absl::Milliseconds(std::atoi(arguments[4].c_str()));
    const auto mapped = Need(client->Map(ns, keys, {.lease = lease}));
    std::vector<std::vector<std::byte>> before;
    const auto read = [&](std::vector<std::vector<std::byte>>* pages) -> absl::Status {
      pages->clear();
      for (std::size_t b = 0; b < mapped->block_count(); ++b) {
        for (std::size_t layer = 0; layer < 2; ++layer) {
          const absl::StatusOr<PageView> page = mapped->Page(b, 0, layer);
          if (!page.ok()) return page.status();
          for (std::uint32_t head = 0; head < kHeads; ++head) {
            const auto contents = page->contents(head);
            pages->emplace_back(contents.begin(), contents.end());
          }
        }
      }
      return mapped->Check();
    };
    NeedOk(read(&before));
    std::printf("mapped %d\n", static_cast<int>(mapped->block_count()));
    std::fflush(stdout);
    std::vector<std::vector<std::byte>> now;
    for (;;) {
      const absl::Status status = read(&now);
      NeedOk(status);
      if (now != before) {
        std::printf("wrong bytes passed the check\n");
        return 102;
      }
      if (command == "renew") NeedOk(client->Renew(*mapped, lease));
      usleep(1000);
    }
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
