// The client library against a daemon that lies: every call ends once and in time, with an error or
// with a right answer; nobody gets a page that is not the block's, and no memory is written that
// was not given. Prints its seed, --seed=N repeats it as far as threads allow.
#include "tests/integration/lying_daemon.h"

#include <google/protobuf/stubs/logging.h>

#include <cstring>
#include <future>
#include <thread>

#include "client/mapped_blocks.h"
#include "storage/core/namespace.h"
#include "tests/integration/ucx_fixture.h"
#include "tests/long_form.h"

namespace kvmill::testing {
namespace {

using Pages = std::map<std::tuple<std::uint32_t, int, std::uint32_t>, std::string>;

constexpr absl::Duration kTimeout = absl::Milliseconds(400);
constexpr std::chrono::seconds kLate{20};  // Of a busy machine.

// Gives memory between guards for some pages, and looks at what comes.
class GuardedSink final : public FetchSink {
 public:
  // `truth`: what the pages are; empty: nobody knows.
  GuardedSink(std::uint64_t seed, Pages truth) : random_(seed), truth_(std::move(truth)) {}

  absl::Span<std::byte> PageMemory(const PageId&, std::size_t page_bytes) override {
    if (random_() % 2 == 0) return {};
    EXPECT_LE(page_bytes, std::size_t{1} << 20);
    std::vector<std::byte>& memory = memories_.emplace_back(page_bytes + 2 * kGuard, kMark);
    return absl::MakeSpan(memory).subspan(kGuard, page_bytes);
  }
  absl::Status OnPage(const PageId& id, const PageView& page) override {
    PageCollector one;
    const absl::Status status = one.OnPage(id, page);
    // Once more, when the client asked again.
    for (auto& [place, bytes] : one.pages) {
      EXPECT_TRUE(truth_.empty() || truth_.at(place) == bytes) << "a page of block " << id.block;
      pages_[place] = std::move(bytes);
    }
    return status;
  }
  void CheckGuards() const {
    for (const std::vector<std::byte>& memory : memories_) {
      for (std::size_t i = 0; i < kGuard; ++i) {
        ASSERT_TRUE(memory[i] == kMark && memory[memory.size() - 1 - i] == kMark);
      }
    }
  }
  const Pages& pages() const { return pages_; }

 private:
  static constexpr std::size_t kGuard = 4096;
  static constexpr std::byte kMark{0xA5};

  std::mt19937_64 random_;
  std::vector<std::vector<std::byte>> memories_;
  const Pages truth_;
  Pages pages_;
};

// What `start(done)` calls `done` with. Fails the test when that is late, or twice.
template <typename T>
class Once {
 public:
  std::function<void(T)> done() {
    return [state = state_](T result) {
      if (state->calls.fetch_add(1) == 0) state->result.set_value(std::move(result));
    };
  }
  T Wait() {
    auto future = state_->result.get_future();
    if (future.wait_for(kLate) != std::future_status::ready) {
      ADD_FAILURE() << "the call did not end in time";
      std::abort();  // What it borrows is about to go.
    }
    return future.get();
  }
  int calls() const { return state_->calls.load(); }

 private:
  struct State {
    std::promise<T> result;
    std::atomic<int> calls{0};
  };
  std::shared_ptr<State> state_ = std::make_shared<State>();
};

class LyingDaemonTest : public UcxDaemonTest {
 protected:
  void Prepare() {
    StartUcx({"--host-bytes", "64MiB", "--session-grace", "1s"});
    kept_ = Open("kept", TwoGroups("kept"));
    sequence_ = std::make_unique<Sequence>(kept_.spec, kBlocks * 64, 1);
    ASSERT_EQ(Put(kept_, "s", *sequence_).blocks_stored, kBlocks);
    keys_ = KeysOf("s", kBlocks);
    PageCollector collector;
    ASSERT_TRUE(client_->Fetch(kept_, keys_, collector).ok());
    truth_ = collector.pages;
    ASSERT_EQ(truth_.size(), kBlocks * 3);
  }

  static const absl::Status& StatusOf(const absl::Status& status) { return status; }
  template <typename T>
  static const absl::Status& StatusOf(const absl::StatusOr<T>& result) {
    return result.status();
  }

  // The result of one asynchronous call.
  template <typename T, typename Start>
  T Call(const Start& start) {
    Once<T> once;
    const auto begin = std::chrono::steady_clock::now();
    start(once.done());
    T result = once.Wait();
    ++calls_;
    late_ += StatusOf(result).code() == absl::StatusCode::kDeadlineExceeded ? 1 : 0;
    const auto late = std::chrono::steady_clock::now() - begin - absl::ToChronoSeconds(kTimeout);
    EXPECT_LT(late, std::chrono::seconds(5));
    ends_.push_back([once] { return once.calls(); });
    return result;
  }

  void Fetch(Client& client) {
    GuardedSink sink(random_(), truth_);
    const auto result = Call<absl::StatusOr<FetchResult>>(
        [&](auto done) { client.FetchAsync(kept_, keys_, sink, {}, done); });
    sink.CheckGuards();
    if (!result.ok()) return;
    ++right_;
    ASSERT_EQ(result->blocks.size(), kBlocks);
    for (const auto& [id, page] : truth_) {
      if (!result->blocks[std::get<0>(id)].status.ok()) continue;
      EXPECT_EQ(sink.pages().count(id), 1u)
          << "block " << std::get<0>(id) << " is OK without layer " << std::get<2>(id)
          << " of group " << std::get<1>(id);
    }
  }

  void Map(Client& client) {
    auto mapped = Call<absl::StatusOr<Client::MappedPtr>>(
        [&](auto done) { client.MapAsync(kept_, keys_, {}, {}, done); });
    if (!mapped.ok()) return;
    ++right_;
    const MappedBlocks& blocks = **mapped;
    ASSERT_EQ(blocks.block_count(), kBlocks);
    PageCollector collector;
    for (const auto& [id, page] : truth_) {
      const auto& [block, group, layer] = id;
      const auto view = blocks.Page(block, static_cast<std::size_t>(group), layer);
      if (!view.ok()) continue;
      FetchSink::PageId page_id;
      page_id.block = block;
      page_id.group = static_cast<std::uint8_t>(group);
      page_id.layer_index = layer;
      ASSERT_TRUE(collector.OnPage(page_id, *view).ok());
      EXPECT_TRUE(collector.pages.at(id) == page) << "a mapped page of block " << block;
    }
    static_cast<void>(blocks.VerifyContents());
    const absl::Status renewed = Call<absl::Status>(
        [&](auto done) { client.RenewAsync(**mapped, absl::Seconds(5), {}, done); });
    if (renewed.ok()) ++right_;
  }

  void Store(Client& client) {
    const ClientNamespace prey = Open("prey", TwoGroups("prey"));
    const std::vector<StoreBlock> blocks = sequence_->Blocks("s");
    const auto result = Call<absl::StatusOr<StoreResult>>(
        [&](auto done) { client.StoreAsync(prey, blocks, {}, {}, done); });
    if (result.ok()) {
      ++right_;
      ASSERT_EQ(result->blocks.size(), kBlocks);
      for (const StoreBlockResult& block : result->blocks) {
        EXPECT_EQ(block.status.ok(), block.outcome != StoreOutcome::kFailed) << block.status;
        EXPECT_LE(block.outcome, StoreOutcome::kPartial);
      }
    }
    PageCollector stored;
    const auto fetched = client_->Fetch(prey, keys_, stored);
    ASSERT_TRUE(fetched.ok()) << fetched.status();
    for (const auto& [id, page] : stored.pages) EXPECT_TRUE(truth_.at(id) == page);
    ASSERT_TRUE(client_->Clear(prey).ok());
  }

  void OneOfTheRest(Client& client) {
    switch (random_() % 9) {
      case 0: {
        const auto found = Call<absl::StatusOr<LookupResult>>(
            [&](auto done) { client.LookupAsync(kept_, keys_, {}, {}, done); });
        if (!found.ok()) return;
        EXPECT_LE(found->hit_blocks, kBlocks);
        EXPECT_EQ(found->tiers.size(), found->hit_blocks);
        EXPECT_EQ(found->tail_tokens == 0, found->tail_key.empty());
        break;
      }
      case 1: {
        const auto ns = Call<absl::StatusOr<ClientNamespace>>(
            [&](auto done) { client.OpenNamespaceAsync("kept", kept_.spec, {}, done); });
        if (!ns.ok()) return;
        EXPECT_TRUE(ns->spec == kept_.spec);
        break;
      }
      case 2: {
        const auto ns = Call<absl::StatusOr<ClientNamespace>>(
            [&](auto done) { client.FindNamespaceAsync("kept", {}, done); });
        if (!ns.ok()) return;
        EXPECT_TRUE(ValidateNamespace(ns->spec).ok());
        UseWhatItSays(client, *ns);
        break;
      }
      case 3:
        if (!Call<absl::StatusOr<ServerStat>>([&](auto done) {
               client.StatAsync({}, done);
             }).ok()) {
          return;
        }
        break;
      case 4:
        if (!Call<absl::StatusOr<std::vector<ListedBlock>>>([&](auto done) {
               client.ListAsync("kept", {}, done);
             }).ok()) {
          return;
        }
        break;
      case 5:
        if (!Call<absl::StatusOr<std::vector<ClientNamespace>>>([&](auto done) {
               client.NamespacesAsync({}, done);
             }).ok()) {
          return;
        }
        break;
      case 6:
        if (!Call<absl::StatusOr<std::uint64_t>>([&](auto done) {
               client.TouchAsync(kept_, keys_, {}, done);
             }).ok()) {
          return;
        }
        break;
      case 7: {
        const auto registration = Call<absl::StatusOr<std::uint64_t>>(
            [&](auto done) { client.RegisterMemoryAsync(kept_, SmallGeometry(), {}, done); });
        if (!registration.ok()) return;
        static_cast<void>(Call<absl::Status>(
            [&](auto done) { client.UnregisterMemoryAsync(*registration, {}, done); }));
        break;
      }
      default:
        if (!Call<absl::StatusOr<std::uint64_t>>([&](auto done) {
               client.FlushAsync({}, done);
             }).ok()) {
          return;
        }
    }
    ++right_;
  }

  // A namespace as the daemon told it: whatever it is, calls with it end.
  void UseWhatItSays(Client& client, const ClientNamespace& ns) {
    GuardedSink sink(random_(), {});
    static_cast<void>(Call<absl::StatusOr<FetchResult>>(
        [&](auto done) { client.FetchAsync(ns, keys_, sink, {}, done); }));
    sink.CheckGuards();
  }

  static constexpr std::uint32_t kBlocks = 6;

  std::mt19937_64 random_;
  ClientNamespace kept_;
  std::unique_ptr<Sequence> sequence_;
  std::vector<BlockKey> keys_;
  Pages truth_;
  std::uint64_t calls_ = 0;
  std::uint64_t right_ = 0;
  std::uint64_t late_ = 0;  // Lies, or a busy machine: nothing to judge the client by.
  std::vector<std::function<int()>> ends_;
};

TEST_F(LyingDaemonTest, NothingIsBelievedThatCanBeChecked) {
  const std::uint64_t seed = SeedArgument();
  random_.seed(seed);
  Prepare();
  google::protobuf::SetLogHandler(nullptr);
  const std::string socket_path = directory_ / "liar.sock";
  LyingDaemon liar(socket(), ready_["listen"].get<std::string>(), socket_path, seed);
  const int clients = ShortOrLong(16, 1000);
  for (int i = 0; i < clients && !HasFailure(); ++i) {
    const bool local = i % 3 != 0;
    Client::Options options;
    options.address = local ? "unix:" + socket_path : liar.tcp_address();
    options.timeout = kTimeout;
    // With a data plane that is offered in lies, now and then.
    options.path = !local && i % 4 == 0 ? DataPath::kAuto : DataPath::kInline;
    auto client = Client::Create(options);
    ASSERT_TRUE(client.ok()) << client.status();
    for (int n = 0; n < 12 && !HasFailure(); ++n) {
      switch (random_() % 6) {
        case 0:
        case 1:
          Fetch(**client);
          break;
        case 2:
          if (local) Map(**client);
          break;
        case 3:
          Store(**client);
          break;
        default:
          OneOfTheRest(**client);
      }
    }
    client->reset();
    for (const auto& calls : ends_) EXPECT_EQ(calls(), 1);
    ends_.clear();
  }
  std::printf("%llu calls, %llu lies, %llu answers, %llu too late\n",
              static_cast<unsigned long long>(calls_), static_cast<unsigned long long>(liar.lies()),
              static_cast<unsigned long long>(right_), static_cast<unsigned long long>(late_));
  EXPECT_GT(liar.lies(), (calls_ - late_) / 8);
  EXPECT_GT(right_, (calls_ - late_) / 5);
  // What the lies left in the daemon goes with the clients.
  PageCollector after;
  ASSERT_TRUE(client_->Fetch(kept_, keys_, after).ok());
  EXPECT_TRUE(after.pages == truth_);
  for (const char* gauge : {"sessions", "leases", "registrations", "referenced_blocks"}) {
    EXPECT_TRUE(Eventually([&] { return Metric(gauge) == 0; })) << gauge << " " << Metric(gauge);
  }
}

}  // namespace
}  // namespace kvmill::testing
