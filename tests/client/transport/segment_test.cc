// Segments and the two halves of a message, without a network.
#include "client/transport/segment.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <set>

#include "client/transport/message.h"
#include "client/transport/transport.h"
#include "tests/long_form.h"

namespace kvmill {
namespace {

std::vector<std::byte> Bytes(const SegmentHeader& header, std::size_t head_bytes) {
  std::vector<std::byte> bytes(sizeof(header) + head_bytes, std::byte{9});
  std::memcpy(bytes.data(), &header, sizeof(header));
  return bytes;
}

SegmentHeader Good() {
  SegmentHeader header;
  header.call_id = 5;
  header.payload_bytes = 100;
  header.segment_bytes = 60;
  header.head_bytes = 8;
  return header;
}

TEST(SegmentTest, FieldsLieWhereTheDocumentSays) {
  SegmentHeader header = Good();
  header.counter = 0x0102030405060708;
  header.timeout_ms = 0x0A0B0C0D;
  const std::vector<std::byte> bytes = Bytes(header, 8);
  EXPECT_EQ(std::memcmp(bytes.data(), "KMSG\x01\x00\x01\x00", 8), 0);
  EXPECT_EQ(bytes[8], std::byte{5});
  EXPECT_EQ(bytes[16], std::byte{8});
  EXPECT_EQ(bytes[23], std::byte{1});
  EXPECT_EQ(bytes[24], std::byte{100});
  EXPECT_EQ(bytes[40], std::byte{60});
  EXPECT_EQ(bytes[44], std::byte{8});
  EXPECT_EQ(bytes[52], std::byte{0x0D});
  const absl::StatusOr<SegmentHeader> parsed = ParseSegment(bytes);
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  EXPECT_EQ(parsed->counter, header.counter);
}

TEST(SegmentTest, EveryWrongFieldIsNamed) {
  struct Case {
    const char* field;
    void (*spoil)(SegmentHeader*);
  };
  const Case cases[] = {
      {"magic", [](SegmentHeader* h) { h->magic ^= 1; }},
      {"format", [](SegmentHeader* h) { h->format = 2; }},
      {"flags", [](SegmentHeader* h) { h->flags = 2; }},
      {"flags", [](SegmentHeader* h) { h->kind = SegmentKind::kResponse, h->flags = 1; }},
      {"kind", [](SegmentHeader* h) { h->kind = static_cast<SegmentKind>(6); }},
      {"kind", [](SegmentHeader* h) { h->kind = static_cast<SegmentKind>(0); }},
      {"head_bytes", [](SegmentHeader* h) { h->head_bytes = 9; }},
      {"payload_bytes", [](SegmentHeader* h) { h->payload_bytes = kPayloadBytesMax + 1; }},
      {"segment_bytes", [](SegmentHeader* h) { h->segment_bytes = kSegmentBytesMax + 1; }},
      {"offset", [](SegmentHeader* h) { h->offset = 41; }},
      {"offset", [](SegmentHeader* h) { h->offset = ~std::uint64_t{0}; }},
      {"head_bytes", [](SegmentHeader* h) { h->offset = 40; }},
      {"segment_bytes", [](SegmentHeader* h) { h->segment_bytes = 0; }},
      {"payload_bytes", [](SegmentHeader* h) { h->kind = SegmentKind::kCancel; }},
      {"code", [](SegmentHeader* h) { h->code = 5; }},
      {"code", [](SegmentHeader* h) { h->kind = SegmentKind::kResponse, h->code = 17; }},
  };
  for (const Case& c : cases) {
    SegmentHeader header = Good();
    c.spoil(&header);
    const absl::Status status = ParseSegment(Bytes(header, 8)).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << c.field;
    EXPECT_NE(status.message().find(c.field), absl::string_view::npos) << status;
  }
  const std::vector<std::byte> whole = Bytes(Good(), 8);
  for (std::size_t bytes = 0; bytes < whole.size(); ++bytes) {
    EXPECT_FALSE(ParseSegment({whole.data(), bytes}).ok()) << bytes;
  }
}

TEST(SegmentTest, AnyFlippedBitIsFound) {
  SegmentHeader header = Good();
  std::vector<std::byte> bytes = Bytes(header, 8);
  header.checksum = SegmentChecksum(bytes);
  std::memcpy(bytes.data(), &header, sizeof(header));
  EXPECT_TRUE(CheckSegmentChecksum(bytes).ok());
  for (std::size_t bit = 0; bit < 8 * bytes.size(); ++bit) {
    bytes[bit / 8] ^= static_cast<std::byte>(1 << (bit % 8));
    EXPECT_FALSE(CheckSegmentChecksum(bytes).ok()) << bit;
    bytes[bit / 8] ^= static_cast<std::byte>(1 << (bit % 8));
  }
}

// Whatever it is fed, what it lets through keeps the rules that its callers rely on.
TEST(SegmentTest, RandomBytesNeverBreakTheRules) {
  std::mt19937_64 random(1);
  int accepted = 0;
  const int rounds = ShortOrLong(200'000, 5'000'000);
  for (int round = 0; round < rounds; ++round) {
    SegmentHeader header = Good();
    std::vector<std::byte> bytes = Bytes(header, 8);
    for (int flips = 1 + static_cast<int>(random() % 3); flips > 0; --flips) {
      const std::size_t at = random() % sizeof(header);
      bytes[at] = static_cast<std::byte>(random() % 4 == 0 ? random() : random() % 3);
    }
    if (random() % 8 == 0) bytes.resize(random() % (bytes.size() + 1));
    const absl::StatusOr<SegmentHeader> parsed = ParseSegment(bytes);
    if (!parsed.ok()) continue;
    ++accepted;
    ASSERT_LE(parsed->offset + parsed->segment_bytes, parsed->payload_bytes);
    ASSERT_LE(parsed->payload_bytes, kPayloadBytesMax);
    ASSERT_EQ(sizeof(SegmentHeader) + parsed->head_bytes, bytes.size());
  }
  EXPECT_GT(accepted, 0);
}

TEST(CounterWindowTest, TakesEveryCounterOnceInAnyNearOrder) {
  std::mt19937_64 random(2);
  for (int round = 0; round < 20; ++round) {
    std::vector<std::uint64_t> order(20'000);
    for (std::size_t i = 0; i < order.size(); ++i) order[i] = i;
    for (std::size_t i = 0; i + 1000 < order.size(); i += 1000) {
      std::shuffle(order.begin() + static_cast<std::ptrdiff_t>(i),
                   order.begin() + static_cast<std::ptrdiff_t>(i + 1000), random);
    }
    CounterWindow window;
    for (std::size_t i = 0; i < order.size(); ++i) {
      ASSERT_TRUE(window.Take(order[i])) << order[i];
      ASSERT_FALSE(window.Take(order[random() % (i + 1)]));
    }
  }
  CounterWindow window;
  EXPECT_FALSE(window.Take(CounterWindow::kWindow));
  EXPECT_FALSE(window.Take(~std::uint64_t{0}));
  EXPECT_TRUE(window.Take(CounterWindow::kWindow - 1));
}

TEST(ByteRangesTest, AgreesWithASetOfBytes) {
  std::mt19937_64 random(3);
  for (int round = 0; round < 300; ++round) {
    ByteRanges ranges;
    std::set<std::uint64_t> model;
    for (int i = 0; i < 60; ++i) {
      const std::uint64_t begin = random() % 200;
      const std::uint64_t end = begin + 1 + random() % 10;
      bool overlaps = false;
      for (std::uint64_t b = begin; b < end; ++b) overlaps |= model.contains(b);
      ASSERT_EQ(ranges.Add(begin, end), !overlaps);
      if (!overlaps) {
        for (std::uint64_t b = begin; b < end; ++b) model.insert(b);
      }
      ASSERT_EQ(ranges.bytes(), model.size());
    }
  }
}

// Every byte is cut once, in order, within the limits; and finds its place on the other side.
TEST(MessageTest, CutsAndPlacesEveryByteOnce) {
  std::mt19937_64 random(4);
  for (int round = 0; round < 100; ++round) {
    const std::size_t bytes = random() % (round % 5 == 0 ? 3'000'000 : 300'000);
    std::vector<std::byte> data(bytes), out(bytes);
    for (std::size_t i = 0; i < bytes; ++i) data[i] = static_cast<std::byte>(i * 7 + i / 251);
    const std::size_t span_max = 1 + random() % (round % 3 == 0 ? 2'000 : 200'000);
    SourceSpans source;
    for (std::size_t at = 0; at < bytes;) {
      const std::size_t take = std::min(bytes - at, random() % span_max + (random() % 4 ? 1 : 0));
      source.push_back({data.data() + at, take});
      at += take;
    }
    DestinationSpans destination;
    for (std::size_t at = 0; at < bytes;) {
      const std::size_t take = std::min(bytes - at, random() % span_max + (random() % 4 ? 1 : 0));
      destination.push_back({out.data() + at, take});
      at += take;
    }
    OutgoingMessage message;
    const SegmentKind kind = round % 2 == 0 ? SegmentKind::kRequest : SegmentKind::kResponse;
    message.Set(kind, 1, std::vector<std::byte>(5), source, MemoryKind::kHost);
    ASSERT_EQ(message.payload_bytes(), bytes);
    IncomingMessage incoming;
    incoming.payload_bytes = bytes;
    ASSERT_TRUE(incoming.Place(destination, MemoryKind::kHost).ok());
    constexpr std::size_t kMax = 256 << 10;
    std::uint64_t next = 0;
    do {
      std::vector<WirePiece> pieces;
      const SegmentHeader header = message.Cut(kMax, &pieces);
      ASSERT_EQ(header.offset, next);
      ASSERT_EQ(header.head_bytes, next == 0 ? 5u : 0u);
      ASSERT_LE(header.segment_bytes, kMax);
      ASSERT_LE(pieces.size(), kPiecesMax);
      // What is not pushed lies in one piece, so that nothing gathers it.
      if (header.segment_bytes > PushBytesMax(kind)) {
        ASSERT_EQ(pieces.size(), 1u);
      }
      std::vector<WirePiece> places;
      incoming.Find(header.offset, header.segment_bytes, &places);
      std::vector<std::byte> moved;
      for (const WirePiece& piece : pieces) {
        moved.insert(moved.end(), piece.data, piece.data + piece.bytes);
      }
      ASSERT_EQ(moved.size(), header.segment_bytes);
      std::size_t at = 0;
      for (const WirePiece& place : places) {
        std::memcpy(place.data, moved.data() + at, place.bytes);
        at += place.bytes;
      }
      ASSERT_EQ(at, moved.size());
      next += header.segment_bytes;
    } while (!message.all_cut());
    ASSERT_EQ(next, bytes);
    ASSERT_TRUE(out == data) << "round " << round;
  }
  IncomingMessage wrong;
  wrong.payload_bytes = 3;
  std::vector<std::byte> two(2);
  EXPECT_EQ(wrong.Place({absl::MakeSpan(two)}, MemoryKind::kHost).code(),
            absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace kvmill
