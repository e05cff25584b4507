// Tickets through the C ABI (client/kvmill_ticket.h), between two real daemons with a real etcd.
#include <poll.h>
#include <unistd.h>

#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/kvmill_ticket.h"
#include "tests/client/c_api/c_daemon.h"
#include "tests/cluster/etcd_process.h"

namespace kvmill::testing {
namespace {

constexpr std::uint32_t kTailTokens = 23;
const std::vector<std::string> kKeys = {"block 0", "block 1", "block 2"};  // The last is a tail.

struct Node {
  TemporaryDirectory directory;
  std::unique_ptr<DaemonProcess> daemon;
  std::string address() const { return "unix:" + (directory / "kvmill.sock"); }
};

// "a" and "b", of all tests of the program.
struct Nodes {
  EtcdProcess etcd;
  std::map<std::string, Node> nodes;
};
Nodes& nodes() {
  static Nodes the;
  return the;
}

class TicketCApiTest : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    ASSERT_TRUE(nodes().etcd.Start());
    for (const std::string id : {"a", "b"}) {
      Node& node = nodes().nodes[id];
      node.daemon = std::make_unique<DaemonProcess>(
          DaemonBinary(),
          std::vector<std::string>{"--socket", node.directory / "kvmill.sock", "--host-bytes",
                                   "64MiB", "--device", "host", "--cluster",
                                   absl::StrCat("etcd://", nodes().etcd.address().ToString()),
                                   "--listen", "127.0.0.1:0", "--insecure", "--node-id", id,
                                   "--lease-ttl", "60s", "--ucx", "127.0.0.1"});
      ASSERT_FALSE(node.daemon->WaitReady().is_null()) << node.daemon->standard_error();
    }
  }
  static void TearDownTestSuite() { nodes().nodes.clear(); }

  void SetUp() override {
    ASSERT_EQ(kvmill_queue_create(&queue_), KVMILL_OK);
    a_ = Connect("a");
    b_ = Connect("b");
    ns_a_ = Open(a_);
    ns_b_ = Open(b_);
    for (int i = 0; i < 3000 && !KnowEachOther(); ++i) usleep(20'000);
  }
  void TearDown() override {
    for (kvmill_client* client : {a_, b_}) EXPECT_EQ(kvmill_client_destroy(client), KVMILL_OK);
    for (kvmill_namespace* ns : {ns_a_, ns_b_}) kvmill_namespace_free(ns);
    EXPECT_EQ(kvmill_queue_destroy(queue_), KVMILL_OK) << kvmill_last_error();
  }
  static kvmill_client* Connect(const std::string& node) {
    auto options = Init<kvmill_client_options>();
    const std::string address = nodes().nodes.at(node).address();
    options.address = address.c_str();
    options.timeout_ms = 60'000;
    kvmill_client* client = nullptr;
    EXPECT_EQ(kvmill_client_create(&options, &client), KVMILL_OK) << kvmill_last_error();
    return client;
  }
  kvmill_namespace* Open(kvmill_client* client) {
    const std::string name = ::testing::UnitTest::GetInstance()->current_test_info()->name();
    const std::uint16_t layers[] = {0, 1};
    auto group = Init<kvmill_layer_group>();
    group.layers = layers;
    group.layer_count = 2;
    group.kv_heads = SmallBlock::kHeads;
    group.head_dim = SmallBlock::kHeadDim;
    auto spec = Init<kvmill_namespace_spec>();
    spec.groups = &group;
    spec.group_count = 1;
    spec.model = "tiny";
    spec.revision = name.c_str();
    spec.source_dtype = KVMILL_BFLOAT16;
    spec.block_tokens = SmallBlock::kTokens;
    kvmill_namespace* ns = nullptr;
    const Outcome opened =
        Finish(kvmill_open_namespace(client, name.c_str(), &spec, nullptr, queue_, 1));
    EXPECT_EQ(kvmill_result_namespace(opened.result.get(), &ns), KVMILL_OK) << opened.message();
    return ns;
  }
  // The next event.
  Outcome Next() {
    Outcome outcome;
    outcome.event = Init<kvmill_event>();
    EXPECT_EQ(kvmill_queue_next(queue_, 120'000, &outcome.event), KVMILL_OK) << kvmill_last_error();
    outcome.result = {outcome.event.result, &kvmill_result_free};
    return outcome;
  }
  Outcome Finish(kvmill_code started) {
    EXPECT_EQ(started, KVMILL_OK) << kvmill_last_error();
    return started == KVMILL_OK ? Next() : Outcome();
  }
  static kvmill_key Key(const std::string& key) { return {key.data(), key.size()}; }
  static std::vector<kvmill_promised_block> Promised() {
    std::vector<kvmill_promised_block> blocks;
    for (std::uint32_t b = 0; b < kKeys.size(); ++b) {
      auto block = Init<kvmill_promised_block>();
      block.key = Key(kKeys[b]);
      if (b > 0) block.parent = Key(kKeys[b - 1]);
      block.token_count = b + 1 < kKeys.size() ? SmallBlock::kTokens : kTailTokens;
      block.block_index = b;
      blocks.push_back(block);
    }
    return blocks;
  }
  Outcome Create(const kvmill_ticket_options* options = nullptr) {
    return CreateAt(a_, ns_a_, options);
  }
  Outcome CreateAt(kvmill_client* client, kvmill_namespace* ns,
                   const kvmill_ticket_options* options) {
    const auto blocks = Promised();
    return Finish(kvmill_create_ticket(client, ns, blocks.data(), blocks.size(), options, nullptr,
                                       queue_, 2));
  }
  // Valid as long as the outcome.
  static kvmill_ticket TicketOf(const Outcome& created) {
    EXPECT_EQ(created.event.code, KVMILL_OK) << created.message();
    kvmill_ticket ticket = {};
    EXPECT_EQ(kvmill_result_ticket(created.result.get(), &ticket), KVMILL_OK);
    EXPECT_GT(ticket.bytes, 50u);
    return ticket;
  }
  // Who knows all members says which there are.
  bool KnowEachOther() {
    auto options = Init<kvmill_ticket_options>();
    options.consumer = "nobody";
    const auto knows = [&](kvmill_client* client, kvmill_namespace* ns) {
      const Outcome created = CreateAt(client, ns, &options);
      if (created.event.code != KVMILL_OK)
        return created.message().find("a, b") != std::string::npos;
      Finish(kvmill_revoke_ticket(client, TicketOf(created), nullptr, queue_, 3));
      return false;
    };
    return knows(a_, ns_a_) && knows(b_, ns_b_);
  }
  void Put(std::uint32_t b) {
    const SmallBlock values(b + 1);
    std::vector<kvmill_store_layer> layers;
    for (std::uint32_t l = 0; l < SmallBlock::kLayers; ++l) {
      auto layer = Init<kvmill_store_layer>();
      for (const bool value : {false, true}) {
        kvmill_kv& kv = value ? layer.v : layer.k;
        kv.data = values.values[2 * l + (value ? 1 : 0)].data();
        kv.head_stride_bytes = 2 * SmallBlock::kHeadDim;
        kv.token_stride_bytes = kv.head_stride_bytes * SmallBlock::kHeads;
      }
      layers.push_back(layer);
    }
    const kvmill_promised_block promised = Promised()[b];
    auto block = Init<kvmill_store_block>();
    block.key = promised.key;
    block.parent = promised.parent;
    block.token_count = promised.token_count;
    block.block_index = b;
    block.layers = layers.data();
    block.layer_count = layers.size();
    EXPECT_EQ(kvmill_store(a_, ns_a_, &block, 1, nullptr, nullptr, put_queue_.queue, 4), KVMILL_OK);
    auto event = Init<kvmill_event>();
    ASSERT_EQ(kvmill_queue_next(put_queue_.queue, 120'000, &event), KVMILL_OK);
    EXPECT_EQ(event.code, KVMILL_OK) << kvmill_result_message(event.result);
    kvmill_result_free(event.result);
  }
  void StartRedeem(kvmill_ticket ticket, std::uint32_t updates = 1, std::uint64_t timeout_ms = 0) {
    auto options = Init<kvmill_redeem_options>();
    options.updates = updates;
    auto call = Init<kvmill_call_options>();
    call.timeout_ms = timeout_ms;
    ASSERT_EQ(kvmill_redeem_ticket(b_, ns_b_, ticket, &options, &call, queue_, 77), KVMILL_OK)
        << kvmill_last_error();
  }
  static kvmill_redeem_result RedeemOf(const Outcome& outcome) {
    auto redeem = Init<kvmill_redeem_result>();
    EXPECT_EQ(kvmill_result_redeem(outcome.result.get(), &redeem), KVMILL_OK)
        << kvmill_last_error();
    return redeem;
  }
  static kvmill_redeemed_block BlockOf(const Outcome& outcome, std::size_t index) {
    auto block = Init<kvmill_redeemed_block>();
    EXPECT_EQ(kvmill_result_redeemed_block(outcome.result.get(), index, &block), KVMILL_OK)
        << kvmill_last_error();
    return block;
  }

  struct OwnQueue {  // Of stores, which go on while redeems have events.
    OwnQueue() { EXPECT_EQ(kvmill_queue_create(&queue), KVMILL_OK); }
    ~OwnQueue() { EXPECT_EQ(kvmill_queue_destroy(queue), KVMILL_OK); }
    kvmill_queue* queue = nullptr;
  };
  OwnQueue put_queue_;
  kvmill_queue* queue_ = nullptr;
  kvmill_client* a_ = nullptr;
  kvmill_client* b_ = nullptr;
  kvmill_namespace* ns_a_ = nullptr;
  kvmill_namespace* ns_b_ = nullptr;
};

TEST_F(TicketCApiTest, BlocksComeWithUpdatesAndEndWithOneEvent) {
  const Outcome created = Create();
  StartRedeem(TicketOf(created));
  Outcome outcome = Next();
  ASSERT_EQ(outcome.event.operation, static_cast<kvmill_operation>(KVMILL_REDEEM_UPDATE));
  EXPECT_EQ(outcome.event.tag, 77u);
  kvmill_redeem_result redeem = RedeemOf(outcome);
  EXPECT_EQ(redeem.block_count, kKeys.size());
  EXPECT_EQ(redeem.changed_count, kKeys.size()) << "at first all of them";
  EXPECT_EQ(BlockOf(outcome, 0).fate, static_cast<std::uint32_t>(KVMILL_FATE_OPEN));
  EXPECT_EQ(kvmill_queue_running(queue_), 1u);

  std::map<std::uint32_t, kvmill_redeemed_block> last;
  for (std::uint32_t b = 0; b < kKeys.size(); ++b) {
    Put(b);
    // Updates, until it is sealed: each is about blocks that changed. With the last one the redeem
    // may end, and its event comes behind.
    bool sealed = false;
    while (!sealed) {
      outcome = Next();
      ASSERT_EQ(outcome.event.operation, static_cast<kvmill_operation>(KVMILL_REDEEM_UPDATE));
      redeem = RedeemOf(outcome);
      ASSERT_GT(redeem.changed_count, 0u);
      for (std::size_t i = 0; i < redeem.changed_count; ++i) {
        const kvmill_redeemed_block block = BlockOf(outcome, redeem.changed[i]);
        EXPECT_EQ(block.block_index, b);
        EXPECT_TRUE(last.count(b) == 0 || last[b].fate != block.fate ||
                    last[b].layers_here != block.layers_here);
        last[b] = block;
        sealed = block.fate == KVMILL_FATE_SEALED;
      }
    }
  }
  outcome = Next();
  EXPECT_EQ(outcome.event.operation, static_cast<kvmill_operation>(KVMILL_REDEEM_TICKET));
  EXPECT_EQ(outcome.event.code, KVMILL_OK) << outcome.message();
  EXPECT_EQ(outcome.event.tag, 77u);
  redeem = RedeemOf(outcome);
  EXPECT_EQ(redeem.block_count, kKeys.size());
  EXPECT_EQ(redeem.missed, 0u);
  EXPECT_EQ(redeem.changed, nullptr);
  std::vector<kvmill_key> keys;
  for (std::size_t b = 0; b < kKeys.size(); ++b) {
    const kvmill_redeemed_block block = BlockOf(outcome, b);
    EXPECT_EQ(block.layers_here, 2u);
    EXPECT_EQ(block.layer_count, 2u);
    ASSERT_EQ(block.layer_word_count, 1u);
    EXPECT_EQ(block.layer_words[0], 3u);
    EXPECT_EQ(block.miss, static_cast<std::uint32_t>(KVMILL_MISS_NONE));
    keys.push_back(block.key);
  }
  std::uint8_t tail[32];
  ASSERT_EQ(kvmill_tail_key(Key(kKeys[1]), kTailTokens, Key(kKeys[2]), tail), KVMILL_OK);
  EXPECT_EQ(std::string(static_cast<const char*>(keys[2].data), keys[2].bytes),
            std::string(reinterpret_cast<const char*>(tail), sizeof(tail)));
  const Outcome touched =
      Finish(kvmill_touch(b_, ns_b_, keys.data(), keys.size(), nullptr, queue_, 5));
  std::uint64_t there = 0;
  EXPECT_EQ(kvmill_result_count(touched.result.get(), &there), KVMILL_OK);
  EXPECT_EQ(there, keys.size()) << "the keys are those of the store";
}

// Who does not take events has one, with the latest state; and a redeem without updates none.
TEST_F(TicketCApiTest, UpdatesThatNobodyTakesBecomeOne) {
  const Outcome created = Create();
  StartRedeem(TicketOf(created), 0);
  StartRedeem(TicketOf(created));
  for (std::uint32_t b = 0; b < kKeys.size(); ++b) Put(b);
  ASSERT_EQ(kvmill_queue_drain(queue_, 120'000), KVMILL_OK) << kvmill_last_error();
  pollfd readable = {kvmill_queue_fd(queue_), POLLIN, 0};
  EXPECT_EQ(poll(&readable, 1, 0), 1);
  std::multiset<kvmill_operation> operations;
  for (int i = 0; i < 3; ++i) {
    const Outcome outcome = Next();
    operations.insert(outcome.event.operation);
    if (outcome.event.operation != KVMILL_REDEEM_UPDATE) continue;
    EXPECT_EQ(RedeemOf(outcome).changed_count, kKeys.size());
    EXPECT_EQ(BlockOf(outcome, 2).fate, static_cast<std::uint32_t>(KVMILL_FATE_SEALED));
  }
  EXPECT_EQ(operations, (std::multiset<kvmill_operation>{KVMILL_REDEEM_TICKET, KVMILL_REDEEM_TICKET,
                                                         KVMILL_REDEEM_UPDATE}));
  EXPECT_EQ(poll(&readable, 1, 0), 0) << "there was one update";
}

TEST_F(TicketCApiTest, ARedeemThatFailsHasAResultToo) {
  const Outcome created = Create();
  StartRedeem(TicketOf(created));
  Put(0);
  Outcome outcome;
  do {
    outcome = Next();
  } while (BlockOf(outcome, 0).fate != KVMILL_FATE_SEALED);
  EXPECT_EQ(kvmill_cancel_redeem(b_, TicketOf(created)), KVMILL_OK);
  do {
    outcome = Next();
  } while (outcome.event.operation == KVMILL_REDEEM_UPDATE);
  EXPECT_EQ(outcome.event.code, KVMILL_CANCELLED);
  EXPECT_EQ(RedeemOf(outcome).missed, kKeys.size() - 1);
  EXPECT_EQ(BlockOf(outcome, 0).fate, static_cast<std::uint32_t>(KVMILL_FATE_SEALED));
  const kvmill_redeemed_block missed = BlockOf(outcome, 1);
  EXPECT_EQ(missed.fate, static_cast<std::uint32_t>(KVMILL_FATE_MISSED));
  EXPECT_EQ(missed.miss, static_cast<std::uint32_t>(KVMILL_MISS_CALL_ENDED));
  EXPECT_EQ(missed.layers_here, 0u);
  EXPECT_STREQ(kvmill_miss_name(missed.miss), "call ended");

  const Outcome another = Create();
  StartRedeem(TicketOf(another));
  EXPECT_EQ(Next().event.operation, static_cast<kvmill_operation>(KVMILL_REDEEM_UPDATE));
  EXPECT_EQ(kvmill_revoke_ticket(a_, TicketOf(another), nullptr, put_queue_.queue, 6), KVMILL_OK);
  do {
    outcome = Next();
  } while (outcome.event.operation == KVMILL_REDEEM_UPDATE);
  // Who asks a moment after the end hears only that it has ended.
  const bool in_time = outcome.event.code == KVMILL_ABORTED;
  EXPECT_TRUE(in_time || outcome.event.code == KVMILL_NOT_FOUND) << outcome.message();
  EXPECT_EQ(BlockOf(outcome, 1).miss,
            static_cast<std::uint32_t>(in_time ? KVMILL_MISS_REVOKED : KVMILL_MISS_ENDED));
  auto event = Init<kvmill_event>();
  ASSERT_EQ(kvmill_queue_next(put_queue_.queue, 120'000, &event), KVMILL_OK);
  EXPECT_EQ(event.code, KVMILL_OK);
  kvmill_result_free(event.result);
  // It has ended.
  EXPECT_EQ(Finish(kvmill_revoke_ticket(a_, TicketOf(another), nullptr, queue_, 6)).event.code,
            KVMILL_NOT_FOUND);
  // The client's end is a redeem's, too.
  const Outcome last = Create();
  StartRedeem(TicketOf(last));
  EXPECT_EQ(Next().event.operation, static_cast<kvmill_operation>(KVMILL_REDEEM_UPDATE));
  EXPECT_EQ(kvmill_client_destroy(std::exchange(b_, nullptr)), KVMILL_OK);
  do {  // What changed before.
    outcome = Next();
  } while (outcome.event.operation == KVMILL_REDEEM_UPDATE);
  EXPECT_EQ(outcome.event.code, KVMILL_CANCELLED);
}

TEST_F(TicketCApiTest, TheCodesOfTicketsThatCannotBeRedeemed) {
  const auto redeem = [&](kvmill_ticket ticket, std::uint64_t timeout_ms = 0) {
    StartRedeem(ticket, 0, timeout_ms);
    const Outcome outcome = Next();
    EXPECT_EQ(RedeemOf(outcome).block_count, 0u);
    return outcome.event.code;
  };
  EXPECT_EQ(redeem({"nonsense", 8}), KVMILL_INVALID_ARGUMENT);
  auto options = Init<kvmill_ticket_options>();
  options.consumer = "a";
  const Outcome for_a = Create(&options);
  EXPECT_EQ(redeem(TicketOf(for_a)), KVMILL_PERMISSION_DENIED);
  EXPECT_EQ(Finish(kvmill_revoke_ticket(b_, TicketOf(for_a), nullptr, queue_, 6)).event.code,
            KVMILL_FAILED_PRECONDITION);
  EXPECT_EQ(Finish(kvmill_revoke_ticket(a_, TicketOf(for_a), nullptr, queue_, 6)).event.code,
            KVMILL_OK);
  const Outcome over = Create();
  EXPECT_EQ(Finish(kvmill_revoke_ticket(a_, TicketOf(over), nullptr, queue_, 6)).event.code,
            KVMILL_OK);
  EXPECT_EQ(redeem(TicketOf(over)), KVMILL_NOT_FOUND);
}

TEST_F(TicketCApiTest, BadArgumentsAreNamedAndChangeNothing) {
  auto blocks = Promised();
  const auto create = [&](const kvmill_ticket_options* options) {
    const kvmill_code code =
        kvmill_create_ticket(a_, ns_a_, blocks.data(), blocks.size(), options, nullptr, queue_, 2);
    EXPECT_EQ(code, KVMILL_INVALID_ARGUMENT);
    return std::string(kvmill_last_error());
  };
  auto options = Init<kvmill_ticket_options>();
  options.ttl_ms = 600'001;
  EXPECT_EQ(create(&options), "ttl_ms 600001, at most 600000");
  KVMILL_INIT(&options);
  options.life_ms = 3'600'001;
  EXPECT_EQ(create(&options), "life_ms 3600001, at most 3600000");
  KVMILL_INIT(&options);
  const std::string long_name(65, 'n');
  options.consumer = long_name.c_str();
  EXPECT_EQ(create(&options), "consumer is longer than 64 bytes");
  blocks[1].key.bytes = 65;
  EXPECT_NE(create(nullptr).find("block 1: key"), std::string::npos);
  blocks[1].key.bytes = 0;
  EXPECT_EQ(create(nullptr), "block 1: key is empty");
  blocks = Promised();
  blocks[2].struct_bytes = 8;
  EXPECT_NE(create(nullptr).find("blocks 2"), std::string::npos);
  EXPECT_EQ(kvmill_create_ticket(a_, nullptr, nullptr, 0, nullptr, nullptr, queue_, 2),
            KVMILL_INVALID_ARGUMENT);
  EXPECT_EQ(kvmill_create_ticket(nullptr, ns_a_, nullptr, 0, nullptr, nullptr, queue_, 2),
            KVMILL_INVALID_ARGUMENT);
  // What only the daemon knows comes as an event.
  KVMILL_INIT(&options);
  options.consumer = "nobody";
  const Outcome unknown = Create(&options);
  EXPECT_EQ(unknown.event.code, KVMILL_INVALID_ARGUMENT);
  EXPECT_EQ(unknown.message(),
            "consumer \"nobody\" of a ticket is no node of the cluster: there are a, b");
  kvmill_ticket ticket = {};
  EXPECT_EQ(kvmill_result_ticket(unknown.result.get(), &ticket), KVMILL_FAILED_PRECONDITION);
  auto redeem = Init<kvmill_redeem_result>();
  EXPECT_EQ(kvmill_result_redeem(unknown.result.get(), &redeem), KVMILL_FAILED_PRECONDITION);

  const std::string long_ticket(4097, 't');
  for (const kvmill_ticket& bad : {kvmill_ticket{nullptr, 0}, kvmill_ticket{nullptr, 8},
                                   kvmill_ticket{long_ticket.data(), long_ticket.size()}}) {
    EXPECT_EQ(kvmill_redeem_ticket(b_, ns_b_, bad, nullptr, nullptr, queue_, 1),
              KVMILL_INVALID_ARGUMENT);
    EXPECT_EQ(kvmill_revoke_ticket(a_, bad, nullptr, queue_, 1), KVMILL_INVALID_ARGUMENT);
    EXPECT_EQ(kvmill_cancel_redeem(b_, bad), KVMILL_INVALID_ARGUMENT);
  }
  EXPECT_EQ(kvmill_cancel_redeem(nullptr, {"t", 1}), KVMILL_INVALID_ARGUMENT);
  EXPECT_EQ(kvmill_cancel_redeem(b_, {"t", 1}), KVMILL_OK) << "nothing is to be cancelled";
  const Outcome created = Create();
  StartRedeem(TicketOf(created));
  const Outcome update = Next();
  auto block = Init<kvmill_redeemed_block>();
  EXPECT_EQ(kvmill_result_redeemed_block(update.result.get(), kKeys.size(), &block),
            KVMILL_OUT_OF_RANGE);
  EXPECT_EQ(kvmill_result_redeem(update.result.get(), nullptr), KVMILL_INVALID_ARGUMENT);
  EXPECT_EQ(kvmill_result_redeem(nullptr, &redeem), KVMILL_INVALID_ARGUMENT);
  EXPECT_EQ(kvmill_cancel_redeem(b_, TicketOf(created)), KVMILL_OK);
  ASSERT_EQ(kvmill_queue_drain(queue_, 120'000), KVMILL_OK);
  EXPECT_STREQ(kvmill_miss_name(1), "given up");
  EXPECT_STREQ(kvmill_miss_name(10'000), "unknown");
}

}  // namespace
}  // namespace kvmill::testing
