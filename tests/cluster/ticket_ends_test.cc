// How tickets end at their consumer and why blocks are missed; many of them; and those that are
// redeemed where they were made.
#include "service/cluster/peers.h"
#include "tests/cluster/ticket_redeem_fixture.h"

namespace kvmill::testing {
namespace {

class TicketEndsTest : public TicketRedeemTest {
 protected:
  bool damaged_ = false;
};

std::vector<Miss> MissesOf(const TicketRedeem::Outcome& outcome) {
  std::vector<Miss> misses;
  for (const TicketRedeem::Block& block : outcome.blocks) misses.push_back(block.miss);
  return misses;
}

TEST_F(TicketEndsTest, AnOutcomeSaysWhyEachBlockWasMissed) {
  const auto misses_of = [this](std::uint8_t secret, const absl::Status& end) {
    Caller caller;
    Start(&caller, 60, secret);
    world_.Answer(FirstNews({{0, State::kFailed, {}, 0}, {1, State::kOpen, Layers({0}), 0}}));
    Wait();
    world_.Answer(end);
    Wait(end.code() == absl::StatusCode::kUnavailable ? 20 : 0.001);  // It is asked again.
    EXPECT_EQ(caller.dones, 1);
    EXPECT_EQ(caller.outcome.status.code(), end.code());
    return MissesOf(caller.outcome);
  };
  using Two = std::vector<Miss>;
  EXPECT_EQ(misses_of(1, TicketEndedError(TicketEnd::kRevoked)),
            (Two{Miss::kGivenUp, Miss::kRevoked}));
  EXPECT_EQ(misses_of(2, TicketEndedError(TicketEnd::kDeadline)),
            (Two{Miss::kGivenUp, Miss::kDeadline}));
  EXPECT_EQ(misses_of(3, absl::AbortedError("")), (Two{Miss::kGivenUp, Miss::kEnded}));
  EXPECT_EQ(misses_of(4, absl::NotFoundError("")), (Two{Miss::kGivenUp, Miss::kEnded}));
  EXPECT_EQ(misses_of(5, absl::PermissionDeniedError("")), (Two{Miss::kGivenUp, Miss::kRefused}));
  world_.dead = true;
  EXPECT_EQ(misses_of(6, absl::UnavailableError("")), (Two{Miss::kGivenUp, Miss::kProducerGone}));
}

TEST_F(TicketEndsTest, BlocksThatDidNotFitOrCameDamagedSaySo) {
  const auto miss_of_a = [this](std::uint8_t secret) {
    Caller caller;
    Start(&caller, 60, secret);
    world_.Answer(
        FirstNews({{0, State::kSealed, LayerSet::First(3), 5}, {1, State::kFailed, {}, 0}}));
    Wait();
    for (int i = 0; i < 3 && !world_.pulls.empty(); ++i) {
      world_.Land([this](std::vector<TicketPeers::Landed>& landed) {
        if (world_.sealed.ok()) landed[0] = {LayerSet(), damaged_};
      });
      Wait();
    }
    EXPECT_EQ(caller.dones, 1);
    return caller.outcome.blocks[0].miss;
  };
  damaged_ = true;
  EXPECT_EQ(miss_of_a(1), Miss::kDamaged);
  damaged_ = false;
  EXPECT_EQ(miss_of_a(2), Miss::kNoRoom) << "there was no memory for a longer page";
  world_.sealed = absl::DataLossError("");
  EXPECT_EQ(miss_of_a(3), Miss::kDamaged);
  world_.sealed = absl::ResourceExhaustedError("");
  EXPECT_EQ(miss_of_a(4), Miss::kNoRoom);
  world_.sealed = absl::AbortedError("it was removed");
  EXPECT_EQ(miss_of_a(5), Miss::kRefused);
  world_.refuse["a"] = absl::ResourceExhaustedError("");
  EXPECT_EQ(miss_of_a(6), Miss::kNoRoom);
  world_.refuse["a"] = absl::InvalidArgumentError("");
  EXPECT_EQ(miss_of_a(7), Miss::kRefused);
  ExpectNothing();
}

// Who left in order, or was restarted, does not come back; who vanished may.
TEST_F(TicketEndsTest, AProducerThatLeftOrWasRestartedIsNotWaitedFor) {
  Member producer = MemberNamed("prefill");
  const Member other = MemberNamed("other");
  Caller vanished, left, restarted;
  redeem_->SetMembers({producer, other});
  Start(&vanished);
  redeem_->SetMembers({other});
  Wait();
  EXPECT_EQ(vanished.dones, 0) << "it may serve on";
  redeem_->SetMembers({producer, other});
  Start(&left, 60, 2);
  producer.state = MemberState::kDraining;
  redeem_->SetMembers({producer, other});
  Wait();
  EXPECT_EQ(left.dones, 0) << "it serves until it has left";
  redeem_->SetMembers({other});
  for (const Caller* caller : {&vanished, &left}) {
    ASSERT_EQ(caller->dones, 1);
    EXPECT_EQ(caller->outcome.status,
              absl::UnavailableError("node \"prefill\", which made the ticket, left the cluster"));
  }
  Start(&restarted, 60, 3);
  producer.incarnation = "prefill.2";
  redeem_->SetMembers({producer});
  EXPECT_EQ(restarted.outcome.status,
            absl::UnavailableError("node \"prefill\", which made the ticket, was restarted"));
  EXPECT_EQ(world_.acknowledgements, 0) << "there is nobody to tell";
  ExpectNothing();
}

// Its address answers, and it is another process: no silence is waited for.
TEST_F(TicketEndsTest, AProducerThatWasReplacedIsNotWaitedFor) {
  Caller of_question, of_pull;
  Start(&of_question);
  world_.Answer(FirstNews({{0, State::kOpen, Layers({0}), 0}}));
  Wait();
  world_.Answer(ReplacedError("another process"));
  Start(&of_pull, 60, 2);
  world_.Answer(FirstNews({{0, State::kOpen, Layers({0}), 0}}));
  Wait();
  world_.FailPull(ReplacedError("another process"));
  for (const Caller* caller : {&of_question, &of_pull}) {
    ASSERT_EQ(caller->dones, 1);
    EXPECT_TRUE(absl::IsUnavailable(caller->outcome.status)) << caller->outcome.status;
    EXPECT_EQ(
        caller->outcome.status.message(),
        "node \"prefill\", which made the ticket, was restarted, or is not at its address any "
        "more: another process");
    EXPECT_EQ(MissesOf(caller->outcome), (std::vector{Miss::kProducerGone, Miss::kProducerGone}));
  }
  EXPECT_EQ(world_.acknowledgements, 0) << "there is nobody to tell";
  ExpectNothing();
  // Who had something to tell does not try it again, either.
  Caller cancelled;
  world_.acknowledged = ReplacedError("another process");
  redeem_->Cancel(Start(&cancelled, 60, 3));
  EXPECT_EQ(world_.acknowledgements, 1);
  ExpectNothing();
}

TEST_F(TicketEndsTest, WhereItWasMadeATicketIsFollowedAndNothingIsCopied) {
  here_ = true;
  Caller caller;
  Start(&caller);
  world_.Answer(FirstNews({{0, State::kOpen, Layers({1}), 0}}));
  Wait();
  EXPECT_EQ(caller.here, Layers({1}));
  world_.Answer(Later(2, {{0, State::kSealed, LayerSet::First(3), 77}}));
  Wait();
  EXPECT_EQ(caller.changed, std::vector<std::uint32_t>{0});
  EXPECT_EQ(caller.here, LayerSet::First(3));
  world_.Answer(Later(3, {{1, State::kFailed, {}, 0}}));
  EXPECT_TRUE(caller.outcome.status.ok());
  EXPECT_EQ(caller.outcome.blocks[0].fate, Fate::kSealed);
  EXPECT_EQ(caller.outcome.blocks[1].miss, Miss::kGivenUp);
  EXPECT_TRUE(world_.committed.empty());
  EXPECT_EQ(world_.acknowledgements, 1) << "the hold ends";
  ExpectNothing();
}

class ManyTicketsTest : public TicketRedeemTest {
 protected:
  ManyTicketsTest() : TicketRedeemTest({.tickets_max = 200, .producer_pulls_max = 3}) {}

  // All of its blocks are finished.
  TicketNews Finished(std::uint32_t blocks) {
    TicketNews news;
    news.version = 1;
    for (std::uint32_t b = 0; b < blocks; ++b) {
      news.blocks.push_back(BlockNamed(absl::StrCat("b", b)));
      news.changed.push_back({b, State::kSealed, LayerSet::First(3), 5});
    }
    return news;
  }
};

TEST_F(ManyTicketsTest, TicketsOfOneProducerTakeTurnsWithTheirPulls) {
  constexpr std::uint8_t kTickets = 20;
  std::vector<Caller> callers(kTickets);
  std::vector<TicketRedeem::CallerId> ids;
  for (std::uint8_t t = 0; t < kTickets; ++t) {
    ids.push_back(Start(&callers[t], 60, t));
    world_.Answer(Finished(40));  // 120 pages: two pulls.
    Wait();
    EXPECT_LE(world_.pulls.size(), 3u);
  }
  redeem_->Cancel(ids[5]);
  Wait();
  EXPECT_EQ(world_.pulls.size(), 3u);
  while (!world_.pulls.empty()) {
    world_.Land();
    Wait();
    EXPECT_LE(world_.pulls.size(), 3u);
  }
  for (std::uint8_t t = 0; t < kTickets; ++t) {
    if (t == 5) continue;
    EXPECT_EQ(callers[t].dones, 1) << int{t};
    EXPECT_TRUE(callers[t].outcome.status.ok());
    EXPECT_EQ(callers[t].outcome.blocks[39].fate, Fate::kSealed);
  }
  ExpectNothing();
}

// 32 Ki blocks are remembered, whatever tickets they are of.
TEST_F(ManyTicketsTest, WhatIsRememberedOfOutcomesIsBounded) {
  constexpr std::uint8_t kTickets = 40;  // Of a thousand blocks each.
  const auto end = [this](std::uint8_t secret) {
    Caller caller;
    Start(&caller, 60, secret);
    TicketNews news = Finished(1000);
    for (TicketBlockNews& change : news.changed) change = {change.block, State::kFailed, {}, 0};
    world_.Answer(news);
    EXPECT_EQ(caller.dones, 1);
  };
  for (std::uint8_t t = 0; t < kTickets; ++t) end(t);
  const int questions = world_.questions;
  std::vector<Caller> again(kTickets);
  int remembered = 0;
  for (std::uint8_t t = kTickets; t-- > 0;) {
    const TicketRedeem::CallerId caller = Start(&again[t], 60, t);
    Wait();
    remembered += again[t].dones;
    if (again[t].dones == 0) redeem_->Cancel(caller);
  }
  EXPECT_EQ(remembered, static_cast<int>(TicketRedeem::kRememberBlocksMax / 1000));
  EXPECT_EQ(world_.questions - questions, kTickets - remembered);
  EXPECT_EQ(again[kTickets - 1].dones, 1) << "the last one is";
}

}  // namespace
}  // namespace kvmill::testing
