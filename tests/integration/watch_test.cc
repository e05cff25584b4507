// Events.Watch and callers that do not read: each costs one message that is being written, holds up
// nobody, and goes when it is cancelled, revoked, or the daemon stops.
#include <grpcpp/create_channel.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "client/door_protocol.h"
#include "client/events.h"
#include "client/tls/tls_credentials.h"
#include "kvmill/v1/events.grpc.pb.h"
#include "tests/integration/test_certificates.h"
#include "tests/integration/ucx_fixture.h"

namespace kvmill::testing {
namespace {

// Their events are some 150 KB, and of what nobody reads HTTP/2 takes 64 KiB.
constexpr std::uint32_t kBlocks = 1500;

constexpr const char* kToken = "a-token-that-only-tests-have";
// printf %s a-token-that-only-tests-have | sha256sum
constexpr const char* kTokenDigest =
    "sha256:316c810560329ed9b617b33b49aaf6fba24cb57ecc94262a2729248660c6e1aa";

// A call of Watch that is not read.
class Idler {
 public:
  Idler(const std::shared_ptr<grpc::Channel>& channel,
        const std::vector<std::pair<std::string, std::string>>& metadata)
      : stub_(v1::Events::NewStub(channel)) {
    for (const auto& [key, value] : metadata) call_.AddMetadata(key, value);
    call_.set_wait_for_ready(true);
    v1::WatchRequest request;
    request.set_snapshot(true);
    reader_ = stub_->Watch(&call_, request);
  }
  ~Idler() {
    call_.TryCancel();
    Finish();
  }

  void Cancel() { call_.TryCancel(); }
  // Reads what came, and what comes, until that many blocks were stored.
  void ReadUntilStored(std::size_t count) {
    v1::WatchReply reply;
    while (stored_.size() < count && reader_->Read(&reply)) {
      for (const v1::BlockEvent& event : reply.events()) {
        if (event.has_stored()) stored_[event.stored().key()] = true;
        if (event.has_removed()) stored_.erase(event.removed().key());
      }
    }
    EXPECT_EQ(stored_.size(), count);
  }
  grpc::Status Finish() {
    v1::WatchReply reply;
    while (!finished_ && reader_->Read(&reply)) {
    }
    if (!finished_) status_ = reader_->Finish();
    finished_ = true;
    return status_;
  }

 private:
  const std::unique_ptr<v1::Events::Stub> stub_;
  grpc::ClientContext call_;
  std::unique_ptr<grpc::ClientReader<v1::WatchReply>> reader_;
  std::map<std::string, bool> stored_;
  bool finished_ = false;
  grpc::Status status_;
};

class WatchTest : public UcxDaemonTest {
 protected:
  static NamespaceSpec Tiny() {
    NamespaceSpec spec = SmallSpec();
    spec.groups[0].layers = {0};
    spec.groups[0].kv_heads = 1;
    return spec;
  }
  static std::shared_ptr<grpc::Channel> ChannelTo(
      const std::string& address, std::shared_ptr<grpc::ChannelCredentials> credentials) {
    grpc::ChannelArguments arguments;
    arguments.SetString(GRPC_ARG_DEFAULT_AUTHORITY, "localhost");
    arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    return grpc::CreateCustomChannel(address, credentials, arguments);
  }
  std::unique_ptr<Idler> Idle() {
    if (pass_ == nullptr) pass_ = std::make_unique<LocalPass>(socket());
    return std::make_unique<Idler>(
        ChannelTo("unix:" + socket(), grpc::InsecureChannelCredentials()),
        std::vector<std::pair<std::string, std::string>>{{kDoorTokenMetadata, pass_->token_hex()}});
  }
  void WaitForReaders(int count) {
    EXPECT_TRUE(Eventually([&] { return Metric("event_readers") == count; }))
        << Metric("event_readers") << " readers, want " << count;
  }
  std::unique_ptr<EventStream> Follow() {
    auto stream = EventStream::Open({.address = "unix:" + socket()}, {});
    EXPECT_TRUE(stream.ok()) << stream.status();
    return stream.ok() ? *std::move(stream) : nullptr;
  }
  // Until so many blocks are there.
  void ReadUntil(EventStream& stream, std::size_t count) {
    const absl::Time give_up = absl::Now() + absl::Seconds(60);
    while (believed_.size() != count) {
      const absl::StatusOr<EventBatch> batch = stream.Next(give_up - absl::Now());
      ASSERT_TRUE(batch.ok()) << batch.status() << " with " << believed_.size() << " of " << count;
      if (batch->snapshot_begin) believed_.clear();
      for (const WatchedEvent& event : batch->events) {
        const std::string key(event.key.view());
        if (event.kind == WatchedEvent::Kind::kStored) believed_[key] = true;
        if (event.kind == WatchedEvent::Kind::kRemoved) believed_.erase(key);
        if (event.kind == WatchedEvent::Kind::kCleared) believed_.clear();
      }
    }
  }

  std::unique_ptr<LocalPass> pass_;
  std::map<std::string, bool> believed_;
};

TEST_F(WatchTest, WhoDoesNotReadHoldsUpNobodyAndIsCancelledWhileItsReplyIsWritten) {
  StartUcx();
  ASSERT_FALSE(HasFatalFailure());
  const ClientNamespace ns = Open("tiny", Tiny());
  Sequence sequence(Tiny(), kBlocks * 64, 1);
  std::vector<std::unique_ptr<Idler>> idlers;
  for (int i = 0; i < 8; ++i) idlers.push_back(Idle());
  const std::unique_ptr<EventStream> stream = Follow();
  ReadUntil(*stream, 0);
  WaitForReaders(9);
  ASSERT_EQ(Put(ns, "a", sequence).blocks_stored, kBlocks);
  ReadUntil(*stream, kBlocks);
  // Half of them are cancelled in the middle of a reply.
  for (int i = 0; i < 4; ++i) idlers[static_cast<std::size_t>(i)]->Cancel();
  WaitForReaders(5);
  ASSERT_EQ(Put(ns, "b", sequence).blocks_stored, kBlocks);
  ReadUntil(*stream, 2 * kBlocks);
  // Whoever reads after all has missed nothing.
  idlers[7]->ReadUntilStored(2 * kBlocks);
  idlers.clear();
  WaitForReaders(1);
  EXPECT_EQ(Metric("events_dropped_total"), 0);
}

TEST_F(WatchTest, ADaemonThatStopsDoesNotWaitForWhoDoesNotRead) {
  StartUcx();
  ASSERT_FALSE(HasFatalFailure());
  const ClientNamespace ns = Open("tiny", Tiny());
  Sequence sequence(Tiny(), kBlocks * 64, 1);
  const std::unique_ptr<Idler> idler = Idle();
  const std::unique_ptr<EventStream> stream = Follow();
  ASSERT_EQ(Put(ns, "a", sequence).blocks_stored, kBlocks);
  ReadUntil(*stream, kBlocks);
  WaitForReaders(2);
  const absl::Time begin = absl::Now();
  daemon_->Signal(SIGTERM);
  const Exit exit = daemon_->WaitExit(std::chrono::seconds(60));
  EXPECT_TRUE(exit.in_time && exit.code == 0) << daemon_->standard_error();
  EXPECT_LT(absl::Now() - begin, absl::Seconds(20));
  EXPECT_FALSE(idler->Finish().ok());
}

// Over TLS, by token: the tenant loses it.
TEST_F(WatchTest, WhoIsRevokedGoesAlsoWhileItsReplyIsWritten) {
  TestAuthority authority;
  const auto node =
      authority.Issue("node", absl::StrCat(TestAuthority::kLoopback, ",DNS:node.example"));
  const std::string tenants = directory_ / "tenants.yaml";
  const auto write_tenants = [&](const std::string& a) {
    std::ofstream(tenants + ".next") << "tenants:\n  a:\n    " << a << "\n";
    std::filesystem::rename(tenants + ".next", tenants);
  };
  write_tenants(absl::StrCat("tokens: [\"", kTokenDigest, "\"]"));
  Start({"--listen", "127.0.0.1:0", "--metrics", "127.0.0.1:0", "--tls-ca", authority.ca_path(),
         "--tls-cert", node.certificate, "--tls-key", node.key, "--tenants", tenants});
  ASSERT_FALSE(HasFatalFailure());
  Client::Options options;
  options.address = ready_["listen"].get<std::string>();
  options.tls = {authority.ca_path(), "", "", ""};
  options.token = kToken;
  const auto client = Client::Create(options);
  ASSERT_TRUE(client.ok()) << client.status();
  const auto ns = (*client)->OpenNamespace("tiny", Tiny());
  ASSERT_TRUE(ns.ok()) << ns.status();
  Idler idler(ChannelTo(options.address, ChannelCredentialsOf(options.tls)),
              {{"authorization", absl::StrCat("Bearer ", kToken)}});
  const std::unique_ptr<Idler> local = Idle();
  auto stream = EventStream::Open(options, {});
  ASSERT_TRUE(stream.ok()) << stream.status();
  Sequence sequence(Tiny(), kBlocks * 64, 1);
  const auto stored = (*client)->Store(*ns, sequence.Blocks("a"), {});
  ASSERT_TRUE(stored.ok()) << stored.status();
  ReadUntil(**stream, kBlocks);
  WaitForReaders(3);
  write_tenants("certificates: [nobody.example]");
  daemon_->Signal(SIGHUP);
  // Its own is left: it came through the door.
  WaitForReaders(1);
  EXPECT_FALSE(idler.Finish().ok());
  absl::Status end;
  while (end.ok()) end = (*stream)->Next(absl::Seconds(60)).status();
  EXPECT_EQ(end.code(), absl::StatusCode::kUnauthenticated) << end;
}

}  // namespace
}  // namespace kvmill::testing
