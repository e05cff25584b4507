// Blocks of real daemons pulled into a store of this process: whole or not at all, in time, and
// whatever the daemon does meanwhile.
#include "service/peer_pull.h"

#include <signal.h>

#include <future>
#include <optional>
#include <thread>

#include "absl/strings/escaping.h"
#include "service/heard_names.h"
#include "service/thread_loop.h"
#include "storage/core/run_link.h"
#include "tests/integration/lying_daemon.h"
#include "tests/integration/ucx_fixture.h"
#include "tests/long_form.h"

namespace kvmill::testing {
namespace {

using Statuses = absl::StatusOr<std::vector<absl::Status>>;
using Pages = std::map<std::tuple<std::uint32_t, int, std::uint32_t>, std::string>;

constexpr std::uint32_t kBlocks = 32;

class PeerPullTest : public UcxDaemonTest {
 protected:
  ~PeerPullTest() override {
    StopPulling();
    if (store_ == nullptr) return;
    EXPECT_EQ(store_->stats().copying_blocks, 0u);
    EXPECT_EQ(store_->stats().references, 0u);
  }

  // A daemon with the blocks of one run, and a store here without them.
  void Prepare(const NamespaceSpec& spec) {
    StartUcx({"--host-bytes", "128MiB"});
    Fill(spec);
    OpenStore(spec, 64 << 20);
  }
  void Fill(const NamespaceSpec& spec) {
    ns_ = Open("test", spec);
    Sequence sequence(ns_.spec, kBlocks * 64, 1);
    ASSERT_EQ(Put(ns_, "s", sequence).blocks_stored, kBlocks);
    keys_ = KeysOf("s", kBlocks);
    PageCollector collector;
    ASSERT_TRUE(client_->Fetch(ns_, keys_, collector).ok());
    truth_ = collector.pages;
    member_.id = "other";
    member_.address = ready_["listen"].get<std::string>();
    member_.incarnation = absl::HexStringToBytes(client_->Stat()->boot_id);
    member_.capacity_bytes = 1;
  }
  void OpenStore(NamespaceSpec spec, std::uint64_t bytes, bool same = true) {
    StopPulling();
    TieredStore::Options options;
    options.host_bytes = options.arena_bytes = bytes;
    options.prefault = false;
    store_ = *TieredStore::Create(options, SystemClock(), nullptr);
    spec.tenant = "default";
    const auto info = store_->OpenNamespace("here", spec);
    ASSERT_TRUE(info.ok()) << info.status();
    ASSERT_EQ(info->fingerprint == ns_.fingerprint, same);
    space_ = info->id;
  }
  void StartPulling(const PeerPull::Options& options = {},
                    const PeerClients::Options& clients = {}) {
    StopPulling();
    loop_ = std::make_unique<ThreadLoop>(SystemClock());
    loop_->Run([&] {
      clients_ = std::make_unique<PeerClients>(*loop_, clients);
      pull_ = std::make_unique<PeerPull>(*loop_, *store_, *clients_, options);
    });
  }
  void StopPulling() {
    if (loop_ != nullptr) loop_->Stop();
    pull_.reset();
    clients_.reset();
    loop_.reset();
  }

  RunKeys Run(std::vector<BlockKey> keys) const {
    RunKeys blocks;
    blocks.anchor = keys_[0];
    for (std::size_t i = 0; i < keys.size(); ++i) {
      blocks.places.push_back(static_cast<std::uint8_t>(i));
    }
    blocks.keys = std::move(keys);
    return blocks;
  }
  std::future<Statuses> StartPull(std::vector<BlockKey> keys, absl::Duration timeout) {
    const auto result = std::make_shared<std::promise<Statuses>>();
    told_ = std::make_shared<std::atomic<bool>>(false);
    loop_->Run([&] {
      const std::int64_t deadline =
          SystemClock().MonotonicNanos() + absl::ToInt64Nanoseconds(timeout);
      const auto within = std::make_shared<bool>(true);
      pull_->Pull(++last_call_, member_, ns_.fingerprint, Run(std::move(keys)), deadline,
                  [result, within, told = told_](Statuses statuses) {
                    EXPECT_FALSE(*within) << "not within the call";
                    EXPECT_FALSE(told->exchange(true));
                    result->set_value(std::move(statuses));
                  });
      *within = false;
    });
    return result->get_future();
  }
  Statuses Pull(std::vector<BlockKey> keys, absl::Duration timeout = absl::Seconds(60)) {
    return StartPull(std::move(keys), timeout).get();
  }
  static std::size_t CountOf(const Statuses& statuses, absl::StatusCode code) {
    if (!statuses.ok()) return 0;
    std::size_t count = 0;
    for (const absl::Status& status : *statuses) count += status.code() == code;
    return count;
  }

  // The blocks of keys_ that the store has, each compared with what the daemon has.
  std::size_t HeldAndRight() {
    std::size_t held = 0;
    for (std::uint32_t block = 0; block < keys_.size(); ++block) {
      if (store_->Lookup(space_, {keys_[block]}).hit_blocks == 0) continue;
      ++held;
      for (std::size_t group = 0; group < ns_.spec.groups.size(); ++group) {
        auto ref = store_->Fetch({space_, static_cast<std::uint8_t>(group), keys_[block]});
        EXPECT_TRUE(ref.ok()) << ref.status();
        if (!ref.ok()) continue;
        for (std::uint32_t layer = 0; layer < ref->pages().size(); ++layer) {
          PageCollector one;
          FetchSink::PageId id;
          id.block = block;
          id.group = static_cast<std::uint8_t>(group);
          id.layer_index = layer;
          EXPECT_TRUE(one.OnPage(id, *PageView::Parse(ref->pages()[layer])).ok());
          EXPECT_TRUE(one.pages.begin()->second == truth_.at(one.pages.begin()->first))
              << "block " << block << " group " << group << " layer " << layer;
        }
      }
    }
    return held;
  }
  std::uint64_t HostUsedBytes() const {
    return store_->stats().tiers[static_cast<std::size_t>(Tier::kHost)].used_bytes;
  }
  // Nothing is in flight, and all memory that is used is that of blocks.
  void ExpectNothingLeaks() {
    EXPECT_TRUE(Eventually([&] {
      return store_->stats().copying_blocks == 0 && pull_->stats().blocks_in_flight == 0 &&
             pull_->stats().bytes_in_flight == 0;
    })) << store_->stats().copying_blocks
        << " copies, " << pull_->stats().blocks_in_flight << " blocks in flight";
    ASSERT_TRUE(store_->Clear(space_).ok());
    EXPECT_EQ(HostUsedBytes(), 0u);
  }
  std::uint64_t BytesOut(const std::string& path) {
    const absl::StatusOr<ServerStat> stat = client_->Stat();
    EXPECT_TRUE(stat.ok()) << stat.status();
    if (!stat.ok()) return 0;
    for (const TransferUsage& usage : stat->transfers) {
      if (usage.path == path) return usage.bytes_out;
    }
    return 0;
  }

  ClientNamespace ns_;
  std::vector<BlockKey> keys_;
  Pages truth_;
  Member member_;
  std::unique_ptr<TieredStore> store_;
  NamespaceId space_ = 0;
  std::unique_ptr<ThreadLoop> loop_;
  std::unique_ptr<PeerClients> clients_;
  std::unique_ptr<PeerPull> pull_;
  Peers::CallId last_call_ = 0;
  std::shared_ptr<std::atomic<bool>> told_;  // Whether the last pull ended.
};

// Copies for others must not wait as if there were no room.
TEST_F(PeerPullTest, ATenantAtItsQuotaGetsNothingAndSoItIsSaid) {
  Prepare(SmallSpec());
  StartPulling();
  ASSERT_TRUE(store_->SetQuotas({{"default", {.hard_bytes = 1}}}).ok());
  const Statuses refused = Pull(keys_);
  ASSERT_TRUE(refused.ok()) << refused.status();
  EXPECT_EQ(CountOf(refused, absl::StatusCode::kFailedPrecondition), kBlocks);
  EXPECT_EQ(HostUsedBytes(), 0u);
  ASSERT_TRUE(store_->SetQuotas({}).ok());
  EXPECT_EQ(CountOf(Pull(keys_), absl::StatusCode::kOk), kBlocks);
}

TEST_F(PeerPullTest, BlocksComeWholeOverUcxAndInline) {
  Prepare(TwoGroups(""));
  for (const DataPath path : {DataPath::kUcx, DataPath::kInline, DataPath::kAuto}) {
    PeerPull::Options options;
    options.batch_bytes = 100'000;  // Several batches.
    StartPulling(options, {.path = path});
    const std::string way = path == DataPath::kInline ? "inline" : "ucx";
    const std::uint64_t before = BytesOut(way);
    std::vector<BlockKey> keys = keys_;
    keys.resize(kBlocks - 1);
    keys.push_back(KeyOf("nobody has it", 1));
    const Statuses statuses = Pull(keys);
    ASSERT_TRUE(statuses.ok()) << statuses.status();
    ASSERT_EQ(statuses->size(), kBlocks);
    EXPECT_EQ(CountOf(statuses, absl::StatusCode::kOk), kBlocks - 1) << statuses->front();
    EXPECT_TRUE(absl::IsNotFound(statuses->back())) << statuses->back();
    EXPECT_EQ(HeldAndRight(), kBlocks - 1);
    EXPECT_GT(BytesOut(way), before);
    EXPECT_EQ(pull_->stats().blocks, kBlocks - 1);
    EXPECT_EQ(pull_->stats().missing_blocks, 1u);
    EXPECT_GT(pull_->stats().bytes, HostUsedBytes() / 2);
    EXPECT_LE(pull_->stats().bytes, HostUsedBytes());
    // What is here already is OK, and stays.
    EXPECT_EQ(CountOf(Pull(keys_), absl::StatusCode::kOk), kBlocks);
    EXPECT_EQ(HeldAndRight(), kBlocks);
    ExpectNothingLeaks();
  }
}

TEST_F(PeerPullTest, WhoIsAskedMustBeWhoIsMeant) {
  Prepare(SmallSpec());
  StartPulling();
  const Member right = member_;
  member_.incarnation[3] = static_cast<char>(member_.incarnation[3] ^ 1);
  Statuses statuses = Pull(keys_);
  EXPECT_TRUE(IsReplaced(statuses.status())) << statuses.status();
  EXPECT_NE(statuses.status().message().find("answers incarnation"), absl::string_view::npos);
  member_.address = "127.0.0.1:1";
  statuses = Pull(keys_);
  EXPECT_TRUE(absl::IsUnavailable(statuses.status())) << statuses.status();
  member_.address = "nowhere";
  EXPECT_TRUE(absl::IsUnavailable(Pull(keys_).status()));
  EXPECT_EQ(HeldAndRight(), 0u);

  member_ = right;
  EXPECT_EQ(CountOf(Pull(keys_), absl::StatusCode::kOk), kBlocks);
  // Another process with the same id at another address, as one that was moved; and the old one is
  // dropped when the view says so.
  Kill();
  StartUcx({"--host-bytes", "128MiB"});
  Fill(SmallSpec());
  ASSERT_NE(member_.address, right.address);
  ExpectNothingLeaks();
  loop_->Run([&] { clients_->Keep({member_}); });
  EXPECT_EQ(clients_->size(), 0u);
  EXPECT_EQ(CountOf(Pull(keys_), absl::StatusCode::kOk), kBlocks);
  EXPECT_EQ(HeldAndRight(), kBlocks);
  loop_->Run([&] { clients_->Keep({member_}); });
  EXPECT_EQ(clients_->size(), 1u);
  ExpectNothingLeaks();
}

TEST_F(PeerPullTest, RestartAtTheSameAddressIsAnotherPeer) {
  Prepare(SmallSpec());
  for (const DataPath path : {DataPath::kInline, DataPath::kUcx}) {
    OpenStore(SmallSpec(), 64 << 20);
    StartPulling({}, {.path = path});
    EXPECT_EQ(CountOf(Pull({keys_[0]}), absl::StatusCode::kOk), 1u);
    Kill();
    const std::string address = member_.address;
    Start({"--ucx", "127.0.0.1", "--listen", address, "--metrics", "127.0.0.1:0", "--insecure",
           "--host-bytes", "128MiB"});
    const Member before = member_;
    Fill(SmallSpec());
    member_ = before;
    // The first pull may meet the connection that broke; none succeeds.
    for (int i = 0; i < 3; ++i) {
      const Statuses statuses = Pull(keys_, absl::Seconds(5));
      EXPECT_FALSE(statuses.ok());
    }
    // Not even the blocks that came before it was known who sends them.
    EXPECT_EQ(HeldAndRight(), 1u);
    EXPECT_EQ(pull_->stats().blocks, 1u);
    member_.incarnation = absl::HexStringToBytes(client_->Stat()->boot_id);
    EXPECT_EQ(CountOf(Pull(keys_), absl::StatusCode::kOk), kBlocks);
    EXPECT_EQ(HeldAndRight(), kBlocks);
    ExpectNothingLeaks();
  }
}

TEST_F(PeerPullTest, NamespaceThatOneSideDoesNotKnow) {
  Prepare(SmallSpec());
  StartPulling();
  NamespaceSpec other = SmallSpec();
  other.model = "unknown there";
  other.tenant = "default";
  ns_.fingerprint = store_->OpenNamespace("only-here", other)->fingerprint;
  const Statuses statuses = Pull(keys_);
  ASSERT_TRUE(statuses.ok()) << statuses.status();
  EXPECT_EQ(CountOf(statuses, absl::StatusCode::kNotFound), kBlocks);
  ns_.fingerprint[0] ^= std::byte{1};
  EXPECT_EQ(CountOf(Pull(keys_), absl::StatusCode::kNotFound), kBlocks);
  EXPECT_TRUE(absl::IsInvalidArgument(Pull({}).status()));
  EXPECT_TRUE(absl::IsDeadlineExceeded(Pull(keys_, absl::ZeroDuration()).status()));
}

TEST_F(PeerPullTest, NamespaceIsLearnedFromThePeer) {
  Prepare(TwoGroups(""));
  NamespaceSpec spec = TwoGroups("");
  spec.model = "another";
  spec.tenant = "default";
  OpenStore(spec, 64 << 20, false);
  // What engines here call "test" is their own business.
  ASSERT_TRUE(store_->OpenNamespace("test", spec).ok());
  StartPulling();
  std::vector<std::future<Statuses>> pulls;
  for (int i = 0; i < 3; ++i) pulls.push_back(StartPull(keys_, absl::Seconds(60)));
  for (auto& pull : pulls) EXPECT_EQ(CountOf(pull.get(), absl::StatusCode::kOk), kBlocks);
  const auto learned = store_->FindNamespace("default", ns_.fingerprint);
  ASSERT_TRUE(learned.ok()) << learned.status();
  EXPECT_EQ(learned->name, NameOfHeard(ns_.fingerprint, ns_.name));
  spec.model = ns_.spec.model;
  EXPECT_EQ(store_->OpenNamespace("mine", spec)->id, learned->id);
  space_ = learned->id;
  EXPECT_EQ(HeldAndRight(), kBlocks);
  ExpectNothingLeaks();
}

TEST_F(PeerPullTest, DeadDaemonEndsThePullAndAStoppedOneTheDeadline) {
  Prepare(TwoGroups(""));
  PeerPull::Options options;
  options.batch_bytes = 1;  // A block a batch.
  options.peer.blocks = 2;
  for (const DataPath path : {DataPath::kUcx, DataPath::kInline}) {
    StartPulling(options, {.path = path});
    // Stopped in the middle, now and then before a block or after all of them.
    bool in_the_middle = false;
    for (int i = 0; i < 20 && !in_the_middle; ++i) {
      ASSERT_TRUE(store_->Clear(space_).ok());
      const std::uint64_t before = pull_->stats().blocks;
      const auto begin = std::chrono::steady_clock::now();
      std::future<Statuses> pulled = StartPull(keys_, absl::Milliseconds(700));
      while (pull_->stats().blocks < before + 2 &&
             pulled.wait_for(std::chrono::seconds(0)) != std::future_status::ready) {
      }
      daemon_->Signal(SIGSTOP);
      const Statuses statuses = pulled.get();
      const auto took = std::chrono::steady_clock::now() - begin;
      EXPECT_LT(took, std::chrono::seconds(5));
      in_the_middle = absl::IsDeadlineExceeded(statuses.status());
      if (in_the_middle) {
        EXPECT_LT(HeldAndRight(), kBlocks);
      } else {
        EXPECT_EQ(CountOf(statuses, absl::StatusCode::kOk), kBlocks) << statuses.status();
      }
      daemon_->Signal(SIGCONT);
    }
    EXPECT_TRUE(in_the_middle);
    ExpectNothingLeaks();
    EXPECT_EQ(CountOf(Pull(keys_), absl::StatusCode::kOk), kBlocks) << "it goes on afterwards";
    EXPECT_EQ(HeldAndRight(), kBlocks);
  }
  // Killed while it is stopped with calls of ours: the pull does not wait for its deadline.
  ASSERT_TRUE(store_->Clear(space_).ok());
  daemon_->Signal(SIGSTOP);
  std::future<Statuses> pulled = StartPull(keys_, absl::Seconds(60));
  EXPECT_TRUE(Eventually([&] { return pull_->stats().blocks_in_flight > 0; }));
  const auto begin = std::chrono::steady_clock::now();
  Kill();
  const Statuses statuses = pulled.get();
  EXPECT_TRUE(absl::IsUnavailable(statuses.status())) << statuses.status();
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(20));
  EXPECT_EQ(HeldAndRight(), 0u);
  ExpectNothingLeaks();
}

TEST_F(PeerPullTest, LiesAreDroppedBlockByBlock) {
  Prepare(SmallSpec());
  const std::uint64_t seed = SeedArgument();
  LyingDaemon liar(socket(), member_.address, directory_ / "liar.sock", seed);
  const Member honest = member_;
  member_.address = liar.tcp_address();
  StartPulling({}, {.path = DataPath::kInline});
  std::size_t whole = 0;
  std::size_t damaged = 0;
  // One reply in four is a lie, and few of those leave all but a page as it was.
  const int rounds = ShortOrLong(100, 5000);
  for (int i = 0; i < rounds || (damaged == 0 && i < 5000); ++i) {
    const auto begin = std::chrono::steady_clock::now();
    const Statuses statuses = Pull({keys_[0]}, absl::Milliseconds(400));
    EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(10));
    whole += CountOf(statuses, absl::StatusCode::kOk);
    damaged += CountOf(statuses, absl::StatusCode::kDataLoss);
    const std::size_t held = HeldAndRight();
    EXPECT_GE(held, CountOf(statuses, absl::StatusCode::kOk));
    ASSERT_TRUE(store_->Remove(space_, keys_).ok());
  }
  EXPECT_GT(liar.lies(), 10u);
  EXPECT_GT(whole, 0u);
  EXPECT_GT(damaged, 0u) << "none of " << liar.lies() << " lies was about a page";
  EXPECT_GE(pull_->stats().damaged_blocks, damaged);
  ExpectNothingLeaks();
  member_ = honest;
  EXPECT_EQ(CountOf(Pull(keys_), absl::StatusCode::kOk), kBlocks);
}

TEST_F(PeerPullTest, BoundsHoldAndEverybodyIsServed) {
  Prepare(SmallSpec());
  PeerPull::Options options;
  options.batch_bytes = 1;
  options.peer.blocks = 3;
  options.all.blocks = 2;
  options.calls_max = 40;
  StartPulling(options);
  std::vector<std::future<Statuses>> pulls;
  for (std::uint32_t i = 0; i < 40; ++i) {
    pulls.push_back(StartPull({keys_[i % kBlocks], keys_[(i + 1) % kBlocks]}, absl::Seconds(60)));
  }
  const Statuses more = Pull({keys_[0]});
  std::uint64_t most = 0;
  for (auto& pull : pulls) {
    while (pull.wait_for(std::chrono::microseconds(50)) != std::future_status::ready) {
      most = std::max(most, pull_->stats().blocks_in_flight);
    }
    EXPECT_EQ(CountOf(pull.get(), absl::StatusCode::kOk), 2u);
  }
  EXPECT_LE(most, 2u);
  EXPECT_TRUE(more.ok() || absl::IsResourceExhausted(more.status())) << more.status();
  EXPECT_EQ(HeldAndRight(), kBlocks);
  ExpectNothingLeaks();
}

TEST_F(PeerPullTest, FullStoreIsAStatusOfBlocks) {
  Prepare(SmallSpec());
  OpenStore(SmallSpec(), 4 << 20);
  StartPulling();
  std::vector<BlockRef> held;
  ASSERT_EQ(CountOf(Pull(keys_), absl::StatusCode::kOk), kBlocks);
  const std::uint64_t block_bytes = HostUsedBytes() / kBlocks;
  const std::uint64_t capacity =
      store_->stats().tiers[static_cast<std::size_t>(Tier::kHost)].capacity_bytes;
  for (const BlockKey& key : keys_) held.push_back(*store_->Fetch({space_, 0, key}));
  // All but four blocks of the rest: copies that nobody finishes.
  std::vector<BlockCopy> copies;
  std::vector<std::uint32_t> sizes;
  for (const auto& page : held[0].pages()) sizes.push_back(static_cast<std::uint32_t>(page.size()));
  for (std::uint64_t n = 0; capacity - HostUsedBytes() > 4 * block_bytes; ++n) {
    auto copy = store_->BeginCopy({space_, 0, KeyOf("filler", static_cast<std::uint32_t>(n))},
                                  {.token_count = 64}, sizes, absl::ZeroDuration());
    if (!copy.ok()) break;
    copies.push_back(*std::move(copy));
  }
  Sequence sequence(ns_.spec, kBlocks * 64, 2);
  ASSERT_EQ(Put(ns_, "t", sequence).blocks_stored, kBlocks);
  const Statuses statuses = Pull(KeysOf("t", kBlocks));
  ASSERT_TRUE(statuses.ok()) << statuses.status();
  EXPECT_GT(CountOf(statuses, absl::StatusCode::kResourceExhausted), 20u);
  EXPECT_EQ(CountOf(statuses, absl::StatusCode::kResourceExhausted) +
                CountOf(statuses, absl::StatusCode::kOk),
            kBlocks);
  held.clear();
  copies.clear();
  EXPECT_EQ(HeldAndRight(), kBlocks);
  EXPECT_EQ(CountOf(Pull(KeysOf("t", kBlocks)), absl::StatusCode::kOk), kBlocks);
  ExpectNothingLeaks();
}

TEST_F(PeerPullTest, CancelledPullsAreSilentAndLeaveNothing) {
  Prepare(TwoGroups(""));
  for (int i = 0; i < 10; ++i) {
    PeerPull::Options options;
    options.batch_bytes = 1;
    options.peer.blocks = 2;
    StartPulling(options);
    const std::future<Statuses> first = StartPull(keys_, absl::Seconds(60));
    const auto told = told_;
    std::future<Statuses> second = StartPull(keys_, absl::Seconds(60));
    const Peers::CallId cancelled = last_call_ - 1;
    std::this_thread::sleep_for(std::chrono::milliseconds(i));
    bool had_ended = false;
    loop_->Run([&] {
      had_ended = told->load();
      pull_->Cancel(cancelled);
      pull_->Cancel(cancelled);
    });
    EXPECT_EQ(CountOf(second.get(), absl::StatusCode::kOk), kBlocks);
    EXPECT_EQ(told->load(), had_ended);
    EXPECT_EQ(HeldAndRight(), kBlocks);
    ExpectNothingLeaks();
    // The end of it all in the middle of a pull.
    std::future<Statuses> last = StartPull(keys_, absl::Seconds(60));
    std::this_thread::sleep_for(std::chrono::milliseconds(i));
    if (i % 2 == 0) {
      loop_->Run([&] { pull_.reset(); });
    }
    StopPulling();
    EXPECT_EQ(store_->stats().copying_blocks, 0u);
    ASSERT_TRUE(store_->Clear(space_).ok());
    EXPECT_EQ(HostUsedBytes(), 0u);
  }
}

TEST_F(PeerPullTest, ClientsAreBounded) {
  Prepare(SmallSpec());
  StartPulling({}, {.clients_max = 1});
  const Member right = member_;
  EXPECT_EQ(CountOf(Pull({keys_[0]}), absl::StatusCode::kOk), 1u);
  EXPECT_EQ(clients_->size(), 1u);
  member_.id = "nobody";
  member_.address = "127.0.0.1:1";
  EXPECT_TRUE(absl::IsUnavailable(Pull({keys_[0]}).status()));
  EXPECT_EQ(clients_->size(), 1u) << "the first one had to go";
  member_ = right;
  EXPECT_EQ(CountOf(Pull({keys_[1]}), absl::StatusCode::kOk), 1u);
}

TEST_F(PeerPullTest, IdleClientsGo) {
  Prepare(SmallSpec());
  StartPulling({}, {.idle_nanos = 50'000'000});
  EXPECT_EQ(CountOf(Pull({keys_[0]}), absl::StatusCode::kOk), 1u);
  EXPECT_TRUE(Eventually([&] { return clients_->size() == 0; }));
  EXPECT_EQ(CountOf(Pull({keys_[1]}), absl::StatusCode::kOk), 1u);
}

}  // namespace
}  // namespace kvmill::testing
