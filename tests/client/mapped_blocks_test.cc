// A reader of mapped blocks against memory that is reused under it: the pool is real, its owner is
// this test, and the lease's clock says whatever a case needs.
#include "client/mapped_blocks.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <thread>
#include <vector>

#include "client/mapped_content.h"
#include "storage/page_pool.h"
#include "tests/long_form.h"
#include "tests/storage/huge_memory.h"

namespace kvmill {
namespace {

using ::testing::HasSubstr;

constexpr std::uint16_t kLayers = 3;
constexpr std::uint64_t kArenaBytes = 2 * kExtentBytes;

class MappedBlocksTest : public ::testing::Test {
 protected:
  void SetUp() override {
    spec_.model = "m";
    spec_.hash_scheme = "h";
    spec_.block_tokens = 64;
    spec_.groups = {LayerGroup{.layers = {0, 1, 2}, .kv_heads = 2, .head_dim = 64}};
    kinds_.assign(2, SlotKind::kRaw);
    PagePool::Options options;
    options.capacity_bytes = options.arena_bytes = kArenaBytes;
    options.prefault = false;
    auto pool = PagePool::Create(options);
    ASSERT_TRUE(pool.ok()) << pool.status();
    pool_ = *std::move(pool);
  }
  static BlockKey Key(int number) {
    std::string bytes = "block-key-of-32-bytes-and-no-" + std::to_string(100 + number);
    return *BlockKey::FromBytes(bytes);
  }
  PageIdentity IdentityOf(const BlockKey& key, std::uint16_t layer) const {
    PageIdentity identity;
    identity.key = key;
    identity.layer = layer;
    identity.head_count = 2;
    identity.token_count = 64;
    identity.format = FormatOf(spec_, spec_.groups[0]);
    return identity;
  }
  std::size_t page_bytes() const {
    return PageBytes(FormatOf(spec_, spec_.groups[0]), 64, absl::MakeConstSpan(kinds_));
  }
  // Takes the pool's slots for a block of this key, all of whose bytes are `value`, in two steps.
  void Begin() { ASSERT_TRUE(pool_->Acquire(1, page_bytes(), kLayers, &slots_).ok()); }
  void Finish(int key, int value) {
    for (std::uint16_t layer = 0; layer < kLayers; ++layer) {
      const auto page = pool_->Bytes(slots_[layer]).first(page_bytes());
      InitPage(IdentityOf(Key(key), layer), kinds_, page);
      for (std::size_t head = 0; head < 2; ++head) {
        const auto contents = SlotContents(page, head);
        std::memset(contents.data(), value, contents.size());
      }
      SealPage(page);
      pool_->Publish(slots_[layer]);
    }
  }
  void Put(int key, int value) {
    Begin();
    Finish(key, value);
  }
  // As the owner of the memory, whoever reads it.
  void Drop() {
    for (const SlotRef slot : slots_) pool_->Release(slot);
    slots_.clear();
  }
  // What Client::Map makes of a reply that names those slots, under a lease for block `key`.
  std::unique_ptr<MappedBlocks> Map(int key, std::chrono::milliseconds lease) {
    std::vector<MappedRun> runs;
    for (const SlotRef slot : slots_) {
      const PagePool::Location where = pool_->Locate(slot);
      MappedRun& run = runs.emplace_back();
      run.page_count = 1;
      run.page_bytes = static_cast<std::uint32_t>(page_bytes());
      run.offset_bytes = where.offset_bytes;
      run.generation_offset_bytes = where.generation_offset_bytes;
    }
    if (mapping_ == nullptr) {
      DoorClient::ArenaMemory memory;
      memory.arena_bytes = kArenaBytes;
      memory.fd = OwnedFd(fcntl(pool_->ArenaFd(0), F_DUPFD_CLOEXEC, 0));
      MappedArenaInfo info;
      info.arena_bytes = kArenaBytes;
      auto mapping = ArenaMapping::Create(memory, info);
      EXPECT_TRUE(mapping.ok()) << mapping.status();
      mapping_ = *std::move(mapping);
    }
    return Map(key, lease, std::move(runs));
  }
  std::unique_ptr<MappedBlocks> Map(int key, std::chrono::milliseconds lease,
                                    std::vector<MappedRun> runs) {
    auto content = std::make_unique<MappedBlocks::Content>();
    content->ns.spec = spec_;
    content->keys = {Key(key)};
    content->blocks.resize(1);
    content->blocks[0].token_count = 64;
    MappedBlocks::Content::Entry entry;
    entry.token_count = 64;
    entry.run_count = kLayers;
    content->entries = {entry};
    content->runs = std::move(runs);
    runs_ = content->runs;
    content->generations = std::make_unique<std::atomic<std::uint64_t>[]>(kLayers);
    content->mappings = {mapping_};
    content->session = std::make_shared<SessionHandle>();
    content->owner = std::make_shared<MapOwner>(nullptr);
    const auto until = std::chrono::steady_clock::now() + lease;
    content->deadline_nanos =
        std::chrono::duration_cast<std::chrono::nanoseconds>(until.time_since_epoch()).count();
    return std::make_unique<MappedBlocks>(std::move(content));
  }

  NamespaceSpec spec_;
  std::vector<SlotKind> kinds_;
  std::unique_ptr<PagePool> pool_;
  std::vector<SlotRef> slots_;
  std::vector<MappedRun> runs_;  // Of the last Map.
  ArenaMappingPtr mapping_;
};

constexpr std::chrono::milliseconds kLong{600'000};

TEST_F(MappedBlocksTest, WholePagesUnderALeaseAreRead) {
  Put(1, 7);
  const auto mapped = Map(1, kLong);
  EXPECT_TRUE(mapped->Check().ok()) << "nothing was read: " << mapped->Check();
  for (std::size_t layer = 0; layer < kLayers; ++layer) {
    for (int again = 0; again < 2; ++again) {
      const auto page = mapped->Page(0, 0, layer);
      ASSERT_TRUE(page.ok()) << page.status();
      EXPECT_EQ(page->header().layer, layer);
      EXPECT_EQ(page->contents(1)[5], std::byte{7});
    }
  }
  EXPECT_TRUE(mapped->Check().ok()) << mapped->Check();
  EXPECT_TRUE(mapped->VerifyContents().ok()) << mapped->VerifyContents();
}

// Its clock may say what it likes, and the next block in that memory may be the same one again:
// what was read in between may be of both.
TEST_F(MappedBlocksTest, MemoryThatWasReusedAfterTheFirstLookIsNoticed) {
  for (const int next : {2, 1}) {
    Put(1, 7);
    const auto mapped = Map(1, kLong);
    ASSERT_TRUE(mapped->Page(0, 0, 1).ok());
    EXPECT_TRUE(mapped->Check().ok());
    Drop();
    EXPECT_TRUE(absl::IsAborted(mapped->Check())) << "free: " << mapped->Check();
    Put(next, 8);
    EXPECT_TRUE(absl::IsAborted(mapped->Check())) << mapped->Check();
    EXPECT_THAT(mapped->Check().ToString(), HasSubstr("another block's"));
    EXPECT_TRUE(absl::IsAborted(mapped->Page(0, 0, 1).status()));
    EXPECT_FALSE(mapped->VerifyContents().ok());
    Drop();
  }
}

TEST_F(MappedBlocksTest, AFirstLookAfterTheLeaseIsTooLate) {
  Put(1, 7);
  const auto mapped = Map(1, std::chrono::milliseconds(0));
  EXPECT_TRUE(absl::IsAborted(mapped->Page(0, 0, 0).status()));
  EXPECT_THAT(mapped->Page(0, 0, 0).status().ToString(), HasSubstr("the leases ended"));
  std::vector<AttentionBlock> table(2);
  EXPECT_TRUE(absl::IsAborted(FillAttentionBlocks(*mapped, 0, 0, 0, 1, absl::MakeSpan(table))));
  EXPECT_TRUE(absl::IsAborted(mapped->Check()));
  EXPECT_TRUE(absl::IsAborted(mapped->VerifyContents()));
}

// The daemon ended the session and this process does not know yet: the lease seems to hold.
TEST_F(MappedBlocksTest, MemoryThatWasReusedBeforeTheFirstLookIsNotTakenForTheBlock) {
  Put(1, 7);
  const auto mapped = Map(1, kLong);
  Drop();
  EXPECT_TRUE(absl::IsAborted(mapped->Page(0, 0, 0).status())) << "free memory";
  Begin();
  EXPECT_TRUE(absl::IsAborted(mapped->Page(0, 0, 1).status())) << "being written";
  EXPECT_THAT(mapped->Page(0, 0, 1).status().ToString(), HasSubstr("of no whole page"));
  Finish(2, 8);
  for (std::size_t layer = 0; layer < kLayers; ++layer) {
    EXPECT_TRUE(absl::IsDataLoss(mapped->Page(0, 0, layer).status()))
        << mapped->Page(0, 0, layer).status();
  }
}

// As they are in the daemon: aligned alike.
TEST_F(MappedBlocksTest, HugePagesOfTheDaemonAreHugeForItsReaders) {
  PagePool::Options options;
  options.capacity_bytes = options.arena_bytes = kArenaBytes;
  auto pool = PagePool::Create(options);
  ASSERT_TRUE(pool.ok()) << pool.status();
  if ((*pool)->stats().huge_bytes == 0) GTEST_SKIP() << "this kernel gives none";
  pool_ = *std::move(pool);
  Put(1, 7);
  const auto mapped = Map(1, kLong);
  const auto page = mapped->Page(0, 0, 2);
  ASSERT_TRUE(page.ok()) << page.status();
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(mapping_->data()) % kExtentBytes, 0u);
  EXPECT_EQ(testing::HugeBytesAt(page->bytes().data()), kArenaBytes) << "generations and pages";
}

// Lookers and an owner at once, whose clock would allow everything: a copy that passed the checks
// is one block's, and the right one's.
TEST_F(MappedBlocksTest, WhatPassesTheChecksWasNeverTorn) {
  Put(1, 1);
  Map(1, kLong);
  const std::vector<MappedRun> runs = runs_;
  std::atomic<bool> stop{false};
  std::thread owner([&] {
    for (int round = 2; !stop.load(std::memory_order_relaxed); ++round) {
      // The same slots: the pool has no better. Every second time another block is there.
      Drop();
      Put(1 + round % 2, round % 250);
      const auto pause = std::chrono::steady_clock::now() + std::chrono::microseconds(round % 40);
      while (std::chrono::steady_clock::now() < pause) {
      }
    }
  });
  const auto end = std::chrono::steady_clock::now() +
                   ShortOrLong(std::chrono::seconds(1), std::chrono::seconds(30));
  std::uint64_t passed = 0;
  std::uint64_t refused = 0;
  std::vector<std::byte> copy;
  bool whole = true;
  bool of_block_1 = true;
  while (whole && of_block_1 && std::chrono::steady_clock::now() < end) {
    const auto mapped = Map(1, kLong, runs);
    const auto page = mapped->Page(0, 0, passed % kLayers);
    if (!page.ok()) {
      ++refused;
      continue;
    }
    const auto contents = page->contents(1);
    copy.assign(contents.begin(), contents.end());
    if (!mapped->Check().ok()) {
      ++refused;
      continue;
    }
    ++passed;
    // Block 1 is there in even rounds only, and its bytes are the round's.
    whole = std::memcmp(copy.data(), copy.data() + 1, copy.size() - 1) == 0;
    of_block_1 = copy[0] == std::byte{1} || std::to_integer<int>(copy[0]) % 2 == 0;
  }
  stop = true;
  owner.join();
  EXPECT_TRUE(whole) << "torn";
  EXPECT_TRUE(of_block_1) << "another's";
  EXPECT_GT(passed, 10u);
  EXPECT_GT(refused, 10u);
  std::printf("%llu reads passed, %llu were refused\n", static_cast<unsigned long long>(passed),
              static_cast<unsigned long long>(refused));
}

}  // namespace
}  // namespace kvmill
