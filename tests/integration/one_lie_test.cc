// The client library against a daemon that tells one lie: each of them is found, and said.
#include <gmock/gmock.h>

#include <map>
#include <tuple>
#include <utility>

#include "kvmill/v1/cache.pb.h"
#include "kvmill/v1/engine.pb.h"
#include "tests/integration/engine_pages.h"
#include "tests/integration/lying_daemon.h"
#include "tests/integration/ucx_fixture.h"

namespace kvmill::testing {
namespace {

using ::testing::HasSubstr;

constexpr std::uint32_t kBlocks = 3;

class OneLieTest : public UcxDaemonTest {
 protected:
  // A client of the daemon whose replies of `method` (of kvmill.v1, as "Cache/Fetch") go through
  // `lie`; `number` counts them from 0.
  template <typename Reply>
  void Lie(const std::string& method,
           std::function<std::vector<std::string>(int number, Reply reply)> lie) {
    if (daemon_ == nullptr) {
      StartUcx({"--host-bytes", "64MiB"});
      ns_ = Open("n", TwoGroups("n"));
      sequence_ = std::make_unique<Sequence>(ns_.spec, kBlocks * 64, 1);
      ASSERT_EQ(Put(ns_, "s", *sequence_).blocks_stored, kBlocks);
    }
    victim_.reset();
    liar_.reset();
    const std::string socket = absl::StrCat(directory_ / "liar", ++liars_, ".sock");
    liar_ = std::make_unique<LyingDaemon>(
        this->socket(), ready_["listen"].get<std::string>(), socket,
        [method = "/kvmill.v1." + method, lie = std::move(lie), number = 0](
            const std::string& of, std::string bytes) mutable -> std::vector<std::string> {
          if (of != method) return {std::move(bytes)};
          Reply reply;
          EXPECT_TRUE(reply.ParseFromString(bytes));
          return lie(number++, std::move(reply));
        });
    victim_ = Connect("unix:" + socket);
  }
  template <typename Reply>
  void Change(const std::string& method, std::function<void(Reply&)> change) {
    Lie<Reply>(method, [change](int, Reply reply) -> std::vector<std::string> {
      change(reply);
      return {reply.SerializeAsString()};
    });
  }
  std::vector<absl::Status> Fetched() {
    PageCollector pages;
    const auto result = victim_->Fetch(ns_, KeysOf("s", kBlocks), pages);
    EXPECT_TRUE(result.ok()) << result.status();
    std::vector<absl::Status> statuses;
    for (const FetchBlockResult& block : result->blocks) statuses.push_back(block.status);
    return statuses;
  }

  ClientNamespace ns_;
  std::unique_ptr<Sequence> sequence_;
  int liars_ = 0;
  std::unique_ptr<LyingDaemon> liar_;
  std::unique_ptr<Client> victim_;
};

// Small blocks come as one message a (block, layer group): four and five are those of block 2.
TEST_F(OneLieTest, PagesThatDoNotComeAreMissed) {
  Lie<v1::FetchReply>("Cache/Fetch", [](int number, v1::FetchReply reply) {
    if (number == 2) {  // Block 1, the first of its two groups: the second page is not there.
      EXPECT_EQ(reply.page_bytes_size(), 2);
      reply.mutable_pages()->resize(reply.page_bytes(0));
    }
    return std::vector<std::string>{reply.SerializeAsString()};
  });
  std::vector<absl::Status> blocks = Fetched();
  EXPECT_TRUE(blocks[0].ok()) << blocks[0];
  EXPECT_EQ(blocks[1].code(), absl::StatusCode::kDataLoss) << blocks[1];
  EXPECT_THAT(std::string(blocks[1].message()), HasSubstr("layer group 0: 1 of 2 pages came"));
  EXPECT_TRUE(blocks[2].ok()) << blocks[2];

  Lie<v1::FetchReply>("Cache/Fetch", [](int number, const v1::FetchReply& reply) {
    if (number == 5) return std::vector<std::string>();
    return std::vector<std::string>{reply.SerializeAsString()};
  });
  blocks = Fetched();
  EXPECT_TRUE(blocks[0].ok() && blocks[1].ok());
  EXPECT_EQ(blocks[2].code(), absl::StatusCode::kDataLoss) << blocks[2];
  EXPECT_THAT(std::string(blocks[2].message()), HasSubstr("1 of 2 layer groups came"));
}

// Between the calls of a redeem that is tried again nothing runs that could be cancelled.
TEST_F(OneLieTest, ARedeemThatIsCancelledBetweenTwoCallsIsCancelled) {
  int registered = 0;
  Lie<v1::RegisterReply>("Engine/Register", [&](int, const v1::RegisterReply& reply) {
    if (++registered == 2) victim_->CancelRedeem("a ticket");
    return std::vector<std::string>{reply.SerializeAsString()};
  });
  const auto ns = victim_->OpenNamespace("n", TwoGroups("n"));
  ASSERT_TRUE(ns.ok()) << ns.status();
  liar_->EndWith("/kvmill.v1.Ticket/Redeem", {grpc::StatusCode::NOT_FOUND, "no such namespace"});
  EXPECT_TRUE(absl::IsCancelled(victim_->RedeemTicket(*ns, "a ticket").status));
  EXPECT_EQ(registered, 2);
  EXPECT_TRUE(absl::IsNotFound(victim_->RedeemTicket(*ns, "another").status));
  EXPECT_EQ(registered, 3) << "it was tried twice";
}

// A sink that may have begun to work on blocks does not hear of them again.
TEST_F(OneLieTest, BlocksComeOnceWhateverTheCallEndsWith) {
  class CountingSink final : public FetchSink {
   public:
    absl::Status OnGroup(std::uint32_t block, std::uint8_t group, std::uint32_t,
                         absl::Span<const std::uint32_t>) override {
      ++groups[{block, group}];
      return absl::OkStatus();
    }
    absl::Status OnPage(const PageId& id, const PageView&) override {
      ++pages[{id.block, id.group, id.layer_index}];
      return absl::OkStatus();
    }
    std::map<std::pair<std::uint32_t, std::uint32_t>, int> groups;
    std::map<std::tuple<std::uint32_t, std::uint32_t, std::uint32_t>, int> pages;
  };
  for (const auto code : {grpc::StatusCode::UNAUTHENTICATED, grpc::StatusCode::NOT_FOUND}) {
    Lie<v1::FetchReply>("Cache/Fetch", [](int, const v1::FetchReply& reply) {
      return std::vector<std::string>{reply.SerializeAsString()};
    });
    // Then it knows the namespace, which it would register again.
    ASSERT_TRUE(victim_->OpenNamespace("n", ns_.spec).ok());
    liar_->EndWith("/kvmill.v1.Cache/Fetch", grpc::Status(code, "a lie"));
    CountingSink sink;
    const absl::Status status = victim_->Fetch(ns_, KeysOf("s", kBlocks), sink).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInternal) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("a lie"));
    EXPECT_EQ(sink.groups.size(), kBlocks * ns_.spec.groups.size());
    for (const auto& [group, times] : sink.groups) EXPECT_EQ(times, 1);
    for (const auto& [page, times] : sink.pages) EXPECT_EQ(times, 1);
  }
}

TEST_F(OneLieTest, ALookupFindsWhatWasAskedForAtMost) {
  const std::vector<std::pair<std::function<void(v1::LookupReply&)>, std::string>> lies = {
      {[](v1::LookupReply& r) { r.set_hit_blocks(kBlocks + 1); }, "hit_blocks 4, want 3"},
      {[](v1::LookupReply& r) { r.set_hit_blocks(2); }, "tiers 3, want 2"},
      {[](v1::LookupReply& r) { r.clear_tiers(); }, "tiers 0, want 3"},
      {[](v1::LookupReply& r) { r.set_tail_tokens(9); }, "tail_key bytes 0, want 1"},
      {[](v1::LookupReply& r) { r.set_tail_key("key"); }, "tail_key bytes 3, want 0"},
  };
  for (const auto& [lie, says] : lies) {
    Change<v1::LookupReply>("Cache/Lookup", lie);
    const absl::Status status = victim_->Lookup(ns_, KeysOf("s", kBlocks)).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInternal) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(says));
  }
  Change<v1::LookupReply>("Cache/Lookup", [](v1::LookupReply&) {});
  EXPECT_EQ(victim_->Lookup(ns_, KeysOf("s", kBlocks))->hit_blocks, kBlocks);
}

TEST_F(OneLieTest, ANamespaceIsTheOneThatWasRegisteredAndOneThatCanBe) {
  Change<v1::RegisterReply>("Engine/Register", [](v1::RegisterReply& r) {
    r.mutable_namespace_()->mutable_spec()->set_model("another");
  });
  absl::Status status = victim_->OpenNamespace("n", ns_.spec).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInternal) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("another namespace"));

  Change<v1::NamespaceInfo>("Engine/Describe", [](v1::NamespaceInfo& r) {
    r.mutable_spec()->mutable_groups(0)->set_head_dim(63);
  });
  status = victim_->FindNamespace("n").status();
  EXPECT_FALSE(status.ok());
  EXPECT_THAT(std::string(status.message()), HasSubstr("63"));
}

// Messages of a later version, which this one knows nothing of, are no results.
TEST_F(OneLieTest, AnEmptyReplyToAStoreIsNoResult) {
  const auto twice = [](int, const v1::StoreReply& reply) {
    return std::vector<std::string>{"", reply.SerializeAsString()};
  };
  Lie<v1::StoreReply>("Cache/Store", twice);
  ASSERT_TRUE(client_->Clear(ns_).ok());
  const auto stored = victim_->Store(ns_, sequence_->Blocks("s"), {});
  ASSERT_TRUE(stored.ok()) << stored.status();
  EXPECT_EQ(stored->blocks_stored, kBlocks) << stored->blocks[0].status;

  const NamespaceSpec spec = SmallSpec();
  const ClientNamespace small = Open("small", spec);
  Sequence sequence(spec, kBlocks * 64, 7);
  EnginePages pages(spec, 4 * kBlocks, false, 0, 2, nullptr);
  const BlockList list(spec, "p", sequence.token_count(), Shuffled(4 * kBlocks, 5));
  pages.FillAll(sequence, list.pages);
  const auto registration = victim_->RegisterMemory(small, pages.geometry);
  ASSERT_TRUE(registration.ok()) << registration.status();
  const auto in_place = victim_->StorePages(small, *registration, list.blocks);
  ASSERT_TRUE(in_place.ok()) << in_place.status();
  EXPECT_EQ(in_place->blocks_stored, kBlocks) << in_place->blocks[0].status;
}

}  // namespace
}  // namespace kvmill::testing
