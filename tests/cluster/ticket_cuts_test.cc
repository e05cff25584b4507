// A ticket between engines that are cut differently: the prefill is two stages of layers with two
// ranks each, the decode is ranks of other layers and other heads, each of which redeems the ticket
// and loads its part. Every byte of every rank is the one of a store of all layers and heads at
// once.
#include <cstring>
#include <iterator>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "client/kv_sink.h"
#include "tests/cluster/ticket_daemons.h"

namespace kvmill::testing {
namespace {

constexpr std::uint32_t kHeads = 4;

struct Range {
  std::uint32_t begin = 0, end = 0;
  std::uint32_t count() const { return end - begin; }
};
struct Cut {
  Range layers, heads;
};

// A rank of the prefill: a process's client, its pages and its layers and heads of the prompt.
class PrefillRank {
 public:
  PrefillRank(std::unique_ptr<Client> client, const ClientNamespace& ns, const std::string& name,
              Sequence& values, const Cut& cut)
      : client_(std::move(client)),
        pages_(ns.spec, 64, cut.heads.begin % 2 == 1, cut.heads.begin, cut.heads.count(), nullptr),
        list_(ns.spec, name, values.token_count(), Shuffled(64, cut.heads.begin + 7)) {
    pages_.Fill(values, list_.pages, cut.layers.begin, cut.layers.end);
    EngineLayers& layers = pages_.geometry.layers[0];
    layers.layer_begin = cut.layers.begin;
    for (std::vector<EnginePlace>* places : {&layers.keys, &layers.values}) {
      *places = {places->begin() + cut.layers.begin, places->begin() + cut.layers.end};
    }
    const auto registration = client_->RegisterMemory(ns, pages_.geometry);
    EXPECT_TRUE(registration.ok()) << registration.status();
    registration_ = registration.value_or(0);
  }
  void Store(const ClientNamespace& ns) {
    const auto stored = client_->StorePages(ns, registration_, list_.blocks, {}, kLongCall);
    ASSERT_TRUE(stored.ok()) << stored.status();
    EXPECT_EQ(stored->blocks_failed, 0u);
  }

 private:
  const std::unique_ptr<Client> client_;
  EnginePages pages_;
  const BlockList list_;
  std::uint64_t registration_ = 0;
};

// 16-bit values of a part of a prompt, [layer][K, V][token][head][channel] of its own.
class PartSink final : public FetchSink {
 public:
  PartSink(const NamespaceSpec& spec, std::uint32_t tokens, const Cut& cut)
      : block_tokens_(spec.block_tokens), head_dim_(spec.groups[0].head_dim), cut_(cut) {
    values_.resize(2 * cut.layers.count());
    for (auto& values : values_) values.resize(tokens * Row(), 0x7B7B);
  }
  absl::Status OnPage(const PageId& id, const PageView& page) override {
    if (id.layer_index < cut_.layers.begin || id.layer_index >= cut_.layers.end) {
      return absl::OkStatus();
    }
    const std::size_t layer = 2 * (id.layer_index - cut_.layers.begin);
    const std::size_t first = std::size_t{id.block} * block_tokens_ * Row();
    LayerOutput out;
    out.k = MutableKvView::Array(&values_[layer][first], cut_.heads.count(), head_dim_);
    out.v = MutableKvView::Array(&values_[layer + 1][first], cut_.heads.count(), head_dim_);
    return DecodePage(page, Frame::kModel, cut_.heads.begin, cut_.heads.count(), out, &scratch_);
  }
  // Of a layer, a token and a head of the model.
  const std::uint16_t* Of(std::uint32_t layer, bool value, std::uint32_t token,
                          std::uint32_t head) const {
    return &values_[2 * (layer - cut_.layers.begin) + (value ? 1 : 0)]
                   [token * Row() + (head - cut_.heads.begin) * head_dim_];
  }

 private:
  std::size_t Row() const { return std::size_t{cut_.heads.count()} * head_dim_; }

  const std::uint32_t block_tokens_, head_dim_;
  const Cut cut_;
  std::vector<std::vector<std::uint16_t>> values_;
  std::vector<std::byte> scratch_;
};

class TicketCutsTest : public TicketDaemonsTest {
 protected:
  static NamespaceSpec CutSpec() {
    NamespaceSpec spec = Spec(SmallSpec());
    spec.groups[0].kv_heads = kHeads;
    return spec;
  }
};

TEST_F(TicketCutsTest, RanksOfOtherLayersAndHeadsLoadWhatOthersStored) {
  StartAll({"a", "b"}, {"--ucx", "127.0.0.1"});
  for (const char* node : {"a", "b"}) {
    const auto ns = ClientOf(node).OpenNamespace("cut", CutSpec());
    ASSERT_TRUE(ns.ok()) << ns.status();
    ns_[node] = *ns;
  }
  const std::uint32_t tokens = kBlocks * CutSpec().block_tokens + kTailTokens;
  Sequence values(CutSpec(), tokens, 11);
  const std::string ticket = Create("a", "s", {.consumer = "b", .ttl = kPatient.ttl});

  // The decode: a rank of three layers and one head, and so on. Nobody has the same cut as a rank
  // of the prefill.
  const Cut loads[] = {{{0, 3}, {0, 1}}, {{0, 3}, {1, 4}}, {{3, 4}, {0, 3}}, {{3, 4}, {3, 4}}};
  struct DecodeRank {
    std::unique_ptr<Client> client;
    std::unique_ptr<Decode> decode;
  };
  std::vector<DecodeRank> decodes;
  for (std::size_t i = 0; i < std::size(loads); ++i) {
    DecodeRank& rank = decodes.emplace_back();
    rank.client = Connect("unix:" + (directory_ / "b/kvmill.sock"));
    rank.decode = std::make_unique<Decode>(*rank.client, ns_["b"], ticket);
  }

  // The prefill: two stages of two layers with two ranks of two heads. The later stage is first.
  const Cut stores[] = {{{2, 4}, {0, 2}}, {{2, 4}, {2, 4}}, {{0, 2}, {2, 4}}, {{0, 2}, {0, 2}}};
  std::vector<std::unique_ptr<PrefillRank>> ranks;
  for (const Cut& cut : stores) {
    ranks.push_back(std::make_unique<PrefillRank>(Connect("unix:" + (directory_ / "a/kvmill.sock")),
                                                  ns_["a"], "s", values, cut));
  }
  ranks[0]->Store(ns_["a"]);
  for (const DecodeRank& rank : decodes) EXPECT_FALSE(rank.decode->HasLayer(2)) << "half of it";
  ranks[1]->Store(ns_["a"]);
  for (const DecodeRank& rank : decodes) {
    Until([&] { return rank.decode->HasLayer(2) && rank.decode->HasLayer(3); });
    EXPECT_FALSE(rank.decode->HasLayer(0));
  }
  ranks[2]->Store(ns_["a"]);
  for (const DecodeRank& rank : decodes) EXPECT_FALSE(rank.decode->HasLayer(1));
  ranks[3]->Store(ns_["a"]);
  for (const DecodeRank& rank : decodes) {
    const RedeemResult redeemed = rank.decode->Wait();
    ASSERT_TRUE(redeemed.status.ok()) << redeemed.status;
    EXPECT_EQ(redeemed.missed, 0u);
    ASSERT_EQ(redeemed.blocks.size(), kBlocks + 1);
  }

  // What one store of everything makes of the same values, on the other node.
  const auto whole = ClientOf("a").Store(ns_["a"], values.Blocks("whole"), {}, kLongCall);
  ASSERT_TRUE(whole.ok()) << whole.status();
  ASSERT_EQ(whole->blocks_stored, kBlocks + 1);
  const Pages pages = PagesOn("b", "s");
  EXPECT_EQ(pages.size(), (kBlocks + 1) * kLayers);
  EXPECT_TRUE(pages == PagesOn("a", "s")) << "the copy is another one";
  EXPECT_TRUE(pages == PagesOn("a", "whole")) << "the cut makes a difference";
  const CallOptions local{.elsewhere = {.local_only = true}};
  PartSink all(CutSpec(), tokens, {{0, kLayers}, {0, kHeads}});
  ASSERT_TRUE(ClientOf("a").Fetch(ns_["a"], StoredKeys("whole"), all, local).ok());

  // And the ranks, each from node b with its own client.
  const std::size_t row_bytes = std::size_t{2} * CutSpec().groups[0].head_dim;
  for (std::size_t i = 0; i < std::size(loads); ++i) {
    const Cut& cut = loads[i];
    PartSink part(CutSpec(), tokens, cut);
    const auto loaded = decodes[i].client->Fetch(ns_["b"], StoredKeys("s"), part, local);
    ASSERT_TRUE(loaded.ok()) << loaded.status();
    for (const FetchBlockResult& block : loaded->blocks) {
      EXPECT_TRUE(block.status.ok()) << block.status;
    }
    std::size_t wrong = 0;
    for (std::uint32_t layer = cut.layers.begin; layer < cut.layers.end; ++layer) {
      for (std::uint32_t token = 0; token < tokens; ++token) {
        for (std::uint32_t head = cut.heads.begin; head < cut.heads.end; ++head) {
          for (const bool value : {false, true}) {
            const std::uint16_t* const got = part.Of(layer, value, token, head);
            wrong += std::memcmp(got, all.Of(layer, value, token, head), row_bytes) != 0;
            // The first block and the tail are as the engine wrote them.
            const std::uint32_t block = token / CutSpec().block_tokens;
            if (block != 0 && block != kBlocks) continue;
            wrong += std::memcmp(got, &values.At(layer, value, token, head, 0), row_bytes) != 0;
          }
        }
      }
    }
    EXPECT_EQ(wrong, 0u) << "rows of rank " << i;
  }
  for (const char* node : {"a", "b"}) NothingIsHeldOn(node);
}

}  // namespace
}  // namespace kvmill::testing
