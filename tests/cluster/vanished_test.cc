// Members that vanish together, one rule at a time.
#include "service/cluster/vanished.h"

#include <gmock/gmock.h>

#include "absl/strings/str_cat.h"

namespace kvmill {
namespace {

constexpr std::int64_t kWindow = 10, kGrace = 30;

class VanishedMembersTest : public ::testing::Test {
 protected:
  void SetUp() override {
    for (int i = 0; i < 6; ++i) Present(i);
  }
  void Present(int i, MemberState state = MemberState::kServing) {
    members_.Present({.id = absl::StrCat(i), .capacity_bytes = 1, .state = state});
  }
  void Gone(int i, std::int64_t now) { members_.Gone(absl::StrCat(i), now); }
  std::string Believed() const {
    std::string ids;
    for (const Member& member : members_.Believed()) ids += member.id;
    return ids;
  }

  VanishedMembers members_{kWindow, kGrace};
};

TEST_F(VanishedMembersTest, AThirdIsGoneMoreAreKept) {
  Gone(0, 100);
  Gone(1, 101);
  EXPECT_EQ(Believed(), "2345");
  EXPECT_FALSE(members_.keeping());
  Gone(2, 105);
  EXPECT_EQ(Believed(), "012345");
  EXPECT_EQ(members_.deadline_nanos(), 105 + kGrace);
  Gone(3, 108);
  EXPECT_EQ(Believed(), "012345");
  EXPECT_EQ(members_.deadline_nanos(), 108 + kGrace) << "counted from the last";
  EXPECT_FALSE(members_.Advance(108 + kGrace - 1));
  EXPECT_TRUE(members_.Advance(108 + kGrace));
  EXPECT_EQ(Believed(), "45");
  EXPECT_FALSE(members_.keeping());
}

TEST_F(VanishedMembersTest, ThoseThatVanishTogetherLaterHaveTheirOwnGrace) {
  for (int i = 0; i < 6; ++i) Gone(i, 100);
  for (int i = 1; i < 6; ++i) Present(i);
  EXPECT_EQ(Believed(), "012345");
  for (int i = 1; i < 6; ++i) Gone(i, 120);
  EXPECT_EQ(Believed(), "012345");
  EXPECT_TRUE(members_.Advance(100 + kGrace));
  EXPECT_EQ(Believed(), "12345") << "0 has had its grace, the others have not";
  EXPECT_EQ(members_.deadline_nanos(), 120 + kGrace);
  EXPECT_TRUE(members_.Advance(120 + kGrace));
  EXPECT_EQ(Believed(), "");
}

TEST_F(VanishedMembersTest, OneThatDiesWhileOthersAreKeptIsGone) {
  for (int i = 0; i < 6; ++i) Gone(i, 100);
  for (int i = 1; i < 6; ++i) Present(i);
  Gone(5, 100 + kWindow + 1);
  EXPECT_EQ(Believed(), "01234");
}

TEST_F(VanishedMembersTest, TheOrderInWhichTheyAreToldDoesNotMatter) {
  for (const bool draining_first : {false, true}) {
    members_ = VanishedMembers(kWindow, kGrace);
    for (int i = 0; i < 2; ++i) Present(i);
    Present(2, MemberState::kDraining);
    if (draining_first) Gone(2, 100);
    Gone(0, 100);
    if (!draining_first) Gone(2, 100);
    EXPECT_EQ(Believed(), "01") << draining_first;
  }
}

}  // namespace
}  // namespace kvmill
