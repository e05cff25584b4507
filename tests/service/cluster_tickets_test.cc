// ClusterTickets over real connections, against a producer that lies: flipped bits, other pages,
// other digests, answers that cannot be. Nothing of it is ever sealed, what can be asked for again
// is, and nothing stays behind.
#include "service/cluster_tickets.h"

#include <gmock/gmock.h>
#include <grpcpp/server.h>
#include <grpcpp/server_builder.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <functional>
#include <future>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kvmill/v1/peer.grpc.pb.h"
#include "service/status_grpc.h"
#include "service/thread_loop.h"
#include "storage/core/mutex.h"
#include "tests/integration/message_mutator.h"
#include "tests/long_form.h"
#include "tests/storage/tiered_store_fixture.h"

namespace kvmill {
namespace {

constexpr std::int64_t kSecond = 1'000'000'000;
constexpr std::uint64_t kBytesMax = std::uint64_t{1} << 30;

// Changes what a producer is about to say.
struct Lies {
  std::function<void(v1::AskTicketReply*)> news = [](v1::AskTicketReply*) {};
  std::function<void(v1::TicketPages*)> pages = [](v1::TicketPages*) {};
  // As another process at its address says: refusals of all questions, or of all reads.
  grpc::Status ask, read;
};

// All pages in one message.
class LyingRead final : public grpc::ServerWriteReactor<v1::TicketPages> {
 public:
  void Write(const absl::StatusOr<ClusterTickets::Pages>& pages, const Lies& lies) {
    if (!pages.ok()) return Finish(StatusToGrpc(pages.status()));
    for (const StoreTicketHolds::Page& page : pages->pages) {
      message_.add_page_bytes(static_cast<std::uint32_t>(page.bytes.size()));
      message_.mutable_bytes()->append(reinterpret_cast<const char*>(page.bytes.data()),
                                       page.bytes.size());
    }
    lies.pages(&message_);
    StartWrite(&message_);
  }
  void OnWriteDone(bool) override { Finish(grpc::Status::OK); }
  void OnDone() override { delete this; }

 private:
  v1::TicketPages message_;
};

class LyingProducer final : public v1::Peer::CallbackService {
 public:
  LyingProducer(ClusterTickets& tickets, const Lies& lies) : tickets_(tickets), lies_(lies) {
    grpc::ServerBuilder builder;
    int port = 0;
    builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port);
    builder.RegisterService(this);
    server_ = builder.BuildAndStart();
    address_ = absl::StrCat("127.0.0.1:", port);
  }
  ~LyingProducer() override { server_->Shutdown(std::chrono::system_clock::now()); }
  const std::string& address() const { return address_; }

  grpc::ServerUnaryReactor* AskTicket(grpc::CallbackServerContext* call,
                                      const v1::AskTicketRequest* request,
                                      v1::AskTicketReply* reply) override {
    auto* const reactor = call->DefaultReactor();
    if (!lies_.ask.ok()) {
      reactor->Finish(lies_.ask);
      return reactor;
    }
    tickets_.Ask(*FromProto(request->holder()), request->seen(),
                 std::int64_t{request->wait_ms()} * 1'000'000,
                 [this, reactor, reply](const absl::StatusOr<TicketNews>& news) {
                   ToProto(news, reply);
                   lies_.news(reply);
                   reactor->Finish(grpc::Status::OK);
                 });
    return reactor;
  }
  grpc::ServerWriteReactor<v1::TicketPages>* ReadTicket(
      grpc::CallbackServerContext*, const v1::ReadTicketRequest* request) override {
    auto* const reactor = new LyingRead;
    if (!lies_.read.ok()) {
      reactor->Finish(lies_.read);
      return reactor;
    }
    tickets_.Read(*FromProto(request->holder()), *PiecesFromProto(*request),
                  [this, reactor](const absl::StatusOr<ClusterTickets::Pages>& pages) {
                    reactor->Write(pages, lies_);
                  });
    return reactor;
  }
  grpc::ServerUnaryReactor* AcknowledgeTicket(grpc::CallbackServerContext* call,
                                              const v1::AcknowledgeTicketRequest* request,
                                              v1::AcknowledgeTicketReply*) override {
    auto* const reactor = call->DefaultReactor();
    tickets_.Acknowledge(*FromProto(request->holder()), [reactor](const absl::Status& taken) {
      reactor->Finish(StatusToGrpc(taken));
    });
    return reactor;
  }

 private:
  ClusterTickets& tickets_;
  const Lies& lies_;
  std::unique_ptr<grpc::Server> server_;
  std::string address_;
};

Member MemberOf(const std::string& id, const std::string& address) {
  return {.id = id, .incarnation = std::string(16, id[0]), .address = address, .capacity_bytes = 1};
}

// A node's loop and what is on it.
class Node {
 public:
  Node(TieredStore& store, const Member& self, const TicketRedeem::Options& redeem = {})
      : loop_(SystemClock()) {
    loop_.Run([&] {
      health_ = std::make_unique<PeerHealth>(loop_.clock());
      peers_ = std::make_unique<GrpcPeers>(loop_, self, GrpcPeers::Puller());
      clients_ = std::make_unique<PeerClients>(loop_, PeerClients::Options());
      ClusterTickets::Options options;
      options.held_bytes_max = options.copied_bytes_max = kBytesMax;
      options.self = self;
      options.redeem = redeem;
      tickets_ =
          std::make_unique<ClusterTickets>(loop_, store, *peers_, *clients_, *health_, options);
    });
  }
  ~Node() {
    loop_.Run([&] {
      tickets_.reset();
      clients_.reset();
      peers_.reset();
      health_.reset();
    });
  }
  void Sees(const std::vector<Member>& members) {
    loop_.Run([&] { tickets_->SetMembers(members, /*fresh=*/true); });
  }
  ClusterTickets& tickets() { return *tickets_; }

 private:
  ThreadLoop loop_;
  std::unique_ptr<PeerHealth> health_;
  std::unique_ptr<GrpcPeers> peers_;
  std::unique_ptr<PeerClients> clients_;
  std::unique_ptr<ClusterTickets> tickets_;
};

// The fixture's own store is the producer's.
class ClusterTicketsTest : public TieredStoreTest {
 protected:
  void SetUp() override {
    Open(false);
    auto store = TieredStore::Create(options_, clock_, nullptr);
    ASSERT_TRUE(store.ok()) << store.status();
    other_store_ = *std::move(store);
    ASSERT_TRUE(other_store_->OpenNamespace("test", Spec()).ok());
    producer_ = std::make_unique<Node>(*store_, MemberOf("a", ""));
    server_ = std::make_unique<LyingProducer>(producer_->tickets(), lies_);
    Consume(TicketRedeem::Options());
  }
  void TearDown() override {
    consumer_.reset();
    server_.reset();
    producer_.reset();
  }
  void Consume(const TicketRedeem::Options& options) {
    consumer_ = std::make_unique<Node>(*other_store_, MemberOf("b", ""), options);
    consumer_->Sees({MemberOf("a", server_->address()), MemberOf("b", "127.0.0.1:1")});
  }

  std::string Create(const std::vector<std::uint64_t>& numbers) {
    TicketTable::Request request;
    request.fingerprint = FingerprintOf(Spec());
    request.owner = "engine";
    request.ttl_nanos = 600 * kSecond;
    request.life_nanos = 3600 * kSecond;
    for (const std::uint64_t number : numbers) {
      TicketBlock& block = request.blocks.emplace_back();
      block.key = Key(number);
      block.layer_count = kLayers;
      block.token_count = kTokens;
    }
    ++created_;
    std::promise<absl::StatusOr<std::string>> made;
    producer_->tickets().Create(
        std::move(request), [] { return true; },
        [&made](const absl::StatusOr<std::string>& ticket) { made.set_value(ticket); });
    const auto ticket = made.get_future().get();
    EXPECT_TRUE(ticket.ok()) << ticket.status();
    return ticket.value_or("");
  }
  TicketRedeem::Outcome Redeem(const std::string& ticket, std::int64_t within = 300 * kSecond) {
    std::promise<TicketRedeem::Outcome> done;
    const auto redeeming = consumer_->tickets().Redeem(
        *ParseTicket(ticket), within, nullptr,
        [&done](const TicketRedeem::Outcome& outcome) { done.set_value(outcome); });
    return done.get_future().get();
  }
  std::uint64_t UsedThere() const {
    return other_store_->stats().tiers[static_cast<std::size_t>(Tier::kHost)].used_bytes;
  }
  void Until(const std::function<bool()>& is_so) {
    const auto begin = std::chrono::steady_clock::now();
    while (!is_so() && std::chrono::steady_clock::now() - begin < std::chrono::seconds(30)) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    EXPECT_TRUE(is_so());
  }
  // On both sides.
  void NothingIsHeld() {
    Until([&] {
      const ClusterTickets::Stats there = producer_->tickets().stats();
      return there.made.created == created_ && there.tickets == 0 && there.held_bytes == 0 &&
             store_->stats().references == 0;
    });
    Until([&] {
      const ClusterTickets::Stats here = consumer_->tickets().stats();
      return here.redeeming == 0 && here.copy_bytes == 0;
    });
  }
  // Every block is a miss, and nothing of it is in the consumer's store.
  void IsMissed(const TicketRedeem::Outcome& outcome) {
    EXPECT_TRUE(outcome.status.ok()) << outcome.status;
    for (const TicketRedeem::Block& block : outcome.blocks) {
      EXPECT_EQ(block.fate, TicketRedeem::Fate::kMissed);
    }
    Until([&] { return UsedThere() == 0; });
    NothingIsHeld();
  }

  Lies lies_;
  std::uint64_t created_ = 0;
  std::unique_ptr<TieredStore> other_store_;
  std::unique_ptr<Node> producer_;
  std::unique_ptr<LyingProducer> server_;
  std::unique_ptr<Node> consumer_;
};

TEST(TicketCodecTest, ARequestForPagesIsBounded) {
  v1::ReadTicketRequest request;
  EXPECT_TRUE(absl::IsInvalidArgument(PiecesFromProto(request).status())) << "no pages";
  for (int i = 0; i < 64; ++i) request.add_pieces()->add_layers(0);
  EXPECT_EQ(PiecesFromProto(request)->size(), 64u);
  request.mutable_pieces(5)->clear_layers();
  EXPECT_TRUE(absl::IsInvalidArgument(PiecesFromProto(request).status())) << "an empty piece";
  request.mutable_pieces(5)->add_layers(0);
  request.add_pieces();
  EXPECT_TRUE(absl::IsInvalidArgument(PiecesFromProto(request).status())) << "many pieces";
}

// A consumer that does not read what it asked for holds pages, and no more of them than that.
TEST_F(ClusterTicketsTest, AConsumerReadsOnlySoOftenAtATime) {
  const std::string ticket = Create({1});
  ASSERT_TRUE(Put(1).ok());
  const TicketBearer bearer = *ParseTicket(ticket);
  const auto ask = [&](const std::string& consumer) {
    std::promise<absl::Status> asked;
    producer_->tickets().Ask(
        {bearer.secret, {consumer, "1"}}, 0, 0,
        [&](const absl::StatusOr<TicketNews>& news) { asked.set_value(news.status()); });
    return asked.get_future().get();
  };
  const auto read = [&](const std::string& consumer) {
    std::promise<absl::StatusOr<ClusterTickets::Pages>> pages;
    producer_->tickets().Read(
        {bearer.secret, {consumer, "1"}}, {{0, LayerSet::First(1)}},
        [&](absl::StatusOr<ClusterTickets::Pages> found) { pages.set_value(std::move(found)); });
    return pages.get_future().get();
  };
  ASSERT_TRUE(ask("slow").ok());
  Until([&] { return read("slow").ok(); });
  std::vector<ClusterTickets::Pages> reading;
  for (std::size_t i = 0; i < ClusterTickets::kReadsMax; ++i) {
    auto pages = read("slow");
    ASSERT_TRUE(pages.ok()) << pages.status();
    EXPECT_EQ(pages->pages.size(), 1u);
    reading.push_back(*std::move(pages));
  }
  EXPECT_EQ(read("slow").status(),
            absl::ResourceExhaustedError(
                "node \"slow\" reads pages of tickets 64 times at once: no more than that"));
  reading.pop_back();
  EXPECT_TRUE(read("slow").ok());
  reading.clear();
  EXPECT_TRUE(read("slow").ok());
}

TEST_F(ClusterTicketsTest, WhatAnHonestProducerHasComes) {
  const std::string ticket = Create({1, 2});
  ASSERT_TRUE(Put(1).ok());
  ASSERT_TRUE(Put(2).ok());
  const TicketRedeem::Outcome outcome = Redeem(ticket);
  ASSERT_TRUE(outcome.status.ok()) << outcome.status;
  ASSERT_EQ(outcome.blocks.size(), 2u);
  for (const TicketRedeem::Block& block : outcome.blocks) {
    EXPECT_EQ(block.fate, TicketRedeem::Fate::kSealed);
  }
  const NamespaceId space = other_store_->FindNamespace("default", "test")->id;
  for (const std::uint64_t number : {1, 2}) {
    const auto copy = other_store_->Fetch({space, 0, Key(number)});
    ASSERT_TRUE(copy.ok());
    EXPECT_TRUE(Holds(*copy, number));
  }
  NothingIsHeld();
}

TEST_F(ClusterTicketsTest, AFlippedBitIsAskedForAgainAndThenAMiss) {
  int damaged = 0;
  int times = 1;
  lies_.pages = [&](v1::TicketPages* pages) {
    if (damaged == times) return;
    ++damaged;
    char& byte = (*pages->mutable_bytes())[pages->bytes().size() / 2];
    byte = static_cast<char>(byte ^ 1);
  };
  ASSERT_TRUE(Put(1).ok());
  const TicketRedeem::Outcome once = Redeem(Create({1}));
  ASSERT_TRUE(once.status.ok()) << once.status;
  ASSERT_EQ(once.blocks.size(), 1u);
  EXPECT_EQ(once.blocks[0].fate, TicketRedeem::Fate::kSealed) << "it came again";
  NothingIsHeld();
  Until([&] { return consumer_->tickets().stats().pulled.damaged_pages == 1; });
  ASSERT_TRUE(
      other_store_->Remove(other_store_->FindNamespace("default", "test")->id, {Key(1)}).ok());
  times = 1000;
  IsMissed(Redeem(Create({1})));
}

// Another process has its address: that is known, and no silence is waited for.
TEST_F(ClusterTicketsTest, AProducerThatWasReplacedEndsTheTicketAtOnce) {
  ASSERT_TRUE(Put(1).ok());
  const grpc::Status replaced(grpc::StatusCode::ABORTED, "meant for incarnation x, this is y");
  for (grpc::Status* refused : {&lies_.ask, &lies_.read}) {
    *refused = replaced;
    const auto begin = std::chrono::steady_clock::now();
    const TicketRedeem::Outcome outcome = Redeem(Create({1}));
    EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(5));
    EXPECT_TRUE(absl::IsUnavailable(outcome.status)) << outcome.status;
    EXPECT_THAT(std::string(outcome.status.message()),
                ::testing::HasSubstr("was restarted, or is not at its address any more"));
    for (const TicketRedeem::Block& block : outcome.blocks) {
      EXPECT_EQ(block.miss, TicketRedeem::Miss::kProducerGone);
    }
    *refused = grpc::Status::OK;
    Until([&] { return UsedThere() == 0; });
    producer_->tickets().SessionEnded("engine");  // Nobody told the producer.
    NothingIsHeld();
  }
}

TEST_F(ClusterTicketsTest, AnotherPageOrDigestIsNotSealed) {
  ASSERT_TRUE(Put(1).ok());
  // The other layer's: a right page, in the wrong place.
  lies_.pages = [](v1::TicketPages* pages) {
    std::string* const bytes = pages->mutable_bytes();
    if (pages->page_bytes_size() != 2 || pages->page_bytes(0) != pages->page_bytes(1)) return;
    std::rotate(bytes->begin(), bytes->begin() + pages->page_bytes(0), bytes->end());
  };
  IsMissed(Redeem(Create({1})));
  lies_.pages = [](v1::TicketPages*) {};
  lies_.news = [](v1::AskTicketReply* news) {
    for (auto& change : *news->mutable_changed()) change.set_digest(change.digest() ^ 1);
  };
  IsMissed(Redeem(Create({1})));
}

TEST_F(ClusterTicketsTest, AnswersThatCannotBeEndTheTicket) {
  ASSERT_TRUE(Put(1).ok());
  lies_.news = [](v1::AskTicketReply* news) {
    for (auto& change : *news->mutable_changed()) change.set_block(77);
  };
  const TicketRedeem::Outcome outcome = Redeem(Create({1}));
  EXPECT_TRUE(absl::IsDataLoss(outcome.status)) << outcome.status;
  NothingIsHeld();
  lies_.news = [](v1::AskTicketReply* news) { news->clear_fingerprint(); };
  TicketRedeem::Options impatient;
  impatient.silence_nanos = kSecond / 5;
  Consume(impatient);
  EXPECT_TRUE(absl::IsUnavailable(Redeem(Create({1})).status));
  NothingIsHeld();
  lies_.news = [](v1::AskTicketReply*) {};
  // Pages whose sizes are not those of their bytes.
  for (const int more : {-1, 1}) {
    lies_.pages = [more](v1::TicketPages* pages) {
      pages->set_page_bytes(0, pages->page_bytes(0) + static_cast<std::uint32_t>(more));
    };
    EXPECT_FALSE(Redeem(Create({1})).status.ok());
    Until([&] { return UsedThere() == 0; });
    NothingIsHeld();
  }
}

// Answers of any kind from a seed: each redeem ends once and soon, and whatever was sealed is
// right.
TEST_F(ClusterTicketsTest, WhateverAProducerSaysOnlyRightBlocksAreSealed) {
  // Answers are made on any thread, and some when nobody waits for them any more.
  struct Liar {
    explicit Liar(std::uint64_t seed) : mutator(seed) {}
    Mutex mu;
    testing::MessageMutator mutator ABSL_GUARDED_BY(mu);
    std::uint64_t lies ABSL_GUARDED_BY(mu) = 0;

    void Change(google::protobuf::Message* message) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu) {
      if (!mutator.OneIn(3)) return;
      ++lies;
      mutator.Mutate(message, 1 + static_cast<int>(mutator.Below(2)));
    }
  };
  const auto liar = std::make_shared<Liar>(testing::SeedArgument());
  {
    MutexLock lock(liar->mu);
    for (const std::uint64_t number : {1, 2, 3}) {
      for (const char* field : {"key", "parent"}) {
        liar->mutator.Know(field, std::string(Key(number).view()));
      }
    }
    for (const std::uint64_t value : {0, 1, 2, 3}) {
      for (const char* field : {"block", "group", "layer_count", "finished", "state", "version"}) {
        liar->mutator.Know(field, value);
      }
    }
    liar->mutator.Know("token_count", std::uint64_t{kTokens});
    for (const std::uint64_t code : {0, 0, 5}) liar->mutator.Know("code", code);
  }
  for (const std::uint64_t number : {1, 2, 3}) ASSERT_TRUE(Put(number).ok());
  lies_.news = [liar](v1::AskTicketReply* news) {
    MutexLock lock(liar->mu);
    liar->Change(news);
  };
  lies_.pages = [liar](v1::TicketPages* pages) {
    MutexLock lock(liar->mu);
    liar->Change(pages);
    if (!liar->mutator.OneIn(4) || pages->bytes().empty()) return;
    ++liar->lies;
    char& byte = (*pages->mutable_bytes())[liar->mutator.Below(pages->bytes().size())];
    byte = static_cast<char>(byte ^ 4);
  };
  TicketRedeem::Options impatient;
  impatient.wait_nanos = kSecond / 50;
  impatient.call_nanos = kSecond / 2;
  impatient.silence_nanos = kSecond / 5;
  Consume(impatient);
  const NamespaceId space = other_store_->FindNamespace("default", "test")->id;
  int sealed = 0;
  int missed = 0;
  int failed = 0;
  const int redeems = ShortOrLong(60, 5'000);
  for (int i = 0; i < redeems && !HasFailure(); ++i) {
    const TicketRedeem::Outcome outcome = Redeem(Create({1, 2, 3}), kSecond);
    // Its message is what the producer says of it, which may be a lie as well, or nothing.
    ++(outcome.status.ok() ? sealed : failed);
    for (const TicketRedeem::Block& block : outcome.blocks) {
      EXPECT_NE(block.fate, TicketRedeem::Fate::kOpen);
      missed += block.fate == TicketRedeem::Fate::kMissed ? 1 : 0;
      if (block.fate != TicketRedeem::Fate::kSealed) continue;
      EXPECT_TRUE(other_store_->Fetch({space, 0, block.what.key}).ok()) << "it was said to be here";
    }
    // Only these, and they are what was stored.
    for (const std::uint64_t number : {1, 2, 3}) {
      const auto copy = other_store_->Fetch({space, 0, Key(number)});
      if (copy.ok()) {
        EXPECT_TRUE(Holds(*copy, number));
      }
    }
    ASSERT_TRUE(other_store_->Remove(space, {Key(1), Key(2), Key(3)}).ok());
    Until([&] { return UsedThere() == 0; });
    // Tickets that were said to be over.
    if (i % 100 == 99) producer_->tickets().SessionEnded("engine");
  }
  const std::uint64_t lies = [&liar] {
    MutexLock lock(liar->mu);
    return liar->lies;
  }();
  std::printf("%d redeemed, %d failed, %d blocks missed, %llu lies\n", sealed, failed, missed,
              static_cast<unsigned long long>(lies));
  EXPECT_GT(sealed, redeems / 20);
  EXPECT_GT(failed + missed, redeems / 20);
  EXPECT_GT(lies, static_cast<std::uint64_t>(redeems) / 2);
  producer_->tickets().SessionEnded("engine");
  NothingIsHeld();
}

// A rank is told at once what another one has seen.
TEST_F(ClusterTicketsTest, StrangersAndRestartedProducersAreUnavailable) {
  const std::string ticket = Create({1});
  TicketBearer bearer = *ParseTicket(ticket);
  EXPECT_EQ(Serialize(bearer), ticket);
  bearer.incarnation = std::string(16, 'x');
  EXPECT_TRUE(absl::IsUnavailable(Redeem(Serialize(bearer)).status));
  bearer = *ParseTicket(ticket);
  bearer.producer = "z";
  EXPECT_TRUE(absl::IsUnavailable(Redeem(Serialize(bearer)).status));
  bearer = *ParseTicket(ticket);
  bearer.secret[3] = static_cast<std::uint8_t>(bearer.secret[3] ^ 1);
  EXPECT_TRUE(absl::IsNotFound(Redeem(Serialize(bearer)).status));
  for (std::size_t size = 0; size < ticket.size(); ++size) {
    EXPECT_FALSE(ParseTicket(ticket.substr(0, size)).ok()) << size;
  }
  producer_->tickets().SessionEnded("engine");
  NothingIsHeld();
}

}  // namespace
}  // namespace kvmill
