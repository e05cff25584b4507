// The rules of tickets one by one: what a producer promises and when it lets go, what a consumer
// pulls, seals and gives up. ticket_sim plays both sides against each other.
#include <gtest/gtest.h>

#include <optional>

#include "absl/strings/str_cat.h"
#include "service/cluster/layer_set.h"
#include "service/cluster/ticket_redeem.h"
#include "service/cluster/ticket_table.h"
#include "tests/cluster/sim_loop.h"

namespace kvmill {
namespace {

using State = TicketBlockState;
using Fate = TicketRedeem::Fate;

LayerSet Layers(std::initializer_list<std::size_t> layers) {
  LayerSet set;
  for (const std::size_t layer : layers) set.Add(layer);
  return set;
}

TicketBlock BlockNamed(const std::string& name, std::uint16_t layer_count = 3) {
  TicketBlock block;
  block.key = *BlockKey::FromBytes(name);
  block.layer_count = layer_count;
  block.token_count = 128;
  return block;
}

Member MemberNamed(const std::string& id) {
  Member member;
  member.id = id;
  member.incarnation = id + ".1";
  return member;
}

TEST(LayerSetTest, IsASetOfUpToAllLayers) {
  EXPECT_EQ(LayerSet::First(0), LayerSet());
  for (const std::size_t count : {1, 63, 64, 65, 511, 512}) {
    const LayerSet all = LayerSet::First(count);
    EXPECT_EQ(all.count(), count);
    EXPECT_EQ(all.end(), count);
    EXPECT_TRUE(all.Has(count - 1));
    EXPECT_FALSE(all.Has(count));
    EXPECT_EQ(all.words().size(), (count + 63) / 64);
    EXPECT_EQ(LayerSet::FromWords(all.words()), all);
    EXPECT_EQ(all.Leading(1), Layers({0}));
    EXPECT_TRUE(all.HasAll(all));
    EXPECT_TRUE(all.Without(all).empty());
  }
  LayerSet set = Layers({3, 70, 500});
  EXPECT_EQ(set.Leading(2), Layers({3, 70}));
  set.Remove(Layers({500, 4}));
  EXPECT_EQ(set, Layers({3, 70}));
  EXPECT_FALSE(set.HasAll(Layers({3, 4})));
  EXPECT_EQ(LayerSet::FromWords(std::vector<std::uint64_t>(9)), std::nullopt);
}

TEST(TicketNewsTest, WhatCannotBeIsNoAnswer) {
  const std::vector<TicketBlock> blocks = {BlockNamed("a"), BlockNamed("b", 5)};
  TicketNews first;
  first.version = 1;
  first.blocks = blocks;
  EXPECT_TRUE(ValidNews(0, {}, first));
  TicketNews later;
  later.version = 3;
  later.changed = {{0, State::kOpen, Layers({0, 2}), 0},
                   {1, State::kSealed, LayerSet::First(5), 7}};
  EXPECT_TRUE(ValidNews(2, blocks, later));
  EXPECT_TRUE(ValidNews(3, blocks, later));

  struct Case {
    const char* what;
    void (*spoil)(TicketNews&);
  };
  const Case cases[] = {
      {"an older version", [](TicketNews& n) { n.version = 1; }},
      {"no version", [](TicketNews& n) { n.version = 0; }},
      {"blocks again", [](TicketNews& n) { n.blocks = {BlockNamed("c")}; }},
      {"no such block", [](TicketNews& n) { n.changed[0].block = 2; }},
      {"no such layer", [](TicketNews& n) { n.changed[0].finished.Add(3); }},
      {"no such state", [](TicketNews& n) { n.changed[0].state = static_cast<State>(3); }},
      {"sealed in part", [](TicketNews& n) { n.changed[1].finished = LayerSet::First(4); }},
      {"too many", [](TicketNews& n) { n.changed.resize(3); }},
  };
  for (const Case& c : cases) {
    TicketNews spoiled = later;
    c.spoil(spoiled);
    EXPECT_FALSE(ValidNews(2, blocks, spoiled)) << c.what;
  }
  const Case first_cases[] = {
      {"no blocks", [](TicketNews& n) { n.blocks.clear(); }},
      {"too many blocks",
       [](TicketNews& n) { n.blocks.assign(kTicketBlocksMax + 1, BlockNamed("a")); }},
      {"no key", [](TicketNews& n) { n.blocks[0].key = BlockKey(); }},
      {"no layers", [](TicketNews& n) { n.blocks[0].layer_count = 0; }},
      {"too many layers", [](TicketNews& n) { n.blocks[0].layer_count = kLayersMax + 1; }},
  };
  for (const Case& c : first_cases) {
    TicketNews spoiled = first;
    c.spoil(spoiled);
    EXPECT_FALSE(ValidNews(0, {}, spoiled)) << c.what;
  }
}

// --- The producer ---

class FakeHolds : public TicketHolds {
 public:
  absl::StatusOr<HoldId> Hold(const Fingerprint&, const std::vector<TicketBlock>&,
                              Events* to) override {
    if (!refuse.ok()) return refuse;
    events = to;
    open.insert(++last);
    return last;
  }
  void Release(HoldId hold) override { EXPECT_EQ(open.erase(hold), 1u) << "released twice"; }

  absl::Status refuse;
  Events* events = nullptr;
  HoldId last = 0;
  std::set<HoldId> open;
};

class TicketTableTest : public testing::Test {
 protected:
  TicketTableTest() : events_(1, false), loop_(events_, 0, 0) { Open({}); }

  void Open(const TicketTable::Options& options) {
    table_ = std::make_unique<TicketTable>(
        loop_, holds_,
        [this] {
          TicketSecret secret{};
          secret[0] = ++secrets_;
          return secret;
        },
        options);
  }
  TicketSecret Create(const std::string& consumer = "", const std::string& owner = "") {
    TicketTable::Request request = RequestOf({BlockNamed("a"), BlockNamed("b")});
    request.consumer = consumer;
    request.owner = owner;
    return *table_->Create(request);
  }
  static TicketTable::Request RequestOf(std::vector<TicketBlock> blocks) {
    TicketTable::Request request;
    request.blocks = std::move(blocks);
    request.ttl_nanos = 10 * kSimSecond;
    request.life_nanos = 60 * kSimSecond;
    return request;
  }
  void Redeem(const TicketSecret& secret, std::uint64_t seen,
              const TicketTable::Consumer& consumer = {"decode", "1"}) {
    answer_.reset();
    table_->Redeem(secret, consumer, seen, kSimSecond,
                   [this](const absl::StatusOr<TicketNews>& news) { answer_ = news; });
  }
  void Wait(double seconds) {
    events_.RunUntil(events_.now() + static_cast<std::int64_t>(seconds * 1e9), [] {});
  }
  bool Held() const { return !holds_.open.empty(); }

  SimEvents events_;
  SimLoop loop_;
  FakeHolds holds_;
  std::uint8_t secrets_ = 0;
  std::unique_ptr<TicketTable> table_;
  std::optional<absl::StatusOr<TicketNews>> answer_;
};

TEST_F(TicketTableTest, WhatIsNotWithinALimitIsNamed) {
  Open({.tickets_max = 2, .blocks_max = 3, .ttl_nanos_max = kSimSecond * 20});
  const auto error = [this](const TicketTable::Request& request) {
    return std::string(table_->Create(request).status().message());
  };
  EXPECT_EQ(error(RequestOf({})), "a ticket of 0 blocks: want 1 to 4096");
  EXPECT_EQ(error(RequestOf({BlockNamed("a"), BlockNamed("a")})),
            "block 61 of layer group 0 is in the ticket twice");
  EXPECT_EQ(error(RequestOf({BlockNamed("a", 0)})),
            "block 61 of 0 layers in a ticket: want a key and 1 to 512 layers");
  TicketTable::Request request = RequestOf({BlockNamed("a"), BlockNamed("b")});
  request.ttl_nanos = 21 * kSimSecond;
  EXPECT_EQ(error(request), "ttl of a ticket 21000 ms: want 1 to 20000");
  request.ttl_nanos = 0;
  EXPECT_EQ(error(request), "ttl of a ticket 0 ms: want 1 to 20000");
  request.ttl_nanos = kSimSecond;
  request.life_nanos = -5;
  EXPECT_EQ(error(request), "life of a ticket 0 ms: want 1 to 3600000");
  holds_.refuse = absl::ResourceExhaustedError("enough is held");
  EXPECT_EQ(error(RequestOf({BlockNamed("a")})), "enough is held");
  holds_.refuse = absl::OkStatus();
  EXPECT_EQ(table_->size(), 0u);

  Create();
  EXPECT_EQ(error(RequestOf({BlockNamed("c"), BlockNamed("d")})),
            "tickets hold 2 blocks: 2 more would be above 3");
  EXPECT_TRUE(table_->Create(RequestOf({BlockNamed("c")})).ok());
  EXPECT_EQ(error(RequestOf({BlockNamed("d")})), "there are 2 tickets: at most 2");
  EXPECT_EQ(holds_.open.size(), 2u);
}

TEST_F(TicketTableTest, ProgressMovesTheDeadlineUpToTheMaximum) {
  const TicketSecret secret = Create();
  Wait(9);
  Redeem(secret, 0);
  for (int i = 0; i < 3; ++i) {
    Wait(9);
    holds_.events->Finished(1, 0, LayerSet::First(static_cast<std::size_t>(i) + 1));
  }
  Wait(9.9);
  EXPECT_TRUE(Held());
  ASSERT_TRUE(table_->Read(secret, {"decode", "1"}, 0, Layers({0, 1})).ok());
  Wait(9.9);
  EXPECT_TRUE(Held()) << "pages that are pulled are progress";
  holds_.events->Sealed(1, 0, 1);
  EXPECT_TRUE(Held());
  Wait(60 - 9 - 27 - 9.9 - 9.9 - 0.1);
  EXPECT_TRUE(Held());
  Wait(0.2);
  EXPECT_FALSE(Held()) << "the maximum";
  EXPECT_EQ(table_->counts().expired, 1u);
  Redeem(secret, 0);
  EXPECT_TRUE(absl::IsNotFound(answer_->status()));
}

TEST_F(TicketTableTest, QuestionsAndPagesPulledAgainAreNoProgress) {
  const TicketSecret secret = Create();
  Redeem(secret, 0);
  holds_.events->Finished(1, 0, Layers({0}));
  ASSERT_TRUE(table_->Read(secret, {"decode", "1"}, 0, Layers({0})).ok());
  for (int i = 0; i < 9; ++i) {
    Wait(1);
    Redeem(secret, 2);
    EXPECT_TRUE(table_->Read(secret, {"decode", "1"}, 0, Layers({0})).ok());
    holds_.events->Finished(1, 0, Layers({0}));
  }
  EXPECT_TRUE(Held());
  Wait(1.1);
  EXPECT_FALSE(Held());
}

TEST_F(TicketTableTest, AHoldEndsOnceHoweverItEnds) {
  const TicketSecret acknowledged = Create();
  Redeem(acknowledged, 0);
  EXPECT_TRUE(table_->Acknowledge(acknowledged, {"decode", "1"}).ok());
  EXPECT_FALSE(Held());
  EXPECT_TRUE(absl::IsNotFound(table_->Acknowledge(acknowledged, {"decode", "1"})));
  EXPECT_TRUE(absl::IsNotFound(table_->Revoke(acknowledged)));
  Redeem(acknowledged, 1);
  EXPECT_TRUE(absl::IsNotFound(answer_->status()));

  const TicketSecret revoked = Create();
  Redeem(revoked, 0);
  Redeem(revoked, 1);
  EXPECT_FALSE(answer_.has_value());
  EXPECT_TRUE(table_->Revoke(revoked).ok());
  ASSERT_TRUE(answer_.has_value());
  EXPECT_TRUE(absl::IsAborted(answer_->status()));
  EXPECT_TRUE(absl::IsNotFound(table_->Acknowledge(revoked, {"decode", "1"})));

  Create("", "session 1");
  Create("", "session 2");
  Create("", "session 1");
  Create();
  table_->RevokeAll("session 1");
  table_->RevokeAll("");
  EXPECT_EQ(holds_.open, (std::set<TicketHolds::HoldId>{4, 6}));
  Wait(20);
  EXPECT_FALSE(Held());
  EXPECT_EQ(table_->blocks(), 0u);
  Create();
  table_ = nullptr;
  EXPECT_FALSE(Held());
}

TEST_F(TicketTableTest, AnswersAreTheSameForOneConsumerAndNoneForAnother) {
  const TicketSecret secret = Create("decode");
  Redeem(secret, 0, {"other", "1"});
  EXPECT_TRUE(absl::IsPermissionDenied(answer_->status()));
  EXPECT_TRUE(
      absl::IsFailedPrecondition(table_->Read(secret, {"decode", "1"}, 0, LayerSet()).status()))
      << "nobody has redeemed it yet";
  for (int i = 0; i < 2; ++i) {
    Redeem(secret, 0);
    ASSERT_TRUE(answer_->ok());
    EXPECT_EQ((*answer_)->version, 1u);
    EXPECT_EQ((*answer_)->blocks, (std::vector<TicketBlock>{BlockNamed("a"), BlockNamed("b")}));
    EXPECT_TRUE((*answer_)->changed.empty());
  }
  Redeem(secret, 0, {"decode", "2"});
  EXPECT_TRUE(absl::IsFailedPrecondition(answer_->status()));
  EXPECT_TRUE(absl::IsFailedPrecondition(table_->Acknowledge(secret, {"decode", "2"})));
  holds_.events->Finished(1, 1, Layers({2}));
  holds_.events->Failed(1, 0);
  Redeem(secret, 1);
  ASSERT_TRUE(answer_->ok());
  const std::vector<TicketBlockNews> both = {{0, State::kFailed, LayerSet(), 0},
                                             {1, State::kOpen, Layers({2}), 0}};
  EXPECT_EQ((*answer_)->changed, both);
  Redeem(secret, 2);
  EXPECT_EQ((*answer_)->changed, (std::vector<TicketBlockNews>{both[0]}));
  Redeem(secret, 4);
  EXPECT_TRUE(absl::IsInvalidArgument(answer_->status()));
}

TEST_F(TicketTableTest, WhoeverWaitsHearsOfTheNextChangeOrOfNothingInTime) {
  const TicketSecret secret = Create();
  Redeem(secret, 0);
  Redeem(secret, 1);
  EXPECT_FALSE(answer_.has_value());
  holds_.events->Finished(1, 0, Layers({1}));
  ASSERT_TRUE(answer_.has_value());
  EXPECT_EQ((*answer_)->version, 2u);
  Redeem(secret, 2);
  Wait(0.9);
  EXPECT_FALSE(answer_.has_value());
  Wait(0.2);
  ASSERT_TRUE(answer_.has_value());
  EXPECT_TRUE((*answer_)->changed.empty());

  // A second question answers the first.
  int first = 0;
  table_->Redeem(
      secret, {"decode", "1"}, 2, kSimSecond,
      [&first](const absl::StatusOr<TicketNews>& news) { first += news.ok() ? 1 : 100; });
  Redeem(secret, 2);
  EXPECT_EQ(first, 1);
  EXPECT_FALSE(answer_.has_value());
  EXPECT_EQ(table_->waiting(), 1u);
  EXPECT_TRUE(table_->Revoke(secret).ok());

  const TicketSecret left = Create();
  Redeem(left, 0);
  answer_.reset();
  const TicketTable::WaitId wait =
      table_->Redeem(left, {"decode", "1"}, 1, kSimSecond,
                     [this](const absl::StatusOr<TicketNews>& news) { answer_ = news; });
  table_->CancelWait(wait);
  table_->CancelWait(wait);
  holds_.events->Finished(2, 0, Layers({0}));
  Wait(2);
  EXPECT_FALSE(answer_.has_value());
}

TEST_F(TicketTableTest, OnlyFinishedPagesAreRead) {
  const TicketSecret secret = Create();
  Redeem(secret, 0);
  holds_.events->Finished(1, 0, Layers({0, 2}));
  const TicketTable::Consumer consumer = {"decode", "1"};
  EXPECT_EQ(*table_->Read(secret, consumer, 0, Layers({0, 2})), 1u);
  EXPECT_EQ(table_->Read(secret, consumer, 0, Layers({1})).status().message(),
            "layer 1 of block 0 of a ticket: 2 of 3 are finished");
  EXPECT_EQ(table_->Read(secret, consumer, 2, Layers({0})).status().message(),
            "block 2 of a ticket of 2");
  EXPECT_TRUE(absl::IsNotFound(table_->Read({}, consumer, 0, Layers({0})).status()));
  holds_.events->Failed(1, 0);
  EXPECT_TRUE(absl::IsInvalidArgument(table_->Read(secret, consumer, 0, Layers({0})).status()));
}

// --- The consumer ---

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

class TicketRedeemTest : public testing::Test {
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
}  // namespace kvmill
