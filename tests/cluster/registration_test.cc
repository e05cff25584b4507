// Entries of the registry: the bytes of docs/formats.md, and what is refused. Back-off.
#include "service/cluster/registration.h"

#include <gmock/gmock.h>

#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "service/cluster/back_off.h"

namespace kvmill {
namespace {

using ::testing::HasSubstr;

Registration Example() {
  Registration registration;
  Member& member = registration.member;
  member.id = "node-a";
  for (int i = 0; i < 16; ++i) member.incarnation += static_cast<char>(i * 0x11);
  member.address = "[2001:db8::7]:7600";
  member.zone = "eu-1a";
  member.capacity_bytes = 68719476736;
  member.state = MemberState::kDraining;
  member.admin_address = "[2001:db8::7]:7601";
  registration.holder = std::string(16, '\x5a');
  return registration;
}

// As docs/formats.md has it.
constexpr const char* kVector =
    "kvmill.member/1 id=node-a incarnation=00112233445566778899aabbccddeeff "
    "address=[2001:db8::7]:7600 zone=eu-1a capacity_bytes=68719476736 state=draining "
    "holder=5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a admin=[2001:db8::7]:7601";

TEST(RegistrationTest, TheBytesAreThoseOfTheDocument) {
  EXPECT_EQ(*EncodeRegistration(Example()), kVector);
  EXPECT_EQ(*DecodeRegistration(kVector), Example());
  EXPECT_EQ(MemberKey("/kvmill/", "node-a"), "/kvmill/members/node-a");
}

TEST(RegistrationTest, EmptyZoneHolderAndAdminComeBack) {
  Registration registration = Example();
  registration.member.zone = registration.holder = registration.member.admin_address = "";
  registration.member.state = MemberState::kServing;
  const auto value = EncodeRegistration(registration);
  ASSERT_TRUE(value.ok());
  EXPECT_EQ(*DecodeRegistration(*value), registration);
}

TEST(RegistrationTest, EntriesOfEarlierSoftwareHaveNoAdmin) {
  const auto read =
      DecodeRegistration(absl::StrReplaceAll(kVector, {{" admin=[2001:db8::7]:7601", ""}}));
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(read->member.admin_address, "");
}

TEST(RegistrationTest, LaterSoftwareMayAddFieldsAndStates) {
  const auto added = DecodeRegistration(absl::StrCat(kVector, " color=red=blue"));
  ASSERT_TRUE(added.ok()) << added.status();
  EXPECT_EQ(*added, Example());
  const auto state = DecodeRegistration(absl::StrReplaceAll(kVector, {{"=draining", "=resting"}}));
  ASSERT_TRUE(state.ok());
  EXPECT_EQ(state->member.state, MemberState::kDraining) << "no home for anything";
  EXPECT_EQ(
      DecodeRegistration(absl::StrReplaceAll(kVector, {{"member/1", "member/2"}})).status().code(),
      absl::StatusCode::kUnimplemented);
}

TEST(RegistrationTest, WhatIsNoEntryIsNotTakenForOne) {
  const std::string long_name(kNameBytesMax + 1, 'a');
  const std::pair<std::string, std::string> replaced[] = {
      {"kvmill.member", "kvmill.page"},
      {"id=node-a ", ""},
      {"id=node-a", "id="},
      {"id=node-a", "id=node/a"},
      {"id=node-a", "id=" + long_name},
      {"id=node-a", "id=node-a id=node-b"},
      {"incarnation=00", "incarnation="},
      {"incarnation=00", "incarnation=0G"},
      {"incarnation=00", "incarnation=0000"},
      {"address=[2001:db8::7]:7600", "address="},
      {"address=[2001:db8::7]:7600", "address=" + std::string(kAddressBytesMax + 1, 'a')},
      {"address=[2001:db8::7]:7600", "address=a\tb:1"},
      {"admin=[2001:db8::7]:7601", "admin=" + std::string(kAddressBytesMax + 1, 'a')},
      {"admin=[2001:db8::7]:7601", "admin=a\tb:1"},
      {"zone=eu-1a", "zone=eu/1a"},
      {"capacity_bytes=68719476736", "capacity_bytes=0"},
      {"capacity_bytes=68719476736", "capacity_bytes=-1"},
      {"capacity_bytes=68719476736", "capacity_bytes=99999999999999999999"},
      {"capacity_bytes=", "capacity="},
      {"holder=5a", "holder="},
      {" state=", "  state="},
      {"state=draining", "state"},
  };
  for (const auto& [from, to] : replaced) {
    const auto read = DecodeRegistration(absl::StrReplaceAll(kVector, {{from, to}}));
    EXPECT_EQ(read.status().code(), absl::StatusCode::kDataLoss) << from << " -> " << to;
  }
  // Cut short: before the digits of the capacity it lacks something.
  const std::string whole = kVector;
  for (std::size_t bytes = 0; bytes <= whole.find("68719476736"); ++bytes) {
    EXPECT_FALSE(DecodeRegistration(whole.substr(0, bytes)).ok()) << bytes << " bytes";
  }
}

TEST(RegistrationTest, NamesThatAreRefusedAreNamed) {
  Registration registration = Example();
  registration.member.id = "node a";
  EXPECT_THAT(std::string(EncodeRegistration(registration).status().message()),
              HasSubstr("node id \"node a\""));
  EXPECT_TRUE(CheckName("zone", std::string(kNameBytesMax, 'z')).ok());
  EXPECT_FALSE(CheckName("zone", std::string(kNameBytesMax + 1, 'z')).ok());
  EXPECT_FALSE(CheckName("zone", "").ok());
}

TEST(BackOffTest, DoublesWithinItsBoundsAndIsNotTheSameForAll) {
  BackOff one(100, 1000, 1);
  BackOff same(100, 1000, 1);
  BackOff other(100, 1000, 2);
  std::int64_t whole = 100;
  bool differs = false;
  for (int i = 0; i < 50; ++i) {
    const std::int64_t wait = one.Next();
    EXPECT_LE(wait, whole);
    EXPECT_GE(wait, whole / 2);
    EXPECT_EQ(wait, same.Next());
    differs = differs || wait != other.Next();
    whole = std::min<std::int64_t>(2 * whole, 1000);
  }
  EXPECT_TRUE(differs);
  one.Reset();
  EXPECT_LE(one.Next(), 100);
}

}  // namespace
}  // namespace kvmill
