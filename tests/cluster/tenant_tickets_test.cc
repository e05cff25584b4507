// Real daemons of a cluster with two tenants: tickets, where blocks are, and events. Each tenant
// has its own; who has another one's ticket, or says its names, is told what he is told of none.
#include <gmock/gmock.h>

#include <atomic>
#include <future>
#include <set>
#include <string>
#include <vector>
#include <zmq.hpp>

#include "absl/strings/match.h"
#include "client/events.h"
#include "client/ticket.h"
#include "tests/cluster/tenants_fixture.h"

namespace kvmill::testing {
namespace {

using ::testing::HasSubstr;

class TenantTicketsTest : public TenantsTest {
 protected:
  // Of the blocks that PutOn stores.
  std::string Ticket(const std::string& node, const std::string& tenant) {
    std::vector<PromisedBlock> blocks;
    for (std::uint32_t b = 0; b < kBlocks; ++b) {
      PromisedBlock& block = blocks.emplace_back();
      block.key = KeyOf("s", b);
      if (b > 0) block.parent = KeyOf("s", b - 1);
      block.token_count = SmallSpec().block_tokens;
      block.block_index = b;
    }
    TicketOptions patient;
    patient.ttl = absl::Minutes(10);
    patient.life = absl::Hours(1);
    const auto ticket = ClientOf(node, tenant).CreateTicket(OpenOn(node, tenant), blocks, patient);
    EXPECT_TRUE(ticket.ok()) << ticket.status();
    return ticket.value_or("");
  }
  // The same ticket with another secret: nobody ever made it. (version, then the secret.)
  static std::string Unknown(std::string ticket) {
    EXPECT_EQ(ticket.substr(0, 4), std::string("\x08\x01\x12\x10")) << "docs/formats.md";
    ticket[10] = static_cast<char>(ticket[10] ^ 1);
    return ticket;
  }
  // The same secret, of the namespace that `tenant` has under that name.
  std::string AsIfOf(const std::string& tenant, const std::string& whose, std::string ticket) {
    const auto bytes = [](const ClientNamespace& ns) {
      return std::string(reinterpret_cast<const char*>(ns.fingerprint.data()),
                         ns.fingerprint.size());
    };
    const std::size_t at = ticket.find(bytes(OpenOn("a", whose)));
    EXPECT_NE(at, std::string::npos) << "docs/formats.md";
    const std::string other = bytes(OpenOn("a", tenant));
    return at == std::string::npos ? ticket : ticket.replace(at, other.size(), other);
  }
  RedeemResult Redeem(const std::string& node, const std::string& tenant,
                      const std::string& ticket) {
    return ClientOf(node, tenant)
        .RedeemTicket(OpenOn(node, tenant), ticket, nullptr, {.timeout = absl::Minutes(5)});
  }
  // Whoever is not of the ticket's tenant is told the same as of one that there never was.
  void IsNoneFor(const std::string& tenant, const std::string& whose, const std::string& ticket) {
    const std::string forged = AsIfOf(tenant, whose, ticket);
    for (const char* node : {"a", "b"}) {
      for (const std::string& shown : {ticket, forged}) {
        const std::string name =
            absl::StrCat(node, ", \"", tenant, "\"", shown == forged ? ", forged" : "");
        const RedeemResult got = Redeem(node, tenant, shown);
        const RedeemResult want = Redeem(node, tenant, Unknown(shown));
        EXPECT_TRUE(absl::IsNotFound(got.status)) << name << ": " << got.status;
        EXPECT_EQ(got.status, want.status) << name;
        EXPECT_TRUE(got.blocks.empty()) << name;
        const absl::Status revoked = ClientOf(node, tenant).RevokeTicket(shown);
        EXPECT_EQ(revoked, ClientOf(node, tenant).RevokeTicket(Unknown(shown))) << name;
        EXPECT_TRUE(std::string(node) == "a" ? absl::IsNotFound(revoked)
                                             : absl::IsFailedPrecondition(revoked))
            << name << ": " << revoked;
        // Nor by the other one's namespace, which is not his to name.
        EXPECT_TRUE(absl::IsNotFound(
            ClientOf(node, tenant).RedeemTicket(OpenOn(node, whose), shown).status))
            << name;
      }
    }
  }
  void IsRedeemed(const RedeemResult& result) {
    ASSERT_TRUE(result.status.ok()) << result.status;
    EXPECT_EQ(result.missed, 0u);
    ASSERT_EQ(result.blocks.size(), kBlocks);
    for (const RedeemedBlock& block : result.blocks) {
      EXPECT_EQ(block.fate, TicketFate::kSealed) << block.block_index;
    }
  }
  Pages LocalPages(const std::string& node, const std::string& tenant) {
    CallOptions call;
    call.elsewhere.local_only = true;
    PageCollector sink;
    const auto fetched =
        ClientOf(node, tenant).Fetch(OpenOn(node, tenant), KeysOf("s", kBlocks), sink, call);
    EXPECT_TRUE(fetched.ok()) << fetched.status();
    return sink.pages;
  }

  // "a b": who says that it has the first block.
  absl::StatusOr<std::string> Holders(Client& admin, const std::string& tenant = "") {
    const auto places = admin.Where("shared", KeyOf("s", 0), BlockKey(), 0, {}, tenant);
    if (!places.ok()) return places.status();
    std::set<std::string> ids;
    for (const BlockPlaces::Holder& holder : places->holders) ids.insert(holder.member.id);
    std::string all;
    for (const std::string& id : ids) absl::StrAppend(&all, all.empty() ? "" : " ", id);
    return all;
  }
};

TEST_F(TenantTicketsTest, ATicketIsItsTenantsAndForOthersThereIsNone) {
  StartNodes({"--ucx", "127.0.0.1"});
  ASSERT_FALSE(HasFatalFailure());
  const std::string ticket = Ticket("a", "team-a");
  ASSERT_FALSE(HasFailure());
  // Before anybody redeemed it.
  for (const char* stranger : {"team-b", kNode}) IsNoneFor(stranger, "team-a", ticket);
  std::promise<RedeemResult> done;
  std::atomic<bool> told{false};
  ClientOf("b", "team-a")
      .RedeemTicketAsync(
          OpenOn("b", "team-a"), ticket,
          [&told](absl::Span<const RedeemedBlock>, absl::Span<const std::uint32_t>) {
            told = true;
          },
          {.timeout = absl::Minutes(5)},
          [&done](RedeemResult result) { done.set_value(std::move(result)); });
  Until([&] { return told.load(); });
  // While that node is at work on it.
  for (const char* stranger : {"team-b", kNode}) IsNoneFor(stranger, "team-a", ticket);
  PutOn("a", "team-a", 1);
  IsRedeemed(done.get_future().get());
  const Pages of_a = LocalPages("a", "team-a");
  ASSERT_EQ(of_a.size(), kBlocks * 2u);
  EXPECT_EQ(LocalPages("b", "team-a"), of_a);
  Until([&] {
    return absl::StrContains(Metrics("b"), "kvmill_redeemed_blocks_total{result=\"sealed\"} 40\n");
  });
  // Now that it has ended, and is remembered.
  IsRedeemed(Redeem("b", "team-a", ticket));
  for (const char* stranger : {"team-b", kNode}) {
    IsNoneFor(stranger, "team-a", ticket);
    EXPECT_EQ(HitsOn("b", stranger, {.local_only = true}), 0u);
  }

  // Another one under the same names.
  const std::string of_others = Ticket("a", "team-b");
  PutOn("a", "team-b", 2);
  IsNoneFor("team-a", "team-b", of_others);
  IsRedeemed(Redeem("b", "team-b", of_others));
  const Pages of_b = LocalPages("b", "team-b");
  EXPECT_EQ(of_b, LocalPages("a", "team-b"));
  EXPECT_NE(of_b, of_a);
  EXPECT_EQ(LocalPages("b", "team-a"), of_a);

  // Nobody else revoked them; their own may.
  const std::string more = Ticket("a", "team-a");
  IsNoneFor("team-b", "team-a", more);
  EXPECT_TRUE(ClientOf("a", "team-a").RevokeTicket(more).ok());
  EXPECT_TRUE(absl::IsNotFound(Redeem("b", "team-a", more).status));
  // Where it was made, too.
  const std::string here = Ticket("a", "team-a");
  IsRedeemed(Redeem("a", "team-a", here));
}

TEST_F(TenantTicketsTest, WhereBlocksAreIsAskedOfATenant) {
  tenants_ = WriteTenants("admins.yaml", ", admin: true", ", admin: true");
  StartNodes();
  ASSERT_FALSE(HasFatalFailure());
  std::map<std::string, std::unique_ptr<Client>> admins;
  const auto admin_of = [&](const std::string& node, const std::string& tenant) -> Client& {
    std::unique_ptr<Client>& admin = admins[node + tenant];
    if (admin == nullptr) {
      auto made = Client::Create(OptionsOf(node, tenant, "admin"));
      EXPECT_TRUE(made.ok()) << made.status();
      admin = *std::move(made);
    }
    return *admin;
  };
  const auto holders = [&](const std::string& node, const std::string& tenant,
                           const std::string& of = "") {
    return Holders(admin_of(node, tenant), of);
  };
  PutOn("a", "team-a", 1);
  // The namespace is nothing that node b ever heard of.
  Until([&] { return holders("b", "team-a").value_or("") == "a"; });
  EXPECT_EQ(holders("a", "team-a").value_or("?"), "a");
  // By the same name another one has nothing: no namespace, and when he has one, no block.
  for (const char* node : {"a", "b"}) {
    for (const char* stranger : {"team-b", kNode}) {
      EXPECT_TRUE(absl::IsNotFound(holders(node, stranger).status()))
          << node << " " << stranger << holders(node, stranger).status();
    }
  }
  for (const char* node : {"a", "b"}) {
    for (const char* stranger : {"team-b", kNode}) {
      OpenOn(node, stranger);
      EXPECT_EQ(holders(node, stranger).value_or("?"), "") << node << " " << stranger;
    }
  }
  // An administrator may ask for any of them; who is none asks nothing.
  EXPECT_EQ(holders("b", "team-b", "team-a").value_or("?"), "a");
  EXPECT_EQ(Holders(*nodes_.at("b").client, "team-a").value_or("?"), "a");
  EXPECT_EQ(Holders(*nodes_.at("b").client).value_or("?"), "");
  EXPECT_EQ(Holders(*nodes_.at("b").client, "default").value_or("?"), "");
  EXPECT_TRUE(absl::IsNotFound(holders("b", "team-b", "team-c").status()));
  const absl::Status of_user = holders("b", "team-b", "uid-7").status();
  EXPECT_TRUE(absl::IsFailedPrecondition(of_user)) << of_user;
  EXPECT_THAT(std::string(of_user.message()), HasSubstr("nodes do not share blocks of tenant"));
  const absl::Status not_admin = Holders(ClientOf("b", "team-a")).status();
  EXPECT_TRUE(absl::IsPermissionDenied(not_admin)) << not_admin;

  const Pages of_a = FetchOn("a", "team-a");
  Until([&] { return FetchOn("b", "team-a") == of_a; });
  for (const char* node : {"a", "b"}) {
    Until([&] { return holders(node, "team-a").value_or("") == "a b"; });
    EXPECT_EQ(holders(node, "team-b").value_or("?"), "");
  }
  // It is written down who asked of whom.
  EXPECT_THAT(nodes_.at("b").process->standard_error(), HasSubstr("of_tenant=team-a"));
}

// What comes to a node for one tenant is told to readers of that one, and is not published.
TEST_F(TenantTicketsTest, EventsAreOfOneTenant) {
  StartNodes({"--events", "127.0.0.1:0", "--events-hashes", "bytes"});
  ASSERT_FALSE(HasFatalFailure());
  const auto watch = [&](const std::string& tenant) {
    auto stream = EventStream::Open(OptionsOf("b", tenant), {});
    EXPECT_TRUE(stream.ok()) << stream.status();
    return *std::move(stream);
  };
  const auto of_a = watch("team-a"), of_b = watch("team-b"), of_node = watch(kNode);
  zmq::context_t context;
  zmq::socket_t published(context, zmq::socket_type::sub);
  published.set(zmq::sockopt::subscribe, "");
  published.set(zmq::sockopt::rcvtimeo, 100);
  published.connect(nodes_.at("b").ready["events"].get<std::string>());
  // Every store is also of a key that nobody else has.
  const auto put = [&](const std::string& tenant, const std::string& name) {
    Sequence values(SmallSpec(), SmallSpec().block_tokens, 7);
    const auto stored = ClientOf("b", tenant).Store(OpenOn("b", tenant), values.Blocks(name), {});
    EXPECT_TRUE(stored.ok()) << stored.status();
  };
  // A subscriber that has just come misses what is published meanwhile.
  std::string messages;
  const auto read = [&] {
    zmq::message_t part;
    while (published.recv(part, zmq::recv_flags::none)) messages += part.to_string();
  };
  int rounds = 0;
  Until([&] {
    put(kNode, absl::StrCat("first", rounds++));
    read();
    return absl::StrContains(messages, "first");
  });

  PutOn("a", "team-a", 1);
  const Pages stored = FetchOn("a", "team-a");
  Until([&] { return FetchOn("b", "team-a") == stored; });
  put("team-b", "theirs");
  put(kNode, "last");
  // Up to that one.
  const auto keys_until = [&](EventStream& stream, const BlockKey& last) {
    std::set<std::string> keys;
    Until([&] {
      const auto batch = stream.Next(absl::Milliseconds(50));
      EXPECT_TRUE(batch.ok() || absl::IsDeadlineExceeded(batch.status())) << batch.status();
      if (batch.ok()) {
        for (const WatchedEvent& event : batch->events) keys.emplace(event.key.view());
      }
      return keys.contains(std::string(last.view()));
    });
    return keys;
  };
  const std::vector<BlockKey> all = KeysOf("s", kBlocks);
  for (const std::string& key : keys_until(*of_a, all.back())) {
    EXPECT_TRUE(absl::StartsWith(key, "s/")) << key;
  }
  EXPECT_THAT(keys_until(*of_b, KeyOf("theirs", 0)),
              ::testing::ElementsAre(std::string(KeyOf("theirs", 0).view())));
  for (const std::string& key : keys_until(*of_node, KeyOf("last", 0))) {
    EXPECT_TRUE(absl::StartsWith(key, "first") || absl::StartsWith(key, "last")) << key;
  }
  Until([&] {
    read();
    return absl::StrContains(messages, std::string(KeyOf("last", 0).view()));
  });
  for (const BlockKey& key : all) {
    EXPECT_FALSE(absl::StrContains(messages, std::string(key.view()))) << key.ToHex();
  }
  EXPECT_FALSE(absl::StrContains(messages, std::string(KeyOf("theirs", 0).view())));
}

}  // namespace
}  // namespace kvmill::testing
