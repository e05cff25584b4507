// Stores from an engine's pages that end in the middle: nobody reads the pages once that was said,
// and what was given up is not taken for stored.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <filesystem>
#include <functional>
#include <future>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/door_protocol.h"
#include "kernels/tile_format.h"
#include "tests/integration/pages_fixture.h"
#include "tests/long_form.h"

namespace kvmill::testing {
namespace {

using ::testing::HasSubstr;

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

class BusyPagesTest : public PagesTest {
 protected:
  static constexpr std::uint32_t kBlocks = 48;
  // All blocks from the same pages: one set of bytes is right for every one of them.
  void SetUp() override { Prepare({}); }
  void Prepare(const std::vector<std::string>& more) {
    Start(more);
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
                                                      std::uint32_t ready_layers,
                                                      bool wait_durable = false) {
    page_bytes_before_ = PageBytes();
    pages_->FillAll(*sequence_, list_->pages);
    std::vector<PageBlock> blocks(kBlocks, list_->blocks[0]);
    for (std::uint32_t b = 0; b < kBlocks; ++b) blocks[b].key = KeyOf(name, b);
    const auto done = std::make_shared<std::promise<absl::StatusOr<StoreResult>>>();
    engine_->StorePagesAsync(
        ns_, registration_, blocks,
        {.request = request, .ready_layers = ready_layers, .wait_durable = wait_durable}, {},
        [done](absl::StatusOr<StoreResult> r) { done->set_value(std::move(r)); });
    return done->get_future();
  }
  std::uint64_t PageBytes() {
    std::uint64_t bytes = 0;
    const absl::StatusOr<ServerStat> stat = client_->Stat();
    EXPECT_TRUE(stat.ok()) << stat.status();
    for (const TransferUsage& use : stat->transfers)
      bytes += use.path == "pages" ? use.bytes_in : 0;
    return bytes;
  }
  // The daemon has read so many layers of each block of the store that was started last.
  void WaitForLayers(std::uint32_t layers) {
    const std::uint64_t layer_bytes = std::uint64_t{2} * 64 * 8 * 128 * 2;
    const std::uint64_t want = page_bytes_before_ + kBlocks * layers * layer_bytes;
    const absl::Time deadline = absl::Now() + absl::Seconds(20);
    while (PageBytes() < want && absl::Now() < deadline) usleep(300);
    EXPECT_EQ(PageBytes(), want);
  }
  // The daemon has begun to read for the store that was started last.
  void WaitForReads() {
    const absl::Time deadline = absl::Now() + absl::Seconds(20);
    while (PageBytes() <= page_bytes_before_ && absl::Now() < deadline) usleep(300);
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
  std::uint64_t page_bytes_before_ = 0;
};

class DurableBusyPagesTest : public BusyPagesTest {
 protected:
  void SetUp() override { Prepare({"--data-dir", directory_ / "data"}); }
};

TEST_F(BusyPagesTest, AfterACancellationThePagesAreFree) {
  std::size_t cut_short = 0;
  // More of them on a machine where the cancellation comes late.
  for (std::uint32_t round = 0; round < ShortOrLong(4u, 60u) || (cut_short == 0 && round < 40);
       ++round) {
    const std::string name = absl::StrCat("cancel", round);
    auto result = StartStore(name, round, PageStoreOptions::kAllLayers);
    if (round > 0) WaitForMoreThan((2 * round) % kBlocks);
    const absl::Status free = engine_->CancelPages(round);
    ASSERT_TRUE(free.ok()) << free;
    pages_->Overwrite();
    const auto stored = result.get();
    ASSERT_TRUE(stored.ok()) << stored.status();
    for (const StoreBlockResult& block : stored->blocks) {
      const bool there = block.outcome == StoreOutcome::kStored;
      EXPECT_EQ(block.status.code(), there ? absl::StatusCode::kOk : absl::StatusCode::kCancelled);
      EXPECT_TRUE(there || block.outcome == StoreOutcome::kFailed);
    }
    const std::size_t found = CheckStored(name);
    EXPECT_GE(found, stored->blocks_stored);
    cut_short += found < kBlocks ? 1 : 0;
    ASSERT_TRUE(client_->Clear(ns_).ok());
  }
  EXPECT_GT(cut_short, 0u) << "no store was in progress";
}

void ExpectSomeGivenUp(const absl::StatusOr<StoreResult>& stored) {
  ASSERT_TRUE(stored.ok()) << stored.status();
  EXPECT_GT(stored->blocks_failed, 0u);
  for (const StoreBlockResult& block : stored->blocks) {
    if (!block.status.ok()) {
      EXPECT_EQ(block.status.code(), absl::StatusCode::kCancelled);
    }
  }
}

// Whatever gave it up, and whether some of its layers went or none: nobody takes it for stored, and
// its status says who it was.
TEST_F(DurableBusyPagesTest, GivenUpBlocksAreCancelledAndSayByWhom) {
  const std::vector<std::pair<std::string, std::function<absl::Status()>>> cases = {
      {"FlushPages", [this] { return engine_->FlushPages(1); }},
      {"FlushPages", [this] { return engine_->FlushPages(KeysOf("given", kBlocks)); }},
      {"CancelPages", [this] { return engine_->CancelPages(1); }},
      {"UnregisterMemory", [this] { return engine_->UnregisterMemory(registration_); }},
  };
  for (const auto& [by, give_up] : cases) {
    for (const bool wait_durable : {false, true}) {
      for (const std::uint32_t layers : {0u, 3u}) {
        SCOPED_TRACE(absl::StrCat(by, ", durable: ", wait_durable, ", layers: ", layers));
        auto result = StartStore("given", 1, layers, wait_durable);
        WaitForLayers(layers);
        const absl::Status free = give_up();
        ASSERT_TRUE(free.ok()) << free;
        pages_->Overwrite();
        const auto stored = result.get();
        ASSERT_TRUE(stored.ok()) << stored.status();
        EXPECT_EQ(stored->blocks_failed, kBlocks);
        for (const StoreBlockResult& block : stored->blocks) {
          ASSERT_EQ(block.outcome, StoreOutcome::kFailed);
          ASSERT_EQ(block.status.code(), absl::StatusCode::kCancelled) << block.status;
          ASSERT_THAT(std::string(block.status.message()), HasSubstr(by));
          ASSERT_THAT(std::string(block.status.message()), HasSubstr("again"));
        }
        EXPECT_EQ(CheckStored("given"), 0u);
        if (by == "UnregisterMemory") {
          registration_ = Register(*engine_, ns_, *pages_);
        }
      }
    }
  }
  // With the client ends the whole call.
  auto left = StartStore("given", 1, 3);
  WaitForLayers(3);
  engine_.reset();
  const auto stored = left.get();
  EXPECT_EQ(stored.status().code(), absl::StatusCode::kCancelled) << stored.status();
  EXPECT_EQ(std::string(stored.status().message()), "the client is being destroyed");
}

// Two calls that the daemon may hear of in either order.
TEST_F(BusyPagesTest, AStoreThatIsOvertakenByUnregisteringIsCancelled) {
  for (int round = 0; round < 60; ++round) {
    auto result = StartStore("overtaken", 1, round % 2 == 0 ? 0 : PageStoreOptions::kAllLayers);
    ASSERT_TRUE(engine_->UnregisterMemory(registration_).ok());
    const auto stored = result.get();
    ASSERT_TRUE(stored.ok()) << stored.status();
    for (const StoreBlockResult& block : stored->blocks) {
      if (block.status.ok()) continue;
      ASSERT_EQ(block.status.code(), absl::StatusCode::kCancelled) << block.status;
      ASSERT_THAT(std::string(block.status.message()), HasSubstr("UnregisterMemory"));
    }
    ASSERT_TRUE(client_->Clear(ns_).ok());
    registration_ = Register(*engine_, ns_, *pages_);
  }
}

// The daemon ends the session between two layers: what it refuses then is for a new registration.
TEST_F(BusyPagesTest, BlocksThatMeetTheEndOfTheirSessionAreAborted) {
  auto result = StartStore("ended", 1, 3);
  WaitForLayers(3);
  EXPECT_GE(CutDoor(DoorPath(socket())), 1);
  ASSERT_TRUE(WaitForStat([](const ServerStat& s) { return s.sessions == 0; }));
  engine_->ReadyPages(1, 8);
  const auto stored = result.get();
  if (stored.ok()) {
    for (const StoreBlockResult& block : stored->blocks) {
      ASSERT_EQ(block.status.code(), absl::StatusCode::kAborted) << block.status;
    }
  } else {
    EXPECT_EQ(stored.status().code(), absl::StatusCode::kAborted) << stored.status();
  }
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
  // Its last layer never is ready: it does not end before the daemon is stopped.
  auto result = StartStore("stop", 1, 7);
  WaitForReads();
  daemon_->Signal(SIGSTOP);
  const CallOptions brief = {.timeout = absl::Milliseconds(150)};
  EXPECT_TRUE(absl::IsDeadlineExceeded(engine_->CancelPages(1, brief)));
  EXPECT_TRUE(absl::IsDeadlineExceeded(engine_->CancelPages(1, brief))) << "still";
  EXPECT_TRUE(absl::IsDeadlineExceeded(engine_->FlushPages(1, brief)));
  daemon_->Signal(SIGCONT);
  EXPECT_TRUE(engine_->CancelPages(1).ok());
  pages_->Overwrite();
  ExpectSomeGivenUp(result.get());
  CheckStored("stop");

  ASSERT_TRUE(client_->Clear(ns_).ok());
  auto last = StartStore("kill", 2, 7);
  WaitForReads();
  daemon_->Signal(SIGSTOP);
  EXPECT_TRUE(absl::IsDeadlineExceeded(engine_->CancelPages(2, brief)));
  Kill();
  const absl::Status dead = engine_->CancelPages(2);
  EXPECT_TRUE(dead.ok()) << dead;
  ExpectSomeGivenUp(last.get());
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
  for (int round = 0; round < 40 || (aborted == 0 && round < 400); ++round) {
    EXPECT_GE(CutDoor(DoorPath(socket())), 1);
    const absl::Status status = engine_->StorePages(ns_, registration_, list_->blocks).status();
    EXPECT_TRUE(status.ok() || absl::IsAborted(status) || absl::IsUnavailable(status)) << status;
    aborted += absl::IsAborted(status) ? 1 : 0;
    // Registering can meet that end as well, when the client has not noticed it yet.
    absl::StatusOr<std::uint64_t> registration;
    for (int attempt = 0; attempt < 1000; ++attempt) {
      registration = engine_->RegisterMemory(ns_, pages_->geometry);
      if (registration.ok()) break;
      const absl::Status& said = registration.status();
      ASSERT_TRUE(absl::IsAborted(said) || absl::IsUnavailable(said)) << said;
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    ASSERT_TRUE(registration.ok()) << registration.status();
    registration_ = *registration;
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
  // More of them when the scribbler did not get its turns.
  for (std::uint32_t round = 0;
       round < ShortOrLong(4u, 100u) || ((tiles == 0 || failed == 0) && round < 40); ++round) {
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

}  // namespace
}  // namespace kvmill::testing
