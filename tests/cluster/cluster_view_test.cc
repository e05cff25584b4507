// Anchors of sequences, views, and their keeper.
#include "service/cluster/cluster_view.h"

#include <gmock/gmock.h>

#include <deque>

#include "absl/strings/str_cat.h"

namespace kvmill {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr int kBits = 6;

Member Node(std::string id, MemberState state = MemberState::kServing) {
  return {.id = std::move(id), .capacity_bytes = 1 << 20, .state = state};
}

std::vector<BlockKey> Keys(std::size_t count) {
  std::vector<BlockKey> keys;
  for (std::size_t i = 0; i < count; ++i)
    keys.push_back(*BlockKey::FromBytes(absl::StrCat("key-", i)));
  return keys;
}

std::vector<std::string> Ids(const ClusterView& view) {
  std::vector<std::string> ids;
  for (const Member& member : view.members()) ids.push_back(member.id);
  return ids;
}

TEST(AnchorTest, APromptOf256BlocksHasEightRuns) {
  const std::vector<BlockKey> keys = Keys(256);
  const std::vector<AnchorRun> runs = RunsOf(keys);
  ASSERT_EQ(runs.size(), 8u);
  for (std::size_t i = 0; i < 8; ++i) {
    EXPECT_EQ(runs[i].anchor, keys[32 * i]);
    EXPECT_EQ(runs[i].first, 32 * i);
    EXPECT_EQ(runs[i].count, 32u);
  }
  EXPECT_TRUE(RunsOf({}).empty());
}

TEST(AnchorTest, RunsThatBeginInTheMiddleNeedTheirAnchor) {
  const std::vector<BlockKey> keys = Keys(40);
  const BlockKey before = *BlockKey::FromBytes("before");
  const std::vector<AnchorRun> runs = RunsOf(keys, 62, before);
  ASSERT_EQ(runs.size(), 3u);
  EXPECT_EQ(runs[0].anchor, before);
  EXPECT_EQ(runs[0].count, 2u);
  EXPECT_EQ(runs[1].anchor, keys[2]);  // Block 64 of the sequence.
  EXPECT_EQ(runs[1].count, 32u);
  EXPECT_EQ(runs[2].anchor, keys[34]);
  EXPECT_EQ(runs[2].count, 6u);
  EXPECT_TRUE(RunsOf(keys, 31)[0].anchor.empty());
  EXPECT_EQ(RunsOf(keys, 32, before)[0].anchor, keys[0]);
}

TEST(ClusterViewTest, ThoseWhoServeComeFirstAndAloneAreHomes) {
  const auto view = *ClusterView::Make({Node("c"), Node("a", MemberState::kDraining), Node("b")}, 1,
                                       kBits, nullptr);
  EXPECT_THAT(Ids(*view), ElementsAre("b", "c", "a"));
  EXPECT_EQ(view->serving_count(), 2u);
  EXPECT_EQ(view->IndexOf("a"), 2);
  EXPECT_EQ(view->IndexOf("c"), 1);
  EXPECT_EQ(view->IndexOf("d"), std::nullopt);
  EXPECT_EQ(view->IndexOf(""), std::nullopt);
  for (const BlockKey& key : Keys(100)) {
    const auto homes = view->HomesOf(Fingerprint{}, key);
    ASSERT_EQ(homes.size(), 2u);
    EXPECT_NE(homes[0], homes[1]);
    EXPECT_LT(std::max(homes[0], homes[1]), 2);
  }
  // Another namespace, other homes.
  std::size_t others = 0;
  for (const BlockKey& key : Keys(100)) {
    others +=
        view->HomesOf(Fingerprint{std::byte{1}}, key)[0] != view->HomesOf(Fingerprint{}, key)[0];
  }
  EXPECT_GT(others, 25u);
  EXPECT_LT(others, 75u);
}

TEST(ClusterViewTest, ViewsWithTheSameHomesShareTheTable) {
  const auto first = *ClusterView::Make({Node("a"), Node("b")}, 1, kBits, nullptr);
  std::vector<Member> members = {Node("a"), Node("b"), Node("0", MemberState::kDraining)};
  members[0].incarnation = "restarted";
  members[0].address = "elsewhere:1";
  const auto second = *ClusterView::Make(members, 2, kBits, first);
  EXPECT_EQ(&first->table(), &second->table());
  EXPECT_EQ(second->members()[0].address, "elsewhere:1");
  members[0].capacity_bytes += 1;
  EXPECT_NE(&(*ClusterView::Make(members, 3, kBits, second))->table(), &first->table());
}

TEST(ClusterViewTest, MembersThatCannotBeAreRefusedByName) {
  const auto refused = [](std::vector<Member> members) {
    return ClusterView::Make(std::move(members), 1, kBits, nullptr).status();
  };
  EXPECT_THAT(refused({Node("a"), Node("b"), Node("a")}).message(),
              HasSubstr("two members with id \"a\""));
  EXPECT_THAT(refused({Node("a"), Node("a", MemberState::kDraining)}).message(),
              HasSubstr("two members with id \"a\""));
  Member empty = Node("e");
  empty.capacity_bytes = 0;
  EXPECT_THAT(refused({Node("a"), empty}).message(), HasSubstr("member \"e\": capacity of 0"));
  std::vector<Member> many;
  for (std::size_t i = 0; i <= kHomesMax; ++i) many.push_back(Node(absl::StrCat("n", i)));
  EXPECT_THAT(refused(many).message(), HasSubstr("65536 members: at most 65535"));
}

// The background and the loop, run by hand.
class ViewKeeperTest : public ::testing::Test {
 protected:
  void FinishOne() {
    ASSERT_FALSE(jobs_.empty());
    auto [work, done] = std::move(jobs_.front());
    jobs_.pop_front();
    work();
    done();
  }

  std::deque<std::pair<std::function<void()>, std::function<void()>>> jobs_;
  std::vector<std::shared_ptr<const ClusterView>> published_;
  std::vector<absl::Status> refused_;
  std::unique_ptr<ViewKeeper> keeper_ = std::make_unique<ViewKeeper>(ViewKeeper::Options{
      .shard_bits = kBits,
      .background = [this](auto work, auto done) { jobs_.emplace_back(work, done); },
      .publish = [this](auto view) { published_.push_back(std::move(view)); },
      .refuse = [this](const absl::Status& status) { refused_.push_back(status); }});
};

TEST_F(ViewKeeperTest, MakesOneViewAtATimeAndOnlyTheLast) {
  EXPECT_TRUE(keeper_->idle());
  keeper_->SetMembers({Node("a")});
  keeper_->SetMembers({Node("a"), Node("b")});
  keeper_->SetMembers({Node("a"), Node("b"), Node("c")});
  EXPECT_EQ(jobs_.size(), 1u);
  EXPECT_TRUE(published_.empty());
  FinishOne();
  EXPECT_FALSE(keeper_->idle());
  FinishOne();
  EXPECT_TRUE(keeper_->idle());
  ASSERT_EQ(published_.size(), 2u);
  EXPECT_THAT(Ids(*published_[0]), ElementsAre("a"));
  EXPECT_THAT(Ids(*published_[1]), ElementsAre("a", "b", "c"));
  EXPECT_EQ(published_[1]->number(), published_[0]->number() + 1);
}

TEST_F(ViewKeeperTest, ARefusedSetKeepsTheLastView) {
  keeper_->SetMembers({Node("a")});
  FinishOne();
  keeper_->SetMembers({Node("a"), Node("a")});
  FinishOne();
  EXPECT_EQ(refused_.size(), 1u);
  keeper_->SetMembers({Node("a", MemberState::kDraining)});
  FinishOne();
  ASSERT_EQ(published_.size(), 2u);
  EXPECT_EQ(published_[1]->number(), 2u);
  EXPECT_TRUE(published_[1]->HomesOf(Fingerprint{}, Keys(1)[0]).empty());
}

TEST_F(ViewKeeperTest, WorkThatOutlivesItIsDropped) {
  keeper_->SetMembers({Node("a")});
  keeper_.reset();
  FinishOne();
  EXPECT_TRUE(published_.empty());
}

}  // namespace
}  // namespace kvmill
