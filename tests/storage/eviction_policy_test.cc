// What every policy must do, whatever order it prefers.
//
// Goal: a policy never loses an entry, never names one that is not there or may not leave, asks a
// bounded number of times, and lets leaves leave first. Method: random calls, checked against a
// model that knows who is present and who is whose parent, for every policy, with and without
// leaf_first, over several seeds and sizes.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "storage/eviction/policy.h"
#include "storage/eviction/shared_nodes.h"
#include "tests/long_form.h"

namespace kvmill {
namespace {

using ::testing::HasSubstr;

std::unique_ptr<EvictionPolicy> Create(std::string_view name, std::uint32_t entries,
                                       std::uint32_t capacity, bool leaf_first = true) {
  auto policy = CreateEvictionPolicy(
      name, {.entries_max = entries, .capacity_blocks = capacity, .leaf_first = leaf_first});
  EXPECT_TRUE(policy.ok()) << policy.status();
  return *std::move(policy);
}

// The owner of the entries: who is present, whose child, and how often it was asked.
class ModelOwner {
 public:
  ModelOwner(EvictionPolicy& policy, std::uint32_t entries_max, bool leaf_first, std::uint32_t seed)
      : policy_(policy), leaf_first_(leaf_first), entries_(entries_max), random_(seed) {}

  std::uint32_t Draw(std::uint32_t below) { return static_cast<std::uint32_t>(random_() % below); }
  std::size_t present() const { return present_.size(); }

  void InsertOne() {
    if (present_.size() == entries_.size()) return;
    EntryId id = Draw(static_cast<std::uint32_t>(entries_.size()));
    while (entries_[id].here) id = (id + 1) % static_cast<EntryId>(entries_.size());
    EntryTraits traits;
    // Few distinct hashes, so that blocks return while ghosts know them.
    traits.key_hash = (std::uint64_t{Draw(1000)} + 1) * 0x9E3779B97F4A7C15u;
    // Half of the entries extend one of the latest, so that chains grow long.
    if (!present_.empty() && Draw(8) != 0) {
      traits.parent = Draw(2) == 0 && entries_[latest_].here ? latest_ : AnyPresent();
    }
    policy_.Insert(id, traits);
    entries_[id] = {.here = true, .parent = traits.parent};
    if (traits.parent != kNoEntry) entries_[traits.parent].children.insert(id);
    present_.insert(id);
    latest_ = id;
  }

  void TouchOne() {
    if (!present_.empty()) policy_.Touch(AnyPresent());
  }

  void RemoveOne() {
    if (present_.empty()) return;
    const EntryId id = AnyPresent();
    policy_.Remove(id);
    Leave(id);
  }

  // `refuse_percent` of the entries may not leave.
  void EvictOne(std::uint32_t refuse_percent) {
    std::set<EntryId> refused;
    for (const EntryId id : present_) {
      if (Draw(100) < refuse_percent) refused.insert(id);
    }
    int asks = 0;
    EntryId last_asked = kNoEntry;
    const EntryId victim = policy_.Evict([&](EntryId id) {
      ++asks;
      last_asked = id;
      EXPECT_TRUE(present_.contains(id)) << "asked about " << id << ", which is not here";
      if (leaf_first_) {
        EXPECT_TRUE(entries_[id].children.empty()) << "asked about " << id << ", no leaf";
      }
      return !refused.contains(id);
    });
    EXPECT_LE(asks, EvictionPolicy::kAsksMax);
    if (victim == kNoEntry) {
      EXPECT_TRUE(present_.empty() || !refused.empty()) << "no victim, though any may leave";
      return;
    }
    EXPECT_EQ(victim, last_asked);
    ASSERT_TRUE(present_.contains(victim));
    EXPECT_FALSE(refused.contains(victim));
    Leave(victim);
  }

 private:
  struct Entry {
    bool here = false;
    EntryId parent = kNoEntry;
    std::set<EntryId> children = {};
  };

  EntryId AnyPresent() {
    auto it = present_.lower_bound(Draw(static_cast<std::uint32_t>(entries_.size())));
    return it == present_.end() ? *present_.begin() : *it;
  }

  void Leave(EntryId id) {
    for (const EntryId child : entries_[id].children) entries_[child].parent = kNoEntry;
    if (entries_[id].parent != kNoEntry) entries_[entries_[id].parent].children.erase(id);
    entries_[id] = {};
    present_.erase(id);
  }

  EvictionPolicy& policy_;
  bool leaf_first_;
  std::vector<Entry> entries_;
  std::set<EntryId> present_;
  EntryId latest_ = 0;
  std::mt19937 random_;
};

class EveryPolicy : public ::testing::TestWithParam<std::string_view> {};

TEST_P(EveryPolicy, AgreesWithAModelUnderRandomCalls) {
  for (const bool leaf_first : {true, false}) {
    for (const std::uint32_t entries : {1u, 2u, 7u, 64u, 300u}) {
      for (std::uint32_t seed = 1; seed <= ShortOrLong(4u, 100u); ++seed) {
        SCOPED_TRACE(testing::Message() << "leaf_first " << leaf_first << ", entries " << entries
                                        << ", seed " << seed);
        const std::uint32_t capacity = std::max(1u, entries * 3 / 4);
        const auto policy = Create(GetParam(), entries, capacity, leaf_first);
        const bool heeds_parents = leaf_first || GetParam() == "returns";
        ModelOwner owner(*policy, entries, heeds_parents, seed);
        for (int step = 0; step < 4000 && !HasFailure(); ++step) {
          const std::uint32_t what = owner.Draw(100);
          if (what < 45) {
            while (owner.present() >= capacity && owner.Draw(4) != 0) owner.EvictOne(0);
            owner.InsertOne();
          } else if (what < 80) {
            owner.TouchOne();
          } else if (what < 85) {
            owner.RemoveOne();
          } else {
            owner.EvictOne(what < 90 ? 100 : what < 95 ? 50 : 5);
          }
          ASSERT_EQ(policy->size(), owner.present());
        }
        // No entry is lost: all of them come out, one by one.
        while (owner.present() > 0 && !HasFailure()) owner.EvictOne(0);
        EXPECT_EQ(policy->size(), 0u);
        EXPECT_EQ(policy->Evict([](EntryId) { return true; }), kNoEntry);
      }
    }
  }
}

TEST_P(EveryPolicy, LetsAChainLeaveFromItsEnd) {
  const auto policy = Create(GetParam(), 8, 8);
  for (EntryId id = 0; id < 8; ++id) {
    policy->Insert(id,
                   {.key_hash = id * 0x9E3779B97F4A7C15u, .parent = id == 0 ? kNoEntry : id - 1});
  }
  for (EntryId id = 8; id-- > 0;) EXPECT_EQ(policy->Evict([](EntryId) { return true; }), id);
}

TEST_P(EveryPolicy, FindsTheOneBlockThatMayLeaveBehindManyThatMayNot) {
  const auto policy = Create(GetParam(), 1000, 1000);
  for (EntryId id = 0; id < 1000; ++id) {
    policy->Insert(id, {.key_hash = (id + 1) * 0x9E3779B97F4A7C15u});
  }
  // One call asks about 64 at most; what was refused goes to the end of the queue.
  int calls = 1;
  while (policy->Evict([](EntryId id) { return id == 777; }) != 777u && calls < 100) ++calls;
  EXPECT_LE(calls, 2 * 1000 / EvictionPolicy::kAsksMax + 1);
  EXPECT_EQ(policy->size(), 999u);
}

TEST_P(EveryPolicy, TakesAReusedIdForANewBlock) {
  const auto policy = Create(GetParam(), 4, 4);
  policy->Insert(0, {.key_hash = 1});
  policy->Insert(1, {.key_hash = 2, .parent = 0});
  policy->Remove(0);                   // Its child stays, without a parent.
  policy->Insert(0, {.key_hash = 3});  // Another block: not the parent of 1.
  EXPECT_EQ(policy->Evict([](EntryId id) { return id == 0; }), 0u);
  EXPECT_EQ(policy->Evict([](EntryId) { return true; }), 1u);
}

TEST_P(EveryPolicy, ReportsItsNameAndASmallFixedMemory) {
  const auto policy = Create(GetParam(), 100'000, 100'000);
  EXPECT_EQ(policy->name(), GetParam());
  EXPECT_GE(policy->bytes_per_entry(), 16u);
  EXPECT_LE(policy->bytes_per_entry(), 41u);
}

// Two that share nodes, each of which knows every other id, do as two that do not.
TEST_P(EveryPolicy, SharesNodesAsIfTheyWereItsOwn) {
  constexpr std::uint32_t kEntries = 400;
  SharedNodes nodes(kEntries, 2);
  const auto create_sharing = [&] {
    return *CreateEvictionPolicy(GetParam(),
                                 {.entries_max = kEntries, .capacity_blocks = 50, .nodes = &nodes});
  };
  std::array<std::unique_ptr<EvictionPolicy>, 2> sharing = {create_sharing(), create_sharing()};
  std::array<std::unique_ptr<EvictionPolicy>, 2> alone = {Create(GetParam(), kEntries, 50),
                                                          Create(GetParam(), kEntries, 50)};
  std::mt19937 random(7);
  std::array<std::vector<EntryId>, 2> here;
  for (int step = 0; step < 20'000; ++step) {
    const std::size_t which = random() % 2;
    if (step % 5000 == 4999) {  // One goes, with all that it knew; the next begins with nothing.
      sharing[which].reset();
      sharing[which] = create_sharing();
      alone[which] = Create(GetParam(), kEntries, 50);
      here[which].clear();
    }
    std::vector<EntryId>& ids = here[which];
    const auto any = [&] { return ids[random() % ids.size()]; };
    const auto forget = [&](EntryId id) { ids.erase(std::find(ids.begin(), ids.end(), id)); };
    const std::uint32_t what = random() % 8;
    if (what < 3 && ids.size() < 100) {
      EntryId id = static_cast<EntryId>(which + 2 * (random() % (kEntries / 2)));
      while (std::find(ids.begin(), ids.end(), id) != ids.end()) id = (id + 2) % kEntries;
      EntryTraits traits;
      traits.key_hash = (std::uint64_t{random() % 300} + 1) * 0x9E3779B97F4A7C15u;
      if (!ids.empty() && random() % 3 != 0) traits.parent = any();
      sharing[which]->Insert(id, traits);
      alone[which]->Insert(id, traits);
      EXPECT_EQ(sharing[which]->Parent(id), alone[which]->Parent(id));
      ids.push_back(id);
    } else if (ids.empty()) {
      continue;
    } else if (what < 6) {
      const EntryId id = any();
      sharing[which]->Touch(id);
      alone[which]->Touch(id);
    } else if (what == 6) {
      const EntryId id = any();
      sharing[which]->Remove(id);
      alone[which]->Remove(id);
      forget(id);
    } else {
      const auto may_leave = [](EntryId id) { return id % 7 != 0; };
      const EntryId victim = sharing[which]->Evict(may_leave);
      ASSERT_EQ(victim, alone[which]->Evict(may_leave)) << "step " << step;
      if (victim != kNoEntry) forget(victim);
    }
    ASSERT_EQ(sharing[which]->size(), ids.size());
  }
}

INSTANTIATE_TEST_SUITE_P(Names, EveryPolicy,
                         ::testing::ValuesIn(EvictionPolicyNames().begin(),
                                             EvictionPolicyNames().end()),
                         [](const auto& instance) {
                           std::string name(instance.param);
                           std::erase(name, '-');
                           return name;
                         });

TEST(CreateEvictionPolicyTest, NamesTheUnknownPolicyAndListsTheKnownOnes) {
  const auto policy = CreateEvictionPolicy("fifo", {.entries_max = 8, .capacity_blocks = 8});
  EXPECT_EQ(policy.status().code(), absl::StatusCode::kInvalidArgument);
  const std::string message(policy.status().message());
  EXPECT_THAT(message, HasSubstr("\"fifo\""));
  for (const std::string_view name : EvictionPolicyNames()) {
    EXPECT_THAT(message, HasSubstr(std::string(name)));
  }
}

TEST(CreateEvictionPolicyTest, RefusesBadSizes) {
  struct Case {
    std::uint32_t entries, capacity;
    std::string part;
  };
  for (const Case& bad : {Case{0, 1, "entries_max is 0"}, Case{0x80000001u, 1, "2147483649"},
                          Case{8, 0, "capacity_blocks is 0"}, Case{8, 9, "capacity_blocks is 9"}}) {
    const auto policy = CreateEvictionPolicy(
        kDefaultEvictionPolicy, {.entries_max = bad.entries, .capacity_blocks = bad.capacity});
    EXPECT_EQ(policy.status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(policy.status().message()), HasSubstr(bad.part));
  }
}

TEST(CreateEvictionPolicyTest, PutsTheDefaultFirst) {
  ASSERT_FALSE(EvictionPolicyNames().empty());
  EXPECT_EQ(EvictionPolicyNames()[0], kDefaultEvictionPolicy);
}

}  // namespace
}  // namespace kvmill
