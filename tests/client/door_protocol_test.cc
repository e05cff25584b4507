#include "client/door_protocol.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>
#include <vector>

#include "tests/long_form.h"

namespace kvmill {
namespace {

using ::testing::HasSubstr;

std::vector<std::byte> Packet(absl::Span<const std::byte> bytes) {
  return std::vector<std::byte>(bytes.begin(), bytes.end());
}

// Well-formed messages of every kind.
std::vector<std::vector<std::byte>> EveryMessage() {
  auto arena_request = MakeDoorMessage<DoorArenaRequest>(7);
  arena_request.lease = 0x0102030405060708;
  arena_request.arena = 3;
  auto arena = MakeDoorMessage<DoorArena>(7);
  arena.arena_bytes = std::uint64_t{256} << 20;
  auto region = MakeDoorMessage<DoorRegion>(8);
  region.registration = 5;
  region.bytes = std::uint64_t{1} << 40;
  return {Packet(BytesOf(MakeDoorMessage<DoorHello>())),
          Packet(BytesOf(MakeDoorMessage<DoorWelcome>())),
          Packet(BytesOf(RefusalFrom(absl::ResourceExhaustedError("full"), 0))),
          Packet(BytesOf(arena_request)),
          Packet(BytesOf(arena)),
          Packet(BytesOf(region)),
          Packet(BytesOf(MakeDoorMessage<DoorRegionTaken>(8))),
          Packet(BytesOf(MakeDoorMessage<DoorDeviceRegion>(9)))};
}

template <typename Message>
bool Accepts(absl::Span<const std::byte> packet) {
  const absl::StatusOr<Message> message = ParseDoorMessage<Message>(packet);
  if (!message.ok()) return false;
  EXPECT_EQ(message->header.magic, kDoorMagic);
  EXPECT_EQ(message->header.message_bytes, packet.size());
  EXPECT_EQ(message->header.kind, static_cast<std::uint16_t>(kDoorKindOf<Message>));
  EXPECT_GE(packet.size(), sizeof(Message));
  EXPECT_EQ(std::memcmp(&*message, packet.data(), sizeof(Message)), 0);
  return true;
}

// How many of the message types take these bytes.
int Acceptors(absl::Span<const std::byte> packet) {
  return Accepts<DoorHello>(packet) + Accepts<DoorWelcome>(packet) + Accepts<DoorRefusal>(packet) +
         Accepts<DoorArenaRequest>(packet) + Accepts<DoorArena>(packet) +
         Accepts<DoorRegion>(packet) + Accepts<DoorRegionTaken>(packet) +
         Accepts<DoorDeviceRegion>(packet);
}

TEST(DoorProtocolTest, TheBytesAreThoseOfTheDocument) {
  auto request = MakeDoorMessage<DoorArenaRequest>(0x11223344);
  request.lease = 0x0102030405060708;
  request.arena_epoch = 9;
  request.arena = 5;
  request.tier = 1;
  const std::vector<unsigned char> want = {
      'K', 'M', 'D', 'R', 2, 0, 4, 0, 40, 0, 0, 0, 0x44, 0x33, 0x22, 0x11, 8, 7, 6, 5,
      4,   3,   2,   1,   9, 0, 0, 0, 0,  0, 0, 0, 5,    0,    0,    0,    1, 0, 0, 0};
  ASSERT_EQ(want.size(), sizeof(request));
  EXPECT_EQ(std::memcmp(&request, want.data(), want.size()), 0);
}

TEST(DoorProtocolTest, TheBytesOfARegionAreThoseOfTheDocument) {
  auto region = MakeDoorMessage<DoorRegion>(2);
  region.registration = 0x0102030405060708;
  region.offset_bytes = 0x1000;
  region.bytes = 0x2000;
  region.region = 9;
  region.kind = 1;
  const std::vector<unsigned char> want = {
      'K', 'M',  'D', 'R', 2, 0, 6, 0, 48, 0,    0, 0, 2, 0, 0, 0, 8, 7, 6, 5, 4, 3, 2, 1,
      0,   0x10, 0,   0,   0, 0, 0, 0, 0,  0x20, 0, 0, 0, 0, 0, 0, 9, 0, 0, 0, 1, 0, 0, 0};
  ASSERT_EQ(want.size(), sizeof(region));
  EXPECT_EQ(std::memcmp(&region, want.data(), want.size()), 0);
}

TEST(DoorProtocolTest, TheBytesOfADeviceRegionAreThoseOfTheDocument) {
  auto region = MakeDoorMessage<DoorDeviceRegion>(2);
  region.registration = 0x0102030405060708;
  region.offset_bytes = 0x1000;
  region.bytes = 0x2000;
  region.allocation_bytes = 0x3000;
  region.region = 9;
  region.handle.fill(0xAA);
  region.device.fill(0xBB);
  std::vector<unsigned char> want = {'K', 'M', 'D', 'R', 2, 0,    8, 0, 136, 0, 0, 0,    2, 0,
                                     0,   0,   8,   7,   6, 5,    4, 3, 2,   1, 0, 0x10, 0, 0,
                                     0,   0,   0,   0,   0, 0x20, 0, 0, 0,   0, 0, 0,    0, 0x30,
                                     0,   0,   0,   0,   0, 0,    9, 0, 0,   0, 0, 0,    0, 0};
  want.resize(want.size() + 64, 0xAA);
  want.resize(want.size() + 16, 0xBB);
  ASSERT_EQ(want.size(), sizeof(region));
  EXPECT_EQ(std::memcmp(&region, want.data(), want.size()), 0);
}

TEST(DoorProtocolTest, EachMessageIsTakenByItsTypeAlone) {
  for (const auto& packet : EveryMessage()) EXPECT_EQ(Acceptors(packet), 1);
}

TEST(DoorProtocolTest, NeighbourVersionsTalkAndOthersAreRefusedNamingBoth) {
  const struct {
    std::uint16_t version;
    bool accepted;
  } cases[] = {{0, false},
               {kDoorVersion - 1, true},
               {kDoorVersion, true},
               {kDoorVersion + 1, true},
               {kDoorVersion + 2, false},
               {0xFFFF, false}};
  for (const auto& c : cases) {
    auto hello = MakeDoorMessage<DoorHello>();
    hello.header.version = c.version;
    const absl::Status status = ParseDoorMessage<DoorHello>(BytesOf(hello)).status();
    EXPECT_EQ(status.ok(), c.accepted) << c.version;
    if (c.accepted) continue;
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_THAT(std::string(status.message()),
                HasSubstr("door version " + std::to_string(c.version) + " cannot talk to version " +
                          std::to_string(kDoorVersion)));
  }
  // A later version may have appended fields; ours may not be longer.
  std::vector<std::byte> longer = Packet(BytesOf(MakeDoorMessage<DoorHello>()));
  longer.resize(longer.size() + 8);
  DoorHeader header;
  std::memcpy(&header, longer.data(), sizeof(header));
  header.message_bytes = static_cast<std::uint32_t>(longer.size());
  std::memcpy(longer.data(), &header, sizeof(header));
  EXPECT_EQ(Acceptors(longer), 0);
  header.version = kDoorVersion + 1;
  std::memcpy(longer.data(), &header, sizeof(header));
  EXPECT_EQ(Acceptors(longer), 1);
}

TEST(DoorProtocolTest, ARefusalBringsCodeAndTextAcross) {
  const absl::Status status = absl::ResourceExhaustedError("1024 local clients: at most 1024");
  EXPECT_EQ(StatusFrom(RefusalFrom(status, 3)), status);
  // Longer than the field: the beginning. Nonsense: still a status, and not OK.
  const std::string text(1000, 'x');
  EXPECT_EQ(StatusFrom(RefusalFrom(absl::InternalError(text), 0)).message(), text.substr(0, 232));
  DoorRefusal nonsense = RefusalFrom(status, 0);
  nonsense.code = 0;
  nonsense.text_bytes = 0xFFFFFFFF;
  EXPECT_EQ(StatusFrom(nonsense).code(), absl::StatusCode::kUnknown);
  EXPECT_EQ(StatusFrom(nonsense).message().size(), sizeof(nonsense.text));
}

TEST(DoorProtocolTest, DamagedMessagesAreRefusedWhateverTheDamage) {
  const auto seed = ShortOrLong<std::uint32_t>(1, std::random_device()());
  std::printf("seed %u\n", seed);
  std::mt19937 random(seed);
  const auto below = [&](std::size_t n) { return random() % n; };
  const std::vector<std::vector<std::byte>> originals = EveryMessage();
  const int rounds = ShortOrLong(200'000, 20'000'000);
  int accepted = 0;
  for (int round = 0; round < rounds; ++round) {
    std::vector<std::byte> packet = originals[below(originals.size())];
    switch (below(4)) {
      case 0:  // Cut.
        packet.resize(below(packet.size()));
        EXPECT_EQ(Acceptors(packet), 0);
        continue;
      case 1:  // Too long.
        packet.resize(packet.size() + 1 + below(kDoorMessageBytesMax));
        EXPECT_EQ(Acceptors(packet), 0);
        continue;
      case 2:  // Noise.
        packet.resize(below(2 * kDoorMessageBytesMax));
        for (std::byte& b : packet) b = static_cast<std::byte>(random());
        EXPECT_EQ(Acceptors(packet), 0);
        continue;
      default:  // Some bits.
        for (std::size_t n = 1 + below(4); n > 0; --n) {
          packet[below(packet.size())] ^= static_cast<std::byte>(1u << below(8));
        }
    }
    const int acceptors = Acceptors(packet);  // Checks what it accepts.
    EXPECT_LE(acceptors, 1);
    accepted += acceptors;
  }
  EXPECT_GT(accepted, rounds / 20) << "damage outside of the header is not this layer's business";
}

}  // namespace
}  // namespace kvmill
