// What a consumer of tickets pulls, seals and gives up. ticket_sim plays both sides against each
// other.
#include "service/cluster/ticket_redeem.h"

#include <gtest/gtest.h>

#include <optional>

#include "absl/strings/str_cat.h"
#include "tests/cluster/sim_loop.h"
#include "tests/cluster/ticket_fixture.h"

namespace kvmill::testing {
namespace {

using Fate = TicketRedeem::Fate;

// A producer that answers what the test says when the test says so, and a store that takes notes.
class FakeWorld : public TicketPeers, public TicketCopies {
 public:
  explicit FakeWorld(Loop& loop) : loop_(loop) {}

  TicketPeers::CallId Redeem(const Member&, const TicketSecret&, std::uint64_t since, std::int64_t,
                             std::int64_t deadline, TicketPeers::Done<TicketNews> done) override {
    ++questions;
    seen = since;
    question = std::move(done);
    question_id = ++last;
    if (dead) {
      const TicketPeers::CallId id = last;
      loop_.At(deadline, [this, id] {
        if (question_id == id) Answer(absl::DeadlineExceededError("late"));
      });
    }
    return question_id;
  }
  TicketPeers::CallId Pull(const Member&, const TicketSecret&, std::vector<Piece> pieces,
                           std::int64_t, TicketPeers::Done<std::vector<Landed>> done) override {
    const TicketPeers::CallId id = ++last;
    pulls[id] = {std::move(pieces), std::move(done)};
    return id;
  }
  TicketPeers::CallId Acknowledge(const Member&, const TicketSecret&, std::int64_t,
                                  std::function<void(absl::Status)> done) override {
    ++acknowledgements;
    loop_.Post([this, done = std::move(done)] { done(acknowledged); });
    return ++last;
  }
  void Cancel(TicketPeers::CallId call) override {
    if (call == question_id) question = nullptr;
    pulls.erase(call);
  }
  CopyId Begin(const Fingerprint&, const TicketBlock& block, TicketCopies::Done done) override {
    const CopyId id = ++last;
    copies[id] = std::string(block.key.view());
    loop_.Post([this, id, name = copies[id], done = std::move(done)] {
      if (!copies.contains(id)) return;
      const auto refused = refuse.find(name);
      if (refused != refuse.end()) copies.erase(id);
      done(refused == refuse.end() ? absl::OkStatus() : refused->second);
    });
    return id;
  }
  void Commit(CopyId copy, std::uint64_t digest, TicketCopies::Done done) override {
    committed.push_back(absl::StrCat(copies.at(copy), " ", digest));
    copies.erase(copy);
    loop_.Post([this, done = std::move(done)] { done(sealed); });
  }
  void Abandon(CopyId copy) override { EXPECT_EQ(copies.erase(copy), 1u); }

  void Answer(absl::StatusOr<TicketNews> news) {
    ASSERT_NE(question, nullptr);
    std::exchange(question, nullptr)(std::move(news));
  }
  // The oldest pull brings what was asked for, less what `spoil` takes away.
  void Land(const std::function<void(std::vector<Landed>&)>& spoil = nullptr) {
    ASSERT_FALSE(pulls.empty());
    auto pull = pulls.extract(pulls.begin()).mapped();
    std::vector<Landed> landed;
    for (const Piece& piece : pull.first) landed.push_back({piece.layers, false});
    if (spoil != nullptr) spoil(landed);
    pull.second(std::move(landed));
  }
  void FailPull(const absl::Status& status) {
    ASSERT_FALSE(pulls.empty());
    pulls.extract(pulls.begin()).mapped().second(status);
  }

  int questions = 0, acknowledgements = 0;
  std::uint64_t seen = 0;
  bool dead = false;
  TicketPeers::Done<TicketNews> question;
  std::map<TicketPeers::CallId,
           std::pair<std::vector<Piece>, TicketPeers::Done<std::vector<Landed>>>>
      pulls;
  std::map<CopyId, std::string> copies;
  std::map<std::string, absl::Status> refuse;
  std::vector<std::string> committed;
  absl::Status acknowledged, sealed;

 private:
  Loop& loop_;
  std::uint64_t last = 0;
  TicketPeers::CallId question_id = 0;
};

class TicketRedeemTest : public ::testing::Test {
 protected:
  TicketRedeemTest()
      : events_(1, false),
        loop_(events_, 0, 0),
        world_(loop_),
        health_(loop_.clock()),
        redeem_(std::make_unique<TicketRedeem>(loop_, world_, world_, health_, 1,
                                               TicketRedeem::Options{.tickets_max = 2})) {
    health_.Admit(MemberNamed("prefill"));  // Who was never asked anything is not known.
  }

  struct Caller {
    int updates = 0, dones = 0;
    LayerSet here;  // Of the first block, in the last update.
    TicketRedeem::Outcome outcome;
  };
  TicketRedeem::CallerId Start(Caller* caller, double seconds = 60, std::uint8_t secret = 1,
                               std::uint8_t fingerprint = 0) {
    TicketRedeem::Request request;
    request.secret[0] = secret;
    request.producer = MemberNamed("prefill");
    request.fingerprint[0] = std::byte{fingerprint};
    request.deadline_nanos =
        loop_.clock().MonotonicNanos() + static_cast<std::int64_t>(seconds * 1e9);
    return redeem_->Start(
        request,
        [caller](const std::vector<TicketRedeem::Block>& blocks,
                 const std::vector<std::uint32_t>&) {
          ++caller->updates;
          caller->here = blocks[0].here;
        },
        [caller](const TicketRedeem::Outcome& outcome) {
          ++caller->dones;
          caller->outcome = outcome;
        });
  }
  static TicketNews FirstNews(std::vector<TicketBlockNews> changed) {
    TicketNews news;
    news.version = 1;
    news.blocks = {BlockNamed("a"), BlockNamed("b")};
    news.changed = std::move(changed);
    return news;
  }
  static TicketNews Later(std::uint64_t version, std::vector<TicketBlockNews> changed) {
    TicketNews news;
    news.version = version;
    news.changed = std::move(changed);
    return news;
  }
  void Wait(double seconds = 0.001) {
    events_.RunUntil(events_.now() + static_cast<std::int64_t>(seconds * 1e9), [] {});
  }
  // Nothing is left of any ticket.
  void ExpectNothing() {
    Wait();
    EXPECT_EQ(redeem_->running() + redeem_->callers() + redeem_->acknowledging(), 0u);
    EXPECT_TRUE(world_.copies.empty());
    EXPECT_TRUE(world_.pulls.empty());
  }

  SimEvents events_;
  SimLoop loop_;
  FakeWorld world_;
  PeerHealth health_;
  std::unique_ptr<TicketRedeem> redeem_;
};

TEST_F(TicketRedeemTest, PullsLayersAsTheyAreFinishedAndSealsWithTheProducer) {
  Caller caller;
  Start(&caller);
  world_.Answer(FirstNews({{0, State::kOpen, Layers({0}), 0}}));
  EXPECT_EQ(world_.questions, 2);
  EXPECT_EQ(world_.seen, 1u);
  Wait();
  ASSERT_EQ(world_.pulls.size(), 1u);
  EXPECT_EQ(world_.copies.size(), 1u) << "a block of which nothing is finished needs no memory";
  world_.Answer(Later(2, {{0, State::kOpen, LayerSet::First(3), 0}}));
  EXPECT_EQ(world_.pulls.size(), 2u);
  world_.Land();
  world_.Land();
  Wait();
  EXPECT_EQ(caller.here, LayerSet::First(3));
  EXPECT_TRUE(world_.committed.empty()) << "the producer has not sealed it";
  world_.Answer(Later(3, {{0, State::kSealed, LayerSet::First(3), 77},
                          {1, State::kSealed, LayerSet::First(3), 78}}));
  EXPECT_EQ(world_.committed, std::vector<std::string>{"a 77"});
  Wait();
  EXPECT_EQ(world_.question, nullptr) << "there is nothing to ask any more";
  world_.Land();
  Wait();
  EXPECT_EQ(world_.committed, (std::vector<std::string>{"a 77", "b 78"}));
  EXPECT_EQ(caller.dones, 1);
  EXPECT_TRUE(caller.outcome.status.ok());
  EXPECT_EQ(caller.outcome.blocks[0].fate, Fate::kSealed);
  EXPECT_EQ(caller.outcome.blocks[1].fate, Fate::kSealed);
  EXPECT_EQ(world_.acknowledgements, 1);
  ExpectNothing();
}

TEST_F(TicketRedeemTest, RanksShareTheWorkAndALateOneIsToldHowItEnded) {
  Caller first, second, late, other, much_later;
  Start(&first);
  Start(&second);
  EXPECT_EQ(world_.questions, 1);
  Start(&other, 60, 1, /*fingerprint=*/9);
  Wait();
  EXPECT_TRUE(absl::IsInvalidArgument(other.outcome.status));
  world_.Answer(FirstNews({{0, State::kFailed, {}, 0}, {1, State::kFailed, {}, 0}}));
  Wait();
  Start(&late);
  Wait();
  for (const Caller* caller : {&first, &second, &late}) {
    EXPECT_EQ(caller->dones, 1);
    ASSERT_EQ(caller->outcome.blocks.size(), 2u);
    EXPECT_EQ(caller->outcome.blocks[1].fate, Fate::kMissed);
  }
  EXPECT_EQ(world_.questions, 1);
  ExpectNothing();
  Wait(61);
  Start(&much_later);
  EXPECT_EQ(world_.questions, 2) << "nobody remembers";
}

TEST_F(TicketRedeemTest, ARevokedTicketIsDiscardedButForWhatWasSealed) {
  Caller caller;
  Start(&caller);
  world_.Answer(FirstNews(
      {{0, State::kSealed, LayerSet::First(3), 5}, {1, State::kOpen, Layers({0, 1}), 0}}));
  Wait();
  world_.Land();
  Wait();
  EXPECT_EQ(world_.copies.size(), 1u);
  world_.Answer(absl::AbortedError("the ticket was revoked"));
  EXPECT_TRUE(absl::IsAborted(caller.outcome.status));
  EXPECT_EQ(caller.outcome.blocks[0].fate, Fate::kSealed);
  EXPECT_EQ(caller.outcome.blocks[1].fate, Fate::kMissed);
  EXPECT_TRUE(caller.outcome.blocks[1].here.empty());
  EXPECT_EQ(world_.acknowledgements, 0) << "the producer knows";
  ExpectNothing();
}

TEST_F(TicketRedeemTest, ABlockGivenUpByItsWritersOrHeldUpHereIsAMissAndOthersGoOn) {
  Caller caller;
  world_.refuse["a"] = absl::AlreadyExistsError("");
  Start(&caller);
  world_.Answer(FirstNews({{0, State::kOpen, Layers({0}), 0}, {1, State::kOpen, Layers({0}), 0}}));
  Wait();
  world_.Answer(Later(2, {{1, State::kFailed, Layers({0}), 0}}));
  EXPECT_EQ(caller.outcome.blocks[0].fate, Fate::kExists);
  EXPECT_EQ(caller.outcome.blocks[1].fate, Fate::kMissed);
  EXPECT_EQ(world_.acknowledgements, 1);
  ExpectNothing();

  Caller full;
  world_.refuse["a"] = absl::ResourceExhaustedError("");
  Start(&full, 60, 2);
  world_.Answer(FirstNews({{0, State::kOpen, Layers({0}), 0}, {1, State::kFailed, {}, 0}}));
  Wait();
  EXPECT_TRUE(full.outcome.status.ok());
  EXPECT_EQ(full.outcome.blocks[0].fate, Fate::kMissed);
  ExpectNothing();
}

TEST_F(TicketRedeemTest, DamagedPagesArePulledAgainAFewTimes) {
  Caller caller;
  Start(&caller);
  world_.Answer(
      FirstNews({{0, State::kSealed, LayerSet::First(3), 5}, {1, State::kFailed, {}, 0}}));
  Wait();
  const auto damage = [](std::vector<TicketPeers::Landed>& landed) {
    landed[0].layers = LayerSet();
    landed[0].damaged = true;
  };
  world_.Land(damage);
  world_.Land(damage);
  EXPECT_EQ(caller.dones, 0);
  world_.Land(damage);
  EXPECT_EQ(caller.outcome.blocks[0].fate, Fate::kMissed);
  EXPECT_TRUE(world_.committed.empty());
  EXPECT_TRUE(health_.Paused(MemberNamed("prefill"))) << "whoever lies is left alone";
  ExpectNothing();
}

TEST_F(TicketRedeemTest, PagesThatWereNotSealedTogetherAreAMiss) {
  Caller caller;
  world_.sealed = absl::DataLossError("other pages");
  Start(&caller);
  world_.Answer(
      FirstNews({{0, State::kSealed, LayerSet::First(3), 5}, {1, State::kFailed, {}, 0}}));
  Wait();
  world_.Land();
  Wait();
  EXPECT_EQ(caller.outcome.blocks[0].fate, Fate::kMissed);
  EXPECT_TRUE(health_.Paused(MemberNamed("prefill")));
  ExpectNothing();
}

TEST_F(TicketRedeemTest, ASilentProducerIsGivenUp) {
  Caller caller;
  world_.dead = true;
  Start(&caller);
  Wait(9);
  EXPECT_EQ(caller.dones, 0);
  Wait(4);
  EXPECT_EQ(caller.dones, 1);
  EXPECT_TRUE(absl::IsUnavailable(caller.outcome.status));
  EXPECT_GT(world_.questions, 3);
  ExpectNothing();
}

TEST_F(TicketRedeemTest, AProducerThatSaysNothingNewIsNotAskedAllTheTime) {
  Caller caller;
  Start(&caller);
  Wait();
  world_.Answer(FirstNews({{0, State::kOpen, Layers({0})}}));
  Wait();
  const int before = world_.questions;
  for (std::uint64_t version = 2; version < 102; ++version) {
    if (world_.question != nullptr) {
      world_.Answer(Later(version, {{0, State::kOpen, Layers({0})}}));
    }
    Wait();
  }
  EXPECT_GE(world_.questions, before + 1);
  EXPECT_LE(world_.questions, before + 25) << "each answer was followed by a question";
}

TEST_F(TicketRedeemTest, PullsThatFailAreTriedAgainUntilThatIsTooLong) {
  Caller caller;
  Start(&caller);
  world_.Answer(
      FirstNews({{0, State::kSealed, LayerSet::First(3), 5}, {1, State::kFailed, {}, 0}}));
  Wait();
  world_.FailPull(absl::UnavailableError("cut"));
  EXPECT_TRUE(world_.pulls.empty()) << "not at once";
  Wait(1);
  ASSERT_EQ(world_.pulls.size(), 1u);
  for (int i = 0; i < 40 && caller.dones == 0; ++i) {
    world_.FailPull(absl::UnavailableError("cut"));
    Wait(0.5);
  }
  EXPECT_TRUE(absl::IsUnavailable(caller.outcome.status));
  EXPECT_EQ(world_.acknowledgements, 1);
  ExpectNothing();
}

TEST_F(TicketRedeemTest, WhoeverHasNoTimeIsToldAndTheLastCallerTakesTheWorkWithIt) {
  Caller quick, patient, gone;
  Start(&quick, 1);
  Start(&patient, 5);
  const TicketRedeem::CallerId cancelled = Start(&gone, 50);
  world_.Answer(FirstNews({{0, State::kOpen, Layers({0}), 0}}));
  Wait(1.1);
  EXPECT_TRUE(absl::IsDeadlineExceeded(quick.outcome.status));
  EXPECT_EQ(quick.outcome.blocks[0].fate, Fate::kOpen);
  redeem_->Cancel(cancelled);
  redeem_->Cancel(cancelled);
  EXPECT_EQ(redeem_->running(), 1u);
  EXPECT_EQ(world_.copies.size(), 1u);
  Wait(4);
  EXPECT_TRUE(absl::IsDeadlineExceeded(patient.outcome.status));
  EXPECT_EQ(gone.dones, 0);
  EXPECT_EQ(world_.acknowledgements, 1) << "nobody here wants it: the producer may let go";
  ExpectNothing();
}

TEST_F(TicketRedeemTest, WhatCannotBeOrIsOfAnotherNamespaceEndsIt) {
  Caller liar, stranger;
  Start(&liar);
  TicketNews wrong = FirstNews({});
  wrong.blocks.clear();
  world_.Answer(wrong);
  EXPECT_TRUE(absl::IsDataLoss(liar.outcome.status));
  EXPECT_TRUE(health_.Paused(MemberNamed("prefill")));
  Start(&stranger, 60, 2, 4);
  world_.Answer(FirstNews({}));
  EXPECT_TRUE(absl::IsFailedPrecondition(stranger.outcome.status));
  EXPECT_EQ(world_.acknowledgements, 2);
  ExpectNothing();
}

TEST_F(TicketRedeemTest, ThereIsALimitOfTicketsAndALostAcknowledgementIsSaidAgain) {
  Caller a, b, c;
  Start(&a, 60, 1);
  const TicketRedeem::CallerId second = Start(&b, 60, 2);
  Start(&c, 60, 3);
  Wait();
  EXPECT_EQ(c.outcome.status.message(), "2 tickets are being redeemed: at most 2");
  world_.acknowledged = absl::UnavailableError("");
  redeem_->Cancel(second);
  Wait(5);
  EXPECT_GT(world_.acknowledgements, 2);
  world_.acknowledged = absl::NotFoundError("");
  Wait(3);
  EXPECT_EQ(redeem_->acknowledging(), 0u);
  redeem_ = nullptr;
  EXPECT_EQ(a.dones, 0);
}

}  // namespace
}  // namespace kvmill::testing
