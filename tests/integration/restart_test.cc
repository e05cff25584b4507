// An engine whose daemon is restarted under it, with WhenAway::kMiss: no call fails, nothing is
// read that is wrong, and everything is there again afterwards.
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/mapped_blocks.h"
#include "tests/integration/pages_fixture.h"

namespace kvmill::testing {
namespace {

constexpr int kTries = 6000;  // Of 5 ms: for what must happen, also on a busy machine.

class RestartTest : public PagesTest {
 protected:
  void Start() { PagesTest::Start({"--data-dir", directory_ / "data", "--disk-bytes", "1GiB"}); }
  std::unique_ptr<Client> ConnectEngine() const {
    Client::Options options;
    options.address = absl::StrCat("unix:", socket());
    options.timeout = absl::Seconds(60);
    options.when_away = WhenAway::kMiss;
    return *Client::Create(options);
  }
  using Pages = std::map<std::tuple<std::uint32_t, int, std::uint32_t>, std::string>;
  static Pages Fetched(Client& engine, const ClientNamespace& ns,
                       const std::vector<BlockKey>& keys) {
    PageCollector collector;
    const auto fetched = engine.Fetch(ns, keys, collector);
    EXPECT_TRUE(fetched.ok()) << fetched.status();
    if (fetched.ok()) {
      EXPECT_TRUE(fetched->away.ok()) << fetched->away;
    }
    return collector.pages;
  }
  // Until it finds `want` blocks; no lookup may fail.
  static bool WaitForHits(Client& engine, const ClientNamespace& ns,
                          const std::vector<BlockKey>& keys, std::uint32_t want) {
    for (int i = 0; i < kTries; ++i, usleep(5000)) {
      const auto found = engine.Lookup(ns, keys);
      EXPECT_TRUE(found.ok()) << found.status();
      if (!found.ok()) return false;
      if (found->hit_blocks == want) return true;
    }
    return false;
  }
  // Until a block of `list` is stored from that memory; none of the calls may fail.
  static bool WaitStored(Client& engine, const ClientNamespace& ns, std::uint64_t registration,
                         const BlockList& list) {
    for (int i = 0; i < kTries; ++i, usleep(5000)) {
      const auto stored = engine.StorePages(ns, registration, list.blocks);
      EXPECT_TRUE(stored.ok()) << stored.status();
      if (!stored.ok()) return false;
      EXPECT_TRUE(stored->blocks[0].status.ok()) << stored->blocks[0].status;
      if (stored->blocks_stored == list.blocks.size()) return true;
      EXPECT_EQ(stored->blocks[0].outcome, StoreOutcome::kDropped);
      EXPECT_EQ(stored->blocks_dropped, list.blocks.size());
      EXPECT_FALSE(stored->away.ok());
    }
    return false;
  }
};

TEST_F(RestartTest, WithoutADaemonEverythingIsAMissAndNothingIsStored) {
  Start();
  const auto engine = ConnectEngine();
  const auto ns = engine->OpenNamespace("n", SmallSpec());
  ASSERT_TRUE(ns.ok()) << ns.status();
  Sequence sequence(SmallSpec(), 3 * 64, 5), other(SmallSpec(), 64, 6);
  ASSERT_EQ(Put(*ns, "s", sequence, true).blocks_stored, 3u);
  EnginePages pages(SmallSpec(), 4, false, 0, 2, nullptr);
  const BlockList list(SmallSpec(), "p", 64, {0, 1, 2, 3});
  pages.FillAll(other, list.pages);
  const std::uint64_t registration = Register(*engine, *ns, pages);
  ASSERT_TRUE(WaitForHits(*engine, *ns, KeysOf("s", 3), 3));
  const auto before = engine->Map(*ns, KeysOf("s", 3), {.lease = absl::Seconds(60)});
  ASSERT_TRUE(before.ok()) << before.status();
  ASSERT_TRUE((*before)->Page(0, 0, 0).ok());
  ASSERT_TRUE((*before)->Check().ok());
  Kill();

  const auto found = engine->Lookup(*ns, KeysOf("s", 3));
  ASSERT_TRUE(found.ok()) << found.status();
  EXPECT_EQ(found->hit_blocks, 0u);
  EXPECT_FALSE(found->away.ok());
  PageCollector collector;
  const auto fetched = engine->Fetch(*ns, KeysOf("s", 3), collector);
  ASSERT_TRUE(fetched.ok()) << fetched.status();
  ASSERT_EQ(fetched->blocks.size(), 3u);
  for (const auto& block : fetched->blocks) EXPECT_TRUE(absl::IsNotFound(block.status));
  EXPECT_FALSE(fetched->away.ok());
  const auto mapped = engine->Map(*ns, KeysOf("s", 3));
  ASSERT_TRUE(mapped.ok()) << mapped.status();
  EXPECT_TRUE(absl::IsNotFound((*mapped)->status(2)));
  EXPECT_FALSE((*mapped)->away().ok());
  EXPECT_TRUE(engine->Renew(**mapped, absl::Seconds(5)).ok());
  const std::vector<StoreBlock> blocks = sequence.Blocks("t");
  const auto stored = engine->Store(*ns, blocks, {});
  ASSERT_TRUE(stored.ok()) << stored.status();
  EXPECT_EQ(stored->blocks_dropped, 3u);
  EXPECT_EQ(stored->blocks[1].outcome, StoreOutcome::kDropped);
  const auto from_pages = engine->StorePages(*ns, registration, list.blocks);
  ASSERT_TRUE(from_pages.ok()) << from_pages.status();
  EXPECT_EQ(from_pages->blocks_dropped, 1u);
  EXPECT_TRUE(engine->FlushPages(0).ok());
  EXPECT_EQ(engine->Touch(*ns, KeysOf("s", 3)).value_or(1), 0u);
  // Who must know is told.
  EXPECT_TRUE(absl::IsUnavailable(engine->Store(*ns, blocks, {.wait_durable = true}).status()));
  PageStoreOptions durable;
  durable.wait_durable = true;
  EXPECT_TRUE(
      absl::IsUnavailable(engine->StorePages(*ns, registration, list.blocks, durable).status()));
  EXPECT_TRUE(absl::IsUnavailable(engine->Remove(*ns, KeysOf("s", 1)).status()));
  EXPECT_TRUE(absl::IsUnavailable(engine->Flush().status()));
  // What was mapped is no longer to be read.
  for (int i = 0; i < kTries && (*before)->Check().ok(); ++i) usleep(5000);
  EXPECT_TRUE(absl::IsAborted((*before)->Check())) << (*before)->Check();
  EXPECT_TRUE(absl::IsAborted((*before)->Page(0, 0, 0).status()));
}

TEST_F(RestartTest, AfterARestartAllIsThereAgainAndRight) {
  Start();
  const auto engine = ConnectEngine();
  const auto ns = engine->OpenNamespace("n", SmallSpec());
  ASSERT_TRUE(ns.ok()) << ns.status();
  Sequence sequence(SmallSpec(), 3 * 64, 5), other(SmallSpec(), 64, 6);
  ASSERT_EQ(Put(*ns, "s", sequence, true).blocks_stored, 3u);
  const Pages want = Fetched(*engine, *ns, KeysOf("s", 3));
  ASSERT_EQ(want.size(), 6u);
  // What the stores from pages below must become.
  ASSERT_EQ(Put(*ns, "o", other).blocks_stored, 1u);
  const Pages want_other = Fetched(*engine, *ns, KeysOf("o", 1));
  ASSERT_TRUE(client_->Remove(*ns, KeysOf("o", 1)).ok());
  Pages want_first;
  for (const auto& [place, bytes] : want) {
    if (std::get<0>(place) == 0) want_first[place] = bytes;
  }

  // Two memories; of the first one the engine closes its descriptor.
  EnginePages pages(SmallSpec(), 4, false, 0, 2, nullptr);
  EnginePages other_pages(SmallSpec(), 4, false, 0, 2, nullptr);
  const std::vector<std::uint64_t> numbers = {2, 0, 3, 1};
  const BlockList list(SmallSpec(), "p", 64, numbers), other_list(SmallSpec(), "o", 64, numbers);
  for (std::uint32_t layer = 0; layer < 2; ++layer) {
    for (const bool value : {false, true}) {
      for (std::uint32_t token = 0; token < 64; ++token) {
        for (std::uint32_t head = 0; head < 2; ++head) {
          std::memcpy(pages.Row(layer, value, numbers, token, head),
                      &sequence.At(layer, value, token, head, 0), 128);
        }
      }
    }
  }
  other_pages.FillAll(other, numbers);
  EngineGeometry geometry = pages.geometry;
  geometry.regions[0].fd = dup(pages.geometry.regions[0].fd);
  const auto registration = engine->RegisterMemory(*ns, geometry);
  ASSERT_TRUE(registration.ok()) << registration.status();
  close(geometry.regions[0].fd);
  Kill();
  // Registered while there is nobody: it counts from the moment when there is.
  const auto other_registration = engine->RegisterMemory(*ns, other_pages.geometry);
  ASSERT_TRUE(other_registration.ok()) << other_registration.status();
  Start();

  // The second one is the first that the new session knows, by the number that the other one had.
  ASSERT_TRUE(WaitStored(*engine, *ns, *other_registration, other_list));
  ASSERT_TRUE(WaitStored(*engine, *ns, *registration, list));
  EXPECT_EQ(Fetched(*engine, *ns, KeysOf("o", 1)), want_other);
  EXPECT_EQ(Fetched(*engine, *ns, KeysOf("p", 1)), want_first);
  ASSERT_TRUE(WaitForHits(*engine, *ns, KeysOf("s", 3), 3));
  EXPECT_EQ(Fetched(*engine, *ns, KeysOf("s", 3)), want);
  const auto mapped = engine->Map(*ns, KeysOf("s", 3), {.lease = absl::Seconds(60)});
  ASSERT_TRUE(mapped.ok()) << mapped.status();
  EXPECT_TRUE((*mapped)->status(2).ok()) << (*mapped)->status(2);
  EXPECT_TRUE((*mapped)->away().ok());
  EXPECT_TRUE((*mapped)->VerifyContents().ok());
  EXPECT_EQ(engine->boot_id(), ready_["boot_id"]);
  EXPECT_TRUE(engine->UnregisterMemory(*registration).ok());
  EXPECT_TRUE(absl::IsNotFound(engine->UnregisterMemory(*registration)));
  EXPECT_TRUE(engine->UnregisterMemory(*other_registration).ok());
  EXPECT_TRUE(WaitUnmapped());
}

// Lookups alone bring it back as well; and what was unregistered meanwhile stays so.
TEST_F(RestartTest, MemoryIsRegisteredAgainWithTheFirstAnswer) {
  Start();
  const auto engine = ConnectEngine();
  const auto ns = engine->OpenNamespace("n", SmallSpec());
  ASSERT_TRUE(ns.ok()) << ns.status();
  EnginePages pages(SmallSpec(), 4, false, 0, 2, nullptr);
  EnginePages gone(SmallSpec(), 4, false, 0, 2, nullptr);
  const std::uint64_t registration = Register(*engine, *ns, pages);
  const std::uint64_t unregistered = Register(*engine, *ns, gone);
  ASSERT_EQ(SharedMappings().size(), 2u);
  Kill();
  EXPECT_TRUE(engine->UnregisterMemory(unregistered).ok());
  Start();
  for (int i = 0; i < kTries && SharedMappings().empty(); ++i, usleep(5000)) {
    ASSERT_TRUE(engine->Lookup(*ns, KeysOf("s", 1)).ok());
  }
  EXPECT_EQ(SharedMappings().size(), 1u);
  const BlockList list(SmallSpec(), "p", 64, {0, 1, 2, 3});
  EXPECT_TRUE(absl::IsNotFound(engine->StorePages(*ns, unregistered, list.blocks).status()));
  Sequence sequence(SmallSpec(), 64, 5);
  pages.FillAll(sequence, list.pages);
  EXPECT_TRUE(WaitStored(*engine, *ns, registration, list));
  EXPECT_EQ(SharedMappings().size(), 1u);
}

// An engine with threads goes on through a drain and through a kill -9.
TEST_F(RestartTest, NoCallFailsWhileTheDaemonIsRestartedUnderLoad) {
  Start();
  const auto engine = ConnectEngine();
  const auto ns = engine->OpenNamespace("n", SmallSpec());
  ASSERT_TRUE(ns.ok()) << ns.status();
  Sequence sequence(SmallSpec(), 4 * 64, 5);
  ASSERT_EQ(Put(*ns, "s", sequence, true).blocks_stored, 4u);
  const Pages want = Fetched(*engine, *ns, KeysOf("s", 4));
  std::atomic<bool> stop{false};
  std::atomic<int> hits{0}, dropped{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 3; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; !stop; ++i, usleep(1000)) {
        const auto found = engine->Lookup(*ns, KeysOf("s", 4));
        ASSERT_TRUE(found.ok()) << found.status();
        PageCollector collector;
        const auto fetched = engine->Fetch(*ns, KeysOf("s", 4), collector);
        ASSERT_TRUE(fetched.ok()) << fetched.status();
        for (std::uint32_t b = 0; b < 4; ++b) {
          const absl::Status& status = fetched->blocks[b].status;
          ASSERT_TRUE(status.ok() || absl::IsNotFound(status)) << status;
          if (!status.ok()) continue;
          ++hits;
          for (std::uint32_t layer = 0; layer < 2; ++layer) {
            ASSERT_EQ(collector.pages.at({b, 0, layer}), want.at({b, 0, layer}));
          }
        }
        const auto mapped = engine->Map(*ns, KeysOf("s", 4));
        ASSERT_TRUE(mapped.ok()) << mapped.status();
        Sequence fresh(SmallSpec(), 64, static_cast<std::uint32_t>(i));
        const std::vector<StoreBlock> blocks = fresh.Blocks(absl::StrCat("new", t, ".", i));
        const auto stored = engine->Store(*ns, blocks, {});
        ASSERT_TRUE(stored.ok()) << stored.status();
        ASSERT_TRUE(stored->blocks[0].status.ok()) << stored->blocks[0].status;
        dropped += static_cast<int>(stored->blocks_dropped);
      }
    });
  }
  for (const bool drains : {true, false, true}) {
    const int dropped_before = dropped;
    daemon_->Signal(drains ? SIGTERM : SIGKILL);
    daemon_->WaitExit();
    for (int i = 0; i < kTries && dropped == dropped_before; ++i) usleep(5000);
    EXPECT_GT(dropped, dropped_before);
    Start();
    const int hits_before = hits;
    for (int i = 0; i < kTries && hits < hits_before + 8; ++i) usleep(5000);
    EXPECT_GE(hits, hits_before + 8);
  }
  stop = true;
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(Fetched(*engine, *ns, KeysOf("s", 4)), want);
}

}  // namespace
}  // namespace kvmill::testing
