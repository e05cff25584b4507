// The local door of a real daemon: tokens on every call, tenants by user, callers that misbehave.
#include <gmock/gmock.h>
#include <google/protobuf/descriptor.h>
#include <grpcpp/create_channel.h>
#include <grpcpp/generic/generic_stub.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/bulk_codec.h"
#include "kvmill/v1/admin.pb.h"
#include "kvmill/v1/cache.pb.h"
#include "kvmill/v1/engine.pb.h"
#include "tests/integration/daemon_fixture.h"

namespace kvmill::testing {
namespace {

using ::testing::HasSubstr;
constexpr uid_t kSomebody = 65533;
constexpr uid_t kSomebodyElse = 65534;

class DoorTest : public DaemonTest {
 protected:
  // One call with an empty request; `token` empty: without.
  grpc::Status CallEmpty(const std::string& address, const std::string& method,
                         const std::string& token) {
    grpc::ChannelArguments arguments;
    arguments.SetString(GRPC_ARG_DEFAULT_AUTHORITY, "localhost");
    grpc::GenericStub stub(
        grpc::CreateCustomChannel(address, grpc::InsecureChannelCredentials(), arguments));
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(30));
    if (!token.empty()) context.AddMetadata("kvmill-token", token);
    grpc::CompletionQueue queue;
    auto stream = stub.PrepareCall(&context, method, &queue);
    void* tag = nullptr;
    bool ok = false;
    stream->StartCall(nullptr);
    queue.Next(&tag, &ok);
    const grpc::Slice nothing("");
    stream->WriteLast(grpc::ByteBuffer(&nothing, 1), grpc::WriteOptions(), nullptr);
    queue.Next(&tag, &ok);
    grpc::ByteBuffer buffer;
    do {
      stream->Read(&buffer, nullptr);
      queue.Next(&tag, &ok);
    } while (ok);
    grpc::Status status;
    stream->Finish(&status, nullptr);
    queue.Next(&tag, &ok);
    return status;
  }
};

TEST_F(DoorTest, EveryMethodOnTheSocketNeedsTheTokenAndNoneOverTcp) {
  Start({"--listen", "127.0.0.1:0", "--insecure"});
  const std::string address = absl::StrCat("unix:", socket());
  const std::string tcp = ready_["listen"];
  const LocalPass pass(socket());
  ASSERT_FALSE(pass.token_hex().empty()) << pass.status();
  int methods = 0;
  for (const google::protobuf::FileDescriptor* file :
       {v1::HelloRequest::descriptor()->file(), v1::StatRequest::descriptor()->file(),
        v1::StatusRequest::descriptor()->file()}) {
    for (int s = 0; s < file->service_count(); ++s) {
      for (int m = 0; m < file->service(s)->method_count(); ++m) {
        const google::protobuf::MethodDescriptor* method = file->service(s)->method(m);
        const std::string path =
            absl::StrCat("/", file->service(s)->full_name(), "/", method->name());
        SCOPED_TRACE(path);
        ++methods;
        const grpc::Status without = CallEmpty(address, path, "");
        EXPECT_EQ(without.error_code(), grpc::StatusCode::UNAUTHENTICATED);
        EXPECT_THAT(without.error_message(), HasSubstr(".door"));
        EXPECT_EQ(CallEmpty(address, path, std::string(64, '0')).error_code(),
                  grpc::StatusCode::UNAUTHENTICATED);
        if (method->name() == "Drain") continue;
        EXPECT_NE(CallEmpty(address, path, pass.token_hex()).error_code(),
                  grpc::StatusCode::UNAUTHENTICATED);
        EXPECT_NE(CallEmpty(tcp, path, "").error_code(), grpc::StatusCode::UNAUTHENTICATED);
      }
    }
  }
  EXPECT_GE(methods, 16);
}

TEST_F(DoorTest, ATokenEndsWithItsConnection) {
  Start();
  const std::string address = absl::StrCat("unix:", socket());
  std::string token;
  {
    const LocalPass pass(socket());
    token = pass.token_hex();
    EXPECT_TRUE(CallEmpty(address, "/kvmill.v1.Cache/Stat", token).ok());
  }
  grpc::Status status;
  const absl::Time deadline = absl::Now() + absl::Seconds(20);
  do {
    status = CallEmpty(address, "/kvmill.v1.Cache/Stat", token);
    usleep(10'000);
  } while (status.ok() && absl::Now() < deadline);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::UNAUTHENTICATED);
}

TEST_F(DoorTest, UsersAreTenantsThatNeitherHitNorListNorCountOneAnother) {
  if (geteuid() != 0) GTEST_SKIP() << "needs root to act as other users";
  StartDurable();
  LetOthersIn();
  const auto say = [&](uid_t uid, const std::vector<std::string>& arguments) {
    const auto probe = Probe(arguments, uid);
    const std::string line = probe->ReadLine();
    EXPECT_EQ(probe->WaitExit().code, 0) << line;
    return line;
  };
  EXPECT_EQ(say(kSomebody, {"store", "s", "4"}), "stored 4");
  EXPECT_EQ(say(kSomebody, {"find", "s", "4"}), "hits 4 listed 4 blocks 4");
  EXPECT_EQ(say(kSomebodyElse, {"find", "s", "4"}), "hits 0 listed 0 blocks 0");
  // The same name, the same keys, other blocks.
  EXPECT_EQ(say(kSomebodyElse, {"store", "s", "2"}), "stored 2");
  EXPECT_EQ(say(kSomebodyElse, {"find", "s", "4"}), "hits 2 listed 2 blocks 2");
  EXPECT_EQ(say(kSomebody, {"find", "s", "4"}), "hits 4 listed 4 blocks 4");
  // The daemon's own user is a tenant like them, and the one who sees totals.
  const ClientNamespace ns = Open("n", SmallSpec());
  EXPECT_EQ(client_->Lookup(ns, KeysOf("s", 4))->hit_blocks, 0u);
  EXPECT_TRUE(client_->List("")->empty());
  EXPECT_EQ(client_->Stat()->blocks, 6u);
  EXPECT_EQ(*client_->Clear(ns), 0u);
  EXPECT_EQ(*client_->Remove(ns, KeysOf("s", 4)), 0u);
  EXPECT_EQ(say(kSomebody, {"find", "s", "4"}), "hits 4 listed 4 blocks 4");
  // And the disk keeps them apart.
  daemon_->Signal(SIGTERM);
  ASSERT_EQ(daemon_->WaitExit().code, 0);
  StartDurable();
  LetOthersIn();
  EXPECT_EQ(say(kSomebodyElse, {"find", "s", "4"}), "hits 2 listed 2 blocks 2");
}

TEST_F(DoorTest, OnlyTheDaemonsOwnUserSharesMemoryWithHoles) {
  if (geteuid() != 0) GTEST_SKIP() << "needs root to act as another user";
  Start();
  LetOthersIn();
  EXPECT_EQ(Probe({"share", "s", "1"}, getuid())->ReadLine(), "OK; OK; ");
  EXPECT_THAT(Probe({"share", "s", "1"}, kSomebody)->ReadLine(),
              ::testing::MatchesRegex("OK; INVALID_ARGUMENT: region 0: .*, 0 of them allocated.*"));
}

TEST_F(DoorTest, WhoIsNotLetInIsTold) {
  if (geteuid() != 0) GTEST_SKIP() << "needs root to act as another user";
  Start();
  const auto probe = Probe({"find", "s", "1"}, kSomebody);
  EXPECT_THAT(probe->ReadLine(), HasSubstr("PERMISSION_DENIED"));
}

TEST_F(DoorTest, ClientsWorkWhileOthersFloodTheDoor) {
  Start();
  std::atomic<bool> stop{false};
  std::vector<std::thread> flood;
  for (int t = 0; t < 4; ++t) {
    flood.emplace_back([&, t] {
      sockaddr_un address{};
      address.sun_family = AF_UNIX;
      const std::string path = socket() + ".door";
      std::memcpy(address.sun_path, path.data(), path.size());
      std::vector<int> open;
      while (!stop) {
        const int fd = ::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
        if (connect(fd, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0) {
          close(fd);
          usleep(1000);
          continue;
        }
        // Garbage, silence, a hello without an ear for the answer.
        const char garbage[64] = {};
        if (t == 0) send(fd, garbage, sizeof(garbage), MSG_NOSIGNAL);
        const auto hello = MakeDoorMessage<DoorHello>();
        if (t == 1) send(fd, &hello, sizeof(hello), MSG_NOSIGNAL);
        open.push_back(fd);
        if (open.size() > 100) {
          for (const int old : open) close(old);
          open.clear();
        }
      }
      for (const int fd : open) close(fd);
    });
  }
  for (int i = 0; i < 20; ++i) {
    const auto newcomer = Connect(absl::StrCat("unix:", socket()), absl::Seconds(60));
    EXPECT_TRUE(newcomer->Stat().ok()) << newcomer->Stat().status();
    EXPECT_TRUE(client_->Stat().ok());
  }
  stop = true;
  for (std::thread& thread : flood) thread.join();
}

}  // namespace
}  // namespace kvmill::testing
