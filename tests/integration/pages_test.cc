// Stores from an engine's memory by a real daemon: the same bytes as a store by copy.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <future>
#include <optional>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/door_protocol.h"
#include "client/shared_memory.h"
#include "kernels/tile_format.h"
#include "tests/integration/pages_fixture.h"
#include "tests/long_form.h"

namespace kvmill::testing {
namespace {

using ::testing::HasSubstr;

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

}  // namespace

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

namespace {

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
  const std::uint64_t registration = Register(*engine, ns, pages);
  ASSERT_TRUE(engine->StorePages(ns, registration, list.blocks).ok());
  Kill();
  Start();
  ns = Open("n", spec);
  const absl::Status lost = engine->StorePages(ns, registration, list.blocks).status();
  EXPECT_TRUE(absl::IsAborted(lost) || absl::IsUnavailable(lost) || absl::IsUnauthenticated(lost))
      << lost;
  // UNAVAILABLE until the client has noticed it and is connected again.
  absl::StatusOr<std::uint64_t> again = absl::UnavailableError("not tried");
  for (int i = 0; i < 3000 && absl::IsUnavailable(again.status()); ++i) {
    again = engine->RegisterMemory(ns, pages.geometry);
    if (!again.ok()) usleep(10'000);
  }
  ASSERT_TRUE(again.ok()) << again.status();
  const auto stored = engine->StorePages(ns, *again, list.blocks);
  ASSERT_TRUE(stored.ok()) << stored.status();
  EXPECT_EQ(stored->blocks_stored, 1u);
}

}  // namespace
}  // namespace kvmill::testing
