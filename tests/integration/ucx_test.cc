// The data plane of a real daemon: stores and fetches over UCX, byte by byte what travels inline,
// who may connect, and what is left when a process dies in the middle.
#include <gmock/gmock.h>
#include <grpcpp/create_channel.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <future>
#include <map>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "client/kv_sink.h"
#include "client/transport/ucx_transport.h"
#include "kernels/float16.h"
#include "kvmill/v1/data.grpc.pb.h"
#include "tests/integration/ucx_fixture.h"

namespace kvmill::testing {
namespace {

using ::testing::HasSubstr;
constexpr uid_t kSomebody = 65533;

// A sink with memory of its own for every page.
class PageKeeper : public FetchSink {
 public:
  absl::Span<std::byte> PageMemory(const PageId& id, std::size_t page_bytes) override {
    std::vector<std::byte>& page = pages[{id.block, id.group, id.layer_index}];
    page.resize(page_bytes);
    return absl::MakeSpan(page);
  }
  absl::Status OnPage(const PageId& id, const PageView& page) override {
    const std::vector<std::byte>& kept = pages[{id.block, id.group, id.layer_index}];
    if (page.header().page_bytes != kept.size()) return absl::InternalError("another page");
    ++whole;
    return absl::OkStatus();
  }
  std::map<std::tuple<std::uint32_t, int, std::uint32_t>, std::vector<std::byte>> pages;
  int whole = 0;
};

class UcxTest : public UcxDaemonTest {
 protected:
  // Two layer groups, sink blocks, and heads that no tile holds.
  static NamespaceSpec MixedSpec() {
    NamespaceSpec spec = SmallSpec();
    spec.sink_blocks = 1;
    spec.groups[0].kv_heads = 3;
    LayerGroup window;
    window.attention = AttentionKind::kWindow;
    window.window_tokens = 128;
    window.layers = {2, 3, 4};
    window.kv_heads = 1;
    window.head_dim = 128;
    spec.groups.push_back(window);
    return spec;
  }
  // All 60000, whose scales overflow fp16 once rotated.
  static void MakeUntileable(Sequence* sequence, std::size_t layer, std::uint32_t token_begin,
                             std::uint32_t head) {
    for (std::uint32_t token = token_begin; token < token_begin + 64; ++token) {
      for (std::uint32_t channel = 0; channel < 64; ++channel) {
        sequence->At(layer, false, token, head, channel) = FromFloat(60000, DType::kFloat16);
        sequence->At(layer, true, token, head, channel) = FromFloat(60000, DType::kFloat16);
      }
    }
  }
};

// What a peer without the client library can do.
class RawPeer {
 public:
  explicit RawPeer(const std::string& address) : stub_(v1::Data::NewStub(ChannelTo(address))) {
    self_.id = NodeIdentity::IdOf("raw peer");
    TransportOptions options;
    options.self = self_;
    absl::StatusOr<std::unique_ptr<Transport>> made = MakeUcxTransport(options, {});
    EXPECT_TRUE(made.ok()) << made.status();
    if (made.ok()) transport_ = *std::move(made);
  }

  grpc::Status Ask(absl::string_view node_id, Offer* offer) {
    grpc::ClientContext context;
    v1::ConnectRequest request;
    request.set_node_id(std::string(node_id));
    v1::ConnectReply reply;
    const grpc::Status status = stub_->Connect(&context, request, &reply);
    if (!status.ok()) return status;
    offer->addresses.assign(reply.addresses().begin(), reply.addresses().end());
    std::memcpy(offer->node.id.data(), reply.node_id().data(), 16);
    offer->node.incarnation = reply.incarnation();
    std::memcpy(offer->key_id.data(), reply.key_id().data(), 16);
    std::memcpy(offer->key.data(), reply.key().data(), 32);
    return status;
  }
  std::string own_id() const {
    return std::string(reinterpret_cast<const char*>(self_.id.data()), self_.id.size());
  }
  absl::StatusOr<ConnectionPtr> Connect(const Offer& offer) {
    auto result = std::make_shared<std::promise<absl::StatusOr<ConnectionPtr>>>();
    transport_->Connect(
        offer, {.done = [result](absl::StatusOr<ConnectionPtr> c) { result->set_value(c); }});
    return result->get_future().get();
  }
  absl::StatusOr<Response> Run(const ConnectionPtr& connection, absl::string_view header,
                               absl::Span<const std::byte> payload = {}) {
    auto result = std::make_shared<std::promise<absl::StatusOr<Response>>>();
    Call call;
    const auto* const bytes = reinterpret_cast<const std::byte*>(header.data());
    call.header.assign(bytes, bytes + header.size());
    if (!payload.empty()) call.payload = {payload};
    call.timeout_nanos = 20'000'000'000;
    call.done = [result](absl::StatusOr<Response> r) { result->set_value(std::move(r)); };
    connection->Start(std::move(call));
    return result->get_future().get();
  }

 private:
  static std::shared_ptr<grpc::Channel> ChannelTo(const std::string& address) {
    return grpc::CreateChannel(address, grpc::InsecureChannelCredentials());
  }
  const std::unique_ptr<v1::Data::Stub> stub_;
  NodeIdentity self_;
  std::unique_ptr<Transport> transport_;
};

TEST_F(UcxTest, RecordsAreThoseOfTheInlinePath) {
  for (const bool plaintext : {false, true}) {
    SCOPED_TRACE(plaintext ? "plaintext" : "encrypted");
    if (plaintext) {
      StartUcx({"--data-plane-plaintext"});
    } else {
      StartUcx();
    }
    EXPECT_TRUE(absl::StartsWith(ready_["ucx"].get<std::string>(), "127.0.0.1:"));
    const NamespaceSpec spec = MixedSpec();
    const ClientNamespace ns = Open("n", spec);
    Sequence sequence(spec, 64 * 5 + 17, 1);
    MakeUntileable(&sequence, 1, 128, 2);
    const StoreResult want = Put(ns, "inline", sequence);
    ASSERT_EQ(want.blocks_stored, 6u);
    EXPECT_EQ(want.raw_heads, 2u * 9u + 1u);  // The sink block, the tail, and that head.

    std::string transport;
    struct Way {
      const char* name;
      DataPath path;
      EncodeIn encode_in;
    };
    for (const Way& way : {Way{"ucx, client", DataPath::kUcx, EncodeIn::kClient},
                           Way{"ucx, daemon", DataPath::kUcx, EncodeIn::kDaemon},
                           Way{"inline, client", DataPath::kInline, EncodeIn::kClient}}) {
      const std::string name = way.name;
      SCOPED_TRACE(name);
      const auto client = UcxClient(
          {.path = way.path, .data_plane_plaintext = plaintext, .encode_in = way.encode_in});
      const std::vector<StoreBlock> blocks = sequence.Blocks(name);
      const auto stored = client->Store(ns, blocks, {});
      ASSERT_TRUE(stored.ok()) << stored.status();
      for (const StoreBlockResult& block : stored->blocks) {
        EXPECT_TRUE(block.status.ok()) << block.status;
        EXPECT_EQ(block.outcome, StoreOutcome::kStored);
      }
      EXPECT_EQ(stored->blocks_stored, 6u);
      EXPECT_EQ(stored->raw_bytes, want.raw_bytes);
      EXPECT_EQ(stored->stored_bytes, want.stored_bytes);
      EXPECT_EQ(stored->tile_bytes, want.tile_bytes);
      EXPECT_EQ(stored->tile_raw_bytes, want.tile_raw_bytes);
      EXPECT_EQ(stored->raw_heads, want.raw_heads);
      if (way.path == DataPath::kUcx) {
        transport = client->ucx_transport();
        EXPECT_THAT(transport, HasSubstr("tcp"));
      }
      const auto again = client->Store(ns, blocks, {});
      ASSERT_TRUE(again.ok()) << again.status();
      EXPECT_EQ(again->blocks_existing, 6u);

      // What was stored on one path is fetched on both.
      std::vector<BlockKey> keys = KeysOf(name, 5);
      std::vector<BlockKey> inline_keys = KeysOf("inline", 5);
      keys.push_back(TailKey(KeyOf(name, 4), 17, KeyOf(name, 5)));
      inline_keys.push_back(TailKey(KeyOf("inline", 4), 17, KeyOf("inline", 5)));
      PageCollector inline_pages, ucx_pages, crossed_pages;
      ASSERT_TRUE(client_->Fetch(ns, inline_keys, inline_pages).ok());
      const auto fetched = client->Fetch(ns, keys, ucx_pages);
      ASSERT_TRUE(fetched.ok()) << fetched.status();
      for (const FetchBlockResult& block : fetched->blocks) {
        EXPECT_TRUE(block.status.ok()) << block.status;
        EXPECT_EQ(block.tier, Tier::kHost);
      }
      EXPECT_EQ(fetched->blocks[5].token_count, 17u);
      ASSERT_TRUE(client_->Fetch(ns, keys, crossed_pages).ok());
      EXPECT_EQ(ucx_pages.pages.size(), 6u * 5u);
      EXPECT_TRUE(ucx_pages.pages == inline_pages.pages);
      EXPECT_TRUE(crossed_pages.pages == inline_pages.pages);
      EXPECT_EQ(fetched->page_bytes, want.stored_bytes);
    }
    const std::string path = absl::StrCat("path=\"ucx\",transport=\"", transport, "\"}");
    EXPECT_GT(Metric(absl::StrCat("bytes_total{direction=\"in\",", path)), 0);
    EXPECT_EQ(Metric(absl::StrCat("bytes_total{direction=\"out\",", path)),
              2.0 * static_cast<double>(want.stored_bytes));
    EXPECT_EQ(Metric("fetched_blocks_total{path=\"ucx\",tier=\"host\",result=\"hit\"}"), 2 * 12);
    EXPECT_GT(Metric("stage_duration_seconds_count{op=\"store\",stage=\"network\"}"), 0);
    EXPECT_GT(Metric("stage_duration_seconds_count{op=\"fetch\",stage=\"network\"}"), 0);
    ExpectIdle(0);
    daemon_.reset();  // Another one takes its socket.
  }
}

// Which encoder makes a block does not depend on the way that it takes, and is closer.
TEST_F(UcxTest, ClientsEncodeAsTheirDaemonDoes) {
  const NamespaceSpec spec = SmallSpec();
  Sequence sequence(spec, 64 * 4, 1);
  std::map<std::string, std::map<std::tuple<std::uint32_t, int, std::uint32_t>, std::string>> pages;
  std::map<std::string, double> errors;
  for (const std::string algorithm : {"kvarn", "refined"}) {
    SCOPED_TRACE(algorithm);
    StartUcx({"--encode-algorithm", algorithm});
    const ClientNamespace ns = Open("n", spec);
    EXPECT_EQ(ns.algorithm == Algorithm::kRefined, algorithm == "refined");
    Put(ns, "local", sequence);
    for (const EncodeIn encode_in : {EncodeIn::kClient, EncodeIn::kDaemon}) {
      const auto client = UcxClient({.path = DataPath::kUcx, .encode_in = encode_in});
      // As what it is told itself, not what the local client was.
      const auto own = client->FindNamespace("n");
      ASSERT_TRUE(own.ok()) << own.status();
      const std::string name = encode_in == EncodeIn::kClient ? "client" : "daemon";
      const auto stored = client->Store(*own, sequence.Blocks(name), {});
      ASSERT_TRUE(stored.ok()) << stored.status();
      EXPECT_EQ(stored->blocks_stored, 4u);
    }
    for (const char* name : {"local", "client", "daemon"}) {
      PageCollector sink;
      ASSERT_TRUE(client_->Fetch(ns, KeysOf(name, 4), sink).ok());
      EXPECT_EQ(sink.pages.size(), 4u * 2u) << name;
      if (!pages.contains(algorithm)) pages[algorithm] = sink.pages;
      EXPECT_TRUE(sink.pages == pages[algorithm]) << name;
    }
    errors[algorithm] = sequence.RelativeError(Get(ns, KeysOf("client", 4)), 0, 64 * 4);
    daemon_.reset();
  }
  EXPECT_FALSE(pages["kvarn"] == pages["refined"]);
  EXPECT_LT(errors["refined"], 0.9 * errors["kvarn"]);
  EXPECT_GT(errors["refined"], 0);
}

TEST_F(UcxTest, ContinuationsOfOneParentKeepTheirTailsApart) {
  StartUcx({"--data-dir", directory_ / "data", "--disk-bytes", "1GiB"});
  const NamespaceSpec spec = SmallSpec();
  const ClientNamespace ns = Open("n", spec);
  const auto client = UcxClient();
  Sequence one(spec, 64 + 9, 1), two(spec, 64 + 9, 2);
  std::vector<StoreBlock> blocks = one.Blocks("one");
  blocks.push_back(two.Blocks("two")[1]);
  blocks[2].parent = KeyOf("one", 0);
  const auto stored = client->Store(ns, blocks, {.wait_durable = true});
  ASSERT_TRUE(stored.ok()) << stored.status();
  EXPECT_EQ(stored->blocks_stored, 3u);
  std::vector<BlockKey> keys;
  for (const char* name : {"one", "two"}) {
    const auto found = client->Lookup(ns, KeysOf("one", 1), {{KeyOf(name, 1), 9, 1}});
    ASSERT_TRUE(found.ok()) << found.status();
    ASSERT_EQ(found->tail_tokens, 9u);
    keys.push_back(found->tail_key);
  }
  PageCollector pages, inline_pages;
  ASSERT_TRUE(client->Fetch(ns, keys, pages).ok());
  ASSERT_TRUE(client_->Fetch(ns, keys, inline_pages).ok());
  EXPECT_EQ(pages.pages.size(), 2u * 2u);
  EXPECT_TRUE(pages.pages == inline_pages.pages);
  EXPECT_NE((pages.pages[{0, 0, 0}]), (pages.pages[{1, 0, 0}]));
  EXPECT_EQ(one.RelativeError(Get(ns, {keys[0]}), 64, 9), 0.0);
  EXPECT_EQ(two.RelativeError(Get(ns, {keys[1]}), 64, 9), 0.0);
}

TEST_F(UcxTest, PagesGoStraightToTheSinksMemoryAndMissesAreMisses) {
  StartUcx();
  const NamespaceSpec spec = SmallSpec();
  const ClientNamespace ns = Open("n", spec);
  Sequence sequence(spec, 64 * 300, 2);
  const auto client = UcxClient();
  ASSERT_TRUE(client->Store(ns, sequence.Blocks("s"), {}).ok());
  std::vector<BlockKey> keys = KeysOf("s", 300);
  keys[7] = KeyOf("absent", 7);
  keys[299] = KeyOf("absent", 299);
  PageKeeper keeper;
  PageCollector collector;
  const auto kept = client->Fetch(ns, keys, keeper);
  ASSERT_TRUE(kept.ok()) << kept.status();
  ASSERT_TRUE(client_->Fetch(ns, keys, collector).ok());
  EXPECT_EQ(keeper.whole, 298 * 2);
  for (std::size_t i = 0; i < keys.size(); ++i) {
    EXPECT_EQ(absl::IsNotFound(kept->blocks[i].status), i == 7 || i == 299)
        << i << ": " << kept->blocks[i].status;
  }
  for (const auto& [where, bytes] : collector.pages) {
    const auto page = PageView::Parse(keeper.pages.at(where));
    ASSERT_TRUE(page.ok()) << page.status();
    PageCollector parsed;
    ASSERT_TRUE(parsed.OnPage({}, *page).ok());
    EXPECT_TRUE(parsed.pages.begin()->second == bytes);
  }
  EXPECT_EQ(Metric("fetched_blocks_total{path=\"ucx\",tier=\"none\",result=\"miss\"}"), 2);
  PageCollector nothing;
  EXPECT_TRUE(client->Fetch(ns, {}, nothing).ok());
  EXPECT_TRUE(client->Store(ns, {}, {}).ok());
}

TEST_F(UcxTest, ABlockWithAValueThatIsNotFiniteFailsAlone) {
  StartUcx();
  const NamespaceSpec spec = SmallSpec();
  const ClientNamespace ns = Open("n", spec);
  Sequence sequence(spec, 64 * 3, 2);
  sequence.At(1, true, 64 + 5, 1, 7) = 0x7E00;  // NaN.
  int number = 0;
  for (const auto& [path, encode_in] :
       {std::pair(DataPath::kUcx, EncodeIn::kClient), std::pair(DataPath::kUcx, EncodeIn::kDaemon),
        std::pair(DataPath::kInline, EncodeIn::kClient)}) {
    const auto client = UcxClient({.path = path, .encode_in = encode_in});
    const std::string name = absl::StrCat("s", ++number);
    const auto stored = client->Store(ns, sequence.Blocks(name), {});
    ASSERT_TRUE(stored.ok()) << stored.status();
    EXPECT_EQ(stored->blocks_stored, 2u);
    EXPECT_EQ(stored->blocks_failed, 1u);
    EXPECT_EQ(stored->blocks[1].status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(stored->blocks[1].status.message()),
                HasSubstr("V of layer 1 head 1 token 5 channel 7"));
  }
}

TEST_F(UcxTest, TensorParallelRanksFillOneBlock) {
  StartUcx();
  const NamespaceSpec spec = SmallSpec();
  const ClientNamespace ns = Open("n", spec);
  Sequence sequence(spec, 64 * 2, 3);
  const auto client = UcxClient();
  std::vector<StoreBlock> blocks = sequence.Blocks("s");
  const auto first = client->Store(ns, blocks, {.head_begin = 0, .head_count = 1});
  ASSERT_TRUE(first.ok()) << first.status();
  EXPECT_EQ(first->blocks[0].outcome, StoreOutcome::kPartial);
  // Head 0 again, and head 1 from a view that begins there.
  const auto again = client->Store(ns, blocks, {.head_begin = 0, .head_count = 1});
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_EQ(again->blocks[1].outcome, StoreOutcome::kPartial);
  const auto whole = client->Store(ns, blocks, {});
  ASSERT_TRUE(whole.ok()) << whole.status();
  EXPECT_EQ(whole->blocks_stored, 2u);
}

TEST_F(UcxTest, DurableStoresWaitForTheDisk) {
  StartUcx({"--data-dir", directory_ / "data", "--disk-bytes", "1GiB"});
  const ClientNamespace ns = Open("n", SmallSpec());
  Sequence sequence(SmallSpec(), 64 * 4, 3);
  const auto client = UcxClient();
  const auto stored = client->Store(ns, sequence.Blocks("s"), {.wait_durable = true});
  ASSERT_TRUE(stored.ok()) << stored.status();
  Kill();
  StartUcx({"--data-dir", directory_ / "data", "--disk-bytes", "1GiB"});
  PageCollector pages;
  const auto fetched = UcxClient()->Fetch(ns, KeysOf("s", 4), pages);
  ASSERT_TRUE(fetched.ok()) << fetched.status();
  for (const FetchBlockResult& block : fetched->blocks) {
    EXPECT_TRUE(block.status.ok()) << block.status;
    EXPECT_EQ(block.tier, Tier::kDisk);
  }
  Kill();
  StartUcx();
  const ClientNamespace memory_only = Open("n", SmallSpec());
  EXPECT_EQ(
      UcxClient()->Store(memory_only, sequence.Blocks("s"), {.wait_durable = true}).status().code(),
      absl::StatusCode::kFailedPrecondition);
}

TEST_F(UcxTest, WithoutADataPlaneAutoTravelsInlineAndUcxFails) {
  Start({"--listen", "127.0.0.1:0", "--insecure"});
  EXPECT_TRUE(ready_["ucx"].is_null());
  const ClientNamespace ns = Open("n", SmallSpec());
  Sequence sequence(SmallSpec(), 64, 3);
  const auto refused = UcxClient()->Store(ns, sequence.Blocks("s"), {});
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(refused.status().message()), HasSubstr("--ucx"));
  const auto client = Connect(ready_["listen"]);
  EXPECT_TRUE(client->Store(ns, sequence.Blocks("s"), {}).ok());
  PageCollector pages;
  EXPECT_TRUE(client->Fetch(ns, KeysOf("s", 1), pages).ok());
  EXPECT_EQ(pages.pages.size(), 2u);
  EXPECT_EQ(client->ucx_transport(), "");
}

TEST_F(UcxTest, EncryptionMustBeTheSameOnBothSides) {
  StartUcx();
  const ClientNamespace ns = Open("n", SmallSpec());
  Sequence sequence(SmallSpec(), 64, 3);
  const auto refused =
      UcxClient({.data_plane_plaintext = true})->Store(ns, sequence.Blocks("s"), {});
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(refused.status().message()), HasSubstr("encrypts"));
  const auto client = Connect(ready_["listen"]);
  EXPECT_TRUE(client->Store(ns, sequence.Blocks("s"), {}).ok());
  EXPECT_THAT(client->ucx_transport(), HasSubstr("tcp"));
}

// There is no RDMA on loopback.
TEST_F(UcxTest, RdmaThatIsRequiredIsRefusedWithoutAndExpectedIsAWarning) {
  daemon_ = std::make_unique<DaemonProcess>(
      DaemonBinary(), std::vector<std::string>{"--socket", socket(), "--host-bytes", "64MiB",
                                               "--ucx", "127.0.0.1", "--rdma", "required"});
  EXPECT_EQ(daemon_->WaitExit().code, 1);
  EXPECT_THAT(daemon_->standard_error(),
              HasSubstr("--ucx 127.0.0.1: RDMA is required, and UCX has none here, only "));

  StartUcx({"--rdma", "expected"});
  EXPECT_THAT(daemon_->standard_error(), HasSubstr("warning transport: RDMA is expected, and UCX"));
  const ClientNamespace ns = Open("n", SmallSpec());
  Sequence sequence(SmallSpec(), 64, 3);
  const auto refused = UcxClient({.rdma = RdmaUse::kRequired})->Store(ns, sequence.Blocks("s"), {});
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(refused.status().message()), HasSubstr("RDMA is required"));
  EXPECT_TRUE(UcxClient({.rdma = RdmaUse::kExpected})->Store(ns, sequence.Blocks("s"), {}).ok());
  EXPECT_THAT(daemon_->standard_error(), HasSubstr("RDMA was expected, the connection to "));
  // Other ways are open to who did not want UCX alone.
  const auto client =
      Client::Create({.address = ready_["listen"].get<std::string>(), .rdma = RdmaUse::kRequired});
  ASSERT_TRUE(client.ok()) << client.status();
  PageCollector pages;
  const auto fetched = (*client)->Fetch(ns, KeysOf("s", 1), pages);
  ASSERT_TRUE(fetched.ok()) << fetched.status();
  EXPECT_EQ(fetched->transport, "grpc");
  EXPECT_EQ((*client)->ucx_transport(), "");
}

TEST_F(UcxTest, GoingOverGrpcBecauseOfEncryptionIsNotSilent) {
  StartUcx();
  const ClientNamespace ns = Open("n", SmallSpec());
  Sequence sequence(SmallSpec(), 128, 3);
  const auto client = Client::Create(
      {.address = ready_["listen"].get<std::string>(), .data_plane_plaintext = true});
  ASSERT_TRUE(client.ok()) << client.status();
  ::testing::internal::CaptureStderr();
  const auto first = (*client)->Store(ns, sequence.Blocks("s"), {});
  const auto second = (*client)->Store(ns, sequence.Blocks("t"), {});
  const std::string said = ::testing::internal::GetCapturedStderr();
  EXPECT_TRUE(first.ok() && second.ok());
  EXPECT_THAT(said, HasSubstr("warning data plane: the daemon encrypts"));
  EXPECT_EQ(said.find("warning"), said.rfind("warning")) << "once";
}

TEST_F(UcxTest, OffersAreGoodOnceForTheirNodeAndFew) {
  StartUcx();
  RawPeer peer(ready_["listen"]);
  Offer offer;
  EXPECT_EQ(peer.Ask("short", &offer).error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  ASSERT_TRUE(peer.Ask(peer.own_id(), &offer).ok());
  const auto connection = peer.Connect(offer);
  ASSERT_TRUE(connection.ok()) << connection.status();
  EXPECT_EQ(peer.Connect(offer).status().code(), absl::StatusCode::kUnauthenticated);
  Offer of_another;
  ASSERT_TRUE(peer.Ask(std::string(16, 'x'), &of_another).ok());
  EXPECT_EQ(peer.Connect(of_another).status().code(), absl::StatusCode::kUnauthenticated);
  Offer forged = offer;
  forged.key[0] ^= std::byte{1};
  EXPECT_EQ(peer.Connect(forged).status().code(), absl::StatusCode::kUnauthenticated);
  grpc::Status status;
  int more = 0;
  while ((status = peer.Ask(peer.own_id(), &offer)).ok()) ASSERT_LT(++more, 100);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_THAT(status.error_message(), HasSubstr("at most 16"));

  // A connection is no licence: what comes on it is checked.
  EXPECT_EQ(peer.Run(*connection, "\xff\xff\xff").status().code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(peer.Run(*connection, "").status().code(), absl::StatusCode::kInvalidArgument);
  v1::DataRequest request;
  request.mutable_fetch()->set_fingerprint(std::string(16, 'f'));
  request.mutable_fetch()->add_keys("k");
  EXPECT_EQ(peer.Run(*connection, request.SerializeAsString()).status().code(),
            absl::StatusCode::kNotFound);
  const ClientNamespace ns = Open("n", SmallSpec());
  const std::string fingerprint(reinterpret_cast<const char*>(ns.fingerprint.data()), 16);
  request.mutable_fetch()->set_fingerprint(fingerprint);
  request.mutable_fetch()->set_first_group(1);
  EXPECT_EQ(peer.Run(*connection, request.SerializeAsString()).status().code(),
            absl::StatusCode::kInvalidArgument);
  request.mutable_store()->set_fingerprint(fingerprint);
  v1::StoreChunk* chunk = request.mutable_store()->mutable_chunk();
  chunk->set_key("k");
  chunk->set_token_count(64);
  chunk->set_layer_count(2);
  chunk->set_head_count(2);
  const std::vector<std::byte> too_long((std::size_t{1} << 20) + 1);
  for (const std::size_t bytes : {std::size_t{1}, too_long.size()}) {
    const auto response = peer.Run(*connection, request.SerializeAsString(),
                                   absl::MakeConstSpan(too_long).first(bytes));
    ASSERT_TRUE(response.ok()) << response.status();
    v1::DataStoreReply reply;
    ASSERT_TRUE(
        reply.ParseFromArray(response->header.data(), static_cast<int>(response->header.size())));
    EXPECT_EQ(reply.result().outcome(), v1::STORE_FAILED);
    EXPECT_THAT(reply.result().status().message(),
                HasSubstr(bytes == 1 ? "want 65536" : "at most 1048576"));
  }
  ExpectIdle(1);
}

TEST_F(UcxTest, TenantsAreApartAsOverGrpc) {
  if (getuid() != 0) GTEST_SKIP() << "only root can be another user";
  StartUcx();
  LetOthersIn();
  const ClientNamespace ns = Open("n", SmallSpec());
  Sequence sequence(SmallSpec(), 64, 3);
  Put(ns, "s", sequence);
  const auto own = Probe({"--ucx", "store", "s", "2"}, kSomebody);
  EXPECT_EQ(own->ReadLine(), "stored 2");
  const auto fetched = Probe({"--ucx", "fetch", "s", "2"}, kSomebody);
  EXPECT_EQ(fetched->ReadLine(), "fetched 2");
  const std::string fingerprint = absl::BytesToHexString(absl::string_view(
      reinterpret_cast<const char*>(ns.fingerprint.data()), ns.fingerprint.size()));
  const auto thief = Probe({"--ucx", "steal", "s", "1", fingerprint}, kSomebody);
  EXPECT_EQ(thief->WaitExit().code, static_cast<int>(absl::StatusCode::kNotFound));
  const auto nobody = Probe({"--ucx", "steal", "s", "1", fingerprint}, getuid());
  EXPECT_EQ(nobody->ReadLine(), "fetched 1");
}

TEST_F(UcxTest, AClientKilledOrStoppedInTheMiddleLeavesNothing) {
  StartUcx();
  ExpectIdle(0);
  for (const char* command : {"store_loop", "fetch_loop"}) {
    for (int round = 0; round < 2; ++round) {
      const auto probe = Probe({"--ucx", command, "s", "200"}, getuid());
      ASSERT_EQ(probe->ReadLine(), "running");
      ASSERT_TRUE(Eventually([&] { return Metric("data_connections") == 1; }));
      usleep(50'000);
      probe->Signal(SIGKILL);
      EXPECT_EQ(probe->WaitExit().signal, SIGKILL);
      ExpectIdle(0);
    }
  }
  // One that is stopped in the middle keeps nobody else from storing.
  const auto stopped = Probe({"--ucx", "store_loop", "s", "200"}, getuid());
  ASSERT_EQ(stopped->ReadLine(), "running");
  usleep(50'000);
  stopped->Signal(SIGSTOP);
  const auto client = UcxClient();
  const ClientNamespace ns = Open("n", SmallSpec());
  Sequence sequence(SmallSpec(), 64 * 50, 3);
  const auto stored = client->Store(ns, sequence.Blocks("beside"), {});
  ASSERT_TRUE(stored.ok()) << stored.status();
  EXPECT_EQ(stored->blocks_stored, 50u);
  stopped->Signal(SIGKILL);
  EXPECT_EQ(stopped->WaitExit().signal, SIGKILL);
  ExpectIdle(1);
}

TEST_F(UcxTest, ADaemonKilledInTheMiddleAndStartedAgain) {
  StartUcx();
  const ClientNamespace ns = Open("n", SmallSpec());
  Sequence sequence(SmallSpec(), 64 * 100, 3);
  Client::Options options;
  options.address = absl::StrCat("unix:", socket());
  options.timeout = absl::Seconds(30);
  const auto client = UcxClient(options);
  ASSERT_TRUE(client->OpenNamespace("n", SmallSpec()).ok());
  const std::vector<StoreBlock> blocks = sequence.Blocks("s");
  ASSERT_TRUE(client->Store(ns, blocks, {}).ok());
  const std::vector<BlockKey> keys = KeysOf("s", 100);
  std::atomic<bool> stop{false};
  std::atomic<int> failed{0};
  std::atomic<int> succeeded{0};
  std::thread load([&] {
    while (!stop) {
      PageCollector pages;
      const auto fetched = client->Fetch(ns, keys, pages);
      const auto stored = client->Store(ns, blocks, {});
      failed += fetched.ok() && stored.ok() ? 0 : 1;
      succeeded += fetched.ok() && stored.ok() ? 1 : 0;
    }
  });
  ASSERT_TRUE(Eventually([&] { return succeeded > 2; }));
  const std::string boot_id = client->boot_id();
  Kill();
  ASSERT_TRUE(Eventually([&] { return failed > 0; }));
  StartUcx();
  const int before = succeeded;
  EXPECT_TRUE(Eventually([&] { return succeeded > before; }));
  stop = true;
  load.join();
  EXPECT_NE(client->boot_id(), boot_id);
  ExpectIdle(1);
}

TEST_F(UcxTest, AStoppedDaemonMeansADeadline) {
  StartUcx();
  const ClientNamespace ns = Open("n", SmallSpec());
  Sequence sequence(SmallSpec(), 64 * 10, 3);
  const auto client = UcxClient();
  ASSERT_TRUE(client->Store(ns, sequence.Blocks("s"), {}).ok());
  daemon_->Signal(SIGSTOP);
  const absl::Time begin = absl::Now();
  PageCollector pages;
  EXPECT_EQ(client->Fetch(ns, KeysOf("s", 10), pages, {.timeout = absl::Milliseconds(300)})
                .status()
                .code(),
            absl::StatusCode::kDeadlineExceeded);
  EXPECT_EQ(client->Store(ns, sequence.Blocks("t"), {}, {.timeout = absl::Milliseconds(300)})
                .status()
                .code(),
            absl::StatusCode::kDeadlineExceeded);
  // One that has no connection yet waits no longer.
  EXPECT_EQ(UcxClient()
                ->Fetch(ns, KeysOf("s", 10), pages, {.timeout = absl::Milliseconds(300)})
                .status()
                .code(),
            absl::StatusCode::kDeadlineExceeded);
  EXPECT_LT(absl::Now() - begin, absl::Seconds(10));
  daemon_->Signal(SIGCONT);
  EXPECT_TRUE(Eventually([&] {
    PageCollector again;
    return client->Fetch(ns, KeysOf("s", 10), again).ok() && again.pages.size() == 20;
  }));
  ExpectIdle(1);
}

TEST_F(UcxTest, ADrainingDaemonRefusesStoresAndServesFetches) {
  StartUcx();
  const ClientNamespace ns = Open("n", SmallSpec());
  Sequence sequence(SmallSpec(), 64, 3);
  const auto client = UcxClient();
  ASSERT_TRUE(client->Store(ns, sequence.Blocks("s"), {}).ok());
  ASSERT_TRUE(client_->Drain().ok());
  EXPECT_EQ(client->Store(ns, sequence.Blocks("t"), {}).status().code(),
            absl::StatusCode::kUnavailable);
  PageCollector pages;
  EXPECT_TRUE(client->Fetch(ns, KeysOf("s", 1), pages).ok());
  daemon_->Signal(SIGTERM);
  EXPECT_EQ(daemon_->WaitExit().code, 0);
}

}  // namespace
}  // namespace kvmill::testing
