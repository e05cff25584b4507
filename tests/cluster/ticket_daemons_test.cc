// Tickets between real daemons: a prompt's blocks are stored layer by layer on one node and come to
// another meanwhile, byte for byte; and whoever is killed, stopped, revokes or loses interest in
// the middle of it leaves a miss, and nothing that is held.
#include <gmock/gmock.h>
#include <signal.h>

#include <algorithm>
#include <future>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "storage/core/mutex.h"
#include "tests/cluster/cluster_fixture.h"
#include "tests/integration/engine_pages.h"

namespace kvmill::testing {
namespace {

using ::testing::HasSubstr;
constexpr std::uint32_t kLayers = 4;
constexpr std::uint32_t kBlocks = 6;
constexpr std::uint32_t kTailTokens = 23;
// Nothing waits for its end.
constexpr TicketOptions kPatient{.ttl = absl::Minutes(10), .life = absl::Hours(1)};
constexpr CallOptions kLongCall{.timeout = absl::Minutes(5)};

// The first block of a sequence is kept in 16 bits, as are tails.
NamespaceSpec Spec(NamespaceSpec spec) {
  spec.sink_blocks = 1;
  spec.groups[0].layers = {0, 1, 2, 3};
  return spec;
}

// A rank of a prefill engine that stores a prompt's K and V from its own memory as it computes
// them.
class Prefill {
 public:
  Prefill(Client& client, const ClientNamespace& ns, const std::string& name, Sequence& values,
          std::uint32_t head_begin, std::uint32_t head_count)
      : client_(client),
        values_(values),
        pages_(ns.spec, 64, false, head_begin, head_count, nullptr),
        list_(ns.spec, name, values.token_count(), Shuffled(64, 5)) {
    const auto registration = client.RegisterMemory(ns, pages_.geometry);
    EXPECT_TRUE(registration.ok()) << registration.status();
    if (!registration.ok()) return;
    client.StorePagesAsync(
        ns, *registration, list_.blocks, {.request = 7, .ready_layers = 0}, kLongCall,
        [this](absl::StatusOr<StoreResult> result) { stored_.set_value(std::move(result)); });
  }
  // Computes layers below `layers`.
  void Compute(std::uint32_t layers) {
    pages_.Fill(values_, list_.pages, ready_, layers);
    ready_ = layers;
    client_.ReadyPages(7, layers);
  }
  absl::StatusOr<StoreResult> Wait() { return stored_.get_future().get(); }

 private:
  Client& client_;
  Sequence& values_;
  EnginePages pages_;
  const BlockList list_;
  std::uint32_t ready_ = 0;
  std::promise<absl::StatusOr<StoreResult>> stored_;
};

// A decode engine that waits for a ticket.
class Decode {
 public:
  Decode(Client& client, const ClientNamespace& ns, const std::string& ticket) {
    client.RedeemTicketAsync(
        ns, ticket,
        [this](absl::Span<const RedeemedBlock> blocks, absl::Span<const std::uint32_t>) {
          MutexLock lock(mu_);
          blocks_.assign(blocks.begin(), blocks.end());
        },
        kLongCall,
        [this](absl::StatusOr<RedeemResult> result) { result_.set_value(std::move(result)); });
  }
  std::vector<RedeemedBlock> blocks() const {
    MutexLock lock(mu_);
    return blocks_;
  }
  // Whether this layer of every block is here.
  bool HasLayer(std::uint32_t layer) const {
    const std::vector<RedeemedBlock> all = blocks();
    return !all.empty() && std::all_of(all.begin(), all.end(), [layer](const RedeemedBlock& block) {
      return block.HasLayer(layer);
    });
  }
  absl::StatusOr<RedeemResult> Wait() { return result_.get_future().get(); }

 private:
  mutable Mutex mu_;
  std::vector<RedeemedBlock> blocks_ ABSL_GUARDED_BY(mu_);
  std::promise<absl::StatusOr<RedeemResult>> result_;
};

class TicketDaemonsTest : public ClusterTest {
 protected:
  void StartAll(const std::vector<std::string>& names, const std::vector<std::string>& more = {}) {
    std::string all;
    for (const std::string& name : names) {
      StartNode(name, name, kLongLease, more);
      absl::StrAppend(&all, all.empty() ? "" : " ", name);
    }
    for (const std::string& name : names) {
      Until([&] { return MembersOf(name) == all; });
      Open(name);
    }
  }
  void Open(const std::string& name) {
    const auto ns = nodes_.at(name).client->OpenNamespace("n", Spec(SmallSpec()));
    ASSERT_TRUE(ns.ok()) << ns.status();
    ns_[name] = *ns;
  }
  Client& ClientOf(const std::string& name) { return *nodes_.at(name).client; }

  // The blocks of the sequence `name`, the last one a tail.
  static std::vector<PromisedBlock> Promised(const std::string& name) {
    std::vector<PromisedBlock> blocks;
    for (std::uint32_t b = 0; b <= kBlocks; ++b) {
      PromisedBlock& block = blocks.emplace_back();
      block.key = KeyOf(name, b);
      if (b > 0) block.parent = KeyOf(name, b - 1);
      block.token_count = b < kBlocks ? SmallSpec().block_tokens : kTailTokens;
      block.block_index = b;
    }
    return blocks;
  }
  static Sequence Values(std::uint32_t seed) {
    return Sequence(Spec(SmallSpec()), kBlocks * SmallSpec().block_tokens + kTailTokens, seed);
  }
  static std::vector<BlockKey> StoredKeys(const std::string& name) {
    std::vector<BlockKey> keys = KeysOf(name, kBlocks);
    keys.push_back(TailKey(KeyOf(name, kBlocks - 1), kTailTokens, KeyOf(name, kBlocks)));
    return keys;
  }
  std::string Create(const std::string& node, const std::string& name,
                     const TicketOptions& options = kPatient) {
    const auto ticket = ClientOf(node).CreateTicket(ns_[node], Promised(name), options);
    EXPECT_TRUE(ticket.ok()) << ticket.status();
    return ticket.value_or("");
  }
  // The pages that are on the node itself, as bytes.
  using Pages = std::map<std::tuple<std::uint32_t, int, std::uint32_t>, std::string>;
  Pages PagesOn(const std::string& node, const std::string& name) {
    PageCollector sink;
    const auto result = ClientOf(node).Fetch(ns_[node], StoredKeys(name), sink,
                                             {.elsewhere = {.local_only = true}});
    EXPECT_TRUE(result.ok()) << result.status();
    return sink.pages;
  }
  // Nothing is held for a ticket, and no block for whoever.
  void NothingIsHeldOn(const std::string& node) {
    for (const char* gauge :
         {"kvmill_tickets{side=\"producer\"} 0\n", "kvmill_tickets{side=\"consumer\"} 0\n",
          "kvmill_ticket_bytes{side=\"producer\"} 0\n",
          "kvmill_ticket_bytes{side=\"consumer\"} 0\n", "kvmill_referenced_blocks 0\n"}) {
      Until([&] { return absl::StrContains(Metrics(node), gauge); });
    }
  }
  void Ended(const std::string& node, const std::string& how, int count) {
    Until([&] {
      return absl::StrContains(Metrics(node), absl::StrCat("kvmill_tickets_ended_total{end=\"", how,
                                                           "\"} ", count, "\n"));
    });
  }
  // One layer after the other, each of which comes before the next one is computed.
  void FlowsLayerByLayer(const std::string& name) {
    Sequence values = Values(3);
    const std::string ticket = Create("a", name);
    Decode decode(ClientOf("b"), ns_["b"], ticket);
    Decode same(ClientOf("b"), ns_["b"], ticket);
    Prefill prefill(ClientOf("a"), ns_["a"], name, values, 0, 2);
    for (std::uint32_t layer = 0; layer + 1 < kLayers; ++layer) {
      prefill.Compute(layer + 1);
      Until([&] { return decode.HasLayer(layer); });
      EXPECT_FALSE(decode.HasLayer(layer + 1));
      EXPECT_TRUE(PagesOn("b", name).empty()) << "nobody sees a block that is not sealed";
    }
    prefill.Compute(kLayers);
    const auto stored = prefill.Wait();
    ASSERT_TRUE(stored.ok()) << stored.status();
    EXPECT_EQ(stored->blocks_stored, kBlocks + 1);
    for (Decode* each : {&decode, &same}) {
      const auto redeemed = each->Wait();
      ASSERT_TRUE(redeemed.ok()) << redeemed.status();
      ASSERT_EQ(redeemed->blocks.size(), kBlocks + 1);
      EXPECT_EQ(redeemed->missed, 0u);
      const std::vector<BlockKey> keys = StoredKeys(name);
      for (std::size_t b = 0; b < keys.size(); ++b) {
        EXPECT_EQ(redeemed->blocks[b].fate, TicketFate::kSealed);
        EXPECT_EQ(redeemed->blocks[b].key, keys[b]);
        EXPECT_EQ(redeemed->blocks[b].layers_here, kLayers);
      }
    }
    const Pages pages = PagesOn("b", name);
    EXPECT_EQ(pages.size(), (kBlocks + 1) * kLayers);
    EXPECT_EQ(pages, PagesOn("a", name));
    // Who comes later is told how it ended.
    const auto again = ClientOf("b").RedeemTicket(ns_["b"], ticket);
    ASSERT_TRUE(again.ok()) << again.status();
    EXPECT_EQ(again->missed, 0u);
    NothingIsHeldOn("a");
    NothingIsHeldOn("b");
    Ended("a", "acknowledged", 1);
    EXPECT_THAT(Metrics("b"),
                HasSubstr(absl::StrCat("kvmill_redeemed_blocks_total{result=\"sealed\"} ",
                                       kBlocks + 1, "\n")));
    EXPECT_THAT(Metrics("b"), HasSubstr("kvmill_ticket_pages_total{result=\"damaged\"} 0\n"));
    EXPECT_TRUE(absl::IsNotFound(ClientOf("a").RevokeTicket(ticket)));
  }

  std::map<std::string, ClientNamespace> ns_;
};

TEST_F(TicketDaemonsTest, LayersComeOverUcxWhileTheyAreStored) {
  StartAll({"a", "b"}, {"--ucx", "127.0.0.1"});
  FlowsLayerByLayer("s");
  Until([&] { return !absl::StrContains(Metrics("a"), "kvmill_data_connections 0\n"); });
  // What of a prompt is there already is part of its ticket.
  const auto there = ClientOf("b").RedeemTicket(ns_["b"], Create("a", "s"), nullptr, kLongCall);
  ASSERT_TRUE(there.ok()) << there.status();
  for (const RedeemedBlock& block : there->blocks) EXPECT_EQ(block.fate, TicketFate::kExists);
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
  ASSERT_TRUE(redeemed.ok()) << redeemed.status();
  EXPECT_EQ(redeemed->missed, 0u);
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
    EXPECT_TRUE(absl::IsAborted(redeemed.status())) << redeemed.status();
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
    EXPECT_TRUE(absl::IsCancelled(redeemed.status())) << redeemed.status();
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
    EXPECT_TRUE(absl::IsAborted(redeemed.status()) || absl::IsNotFound(redeemed.status()))
        << redeemed.status();
    Ended("a", "deadline", 1);
  }
  {
    // Whoever has another ticket's bytes, or of another node, or nonsense, has nothing.
    const auto of = [&](const std::string& node, const std::string& ticket) {
      return ClientOf(node).RedeemTicket(ns_[node], ticket, nullptr, kLongCall).status();
    };
    EXPECT_TRUE(absl::IsInvalidArgument(of("b", "nonsense")));
    const std::string ticket = make("for-c", {.consumer = "c", .ttl = kPatient.ttl});
    EXPECT_TRUE(absl::IsPermissionDenied(of("b", ticket)));
    EXPECT_TRUE(absl::IsFailedPrecondition(of("a", ticket))) << "that is where it was made";
    EXPECT_TRUE(absl::IsFailedPrecondition(ClientOf("b").RevokeTicket(ticket)));
    EXPECT_TRUE(absl::IsInvalidArgument(engine->CreateTicket(ns_["a"], {}).status()));
    auto twice = Promised("twice");
    twice.push_back(twice[0]);
    EXPECT_TRUE(absl::IsInvalidArgument(engine->CreateTicket(ns_["a"], twice).status()));
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
    EXPECT_TRUE(absl::IsAborted(redeemed.status())) << redeemed.status();
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
    EXPECT_TRUE(absl::IsUnavailable(redeemed.status())) << redeemed.status();
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
  for (Decode* decode : {of_killed.get(), &of_first}) EXPECT_FALSE(decode->Wait().ok());
  Ended("a", "deadline", 2);
  nodes_["c"].process->Signal(SIGCONT);
  EXPECT_FALSE(of_second.Wait().ok());
  // It is another process that comes back.
  StartNode("b", "b", kLongLease);
  Until([&] { return MembersOf("b") == "a b c"; });
  Open("b");
  const auto again = ClientOf("b").RedeemTicket(ns_["b"], patient, nullptr, kLongCall);
  EXPECT_TRUE(absl::IsFailedPrecondition(again.status())) << again.status();
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
  EXPECT_FALSE(decode.Wait().ok());
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
  EXPECT_FALSE(another.Wait().ok());
  EXPECT_EQ(nodes_["b"].process->WaitExit().code, 0);
  NothingIsHeldOn("a");
}

}  // namespace
}  // namespace kvmill::testing
