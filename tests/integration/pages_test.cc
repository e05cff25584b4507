// Stores from an engine's memory by a real daemon: the same bytes as a store by copy, and pages
// that nobody reads once that was said. From shared memory; with KVMILL_TEST_PAGES_ON_DEVICE from
// memory of a device that both use, where host memory stands in for a GPU.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <future>
#include <optional>
#include <random>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/door_protocol.h"
#include "client/shared_memory.h"
#include "kernels/tile_format.h"
#include "tests/integration/daemon_fixture.h"
#include "tests/integration/engine_pages.h"
#include "tests/long_form.h"

namespace kvmill::testing {
namespace {

using ::testing::HasSubstr;

#ifdef KVMILL_TEST_PAGES_ON_DEVICE
constexpr bool kOnDevice = true;
#else
constexpr bool kOnDevice = false;
#endif

// Of the engine's process. Null: its pages are in shared memory.
Device* EngineDevice() {
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

TEST_F(PagesTest, PagesBecomeTheBytesThatACopyBecomes) {
  Start();
  int number = 0;
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
    for (const bool heads_first : {false, true}) {
      NamespaceSpec spec = SmallSpec();
      spec.source_dtype = dtype;
      spec.salt = absl::StrCat(number);
      const ClientNamespace by_copy = Open(absl::StrCat("copy", number), spec);
      const ClientNamespace by_pages = Open(absl::StrCat("pages", number), spec);
      ++number;
      Sequence sequence(spec, 5 * 64 + 23, 7);
      ASSERT_EQ(Put(by_copy, "s", sequence).blocks_stored, 6u);
      EnginePages pages(spec, 40, heads_first, 0, 2, EngineDevice());
      const BlockList list(spec, "s", sequence.token_count(), Shuffled(40, 5));
      pages.FillAll(sequence, list.pages);
      // Both names are one namespace, as far as blocks go: another daemon would be needed to have
      // two. So the copy is fetched, and then removed.
      std::vector<BlockKey> keys = KeysOf("s", 5);
      keys.push_back(TailKey(KeyOf("s", 4), 23, KeyOf("s", 5)));
      const auto want = PagesOf(by_copy, keys);
      ASSERT_EQ(want.size(), 12u);
      ASSERT_TRUE(client_->Clear(by_copy).ok());
      std::size_t found = 1;
      PagesOf(by_pages, keys, &found);
      ASSERT_EQ(found, 0u);

      const std::uint64_t registration = Register(*client_, by_pages, pages);
      EXPECT_EQ(SharedMappings().size(), 1u);
      const auto stored = client_->StorePages(by_pages, registration, list.blocks);
      ASSERT_TRUE(stored.ok()) << stored.status();
      EXPECT_EQ(stored->blocks_stored, 6u) << stored->blocks[0].status;
      EXPECT_EQ(stored->raw_bytes, (5 * 64 + 23) * 2 * 2 * 2 * 64 * 2u);
      EXPECT_EQ(PagesOf(by_pages, keys), want);
      const auto again = client_->StorePages(by_pages, registration, list.blocks);
      ASSERT_TRUE(again.ok());
      EXPECT_EQ(again->blocks_existing, 6u);
      EXPECT_TRUE(client_->UnregisterMemory(registration).ok());
      EXPECT_TRUE(WaitUnmapped());
    }
  }
}

// Two ranks with half of the heads each, from memory of their own; what one of them stored is
// not found before the other one did.
TEST_F(PagesTest, RanksStoreTheirHeadsFromTheirOwnMemory) {
  Start();
  const NamespaceSpec spec = SmallSpec();
  const ClientNamespace ns = Open("n", spec);
  Sequence sequence(spec, 4 * 64, 3);
  ASSERT_EQ(Put(ns, "s", sequence).blocks_stored, 4u);
  const auto want = PagesOf(ns, KeysOf("s", 4));
  ASSERT_TRUE(client_->Clear(ns).ok());
  const auto other = Connect(absl::StrCat("unix:", socket()));
  Client* const clients[2] = {client_.get(), other.get()};
  for (std::uint32_t rank = 0; rank < 2; ++rank) {
    EnginePages pages(spec, 16, rank == 1, rank, 1, EngineDevice());
    const BlockList list(spec, "s", sequence.token_count(), Shuffled(16, rank));
    pages.FillAll(sequence, list.pages);
    const std::uint64_t registration = Register(*clients[rank], ns, pages);
    const auto stored = clients[rank]->StorePages(ns, registration, list.blocks);
    ASSERT_TRUE(stored.ok()) << stored.status();
    EXPECT_EQ(stored->blocks[0].outcome,
              rank == 0 ? StoreOutcome::kPartial : StoreOutcome::kStored);
    std::size_t found = 0;
    const auto there = PagesOf(ns, KeysOf("s", 4), &found);
    EXPECT_EQ(found, rank == 0 ? 0u : 4u);
    if (rank == 1) {
      EXPECT_EQ(there, want);
    }
  }
}

TEST_F(PagesTest, RecordsInPagesAreStoredAsTheyAre) {
  Start();
  const NamespaceSpec spec = SmallSpec();
  const ClientNamespace ns = Open("n", spec);
  Sequence sequence(spec, 3 * 64, 3);
  ASSERT_EQ(Put(ns, "s", sequence).blocks_stored, 3u);
  const auto want = PagesOf(ns, KeysOf("s", 3));
  ASSERT_TRUE(client_->Clear(ns).ok());
  const std::size_t record = RecordBytes(FormatOf(spec, spec.groups[0]));
  const std::uint64_t stride = 2 * record + 256;
  const auto memory = MakeMemory(2 * 3 * stride);
  EngineLayers l;
  l.element = EngineElement::kRecords;
  l.block_tokens = l.page_tokens = 64;
  l.head_dim = 64;
  l.head_count = 2;
  l.page_count = 3;
  l.head_stride_bytes = record;
  l.page_bytes = 2 * record;
  l.page_stride_bytes = stride;
  l.keys = {{0, 0}, {0, 3 * stride}};
  EngineGeometry geometry;
  geometry.layers = {l};
  geometry.regions = {memory->region};
  for (std::uint32_t b = 0; b < 3; ++b) {
    for (std::uint32_t layer = 0; layer < 2; ++layer) {
      const std::string& page = want.at({b, 0, layer});  // A kind before each record.
      ASSERT_EQ(page.size(), 2 * (record + 1));
      std::byte* to = memory->data + layer * 3 * stride + (2 - b) * stride;
      std::memcpy(to, page.data() + 1, record);
      std::memcpy(to + record, page.data() + record + 2, record);
    }
  }
  const auto registration = client_->RegisterMemory(ns, geometry);
  ASSERT_TRUE(registration.ok()) << registration.status();
  const std::uint64_t numbers[3] = {2, 1, 0};
  PageNumbers lists[3];
  std::vector<PageBlock> blocks(3);
  for (std::uint32_t b = 0; b < 3; ++b) {
    lists[b] = absl::MakeConstSpan(&numbers[b], 1);
    blocks[b].key = KeyOf("s", b);
    blocks[b].token_count = 64;
    blocks[b].block_index = b;
    if (b > 0) blocks[b].parent = KeyOf("s", b - 1);
    blocks[b].pages = absl::MakeConstSpan(&lists[b], 1);
  }
  const auto stored = client_->StorePages(ns, *registration, blocks);
  ASSERT_TRUE(stored.ok()) << stored.status();
  EXPECT_EQ(stored->blocks_stored, 3u) << stored->blocks[0].status;
  EXPECT_EQ(PagesOf(ns, KeysOf("s", 3)), want);
  // A scale that is not finite.
  std::memset(memory->data + LayoutOf(FormatOf(spec, spec.groups[0])).k_scale, 0x7C, 2);
  blocks[2].key = KeyOf("t", 0);
  const auto bad = client_->StorePages(ns, *registration, absl::MakeConstSpan(&blocks[2], 1));
  ASSERT_TRUE(bad.ok());
  EXPECT_THAT(bad->blocks[0].status.ToString(), HasSubstr("a scale that is not finite"));
}

// Values of a layer are not there, not even finite, until that is said.
TEST_F(PagesTest, LayersAreReadWhenTheyAreReadyAndNotBefore) {
  Start();
  NamespaceSpec spec = SmallSpec();
  spec.groups[0].layers = {0, 1, 2, 3};
  const ClientNamespace ns = Open("n", spec);
  Sequence sequence(spec, 6 * 64, 3);
  ASSERT_EQ(Put(ns, "s", sequence).blocks_stored, 6u);
  const auto want = PagesOf(ns, KeysOf("s", 6));
  ASSERT_TRUE(client_->Clear(ns).ok());
  EnginePages pages(spec, 24, false, 0, 2, EngineDevice());
  const BlockList list(spec, "s", sequence.token_count(), Shuffled(24, 1));
  const std::uint64_t registration = Register(*client_, ns, pages);
  std::memset(pages.bytes().data(), 0xFF, pages.bytes().size());  // NaN.
  std::promise<absl::StatusOr<StoreResult>> done;
  client_->StorePagesAsync(ns, registration, list.blocks, {.request = 4, .ready_layers = 0}, {},
                           [&](absl::StatusOr<StoreResult> r) { done.set_value(std::move(r)); });
  auto result = done.get_future();
  for (std::uint32_t layer = 0; layer < 4; ++layer) {
    EXPECT_EQ(result.wait_for(std::chrono::milliseconds(30)), std::future_status::timeout);
    pages.Fill(sequence, list.pages, layer, layer + 1);
    client_->ReadyPages(5, 4);  // Another request.
    client_->ReadyPages(4, layer + 1);
  }
  const auto stored = result.get();
  ASSERT_TRUE(stored.ok()) << stored.status();
  EXPECT_EQ(stored->blocks_stored, 6u) << stored->blocks[0].status;
  EXPECT_EQ(PagesOf(ns, KeysOf("s", 6)), want);
}

TEST_F(PagesTest, AStoreThatADaemonCannotFinishIsUnavailable) {
  Start({"--drain-timeout", "1ms"});
  const ClientNamespace ns = Open("n", SmallSpec());
  Sequence sequence(SmallSpec(), 2 * 64, 3);
  EnginePages pages(SmallSpec(), 8, false, 0, 2, EngineDevice());
  const BlockList list(SmallSpec(), "s", sequence.token_count(), Shuffled(8, 1));
  const std::uint64_t registration = Register(*client_, ns, pages);
  pages.FillAll(sequence, list.pages);
  std::promise<absl::StatusOr<StoreResult>> done;
  // The second layer never is ready.
  client_->StorePagesAsync(ns, registration, list.blocks, {.request = 1, .ready_layers = 1}, {},
                           [&](absl::StatusOr<StoreResult> r) { done.set_value(std::move(r)); });
  auto result = done.get_future();
  EXPECT_EQ(result.wait_for(std::chrono::milliseconds(100)), std::future_status::timeout);
  daemon_->Signal(SIGTERM);
  const auto stored = result.get();
  EXPECT_TRUE(absl::IsUnavailable(stored.status())) << stored.status();
}

class BusyPagesTest : public PagesTest {
 protected:
  static constexpr std::uint32_t kBlocks = 48;
  // All blocks from the same pages: one set of bytes is right for every one of them.
  void SetUp() override {
    Start();
    spec_ = LargeSpec();
    ns_ = Open("n", spec_);
    sequence_ = std::make_unique<Sequence>(spec_, 64, 9);
    Put(ns_, "copy", *sequence_);
    const auto pages = PagesOf(ns_, KeysOf("copy", 1));
    for (std::uint32_t layer = 0; layer < 8; ++layer) want_.push_back(pages.at({0, 0, layer}));
    pages_ = std::make_unique<EnginePages>(spec_, 4, false, 0, 8, EngineDevice());
    engine_ = Connect(absl::StrCat("unix:", socket()));
    registration_ = Register(*engine_, ns_, *pages_);
    list_ = std::make_unique<BlockList>(spec_, "x", 64, Shuffled(4, 2));
  }
  // Starts a store of kBlocks blocks of sequence `name`.
  std::future<absl::StatusOr<StoreResult>> StartStore(const std::string& name,
                                                      std::uint64_t request,
                                                      std::uint32_t ready_layers) {
    pages_->FillAll(*sequence_, list_->pages);
    std::vector<PageBlock> blocks(kBlocks, list_->blocks[0]);
    for (std::uint32_t b = 0; b < kBlocks; ++b) blocks[b].key = KeyOf(name, b);
    const auto done = std::make_shared<std::promise<absl::StatusOr<StoreResult>>>();
    engine_->StorePagesAsync(
        ns_, registration_, blocks, {.request = request, .ready_layers = ready_layers}, {},
        [done](absl::StatusOr<StoreResult> r) { done->set_value(std::move(r)); });
    return done->get_future();
  }
  // A store is in the middle: the daemon has more than `blocks` blocks.
  void WaitForMoreThan(std::uint64_t blocks) {
    const absl::Time deadline = absl::Now() + absl::Seconds(20);
    while (client_->Stat()->blocks <= blocks && absl::Now() < deadline) usleep(300);
  }
  // Of the blocks of `name`, those that are there; all must have the old values.
  std::size_t CheckStored(const std::string& name) {
    std::size_t found = 0;
    for (const auto& [where, bytes] : PagesOf(ns_, KeysOf(name, kBlocks), &found)) {
      EXPECT_EQ(bytes, want_[std::get<2>(where)]) << "block " << std::get<0>(where);
    }
    return found;
  }

  NamespaceSpec spec_;
  ClientNamespace ns_;
  std::unique_ptr<Sequence> sequence_;
  std::vector<std::string> want_;
  std::unique_ptr<EnginePages> pages_;
  std::unique_ptr<BlockList> list_;
  std::unique_ptr<Client> engine_;
  std::uint64_t registration_ = 0;
};

TEST_F(BusyPagesTest, AfterACancellationThePagesAreFree) {
  std::size_t cut_short = 0;
  for (std::uint32_t round = 0; round < ShortOrLong(4u, 60u); ++round) {
    const std::string name = absl::StrCat("cancel", round);
    auto result = StartStore(name, round, PageStoreOptions::kAllLayers);
    if (round > 0) WaitForMoreThan(2 * round);
    const absl::Status free = engine_->CancelPages(round);
    ASSERT_TRUE(free.ok()) << free;
    pages_->Overwrite();
    const auto stored = result.get();
    EXPECT_TRUE(stored.ok() || absl::IsCancelled(stored.status())) << stored.status();
    const std::size_t found = CheckStored(name);
    cut_short += found < kBlocks ? 1 : 0;
    ASSERT_TRUE(client_->Clear(ns_).ok());
  }
  EXPECT_GT(cut_short, 0u) << "no store was in progress";
}

TEST_F(BusyPagesTest, AfterAFlushWhatWasReadyIsStoredAndThePagesAreFree) {
  auto ready = StartStore("ready", 1, PageStoreOptions::kAllLayers);
  const absl::Status free = engine_->FlushPages(1);
  ASSERT_TRUE(free.ok()) << free;
  pages_->Overwrite();
  ASSERT_TRUE(ready.get().ok());
  EXPECT_EQ(CheckStored("ready"), kBlocks);

  // Not ready: given up, whether some layers went or none.
  for (const std::uint32_t layers : {0u, 3u}) {
    const std::string name = absl::StrCat("unready", layers);
    auto unready = StartStore(name, 2, layers);
    usleep(20'000);
    ASSERT_TRUE(engine_->FlushPages(2).ok());
    pages_->Overwrite();
    engine_->ReadyPages(2, 8);  // Too late.
    const auto result = unready.get();
    ASSERT_TRUE(result.ok()) << result.status();
    EXPECT_EQ(result->blocks_stored, 0u);
    EXPECT_EQ(CheckStored(name), 0u);
  }
  // Some blocks, by their keys: the others go on.
  auto some = StartStore("some", 3, 4);
  usleep(20'000);
  ASSERT_TRUE(engine_->FlushPages(KeysOf("some", 10)).ok());
  engine_->ReadyPages(3, 8);
  const auto result = some.get();
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->blocks_stored, kBlocks - 10);
  EXPECT_EQ(CheckStored("some"), kBlocks - 10);
  EXPECT_TRUE(engine_->FlushPages(absl::Span<const BlockKey>()).ok());
  EXPECT_TRUE(engine_->FlushPages(99).ok());
  EXPECT_TRUE(engine_->CancelPages(99).ok());
}

TEST_F(BusyPagesTest, AStoppedDaemonMayReadAndADeadOneDoesNot) {
  auto result = StartStore("stop", 1, PageStoreOptions::kAllLayers);
  WaitForMoreThan(2);
  daemon_->Signal(SIGSTOP);
  const CallOptions brief = {.timeout = absl::Milliseconds(150)};
  EXPECT_TRUE(absl::IsDeadlineExceeded(engine_->CancelPages(1, brief)));
  EXPECT_TRUE(absl::IsDeadlineExceeded(engine_->CancelPages(1, brief))) << "still";
  EXPECT_TRUE(absl::IsDeadlineExceeded(engine_->FlushPages(1, brief)));
  daemon_->Signal(SIGCONT);
  EXPECT_TRUE(engine_->CancelPages(1).ok());
  pages_->Overwrite();
  EXPECT_FALSE(result.get().ok());
  CheckStored("stop");

  ASSERT_TRUE(client_->Clear(ns_).ok());
  auto last = StartStore("kill", 2, PageStoreOptions::kAllLayers);
  WaitForMoreThan(1);
  daemon_->Signal(SIGSTOP);
  EXPECT_TRUE(absl::IsDeadlineExceeded(engine_->CancelPages(2, brief)));
  Kill();
  const absl::Status dead = engine_->CancelPages(2);
  EXPECT_TRUE(dead.ok()) << dead;
  EXPECT_FALSE(last.get().ok());
}

TEST_F(BusyPagesTest, UnregisteringAndLeavingWaitForReaders) {
  auto result = StartStore("unregister", 1, PageStoreOptions::kAllLayers);
  WaitForMoreThan(2);
  ASSERT_TRUE(engine_->UnregisterMemory(registration_).ok());
  pages_->Overwrite();
  const auto stored = result.get();
  ASSERT_TRUE(stored.ok()) << stored.status();
  const std::size_t found = CheckStored("unregister");
  EXPECT_EQ(found, stored->blocks_stored);
  EXPECT_TRUE(absl::IsNotFound(engine_->StorePages(ns_, registration_, list_->blocks).status()));
  // The client's end.
  registration_ = Register(*engine_, ns_, *pages_);
  ASSERT_TRUE(client_->Clear(ns_).ok());
  auto left = StartStore("leave", 1, PageStoreOptions::kAllLayers);
  WaitForMoreThan(1);
  engine_.reset();
  pages_->Overwrite();
  EXPECT_EQ(left.wait_for(std::chrono::seconds(0)), std::future_status::ready);
  CheckStored("leave");
  EXPECT_TRUE(WaitForStat([](const ServerStat& s) { return s.sessions == 0; }));
  EXPECT_TRUE(WaitUnmapped());
}

// All of this process's connections to a door; how many there were.
int CutDoor(const std::string& path) {
  int cut = 0;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    const int fd = std::stoi(entry.path().filename());
    sockaddr_un peer{};
    socklen_t bytes = sizeof(peer);
    if (getpeername(fd, reinterpret_cast<sockaddr*>(&peer), &bytes) != 0) continue;
    if (peer.sun_family != AF_UNIX || path != peer.sun_path) continue;
    shutdown(fd, SHUT_RDWR);
    ++cut;
  }
  return cut;
}

// The client left the door, and with that its session ended: it asks in another one whether
// somebody reads.
TEST_F(BusyPagesTest, ALostSessionIsAskedAboutInTheNextOne) {
  auto result = StartStore("lost", 1, PageStoreOptions::kAllLayers);
  WaitForMoreThan(2);
  EXPECT_GE(CutDoor(DoorPath(socket())), 1);
  const absl::Status free = engine_->CancelPages(1);
  ASSERT_TRUE(free.ok()) << free;
  pages_->Overwrite();
  static_cast<void>(result.get());
  CheckStored("lost");
  EXPECT_TRUE(WaitForStat([](const ServerStat& s) { return s.sessions <= 1; }));
  const absl::Status old = engine_->StorePages(ns_, registration_, list_->blocks).status();
  EXPECT_TRUE(absl::IsAborted(old)) << old;
  registration_ = Register(*engine_, ns_, *pages_);
  pages_->FillAll(*sequence_, list_->pages);
  const auto stored = engine_->StorePages(ns_, registration_, list_->blocks);
  ASSERT_TRUE(stored.ok()) << stored.status();
  EXPECT_EQ(stored->blocks_stored, 1u);
}

// Whoever notices it first, daemon or client.
TEST_F(BusyPagesTest, AStoreThatMeetsTheEndOfItsSessionIsAborted) {
  int aborted = 0;
  for (int round = 0; round < 40; ++round) {
    EXPECT_GE(CutDoor(DoorPath(socket())), 1);
    const absl::Status status = engine_->StorePages(ns_, registration_, list_->blocks).status();
    EXPECT_TRUE(status.ok() || absl::IsAborted(status) || absl::IsUnavailable(status)) << status;
    aborted += absl::IsAborted(status) ? 1 : 0;
    registration_ = Register(*engine_, ns_, *pages_);
  }
  EXPECT_GT(aborted, 0);
}

// Whatever the engine does to its pages: the daemon lives, and what it stores is well-formed.
TEST_F(BusyPagesTest, ScribblingMakesGarbageOfOnesOwnAndNothingElse) {
  std::atomic<bool> stop{false};
  std::atomic<bool> wild{false};  // Infinities and NaN as well.
  std::thread scribbler([&] {
    std::mt19937_64 random(1);
    const std::size_t words = pages_->bytes().size() / 8;
    auto* const memory = reinterpret_cast<volatile std::uint64_t*>(pages_->bytes().data());
    while (!stop) {
      const std::uint64_t r = random();
      memory[r % words] =
          wild && r % 65536 == 0 ? 0x7C00'7E00'FC00'7BFFu : r & 0xBBFF'BBFF'BBFF'BBFFu;
    }
  });
  const TileFormat format = FormatOf(spec_, spec_.groups[0]);
  const RecordLayout layout = LayoutOf(format);
  std::size_t tiles = 0;
  std::size_t raws = 0;
  std::size_t failed = 0;
  for (std::uint32_t round = 0; round < ShortOrLong(4u, 100u); ++round) {
    const std::string name = absl::StrCat("scribble", round);
    wild = round % 2 == 1;
    const auto stored = StartStore(name, 1, PageStoreOptions::kAllLayers).get();
    ASSERT_TRUE(stored.ok()) << stored.status();
    failed += stored->blocks_failed;
    for (const auto& [where, page] : PagesOf(ns_, KeysOf(name, kBlocks))) {
      const auto finite = [&](std::size_t begin, std::size_t end) {
        for (std::size_t i = begin; i + 1 < end; i += 2) {
          std::uint16_t half = 0;
          std::memcpy(&half, page.data() + i, 2);
          if ((half & 0x7C00) == 0x7C00) return false;
        }
        return true;
      };
      for (std::size_t at = 0; at < page.size();) {
        const bool raw = static_cast<SlotKind>(page[at++]) == SlotKind::kRaw;
        if (raw) {
          EXPECT_TRUE(finite(at, at + RawBytes(format, 64)));
          at += RawBytes(format, 64);
          ++raws;
        } else {
          EXPECT_TRUE(finite(at + layout.k_scale, at + layout.v_codes));
          EXPECT_TRUE(finite(at + layout.v_channel, at + layout.bytes));
          at += layout.bytes;
          ++tiles;
        }
      }
    }
    ASSERT_TRUE(client_->Clear(ns_).ok());
  }
  stop = true;
  scribbler.join();
  std::printf("%zu tiles, %zu raw heads, %zu blocks failed\n", tiles, raws, failed);
  EXPECT_GT(tiles, 0u);
  EXPECT_GT(failed, 0u);
  EXPECT_TRUE(client_->Verify().ok());
}

void PagesTest::ExpectBadMemfdsAreRefused(const ClientNamespace& ns, const EnginePages& pages) {
  const auto registration_error = [&](const EngineGeometry& geometry) {
    return client_->RegisterMemory(ns, geometry).status().ToString();
  };
  EngineGeometry geometry = pages.geometry;
  const int unsealed = memfd_create("unsealed", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  ASSERT_EQ(ftruncate(unsealed, 64 << 20), 0);
  geometry.regions[0].fd = unsealed;
  EXPECT_THAT(registration_error(geometry),
              HasSubstr("INVALID_ARGUMENT: region 0: shared memory without F_SEAL_SHRINK"));
  close(unsealed);
  geometry = pages.geometry;
  geometry.regions[0].fd_offset_bytes += 1 << 20;
  EXPECT_THAT(registration_error(geometry), HasSubstr("region 0: shared memory of "));
  geometry = pages.geometry;
  geometry.regions[0].fd = STDERR_FILENO;
  EXPECT_THAT(registration_error(geometry), HasSubstr("must be a memfd"));
}

TEST_F(PagesTest, WhatDoesNotFitIsRefusedByName) {
  Start({"--listen", "127.0.0.1:0", "--insecure"});
  const NamespaceSpec spec = SmallSpec();
  const ClientNamespace ns = Open("n", spec);
  EnginePages pages(spec, 8, false, 0, 2, EngineDevice());
  Sequence sequence(spec, 64, 3);
  const BlockList list(spec, "s", 64, {0, 1, 2, 7});
  pages.FillAll(sequence, list.pages);

  const auto registration_error = [&](const EngineGeometry& geometry) {
    return client_->RegisterMemory(ns, geometry).status().ToString();
  };
  EngineGeometry geometry = pages.geometry;
  if (!kOnDevice) ExpectBadMemfdsAreRefused(ns, pages);
  geometry = pages.geometry;
  geometry.layers[0].element = EngineElement::kBFloat16;
  EXPECT_THAT(registration_error(geometry), HasSubstr("element bf16, the namespace has fp16"));
  // Nothing of that is left.
  EXPECT_TRUE(WaitUnmapped());

  const auto error = [](const absl::StatusOr<StoreResult>& stored) {
    if (!stored.ok()) return stored.status().ToString();
    return stored->blocks[0].status.ToString();
  };
  const std::uint64_t registration = Register(*client_, ns, pages);
  const BlockList beyond(spec, "s", 64, {0, 1, 2, 8});
  EXPECT_THAT(error(client_->StorePages(ns, registration, beyond.blocks)),
              HasSubstr("INVALID_ARGUMENT: block 0: page number 8, want below 8"));
  const BlockList huge(spec, "s", 64, {0, 1, ~std::uint64_t{0}, 7});
  EXPECT_THAT(error(client_->StorePages(ns, registration, huge.blocks)), HasSubstr("page number"));
  EXPECT_THAT(error(client_->StorePages(ns, registration + 1, list.blocks)),
              HasSubstr("NOT_FOUND: registration"));
  NamespaceSpec other_spec = spec;
  other_spec.salt = "other";
  const ClientNamespace other_ns = Open("other", other_spec);
  EXPECT_THAT(error(client_->StorePages(other_ns, registration, list.blocks)),
              HasSubstr("is of another namespace"));
  geometry = pages.geometry;
  geometry.regions[0].fd = -1;
  geometry.regions[0].device_memory.reset();
  const auto private_memory = client_->RegisterMemory(ns, geometry);
  ASSERT_TRUE(private_memory.ok());
  EXPECT_THAT(
      error(client_->StorePages(ns, *private_memory, list.blocks)),
      HasSubstr("FAILED_PRECONDITION: block 0: region 0 of the registration is not shared"));
  // Another client's.
  const auto other = Connect(absl::StrCat("unix:", socket()));
  EXPECT_THAT(error(other->StorePages(ns, registration, list.blocks)), HasSubstr("NOT_FOUND"));
  // From afar.
  const auto remote = Connect(ready_["listen"].get<std::string>());
  const auto there = remote->RegisterMemory(ns, pages.geometry);
  ASSERT_TRUE(there.ok()) << there.status();
  EXPECT_THAT(error(remote->StorePages(ns, *there, list.blocks)),
              HasSubstr("FAILED_PRECONDITION: pages are read in place by a daemon of the same"));
  // A value that is not finite is named as ever.
  pages.Row(1, true, list.pages, 17, 1)[3] = std::byte{0xFF};
  pages.Row(1, true, list.pages, 17, 1)[2] = std::byte{0xFF};
  EXPECT_THAT(error(client_->StorePages(ns, registration, list.blocks)),
              HasSubstr("not finite: V of layer 1 head 1 token 17 channel 1"));
  pages.FillAll(sequence, list.pages);
  EXPECT_EQ(error(client_->StorePages(ns, registration, list.blocks)), "OK");
}

TEST_F(PagesTest, AKilledClientLeavesNothingBehind) {
  Start();
  {  // Connects, and on a device makes what encodes there.
    const ClientNamespace ns = Open("n", SmallSpec());
    EnginePages pages(SmallSpec(), 4, false, 0, 2, EngineDevice());
    ASSERT_TRUE(client_->UnregisterMemory(Register(*client_, ns, pages)).ok());
  }
  ASSERT_TRUE(WaitUnmapped());
  const auto descriptors = daemon_->OpenDescriptors();
  const std::uint64_t sessions = client_->Stat()->sessions;
  for (int round = 0; round < ShortOrLong(3, 50); ++round) {
    auto probe = Probe(
        {kOnDevice ? "device_pages_loop" : "pages_loop", absl::StrCat("k", round), "40"}, getuid());
    ASSERT_EQ(probe->ReadLine(), "running") << probe->standard_error();
    EXPECT_EQ(SharedMappings().size(), 1u);
    EXPECT_EQ(client_->Stat()->sessions, sessions + 1);
    usleep(static_cast<unsigned>(round) * 3000);
    probe->Signal(SIGKILL);
    probe->WaitExit();
    EXPECT_TRUE(WaitForStat([&](const ServerStat& s) { return s.sessions == sessions; }));
    // Fewer when the region above was still being closed.
    for (int i = 0; i < 2000 && daemon_->OpenDescriptors() > descriptors; ++i) usleep(5000);
    EXPECT_TRUE(WaitUnmapped());
    EXPECT_LE(daemon_->OpenDescriptors(), descriptors);
  }
}

// The daemon forgets everything with its life: the engine registers again and goes on.
TEST_F(PagesTest, AfterARestartTheMemoryIsRegisteredAgain) {
  Start();
  const NamespaceSpec spec = SmallSpec();
  ClientNamespace ns = Open("n", spec);
  const auto engine = Connect(absl::StrCat("unix:", socket()));
  EnginePages pages(spec, 4, true, 0, 2, EngineDevice());
  Sequence sequence(spec, 64, 3);
  const BlockList list(spec, "s", 64, {3, 1, 0, 2});
  pages.FillAll(sequence, list.pages);
  std::uint64_t registration = Register(*engine, ns, pages);
  ASSERT_TRUE(engine->StorePages(ns, registration, list.blocks).ok());
  Kill();
  Start();
  ns = Open("n", spec);
  const absl::Status lost = engine->StorePages(ns, registration, list.blocks).status();
  EXPECT_TRUE(absl::IsAborted(lost) || absl::IsUnavailable(lost) || absl::IsUnauthenticated(lost))
      << lost;
  registration = Register(*engine, ns, pages);
  const auto stored = engine->StorePages(ns, registration, list.blocks);
  ASSERT_TRUE(stored.ok()) << stored.status();
  EXPECT_EQ(stored->blocks_stored, 1u);
}

}  // namespace
}  // namespace kvmill::testing
