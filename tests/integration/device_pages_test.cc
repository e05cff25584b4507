// Whose memory a daemon reads from a GPU, and whose it does not. Host memory stands in for the GPU;
// the stores themselves are in pages_test.cc.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <sstream>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "tests/integration/daemon_fixture.h"
#include "tests/integration/engine_pages.h"

namespace kvmill::testing {
namespace {

using ::testing::HasSubstr;

class DevicePagesTest : public DaemonTest {
 protected:
  void Start(const std::vector<std::string>& more = {}) {
    std::vector<std::string> arguments = {"--device", "host", "--gpu-bytes", "64MiB"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    DaemonTest::Start(arguments);
    ns_ = Open("n", SmallSpec());
  }
  std::string RegistrationError(Client& client, const EngineGeometry& geometry) {
    return client.RegisterMemory(ns_, geometry).status().ToString();
  }
  // The handle that another process, of that user, has for memory of its own. The process lives as
  // long as `probe`.
  EngineDeviceMemory HandleOf(DaemonProcess& probe) {
    std::istringstream words(probe.ReadLine());
    EngineDeviceMemory memory;
    std::string hex;
    words >> hex >> memory.allocation_bytes >> memory.offset_bytes;
    const std::string bytes = absl::HexStringToBytes(hex);
    EXPECT_EQ(bytes.size(), memory.handle.size()) << probe.standard_error();
    std::memcpy(memory.handle.data(), bytes.data(), std::min(bytes.size(), memory.handle.size()));
    return memory;
  }

  const std::unique_ptr<Device> device_ = MakeHostDevice();
  ClientNamespace ns_;
};

TEST_F(DevicePagesTest, AHandleOfAnotherProcessesMemoryIsRefused) {
  Start();
  EnginePages pages(SmallSpec(), 8, false, 0, 2, device_.get());
  std::vector<uid_t> users = {getuid()};
  if (geteuid() == 0) {
    LetOthersIn();
    users.push_back(65534);
  }
  for (const uid_t uid : users) {
    const auto probe = Probe({"device_memory", "x", "1"}, uid);
    EngineGeometry geometry = pages.geometry;
    geometry.regions[0].device_memory = HandleOf(*probe);
    geometry.regions[0].device_memory->offset_bytes = 0;
    EXPECT_THAT(RegistrationError(*client_, geometry),
                HasSubstr(absl::StrCat("PERMISSION_DENIED: region 0: host: the handle is of memory "
                                       "of process ",
                                       probe->pid(), ", it came from process ", getpid())));
  }
  // Its own it may share; and another client of this process as well.
  EXPECT_EQ(RegistrationError(*client_, pages.geometry), "OK");
  const auto other = Connect(absl::StrCat("unix:", socket()));
  EXPECT_EQ(RegistrationError(*other, pages.geometry), "OK");
}

TEST_F(DevicePagesTest, AnotherTenantSharesItsOwnMemory) {
  if (geteuid() != 0) GTEST_SKIP() << "needs root to act as another user";
  Start();
  LetOthersIn();
  const auto probe = Probe({"device_pages_loop", "x", "4"}, 65534);
  EXPECT_EQ(probe->ReadLine(), "running") << probe->standard_error();
}

TEST_F(DevicePagesTest, WhatTheHandleDoesNotHaveIsRefused) {
  Start();
  EnginePages pages(SmallSpec(), 8, false, 0, 2, device_.get());
  EngineGeometry geometry = pages.geometry;
  EngineDeviceMemory& memory = *geometry.regions[0].device_memory;
  memory.offset_bytes = memory.allocation_bytes - geometry.regions[0].bytes + 2;
  EXPECT_THAT(RegistrationError(*client_, geometry),
              HasSubstr(absl::StrCat("INVALID_ARGUMENT: region 0: memory of a GPU of ",
                                     memory.allocation_bytes, " bytes, want ")));
  memory.offset_bytes = ~std::uint64_t{0};
  EXPECT_THAT(RegistrationError(*client_, geometry), HasSubstr("INVALID_ARGUMENT: region 0"));
  memory = *pages.geometry.regions[0].device_memory;
  memory.allocation_bytes += std::size_t{2} << 20;
  EXPECT_THAT(RegistrationError(*client_, geometry), HasSubstr("INVALID_ARGUMENT: region 0: host"));
  memory = *pages.geometry.regions[0].device_memory;
  memory.handle[0] ^= std::byte{1};
  EXPECT_THAT(RegistrationError(*client_, geometry),
              HasSubstr("the handle is not one of host memory"));
  geometry = pages.geometry;
  geometry.regions[0].fd = STDERR_FILENO;
  EXPECT_THAT(RegistrationError(*client_, geometry), HasSubstr("want none beside memory of a GPU"));
  // K on the GPU, V in shared memory.
  auto shared = SharedMemory::Create(pages.geometry.regions[0].bytes);
  ASSERT_TRUE(shared.ok());
  geometry = pages.geometry;
  EngineRegion& second = geometry.regions.emplace_back();
  second.base = reinterpret_cast<std::uintptr_t>(shared->data());
  second.bytes = geometry.regions[0].bytes;
  second.fd = shared->fd();
  for (EnginePlace& place : geometry.layers[0].values) place.region = 1;
  const auto registration = client_->RegisterMemory(ns_, geometry);
  ASSERT_TRUE(registration.ok()) << registration.status();
  const BlockList list(SmallSpec(), "s", 64, Shuffled(4, 1));
  const auto stored = client_->StorePages(ns_, *registration, list.blocks);
  ASSERT_TRUE(stored.ok()) << stored.status();
  EXPECT_THAT(
      stored->blocks[0].status.ToString(),
      HasSubstr("FAILED_PRECONDITION: block 0: K of layer 0 in region 0 and V in region 1"));
}

TEST_F(DevicePagesTest, AllRegionsOfAnAllocationAreOneOpening) {
  Start();
  EnginePages pages(SmallSpec(), 8, false, 0, 2, device_.get());
  // Each layer's K and each layer's V is a region.
  EngineGeometry geometry = pages.geometry;
  const EngineRegion all = geometry.regions[0];
  EngineLayers& layers = geometry.layers[0];
  const std::uint64_t each = layers.page_stride_bytes * layers.page_count;
  geometry.regions.clear();
  for (std::vector<EnginePlace>* places : {&layers.keys, &layers.values}) {
    for (EnginePlace& place : *places) {
      EngineRegion region = all;
      region.base += place.offset_bytes;
      region.bytes = each;
      region.device_memory->offset_bytes += place.offset_bytes;
      place = {static_cast<std::uint32_t>(geometry.regions.size()), 0};
      geometry.regions.push_back(region);
    }
  }
  Sequence sequence(SmallSpec(), 2 * 64, 3);
  ASSERT_EQ(Put(ns_, "s", sequence).blocks_stored, 2u);
  PageCollector want;
  ASSERT_TRUE(client_->Fetch(ns_, KeysOf("s", 2), want).ok());
  ASSERT_TRUE(client_->Clear(ns_).ok());
  const auto registration = client_->RegisterMemory(ns_, geometry);
  ASSERT_TRUE(registration.ok()) << registration.status();
  std::ifstream maps(absl::StrCat("/proc/", daemon_->pid(), "/maps"));
  int openings = 0;
  for (std::string line; std::getline(maps, line);) {
    openings += line.find("kvmill-engine") != std::string::npos ? 1 : 0;
  }
  EXPECT_EQ(openings, 1);
  const BlockList list(SmallSpec(), "s", 2 * 64, Shuffled(8, 1));
  pages.FillAll(sequence, list.pages);
  const auto stored = client_->StorePages(ns_, *registration, list.blocks);
  ASSERT_TRUE(stored.ok()) << stored.status();
  EXPECT_EQ(stored->blocks_stored, 2u) << stored->blocks[0].status;
  PageCollector got;
  ASSERT_TRUE(client_->Fetch(ns_, KeysOf("s", 2), got).ok());
  EXPECT_EQ(got.pages, want.pages);
  const auto stat = client_->Stat();
  ASSERT_TRUE(stat.ok());
  std::uint64_t in = 0;
  for (const TransferUsage& way : stat->transfers) {
    if (way.path == "pages" && way.transport == "device_ipc") in = way.bytes_in;
  }
  EXPECT_EQ(in, stored->raw_bytes);
}

TEST_F(DevicePagesTest, ADaemonWithoutAGpuSaysSo) {
  DaemonTest::Start({"--device", "host"});
  ns_ = Open("n", SmallSpec());
  EnginePages pages(SmallSpec(), 8, false, 0, 2, device_.get());
  EXPECT_THAT(RegistrationError(*client_, pages.geometry),
              HasSubstr("FAILED_PRECONDITION: regions[0] is memory of a GPU, and this daemon"));
}

}  // namespace
}  // namespace kvmill::testing
