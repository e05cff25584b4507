// A peer that proved its key and then says whatever it likes: the connection may end, nothing else
// may happen. Drives ConnectionCore over a wire that the test holds in its hands.
#include <gtest/gtest.h>

#include <cstring>
#include <deque>
#include <set>
#include <tuple>

#include "client/transport/connection_core.h"
#include "storage/core/clock.h"
#include "tests/client/transport/transport_fixture.h"
#include "tests/long_form.h"

namespace kvmill::testing {
namespace {

class ManualLoop final : public TransportLoop {
 public:
  void Post(absl::AnyInvocable<void()> task) override { tasks_.push_back(std::move(task)); }
  bool InLoop() const override { return true; }
  std::int64_t NowNanos() const override { return clock.MonotonicNanos(); }
  void Run() {
    while (!tasks_.empty()) {
      auto task = std::move(tasks_.front());
      tasks_.pop_front();
      task();
    }
  }
  ManualClock clock;

 private:
  std::deque<absl::AnyInvocable<void()>> tasks_;
};

// Sends complete at once; what would be pulled from the sender is random bytes.
class HandWire final : public Wire {
 public:
  HandWire(ManualLoop* loop, WireEvents* events, std::vector<std::vector<std::byte>>* sent)
      : loop_(loop), events_(events), sent_(sent) {}
  ~HandWire() override { EXPECT_TRUE(closed); }
  void Send(const Outgoing& message, WireOperation* operation) override {
    sent_->emplace_back(message.header.begin(), message.header.end());
    operation->OnDone(absl::OkStatus());
  }
  void Receive(void* token, absl::Span<const WirePiece> pieces, MemoryKind /*memory*/,
               WireOperation* operation) override {
    tokens.erase(token);
    for (const WirePiece& piece : pieces) std::memset(piece.data, 1, piece.bytes);
    operation->OnDone(absl::OkStatus());
  }
  void Drop(void* token) override { tokens.erase(token); }
  void Close() override {
    if (closed) return;
    closed = true;
    tokens.clear();
    loop_->Post([this] { events_->OnClosed(); });
  }
  std::string transport_name() const override { return "hand/made"; }
  std::string peer_address() const override { return "nowhere"; }

  std::set<void*> tokens;
  bool closed = false;

 private:
  ManualLoop* const loop_;
  WireEvents* const events_;
  std::vector<std::vector<std::byte>>* const sent_;
};

class HostilePeer : public ConnectionOwner {
 public:
  static constexpr std::uint64_t kWindowBytes = 1 << 20;

  explicit HostilePeer(std::uint64_t seed, bool encrypted) : book_(10), random_(seed) {
    HandshakeSide side{.self = {NodeIdentity::IdOf("us"), 1},
                       .encrypted = encrypted,
                       .calls_max = 8,
                       .segment_bytes_max = 64 << 10,
                       .request_bytes_max = kWindowBytes};
    ConnectionSettings settings{.side = side,
                                .limits = {.calls_max = 8,
                                           .request_bytes_max = kWindowBytes,
                                           .segment_bytes_max = 64 << 10},
                                .handshake_nanos = kSecond,
                                .grace_nanos = kSecond};
    Offer offer;
    offer.node = side.self;
    EXPECT_TRUE(book_.Add(offer.key_id, {.expires_nanos = INT64_MAX}, 0).ok());
    core_ = std::make_shared<ConnectionCore>(settings, &loop_, this, &counters_, &book_);
    auto wire = std::make_unique<HandWire>(&loop_, core_.get(), &sent_);
    wire_ = wire.get();
    core_->Accept(std::move(wire));
    HandshakeSide theirs = side;
    theirs.self = {NodeIdentity::IdOf("them"), 2};
    theirs.segment_bytes_max = 8 << 20;
    DialerHandshake dialer(theirs, offer);
    Give(WireChannel::kHandshake, dialer.hello(), {}, false);
    std::vector<std::byte> finish;
    auto agreed = dialer.OnMessage(sent_.at(0), &finish);
    EXPECT_TRUE(agreed.ok()) << agreed.status();
    agreement_ = *agreed;
    Give(WireChannel::kHandshake, finish, {}, false);
    loop_.Run();
    EXPECT_TRUE(opened_);
    if (encrypted) {
      cipher_ =
          std::make_unique<SegmentCipher>(agreement_.sending_key, SegmentCipher::Direction::kSeal);
    }
  }
  ~HostilePeer() {
    kept_.clear();
    if (!ended_) core_->Break(absl::CancelledError("end of the test"));
    loop_.Run();
    EXPECT_TRUE(ended_);
    EXPECT_EQ(counters_.calls_served, 0u);
    EXPECT_EQ(counters_.calls_started, 0u);
    EXPECT_EQ(counters_.operations, 0u);
    EXPECT_EQ(counters_.held_bytes, 0u);
    for (const auto& result : started_) EXPECT_EQ(result->done.times(), 1);
  }

  // One segment, valid as to checksum or tags, with these fields.
  void Say(SegmentHeader header, bool rendezvous) {
    if (ended_ || wire_closed()) return;
    std::vector<std::byte> head(header.head_bytes, std::byte{1});
    std::vector<std::byte> data(rendezvous ? 0 : header.segment_bytes, std::byte{2});
    std::vector<std::byte> message(sizeof(header) + head.size());
    if (cipher_ != nullptr) {
      cipher_->Begin(SegmentCipher::Part::kData, header.counter, {});
      cipher_->Update(data, data.data());
      header.data_tag = cipher_->Finish();
    }
    std::memcpy(message.data(), &header, sizeof(header));
    if (!head.empty()) std::memcpy(message.data() + sizeof(header), head.data(), head.size());
    if (cipher_ != nullptr) {
      cipher_->Begin(SegmentCipher::Part::kHead, header.counter,
                     absl::MakeConstSpan(message).first(offsetof(SegmentHeader, head_tag)));
      cipher_->Update(head, message.data() + sizeof(header));
      header.head_tag = cipher_->Finish();
    } else {
      header.checksum = SegmentChecksum(message);
    }
    std::memcpy(message.data(), &header, sizeof(header));
    Give(WireChannel::kSegments, message, data, rendezvous, header.segment_bytes);
    loop_.Run();
    EXPECT_LE(counters_.held_bytes.load(), kWindowBytes);
    EXPECT_LE(counters_.calls_served.load(), 9u);
  }
  // Mostly what a peer might say, in any order; now and then nonsense.
  void SayRandom() {
    SegmentHeader header;
    const auto some = [&](std::uint64_t n) { return random_() % n; };
    const std::uint64_t kind = some(100);
    header.kind = kind < 60                        ? SegmentKind::kRequest
                  : kind < 90 && !started_.empty() ? SegmentKind::kResponse
                  : kind < 95                      ? SegmentKind::kCancel
                  : kind < 99                      ? SegmentKind::kEnded
                                                   : static_cast<SegmentKind>(some(7));
    const bool request = header.kind == SegmentKind::kRequest;
    if (!request && started_.empty()) return;
    header.call_id = request ? 1 + some(4) + said_ / 10 : 1 + some(started_.size());
    if (request || header.kind == SegmentKind::kResponse) {
      header.payload_bytes = 1000 * (header.call_id * 37 % 200);
      header.offset =
          header.payload_bytes == 0 ? 0 : 60'000 * some(header.payload_bytes / 60'000 + 1);
      header.segment_bytes = static_cast<std::uint32_t>(
          std::min<std::uint64_t>(60'000, header.payload_bytes - header.offset));
      header.head_bytes = header.offset == 0 ? static_cast<std::uint32_t>(some(50)) : 0;
      header.timeout_ms = request ? static_cast<std::uint32_t>(some(2000)) : 0;
      if (!request && some(4) == 0) {
        header.code = static_cast<std::uint32_t>(1 + some(16));
        header.payload_bytes = header.offset = header.segment_bytes = 0;
      }
      if (some(60) == 0) header.payload_bytes = random_();
      if (some(60) == 0) header.offset = random_();
      if (some(60) == 0) header.segment_bytes = static_cast<std::uint32_t>(some(1 << 20));
    }
    ++said_;
    // The same once more is a violation: rarely.
    const bool said = !told_.emplace(header.kind, header.call_id, header.offset).second;
    if (said && some(50) != 0) return;
    header.counter = some(100) == 0 ? some(100) : counter_++;
    Say(header, some(3) == 0 && header.segment_bytes != 0);
    if (some(10) == 0 && !ended_) StartCall();
    if (some(10) == 0 && !kept_.empty()) kept_.erase(kept_.begin());
    if (some(20) == 0 && !ended_) {
      loop_.clock.AdvanceNanos(static_cast<std::int64_t>(some(500)) * kMilli);
      core_->OnTime(loop_.NowNanos());
      loop_.Run();
    }
  }

  void StartCall() {
    auto result = std::make_shared<CallResult>();
    Call call;
    call.timeout_nanos = kSecond;
    call.place = [result](const ResponseHead& head, DestinationSpans* spans) -> absl::Status {
      if (head.payload_bytes > kWindowBytes) return absl::ResourceExhaustedError("too long");
      result->destination.resize(head.payload_bytes);
      spans->push_back(absl::MakeSpan(result->destination));
      return absl::OkStatus();
    };
    call.done = [result](absl::StatusOr<Response> r) { result->done.Set(std::move(r)); };
    core_->Start(std::move(call));
    started_.push_back(result);
    loop_.Run();
  }

  void OnOpen(const std::shared_ptr<ConnectionCore>& /*core*/) override { opened_ = true; }
  void OnEnded(const std::shared_ptr<ConnectionCore>& /*core*/, bool /*was_open*/,
               const absl::Status& why) override {
    ended_ = true;
    why_ = why;
  }
  void OnCall(const std::shared_ptr<ConnectionCore>& /*core*/,
              std::unique_ptr<IncomingCall> call) override {
    switch (random_() % 3) {
      case 0:
        kept_.push_back(std::move(call));
        break;
      case 1:
        call->Respond({.header = ToBytes("hi")});
        break;
      default:
        ScriptedHandler::Echo(std::move(call));
    }
  }
  // Time goes by, and this side has not looked at its timers yet.
  void Pass(std::int64_t nanos) { loop_.clock.AdvanceNanos(nanos); }
  const std::vector<CallResultPtr>& started() const { return started_; }
  bool ended() const { return ended_; }
  const absl::Status& why() const { return why_; }
  std::uint64_t* counter() { return &counter_; }

 private:
  bool wire_closed() const { return ended_ || wire_->closed; }
  void Give(WireChannel channel, absl::Span<const std::byte> header,
            absl::Span<const std::byte> data, bool rendezvous, std::size_t bytes = 0) {
    WireMessage message{
        .channel = channel, .header = header, .data = data, .token = nullptr, .data_bytes = bytes};
    if (rendezvous) {
      message.token = reinterpret_cast<void*>(++next_token_);
      wire_->tokens.insert(message.token);
    }
    void* const token = message.token;
    if (!core_->OnMessage(message) && rendezvous && !wire_->closed) wire_->tokens.erase(token);
  }

  ManualLoop loop_;
  OfferBook book_;
  TransportCounters counters_;
  std::mt19937_64 random_;
  std::vector<std::vector<std::byte>> sent_;
  std::shared_ptr<ConnectionCore> core_;
  HandWire* wire_ = nullptr;
  Agreement agreement_;
  std::unique_ptr<SegmentCipher> cipher_;
  bool opened_ = false;
  bool ended_ = false;
  absl::Status why_;
  std::uint64_t counter_ = 0;
  std::uint64_t said_ = 0;
  std::set<std::tuple<SegmentKind, std::uint64_t, std::uint64_t>> told_;
  std::uintptr_t next_token_ = 0;
  std::vector<std::unique_ptr<IncomingCall>> kept_;
  std::vector<CallResultPtr> started_;
};

class HostilePeerTest : public ::testing::TestWithParam<bool> {};
INSTANTIATE_TEST_SUITE_P(All, HostilePeerTest, ::testing::Bool(), [](const auto& test) {
  return std::string(test.param ? "Encrypted" : "Plaintext");
});

TEST_P(HostilePeerTest, RandomSegmentsEndTheConnectionAtMost) {
  const int seeds = ShortOrLong(400, 20'000);
  int survived_ten = 0;
  for (int seed = 1; seed <= seeds; ++seed) {
    HostilePeer peer(static_cast<std::uint64_t>(seed), GetParam());
    for (int i = 0; i < 200 && !peer.ended(); ++i) {
      peer.SayRandom();
      survived_ten += i == 10 && !peer.ended() ? 1 : 0;
    }
    ASSERT_FALSE(HasFailure()) << "seed " << seed;
  }
  EXPECT_GT(survived_ten, seeds / 20);  // The walk goes somewhere before it ends.
}

SegmentHeader Request(HostilePeer* peer, std::uint64_t call_id, std::uint64_t payload_bytes,
                      std::uint64_t offset, std::uint32_t segment_bytes) {
  SegmentHeader header;
  header.call_id = call_id;
  header.counter = (*peer->counter())++;
  header.payload_bytes = payload_bytes;
  header.offset = offset;
  header.segment_bytes = segment_bytes;
  header.timeout_ms = 1000;
  return header;
}

// Whichever side looks at its timer first, it was the caller's deadline.
TEST_P(HostilePeerTest, ACallThatThePeerGaveUpAtItsDeadlineHasThatForAReason) {
  for (const auto& [passed_nanos, code] :
       {std::pair(kSecond / 2, absl::StatusCode::kUnavailable),
        {kSecond - kSecond / 500, absl::StatusCode::kUnavailable},
        {kSecond - kSecond / 2000, absl::StatusCode::kDeadlineExceeded},
        {kSecond, absl::StatusCode::kDeadlineExceeded},
        {2 * kSecond, absl::StatusCode::kDeadlineExceeded}}) {
    HostilePeer peer(1, GetParam());
    peer.StartCall();
    peer.Pass(passed_nanos);
    SegmentHeader header = Request(&peer, 1, 0, 0, 0);
    header.kind = SegmentKind::kEnded;
    header.timeout_ms = 0;
    peer.Say(header, false);
    ASSERT_EQ(peer.started().at(0)->done.times(), 1);
    EXPECT_EQ(peer.started()[0]->status().code(), code) << passed_nanos;
    EXPECT_FALSE(peer.ended());
  }
}

// What must end the connection, and with which code.
TEST_P(HostilePeerTest, ViolationsAreNamed) {
  struct Case {
    const char* name;
    absl::StatusCode code;
    void (*act)(HostilePeer*);
  };
  const Case cases[] = {
      {"a segment twice", absl::StatusCode::kDataLoss,
       [](HostilePeer* peer) {
         const SegmentHeader header = Request(peer, 1, 0, 0, 0);
         peer->Say(header, false);
         peer->Say(header, false);
       }},
      {"bytes twice", absl::StatusCode::kDataLoss,
       [](HostilePeer* peer) {
         peer->Say(Request(peer, 1, 3000, 1000, 1000), false);
         peer->Say(Request(peer, 1, 3000, 1500, 1000), false);
       }},
      {"another length", absl::StatusCode::kDataLoss,
       [](HostilePeer* peer) {
         peer->Say(Request(peer, 1, 3000, 1000, 1000), false);
         peer->Say(Request(peer, 1, 3001, 2000, 1000), false);
       }},
      {"more calls than the window", absl::StatusCode::kResourceExhausted,
       [](HostilePeer* peer) {
         for (std::uint64_t id = 1; id <= 9; ++id) {
           peer->Say(Request(peer, id, 3000, 1000, 1000), false);
         }
       }},
      {"a request beyond the window", absl::StatusCode::kResourceExhausted,
       [](HostilePeer* peer) {
         peer->Say(Request(peer, 1, HostilePeer::kWindowBytes + 1, 0, 1000), false);
       }},
      {"ids that jump", absl::StatusCode::kResourceExhausted,
       [](HostilePeer* peer) { peer->Say(Request(peer, 1000, 0, 0, 0), false); }},
      {"pushed bytes beyond the window", absl::StatusCode::kResourceExhausted,
       [](HostilePeer* peer) {
         for (std::uint64_t id = 1; id <= 8; ++id) {
           for (std::uint64_t at = 64'000; at < 320'000; at += 64'000) {
             peer->Say(Request(peer, id, 400'000, at, 64'000), false);
           }
         }
       }},
      {"an answer to nothing", absl::StatusCode::kDataLoss,
       [](HostilePeer* peer) {
         SegmentHeader header = Request(peer, 5, 0, 0, 0);
         header.kind = SegmentKind::kResponse;
         header.timeout_ms = 0;
         peer->Say(header, false);
       }},
      {"a segment beyond the limit", absl::StatusCode::kDataLoss,
       [](HostilePeer* peer) { peer->Say(Request(peer, 1, 500'000, 0, 70'000), false); }},
      {"goodbye", absl::StatusCode::kUnavailable,
       [](HostilePeer* peer) {
         SegmentHeader header = Request(peer, 0, 0, 0, 0);
         header.kind = SegmentKind::kGoodbye;
         header.timeout_ms = 0;
         peer->Say(header, false);
       }},
  };
  for (const Case& c : cases) {
    HostilePeer peer(1, GetParam());
    c.act(&peer);
    EXPECT_TRUE(peer.ended()) << c.name;
    EXPECT_EQ(peer.why().code(), c.code) << c.name << ": " << peer.why();
  }
}

}  // namespace
}  // namespace kvmill::testing
