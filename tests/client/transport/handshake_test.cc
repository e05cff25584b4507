// The handshake and its cryptography, message by message, without a network.
#include "client/transport/handshake.h"

#include <gtest/gtest.h>

#include <cstring>
#include <random>

#include "absl/strings/escaping.h"
#include "client/transport/cryptography.h"
#include "client/transport/socket_address.h"
#include "tests/long_form.h"

namespace kvmill {
namespace {

std::string Hex(absl::Span<const std::byte> bytes) {
  return absl::BytesToHexString({reinterpret_cast<const char*>(bytes.data()), bytes.size()});
}
absl::Span<const std::byte> Text(absl::string_view text) {
  return {reinterpret_cast<const std::byte*>(text.data()), text.size()};
}

TEST(CryptographyTest, KnownAnswers) {
  Secret key;
  for (std::size_t i = 0; i < key.size(); ++i) key[i] = static_cast<std::byte>(i);
  // By Python's hmac module; HKDF is two of those.
  EXPECT_EQ(Hex(Hmac(key, {Text("abc"), Text("def")})),
            "2867d85143fa9948833a5ec6f3c7d31068cc5a9ba587e08b1e8ad88e1a30acb3");
  EXPECT_EQ(Hex(Hkdf(key, Text("salt"), "info")),
            "64cc2a23b7a1da4310420350405fdf5d632cb9bda3700d753e96cbcfeb81d449");
  // Test case 14 of the GCM specification.
  SegmentCipher cipher(Secret{}, SegmentCipher::Direction::kSeal);
  cipher.Begin(SegmentCipher::Part::kHead, 0, {});
  std::array<std::byte, 16> block{};
  cipher.Update(block, block.data());
  const SegmentTag tag = cipher.Finish();
  EXPECT_EQ(Hex(block), "cea7403d4d606b6e074ec5d3baf39d18");
  EXPECT_EQ(Hex(tag), "d0d1c8a799996bf0265b98b5d48ab919");
}

TEST(CryptographyTest, WhatWasSealedOpensOnceAndOnlyUnchanged) {
  Secret key;
  RandomBytes(absl::MakeSpan(key));
  SegmentCipher seal(key, SegmentCipher::Direction::kSeal);
  SegmentCipher open(key, SegmentCipher::Direction::kOpen);
  std::vector<std::byte> plain(1000, std::byte{3}), sealed(1000), opened(1000);
  for (std::uint64_t counter = 0; counter < 5; ++counter) {
    seal.Begin(SegmentCipher::Part::kData, counter, Text("header"));
    seal.Update(absl::MakeConstSpan(plain).first(300), sealed.data());
    seal.Update(absl::MakeConstSpan(plain).subspan(300), sealed.data() + 300);
    const SegmentTag tag = seal.Finish();
    const auto opens = [&](SegmentCipher::Part part, std::uint64_t n, absl::string_view header) {
      open.Begin(part, n, Text(header));
      open.Update(sealed, opened.data());
      return open.Verify(tag);
    };
    EXPECT_TRUE(opens(SegmentCipher::Part::kData, counter, "header"));
    EXPECT_TRUE(opened == plain);
    EXPECT_FALSE(opens(SegmentCipher::Part::kHead, counter, "header"));
    EXPECT_FALSE(opens(SegmentCipher::Part::kData, counter + 1, "header"));
    EXPECT_FALSE(opens(SegmentCipher::Part::kData, counter, "Header"));
    sealed[500] ^= std::byte{1};
    EXPECT_FALSE(opens(SegmentCipher::Part::kData, counter, "header"));
  }
}

class HandshakeTest : public ::testing::Test {
 protected:
  HandshakeTest() : book_(100) {
    dialer_side_ = {.self = {NodeIdentity::IdOf("dialer"), 1},
                    .calls_max = 10,
                    .segment_bytes_max = 1 << 20,
                    .request_bytes_max = 1000};
    acceptor_side_ = {.self = {NodeIdentity::IdOf("acceptor"), 2},
                      .calls_max = 20,
                      .segment_bytes_max = 2 << 20,
                      .request_bytes_max = 2000};
  }
  Offer MakeOffer() {
    Offer offer;
    offer.node = acceptor_side_.self;
    RandomBytes(absl::MakeSpan(offer.key_id));
    RandomBytes(absl::MakeSpan(offer.key));
    EXPECT_TRUE(
        book_.Add(offer.key_id, {.key = offer.key, .owner_tag = 7, .expires_nanos = 100}, 0).ok());
    return offer;
  }
  // Runs a handshake whose messages `change` may alter. Codes of both sides; OK is agreement.
  struct Outcome {
    absl::StatusCode dialer = absl::StatusCode::kUnknown;
    absl::StatusCode acceptor = absl::StatusCode::kUnknown;
    Agreement dialer_agreement, acceptor_agreement;
  };
  using Change = std::function<void(HandshakeKind, std::vector<std::byte>*)>;
  Outcome Run(const Change& change) {
    Outcome outcome;
    DialerHandshake dialer(dialer_side_, MakeOffer());
    AcceptorHandshake acceptor(acceptor_side_, &book_);
    std::vector<std::byte> message(dialer.hello().begin(), dialer.hello().end());
    std::vector<std::byte> reply;
    change(HandshakeKind::kHello, &message);
    auto welcomed = acceptor.OnMessage(message, 1, &reply);
    outcome.acceptor = welcomed.status().code();
    if (welcomed.ok()) {
      EXPECT_FALSE(welcomed->has_value());
      outcome.acceptor = absl::StatusCode::kUnknown;
      change(HandshakeKind::kWelcome, &reply);
    }
    std::vector<std::byte> finish;
    const auto agreed = dialer.OnMessage(reply, &finish);
    outcome.dialer = agreed.status().code();
    if (!agreed.ok() || !welcomed.ok()) return outcome;
    outcome.dialer_agreement = *agreed;
    change(HandshakeKind::kFinish, &finish);
    const auto finished = acceptor.OnMessage(finish, 1, &reply);
    outcome.acceptor = finished.status().code();
    if (finished.ok()) outcome.acceptor_agreement = **finished;
    return outcome;
  }

  HandshakeSide dialer_side_;
  HandshakeSide acceptor_side_;
  OfferBook book_;
};

TEST_F(HandshakeTest, BothSidesAgree) {
  const Outcome outcome = Run([](HandshakeKind, std::vector<std::byte>*) {});
  ASSERT_EQ(outcome.dialer, absl::StatusCode::kOk);
  ASSERT_EQ(outcome.acceptor, absl::StatusCode::kOk);
  const Agreement& a = outcome.dialer_agreement;
  const Agreement& b = outcome.acceptor_agreement;
  EXPECT_EQ(a.peer, acceptor_side_.self);
  EXPECT_EQ(b.peer, dialer_side_.self);
  EXPECT_EQ(b.owner_tag, 7u);
  EXPECT_EQ(a.peer_calls_max, 20u);
  EXPECT_EQ(b.peer_calls_max, 10u);
  EXPECT_EQ(a.peer_request_bytes_max, 2000u);
  EXPECT_TRUE(a.sending_key == b.receiving_key);
  EXPECT_TRUE(a.receiving_key == b.sending_key);
  EXPECT_FALSE(a.sending_key == a.receiving_key);
  const Outcome again = Run([](HandshakeKind, std::vector<std::byte>*) {});
  EXPECT_FALSE(again.dialer_agreement.sending_key == a.sending_key);
}

TEST_F(HandshakeTest, AnyFlippedBitOfAnyMessageIsRefused) {
  for (const HandshakeKind kind :
       {HandshakeKind::kHello, HandshakeKind::kWelcome, HandshakeKind::kFinish}) {
    for (std::size_t byte = 0; byte < sizeof(HandshakeMessage); ++byte) {
      const Outcome outcome = Run([&](HandshakeKind at, std::vector<std::byte>* message) {
        if (at == kind) (*message)[byte] ^= static_cast<std::byte>(1 << (byte % 8));
      });
      // Of a finish only the acceptor can know.
      EXPECT_NE(outcome.acceptor, absl::StatusCode::kOk)
          << static_cast<int>(kind) << " byte " << byte;
      if (kind != HandshakeKind::kFinish) {
        EXPECT_NE(outcome.dialer, absl::StatusCode::kOk) << byte;
      }
      book_.Expire(1000);
    }
  }
}

TEST_F(HandshakeTest, TruncatedAndRandomMessagesAreRefused) {
  std::mt19937_64 random(1);
  const int rounds = ShortOrLong(3000, 100'000);
  for (int round = 0; round < rounds; ++round) {
    const auto kind = static_cast<HandshakeKind>(1 + round % 3);
    bool changed = false;
    const Outcome outcome = Run([&](HandshakeKind at, std::vector<std::byte>* message) {
      if (at != kind) return;
      const std::vector<std::byte> before = *message;
      switch (random() % 4) {
        case 0:
          message->resize(random() % message->size());
          break;
        case 1:
          message->resize(message->size() + random() % 2000);
          break;
        case 2:
          for (std::byte& byte : *message) byte = static_cast<std::byte>(random());
          break;
        default:
          for (int i = 0; i < 4; ++i) {
            (*message)[random() % message->size()] = static_cast<std::byte>(random() % 3);
          }
      }
      changed = *message != before;
    });
    if (changed) {
      ASSERT_NE(outcome.acceptor, absl::StatusCode::kOk) << round;
    }
    book_.Expire(1000);
  }
  EXPECT_EQ(book_.usable(0), 0u);
}

TEST_F(HandshakeTest, ARecordedHelloIsWorthNothing) {
  DialerHandshake dialer(dialer_side_, MakeOffer());
  std::vector<std::byte> reply;
  AcceptorHandshake first(acceptor_side_, &book_);
  ASSERT_TRUE(first.OnMessage(dialer.hello(), 1, &reply).ok());
  AcceptorHandshake second(acceptor_side_, &book_);
  const auto replayed = second.OnMessage(dialer.hello(), 1, &reply);
  ASSERT_FALSE(replayed.ok());
  RefusalMessage refusal;
  ASSERT_EQ(reply.size(), sizeof(refusal));
  std::memcpy(&refusal, reply.data(), sizeof(refusal));
  EXPECT_EQ(refusal.reason, RefusalReason::kUsedKey);
}

// A later version may say more; the MAC stays at the end and covers it.
TEST_F(HandshakeTest, LongerMessagesOfLaterVersionsAreUnderstood) {
  const Offer offer = MakeOffer();
  dialer_side_.version = 2;
  DialerHandshake dialer(dialer_side_, offer);
  HandshakeMessage hello;
  std::memcpy(static_cast<void*>(&hello), dialer.hello().data(), sizeof(hello));
  hello.bytes = sizeof(hello) + 24;
  std::vector<std::byte> longer(hello.bytes, std::byte{5});
  std::memcpy(longer.data(), &hello, sizeof(hello) - 32);
  const Secret mac = Hmac(offer.key, {Text("kvmill-handshake-1 hello"),
                                      absl::MakeConstSpan(longer).first(longer.size() - 32)});
  std::memcpy(longer.data() + longer.size() - 32, mac.data(), 32);
  AcceptorHandshake acceptor(acceptor_side_, &book_);
  std::vector<std::byte> reply;
  const auto welcomed = acceptor.OnMessage(longer, 1, &reply);
  ASSERT_TRUE(welcomed.ok()) << welcomed.status();
  HandshakeMessage welcome;
  std::memcpy(static_cast<void*>(&welcome), reply.data(), sizeof(welcome));
  EXPECT_EQ(welcome.version, 1);
}

TEST(SocketAddressTest, ParsesNumericAddressesOnly) {
  for (const char* text : {"127.0.0.1:80", "[fd00::2]:65535", "[::]:0", "0.0.0.0:1"}) {
    const absl::StatusOr<SocketAddress> address = ParseSocketAddress(text);
    ASSERT_TRUE(address.ok()) << address.status();
    EXPECT_EQ(address->ToString(), text);
  }
  EXPECT_TRUE(ParseSocketAddress("[::]:0")->is_wildcard());
  EXPECT_TRUE(ParseSocketAddress("[::1]:9")->is_loopback());
  EXPECT_TRUE(ParseSocketAddress("127.0.0.9:9")->is_loopback());
  for (const char* text :
       {"", ":", "localhost:1", "1.2.3.4", "1.2.3.4:", "1.2.3.4:65536", "fd00::2:80", "[fd00::2]",
        "[fd00::2", "[1.2.3.4]:5", "[]:1", "1.2.3.4:-1", "1.2.3.4:x"}) {
    EXPECT_EQ(ParseSocketAddress(text).status().code(), absl::StatusCode::kInvalidArgument) << text;
  }
}

}  // namespace
}  // namespace kvmill
