// The reference engine (engine.h) against a real daemon: layouts, tensor parallelism, pressure,
// faults of the daemon, and planted faults of the connector that the shadow model must see.
//
// The everyday form runs fixed seeds; KVMILL_LONG=1 adds random configurations. --seed=N moves all
// seeds. A failure prints the configuration and, with it, request and token.
#include "tests/engine/engine.h"

#include <gmock/gmock.h>
#include <httplib.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <thread>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "tests/integration/daemon_fixture.h"
#include "tests/long_form.h"

namespace kvmill::engine {
namespace {

using ::testing::IsEmpty;

std::uint64_t SeedOffset() {
  for (const std::string& arg : ::testing::internal::GetArgvs()) {
    if (arg.rfind("--seed=", 0) == 0) return std::stoull(arg.substr(7));
  }
  return 0;
}

std::string WorkerBinary() {
  char path[4096];
  const ssize_t length = readlink("/proc/self/exe", path, sizeof(path));
  const std::string self(path, length > 0 ? static_cast<std::size_t>(length) : 0);
  return self.substr(0, self.rfind('/')) + "/engine_worker";
}

class EngineTest : public testing::DaemonTest {
 protected:
  EngineConfig Config(std::uint64_t seed, const std::string& ns = "engine") {
    EngineConfig config;
    config.seed = seed + SeedOffset();
    config.namespace_name = ns;
    config.address = absl::StrCat("unix:", socket());
    return config;
  }

  // Runs the engine; prints what it did and records what the shadow model found.
  EngineReport Run(const EngineConfig& config, StoreModel* store, const OnStep& on_step = nullptr) {
    EngineReport report = RunEngine(config, WorkerBinary(), store, on_step);
    std::printf("seed %llu: %s\n", static_cast<unsigned long long>(config.seed),
                Describe(report).c_str());
    EXPECT_EQ(report.error, "") << Text(config);
    EXPECT_EQ(report.free_pages, config.page_count) << Text(config);
    EXPECT_EQ(report.connector.calls_started, report.connector.calls_done) << Text(config);
    EXPECT_EQ(report.scheduler.finished + report.scheduler.aborted, config.request_count);
    return report;
  }
  // A run in which nothing may be wrong.
  EngineReport RunClean(const EngineConfig& config, StoreModel* store,
                        const OnStep& on_step = nullptr) {
    EngineReport report = Run(config, store, on_step);
    EXPECT_THAT(report.violations, IsEmpty()) << Text(config);
    return report;
  }

  static std::string Text(const EngineConfig& config) { return nlohmann::json(config).dump(); }

  std::vector<std::string> Audit(const EngineConfig& config, StoreModel* store) {
    const ClientNamespace ns = Open(config.namespace_name, SpecOf(config.shape));
    return store->Audit(*client_, ns);
  }

  // What the store holds is right; and when it was told to forget it, nothing of it is left.
  // `complete`: no save failed, and nothing was removed while two ranks stored, so no block may be
  // waiting for heads. (Removed between the two, a block has the second one's half until the daemon
  // gives it up.)
  void ExpectRightAndNothingLeaked(const EngineConfig& config, StoreModel* store,
                                   bool complete = true) {
    EXPECT_THAT(Audit(config, store), IsEmpty()) << Text(config);
    if (complete) {
      EXPECT_EQ(Metric("kvmill_assembling_blocks"), 0) << Text(config);
    }
    const ClientNamespace ns = Open(config.namespace_name, SpecOf(config.shape));
    ASSERT_TRUE(client_->Clear(ns).ok());
    absl::StatusOr<ServerStat> stat = client_->Stat();
    // What the engine's clients held goes soon after them; sooner than its leases would end.
    const absl::Time deadline = absl::Now() + absl::Seconds(7);
    while (stat.ok() && stat->sessions + stat->leases + stat->pages != 0 &&
           absl::Now() < deadline) {
      usleep(5000);
      stat = client_->Stat();
    }
    ASSERT_TRUE(stat.ok()) << stat.status();
    EXPECT_EQ(stat->blocks, 0u);
    EXPECT_EQ(stat->pages, 0u);
    EXPECT_EQ(stat->leases, 0u);
    EXPECT_EQ(stat->checksum_failures, 0u);
    for (const TierUsage& tier : stat->tiers) {
      if (tier.tier == Tier::kHost && complete) {
        EXPECT_EQ(tier.used_bytes, 0u);
      }
      EXPECT_EQ(tier.blocks, 0u);
    }
  }

  double Metric(const std::string& name) {
    const std::string address = ready_["metrics"].get<std::string>();
    httplib::Client http("127.0.0.1", std::stoi(address.substr(address.rfind(':') + 1)));
    const auto reply = http.Get("/metrics");
    EXPECT_TRUE(reply);
    double value = -1;
    for (const absl::string_view line : absl::StrSplit(reply->body, '\n')) {
      if (absl::StartsWith(line, name + " ")) {
        EXPECT_TRUE(absl::SimpleAtod(line.substr(name.size() + 1), &value));
      }
    }
    return value;
  }

  void StartWithMetrics(const std::vector<std::string>& more = {}) {
    std::vector<std::string> arguments = {"--metrics", "127.0.0.1:0", "--host-bytes", "64MiB"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    Start(arguments);
  }
};

// Every layout writes what every other layout reads; fp16 and bf16; tiles, sink blocks, tails and
// heads that a tile cannot hold; continuations of one block whose tails are as long; loads while
// the request waits, and inside the step.
TEST_F(EngineTest, EveryPageOfEveryLayoutHoldsWhatItMust) {
  StartWithMetrics();
  std::uint64_t accepted = 0;
  std::uint64_t rejected = 0;
  std::uint64_t aborted = 0;
  for (int i = 0; i < kLayoutCount; ++i) {
    EngineConfig config = Config(10 + static_cast<std::uint64_t>(i), absl::StrCat("layout", i));
    config.layout = static_cast<Layout>(i);
    config.shape.bfloat16 = i % 2 == 1;
    config.shape.sink_blocks = i == 2 ? 1 : 0;
    config.shape.block_tokens = i == 3 ? 128 : 64;
    config.loads_in_step = i >= 3;
    config.tails = i == 1 || i == 4;
    StoreModel store(config.shape);
    const EngineReport cold = RunClean(config, &store);
    EXPECT_GT(cold.connector.stored_blocks, 0u);
    accepted += cold.scheduler.accepted_drafts;
    rejected += cold.scheduler.rejected_drafts;
    aborted += cold.scheduler.aborted;
    config.layout = static_cast<Layout>((i + 2) % kLayoutCount);
    const EngineReport warm = RunClean(config, &store);
    EXPECT_GT(warm.connector.loaded_blocks, 0u);
    EXPECT_GT(warm.scheduler.local_tokens, 0u);
    EXPECT_LT(warm.scheduler.computed_tokens, cold.scheduler.computed_tokens);
    EXPECT_EQ(warm.connector.failed_loads, 0u);
    ExpectRightAndNothingLeaked(config, &store);
    EXPECT_GT(store.audited_blocks(), 0u);
    if (config.tails) {
      EXPECT_GT(cold.connector.loaded_tails, 0u);
      EXPECT_GT(store.audited_rivals(), 0u);
    }
  }
  EXPECT_GT(accepted, 0u);
  EXPECT_GT(rejected, 0u);
  EXPECT_GT(aborted, 0u);
}

// Two processes with half the heads each make blocks that one process reads, and the other way
// round.
TEST_F(EngineTest, AnyNumberOfRanksReadsWhatAnyOtherWrote) {
  StartWithMetrics();
  for (const std::uint32_t writers : {1u, 2u}) {
    EngineConfig config = Config(20 + writers, absl::StrCat("ranks", writers));
    config.ranks = writers;
    config.layout = Layout::kHndTogether;
    config.tails = true;
    StoreModel store(config.shape);
    const EngineReport cold = RunClean(config, &store);
    EXPECT_EQ(cold.connector.failed_saves, 0u);
    config.ranks = 3 - writers;
    config.layout = Layout::kAllLayers;
    const EngineReport warm = RunClean(config, &store);
    EXPECT_GT(warm.connector.loaded_blocks, 0u);
    EXPECT_EQ(warm.connector.failed_loads, 0u);
    ExpectRightAndNothingLeaked(config, &store);
  }
}

// Blocks are mapped when a load begins and read from the daemon's memory when it is due, some steps
// later; meanwhile others remove them, and with short leases the daemon may give the memory away.
TEST_F(EngineTest, MappedBlocksAreReadInPlaceOrMissed) {
  StartWithMetrics();
  EngineConfig config = Config(110);
  config.layout = Layout::kHndApart;
  config.load_path = LoadPath::kMap;
  config.tails = true;
  StoreModel store(config.shape);
  RunClean(config, &store);
  config.ranks = 2;
  const EngineReport warm = RunClean(config, &store);
  EXPECT_GT(warm.connector.loaded_blocks, 0u);
  EXPECT_EQ(warm.connector.failed_loads, 0u);
  const ClientNamespace ns = Open(config.namespace_name, SpecOf(config.shape));
  std::uint64_t times = 0;
  const EngineReport disturbed =
      RunClean(config, &store, [&](std::uint64_t step, std::uint64_t loads) {
        if (step % 7 == 0 || (loads > 0 && ++times % 3 == 0)) {
          EXPECT_TRUE(client_->Clear(ns).ok());
        }
      });
  EXPECT_GT(disturbed.connector.failed_loads, 0u);
  config.lease_ms = 1;
  RunClean(config, &store);
  const EngineReport expired = RunClean(config, &store);
  EXPECT_GT(expired.connector.failed_loads, 0u);
  ExpectRightAndNothingLeaked(config, &store, /*complete=*/false);
}

// The daemon reads the engine's pages itself, each layer as it is computed; pages get another use
// only when it said that it does not read them.
TEST_F(EngineTest, PagesAreStoredWhereTheyAreLayerByLayer) {
  StartWithMetrics();
  for (int i = 0; i < kLayoutCount; ++i) {
    EngineConfig config = Config(120 + static_cast<std::uint64_t>(i), absl::StrCat("pages", i));
    config.store_path = StorePath::kPages;
    config.layout = static_cast<Layout>(i);
    config.shape.bfloat16 = i % 2 == 0;
    config.shape.sink_blocks = i == 1 ? 1 : 0;
    config.tails = i == 2;
    config.ranks = i == 3 ? 2 : 1;
    config.loads_in_step = i == 4;
    if (i != 2) {  // Pressure.
      config.page_count = 36;
      config.arrival_steps = 1;
    }
    StoreModel store(config.shape);
    const EngineReport cold = RunClean(config, &store);
    EXPECT_GT(cold.connector.stored_blocks, 0u);
    config.layout = static_cast<Layout>((i + 1) % kLayoutCount);
    const EngineReport warm = RunClean(config, &store);
    EXPECT_GT(warm.connector.loaded_blocks, 0u);
    ExpectRightAndNothingLeaked(config, &store, /*complete=*/false);
    EXPECT_GT(store.audited_blocks(), 0u);
  }
}

// Stopped in the middle of a read, or killed: the engine waits for its pages, or goes on at once.
TEST_F(EngineTest, PagesStayUntilADaemonThatStoppedOrDiedDoesNotReadThem) {
  StartWithMetrics();
  EngineConfig config = Config(130);
  config.store_path = StorePath::kPages;
  config.page_count = 40;
  config.arrival_steps = 1;
  config.lookup_ms = config.fetch_ms = config.store_ms = 150;
  StoreModel store(config.shape);
  std::thread waker;
  const EngineReport report = RunClean(config, &store, [&](std::uint64_t step, std::uint64_t) {
    if (step == 20) {
      daemon_->Signal(SIGSTOP);
      waker = std::thread([this] {
        std::this_thread::sleep_for(std::chrono::milliseconds(700));
        daemon_->Signal(SIGCONT);
      });
    }
    if (step == 45) {
      if (waker.joinable()) waker.join();
      Kill();
    }
    if (step == 48) StartWithMetrics();
  });
  if (waker.joinable()) waker.join();
  EXPECT_GT(report.connector.failed_saves, 0u);
  EXPECT_GT(report.connector.stored_blocks, 0u);
  EXPECT_THAT(Audit(config, &store), IsEmpty());
}

TEST_F(EngineTest, PreemptedRequestsComeBackFromTheStore) {
  StartWithMetrics();
  EngineConfig config = Config(31);
  config.page_count = 32;
  config.arrival_steps = 1;
  StoreModel store(config.shape);
  const EngineReport report = RunClean(config, &store);
  EXPECT_GT(report.scheduler.preempted, 5u);
  EXPECT_GT(report.connector.loaded_blocks, 0u);
  ExpectRightAndNothingLeaked(config, &store);
}

TEST_F(EngineTest, ARunRepeatsItself) {
  StartWithMetrics();
  std::vector<std::string> said;
  for (int run = 0; run < 2; ++run) {
    EngineConfig config = Config(41);
    config.page_count = 48;
    config.saves_in_step = true;
    StoreModel store(config.shape);
    EngineReport report = RunClean(config, &store);
    // Two saves of one block at once: which is told that the other was first is a race.
    report.connector.existing_blocks += report.connector.partial_blocks;
    report.connector.partial_blocks = 0;
    said.push_back(Describe(report));
    ExpectRightAndNothingLeaked(config, &store);
  }
  EXPECT_EQ(said[0], said[1]);
}

// Blocks vanish at any time, also between the lookup that found them and the load: the request is
// computed instead.
TEST_F(EngineTest, BlocksThatOthersRemoveAreMisses) {
  StartWithMetrics();
  for (const bool loads_in_step : {false, true}) {
    EngineConfig config = Config(50, loads_in_step ? "in-step" : "waiting");
    config.loads_in_step = loads_in_step;
    config.page_count = 64;
    StoreModel store(config.shape);
    RunClean(config, &store);
    const ClientNamespace ns = Open(config.namespace_name, SpecOf(config.shape));
    std::uint64_t times = 0;
    const EngineReport report = RunClean(config, &store, [&](std::uint64_t, std::uint64_t loads) {
      if (loads == 0) return;
      ++times;
      if (times == 2) {  // Every second block that ever was.
        std::vector<BlockKey> keys = store.keys();
        for (std::size_t i = 1; i < keys.size(); i += 2) keys[i / 2] = keys[i];
        keys.resize(keys.size() / 2);
        EXPECT_TRUE(client_->Remove(ns, keys).ok());
      } else if (times % 4 == 0) {
        EXPECT_TRUE(client_->Clear(ns).ok());
      }
    });
    EXPECT_GT(report.connector.failed_loads, 0u);
    EXPECT_GT(report.scheduler.recomputed_loads, 0u);
    ExpectRightAndNothingLeaked(config, &store);
  }
}

// One of two ranks dies while both store: what the other one stored is not found, since half of it
// is missing, and keeps nobody from storing it: the next engine completes it.
TEST_F(EngineTest, ARankThatDiesBlocksNoKey) {
  StartWithMetrics();
  EngineConfig config = Config(23);
  config.ranks = 2;
  config.abort_percent = 0;
  StoreModel store(config.shape);
  config.last_rank_dies_at = 30;
  const EngineReport broken = RunEngine(config, WorkerBinary(), &store);
  EXPECT_TRUE(absl::StrContains(broken.error, "gone")) << broken.error;
  EXPECT_THAT(broken.violations, IsEmpty());
  EXPECT_THAT(Audit(config, &store), IsEmpty());
  config.last_rank_dies_at = 0;
  const EngineReport next = RunClean(config, &store);
  EXPECT_EQ(next.connector.failed_saves, 0u);
  EXPECT_GT(next.connector.loaded_blocks, 0u) << "what was complete before is found";
  EXPECT_GT(next.connector.stored_blocks, 0u);
  // A block that this engine partly loaded it does not store: such halves time out in the daemon.
  ExpectRightAndNothingLeaked(config, &store, /*complete=*/false);
}

// Killed and started again in the middle, twice: without a disk everything is gone, with one the
// written blocks are found again.
TEST_F(EngineTest, AKilledDaemonCostsHitsAndNothingElse) {
  for (const bool disk : {false, true}) {
    std::vector<std::string> arguments;
    if (disk) {
      for (const std::string& more : {std::string("--data-dir"), directory_ / "data",
                                      std::string("--disk-bytes"), std::string("1GiB")}) {
        arguments.push_back(more);
      }
    }
    StartWithMetrics(arguments);
    EngineConfig config = Config(60);
    config.ranks = disk ? 2 : 1;
    config.lookup_ms = config.fetch_ms = config.store_ms = 500;
    StoreModel store(config.shape);
    const EngineReport report = RunClean(config, &store, [&](std::uint64_t step, std::uint64_t) {
      if (step == 25 || step == 50) Kill();
      if (step == 29 || step == 50) StartWithMetrics(arguments);
    });
    EXPECT_GT(report.connector.failed_saves + report.failed_lookups + report.connector.failed_loads,
              0u);
    const EngineReport warm = RunClean(config, &store);
    EXPECT_GT(warm.connector.loaded_blocks, 0u);
    // A rank's half of a block may wait for the other half, which died with a daemon.
    ExpectRightAndNothingLeaked(config, &store, /*complete=*/!disk);
    Kill();
  }
}

// Stopped for longer than the deadlines: every call in that time is a miss, and a store that is
// under way lets go of the engine's pages.
TEST_F(EngineTest, AStoppedDaemonIsAMiss) {
  StartWithMetrics();
  EngineConfig config = Config(70);
  config.page_count = 40;  // Preemption waits for saves in flight.
  config.arrival_steps = 1;
  config.lookup_ms = config.fetch_ms = config.store_ms = 150;
  StoreModel store(config.shape);
  RunClean(config, &store);
  std::thread waker;
  std::uint64_t times = 0;
  const EngineReport report = RunClean(config, &store, [&](std::uint64_t, std::uint64_t loads) {
    if (loads == 0 || ++times != 3) return;
    daemon_->Signal(SIGSTOP);
    waker = std::thread([this] {
      std::this_thread::sleep_for(std::chrono::milliseconds(900));
      daemon_->Signal(SIGCONT);
    });
  });
  ASSERT_TRUE(waker.joinable()) << "the daemon was never stopped";
  waker.join();
  EXPECT_GT(report.connector.failed_loads, 0u);
  ExpectRightAndNothingLeaked(config, &store, /*complete=*/false);
}

// A working set of several times the host tier, and a disk that does not hold it either.
TEST_F(EngineTest, TiersThatAreFarTooSmallOnlyCostHits) {
  StartWithMetrics({"--data-dir", directory_ / "data", "--disk-bytes", "32MiB"});
  EngineConfig config = Config(80);
  config.shape.layers = 8;
  config.shape.heads = 8;
  config.shape.head_dim = 128;
  config.shape.sink_blocks = 1000;  // A block is 2 MiB.
  config.request_count = 16;
  config.output_tokens_max = 12;
  StoreModel store(config.shape);
  const std::uint64_t rounds = ShortOrLong(3, 20);
  for (std::uint64_t round = 0; round < rounds; ++round) {
    config.seed = 80 + SeedOffset() + round / 2;
    RunClean(config, &store);
  }
  EXPECT_THAT(Audit(config, &store), IsEmpty());
  EXPECT_GT(Metric("kvmill_evicted_blocks_total{tier=\"host\",reason=\"capacity\"}"), 0);
}

// Somebody else's unfinished blocks fill the host tier, and cannot be evicted: the engine is told
// when to come back, goes on without, and stores again when there is room.
TEST_F(EngineTest, AFullStoreRefusesWithAHintAndTheEngineHoldsBack) {
  StartWithMetrics();
  NamespaceSpec spec = SpecOf({.layers = 8, .heads = 4, .head_dim = 128});
  spec.sink_blocks = 1000;
  const ClientNamespace other = Open("other", spec);
  testing::Sequence one(spec, 64, 1);
  std::vector<StoreBlock> blocks(80, one.Blocks("half")[0]);  // The same bytes under 80 keys.
  for (std::size_t i = 0; i < blocks.size(); ++i) blocks[i].key = KeyOf(i + 1);
  StoreOptions options;
  options.head_count = 2;
  const auto stored = client_->Store(other, blocks, options);
  ASSERT_TRUE(stored.ok()) << stored.status();
  ASSERT_GT(stored->blocks_failed, 0u) << "the tier is not full";

  EngineConfig config = Config(90);
  StoreModel store(config.shape);
  const EngineReport report = RunClean(config, &store);
  EXPECT_GT(report.connector.refused_blocks, 0u);
  EXPECT_EQ(report.connector.stored_blocks, 0u);
  EXPECT_EQ(report.connector.failed_saves, 0u);
  EXPECT_GT(report.scheduler.finished, 0u);
}

// --- Planted faults ---

class PlantedFaultTest : public EngineTest {
 protected:
  // One scenario in which every fault has its chance: pressure, shared prefixes, a store that
  // forgets while loads begin, two engines in a row. What the shadow model says.
  std::vector<std::string> Complaints(Fault fault, std::uint32_t ranks,
                                      StorePath path = StorePath::kCopy) {
    EngineConfig config = Config(3);
    config.fault = fault;
    config.ranks = ranks;
    config.store_path = path;
    config.page_count = 36;
    config.arrival_steps = 1;
    config.drafts = 6;
    config.abort_percent = 0;
    StoreModel store(config.shape);
    const ClientNamespace ns = Open(config.namespace_name, SpecOf(config.shape));
    std::vector<std::string> said;
    const auto audit = [&] {
      for (std::string& wrong : store.Audit(*client_, ns)) said.push_back(std::move(wrong));
    };
    // Each seed twice: with an empty store, and with what the first run left there.
    const std::uint64_t rounds = fault == Fault::kNone ? 2 : 8;
    for (std::uint64_t round = 0; round < rounds && said.empty(); ++round) {
      config.seed = 3 + SeedOffset() + round / 2;
      std::uint64_t times = 0;
      const EngineReport report = Run(config, &store, [&](std::uint64_t, std::uint64_t loads) {
        if (loads == 0 || ++times % 5 != 0) return;
        audit();
        EXPECT_TRUE(client_->Clear(ns).ok());
      });
      said.insert(said.begin(), report.violations.begin(), report.violations.end());
      audit();
    }
    EXPECT_TRUE(client_->Clear(ns).ok());
    return said;
  }
};

TEST_F(PlantedFaultTest, EveryFaultOfTheConnectorIsFound) {
  StartWithMetrics();
  EXPECT_THAT(Complaints(Fault::kNone, 1), IsEmpty());
  EXPECT_THAT(Complaints(Fault::kNone, 2), IsEmpty());
  EXPECT_THAT(Complaints(Fault::kNone, 1, StorePath::kPages), IsEmpty());
  for (int fault = 1; fault < kFaultCount; ++fault) {
    // Only a rank that has a part of the heads can take another's.
    const bool heads = static_cast<Fault>(fault) == Fault::kLoadsTheNextHead;
    const bool pages = static_cast<Fault>(fault) == Fault::kReusesPagesUnasked;
    const std::vector<std::string> said = Complaints(static_cast<Fault>(fault), heads ? 2 : 1,
                                                     pages ? StorePath::kPages : StorePath::kCopy);
    EXPECT_FALSE(said.empty()) << "fault " << fault;
    std::printf("fault %d: %zu complaints, the first: %s\n", fault, said.size(),
                said.empty() ? "" : said[0].c_str());
  }
}

// --- Random configurations ---

class RandomEngineTest : public EngineTest {
 protected:
  std::uint32_t Draw(std::uint64_t below) {
    bits_ = Mix(bits_);
    return static_cast<std::uint32_t>(bits_ % below);
  }
  bool OneIn(std::uint64_t n) { return Draw(n) == 0; }

  EngineConfig RandomConfig(std::uint64_t seed) {
    bits_ = seed + SeedOffset();
    EngineConfig config = Config(seed, absl::StrCat("random", seed));
    config.shape.bfloat16 = OneIn(2);
    config.shape.layers = static_cast<std::uint16_t>(2 + Draw(3));
    config.shape.head_dim = OneIn(3) ? 128 : 64;
    config.shape.block_tokens = OneIn(3) ? 128 : 64;
    config.shape.sink_blocks = Draw(3);
    config.page_count = 34 + Draw(100);  // One sequence has at most 33.
    config.loads_in_step = OneIn(2);
    config.saves_in_step = OneIn(4);
    config.tails = OneIn(2);
    config.drafts = Draw(6);
    config.arrival_steps = Draw(6);
    config.batch_tokens = 32 + Draw(200);
    config.chunk_tokens = 16 + Draw(100);
    config.batch_requests = 2 + Draw(8);
    Vary(&config);
    return config;
  }
  // What may differ between engines that share a namespace.
  void Vary(EngineConfig* config) {
    config->ranks = 1 + Draw(2);
    config->layout = static_cast<Layout>(Draw(kLayoutCount));
    config->load_path = OneIn(2) ? LoadPath::kMap : LoadPath::kFetch;
    config->store_path = OneIn(2) ? StorePath::kPages : StorePath::kCopy;
    config->lease_ms = OneIn(4) ? 1 + Draw(50) : 10'000;
  }

  std::vector<std::string> SmallTiers() {
    return {"--data-dir", directory_ / "data", "--disk-bytes", "64MiB"};
  }

 private:
  std::uint64_t bits_ = 0;
};

TEST_F(RandomEngineTest, WhileOthersClearAndEvict) {
  StartWithMetrics(SmallTiers());
  const std::uint64_t end = 1000 + ShortOrLong(2, 150);
  for (std::uint64_t seed = 1000; seed < end && !HasFailure(); ++seed) {
    EngineConfig config = RandomConfig(seed);
    std::uint32_t ranks = config.ranks;
    StoreModel store(config.shape);
    const ClientNamespace ns = Open(config.namespace_name, SpecOf(config.shape));
    const OnStep disturb = [&](std::uint64_t step, std::uint64_t loads) {
      if (loads > 0 && OneIn(6)) {
        EXPECT_TRUE(client_->Clear(ns).ok());
      }
      if (step % 40 == 0) {
        EXPECT_TRUE(client_->Evict(Tier::kHost, 0).ok());
      }
    };
    RunClean(config, &store, disturb);
    Vary(&config);
    ranks = std::max(ranks, config.ranks);
    RunClean(config, &store, disturb);
    ExpectRightAndNothingLeaked(config, &store, /*complete=*/ranks == 1);
  }
}

// The daemon dies in any step, with a disk or without; or stands still for longer than a deadline.
TEST_F(RandomEngineTest, WhileTheDaemonDiesAndStalls) {
  const std::uint64_t end = 5000 + ShortOrLong(1, 30);
  for (std::uint64_t seed = 5000; seed < end && !HasFailure(); ++seed) {
    EngineConfig config = RandomConfig(seed);
    config.lookup_ms = config.fetch_ms = config.store_ms = 200;
    const std::vector<std::string> arguments = OneIn(2) ? SmallTiers() : std::vector<std::string>();
    StartWithMetrics(arguments);
    StoreModel store(config.shape);
    std::uint64_t stopped_until = 0;  // Step.
    const OnStep disturb = [&](std::uint64_t step, std::uint64_t loads) {
      if (stopped_until != 0) {
        if (step < stopped_until) return;
        daemon_->Signal(SIGCONT);
        stopped_until = 0;
      } else if (OneIn(loads > 0 ? 8 : 60)) {
        Kill();
        StartWithMetrics(arguments);
      } else if (loads > 0 && OneIn(6)) {
        daemon_->Signal(SIGSTOP);
        stopped_until = step + 1 + Draw(6);
      }
    };
    for (int run = 0; run < 2; ++run) {
      RunClean(config, &store, disturb);
      daemon_->Signal(SIGCONT);
      stopped_until = 0;
      Vary(&config);
    }
    ExpectRightAndNothingLeaked(config, &store, /*complete=*/false);
    Kill();
  }
}

}  // namespace
}  // namespace kvmill::engine
