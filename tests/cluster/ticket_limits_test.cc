// What tickets of real daemons are refused for, hundreds of them at a time, and those that are
// redeemed where they were made.
#include <signal.h>

#include <chrono>
#include <deque>
#include <thread>

#include "tests/cluster/ticket_daemons.h"

namespace kvmill::testing {
namespace {

using ::testing::HasSubstr;
using TicketLimitsTest = TicketDaemonsTest;

TEST_F(TicketLimitsTest, WhereItWasMadeATicketIsRedeemedAsAnywhere) {
  StartAll({"a", "b"}, {"--ucx", "127.0.0.1"});
  Sequence values = Values(8);
  TicketOptions options = kPatient;
  options.consumer = "a";
  const std::string ticket = Create("a", "s", options);
  Decode decode(ClientOf("a"), ns_["a"], ticket);
  Decode same(ClientOf("a"), ns_["a"], ticket);
  Prefill prefill(ClientOf("a"), ns_["a"], "s", values, 0, 2);
  for (std::uint32_t layer = 0; layer + 1 < kLayers; ++layer) {
    prefill.Compute(layer + 1);
    Until([&] { return decode.HasLayer(layer) && same.HasLayer(layer); });
    EXPECT_FALSE(decode.HasLayer(layer + 1));
  }
  prefill.Compute(kLayers);
  EXPECT_TRUE(prefill.Wait().ok());
  for (Decode* each : {&decode, &same}) {
    const RedeemResult redeemed = each->Wait();
    ASSERT_TRUE(redeemed.status.ok()) << redeemed.status;
    EXPECT_EQ(redeemed.missed, 0u);
    ASSERT_EQ(redeemed.blocks.size(), kBlocks + 1);
    EXPECT_EQ(redeemed.blocks[0].fate, TicketFate::kSealed);
  }
  EXPECT_EQ(PagesOn("a", "s").size(), (kBlocks + 1) * kLayers);
  NothingIsHeldOn("a");
  Ended("a", "acknowledged", 1);
}

TEST_F(TicketLimitsTest, WhatMakesNoSenseIsRefusedByNameAndLimit) {
  StartAll({"a", "b"});
  const auto error = [&](const std::vector<PromisedBlock>& blocks, const TicketOptions& options) {
    const auto ticket = ClientOf("a").CreateTicket(ns_["a"], blocks, options);
    EXPECT_TRUE(absl::IsInvalidArgument(ticket.status())) << ticket.status();
    return std::string(ticket.status().message());
  };
  EXPECT_EQ(error(Promised("s"), {.consumer = "c"}),
            "consumer \"c\" of a ticket is no node of the cluster: there are a, b");
  EXPECT_EQ(error(Promised("s"), {.ttl = absl::Minutes(11)}),
            "ttl 11m of a ticket: want 1 ms to 10m");
  EXPECT_EQ(error(Promised("s"), {.life = absl::Hours(2)}), "life 2h of a ticket: want 1 ms to 1h");
  EXPECT_EQ(error(Promised("s"), {.ttl = absl::ZeroDuration()}),
            "ttl 0 of a ticket: want 1 ms to 10m");
  EXPECT_EQ(error({}, {}), "a ticket of 0 blocks: want 1 to 4096");
  auto blocks = Promised("s");
  blocks.push_back(blocks[0]);
  EXPECT_THAT(error(blocks, {}), HasSubstr("is in the ticket twice"));
  for (const std::uint32_t i : {std::uint32_t{1}, kBlocks}) {  // The second one is a tail.
    blocks = Promised("s");
    blocks[i].parent = blocks[i].key;
    EXPECT_EQ(error(blocks, {}), absl::StrCat("block ", blocks[i].key.ToHex(),
                                              " of a ticket is named as its own parent"));
  }
  NothingIsHeldOn("a");
}

// While etcd does not answer nobody knows who is a member.
TEST_F(TicketLimitsTest, AConsumerThatMayBeANodeByNowIsNotRefused) {
  StartNode("a", kLease);
  Until([&] { return MembersOf("a") == "a"; });
  Open("a");
  TicketOptions options = kPatient;
  options.consumer = "c";
  EXPECT_FALSE(ClientOf("a").CreateTicket(ns_["a"], Promised("s"), options).ok());
  etcd_.Kill();
  Until([&] { return StatusOf("a").stale; });
  Create("a", "s", options);
}

// Whoever does not wait for a ticket has none. When the answer is on its way as the caller gives
// up, the daemon cannot know: that happens on a busy machine, and not five times.
TEST_F(TicketLimitsTest, ATicketWhoseCallerGaveUpIsRevoked) {
  StartAll({"a", "b"});
  auto engine = Connect("unix:" + (directory_ / "a/kvmill.sock"));
  const auto first = engine->CreateTicket(ns_["a"], Promised("first"), kPatient);
  ASSERT_TRUE(first.ok()) << first.status();
  bool only_first = false;
  for (int tries = 0; tries < 5 && !only_first; ++tries) {
    nodes_["a"].process->Signal(SIGSTOP);
    const auto late = engine->CreateTicket(ns_["a"], Promised(absl::StrCat("late", tries)),
                                           kPatient, {.timeout = absl::Milliseconds(300)});
    EXPECT_TRUE(absl::IsDeadlineExceeded(late.status())) << late.status();
    nodes_["a"].process->Signal(SIGCONT);
    const auto next = engine->CreateTicket(ns_["a"], Promised("next"), kPatient, kLongCall);
    ASSERT_TRUE(next.ok()) << next.status();
    EXPECT_TRUE(engine->RevokeTicket(*next).ok());
    for (int looks = 0; looks < 250 && !only_first; ++looks) {
      const std::string metrics = Metrics("a");  // As they were since the next one was revoked.
      only_first = absl::StrContains(metrics, "kvmill_tickets{side=\"producer\"} 1\n") &&
                   !absl::StrContains(metrics, "kvmill_tickets_ended_total{end=\"revoked\"} 0\n");
      std::this_thread::sleep_for(Millis(20));
    }
    // What is left of this try would be counted in the next one.
    if (!only_first) {
      engine = Connect("unix:" + (directory_ / "a/kvmill.sock"));
      ASSERT_TRUE(engine->CreateTicket(ns_["a"], Promised("first"), kPatient).ok());
      Until(
          [&] { return absl::StrContains(Metrics("a"), "kvmill_tickets{side=\"producer\"} 1\n"); });
    }
  }
  EXPECT_TRUE(only_first) << "of the other one nobody knows, and it is held";
  engine = nullptr;
  NothingIsHeldOn("a");
}

// A producer answers what it has, for as long as the ticket lasts; what was sealed by then stays.
TEST_F(TicketLimitsTest, AFailedRedeemSaysWhatBecameOfEachBlock) {
  StartAll({"a", "b"}, {"--ucx", "127.0.0.1"});
  const auto redeem_after_first = [&](const std::string& name,
                                      const std::function<void(const std::string&)>& end) {
    const std::string ticket = Create("a", name);
    Decode decode(ClientOf("b"), ns_["b"], ticket);
    EXPECT_TRUE(PutOne("a", name, 0));
    Until([&] {
      const auto blocks = decode.blocks();
      return !blocks.empty() && blocks[0].fate == TicketFate::kSealed;
    });
    end(ticket);
    RedeemResult redeemed = decode.Wait();
    EXPECT_EQ(redeemed.missed, kBlocks);
    EXPECT_EQ(redeemed.blocks.size(), kBlocks + 1);
    for (std::uint32_t b = 0; b < redeemed.blocks.size(); ++b) {
      const RedeemedBlock& block = redeemed.blocks[b];
      EXPECT_EQ(block.fate, b == 0 ? TicketFate::kSealed : TicketFate::kMissed) << b;
      EXPECT_EQ(block.layers_here, b == 0 ? kLayers : 0) << b;
      EXPECT_EQ(block.miss == TicketMiss::kNone, b == 0) << b;
    }
    return redeemed;
  };
  const RedeemResult revoked = redeem_after_first("revoked", [&](const std::string& ticket) {
    EXPECT_TRUE(ClientOf("a").RevokeTicket(ticket).ok());
  });
  EXPECT_TRUE(absl::IsAborted(revoked.status)) << revoked.status;
  EXPECT_EQ(revoked.blocks.back().miss, TicketMiss::kRevoked);
  const RedeemResult cancelled = redeem_after_first(
      "cancelled", [&](const std::string& ticket) { ClientOf("b").CancelRedeem(ticket); });
  EXPECT_TRUE(absl::IsCancelled(cancelled.status)) << cancelled.status;
  EXPECT_EQ(cancelled.blocks.back().miss, TicketMiss::kCallEnded);
  const RedeemResult left =
      redeem_after_first("left", [&](const std::string&) { nodes_["a"].process->Signal(SIGTERM); });
  EXPECT_FALSE(left.status.ok());
  EXPECT_THAT(left.blocks.back().miss,
              ::testing::AnyOf(TicketMiss::kProducerGone, TicketMiss::kRevoked))
      << left.status;
  EXPECT_EQ(nodes_["a"].process->WaitExit().code, 0);
}

// Each has a question at the producer and a call of the engine, all along; nothing else waits for
// them.
TEST_F(TicketLimitsTest, FiveHundredTicketsAreOpenAtATime) {
  constexpr std::uint32_t kTickets = 500;
  StartAll({"a", "b"}, {"--ucx", "127.0.0.1"});
  std::deque<Decode> decodes;
  for (std::uint32_t t = 0; t < kTickets; ++t) {
    const PromisedBlock block = Promised(absl::StrCat("s", t))[1];
    const auto ticket = ClientOf("a").CreateTicket(ns_["a"], {&block, 1}, kPatient);
    ASSERT_TRUE(ticket.ok()) << ticket.status();
    decodes.emplace_back(ClientOf("b"), ns_["b"], *ticket);
  }
  const Millis long_enough{120'000};
  Until(long_enough, [&] {
    return std::all_of(decodes.begin(), decodes.end(),
                       [](const Decode& decode) { return !decode.blocks().empty(); });
  });
  Until([&] {
    return absl::StrContains(Metrics("b"),
                             absl::StrCat("kvmill_tickets{side=\"consumer\"} ", kTickets, "\n"));
  });
  EXPECT_TRUE(ClientOf("b").Lookup(ns_["b"], KeysOf("other", 3)).ok());
  for (std::uint32_t t = 0; t < kTickets; ++t) {
    ASSERT_TRUE(PutOne("a", absl::StrCat("s", t), 1));
  }
  for (Decode& decode : decodes) {
    const RedeemResult redeemed = decode.Wait();
    ASSERT_TRUE(redeemed.status.ok()) << redeemed.status;
    EXPECT_EQ(redeemed.missed, 0u);
  }
  NothingIsHeldOn("a");
  NothingIsHeldOn("b");
  Ended("a", "acknowledged", kTickets);
}

}  // namespace
}  // namespace kvmill::testing
