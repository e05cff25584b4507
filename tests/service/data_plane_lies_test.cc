// The client's side of the data plane against replies that nobody should send: headers that are
// mutations of right ones, damaged or random, payloads with a wrong bit, payloads that never come,
// other ends of calls. Every fetch and store ends once, with a clear error, a miss or the right
// bytes; no memory is written that was not given, and nothing is left. Prints its seed, --seed=N
// repeats it.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <functional>
#include <future>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/ticket_pages.h"
#include "tests/integration/message_mutator.h"
#include "tests/long_form.h"
#include "tests/service/data_plane_world.h"

namespace kvmill::testing {
namespace {

using stress::Space;

constexpr std::size_t kGuard = 512;
constexpr std::byte kMark{0xA5};

const stress::Model& TheModel() {
  static const auto* model = new stress::Model(0);
  return *model;
}

// Memory between guards.
class GuardedMemory {
 public:
  absl::Span<std::byte> Give(std::size_t bytes) {
    std::vector<std::byte>& memory = memories_.emplace_back(bytes + 2 * kGuard, kMark);
    return absl::MakeSpan(memory).subspan(kGuard, bytes);
  }
  void Check() const {
    for (const std::vector<std::byte>& memory : memories_) {
      for (std::size_t i = 0; i < kGuard; ++i) {
        ASSERT_TRUE(memory[i] == kMark && memory[memory.size() - 1 - i] == kMark);
      }
    }
  }

 private:
  std::vector<std::vector<std::byte>> memories_;
};

// What is said instead of a reply.
struct Lie {
  std::vector<std::byte> header;
  bool flips_a_bit = false;        // Of the payload.
  bool drops_the_payload = false;  // It is said to be empty.
  absl::Status status;             // Not OK: how the call ends.
};

class Liar {
 public:
  explicit Liar(std::uint64_t seed) : mutator_(seed) {
    for (const std::uint64_t value : {0, 1, 2, 3}) {
      for (const char* field : {"block", "group", "tier", "outcome", "existing_heads"}) {
        mutator_.Know(field, value);
      }
    }
    mutator_.Know("token_count", stress::kBlockTokens);
    for (const std::uint64_t code : {0, 5, 8, 15}) mutator_.Know("code", code);
  }

  MessageMutator& mutator() { return mutator_; }
  std::uint64_t lies() const { return lies_; }

  // Instead of a reply with this header, which is a `Message`.
  template <typename Message>
  Lie InsteadOf(absl::Span<const std::byte> header) {
    Lie lie;
    lie.header.assign(header.begin(), header.end());
    const std::uint64_t kind = mutator_.Below(24);
    if (kind < 6) return lie;  // The truth.
    ++lies_;
    Message message;
    EXPECT_TRUE(message.ParseFromArray(header.data(), static_cast<int>(header.size())));
    std::string bytes = message.SerializeAsString();
    switch (kind) {
      case 6:
        lie.flips_a_bit = true;
        return lie;
      case 7:
        lie.drops_the_payload = true;
        return lie;
      case 8:
        lie.status = absl::Status(static_cast<absl::StatusCode>(1 + mutator_.Below(16)), "a lie");
        return lie;
      case 9:
      case 10:
        message.Clear();
        mutator_.Fill(&message);
        bytes = message.SerializeAsString();
        break;
      case 11:
      case 12:
        bytes = mutator_.Damage(std::move(bytes));
        break;
      default:
        mutator_.Mutate(&message, 1 + static_cast<int>(mutator_.Below(3)));
        bytes = message.SerializeAsString();
        if (mutator_.OneIn(8)) bytes = mutator_.Damage(std::move(bytes));
    }
    bytes.resize(std::min(bytes.size(), std::size_t{kCallHeaderBytesMax}));
    const auto* const begin = reinterpret_cast<const std::byte*>(bytes.data());
    lie.header.assign(begin, begin + bytes.size());
    return lie;
  }

 private:
  MessageMutator mutator_;
  std::uint64_t lies_ = 0;
};

// A connection whose answers, which are `Message`s, go through a liar.
template <typename Message>
class LyingConnection final : public PeerConnection {
 public:
  LyingConnection(ConnectionPtr real, Liar& liar) : real_(std::move(real)), liar_(liar) {}

  const ConnectionInfo& info() const override { return real_->info(); }
  CallId Start(Call call) override {
    struct Told {
      std::optional<Lie> lie;
      DestinationSpans spans;
      std::vector<std::byte> dropped;
    };
    const auto told = std::make_shared<Told>();  // Of both callbacks.
    if (call.place != nullptr) {
      call.place = [this, told, place = std::move(call.place)](const ResponseHead& head,
                                                               DestinationSpans* spans) {
        told->lie = liar_.InsteadOf<Message>(head.header);
        if (told->lie->drops_the_payload) {
          told->dropped.resize(head.payload_bytes);
          spans->push_back(absl::MakeSpan(told->dropped));
          return absl::OkStatus();
        }
        const absl::Status status = place({told->lie->header, head.payload_bytes}, spans);
        std::uint64_t bytes = 0;
        for (const absl::Span<std::byte> span : *spans) bytes += span.size();
        if (status.ok()) {
          EXPECT_EQ(bytes, head.payload_bytes);
        }
        told->spans = *spans;
        return status;
      };
    }
    call.done = [this, told, done = std::move(call.done)](absl::StatusOr<Response> r) mutable {
      if (r.ok()) {
        if (!told->lie.has_value()) told->lie = liar_.InsteadOf<Message>(r->header);
        r->header = told->lie->header;
        if (told->lie->drops_the_payload) r->payload_bytes = 0;
        if (told->lie->flips_a_bit && !told->spans.empty()) {
          MessageMutator& mutator = liar_.mutator();
          const absl::Span<std::byte> span = told->spans[mutator.Below(told->spans.size())];
          span[mutator.Below(span.size())] ^= std::byte{4};
        }
        if (!told->lie->status.ok()) r = told->lie->status;
      }
      done(std::move(r));
    };
    return real_->Start(std::move(call));
  }
  void Cancel(CallId id) override { real_->Cancel(id); }
  void Close() override { real_->Close(); }
  bool RunUntil(absl::FunctionRef<bool()> done) override { return real_->RunUntil(done); }

 private:
  const ConnectionPtr real_;
  Liar& liar_;
};

// A failure says what is wrong, once.
void ExpectClear(const absl::Status& status) {
  EXPECT_FALSE(status.ok());
  EXPECT_FALSE(status.message().empty()) << status;
  EXPECT_LE(status.message().size(), 2048u);
}

// What runs, and what became of it.
struct Tally {
  int started = 0;
  int done = 0;
  int failed = 0;  // As a whole.
  int blocks_ok = 0;
  int blocks_missed = 0;

  int running() const { return started - done; }
};

// One fetch of a sequence through a liar.
class Victim final : public FetchSink {
 public:
  Victim(Space space, std::string sequence) : space_(space), sequence_(std::move(sequence)) {}

  void Start(World& world, const ConnectionPtr& liar, Tally* tally) {
    keys_ = stress::KeysOf(sequence_);
    World::Peer& peer = world.peer(0);
    ASSERT_TRUE(peer.link->Begin());
    ++tally->started;
    StartDataFetch(
        *peer.link, liar, std::make_shared<const ClientNamespace>(world.space(space_)), keys_,
        *this, Elsewhere(), std::chrono::system_clock::now() + std::chrono::seconds(60), nullptr,
        [this, tally](const absl::StatusOr<FetchResult>& result) { Ended(result, tally); });
  }

  absl::Span<std::byte> PageMemory(const PageId& id, std::size_t page_bytes) override {
    EXPECT_FALSE(done_);
    EXPECT_LE(page_bytes, std::size_t{1} << 20);
    if ((id.block + id.layer_index) % 2 == 0) return {};
    return memory_.Give(page_bytes);
  }
  absl::Status OnPage(const PageId& id, const PageView& page) override {
    EXPECT_FALSE(done_);
    EXPECT_EQ(TheModel().Matching(space_, sequence_, id.block, /*variants=*/1, page), 1u)
        << sequence_ << " block " << id.block << " group " << int{id.group} << " layer "
        << id.layer_index << " has bytes that nobody stored";
    ++pages_[id.block];
    return absl::OkStatus();
  }

 private:
  void Ended(const absl::StatusOr<FetchResult>& result, Tally* tally) {
    EXPECT_FALSE(std::exchange(done_, true)) << "a fetch ended again";
    ++tally->done;
    memory_.Check();
    if (!result.ok()) {
      ++tally->failed;
      return ExpectClear(result.status());
    }
    ASSERT_EQ(result->blocks.size(), keys_.size());
    for (std::uint32_t b = 0; b < keys_.size(); ++b) {
      const FetchBlockResult& block = result->blocks[b];
      ++(block.status.ok() ? tally->blocks_ok : tally->blocks_missed);
      if (block.status.ok()) {
        EXPECT_EQ(pages_[b], stress::kLayers) << "block " << b << " is OK, and not whole";
      }
    }
  }

  const Space space_;
  const std::string sequence_;
  std::vector<BlockKey> keys_;
  GuardedMemory memory_;
  std::map<std::uint32_t, std::uint32_t> pages_;
  bool done_ = false;
};

// One store through a liar.
class VictimStore {
 public:
  VictimStore(Space space, const std::string& sequence)
      : input_(TheModel(), space, sequence, 0, {}), space_(space) {}

  void Start(World& world, const ConnectionPtr& liar, bool encode, Tally* tally) {
    World::Peer& peer = world.peer(0);
    ASSERT_TRUE(peer.link->Begin());
    ++tally->started;
    StartDataStore(
        *peer.link, liar, world.space(space_), input_.blocks(), {}, encode,
        std::chrono::system_clock::now() + std::chrono::seconds(60),
        [this, tally](const absl::StatusOr<StoreResult>& result) { Ended(result, tally); });
  }

 private:
  void Ended(const absl::StatusOr<StoreResult>& result, Tally* tally) {
    EXPECT_FALSE(std::exchange(done_, true)) << "a store ended again";
    ++tally->done;
    if (!result.ok()) {
      ++tally->failed;
      return ExpectClear(result.status());
    }
    ASSERT_EQ(result->blocks.size(), input_.blocks().size());
    for (const StoreBlockResult& block : result->blocks) {
      ++(block.status.ok() ? tally->blocks_ok : tally->blocks_missed);
      EXPECT_EQ(block.status.ok(), block.outcome != StoreOutcome::kFailed) << block.status;
      EXPECT_LE(block.outcome, StoreOutcome::kPartial);
    }
  }

  const stress::StoreInput input_;
  const Space space_;
  bool done_ = false;
};

constexpr Space kBoth[] = {Space::kTiles, Space::kRaw};

// Until nothing runs; what `next` starts is limited to few at a time.
void RunAll(World& world, const Tally& tally, int count, const std::function<void(int)>& next) {
  EXPECT_TRUE(world.Run([&] { return tally.started == count && tally.running() == 0; },
                        [&] {
                          world.Connect(world.peer(0));
                          if (world.peer(0).connection == nullptr || tally.started == count) return;
                          if (tally.running() < 4) next(tally.started);
                        }));
}

TEST(DataPlaneLiesTest, AFetchBelievesNothingThatItCanCheck) {
  const std::uint64_t seed = SeedArgument();
  const int worlds = ShortOrLong(3, 200);
  constexpr int kFetches = 300;
  Tally tally;
  for (int i = 0; i < worlds && !::testing::Test::HasFailure(); ++i) {
    const std::uint64_t world_seed = seed + static_cast<std::uint64_t>(i);
    World world(world_seed, i % 2 == 0);
    EXPECT_TRUE(world.Run([&] { return world.did().count("store") != 0 && world.running() == 0; },
                          [&] {
                            World::Peer& honest = world.peer(1);
                            world.Connect(honest);
                            if (honest.connection == nullptr || world.did().count("store")) return;
                            for (const Space space : kBoth) {
                              for (const char* name : {"a", "b"}) {
                                world.Store(honest, space, name, {}, true);
                              }
                            }
                          }));
    Liar liar(world_seed);
    std::vector<std::unique_ptr<Victim>> victims;
    Tally here;
    RunAll(world, here, kFetches, [&](int n) {
      const Space space = kBoth[n % 2];
      victims.push_back(std::make_unique<Victim>(space, n % 3 == 0 ? "b" : "a"));
      victims.back()->Start(
          world,
          std::make_shared<LyingConnection<v1::DataFetchReply>>(world.peer(0).connection, liar),
          &here);
    });
    EXPECT_GT(liar.lies(), kFetches / 2u);
    world.Finish();
    tally.failed += here.failed;
    tally.blocks_ok += here.blocks_ok;
    tally.blocks_missed += here.blocks_missed;
  }
  std::printf("%d fetches failed, %d blocks came, %d were missed\n", tally.failed, tally.blocks_ok,
              tally.blocks_missed);
  EXPECT_GT(tally.failed, worlds * kFetches / 10);
  EXPECT_GT(tally.blocks_ok, worlds * kFetches / 2);
  EXPECT_GT(tally.blocks_missed, worlds);
}

TEST(DataPlaneLiesTest, AStoreEndsAsTheRepliesThatCanBeSay) {
  const std::uint64_t seed = SeedArgument();
  const int worlds = ShortOrLong(3, 200);
  constexpr int kStores = 60;
  Tally tally;
  for (int i = 0; i < worlds && !::testing::Test::HasFailure(); ++i) {
    const std::uint64_t world_seed = seed + static_cast<std::uint64_t>(i);
    World world(world_seed, i % 2 == 0);
    Liar liar(world_seed);
    std::vector<std::unique_ptr<VictimStore>> victims;
    Tally here;
    const auto name = [](int n) { return absl::StrCat("s", n / 2 % 20); };  // Some come again.
    RunAll(world, here, kStores, [&](int n) {
      victims.push_back(std::make_unique<VictimStore>(kBoth[n % 2], name(n)));
      victims.back()->Start(
          world,
          std::make_shared<LyingConnection<v1::DataStoreReply>>(world.peer(0).connection, liar),
          n % 3 != 0, &here);
    });
    EXPECT_GT(liar.lies(), static_cast<std::uint64_t>(kStores));
    // Whatever was said of it: what is there is right.
    bool asked = false;
    EXPECT_TRUE(world.Run([&] { return asked && world.running() == 0; },
                          [&] {
                            World::Peer& honest = world.peer(1);
                            world.Connect(honest);
                            if (honest.connection == nullptr || std::exchange(asked, true)) return;
                            for (int n = 0; n < 40; ++n) {
                              world.Fetch(honest, kBoth[n % 2], {name(n)});
                            }
                          }));
    EXPECT_GT(world.did().at("fetched blocks"), 40u);
    world.Finish();
    tally.failed += here.failed;
    tally.blocks_ok += here.blocks_ok;
    tally.blocks_missed += here.blocks_missed;
  }
  std::printf("%d stores failed, %d blocks were stored, %d were not\n", tally.failed,
              tally.blocks_ok, tally.blocks_missed);
  EXPECT_GT(tally.failed, worlds * kStores / 20);
  EXPECT_GT(tally.blocks_ok, worlds * kStores / 5);
  EXPECT_GT(tally.blocks_missed, worlds);
}

// Answers each call with pages of a ticket, of which it says anything.
class TicketLiar final : public PeerConnection {
 public:
  TicketLiar(WorkerPool& workers, Liar& liar, std::vector<std::byte> payload,
             const std::vector<std::uint32_t>& sizes)
      : workers_(workers), liar_(liar), payload_(std::move(payload)) {
    v1::TicketPages pages;
    for (const std::uint32_t size : sizes) pages.add_page_bytes(size);
    header_.resize(pages.ByteSizeLong());
    pages.SerializeToArray(header_.data(), static_cast<int>(header_.size()));
  }

  const ConnectionInfo& info() const override { return info_; }
  CallId Start(Call call) override {
    workers_.Post([this, call = std::make_shared<Call>(std::move(call))] { Answer(call.get()); });
    return 1;
  }
  void Cancel(CallId) override {}
  void Close() override {}
  bool RunUntil(absl::FunctionRef<bool()>) override { return false; }

  // Of the last answer: what was said in it, when it could be understood and had its payload.
  const std::optional<std::vector<std::uint32_t>>& said() const { return said_; }

 private:
  void Answer(Call* call) {
    const Lie lie = liar_.InsteadOf<v1::TicketPages>(header_);
    v1::TicketPages pages;
    said_.reset();
    if (!lie.drops_the_payload && lie.status.ok() &&
        pages.ParseFromArray(lie.header.data(), static_cast<int>(lie.header.size()))) {
      said_.emplace(pages.page_bytes().begin(), pages.page_bytes().end());
    }
    if (!lie.status.ok()) return call->done(lie.status);
    Response response{lie.header, lie.drops_the_payload ? 0 : payload_.size()};
    if (response.payload_bytes > 0) {
      DestinationSpans spans;
      const absl::Status placed = call->place({response.header, response.payload_bytes}, &spans);
      if (!placed.ok()) return call->done(placed);
      std::size_t offset = 0;
      for (const absl::Span<std::byte> span : spans) {
        ASSERT_LE(span.size(), payload_.size() - offset);
        std::memcpy(span.data(), payload_.data() + offset, span.size());
        offset += span.size();
      }
      EXPECT_EQ(offset, payload_.size());
    }
    call->done(std::move(response));
  }

  WorkerPool& workers_;
  Liar& liar_;
  const std::vector<std::byte> payload_;
  std::vector<std::byte> header_;
  ConnectionInfo info_;
  std::optional<std::vector<std::uint32_t>> said_;
};

class TicketSink final : public TicketPageSink {
 public:
  explicit TicketSink(std::uint64_t seed) : random_(seed) {}
  absl::Span<std::byte> PageMemory(std::size_t page, std::uint32_t page_bytes) override {
    EXPECT_EQ(page, pages.size()) << "each once, in their order";
    EXPECT_LE(page_bytes, kTicketPageBytesMax);
    pages.push_back(page_bytes);
    return random_() % 4 == 0 ? absl::Span<std::byte>() : memory_.Give(page_bytes);
  }
  void Check() const { memory_.Check(); }
  std::vector<std::uint32_t> pages;

 private:
  std::mt19937_64 random_;
  GuardedMemory memory_;
};

TEST(DataPlaneLiesTest, PagesOfATicketAreThoseThatWereAskedForOrAnError) {
  const std::uint64_t seed = SeedArgument();
  World world(seed, true, 1);
  Liar liar(seed);
  const std::vector<std::uint32_t> sizes = {300, 300, 4096, 64};
  for (const std::uint32_t size : sizes) liar.mutator().Know("page_bytes", size);
  liar.mutator().Know("page_bytes", 4760);
  WorkerPool workers(1, "liar");
  DataLink& link = *world.peer(0).link;
  const auto connection =
      std::make_shared<TicketLiar>(workers, liar, std::vector<std::byte>(4760), sizes);
  const int reads = ShortOrLong(2000, 200'000);
  int right = 0;
  for (int i = 0; i < reads && !::testing::Test::HasFailure(); ++i) {
    TicketSink sink(seed + static_cast<std::uint64_t>(i));
    TicketPagesRequest request;
    request.page_count = sizes.size();
    std::promise<absl::Status> read;
    ASSERT_TRUE(link.Begin());
    StartDataTicketRead(link, connection, request, sink,
                        std::chrono::system_clock::now() + std::chrono::seconds(60),
                        [&read](const absl::Status& status) { read.set_value(status); });
    const absl::Status status = read.get_future().get();
    sink.Check();
    if (!status.ok()) {
      ExpectClear(status);
      continue;
    }
    ++right;
    ASSERT_TRUE(connection->said().has_value());
    EXPECT_EQ(*connection->said(), sink.pages);
    EXPECT_EQ(sink.pages.size(), sizes.size());
  }
  EXPECT_GT(right, reads / 5);
  EXPECT_LT(right, reads * 4 / 5);
  world.Finish();
}

}  // namespace
}  // namespace kvmill::testing
