// The order of each policy: against a naive model where the paper's rules fit in one, by example
// for what the default adds.
#include <gtest/gtest.h>

#include <algorithm>
#include <deque>
#include <list>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "storage/eviction/policy.h"
#include "tests/long_form.h"

namespace kvmill {
namespace {

constexpr auto kAny = [](EntryId) { return true; };

// A policy and the words of these tests.
class Tier {
 public:
  Tier(std::string_view name, std::uint32_t capacity, bool leaf_first = true,
       std::uint32_t entries_max = 0) {
    auto policy =
        CreateEvictionPolicy(name, {.entries_max = entries_max == 0 ? 4 * capacity : entries_max,
                                    .capacity_blocks = capacity,
                                    .leaf_first = leaf_first});
    EXPECT_TRUE(policy.ok()) << policy.status();
    policy_ = *std::move(policy);
  }

  void Insert(EntryId id, EntryId parent = kNoEntry) { InsertAs(id, id, parent); }
  // The block called `key`, which may have been here before under another id.
  void InsertAs(EntryId id, std::uint64_t key, EntryId parent = kNoEntry) {
    policy_->Insert(id, {.key_hash = (key + 1) * 0x9E3779B97F4A7C15u, .parent = parent});
  }
  // A prompt, all new: each block the child of the one before.
  void InsertPrompt(const std::vector<EntryId>& ids, EntryId parent = kNoEntry) {
    for (const EntryId id : ids) {
      Insert(id, parent);
      parent = id;
    }
  }
  void Touch(const std::vector<EntryId>& ids) {
    for (const EntryId id : ids) policy_->Touch(id);
  }
  void Remove(EntryId id) { policy_->Remove(id); }
  EntryId Evict() { return policy_->Evict(kAny); }
  std::vector<EntryId> EvictAll() {
    std::vector<EntryId> victims;
    while (policy_->size() > 0) victims.push_back(Evict());
    return victims;
  }
  // `ids` in the order in which they leave; empties the tier.
  std::vector<EntryId> Among(const std::vector<EntryId>& ids) {
    std::vector<EntryId> found;
    for (const EntryId id : EvictAll()) {
      if (std::find(ids.begin(), ids.end(), id) != ids.end()) found.push_back(id);
    }
    return found;
  }

 private:
  std::unique_ptr<EvictionPolicy> policy_;
};

using Ids = std::vector<EntryId>;

// Naive models, for prompts without chains and blocks that never return.
class NaiveLru {
 public:
  explicit NaiveLru(std::uint32_t) {}
  void Insert(EntryId id) { order_.push_back(id); }
  void Touch(EntryId id) {
    Remove(id);
    order_.push_back(id);
  }
  void Remove(EntryId id) { order_.erase(std::find(order_.begin(), order_.end(), id)); }
  EntryId Evict() {
    const EntryId id = order_.front();
    order_.erase(order_.begin());
    return id;
  }

 private:
  std::vector<EntryId> order_;  // Oldest first.
};

class NaiveSieve {
 public:
  explicit NaiveSieve(std::uint32_t) {}
  void Insert(EntryId id) { queue_.push_back({id, false}); }
  void Touch(EntryId id) { queue_[Find(id)].used = true; }
  void Remove(EntryId id) { Erase(Find(id)); }
  EntryId Evict() {
    while (true) {
      if (hand_ >= queue_.size()) hand_ = 0;
      if (!queue_[hand_].used) break;
      queue_[hand_++].used = false;
    }
    const EntryId id = queue_[hand_].id;
    Erase(hand_);
    return id;
  }

 private:
  struct Item {
    EntryId id;
    bool used;
  };
  std::size_t Find(EntryId id) const {
    std::size_t i = 0;
    while (queue_[i].id != id) ++i;
    return i;
  }
  void Erase(std::size_t i) {
    queue_.erase(queue_.begin() + static_cast<std::ptrdiff_t>(i));
    if (i < hand_) --hand_;
    if (hand_ == queue_.size()) hand_ = 0;  // It went over the youngest: next comes the oldest.
  }
  std::vector<Item> queue_;  // Oldest first.
  std::size_t hand_ = 0;
};

class NaiveS3Fifo {
 public:
  explicit NaiveS3Fifo(std::uint32_t capacity) : small_target_(std::max(1u, capacity / 10)) {}
  void Insert(EntryId id) { small_.push_back({id, 0}); }
  void Touch(EntryId id) {
    for (auto* queue : {&small_, &main_}) {
      for (Item& item : *queue) {
        if (item.id == id) item.uses = std::min(3, item.uses + 1);
      }
    }
  }
  void Remove(EntryId id) {
    for (auto* queue : {&small_, &main_}) {
      std::erase_if(*queue, [&](const Item& item) { return item.id == id; });
    }
  }
  EntryId Evict() {
    while (true) {
      const bool from_small = (small_.size() >= small_target_ && !small_.empty()) || main_.empty();
      std::deque<Item>& queue = from_small ? small_ : main_;
      const Item item = queue.front();
      queue.pop_front();
      if (from_small && item.uses > 1) {
        main_.push_back({item.id, 0});
      } else if (!from_small && item.uses > 0) {
        main_.push_back({item.id, item.uses - 1});
      } else {
        return item.id;
      }
    }
  }

 private:
  struct Item {
    EntryId id;
    int uses;
  };
  std::size_t small_target_;
  std::deque<Item> small_, main_;  // Oldest first.
};

template <class Naive>
void ExpectSameOrder(std::string_view name) {
  constexpr std::uint32_t kCapacity = 50;
  for (std::uint32_t seed = 1; seed <= ShortOrLong(5u, 100u); ++seed) {
    SCOPED_TRACE(testing::Message() << name << ", seed " << seed);
    Tier tier(name, kCapacity, false, 5000);
    Naive naive(kCapacity);
    std::mt19937 random(seed);
    Ids present;
    EntryId next = 0;
    for (int step = 0; step < 4000; ++step) {
      const auto what = random() % 100;
      // The newest blocks are used less than the old ones, so that the queues differ.
      const std::size_t any = present.empty() ? 0 : random() % present.size() * (random() % 2);
      if (what < 40 || present.empty()) {
        if (present.size() == kCapacity) {
          const EntryId victim = tier.Evict();
          ASSERT_EQ(victim, naive.Evict()) << "step " << step;
          std::erase(present, victim);
        }
        tier.Insert(next);
        naive.Insert(next);
        present.push_back(next++);
      } else if (what < 95) {
        tier.Touch({present[any]});
        naive.Touch(present[any]);
      } else {
        tier.Remove(present[any]);
        naive.Remove(present[any]);
        std::erase(present, present[any]);
      }
    }
  }
}

TEST(EvictionOrderTest, LruLeavesInOrderOfLastUse) { ExpectSameOrder<NaiveLru>("lru"); }
TEST(EvictionOrderTest, SieveLeavesAsItsHandFinds) { ExpectSameOrder<NaiveSieve>("sieve"); }
TEST(EvictionOrderTest, S3FifoLeavesByItsTwoQueues) { ExpectSameOrder<NaiveS3Fifo>("s3-fifo"); }

TEST(EvictionOrderTest, LruOfChainsTakesTheDeepestOfTheOldestPrompt) {
  Tier tier("lru", 8);
  tier.InsertPrompt({0, 1, 2});
  tier.InsertPrompt({3, 4}, 0);  // Shares block 0 with the first prompt.
  tier.Touch({0, 1});            // The first prompt is used again, but not its last block.
  EXPECT_EQ(tier.EvictAll(), (Ids{2, 4, 3, 1, 0}));
}

TEST(EvictionOrderTest, PlainLruIsBlindToChains) {
  Tier tier("lru", 8, false);
  tier.InsertPrompt({0, 1, 2});
  EXPECT_EQ(tier.EvictAll(), (Ids{0, 1, 2}));
}

TEST(EvictionOrderTest, AParentGoesBackToItsPlaceWhenItsLastChildLeaves) {
  Tier tier("lru", 8);
  tier.InsertPrompt({0, 1});
  tier.Insert(2);
  tier.Touch({1});  // Its parent was not touched, so 1 stays behind it: both are older than 2.
  EXPECT_EQ(tier.EvictAll(), (Ids{1, 0, 2}));
}

TEST(EvictionOrderTest, ArcKeepsWhatWasUsedTwiceFromAScan) {
  Tier tier("arc", 8, false, 100);
  tier.InsertPrompt({0, 1, 2, 3});
  tier.Touch({0, 1});
  for (EntryId id = 4; id < 8; ++id) tier.Insert(id);
  for (EntryId id = 8; id < 40; ++id) {  // The scan.
    EXPECT_GT(tier.Evict(), 1u);
    tier.Insert(id);
  }
}

TEST(EvictionOrderTest, ArcLengthensTheListWhoseGhostsReturn) {
  Tier tier("arc", 4, false, 100);
  for (EntryId id = 0; id < 4; ++id) tier.Insert(id);
  tier.Touch({0, 1, 2});
  ASSERT_EQ(tier.Evict(), 3u);  // The only one that was used once.
  tier.InsertAs(10, 3);         // It returns: the list of blocks used once may have one block.
  ASSERT_EQ(tier.Evict(), 0u);
  tier.Insert(11);
  EXPECT_EQ(tier.Evict(), 1u);  // So 11 stays.
}

TEST(EvictionOrderTest, S3FifoPutsAReturningBlockIntoTheMainQueue) {
  Tier tier("s3-fifo", 10, false, 100);
  for (EntryId id = 0; id < 10; ++id) tier.Insert(id);
  ASSERT_EQ(tier.Evict(), 0u);
  tier.InsertAs(20, 0);
  for (EntryId id = 1; id < 10; ++id) EXPECT_EQ(tier.Evict(), id);
  EXPECT_EQ(tier.Evict(), 20u);
}

TEST(EvictionOrderTest, TinyLfuLetsOnlyMoreFrequentBlocksIn) {
  Tier tier("w-tinylfu", 100, false, 1000);
  for (EntryId id = 0; id < 100; ++id) tier.Insert(id);
  for (EntryId id = 0; id < 99; ++id) tier.Touch({id, id});
  for (EntryId id = 100; id < 200; ++id) {  // Used once: no match for what is there.
    EXPECT_GE(tier.Evict(), 99u);
    tier.Insert(id);
  }
  tier.Touch({199, 199, 199, 199});
  tier.Insert(200);
  EXPECT_LT(tier.Evict(), 99u);  // 199 leaves the window for the main part.
}

// What follows is about "returns". 1000 blocks of room; alpha starts at 0.08.
constexpr std::uint32_t kRoom = 1000;

class ReturnsTest : public ::testing::Test {
 protected:
  // New blocks that never return: they make what is here older.
  void Fill(EntryId first, std::uint32_t count) {
    for (EntryId id = first; id < first + count; ++id) tier_.Insert(id);
  }

  Tier tier_{"returns", kRoom, true, 10 * kRoom};
};

TEST_F(ReturnsTest, OrdersConversationsThatCameOnceAsLruDoes) {
  tier_.InsertPrompt({0, 1, 2});
  tier_.InsertPrompt({3, 4});
  tier_.Insert(5);
  EXPECT_EQ(tier_.EvictAll(), (Ids{2, 1, 0, 4, 3, 5}));
}

TEST_F(ReturnsTest, KeepsAConversationThatCameBackLongerThanAYoungerOneThatDidNot) {
  tier_.InsertPrompt({0, 1, 2});
  tier_.Touch({0, 1, 2});
  tier_.InsertPrompt({3, 4}, 2);  // Its second turn.
  tier_.InsertPrompt({10, 11, 12});
  Fill(100, 500);
  EXPECT_EQ(tier_.Among({0, 1, 2, 3, 4, 10, 11, 12}), (Ids{12, 11, 10, 4, 3, 2, 1, 0}));
}

TEST_F(ReturnsTest, ForgetsAConversationThatCameBackWhenItIsMuchOlder) {
  tier_.InsertPrompt({0, 1});
  tier_.Touch({0, 1});
  Fill(100, 500);
  tier_.InsertPrompt({10, 11});
  Fill(1000, 100);
  EXPECT_EQ(tier_.Among({0, 1, 10, 11}), (Ids{1, 0, 11, 10}));
}

TEST_F(ReturnsTest, TakesTheUsesOfASystemPromptForNoMoreThanOneReturn) {
  tier_.InsertPrompt({0, 1});  // The system prompt.
  tier_.Touch({0, 1});
  tier_.InsertPrompt({2, 3}, 1);  // One conversation on it, when it had been used once.
  for (int i = 0; i < 10; ++i) tier_.Touch({0, 1});
  tier_.InsertPrompt({4, 5}, 1);  // Another, when it had been used often: no better than the first.
  Fill(100, 500);
  EXPECT_EQ(tier_.Among({2, 3, 4, 5}), (Ids{3, 2, 5, 4}));
}

TEST_F(ReturnsTest, RemembersThatABlockWasHereBefore) {
  tier_.Insert(0);
  ASSERT_EQ(tier_.Evict(), 0u);
  tier_.InsertAs(1, 0);  // The block of entry 0 returns, in another entry.
  tier_.Insert(2);
  Fill(100, 500);
  EXPECT_EQ(tier_.Among({1, 2}), (Ids{2, 1}));
}

TEST_F(ReturnsTest, ForgetsGhostsWhenManyOthersLeft) {
  tier_.Insert(0);
  ASSERT_EQ(tier_.Evict(), 0u);
  for (std::uint64_t key = 0; key < 10 * kRoom; ++key) {
    tier_.InsertAs(1, 100'000 + key);
    ASSERT_EQ(tier_.Evict(), 1u);
  }
  tier_.InsertAs(1, 0);
  tier_.Insert(2);
  Fill(100, 500);
  EXPECT_EQ(tier_.Among({1, 2}), (Ids{1, 2}));
}

TEST(ReturnsLeaseTest, TreatsALeasedBlockAsJustUsed) {
  auto policy = CreateEvictionPolicy("returns", {.entries_max = 8, .capacity_blocks = 8});
  ASSERT_TRUE(policy.ok());
  for (EntryId id = 0; id < 4; ++id) (*policy)->Insert(id, {.key_hash = id + 1ull});
  EXPECT_EQ((*policy)->Evict([](EntryId id) { return id != 0; }), 1u);
  EXPECT_EQ((*policy)->Evict(kAny), 2u);
  EXPECT_EQ((*policy)->Evict(kAny), 3u);
  EXPECT_EQ((*policy)->Evict(kAny), 0u);
}

}  // namespace
}  // namespace kvmill
