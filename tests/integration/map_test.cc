// Mapped blocks of a real daemon: what a reader sees, and what is left when it ends, in whichever
// way.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <fstream>
#include <memory>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/mapped_blocks.h"
#include "tests/integration/daemon_fixture.h"
#include "tests/integration/raw_reader.h"
#include "tests/long_form.h"

namespace kvmill::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::StartsWith;

class MapTest : public DaemonTest {
 protected:
  // Little memory: it is touched at every start.
  void Start(const std::vector<std::string>& more = {}) {
    std::vector<std::string> arguments = {"--host-bytes", "64MiB"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    DaemonTest::Start(arguments);
  }
  // Blocks 0 to count - 1 of sequence `name` in namespace "n".
  ClientNamespace Fill(const std::string& name, std::uint32_t count, std::uint32_t seed = 1) {
    const ClientNamespace ns = Open("n", SmallSpec());
    Sequence sequence(SmallSpec(), 64 * count, seed);
    EXPECT_EQ(Put(ns, name, sequence).blocks_stored, count);
    return ns;
  }
  Client::MappedPtr Map(const ClientNamespace& ns, const std::vector<BlockKey>& keys,
                        absl::Duration lease = absl::Seconds(30)) {
    auto mapped = client_->Map(ns, keys, {.lease = lease});
    EXPECT_TRUE(mapped.ok()) << mapped.status();
    return mapped.ok() ? *std::move(mapped) : nullptr;
  }
  // As PageCollector has it: kinds and contents of all heads.
  static std::string PageBytes(const MappedBlocks& mapped, std::size_t block, std::size_t layer) {
    const auto page = mapped.Page(block, 0, layer);
    EXPECT_TRUE(page.ok()) << page.status();
    if (!page.ok()) return "";
    std::string bytes;
    for (std::size_t head = 0; head < page->head_count(); ++head) {
      bytes.push_back(static_cast<char>(page->slot(head).kind));
      const auto contents = page->contents(head);
      bytes.append(reinterpret_cast<const char*>(contents.data()), contents.size());
    }
    return bytes;
  }
  bool WaitIdle() {
    return WaitForStat([](const ServerStat& s) { return s.leases == 0 && s.sessions == 0; });
  }
  std::uint64_t HostUsedBytes() { return client_->Stat()->tiers[0].used_bytes; }
};

TEST_F(MapTest, MappedPagesAreTheBytesThatAFetchBrings) {
  Start();
  const ClientNamespace ns = Fill("s", 6);
  PageCollector fetched;
  ASSERT_TRUE(client_->Fetch(ns, KeysOf("s", 6), fetched).ok());
  std::vector<BlockKey> keys = KeysOf("s", 6);
  keys.push_back(KeyOf("absent", 0));
  const auto mapped = Map(ns, keys);
  ASSERT_NE(mapped, nullptr);
  EXPECT_EQ(mapped->block_count(), 7u);
  for (std::size_t b = 0; b < 6; ++b) {
    ASSERT_TRUE(mapped->status(b).ok()) << mapped->status(b);
    EXPECT_EQ(mapped->token_count(b), 64u);
    EXPECT_EQ(mapped->tier(b), Tier::kHost);
    for (std::size_t layer = 0; layer < 2; ++layer) {
      EXPECT_EQ(
          PageBytes(*mapped, b, layer),
          (fetched.pages[{static_cast<std::uint32_t>(b), 0, static_cast<std::uint32_t>(layer)}]));
    }
  }
  EXPECT_TRUE(absl::IsNotFound(mapped->status(6)));
  EXPECT_TRUE(absl::IsNotFound(mapped->Page(6, 0, 0).status()));
  EXPECT_FALSE(mapped->Page(0, 0, 2).ok());
  EXPECT_TRUE(mapped->Check().ok()) << mapped->Check();
  EXPECT_TRUE(mapped->VerifyContents().ok()) << mapped->VerifyContents();
  EXPECT_EQ(client_->Stat()->leases, 6u);
  EXPECT_EQ(client_->Stat()->sessions, 1u);
  EXPECT_EQ(*client_->Touch(ns, keys), 6u);
}

TEST_F(MapTest, ContinuationsOfOneParentAreMappedApart) {
  Start();
  const ClientNamespace ns = Fill("s", 1);
  std::vector<BlockKey> keys;
  std::vector<std::string> values;
  for (const std::uint32_t seed : {7u, 8u}) {
    const std::string name = absl::StrCat("continuation", seed);
    Sequence sequence(SmallSpec(), 64 + 20, seed);
    StoreBlock tail = sequence.Blocks(name)[1];
    tail.parent = KeyOf("s", 0);
    const auto stored = client_->Store(ns, {&tail, 1}, {});
    ASSERT_TRUE(stored.ok()) << stored.status();
    ASSERT_EQ(stored->blocks[0].outcome, StoreOutcome::kStored) << stored->blocks[0].status;
    const auto found = client_->Lookup(ns, KeysOf("s", 1), {{KeyOf(name, 1), 20, 1}});
    ASSERT_EQ(found->tail_tokens, 20u);
    keys.push_back(found->tail_key);
    // Layer 1, head 0: K, then V.
    std::string& bytes = values.emplace_back();
    for (const bool value : {false, true}) {
      for (std::uint32_t token = 64; token < 64 + 20; ++token) {
        const auto* row = reinterpret_cast<const char*>(&sequence.At(1, value, token, 0, 0));
        bytes.append(row, 2 * 64);
      }
    }
  }
  const auto mapped = Map(ns, keys);
  ASSERT_NE(mapped, nullptr);
  for (std::size_t b = 0; b < 2; ++b) {
    const auto page = mapped->Page(b, 0, 1);
    ASSERT_TRUE(page.ok()) << page.status();
    const auto contents = page->contents(0);
    EXPECT_TRUE(std::string(reinterpret_cast<const char*>(contents.data()), contents.size()) ==
                values[b])
        << b;
  }
  EXPECT_NE(values[0], values[1]);
  EXPECT_TRUE(mapped->Check().ok()) << mapped->Check();
}

TEST_F(MapTest, AttentionInPlaceIsThatOverPrivateCopies) {
  Start();
  const NamespaceSpec spec = SmallSpec();
  const ClientNamespace ns = Open("n", spec);
  Sequence sequence(spec, 64 * 5 + 23, 3);  // A tail as well.
  ASSERT_EQ(Put(ns, "s", sequence).blocks_stored, 6u);
  std::vector<BlockKey> keys = KeysOf("s", 5);
  keys.push_back(TailKey(KeyOf("s", 4), 23, KeyOf("s", 5)));
  const auto mapped = Map(ns, keys);
  ASSERT_NE(mapped, nullptr);
  const std::uint32_t heads = spec.groups[0].kv_heads;
  std::vector<AttentionBlock> table(5 * heads);
  ASSERT_TRUE(FillAttentionBlocks(*mapped, 0, 1, 0, 5, absl::MakeSpan(table)).ok());
  EXPECT_FALSE(FillAttentionBlocks(*mapped, 0, 1, 0, 6, absl::MakeSpan(table)).ok()) << "too small";
  table.resize(6 * heads);
  EXPECT_THAT(FillAttentionBlocks(*mapped, 0, 1, 0, 6, absl::MakeSpan(table)).ToString(),
              HasSubstr("block 5 is a tail of 23 tokens"));
  const auto tail = MappedTail::Create(*mapped, 0, 1, 5);
  ASSERT_TRUE(tail.ok()) << tail.status();
  EXPECT_EQ(tail->token_count(), 23u);

  const auto attend = [&](const AttentionBlock* blocks, const TailHead* tail_heads) {
    AttentionSequence s;
    s.blocks = blocks;
    s.block_count = 5;
    s.tail = tail_heads;
    s.token_end = 64 * 5 + 23;
    s.query_position = s.token_end - 1;
    AttentionArgs args;
    args.shape.format = FormatOf(spec, spec.groups[0]);
    args.shape.q_heads = args.shape.kv_heads = heads;
    args.shape.scale = 0.125f;
    args.shape.raw = PackedRawLayout(args.shape.format, spec.source_dtype, 64);
    args.sequences = absl::MakeConstSpan(&s, 1);
    std::vector<float> query(heads * 64);
    for (std::size_t i = 0; i < query.size(); ++i) query[i] = 0.01f * static_cast<float>(i % 97);
    std::vector<float> output(query.size());
    args.query = query.data();
    args.output = output.data();
    EXPECT_TRUE(ValidateAttention(args).ok()) << ValidateAttention(args);
    std::vector<std::byte> scratch(AttentionScratchBytes(args, 1) + 64);
    const std::size_t off = reinterpret_cast<std::uintptr_t>(scratch.data()) % 64;
    AttentionCpu(args, {}, absl::MakeSpan(scratch).subspan(64 - off));
    return output;
  };
  const std::vector<float> in_place = attend(table.data(), tail->heads());
  ASSERT_TRUE(mapped->Check().ok());
  // Copies of the same records.
  std::vector<std::vector<std::byte>> copies;
  std::vector<AttentionBlock> copied(table.begin(), table.begin() + 5 * heads);
  for (AttentionBlock& block : copied) {
    ASSERT_EQ(block.kind, BlockKind::kTile);
    copies.emplace_back(block.data, block.data + RecordBytes(FormatOf(spec, spec.groups[0])));
    block.data = copies.back().data();
  }
  EXPECT_EQ(attend(copied.data(), tail->heads()), in_place);
  EXPECT_NE(in_place[3], 0.0f);
}

TEST_F(MapTest, LeasesEndWithTheMappingAndSessionsWithTheClient) {
  Start();
  const ClientNamespace ns = Fill("s", 4);
  {
    const auto reader = Connect(absl::StrCat("unix:", socket()));
    auto one = reader->Map(ns, KeysOf("s", 4));
    auto two = reader->Map(ns, KeysOf("s", 2));
    ASSERT_TRUE(one.ok() && two.ok());
    EXPECT_EQ(client_->Stat()->leases, 6u);
    EXPECT_EQ(client_->Stat()->sessions, 1u) << "one of a client";
    two->reset();
    EXPECT_TRUE(WaitForStat([](const ServerStat& s) { return s.leases == 4; }));
    EXPECT_TRUE((*one)->Check().ok());
    EXPECT_EQ(client_->List("n")->front().leases, 1u);
  }
  EXPECT_TRUE(WaitIdle());
  // The other way round: the mapping outlives its client, and knows.
  auto reader = Connect(absl::StrCat("unix:", socket()));
  auto left = reader->Map(ns, KeysOf("s", 4));
  ASSERT_TRUE(left.ok());
  reader.reset();
  EXPECT_TRUE(absl::IsAborted((*left)->Check())) << (*left)->Check();
  EXPECT_TRUE(WaitIdle());
}

TEST_F(MapTest, AReaderPastItsLeaseIsToldAndARenewedOneIsNot) {
  Start();
  const ClientNamespace ns = Fill("s", 3);
  const auto late = Map(ns, KeysOf("s", 3), absl::Milliseconds(300));
  ASSERT_NE(late, nullptr);
  // A machine that stands still may let the first lease end before it is renewed.
  Client::MappedPtr renewed;
  absl::Time first_end;
  absl::Status first = absl::UnknownError("not tried");
  for (int i = 0; i < 50 && !first.ok(); ++i) {
    renewed = Map(ns, KeysOf("s", 3), absl::Milliseconds(300));
    ASSERT_NE(renewed, nullptr);
    first_end = renewed->deadline();
    first = client_->Renew(*renewed, absl::Seconds(30));
  }
  ASSERT_TRUE(first.ok()) << first;
  while (absl::Now() <= std::max(first_end, late->deadline())) {
    absl::SleepFor(absl::Milliseconds(75));
    ASSERT_TRUE(client_->Renew(*renewed, absl::Seconds(30)).ok());
  }
  EXPECT_TRUE(renewed->Check().ok()) << renewed->Check();
  EXPECT_LE(late->deadline(), absl::Now());
  EXPECT_TRUE(absl::IsAborted(late->Check()));
  EXPECT_THAT(late->Check().ToString(), HasSubstr("ms ago"));
  EXPECT_TRUE(absl::IsAborted(late->Page(0, 0, 0).status()));
  EXPECT_TRUE(absl::IsAborted(client_->Renew(*late, absl::Seconds(1))));
  EXPECT_TRUE(WaitForStat([](const ServerStat& s) { return s.leases <= 3; }));
  const auto too_long = client_->Map(ns, KeysOf("s", 1), {.lease = absl::Seconds(61)});
  EXPECT_EQ(too_long.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(too_long.status().message()), HasSubstr("61000 ms, want 1 to 60000"));
  for (const absl::Duration lease : {absl::ZeroDuration(), absl::Hours(600)}) {
    EXPECT_THAT(client_->Map(ns, KeysOf("s", 1), {.lease = lease}).status().ToString(),
                HasSubstr(absl::StrCat("lease of ", absl::FormatDuration(lease),
                                       ", want 1ms to 596h31m23.648s")));
  }
}

TEST_F(MapTest, RemoveAndClearHideALeasedBlockNowAndFreeItLater) {
  Start();
  const ClientNamespace ns = Fill("s", 4);
  const std::uint64_t used = HostUsedBytes();
  EXPECT_GT(used, 0u);
  auto mapped = Map(ns, KeysOf("s", 4));
  ASSERT_NE(mapped, nullptr);
  const std::string before = PageBytes(*mapped, 0, 0) + PageBytes(*mapped, 3, 1);
  EXPECT_EQ(*client_->Remove(ns, {KeyOf("s", 0)}), 1u);
  EXPECT_EQ(*client_->Clear(ns), 3u);
  EXPECT_EQ(client_->Lookup(ns, KeysOf("s", 4))->hit_blocks, 0u);
  EXPECT_TRUE(absl::IsNotFound(Map(ns, {KeyOf("s", 0)})->status(0)));
  EXPECT_EQ(PageBytes(*mapped, 0, 0) + PageBytes(*mapped, 3, 1), before);
  EXPECT_TRUE(mapped->Check().ok());
  EXPECT_EQ(HostUsedBytes(), used);
  mapped.reset();
  EXPECT_TRUE(WaitForStat([](const ServerStat& s) { return s.tiers[0].used_bytes == 0; }));
}

TEST_F(MapTest, EvictionPassesByWhatIsLeased) {
  Start();
  const ClientNamespace ns = Fill("s", 16);
  const auto mapped = Map(ns, KeysOf("s", 16), absl::Seconds(60));
  ASSERT_NE(mapped, nullptr);
  std::vector<std::string> before;
  for (std::size_t b = 0; b < 16; ++b) before.push_back(PageBytes(*mapped, b, 1));
  Sequence more(SmallSpec(), 64 * 256, 100);
  for (std::uint32_t i = 0; i < 20; ++i) Put(ns, absl::StrCat("more", i), more);
  EXPECT_LT(client_->Stat()->blocks, 20 * 256u) << "more than fits";
  ASSERT_TRUE(client_->Evict(Tier::kHost, 0).ok());
  for (std::size_t b = 0; b < 16; ++b) EXPECT_EQ(PageBytes(*mapped, b, 1), before[b]);
  EXPECT_TRUE(mapped->Check().ok()) << mapped->Check();
  EXPECT_TRUE(mapped->VerifyContents().ok());
  EXPECT_EQ(client_->Lookup(ns, KeysOf("s", 16))->hit_blocks, 16u);
  EXPECT_EQ(client_->Lookup(ns, KeysOf("more19", 8))->hit_blocks, 0u);
}

TEST_F(MapTest, BlocksThatAreOnlyOnDiskAreLoadedFirst) {
  StartDurable();
  const ClientNamespace ns = Fill("s", 4);
  const auto warm = Map(ns, KeysOf("s", 4));
  const std::string before = PageBytes(*warm, 2, 1);
  ASSERT_TRUE(client_->Flush().ok());
  daemon_->Signal(SIGTERM);
  ASSERT_EQ(daemon_->WaitExit().code, 0) << daemon_->standard_error();
  EXPECT_TRUE(absl::IsAborted(warm->Check()));
  StartDurable();
  const auto mapped = Map(Open("n", SmallSpec()), KeysOf("s", 4));
  ASSERT_NE(mapped, nullptr);
  for (std::size_t b = 0; b < 4; ++b) EXPECT_EQ(mapped->tier(b), Tier::kDisk);
  EXPECT_EQ(PageBytes(*mapped, 2, 1), before);
  EXPECT_TRUE(mapped->VerifyContents().ok());
}

// Whether the process has a handler for the signal.
bool Catches(int pid, int signal) {
  std::ifstream file(absl::StrCat("/proc/", pid, "/status"));
  std::string word;
  std::uint64_t mask = 0;
  while (file >> word && word != "SigCgt:") {
  }
  file >> std::hex >> mask;
  EXPECT_TRUE(file.good());
  return ((mask >> (signal - 1)) & 1) != 0;
}

TEST_F(MapTest, AClientThatDiesLeavesNothing) {
  Start();
  const ClientNamespace ns = Fill("s", 8);
  const std::uint64_t used = HostUsedBytes();
  ASSERT_TRUE(WaitIdle());
  for (const char* command : {"map", "renew"}) {
    for (const int how : {SIGKILL, SIGTERM, SIGSEGV}) {
      const auto probe = Probe({command, "s", "8", "60000"}, 0);
      ASSERT_EQ(probe->ReadLine(), "mapped 8");
      EXPECT_EQ(client_->Stat()->leases, 8u);
      EXPECT_FALSE(Catches(probe->pid(), SIGSEGV)) << "a library's handler may hang";
      const absl::Time killed = absl::Now();
      probe->Signal(how);
      EXPECT_TRUE(WaitIdle()) << command << " " << how;
      EXPECT_LT(absl::Now() - killed, absl::Seconds(20)) << "much sooner than its leases end";
      probe->WaitExit();
    }
  }
  // Killed at any moment of coming in.
  for (int i = 0; i < ShortOrLong(12, 200); ++i) {
    const auto probe = Probe({"map", "s", "8", "60000"}, 0);
    usleep(static_cast<useconds_t>(i % 12) * 3000);
    probe->Signal(SIGKILL);
    probe->WaitExit();
  }
  EXPECT_TRUE(WaitIdle());
  EXPECT_EQ(HostUsedBytes(), used);
  EXPECT_EQ(*client_->Clear(ns), 8u);
  EXPECT_TRUE(WaitForStat([](const ServerStat& s) { return s.tiers[0].used_bytes == 0; }));
}

// Whether the process, a child of this one, has ended by itself.
bool HasEnded(const DaemonProcess& process) {
  siginfo_t info{};
  return waitid(P_PID, static_cast<id_t>(process.pid()), &info, WEXITED | WNOHANG | WNOWAIT) == 0 &&
         info.si_pid == process.pid();
}

TEST_F(MapTest, AStoppedReaderNeverTakesAnotherBlocksBytesForItsOwn) {
  Start();
  const ClientNamespace ns = Fill("s", 8);
  std::unique_ptr<DaemonProcess> probe;
  // A machine that stands still may let a lease end before it is renewed, and with it the reader.
  for (int lease_ms = 300; probe == nullptr; lease_ms *= 2) {
    ASSERT_LT(lease_ms, 10'000) << "no reader ever renewed its leases";
    probe = Probe({"renew", "s", "8", absl::StrCat(lease_ms)}, 0);
    const bool mapped = probe->ReadLine() == "mapped 8";
    probe->Signal(SIGSTOP);
    if (mapped && !HasEnded(*probe)) break;
    probe = nullptr;
    ASSERT_TRUE(WaitIdle());
  }
  EXPECT_TRUE(WaitForStat([](const ServerStat& s) { return s.leases == 0; }));
  EXPECT_EQ(client_->Stat()->sessions, 1u) << "stopped is not dead";
  EXPECT_EQ(*client_->Clear(ns), 8u);
  // Its memory becomes others' when the grace is over.
  EXPECT_TRUE(WaitForStat([](const ServerStat& s) { return s.tiers[0].used_bytes == 0; }));
  Sequence more(SmallSpec(), 64 * 64, 100);
  Put(ns, "more", more);
  probe->Signal(SIGCONT);
  EXPECT_THAT(probe->ReadLine(), StartsWith("ABORTED"));
  EXPECT_EQ(probe->WaitExit().code, static_cast<int>(absl::StatusCode::kAborted));
  EXPECT_TRUE(WaitIdle());
}

TEST_F(MapTest, ADaemonThatWasRestartedIsNoticedAndMappedAgain) {
  Start();
  ClientNamespace ns = Fill("s", 4);
  std::atomic<int> ended{0};
  Client::Options options;
  options.address = absl::StrCat("unix:", socket());
  options.timeout = absl::Seconds(30);
  options.on_session_event = [&](SessionEvent event, std::uint64_t) {
    if (event == SessionEvent::kEnded) ++ended;
  };
  const auto reader = *Client::Create(options);
  auto before = reader->Map(ns, KeysOf("s", 4));
  ASSERT_TRUE(before.ok()) << before.status();
  Kill();
  for (int i = 0; i < 6000 && (*before)->Check().ok(); ++i) usleep(5000);
  EXPECT_TRUE(absl::IsAborted((*before)->Check())) << (*before)->Check();
  Start();
  ns = Fill("s", 4);
  absl::StatusOr<Client::MappedPtr> after = absl::UnknownError("");
  for (int i = 0; i < 3000 && !after.ok(); ++i) {
    after = reader->Map(ns, KeysOf("s", 4));
    if (!after.ok()) usleep(10'000);
  }
  ASSERT_TRUE(after.ok()) << after.status();
  EXPECT_TRUE((*after)->Check().ok());
  EXPECT_TRUE((*after)->VerifyContents().ok());
  EXPECT_TRUE(absl::IsAborted((*before)->Check()));
  EXPECT_TRUE(WaitForStat([&](const ServerStat&) { return ended > 0; }));
  EXPECT_EQ(ended, 1);
}

TEST_F(MapTest, SessionsComeAndGoWithoutATrace) {
  Start();
  const ClientNamespace ns = Fill("s", 2);
  const auto cycle = [&](int count) {
    for (int i = 0; i < count; ++i) {
      const auto reader = Connect(absl::StrCat("unix:", socket()));
      const auto mapped = reader->Map(ns, KeysOf("s", 2));
      ASSERT_TRUE(mapped.ok()) << mapped.status();
      ASSERT_TRUE((*mapped)->Check().ok());
    }
    EXPECT_TRUE(WaitIdle());
  };
  cycle(20);
  absl::SleepFor(absl::Milliseconds(300));
  const int descriptors = daemon_->OpenDescriptors();
  const std::uint64_t resident = daemon_->ResidentKiB();
  cycle(ShortOrLong(150, 10'000));
  for (int i = 0; i < 3000 && daemon_->OpenDescriptors() > descriptors; ++i) usleep(10'000);
  EXPECT_LE(daemon_->OpenDescriptors(), descriptors);
  EXPECT_LT(daemon_->ResidentKiB(), resident + (16 << 10)) << "KiB";
}

TEST_F(MapTest, OnlyLocalClientsMapAndTheReasonIsSaid) {
  Start({"--listen", "127.0.0.1:0", "--insecure"});
  const ClientNamespace ns = Fill("s", 1);
  const auto remote = Connect(ready_["listen"]);
  const auto mapped = remote->Map(ns, KeysOf("s", 1));
  EXPECT_EQ(mapped.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(mapped.status().message()), HasSubstr("socket"));
}

// A child must neither read the parent's mappings nor end its leases.
TEST_F(MapTest, AForkedChildHasNoMapping) {
  Start();
  const ClientNamespace ns = Fill("s", 2);
  auto mapped = Map(ns, KeysOf("s", 2));
  ASSERT_NE(mapped, nullptr);
  const pid_t child = fork();
  if (child == 0) {
    const bool told = absl::IsFailedPrecondition(mapped->Check()) &&
                      absl::IsFailedPrecondition(mapped->Page(0, 0, 0).status());
    mapped.reset();
    _exit(told ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
  EXPECT_TRUE(mapped->Check().ok());
  EXPECT_EQ(client_->Stat()->leases, 2u);
}

TEST_F(MapTest, EnginesDescribeTheirMemoryAndEventsAreHeard) {
  Start({"--listen", "127.0.0.1:0", "--insecure"});
  const ClientNamespace ns = Open("n", SmallSpec());
  EngineGeometry geometry = SmallGeometry();
  for (const std::string& address :
       {absl::StrCat("unix:", socket()), ready_["listen"].get<std::string>()}) {
    std::atomic<int> draining{0};
    Client::Options options;
    options.address = address;
    options.on_session_event = [&](SessionEvent event, std::uint64_t) {
      if (event == SessionEvent::kDraining) ++draining;
    };
    const auto engine = *Client::Create(options);
    for (int i = 0; i < 100; ++i) {
      const auto registration = engine->RegisterMemory(ns, geometry);
      ASSERT_TRUE(registration.ok()) << registration.status();
      ASSERT_TRUE(engine->UnregisterMemory(*registration).ok());
      EXPECT_TRUE(absl::IsNotFound(engine->UnregisterMemory(*registration)));
    }
    EngineGeometry wrong = geometry;
    wrong.assembling_boot_id = "00";
    EXPECT_THAT(engine->RegisterMemory(ns, wrong).status().ToString(),
                HasSubstr("FAILED_PRECONDITION: assembling_boot_id 00: this daemon is"));
    wrong.assembling_boot_id = ready_["boot_id"];
    EXPECT_TRUE(engine->RegisterMemory(ns, wrong).ok());
    // That of the engine before ends soon.
    EXPECT_TRUE(WaitForStat([](const ServerStat& s) { return s.sessions == 1; }));
    if (address == ready_["listen"]) {
      ASSERT_TRUE(client_->Drain().ok());
      for (int i = 0; i < 6000 && draining == 0; ++i) usleep(5000);
      EXPECT_EQ(draining, 1);
    }
    // A remote session is closed on the way out: it need not wait for the grace.
  }
  EXPECT_TRUE(WaitIdle());
}

// --- Below the client library ---

TEST_F(MapTest, TheArenaCanBeReadAndNothingElse) {
  Start();
  const ClientNamespace ns = Fill("s", 2);
  RawReader reader(socket(), ns);
  const MapReplyContent content = reader.Map(ns.spec, KeysOf("s", 2));
  ASSERT_EQ(content.arenas.size(), 1u);
  const auto memory = reader.Arena(content.blocks[0].lease, content.arenas[0].id);
  ASSERT_TRUE(memory.ok()) << memory.status();
  const std::size_t bytes = memory->arena_bytes;
  const int reopened = open(absl::StrCat("/proc/self/fd/", memory->fd.get()).c_str(), O_RDWR);
  std::vector<int> fds = {memory->fd.get()};
  if (reopened >= 0) fds.push_back(reopened);
  for (const int fd : fds) {
    EXPECT_EQ(pwrite(fd, "x", 1, 0), -1);
    EXPECT_EQ(mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0), MAP_FAILED);
    EXPECT_EQ(ftruncate(fd, 0), -1);
    EXPECT_EQ(fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, 4096), -1);
    void* mapped = mmap(nullptr, bytes, PROT_READ, MAP_SHARED, fd, 0);
    ASSERT_NE(mapped, MAP_FAILED);
    EXPECT_EQ(mprotect(mapped, bytes, PROT_READ | PROT_WRITE), -1);
    munmap(mapped, bytes);
  }
  if (reopened >= 0) close(reopened);
}

TEST_F(MapTest, ArenasGoOnlyToThoseWhoHoldALeaseInThem) {
  if (geteuid() != 0) GTEST_SKIP() << "needs root to act as another user";
  Start({"--host-bytes", "256MiB"});  // An arena for each tenant.
  LetOthersIn();
  // A tenant with a lease of its own; another one who knows all numbers.
  EXPECT_EQ(Probe({"store", "s", "2"}, 65534)->ReadLine(), "stored 2");
  const auto owner = Probe({"renew", "s", "2", "60000"}, 65534);
  ASSERT_EQ(owner->ReadLine(), "mapped 2");
  const ClientNamespace ns = Fill("s", 2);
  RawReader reader(socket(), ns);
  const MapReplyContent content = reader.Map(ns.spec, KeysOf("s", 2));
  const ArenaId own = content.arenas[0].id;
  EXPECT_TRUE(reader.Arena(content.blocks[0].lease, own).ok());
  for (std::uint64_t lease = 0; lease < content.blocks[0].lease; ++lease) {
    for (std::uint32_t arena = 0; arena < 4; ++arena) {
      EXPECT_FALSE(reader.Arena(lease, {Tier::kHost, arena, 0}).ok());
    }
  }
  for (std::uint32_t arena = 0; arena < 8; ++arena) {
    if (arena == own.arena) continue;
    for (std::uint64_t epoch = 0; epoch < 2; ++epoch) {
      EXPECT_TRUE(absl::IsNotFound(
          reader.Arena(content.blocks[0].lease, {Tier::kHost, arena, epoch}).status()));
    }
  }
  EXPECT_FALSE(reader.Arena(content.blocks[0].lease, {Tier::kHost, own.arena, own.epoch + 1}).ok());
  EXPECT_FALSE(reader.Arena(content.blocks[0].lease, {Tier::kGpu, own.arena, own.epoch}).ok());
  // Nor to a client of the same user without the lease.
  RawReader neighbour(socket(), ns);
  EXPECT_FALSE(neighbour.Arena(content.blocks[0].lease, own).ok());
}

// Of the version before: they compare with the generations of the reply.
TEST_F(MapTest, ClientsThatDoNotLoadGenerationsAreToldThem) {
  Start();
  const ClientNamespace ns = Fill("s", 3);
  RawReader reader(socket(), ns);
  const std::vector<BlockKey> keys = KeysOf("s", 3);
  EXPECT_EQ(reader.RawMap(keys, PageMemory::kHost, true).generations_size(), 0);
  const v1::MapReply reply = reader.RawMap(keys, PageMemory::kHost, false);
  ASSERT_EQ(reply.generations_size(), 6) << "two layers a block";
  const auto content = ReadMapReply(reply, ns.spec, 3);
  ASSERT_TRUE(content.ok()) << content.status();
  ASSERT_EQ(content->arenas.size(), 1u);
  const auto memory = reader.Arena(content->blocks[0].lease, content->arenas[0].id);
  ASSERT_TRUE(memory.ok()) << memory.status();
  int page = 0;
  for (const MappedRun& run : content->runs) {
    for (std::uint32_t i = 0; i < run.page_count; ++i, ++page) {
      std::uint64_t word = 0;
      ASSERT_EQ(pread(memory->fd.get(), &word, sizeof(word),
                      static_cast<off_t>(run.page(i).generation_offset_bytes)),
                static_cast<ssize_t>(sizeof(word)));
      EXPECT_EQ(word, reply.generations(page));
      EXPECT_TRUE(word > 0 && word % 2 == 0) << word;
    }
  }
  EXPECT_EQ(page, 6);
}

// A lease that was over, and whose memory is another block's, before the reader came to look.
TEST_F(MapTest, AReaderWhoseFirstLookIsTooLateIsTold) {
  Start();
  const ClientNamespace ns = Fill("s", 4);
  const auto mapped = Map(ns, KeysOf("s", 4), absl::Milliseconds(200));
  ASSERT_NE(mapped, nullptr);
  EXPECT_TRUE(WaitForStat([](const ServerStat& s) { return s.leases == 0; }));
  EXPECT_EQ(*client_->Clear(ns), 4u);
  // When the grace is over.
  EXPECT_TRUE(WaitForStat([](const ServerStat& s) { return s.tiers[0].used_bytes == 0; }));
  Fill("more", 8, 100);
  for (std::size_t b = 0; b < 4; ++b) {
    EXPECT_TRUE(absl::IsAborted(mapped->Page(b, 0, 0).status())) << mapped->Page(b, 0, 0).status();
  }
  std::vector<AttentionBlock> table(2);
  EXPECT_TRUE(absl::IsAborted(FillAttentionBlocks(*mapped, 0, 1, 2, 1, absl::MakeSpan(table))));
  EXPECT_TRUE(absl::IsAborted(mapped->Check()));
}

TEST_F(MapTest, ACutStreamCostsALocalClientNothingAndItsDoorEverything) {
  Start();
  const ClientNamespace ns = Fill("s", 2);
  RawReader reader(socket(), ns);
  reader.Map(ns.spec, KeysOf("s", 2));
  reader.CutStream();
  absl::SleepFor(absl::Milliseconds(200));
  EXPECT_EQ(client_->Stat()->leases, 2u);
  EXPECT_EQ(client_->Stat()->sessions, 1u);
  EXPECT_EQ(reader.Map(ns.spec, KeysOf("s", 2)).blocks.size(), 2u);
  reader.LeaveDoor();
  EXPECT_TRUE(WaitIdle());
}

}  // namespace
}  // namespace kvmill::testing
