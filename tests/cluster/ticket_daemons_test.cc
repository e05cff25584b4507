// Tickets between real daemons: a prompt's blocks are stored layer by layer on one node and come to
// another meanwhile, byte for byte; and whoever is killed, stopped, revokes or loses interest in
// the middle of it leaves a miss, and nothing that is held.
#include "tests/cluster/ticket_daemons.h"

#include <signal.h>

namespace kvmill::testing {
namespace {

TEST_F(TicketDaemonsTest, LayersComeOverUcxWhileTheyAreStored) {
  StartAll({"a", "b"}, {"--ucx", "127.0.0.1"});
  FlowsLayerByLayer("s");
  Until([&] { return !absl::StrContains(Metrics("a"), "kvmill_data_connections 0\n"); });
  // What of a prompt is there already is part of its ticket.
  const auto there = ClientOf("b").RedeemTicket(ns_["b"], Create("a", "s"), nullptr, kLongCall);
  ASSERT_TRUE(there.status.ok()) << there.status;
  for (const RedeemedBlock& block : there.blocks) EXPECT_EQ(block.fate, TicketFate::kExists);
}

TEST_F(TicketDaemonsTest, LayersComeInGrpcMessagesWhereThereIsNoDataPlane) {
  StartAll({"a", "b"});
  FlowsLayerByLayer("s");
}

// Two ranks, each with half of the heads, that are not equally fast; and a decode side that has all
// heads.
TEST_F(TicketDaemonsTest, RanksOfThePrefillStoreTheirHeads) {
  StartAll({"a", "b"}, {"--ucx", "127.0.0.1"});
  Sequence values = Values(4);
  Decode decode(ClientOf("b"), ns_["b"], Create("a", "s", {.consumer = "b", .ttl = kPatient.ttl}));
  const auto other = Connect("unix:" + (directory_ / "a/kvmill.sock"));
  Prefill first(ClientOf("a"), ns_["a"], "s", values, 0, 1);
  Prefill second(*other, ns_["a"], "s", values, 1, 1);
  first.Compute(kLayers);
  second.Compute(2);
  Until([&] { return decode.HasLayer(0) && decode.HasLayer(1); });
  EXPECT_FALSE(decode.HasLayer(2));
  second.Compute(kLayers);
  const auto redeemed = decode.Wait();
  ASSERT_TRUE(redeemed.status.ok()) << redeemed.status;
  EXPECT_EQ(redeemed.missed, 0u);
  EXPECT_TRUE(first.Wait().ok());
  EXPECT_TRUE(second.Wait().ok());
  const Pages pages = PagesOn("b", "s");
  EXPECT_EQ(pages.size(), (kBlocks + 1) * kLayers);
  EXPECT_EQ(pages, PagesOn("a", "s"));
}

TEST_F(TicketDaemonsTest, WhoEndsATicketEndsItOnBothSides) {
  StartAll({"a", "b"}, {"--ucx", "127.0.0.1"});
  Sequence values = Values(5);
  const auto engine = Connect("unix:" + (directory_ / "a/kvmill.sock"));
  const auto make = [&](const std::string& name, const TicketOptions& options) {
    const auto ticket = engine->CreateTicket(ns_["a"], Promised(name), options);
    EXPECT_TRUE(ticket.ok()) << ticket.status();
    return ticket.value_or("");
  };
  {
    // The prefill gives the prompt up, after a layer of it came.
    const std::string ticket = make("revoked", kPatient);
    Decode decode(ClientOf("b"), ns_["b"], ticket);
    Prefill prefill(*engine, ns_["a"], "revoked", values, 0, 2);
    prefill.Compute(1);
    Until([&] { return decode.HasLayer(0); });
    ASSERT_TRUE(engine->RevokeTicket(ticket).ok());
    const auto redeemed = decode.Wait();
    EXPECT_TRUE(absl::IsAborted(redeemed.status)) << redeemed.status;
    NothingIsHeldOn("b");
    EXPECT_TRUE(PagesOn("b", "revoked").empty());
    prefill.Compute(kLayers);
    EXPECT_TRUE(prefill.Wait().ok()) << "the blocks are stored nevertheless";
    EXPECT_EQ(PagesOn("a", "revoked").size(), (kBlocks + 1) * kLayers);
    Ended("a", "revoked", 1);
  }
  {
    // The decode loses interest.
    const std::string ticket = make("cancelled", kPatient);
    Decode decode(ClientOf("b"), ns_["b"], ticket);
    Until([&] { return !decode.blocks().empty(); });
    ClientOf("b").CancelRedeem(ticket);
    const auto redeemed = decode.Wait();
    EXPECT_TRUE(absl::IsCancelled(redeemed.status)) << redeemed.status;
    Ended("a", "acknowledged", 1);
    NothingIsHeldOn("b");
  }
  {
    // Nothing happens.
    TicketOptions short_lived = kPatient;
    short_lived.ttl = absl::Milliseconds(200);
    Decode decode(ClientOf("b"), ns_["b"], make("idle", short_lived));
    const auto redeemed = decode.Wait();
    // When the ticket was over before the first question came, there is none.
    EXPECT_TRUE(absl::IsAborted(redeemed.status) || absl::IsNotFound(redeemed.status))
        << redeemed.status;
    Ended("a", "deadline", 1);
  }
  {
    // Whoever has another ticket's bytes, or of another node, or nonsense, has nothing.
    const auto of = [&](const std::string& node, const std::string& ticket) {
      return ClientOf(node).RedeemTicket(ns_[node], ticket, nullptr, kLongCall).status;
    };
    EXPECT_TRUE(absl::IsInvalidArgument(of("b", "nonsense")));
    const std::string ticket = make("for-a", {.consumer = "a", .ttl = kPatient.ttl});
    EXPECT_TRUE(absl::IsPermissionDenied(of("b", ticket)));
    EXPECT_TRUE(absl::IsFailedPrecondition(ClientOf("b").RevokeTicket(ticket)));
    NamespaceSpec other = Spec(SmallSpec());
    other.model = "another";
    const auto another = ClientOf("b").OpenNamespace("another", other);
    ASSERT_TRUE(another.ok()) << another.status();
    const absl::Status of_another =
        ClientOf("b").RedeemTicket(*another, ticket, nullptr, kLongCall).status;
    EXPECT_TRUE(absl::IsFailedPrecondition(of_another)) << of_another;
    EXPECT_THAT(std::string(of_another.message()),
                ::testing::HasSubstr("the ticket is of namespace \"n\" ("));
    EXPECT_THAT(std::string(of_another.message()), ::testing::HasSubstr("not of \"another\" ("));
  }
  {
    // The prefill engine dies, and its session with it.
    auto dying = Connect("unix:" + (directory_ / "a/kvmill.sock"));
    const auto ticket = dying->CreateTicket(ns_["a"], Promised("dead"), kPatient);
    ASSERT_TRUE(ticket.ok()) << ticket.status();
    Decode decode(ClientOf("b"), ns_["b"], *ticket);
    Until([&] { return !decode.blocks().empty(); });
    dying = nullptr;
    const auto redeemed = decode.Wait();
    EXPECT_TRUE(absl::IsAborted(redeemed.status)) << redeemed.status;
    Ended("a", "revoked", 2);
  }
}

// What a producer says no more is a miss; the consumer waits for it for a while, then not any more.
TEST_F(TicketDaemonsTest, AProducerThatIsKilledOrStoppedIsAMiss) {
  StartAll({"a", "b", "c"}, {"--ucx", "127.0.0.1"});
  Sequence values = Values(6);
  Decode of_stopped(ClientOf("b"), ns_["b"], Create("a", "stopped"));
  Decode of_killed(ClientOf("b"), ns_["b"], Create("c", "killed"));
  Prefill stopped(ClientOf("a"), ns_["a"], "stopped", values, 0, 2);
  Prefill killed(ClientOf("c"), ns_["c"], "killed", values, 0, 2);
  for (Prefill* prefill : {&stopped, &killed}) prefill->Compute(2);
  for (Decode* decode : {&of_stopped, &of_killed}) {
    Until([&] { return decode->HasLayer(1); });
  }
  nodes_["a"].process->Signal(SIGSTOP);
  KillNode("c");
  EXPECT_FALSE(killed.Wait().ok());
  for (Decode* decode : {&of_stopped, &of_killed}) {
    const auto redeemed = decode->Wait();
    EXPECT_TRUE(absl::IsUnavailable(redeemed.status)) << redeemed.status;
  }
  nodes_["a"].process->Signal(SIGCONT);
  // It hears that nobody wants the ticket any more.
  Ended("a", "acknowledged", 1);
  NothingIsHeldOn("b");
  EXPECT_TRUE(PagesOn("b", "stopped").empty());
  EXPECT_TRUE(PagesOn("b", "killed").empty());
  stopped.Compute(kLayers);
  // Whether its connection survived the stop or not.
  stopped.Wait().status().IgnoreError();
}

// Another process is at the producer's address, and etcd cannot say so: whoever has the ticket is
// told so at once, not when silence was waited for, and gets nothing of that process.
TEST_F(TicketDaemonsTest, AProducerThatIsRestartedAtItsAddressEndsItsTickets) {
  StartAll({"a", "b"}, {"--ucx", "127.0.0.1"});
  Sequence values = Values(8);
  const std::string ticket = Create("a", "s");
  Decode decode(ClientOf("b"), ns_["b"], ticket);
  {
    Prefill prefill(ClientOf("a"), ns_["a"], "s", values, 0, 2);
    prefill.Compute(2);
    Until([&] { return decode.HasLayer(1); });
    etcd_.Stop();
    KillNode("a");
    EXPECT_FALSE(prefill.Wait().ok());
  }
  listen_ = nodes_["a"].ready["listen"].get<std::string>();
  StartNode("a", "a", kLongLease, {"--ucx", "127.0.0.1"});
  Open("a");
  // The same names, and other bytes.
  ASSERT_TRUE(PutOne("a", "s", 0));
  const auto redeemed = decode.Wait();
  EXPECT_TRUE(absl::IsUnavailable(redeemed.status)) << redeemed.status;
  EXPECT_THAT(std::string(redeemed.status.message()),
              ::testing::HasSubstr("was restarted, or is not at its address any more"));
  EXPECT_EQ(redeemed.missed, kBlocks + 1);
  for (const RedeemedBlock& block : redeemed.blocks) {
    EXPECT_EQ(block.miss, TicketMiss::kProducerGone);
  }
  EXPECT_TRUE(PagesOn("b", "s").empty());
  NothingIsHeldOn("b");
  // As is whoever comes with it later.
  const auto begin = std::chrono::steady_clock::now();
  const auto again = ClientOf("b").RedeemTicket(ns_["b"], ticket, nullptr, kLongCall);
  EXPECT_TRUE(absl::IsUnavailable(again.status)) << again.status;
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(5));
  etcd_.Continue();
}

// What a consumer does not fetch is held until the ticket's time is over; then it is let go.
TEST_F(TicketDaemonsTest, AConsumerThatIsKilledOrStoppedHoldsNothingForLong) {
  StartAll({"a", "b", "c"}, {"--ucx", "127.0.0.1"});
  TicketOptions options = kPatient;
  const std::string patient = Create("a", "patient", options);
  options.ttl = absl::Seconds(2);
  Sequence values = Values(7);
  auto of_killed = std::make_unique<Decode>(ClientOf("b"), ns_["b"], patient);
  Until([&] { return !of_killed->blocks().empty(); });
  const std::string first = Create("a", "first", options);
  const std::string second = Create("a", "second", options);
  Decode of_first(ClientOf("b"), ns_["b"], first);
  Decode of_second(ClientOf("c"), ns_["c"], second);
  nodes_["c"].process->Signal(SIGSTOP);
  KillNode("b");
  for (Decode* decode : {of_killed.get(), &of_first}) EXPECT_FALSE(decode->Wait().status.ok());
  Ended("a", "deadline", 2);
  nodes_["c"].process->Signal(SIGCONT);
  EXPECT_FALSE(of_second.Wait().status.ok());
  // It is another process that comes back.
  StartNode("b", "b", kLongLease);
  Until([&] { return MembersOf("b") == "a b c"; });
  Open("b");
  const auto again = ClientOf("b").RedeemTicket(ns_["b"], patient, nullptr, kLongCall);
  EXPECT_TRUE(absl::IsFailedPrecondition(again.status)) << again.status;
  ASSERT_TRUE(ClientOf("a").RevokeTicket(patient).ok());
  NothingIsHeldOn("a");
  NothingIsHeldOn("c");
}

// Tickets end with the daemon, on whichever side it is.
TEST_F(TicketDaemonsTest, ADaemonThatDrainsEndsItsTickets) {
  StartAll({"a", "b"}, {"--ucx", "127.0.0.1"});
  Decode decode(ClientOf("b"), ns_["b"], Create("a", "s"));
  Until([&] { return !decode.blocks().empty(); });
  nodes_["a"].process->Signal(SIGTERM);
  EXPECT_FALSE(decode.Wait().status.ok());
  EXPECT_EQ(nodes_["a"].process->WaitExit().code, 0);
  StartNode("a", "a", kLongLease);
  Until([&] { return MembersOf("a") == "a b"; });
  // And not the process that has ended.
  Until([&] {
    const ClusterStatus status = StatusOf("b");
    return std::any_of(status.members.begin(), status.members.end(), [&](const auto& member) {
      return member.incarnation == nodes_["a"].ready["boot_id"].get<std::string>();
    });
  });
  Open("a");
  Decode another(ClientOf("b"), ns_["b"], Create("a", "s"));
  Until([&] { return !another.blocks().empty(); });
  nodes_["b"].process->Signal(SIGTERM);
  EXPECT_FALSE(another.Wait().status.ok());
  EXPECT_EQ(nodes_["b"].process->WaitExit().code, 0);
  NothingIsHeldOn("a");
}

}  // namespace
}  // namespace kvmill::testing
