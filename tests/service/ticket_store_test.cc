// What tickets hold and what they copy, with a real store on each side: events come in order and
// end, pages arrive whole or not at all, bounds are kept, and nothing stays.
#include <gmock/gmock.h>

#include <chrono>
#include <cstring>
#include <functional>
#include <future>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "service/thread_loop.h"
#include "service/ticket_copies.h"
#include "service/ticket_holds.h"
#include "storage/core/pages_digest.h"
#include "tests/storage/tiered_store_fixture.h"

namespace kvmill {
namespace {

using ::testing::HasSubstr;
constexpr std::uint64_t kManyBytes = std::uint64_t{1} << 30;

// Keeps what was said, in words.
class Heard : public TicketHolds::Events {
 public:
  void Finished(TicketHolds::HoldId, std::uint32_t block, const LayerSet& layers) override {
    absl::StrAppend(&words, block, ":", layers.count(), " ");
    ++count;
  }
  void Sealed(TicketHolds::HoldId, std::uint32_t block, std::uint64_t digest) override {
    absl::StrAppend(&words, block, ":sealed ");
    digests.push_back(digest);
    ++count;
  }
  void Failed(TicketHolds::HoldId, std::uint32_t block) override {
    absl::StrAppend(&words, block, ":failed ");
    ++count;
  }
  std::string words;
  std::vector<std::uint64_t> digests;
  int count = 0;
};

class TicketStoreTest : public TieredStoreTest {
 protected:
  void SetUp() override { Start(kManyBytes); }
  void TearDown() override { Stop(); }

  void Start(std::uint64_t bytes_max, bool with_disk = false,
             const SharedTenants& shared = SharedTenants()) {
    Stop();
    if (store_ == nullptr) Open(with_disk);
    loop_ = std::make_unique<ThreadLoop>(SystemClock());
    workers_ = std::make_unique<WorkerPool>(2, "workers");
    loop_->Run([&] {
      holds_ = std::make_unique<StoreTicketHolds>(*loop_, *store_, *workers_, bytes_max, shared);
      copies_ = std::make_unique<StoreTicketCopies>(*loop_, *store_, *workers_, bytes_max, shared);
    });
  }
  void Stop() {
    if (loop_ == nullptr) return;
    loop_->Run([&] {
      holds_.reset();
      copies_.reset();
    });
    workers_.reset();
    loop_.reset();
  }

  static TicketBlock Block(std::uint64_t number) {
    TicketBlock block;
    block.key = Key(number);
    block.layer_count = kLayers;
    block.token_count = kTokens;
    return block;
  }
  static Fingerprint Space() { return FingerprintOf(Spec()); }

  absl::StatusOr<TicketHolds::HoldId> Hold(const std::vector<TicketBlock>& blocks,
                                           const Fingerprint& space = Space()) {
    absl::StatusOr<TicketHolds::HoldId> hold = absl::UnknownError("");
    std::promise<void> held;
    loop_->Run([&] {
      hold = holds_->Hold(space, blocks, &heard_);
      if (hold.ok()) {
        holds_->WhenHeld([&held] { held.set_value(); });
      } else {
        held.set_value();
      }
    });
    held.get_future().wait();
    return hold;
  }
  void Release(TicketHolds::HoldId hold) {
    loop_->Run([&] { holds_->Release(hold); });
  }
  std::string Words() {
    std::string words;
    loop_->Run([&] { words = heard_.words; });
    return words;
  }
  std::vector<StoreTicketHolds::Page> Read(TicketHolds::HoldId hold, std::uint32_t block,
                                           const LayerSet& layers) {
    std::vector<StoreTicketHolds::Page> pages;
    loop_->Run([&] {
      const absl::Status read = holds_->Read(hold, block, layers, &pages);
      EXPECT_TRUE(read.ok()) << read;
    });
    return pages;
  }
  // Another thread does it, and soon.
  static void Until(const std::function<bool()>& is_so) {
    const auto begin = std::chrono::steady_clock::now();
    while (!is_so() && std::chrono::steady_clock::now() - begin < std::chrono::seconds(30)) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    EXPECT_TRUE(is_so());
  }
  absl::Status WriteLayer(BlockWriter& writer, std::uint64_t number, std::uint32_t layer) {
    for (std::uint32_t head = 0; head < kHeads; ++head) {
      const absl::Status written = WriteHead(writer, ValuesOf(number), layer, head).status();
      if (!written.ok()) return written;
    }
    return absl::OkStatus();
  }
  BlockWriter Write(std::uint64_t number) {
    return *store_->BeginStore(Id(number), {.token_count = kTokens});
  }

  // --- Copies ---
  absl::Status Begin(const TicketBlock& block, TicketCopies::CopyId* copy,
                     const Fingerprint& space = Space()) {
    std::promise<absl::Status> begun;
    loop_->Run([&] {
      *copy = copies_->Begin(space, block,
                             [&begun](const absl::Status& status) { begun.set_value(status); });
    });
    return begun.get_future().get();
  }
  absl::Status Commit(TicketCopies::CopyId copy, std::uint64_t digest) {
    std::promise<absl::Status> committed;
    loop_->Run([&] {
      copies_->Commit(copy, digest,
                      [&committed](const absl::Status& status) { committed.set_value(status); });
    });
    return committed.get_future().get();
  }
  StoreTicketCopies::PagesPtr PagesOf(TicketCopies::CopyId copy) {
    StoreTicketCopies::PagesPtr pages;
    loop_->Run([&] { pages = copies_->Find(copy); });
    return pages;
  }
  // What a pull does with a page that came.
  absl::Status Land(TicketCopies::CopyId copy, std::uint32_t layer, const std::string& bytes) {
    const StoreTicketCopies::PagesPtr pages = PagesOf(copy);
    const auto place = pages->Place(layer, static_cast<std::uint32_t>(bytes.size()));
    if (!place.ok()) return place.status();
    EXPECT_EQ(place->size(), bytes.size());
    std::memcpy(place->data(), bytes.data(), bytes.size());
    return pages->Check(layer);
  }
  // Pages of a block that was stored here, and is not any more.
  std::vector<std::string> Made(std::uint64_t number, std::uint64_t* digest, const Values& values) {
    EXPECT_TRUE(Put(Id(number), {.token_count = kTokens}, values).ok());
    std::vector<std::string> pages;
    {
      const auto block = store_->Fetch(Id(number));
      EXPECT_TRUE(block.ok()) << block.status();
      for (const auto& page : block->pages()) {
        pages.emplace_back(reinterpret_cast<const char*>(page.data()), page.size());
      }
      *digest = PagesDigest(block->pages());
    }
    EXPECT_TRUE(store_->Remove(space_, {Key(number)}).ok());
    EXPECT_EQ(store_->stats().tiers[static_cast<std::size_t>(Tier::kHost)].used_bytes, 0u);
    return pages;
  }
  std::uint64_t UsedBytes() const {
    return store_->stats().tiers[static_cast<std::size_t>(Tier::kHost)].used_bytes;
  }
  bool Found(std::uint64_t number) { return store_->Fetch(Id(number)).ok(); }

  std::unique_ptr<ThreadLoop> loop_;
  std::unique_ptr<WorkerPool> workers_;
  std::unique_ptr<StoreTicketHolds> holds_;
  std::unique_ptr<StoreTicketCopies> copies_;
  Heard heard_;
};

TEST_F(TicketStoreTest, WhatIsStoredUnderAHeldNameIsToldLayerByLayer) {
  const auto hold = Hold({Block(1), Block(2)});
  ASSERT_TRUE(hold.ok()) << hold.status();
  EXPECT_EQ(Words(), "");
  BlockWriter writer = Write(2);
  ASSERT_TRUE(WriteLayer(writer, 2, 1).ok());
  Until([&] { return Words() == "1:1 "; });
  LayerSet second;
  second.Add(1);
  const std::vector<StoreTicketHolds::Page> early = Read(*hold, 1, second);
  ASSERT_EQ(early.size(), 1u);
  const std::vector<std::byte> bytes(early[0].bytes.begin(), early[0].bytes.end());
  loop_->Run([&] {
    std::vector<StoreTicketHolds::Page> none;
    EXPECT_EQ(holds_->Read(*hold, 1, LayerSet::First(2), &none).code(),
              absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(holds_->Read(*hold, 0, second, &none).code(), absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(holds_->Read(*hold + 1, 0, second, &none).code(), absl::StatusCode::kNotFound);
  });
  ASSERT_TRUE(WriteLayer(writer, 2, 0).ok());
  Until([&] { return absl::StrContains(Words(), "1:sealed "); });
  const std::vector<StoreTicketHolds::Page> all = Read(*hold, 1, LayerSet::First(2));
  ASSERT_EQ(all.size(), 2u);
  EXPECT_TRUE(std::equal(bytes.begin(), bytes.end(), all[1].bytes.begin(), all[1].bytes.end()));
  loop_->Run([&] {
    ASSERT_EQ(heard_.digests.size(), 1u);
    EXPECT_EQ(heard_.digests[0], PagesDigest(store_->Fetch(Id(2))->pages()));
  });
  // Held: it cannot go.
  ASSERT_TRUE(store_->Evict(Tier::kHost, kManyBytes).ok());
  EXPECT_TRUE(Found(2));
}

TEST_F(TicketStoreTest, WhatIsThereIsToldWhenItIsHeldAndWhatDoesNotFitFails) {
  ASSERT_TRUE(Put(1).ok());
  BlockWriter writer = Write(2);
  ASSERT_TRUE(WriteLayer(writer, 2, 0).ok());
  TicketBlock other_parent = Block(2);
  other_parent.parent = Key(9);
  other_parent.block_index = 1;
  ASSERT_TRUE(Hold({Block(1), Block(2), other_parent}).ok());
  EXPECT_EQ(Words(), "0:sealed 1:1 2:failed ");
}

TEST_F(TicketStoreTest, ABlockOnDiskIsReadToBeHeld) {
  Stop();
  store_.reset();
  Start(kManyBytes, true);
  ASSERT_TRUE(Put(1).ok());
  ASSERT_TRUE(store_->Flush().ok());
  ASSERT_TRUE(store_->Evict(Tier::kHost, kManyBytes).ok());
  EXPECT_EQ(UsedBytes(), 0u);
  const auto hold = Hold({Block(1)});
  ASSERT_TRUE(hold.ok());
  EXPECT_EQ(Words(), "0:sealed ");
  EXPECT_EQ(Read(*hold, 0, LayerSet::First(2)).size(), 2u);
}

TEST_F(TicketStoreTest, WhatIsReleasedSaysNothingAndGoesWhenItWasRead) {
  const auto hold = Hold({Block(1)});
  ASSERT_TRUE(hold.ok());
  ASSERT_TRUE(Put(1).ok());
  Until([&] { return absl::StrContains(Words(), "sealed"); });
  auto pages = Read(*hold, 0, LayerSet::First(2));
  Release(*hold);
  const std::string words = Words();
  ASSERT_TRUE(store_->Remove(space_, {Key(1)}).ok());
  EXPECT_GT(UsedBytes(), 0u) << "somebody reads it";
  pages.clear();
  EXPECT_EQ(UsedBytes(), 0u);
  ASSERT_TRUE(Put(1).ok());
  loop_->Run([] {});
  EXPECT_EQ(Words(), words);
  loop_->Run([&] {
    EXPECT_EQ(holds_->size(), 0u);
    EXPECT_EQ(holds_->bytes(), 0u);
  });
  EXPECT_EQ(store_->stats().references, 0u);
}

TEST_F(TicketStoreTest, ABlockThatIsGivenUpFails) {
  ASSERT_TRUE(Hold({Block(1)}).ok());
  BlockWriter writer = Write(1);
  ASSERT_TRUE(WriteLayer(writer, 1, 0).ok());
  Values infinite = ValuesOf(1);
  std::fill(infinite.begin(), infinite.end(), std::uint16_t{0x7C00});
  EXPECT_FALSE(WriteHead(writer, infinite, 1, 0).ok());
  Until([&] { return absl::StrContains(Words(), "0:failed "); });
}

TEST_F(TicketStoreTest, HoldsAreBoundedAndFitTheirNamespace) {
  std::uint64_t bytes = 0;
  loop_->Run(
      [&] { bytes = InStore(*store_, *SharedTenants().Find(*store_, Space()), Block(1))->bytes; });
  Start(2 * bytes);
  const auto hold = Hold({Block(1), Block(2)});
  ASSERT_TRUE(hold.ok());
  const auto more = Hold({Block(3)});
  EXPECT_TRUE(absl::IsResourceExhausted(more.status())) << more.status();
  EXPECT_THAT(std::string(more.status().message()), HasSubstr(absl::StrCat(2 * bytes)));
  Release(*hold);
  EXPECT_TRUE(Hold({Block(3)}).ok());

  Fingerprint strange = Space();
  strange[0] ^= std::byte{1};
  EXPECT_TRUE(absl::IsNotFound(Hold({Block(1)}, strange).status()));
  TicketBlock block = Block(1);
  block.layer_count = 3;
  EXPECT_TRUE(absl::IsInvalidArgument(Hold({block}).status()));
  block = Block(1);
  block.group = 1;
  EXPECT_TRUE(absl::IsInvalidArgument(Hold({block}).status()));
  block = Block(1);
  block.token_count = kTokens + 1;
  EXPECT_TRUE(absl::IsInvalidArgument(Hold({block}).status()));
}

TEST_F(TicketStoreTest, ACopyIsSeenWhenItIsWholeAndTheProducersOwn) {
  std::uint64_t digest = 0;
  const std::vector<std::string> pages = Made(1, &digest, ValuesOf(1));
  TicketCopies::CopyId copy = 0;
  ASSERT_TRUE(Begin(Block(1), &copy).ok());
  ASSERT_TRUE(Land(copy, 1, pages[1]).ok());
  ASSERT_TRUE(Land(copy, 0, pages[0]).ok());
  EXPECT_FALSE(Found(1));
  ASSERT_TRUE(Commit(copy, digest).ok());
  {
    const auto block = store_->Fetch(Id(1));
    ASSERT_TRUE(block.ok());
    for (std::size_t i = 0; i < pages.size(); ++i) {
      EXPECT_EQ(std::memcmp(block->pages()[i].data(), pages[i].data(), pages[i].size()), 0);
    }
  }
  EXPECT_TRUE(absl::IsAlreadyExists(Begin(Block(1), &copy)));
  loop_->Run([&] {
    EXPECT_EQ(copies_->size(), 0u);
    EXPECT_EQ(copies_->bytes(), 0u);
  });
}

TEST_F(TicketStoreTest, RawHeadsMakeAPageLonger) {
  Values wild = ValuesOf(1);
  // Head 0 of layer 0: beyond what a tile's scales can hold.
  std::fill(wild.begin(), wild.begin() + 2 * kTokens * kDim, FloatToFloat16(60000.0f));
  std::uint64_t digest = 0;
  const std::vector<std::string> pages = Made(1, &digest, wild);
  ASSERT_GT(pages[0].size(), pages[1].size());
  TicketCopies::CopyId copy = 0;
  ASSERT_TRUE(Begin(Block(1), &copy).ok());
  ASSERT_TRUE(Land(copy, 0, pages[0]).ok());
  ASSERT_TRUE(Land(copy, 1, pages[1]).ok());
  EXPECT_TRUE(Commit(copy, digest).ok());
  EXPECT_TRUE(Found(1));
}

TEST_F(TicketStoreTest, DamagedAndForeignPagesAreRefused) {
  std::uint64_t digest = 0, other_digest = 0;
  const std::vector<std::string> pages = Made(1, &digest, ValuesOf(1));
  // The same block, of another engine whose values differ.
  const std::vector<std::string> others = Made(1, &other_digest, ValuesOf(2));
  ASSERT_NE(digest, other_digest);
  TicketCopies::CopyId copy = 0;
  ASSERT_TRUE(Begin(Block(1), &copy).ok());
  std::string damaged = pages[0];
  damaged[damaged.size() / 2] = static_cast<char>(damaged[damaged.size() / 2] ^ 4);
  EXPECT_TRUE(absl::IsDataLoss(Land(copy, 0, damaged)));
  EXPECT_TRUE(absl::IsDataLoss(Land(copy, 0, pages[1]))) << "another layer's";
  EXPECT_FALSE(Land(copy, 0, std::string(64, 'x')).ok());
  ASSERT_TRUE(Land(copy, 0, pages[0]).ok()) << "it can come again";
  ASSERT_TRUE(Land(copy, 1, others[1]).ok()) << "as a page it is good";
  EXPECT_TRUE(absl::IsDataLoss(Commit(copy, digest)));
  EXPECT_FALSE(Found(1));
  EXPECT_EQ(UsedBytes(), 0u);
}

TEST(TicketBytesTest, AnotherTenantHasAQuarterAndHearsNothingOfOthers) {
  TicketBytes bytes("tickets hold", 100);
  EXPECT_TRUE(bytes.Take("x", 20).ok());
  EXPECT_EQ(bytes.Take("x", 6), absl::ResourceExhaustedError(
                                    "of tenant \"x\" tickets hold 20 bytes: 6 more would be above "
                                    "25"));
  EXPECT_TRUE(bytes.Take("x", 5).ok());
  EXPECT_TRUE(bytes.Take("y", 25).ok());
  EXPECT_EQ(bytes.Take("", 51),
            absl::ResourceExhaustedError("tickets hold 50 bytes: 51 more would be above 100"));
  EXPECT_TRUE(bytes.Take("", 45).ok());
  EXPECT_EQ(bytes.Take("z", 6), absl::ResourceExhaustedError(
                                    "tickets hold all that they may, other tenants' too: no room "
                                    "for 6 bytes more"));
  bytes.GiveBack("x", 25);
  EXPECT_TRUE(bytes.Take("z", 6).ok());
  EXPECT_TRUE(bytes.Take("x", 24).ok());
  EXPECT_EQ(bytes.bytes(), 100u);
  bytes.GiveBack("", 45);
  for (const auto& [tenant, of] : {std::pair("x", 24u), {"y", 25u}, {"z", 6u}}) {
    bytes.GiveBack(tenant, of);
  }
  EXPECT_EQ(bytes.bytes(), 0u);
}

TEST_F(TicketStoreTest, BlocksAreOfTheTenantsThatAreShared) {
  NamespaceSpec spec = Spec();
  spec.tenant = "team-a";
  ASSERT_TRUE(store_->OpenNamespace("test", spec).ok());
  const Fingerprint theirs = FingerprintOf(spec);
  TicketCopies::CopyId copy = 0;
  EXPECT_TRUE(absl::IsNotFound(Hold({Block(1)}, theirs).status()));
  EXPECT_TRUE(absl::IsNotFound(Begin(Block(1), &copy, theirs)));
  std::uint64_t bytes = 0;
  loop_->Run(
      [&] { bytes = InStore(*store_, *SharedTenants().Find(*store_, Space()), Block(1))->bytes; });
  Start(4 * bytes, false, SharedTenants({.named = true}));
  const auto hold = Hold({Block(1)}, theirs);
  ASSERT_TRUE(hold.ok()) << hold.status();
  const absl::Status more = Hold({Block(2)}, theirs).status();
  EXPECT_TRUE(absl::IsResourceExhausted(more)) << more;
  EXPECT_THAT(std::string(more.message()), HasSubstr("of tenant \"team-a\""));
  EXPECT_TRUE(Hold({Block(1), Block(2), Block(3)}).ok()) << "the same keys, of another";
  Release(*hold);
  EXPECT_TRUE(Hold({Block(2)}, theirs).ok());
}

TEST_F(TicketStoreTest, CopiesAreBoundedAndLeaveNothing) {
  std::uint64_t bytes = 0;
  loop_->Run(
      [&] { bytes = InStore(*store_, *SharedTenants().Find(*store_, Space()), Block(1))->bytes; });
  Start(2 * bytes);
  TicketCopies::CopyId first = 0, second = 0, third = 0;
  ASSERT_TRUE(Begin(Block(1), &first).ok());
  ASSERT_TRUE(Begin(Block(2), &second).ok());
  EXPECT_GT(UsedBytes(), 0u);
  EXPECT_TRUE(absl::IsResourceExhausted(Begin(Block(3), &third)));
  Fingerprint strange = Space();
  strange[0] ^= std::byte{1};
  EXPECT_TRUE(absl::IsNotFound(Begin(Block(3), &third, strange)));
  // A pull that is under way keeps the memory.
  StoreTicketCopies::PagesPtr pull = PagesOf(first);
  const auto place = pull->Place(0, static_cast<std::uint32_t>(bytes / kLayers));
  ASSERT_TRUE(place.ok());
  loop_->Run([&] { copies_->Abandon(first); });
  std::memset(place->data(), 1, place->size());
  EXPECT_TRUE(absl::IsResourceExhausted(Begin(Block(3), &third)));
  EXPECT_EQ(PagesOf(first), nullptr);
  pull = nullptr;
  ASSERT_TRUE(Begin(Block(3), &third).ok());
  loop_->Run([&] {
    copies_->Abandon(second);
    copies_->Abandon(third);
  });
  EXPECT_EQ(UsedBytes(), 0u);
}

// Whatever is under way when the process goes.
TEST_F(TicketStoreTest, TheEndInTheMiddleOfIt) {
  const auto hold = Hold({Block(1)});
  ASSERT_TRUE(hold.ok());
  BlockWriter writer = Write(1);
  ASSERT_TRUE(WriteLayer(writer, 1, 0).ok());
  TicketCopies::CopyId copy = 0;
  ASSERT_TRUE(Begin(Block(2), &copy).ok());
  loop_->Run([&] {
    copies_->Begin(Space(), Block(3), [](const absl::Status&) { ADD_FAILURE(); });
    ASSERT_TRUE(holds_->Hold(Space(), {Block(4)}, &heard_).ok());
    holds_.reset();
    copies_.reset();
  });
  ASSERT_TRUE(WriteLayer(writer, 1, 1).ok());
  Stop();
  EXPECT_EQ(store_->stats().references, 0u);
}

}  // namespace
}  // namespace kvmill
