// What fetches, maps and stores cost as the number of pages grows: no log line a page, no
// allocation and no lock a page for fetches over UCX and maps, and what is known for the others.
// Daemon and client share this process, so that both sides are counted: every operator new, and
// every lock of a pthread mutex, which ours are. What UCX takes from malloc is not, nor is what it
// takes to look at the network: how often a loop looks while bytes are under way depends on how the
// threads get their turns.
#include <dlfcn.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <pthread.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "client/client.h"
#include "client/mapped_blocks.h"
#include "kernels/float16.h"
#include "service/config.h"
#include "service/node.h"
#include "service/running_config.h"
#include "storage/core/page_layout.h"
#include "storage/core/sha256.h"
#include "tests/count_allocations.h"
#include "tests/integration/daemon_process.h"
#include "tests/integration/engine_pages.h"

namespace {

std::atomic<std::uint64_t> locks{0};
// Of this thread since it looked at the network last; negative: it never did.
thread_local int locks_of_look = -1;
// What a look and the sleep after it take themselves. What is done for pages is done for many of
// them after one look, so a lock for each is far more.
constexpr int kLocksOfLook = 6;

void CountLock() {
  if (locks_of_look < 0 || ++locks_of_look > kLocksOfLook) {
    locks.fetch_add(1, std::memory_order_relaxed);
  }
}

using LockFunction = int (*)(pthread_mutex_t*);
LockFunction Real(const char* name) {
  return reinterpret_cast<LockFunction>(dlsym(RTLD_NEXT, name));
}

}  // namespace

extern "C" int pthread_mutex_lock(pthread_mutex_t* mutex) noexcept {
  static const LockFunction real = Real("pthread_mutex_lock");
  CountLock();
  return real(mutex);
}
extern "C" int pthread_mutex_trylock(pthread_mutex_t* mutex) noexcept {
  static const LockFunction real = Real("pthread_mutex_trylock");
  CountLock();
  return real(mutex);
}
extern "C" unsigned ucp_worker_progress(void* worker) {
  static const auto real =
      reinterpret_cast<unsigned (*)(void*)>(dlsym(RTLD_NEXT, "ucp_worker_progress"));
  locks_of_look = 0;
  return real(worker);
}

namespace kvmill::testing {
namespace {

constexpr std::uint32_t kTokens = 64;
constexpr std::uint32_t kHeadDim = 64;
constexpr std::size_t kBlocks = 4;
// The pages of a block. Either way a block is one call of the data plane.
constexpr std::size_t kFew = 4;
constexpr std::size_t kMany = 244;
// What lists that double may allocate beyond those of kFew pages: several lists of each side, six
// times each. One allocation a page would be hundreds.
constexpr std::uint64_t kGrowth = 40;
using Prepare = std::function<void()>;

struct Cost {
  std::uint64_t allocations = ~std::uint64_t{0};
  std::uint64_t locks = ~std::uint64_t{0};

  Cost operator+(const Cost& more) const {
    return {allocations + more.allocations, locks + more.locks};
  }
};
// What is known to be done for each page and was not got rid of (docs/perf.md).
struct PerPage {
  double allocations = 0;
  double locks = 0;
};

// The least of many runs: other threads of the process count, too, now and then. Of more runs when
// that is not `enough`, for a machine where they do so most of the time. What `prepare` does before
// each does not count.
template <typename Work>
Cost CostOf(const Work& work, const Cost& enough = {}, const Prepare& prepare = nullptr) {
  Cost least;
  const auto too_much = [&] {
    return least.allocations > enough.allocations || least.locks > enough.locks;
  };
  for (int i = 0; i < 30 || (i < 300 && too_much()); ++i) {
    if (prepare != nullptr) prepare();
    const std::uint64_t allocations_before = allocations.load();
    const std::uint64_t locks_before = locks.load();
    work();
    least.allocations = std::min(least.allocations, allocations.load() - allocations_before);
    least.locks = std::min(least.locks, locks.load() - locks_before);
  }
  return least;
}

// The engine's memory: a place for each page.
class PageSlots : public FetchSink {
 public:
  PageSlots(std::size_t layers, std::size_t page_bytes)
      : layers_(layers), page_bytes_(page_bytes), memory_(kBlocks * layers * page_bytes) {}
  absl::Span<std::byte> PageMemory(const PageId& id, std::size_t page_bytes) override {
    if (page_bytes != page_bytes_) return {};
    return absl::MakeSpan(memory_).subspan((id.block * layers_ + id.layer_index) * page_bytes_,
                                           page_bytes_);
  }
  absl::Status OnPage(const PageId&, const PageView&) override {
    ++pages;
    return absl::OkStatus();
  }
  std::size_t pages = 0;

 private:
  const std::size_t layers_, page_bytes_;
  std::vector<std::byte> memory_;
};

// Lines on standard error, where the log goes, while it lives.
class LogLines {
 public:
  LogLines() : before_(dup(STDERR_FILENO)), file_(open("/tmp", O_TMPFILE | O_RDWR, 0600)) {
    dup2(file_, STDERR_FILENO);
  }
  ~LogLines() {
    dup2(before_, STDERR_FILENO);
    close(before_);
    close(file_);
  }
  std::string text() const {
    struct stat status {};
    fstat(file_, &status);
    std::string text(static_cast<std::size_t>(status.st_size), 0);
    if (pread(file_, text.data(), text.size(), 0) < 0) return "unreadable";
    return text;
  }

 private:
  const int before_, file_;
};

// Blocks of so many pages: what is in them, and how the daemon has them.
struct Prompt {
  ClientNamespace ns;
  std::vector<BlockKey> keys;
  std::size_t layers = 0;
  std::size_t page_bytes = 0;
  std::vector<std::uint16_t> values;  // Of every layer.
  std::vector<LayerInput> inputs;

  std::vector<StoreBlock> Blocks(std::size_t count) const {
    std::vector<StoreBlock> blocks(count);
    for (std::size_t b = 0; b < count; ++b) {
      blocks[b].key = keys[b];
      blocks[b].token_count = kTokens;
      blocks[b].layers = inputs;
    }
    return blocks;
  }
};

class HotPathTest : public ::testing::Test {
 protected:
  void Start(bool plaintext = true) {
    Config config;
    config.socket = directory_ / "run/kvmill.sock";
    config.listen = "127.0.0.1:0";
    config.insecure = true;
    config.ucx = "127.0.0.1";
    config.data_plane_plaintext = plaintext_ = plaintext;
    config.host_bytes = kHostBytesMin;
    config.encode_threads = 1;
    ASSERT_TRUE(CheckConfig(config).ok());
    running_ = std::make_unique<RunningConfig>(LoadedConfig{config, {}}, "", SystemClock());
    absl::StatusOr<std::unique_ptr<Node>> node = Node::Start(*running_, leaving_);
    ASSERT_TRUE(node.ok()) << node.status();
    node_ = *std::move(node);
    listen_ = nlohmann::json::parse(node_->ReadyLine())["listen"].get<std::string>();
    local_ = Connect(absl::StrCat("unix:", config.socket), DataPath::kAuto);
  }

  std::unique_ptr<Client> Connect(const std::string& address, DataPath path) const {
    Client::Options options;
    options.address = address;
    options.path = path;
    options.data_plane_plaintext = plaintext_;
    absl::StatusOr<std::unique_ptr<Client>> client = Client::Create(options);
    EXPECT_TRUE(client.ok()) << client.status();
    return *std::move(client);
  }

  Prompt Make(std::size_t layers) const {
    NamespaceSpec spec;
    spec.model = "hot path";
    spec.hash_scheme = "test";
    spec.block_tokens = kTokens;
    LayerGroup group;
    group.head_dim = kHeadDim;
    group.kv_heads = 1;
    for (std::size_t layer = 0; layer < layers; ++layer) {
      group.layers.push_back(static_cast<std::uint16_t>(layer));
    }
    spec.groups = {group};
    Prompt prompt;
    prompt.layers = layers;
    prompt.ns = *local_->OpenNamespace(absl::StrCat("layers-", layers), spec);
    prompt.page_bytes = UniformPageBytes(FormatOf(spec, group), kTokens, SlotKind::kTile, 1);
    prompt.values.resize(kTokens * kHeadDim);
    for (std::size_t i = 0; i < prompt.values.size(); ++i) {
      prompt.values[i] = FromFloat(static_cast<float>(i % 17) - 8.0F, spec.source_dtype);
    }
    LayerInput input;
    input.k = input.v = KvView::Array(prompt.values.data(), 1, kHeadDim);
    prompt.inputs.assign(layers, input);
    for (std::size_t b = 0; b < kBlocks; ++b) {
      const Sha256Digest digest = Sha256(absl::StrCat("hot path ", layers, " ", b));
      prompt.keys.push_back(*BlockKey::FromBytes(
          absl::string_view(reinterpret_cast<const char*>(digest.data()), digest.size())));
    }
    return prompt;
  }
  static void ExpectStored(const absl::StatusOr<StoreResult>& result, std::size_t blocks) {
    ASSERT_TRUE(result.ok()) << result.status();
    EXPECT_EQ(result->blocks_stored, blocks) << result->blocks[0].status;
  }

  // The cost of `cost_of(prompt, enough)` with few and with many pages in each of `blocks` blocks.
  template <typename CostOfPrompt>
  void ExpectAPage(const PerPage& known, const char* what, std::size_t blocks,
                   const CostOfPrompt& cost_of) {
    const double pages = static_cast<double>(blocks * (kMany - kFew));
    const Cost growth{kGrowth + static_cast<std::uint64_t>(known.allocations * pages),
                      kGrowth + static_cast<std::uint64_t>(known.locks * pages)};
    const Prompt few = Make(kFew);
    const Prompt many = Make(kMany);
    const LogLines lines;
    const Cost of_few = cost_of(few, Cost{});
    const Cost of_many = cost_of(many, of_few + growth);
    for (const absl::string_view line : absl::StrSplit(lines.text(), '\n', absl::SkipEmpty())) {
      EXPECT_TRUE(absl::StrContains(line, "data plane: a connection")) << line;  // Once a client.
    }
    EXPECT_LE(of_many.allocations, of_few.allocations + growth.allocations) << what;
    EXPECT_LE(of_many.locks, of_few.locks + growth.locks) << what;
    // The counting counts.
    EXPECT_GT(of_few.allocations, 10u);
    EXPECT_GT(of_few.locks, 5u);
    std::printf("%s: %zu pages %llu allocations %llu locks, %zu pages %llu and %llu\n", what,
                blocks * kFew, static_cast<unsigned long long>(of_few.allocations),
                static_cast<unsigned long long>(of_few.locks), blocks * kMany,
                static_cast<unsigned long long>(of_many.allocations),
                static_cast<unsigned long long>(of_many.locks));
  }

  void Fetch(Client& client, const char* what, const PerPage& known = {}) {
    ExpectAPage(known, what, 1, [&](const Prompt& prompt, const Cost& enough) {
      ExpectStored(local_->Store(prompt.ns, prompt.Blocks(1), {}), 1);
      PageSlots slots(prompt.layers, prompt.page_bytes);
      const absl::Span<const BlockKey> one = absl::MakeConstSpan(prompt.keys).first(1);
      std::size_t fetches = 0;
      const auto fetch = [&] {
        ++fetches;
        const absl::StatusOr<FetchResult> fetched = client.Fetch(prompt.ns, one, slots);
        EXPECT_TRUE(fetched.ok() && fetched->blocks[0].status.ok()) << fetched.status();
      };
      CostOf(fetch);  // Connects; and buffers that are reused grow to their sizes.
      const Cost cost = CostOf(fetch, enough);
      EXPECT_EQ(slots.pages, fetches * prompt.layers);
      return cost;
    });
  }

  // Of a block that is not there.
  void Store(const char* what, const PerPage& known,
             const std::function<void(const Prompt& prompt, const StoreBlock& block)>& store) {
    ExpectAPage(known, what, 1, [&](const Prompt& prompt, const Cost& enough) {
      const std::vector<StoreBlock> block = prompt.Blocks(1);
      const Prepare remove = [&] {
        EXPECT_TRUE(local_->Remove(prompt.ns, absl::MakeConstSpan(prompt.keys).first(1)).ok());
      };
      const auto one = [&] { store(prompt, block[0]); };
      CostOf(one, {}, remove);
      return CostOf(one, enough, remove);
    });
  }

  TemporaryDirectory directory_;
  bool plaintext_ = true;
  std::unique_ptr<RunningConfig> running_;
  Leaving leaving_;
  std::unique_ptr<Node> node_;
  std::string listen_;  // Who comes by it is as one from another host.
  std::unique_ptr<Client> local_;
};

TEST_F(HotPathTest, FetchOverUcx) {
  Start();
  const auto remote = Connect(listen_, DataPath::kUcx);
  Fetch(*remote, "fetch over UCX");
  EXPECT_NE(remote->ucx_transport(), "");
}

TEST_F(HotPathTest, FetchOverEncryptedUcx) {
  Start(/*plaintext=*/false);
  const auto remote = Connect(listen_, DataPath::kUcx);
  Fetch(*remote, "fetch over encrypted UCX");
  EXPECT_NE(remote->ucx_transport(), "");
}

TEST_F(HotPathTest, FetchInline) {
  Start();
  const auto remote = Connect(listen_, DataPath::kInline);
  Fetch(*remote, "fetch inline", {.allocations = 2.5});
}

TEST_F(HotPathTest, StoreOverUcx) {
  Start();
  const auto remote = Connect(listen_, DataPath::kUcx);
  Store("store over UCX", {.allocations = 1, .locks = 1.25},
        [&](const Prompt& prompt, const StoreBlock& block) {
          ExpectStored(remote->Store(prompt.ns, absl::MakeConstSpan(&block, 1), {}), 1);
        });
  EXPECT_NE(remote->ucx_transport(), "");
}

TEST_F(HotPathTest, StoreInline) {
  Start();
  const auto remote = Connect(listen_, DataPath::kInline);
  Store("store inline", {.allocations = 1.25, .locks = 1.5},
        [&](const Prompt& prompt, const StoreBlock& block) {
          ExpectStored(remote->Store(prompt.ns, absl::MakeConstSpan(&block, 1), {}), 1);
        });
}

TEST_F(HotPathTest, StoreInlineOfPlainValues) {
  Start();
  Store("store inline of 16-bit values", {.allocations = 3.5, .locks = 1.25},
        [&](const Prompt& prompt, const StoreBlock& block) {
          ExpectStored(local_->Store(prompt.ns, absl::MakeConstSpan(&block, 1), {}), 1);
        });
}

TEST_F(HotPathTest, StoreFromSharedPages) {
  Start();
  struct Engine {
    std::unique_ptr<EnginePages> pages;
    std::unique_ptr<BlockList> list;
    std::uint64_t registration = 0;
  };
  std::map<std::size_t, Engine> engines;
  Store("store from shared pages", {.allocations = 0.75, .locks = 9},
        [&](const Prompt& prompt, const StoreBlock& block) {
          Engine& engine = engines[prompt.layers];
          if (engine.pages == nullptr) {
            engine.pages = std::make_unique<EnginePages>(prompt.ns.spec, 4, false, 0, 1, nullptr);
            engine.pages->Overwrite();
            engine.list = std::make_unique<BlockList>(prompt.ns.spec, "p", kTokens, Shuffled(4, 5));
            engine.list->blocks[0].key = block.key;
            engine.registration = *local_->RegisterMemory(prompt.ns, engine.pages->geometry);
          }
          ExpectStored(local_->StorePages(prompt.ns, engine.registration, engine.list->blocks), 1);
        });
}

TEST_F(HotPathTest, Map) {
  Start();
  ExpectAPage({}, "map of 4 blocks", kBlocks, [&](const Prompt& prompt, const Cost& enough) {
    ExpectStored(local_->Store(prompt.ns, prompt.Blocks(kBlocks), {}), kBlocks);
    const auto map = [&] {
      const absl::StatusOr<Client::MappedPtr> mapped = local_->Map(prompt.ns, prompt.keys);
      ASSERT_TRUE(mapped.ok()) << mapped.status();
      for (std::size_t b = 0; b < kBlocks; ++b) {
        for (std::size_t layer = 0; layer < prompt.layers; ++layer) {
          ASSERT_TRUE((*mapped)->Page(b, 0, layer).ok()) << (*mapped)->status(b);
        }
      }
      ASSERT_TRUE((*mapped)->Check().ok());
    };
    CostOf(map);
    return CostOf(map, enough);
  });
}

}  // namespace
}  // namespace kvmill::testing
