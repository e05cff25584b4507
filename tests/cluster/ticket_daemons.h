// Tickets between real daemons: a prefill engine, a decode engine, and nodes for them.
#ifndef KVMILL_TESTS_CLUSTER_TICKET_DAEMONS_H_
#define KVMILL_TESTS_CLUSTER_TICKET_DAEMONS_H_

#include <gmock/gmock.h>

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

inline constexpr std::uint32_t kLayers = 4;
inline constexpr std::uint32_t kBlocks = 6;
inline constexpr std::uint32_t kTailTokens = 23;
// Nothing waits for its end.
inline const TicketOptions kPatient{.ttl = absl::Minutes(10), .life = absl::Hours(1)};
inline const CallOptions kLongCall{.timeout = absl::Minutes(5)};

// The first block of a sequence is kept in 16 bits, as are tails.
inline NamespaceSpec Spec(NamespaceSpec spec) {
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
        [this](absl::Span<const RedeemedBlock> blocks, absl::Span<const std::uint32_t> changed) {
          MutexLock lock(mu_);
          for (const std::uint32_t i : changed) {
            const auto same = [&](const RedeemedBlock& before) {
              return before.fate == blocks[i].fate && before.layer_words == blocks[i].layer_words;
            };
            EXPECT_TRUE(blocks_.empty() || !same(blocks_[i])) << i << " did not change";
          }
          blocks_.assign(blocks.begin(), blocks.end());
        },
        kLongCall, [this](RedeemResult result) { result_.set_value(std::move(result)); });
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
  RedeemResult Wait() { return result_.get_future().get(); }

 private:
  mutable Mutex mu_;
  std::vector<RedeemedBlock> blocks_ ABSL_GUARDED_BY(mu_);
  std::promise<RedeemResult> result_;
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
  // Stores one block of the sequence `name`.
  bool PutOne(const std::string& node, const std::string& name, std::uint32_t b) {
    Sequence values(Spec(SmallSpec()), (b + 1) * SmallSpec().block_tokens, 9);
    const std::vector<StoreBlock> blocks = values.Blocks(name);
    const auto stored = ClientOf(node).Store(ns_[node], {&blocks[b], 1}, StoreOptions{}, kLongCall);
    EXPECT_TRUE(stored.ok()) << stored.status();
    return stored.ok() && stored->blocks_failed == 0;
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
      ASSERT_TRUE(redeemed.status.ok()) << redeemed.status;
      ASSERT_EQ(redeemed.blocks.size(), kBlocks + 1);
      EXPECT_EQ(redeemed.missed, 0u);
      const std::vector<BlockKey> keys = StoredKeys(name);
      for (std::size_t b = 0; b < keys.size(); ++b) {
        EXPECT_EQ(redeemed.blocks[b].fate, TicketFate::kSealed);
        EXPECT_EQ(redeemed.blocks[b].key, keys[b]);
        EXPECT_EQ(redeemed.blocks[b].layers_here, kLayers);
      }
    }
    const Pages pages = PagesOn("b", name);
    EXPECT_EQ(pages.size(), (kBlocks + 1) * kLayers);
    EXPECT_EQ(pages, PagesOn("a", name));
    // Who comes later is told how it ended.
    const auto again = ClientOf("b").RedeemTicket(ns_["b"], ticket);
    ASSERT_TRUE(again.status.ok()) << again.status;
    EXPECT_EQ(again.missed, 0u);
    NothingIsHeldOn("a");
    NothingIsHeldOn("b");
    Ended("a", "acknowledged", 1);
    EXPECT_THAT(Metrics("b"),
                ::testing::HasSubstr(absl::StrCat(
                    "kvmill_redeemed_blocks_total{result=\"sealed\"} ", kBlocks + 1, "\n")));
    EXPECT_THAT(Metrics("b"),
                ::testing::HasSubstr("kvmill_ticket_pages_total{result=\"damaged\"} 0\n"));
    EXPECT_TRUE(absl::IsNotFound(ClientOf("a").RevokeTicket(ticket)));
  }

  std::map<std::string, ClientNamespace> ns_;
};

}  // namespace kvmill::testing

#endif  // KVMILL_TESTS_CLUSTER_TICKET_DAEMONS_H_
