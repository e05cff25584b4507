// A consumer of tickets with a producer and a store that do what a test says.
#ifndef KVMILL_TESTS_CLUSTER_TICKET_REDEEM_FIXTURE_H_
#define KVMILL_TESTS_CLUSTER_TICKET_REDEEM_FIXTURE_H_

#include <gtest/gtest.h>

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "service/cluster/ticket_redeem.h"
#include "tests/cluster/sim_loop.h"
#include "tests/cluster/ticket_fixture.h"

namespace kvmill::testing {

using Fate = TicketRedeem::Fate;
using Miss = TicketRedeem::Miss;

// A producer that answers what the test says when the test says so, and a store that takes notes.
class FakeWorld : public TicketPeers, public TicketCopies {
 public:
  explicit FakeWorld(Loop& loop) : loop_(loop) {}

  TicketPeers::CallId Redeem(const Member&, const TicketName&, std::uint64_t since, std::int64_t,
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
  TicketPeers::CallId Pull(const Member&, const TicketName&, std::vector<Piece> pieces,
                           std::int64_t, TicketPeers::Done<std::vector<Landed>> done) override {
    const TicketPeers::CallId id = ++last;
    pulls[id] = {std::move(pieces), std::move(done)};
    return id;
  }
  TicketPeers::CallId Acknowledge(const Member&, const TicketName&, std::int64_t,
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
  explicit TicketRedeemTest(const TicketRedeem::Options& options = {.tickets_max = 2})
      : events_(1, false),
        loop_(events_, 0, 0),
        world_(loop_),
        health_(loop_.clock()),
        redeem_(std::make_unique<TicketRedeem>(loop_, world_, world_, health_, 1, options)) {
    health_.Admit(MemberNamed("prefill"));  // Who was never asked anything is not known.
  }

  struct Caller {
    int updates = 0, dones = 0;
    std::vector<std::uint32_t> changed;  // In the last update.
    LayerSet here;                       // Of the first block, in the last update.
    TicketRedeem::Outcome outcome;
  };
  TicketRedeem::CallerId Start(Caller* caller, double seconds = 60, std::uint8_t secret = 1,
                               std::uint8_t fingerprint = 0) {
    TicketRedeem::Request request;
    request.name.secret[0] = secret;
    request.producer = MemberNamed("prefill");
    request.name.fingerprint[0] = std::byte{fingerprint};
    request.here = here_;
    request.tenant = tenant_;
    request.deadline_nanos =
        loop_.clock().MonotonicNanos() + static_cast<std::int64_t>(seconds * 1e9);
    return redeem_->Start(
        request,
        [caller](const std::vector<TicketRedeem::Block>& blocks,
                 const std::vector<std::uint32_t>& changed) {
          ++caller->updates;
          caller->changed = changed;
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
  bool here_ = false;   // Tickets are redeemed where they were made.
  std::string tenant_;  // Of whoever redeems; empty: the daemons' own.
};

}  // namespace kvmill::testing

#endif  // KVMILL_TESTS_CLUSTER_TICKET_REDEEM_FIXTURE_H_
