// Engines' memory and a daemon that stores from it. From shared memory; with
// KVMILL_TEST_PAGES_ON_DEVICE from memory of a device that both use, where host memory stands in
// for a GPU.
#ifndef KVMILL_TESTS_INTEGRATION_PAGES_FIXTURE_H_
#define KVMILL_TESTS_INTEGRATION_PAGES_FIXTURE_H_

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdint>
#include <fstream>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/shared_memory.h"
#include "tests/integration/daemon_fixture.h"
#include "tests/integration/engine_pages.h"

namespace kvmill::testing {

#ifdef KVMILL_TEST_PAGES_ON_DEVICE
constexpr bool kOnDevice = true;
#else
constexpr bool kOnDevice = false;
#endif

// Of the engine's process. Null: its pages are in shared memory.
inline Device* EngineDevice() {
  static Device* const device = kOnDevice ? MakeHostDevice().release() : nullptr;
  return device;
}

class PagesTest : public DaemonTest {
 protected:
  void Start(const std::vector<std::string>& more = {}) {
    std::vector<std::string> arguments = {"--host-bytes", "128MiB"};
    if (kOnDevice) {
      for (const char* flag : {"--device", "host", "--gpu-bytes", "64MiB"}) {
        arguments.emplace_back(flag);
      }
    }
    arguments.insert(arguments.end(), more.begin(), more.end());
    DaemonTest::Start(arguments);
  }
  std::uint64_t Register(Client& client, const ClientNamespace& ns, const EnginePages& pages) {
    const auto registration = client.RegisterMemory(ns, pages.geometry);
    EXPECT_TRUE(registration.ok()) << registration.status();
    return registration.value_or(0);
  }
  // Pages of the blocks that are there, by (block, group, layer).
  std::map<std::tuple<std::uint32_t, int, std::uint32_t>, std::string> PagesOf(
      const ClientNamespace& ns, const std::vector<BlockKey>& keys, std::size_t* found = nullptr) {
    PageCollector collector;
    const auto fetched = client_->Fetch(ns, keys, collector);
    EXPECT_TRUE(fetched.ok()) << fetched.status();
    std::size_t there = 0;
    for (const FetchBlockResult& block : fetched->blocks) there += block.status.ok() ? 1 : 0;
    if (found != nullptr) *found = there;
    return collector.pages;
  }
  // A model whose blocks take a while to encode: 8 layers, 8 heads, D 128, 2 MiB a block.
  static NamespaceSpec LargeSpec() {
    NamespaceSpec spec = SmallSpec();
    spec.groups[0].layers = {0, 1, 2, 3, 4, 5, 6, 7};
    spec.groups[0].kv_heads = 8;
    spec.groups[0].head_dim = 128;
    return spec;
  }
  // Memory that the daemon can read, as one region.
  struct Memory {
    std::byte* data = nullptr;
    EngineRegion region;
    SharedMemory shared;
    std::unique_ptr<DeviceMemory> on_device;
  };
  static std::unique_ptr<Memory> MakeMemory(std::size_t bytes) {
    auto memory = std::make_unique<Memory>();
    EngineRegion& region = memory->region;
    region.bytes = bytes;
    if (kOnDevice) {
      memory->on_device = *EngineDevice()->Allocate(bytes, "engine");
      memory->data = memory->on_device->address();
      const IpcMemory exported = *EngineDevice()->ExportIpc(memory->data, bytes);
      region.device_memory = {exported.handle, exported.allocation_bytes, exported.offset_bytes};
    } else {
      memory->shared = *SharedMemory::Create(bytes);
      memory->data = memory->shared.data();
      region.fd = memory->shared.fd();
    }
    region.base = reinterpret_cast<std::uintptr_t>(memory->data);
    return memory;
  }
  std::vector<std::string> SharedMappings() const {
    std::ifstream file(absl::StrCat("/proc/", daemon_->pid(), "/maps"));
    std::vector<std::string> found;
    for (std::string line; std::getline(file, line);) {
      if (line.find("kvmill-engine") != std::string::npos) found.push_back(line);
    }
    return found;
  }
  void ExpectBadMemfdsAreRefused(const ClientNamespace& ns, const EnginePages& pages);
  // They go with the last reader, that is, a moment after the end of a call.
  bool WaitUnmapped() const {
    for (int i = 0; i < 2000 && !SharedMappings().empty(); ++i) usleep(5000);
    return SharedMappings().empty();
  }
};

}  // namespace kvmill::testing

#endif  // KVMILL_TESTS_INTEGRATION_PAGES_FIXTURE_H_
