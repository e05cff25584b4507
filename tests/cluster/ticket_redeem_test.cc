// What a consumer of tickets pulls, seals and gives up. ticket_sim plays both sides against each
// other.
#include "tests/cluster/ticket_redeem_fixture.h"

namespace kvmill::testing {
namespace {

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

class TicketSharesTest : public TicketRedeemTest {
 protected:
  TicketSharesTest() : TicketRedeemTest({.tickets_max = 8}) {}
};

TEST_F(TicketSharesTest, AnotherTenantRedeemsAQuarterOfTheTickets) {
  Caller first, second, third, same, of_another, own;
  tenant_ = "x";
  Start(&first, 60, 1);
  Start(&second, 60, 2);
  Start(&third, 60, 3);
  Start(&same, 60, 1);
  tenant_ = "y";
  Start(&of_another, 60, 3);
  tenant_ = "";
  Start(&own, 60, 4);
  Wait();
  EXPECT_EQ(third.outcome.status, absl::ResourceExhaustedError(
                                      "2 tickets of tenant \"x\" are being redeemed: at most 2"));
  EXPECT_EQ(redeem_->running(), 4u);
  for (const Caller* caller : {&first, &second, &same, &of_another, &own}) {
    EXPECT_EQ(caller->dones, 0);
  }
}

// Its secret is another ticket's, which is at work here, or remembered.
TEST_F(TicketRedeemTest, OfAnotherNamespaceATicketIsAnotherOne) {
  Caller own, forged, late;
  Start(&own);
  world_.Answer(FirstNews({{0, State::kOpen, Layers({0}), 0}}));
  Wait();
  EXPECT_EQ(own.updates, 1);
  const int questions = world_.questions;
  const auto question = std::exchange(world_.question, nullptr);
  Start(&forged, 60, 1, /*fingerprint=*/9);
  Wait();
  EXPECT_EQ(world_.questions, questions + 1) << "the producer is asked, as of any";
  EXPECT_EQ(forged.updates + forged.dones, 0);
  // One that does not look at the namespace.
  world_.Answer(FirstNews({{0, State::kOpen, Layers({0}), 0}}));
  Wait();
  ASSERT_EQ(forged.dones, 1);
  EXPECT_EQ(forged.outcome.status, NoSuchTicketError());
  EXPECT_TRUE(forged.outcome.blocks.empty());
  EXPECT_EQ(forged.updates, 0);
  EXPECT_EQ(world_.acknowledgements, 0) << "it is not his to end";
  EXPECT_EQ(own.dones, 0);
  question(Later(2, {{0, State::kFailed, {}, 0}, {1, State::kFailed, {}, 0}}));
  Wait();
  ASSERT_EQ(own.dones, 1);
  EXPECT_TRUE(own.outcome.status.ok());
  Start(&late, 60, 1, /*fingerprint=*/8);
  Wait();
  EXPECT_EQ(late.dones, 0) << "nothing is remembered of it";
  world_.Answer(NoSuchTicketError());
  Wait();
  EXPECT_EQ(late.outcome.status, NoSuchTicketError());
  ExpectNothing();
}

TEST_F(TicketRedeemTest, RanksShareTheWorkAndALateOneIsToldHowItEnded) {
  Caller first, second, late, much_later;
  Start(&first);
  Start(&second);
  EXPECT_EQ(world_.questions, 1);
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
  EXPECT_EQ(quick.outcome.blocks[0].fate, Fate::kMissed);
  EXPECT_EQ(quick.outcome.blocks[0].miss, Miss::kCallEnded);
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
  EXPECT_EQ(stranger.outcome.status, NoSuchTicketError());
  EXPECT_EQ(world_.acknowledgements, 1) << "it is not his to end";
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
