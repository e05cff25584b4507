// Events in the form of vLLM's, byte by byte. tests/integration/events_test.py reads what a daemon
// publishes with other libraries than those that wrote it.
#include "service/event_wire.h"

#include <string>
#include <vector>

#include "absl/strings/escaping.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace kvmill {
namespace {

using ::testing::IsEmpty;
using ::testing::SizeIs;

BlockKey Key(absl::string_view bytes) { return *BlockKey::FromBytes(bytes); }

std::string Hex(double seconds, const std::vector<WireEvent>& events, WireHashes hashes) {
  return absl::BytesToHexString(PackEvents(seconds, events, hashes));
}

TEST(EventWireTest, BatchesAreTheBytesThatReadersWant) {
  EXPECT_EQ(Hex(1.5, {WireEvent()}, WireHashes::kInt),
            "93"                                    // [
            "cb3ff8000000000000"                    // 1.5,
            "91"                                    // [
            "91b0416c6c426c6f636b73436c6561726564"  // ["AllBlocksCleared"]],
            "00");                                  // 0]
  const WireEvent stored{WireEvent::Kind::kStored,
                         Tier::kHost,
                         128,
                         "lora",
                         {Key("0123456789abcdef"), Key(std::string("\0\x05", 2))}};
  EXPECT_EQ(Hex(0, {stored}, WireHashes::kInt),
            "93cb00000000000000009198"
            "ab426c6f636b53746f726564"  // "BlockStored"
            "92"
            "cf3839616263646566"  // The last 8 bytes.
            "05"
            "c0"          // No parent,
            "90"          // no token ids,
            "cc80"        // 128,
            "c0"          // no number of an adapter,
            "a3435055"    // "CPU"
            "a46c6f7261"  // "lora"
            "00");
  const WireEvent removed{WireEvent::Kind::kRemoved, Tier::kDisk, 0, "", {Key("0123456789abcdef")}};
  EXPECT_EQ(Hex(0, {removed}, WireHashes::kBytes),
            "93cb00000000000000009193"
            "ac426c6f636b52656d6f766564"  // "BlockRemoved"
            "91c41030313233343536373839616263646566"
            "a44449534b"  // "DISK"
            "00");
  EXPECT_EQ(absl::BytesToHexString(PackSequence(0x0102030405060708)), "0102030405060708");
}

TEST(EventWireTest, EventsAreGatheredInTheirOrder) {
  const auto of = [](BlockEvent::Kind kind, const char* key, Tier from, Tier tier,
                     NamespaceId space = 1) {
    return BlockEvent{kind, tier, from, 64, space, Key(key), BlockKey()};
  };
  using Kind = BlockEvent::Kind;
  std::vector<BlockEvent> events = {
      of(Kind::kStored, "a", Tier::kHost, Tier::kHost),
      of(Kind::kStored, "b", Tier::kHost, Tier::kHost),
      of(Kind::kStored, "c", Tier::kHost, Tier::kHost, 2),
      of(Kind::kMoved, "a", Tier::kHost, Tier::kDisk),
      of(Kind::kMoved, "b", Tier::kHost, Tier::kDisk),
      of(Kind::kRemoved, "a", Tier::kDisk, Tier::kDisk),
  };
  events.push_back(of(Kind::kStored, "tail", Tier::kHost, Tier::kHost));
  events.back().token_count = 9;
  const std::vector<WireEvent> wire = ToWireEvents(events, [](NamespaceId id) {
    return id == 1 ? WireNamespace{64, ""} : WireNamespace{64, "adapter"};
  });
  ASSERT_THAT(wire, SizeIs(5));
  EXPECT_THAT(wire[0].keys, SizeIs(2));
  EXPECT_EQ(wire[1].adapter, "adapter");
  // Somewhere at any time.
  EXPECT_EQ(wire[2].kind, WireEvent::Kind::kStored);
  EXPECT_EQ(wire[2].tier, Tier::kDisk);
  EXPECT_THAT(wire[2].keys, SizeIs(2));
  EXPECT_EQ(wire[3].kind, WireEvent::Kind::kRemoved);
  EXPECT_EQ(wire[3].tier, Tier::kHost);
  EXPECT_EQ(wire[4].tier, Tier::kDisk);
  EXPECT_THAT(ToWireEvents({}, nullptr), IsEmpty());
  EXPECT_STREQ(MediumOf(Tier::kGpu), "GPU");
}

}  // namespace
}  // namespace kvmill
