// What a producer of tickets promises, and when it lets go. ticket_sim plays both sides against
// each other.
#include "service/cluster/ticket_table.h"

#include <gtest/gtest.h>

#include <optional>

#include "absl/strings/str_cat.h"
#include "tests/cluster/sim_loop.h"
#include "tests/cluster/ticket_fixture.h"

namespace kvmill::testing {
namespace {

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

class TicketTableTest : public ::testing::Test {
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
  TicketName Create(const std::string& consumer = "", const std::string& owner = "") {
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
  void Redeem(const TicketName& ticket, std::uint64_t seen,
              const TicketTable::Consumer& consumer = {"decode", "1"}) {
    answer_.reset();
    table_->Redeem(ticket, consumer, seen, kSimSecond,
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
  EXPECT_EQ(error(request), "ttl 21s of a ticket: want 1 ms to 20s");
  request.ttl_nanos = 0;
  EXPECT_EQ(error(request), "ttl 0 of a ticket: want 1 ms to 20s");
  request.ttl_nanos = kSimSecond;
  request.life_nanos = -5;
  EXPECT_EQ(error(request), "life -5ns of a ticket: want 1 ms to 1h");
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

// Who has the secret and says another namespace.
TEST_F(TicketTableTest, OfAnotherNamespaceThereIsNoSuchTicket) {
  const TicketName ticket = Create("decode");
  TicketName forged = ticket, unknown = ticket;
  forged.fingerprint[3] = std::byte{1};
  unknown.secret[9] = 1;
  const TicketTable::Consumer consumer = {"decode", "1"};
  for (const TicketName& name : {forged, unknown}) {
    Redeem(name, 0, {"other", "1"});
    EXPECT_EQ(answer_->status(), NoSuchTicketError()) << "nor whom it is for";
    EXPECT_EQ(table_->Read(name, consumer, 0, Layers({0})).status(), NoSuchTicketError());
    EXPECT_EQ(table_->Acknowledge(name, consumer), NoSuchTicketError());
    EXPECT_EQ(table_->Revoke(name), NoSuchTicketError());
  }
  EXPECT_TRUE(Held());
  Redeem(ticket, 0);
  EXPECT_TRUE(answer_->ok()) << "it is nobody else's";
  EXPECT_EQ(table_->NamespaceOf(ticket.secret), ticket.fingerprint);
  EXPECT_EQ(table_->NamespaceOf(unknown.secret), std::nullopt);
}

TEST_F(TicketTableTest, AnotherTenantHasAQuarterOfTheLimitsAndHearsNothingOfOthers) {
  Open({.tickets_max = 8, .blocks_max = 12});
  const auto error = [this](TicketTable::Request request, const std::string& tenant) {
    request.tenant = tenant;
    return std::string(table_->Create(std::move(request)).status().message());
  };
  const auto one = RequestOf({BlockNamed("a")});
  const auto two = RequestOf({BlockNamed("a"), BlockNamed("b")});
  EXPECT_EQ(error(two, "x"), "");
  EXPECT_EQ(error(two, "x"), "tickets of tenant \"x\" hold 2 blocks: 2 more would be above 3");
  EXPECT_EQ(error(one, "x"), "");
  EXPECT_EQ(error(one, "x"), "tenant \"x\" has 2 tickets: at most 2");
  EXPECT_EQ(error(one, "y"), "");
  for (int i = 0; i < 3; ++i) EXPECT_EQ(error(two, ""), "") << "the rest is the daemons' own";
  EXPECT_EQ(error(RequestOf({BlockNamed("a"), BlockNamed("b"), BlockNamed("c")}), "z"),
            "tickets hold many blocks: 3 more would be above 12");
  EXPECT_EQ(error(two, ""), "");
  EXPECT_EQ(error(one, ""), "tickets hold 12 blocks: 1 more would be above 12");
}

TEST_F(TicketTableTest, WhatEndedCountsForNobody) {
  Open({.tickets_max = 4, .blocks_max = 100});
  for (int i = 0; i < 3; ++i) {
    TicketTable::Request request = RequestOf({BlockNamed("a")});
    request.tenant = std::string("x");
    const auto ticket = table_->Create(request);
    ASSERT_TRUE(ticket.ok()) << ticket.status();
    EXPECT_TRUE(absl::IsResourceExhausted(table_->Create(request).status()));
    EXPECT_TRUE(table_->Revoke(*ticket).ok());
  }
}

TEST_F(TicketTableTest, ProgressMovesTheDeadlineUpToTheMaximum) {
  const TicketName ticket = Create();
  Wait(9);
  Redeem(ticket, 0);
  for (int i = 0; i < 3; ++i) {
    Wait(9);
    holds_.events->Finished(1, 0, LayerSet::First(static_cast<std::size_t>(i) + 1));
  }
  Wait(9.9);
  EXPECT_TRUE(Held());
  ASSERT_TRUE(table_->Read(ticket, {"decode", "1"}, 0, Layers({0, 1})).ok());
  Wait(9.9);
  EXPECT_TRUE(Held()) << "pages that are pulled are progress";
  holds_.events->Sealed(1, 0, 1);
  EXPECT_TRUE(Held());
  Wait(60 - 9 - 27 - 9.9 - 9.9 - 0.1);
  EXPECT_TRUE(Held());
  Wait(0.2);
  EXPECT_FALSE(Held()) << "the maximum";
  EXPECT_EQ(table_->counts().expired, 1u);
  Redeem(ticket, 0);
  EXPECT_TRUE(absl::IsNotFound(answer_->status()));
}

TEST_F(TicketTableTest, QuestionsAndPagesPulledAgainAreNoProgress) {
  const TicketName ticket = Create();
  Redeem(ticket, 0);
  holds_.events->Finished(1, 0, Layers({0}));
  ASSERT_TRUE(table_->Read(ticket, {"decode", "1"}, 0, Layers({0})).ok());
  for (int i = 0; i < 9; ++i) {
    Wait(1);
    Redeem(ticket, 2);
    EXPECT_TRUE(table_->Read(ticket, {"decode", "1"}, 0, Layers({0})).ok());
    holds_.events->Finished(1, 0, Layers({0}));
  }
  EXPECT_TRUE(Held());
  Wait(1.1);
  EXPECT_FALSE(Held());
}

TEST_F(TicketTableTest, AHoldEndsOnceHoweverItEnds) {
  const TicketName acknowledged = Create();
  Redeem(acknowledged, 0);
  EXPECT_TRUE(table_->Acknowledge(acknowledged, {"decode", "1"}).ok());
  EXPECT_FALSE(Held());
  EXPECT_TRUE(absl::IsNotFound(table_->Acknowledge(acknowledged, {"decode", "1"})));
  EXPECT_TRUE(absl::IsNotFound(table_->Revoke(acknowledged)));
  Redeem(acknowledged, 1);
  EXPECT_TRUE(absl::IsNotFound(answer_->status()));

  const TicketName revoked = Create();
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
  const TicketName ticket = Create("decode");
  Redeem(ticket, 0, {"other", "1"});
  EXPECT_TRUE(absl::IsPermissionDenied(answer_->status()));
  EXPECT_TRUE(
      absl::IsFailedPrecondition(table_->Read(ticket, {"decode", "1"}, 0, LayerSet()).status()))
      << "nobody has redeemed it yet";
  for (int i = 0; i < 2; ++i) {
    Redeem(ticket, 0);
    ASSERT_TRUE(answer_->ok());
    EXPECT_EQ((*answer_)->version, 1u);
    EXPECT_EQ((*answer_)->blocks, (std::vector<TicketBlock>{BlockNamed("a"), BlockNamed("b")}));
    EXPECT_TRUE((*answer_)->changed.empty());
  }
  Redeem(ticket, 0, {"decode", "2"});
  EXPECT_TRUE(absl::IsFailedPrecondition(answer_->status()));
  EXPECT_TRUE(absl::IsFailedPrecondition(table_->Acknowledge(ticket, {"decode", "2"})));
  holds_.events->Finished(1, 1, Layers({2}));
  holds_.events->Failed(1, 0);
  Redeem(ticket, 1);
  ASSERT_TRUE(answer_->ok());
  const std::vector<TicketBlockNews> both = {{0, State::kFailed, LayerSet(), 0},
                                             {1, State::kOpen, Layers({2}), 0}};
  EXPECT_EQ((*answer_)->changed, both);
  Redeem(ticket, 2);
  EXPECT_EQ((*answer_)->changed, (std::vector<TicketBlockNews>{both[0]}));
  Redeem(ticket, 4);
  EXPECT_TRUE(absl::IsInvalidArgument(answer_->status()));
}

TEST_F(TicketTableTest, WhoeverWaitsHearsOfTheNextChangeOrOfNothingInTime) {
  const TicketName ticket = Create();
  Redeem(ticket, 0);
  Redeem(ticket, 1);
  EXPECT_FALSE(answer_.has_value());
  holds_.events->Finished(1, 0, Layers({1}));
  ASSERT_TRUE(answer_.has_value());
  EXPECT_EQ((*answer_)->version, 2u);
  Redeem(ticket, 2);
  Wait(0.9);
  EXPECT_FALSE(answer_.has_value());
  Wait(0.2);
  ASSERT_TRUE(answer_.has_value());
  EXPECT_TRUE((*answer_)->changed.empty());

  // A second question answers the first.
  int first = 0;
  table_->Redeem(
      ticket, {"decode", "1"}, 2, kSimSecond,
      [&first](const absl::StatusOr<TicketNews>& news) { first += news.ok() ? 1 : 100; });
  Redeem(ticket, 2);
  EXPECT_EQ(first, 1);
  EXPECT_FALSE(answer_.has_value());
  EXPECT_EQ(table_->waiting(), 1u);
  EXPECT_TRUE(table_->Revoke(ticket).ok());

  const TicketName left = Create();
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
  const TicketName ticket = Create();
  Redeem(ticket, 0);
  holds_.events->Finished(1, 0, Layers({0, 2}));
  const TicketTable::Consumer consumer = {"decode", "1"};
  EXPECT_EQ(*table_->Read(ticket, consumer, 0, Layers({0, 2})), 1u);
  EXPECT_EQ(table_->Read(ticket, consumer, 0, Layers({1})).status().message(),
            "layer 1 of block 0 of a ticket: 2 of 3 are finished");
  EXPECT_EQ(table_->Read(ticket, consumer, 2, Layers({0})).status().message(),
            "block 2 of a ticket of 2");
  EXPECT_TRUE(absl::IsNotFound(table_->Read({}, consumer, 0, Layers({0})).status()));
  holds_.events->Failed(1, 0);
  EXPECT_TRUE(absl::IsInvalidArgument(table_->Read(ticket, consumer, 0, Layers({0})).status()));
}

}  // namespace
}  // namespace kvmill::testing
