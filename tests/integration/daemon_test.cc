// The daemon as a process: starts, refuses, listens, drains, dies.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <grpcpp/create_channel.h>
#include <grpcpp/generic/generic_stub.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>

#include "absl/strings/str_cat.h"
#include "client/bulk_codec.h"
#include "kvmill/v1/cache.grpc.pb.h"
#include "tests/integration/daemon_fixture.h"

namespace kvmill::testing {
namespace {

using ::testing::AnyOf;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

class ProcessTest : public DaemonTest {
 protected:
  // Runs kvmilld with these arguments to its end.
  Exit Run(const std::vector<std::string>& arguments) {
    daemon_ = std::make_unique<DaemonProcess>(DaemonBinary(), arguments);
    return daemon_->WaitExit();
  }
  std::string Write(const std::string& name, const std::string& text) {
    std::ofstream(directory_ / name) << text;
    return directory_ / name;
  }
  unsigned Mode(const std::string& path) {
    struct stat info {};
    return stat(path.c_str(), &info) == 0 ? info.st_mode & 07777 : 0;
  }
  // One call of a method that no stub of ours knows.
  grpc::Status CallRaw(const std::string& address, const std::string& method,
                       const std::string& request, std::string* reply) {
    grpc::GenericStub stub(grpc::CreateChannel(address, grpc::InsecureChannelCredentials()));
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(30));
    grpc::CompletionQueue queue;
    auto stream = stub.PrepareCall(&context, method, &queue);
    void* tag = nullptr;
    bool ok = false;
    stream->StartCall(nullptr);
    queue.Next(&tag, &ok);
    const grpc::Slice slice(request);
    stream->WriteLast(grpc::ByteBuffer(&slice, 1), grpc::WriteOptions(), nullptr);
    queue.Next(&tag, &ok);
    grpc::ByteBuffer buffer;
    stream->Read(&buffer, nullptr);
    queue.Next(&tag, &ok);
    std::vector<grpc::Slice> slices;
    if (ok && buffer.Dump(&slices).ok()) {
      for (const grpc::Slice& s : slices) {
        reply->append(reinterpret_cast<const char*>(s.begin()), s.size());
      }
    }
    grpc::Status status;
    stream->Finish(&status, nullptr);
    queue.Next(&tag, &ok);
    return status;
  }
};

TEST_F(ProcessTest, TheReadyLineSaysWhereTheDaemonListens) {
  StartDurable(
      {"--listen", "[::1]:0", "--admin", "127.0.0.1:0", "--metrics", "127.0.0.1:0", "--insecure"});
  EXPECT_EQ(ready_["version"], "0.1.0");
  EXPECT_EQ(ready_["boot_id"].get<std::string>().size(), 32u);
  EXPECT_EQ(ready_["device"], "host");
  EXPECT_EQ(ready_["socket"], socket());
  EXPECT_THAT(ready_["listen"].get<std::string>(), StartsWith("[::1]:"));
  EXPECT_NE(ready_["listen"], "[::1]:0");
  EXPECT_THAT(ready_["admin"].get<std::string>(), StartsWith("127.0.0.1:"));
  EXPECT_THAT(ready_["metrics"].get<std::string>(), StartsWith("127.0.0.1:"));
  EXPECT_EQ(ready_["data_dir"], directory_ / "data");
  EXPECT_EQ(Mode(directory_ / "run"), 0750u);
  EXPECT_EQ(Mode(socket()), 0660u);
  EXPECT_EQ(Mode(socket() + ".door"), 0660u);
  EXPECT_EQ(Mode(directory_ / "data"), 0700u);
}

TEST_F(ProcessTest, SigtermDrainsAndExitsZero) {
  StartDurable();
  const ClientNamespace ns = Open("n", SmallSpec());
  Sequence sequence(SmallSpec(), 64 * 4, 1);
  EXPECT_EQ(Put(ns, "s", sequence).blocks_stored, 4u);
  daemon_->Signal(SIGTERM);
  const Exit exit = daemon_->WaitExit();
  EXPECT_EQ(exit.code, 0) << daemon_->standard_error();
  EXPECT_FALSE(std::filesystem::exists(socket()));
  EXPECT_FALSE(std::filesystem::exists(socket() + ".door"));
  // What was sealed, though nobody waited for it to be durable, is there again.
  StartDurable();
  const auto hits = client_->Lookup(Open("n", SmallSpec()), KeysOf("s", 4));
  ASSERT_TRUE(hits.ok());
  EXPECT_EQ(hits->hit_blocks, 4u);
}

TEST_F(ProcessTest, ADrainThatLeavesBlocksInMemoryOnlyExitsOne) {
  StartDurable();
  const ClientNamespace ns = Open("n", SmallSpec());
  Sequence sequence(SmallSpec(), 64 * 64, 1);
  EXPECT_EQ(Put(ns, "s", sequence).blocks_stored, 64u);
  // From now on no file of the daemon grows past it: as a full disk.
  rlimit limited{};
  ASSERT_EQ(prlimit(daemon_->pid(), RLIMIT_FSIZE, nullptr, &limited), 0);
  limited.rlim_cur = 64 << 10;
  ASSERT_EQ(prlimit(daemon_->pid(), RLIMIT_FSIZE, &limited, nullptr), 0);
  daemon_->Signal(SIGTERM);
  const Exit exit = daemon_->WaitExit();
  EXPECT_TRUE(exit.in_time);
  EXPECT_EQ(exit.signal, 0);
  EXPECT_EQ(exit.code, 1);
  EXPECT_THAT(daemon_->standard_error(), HasSubstr("not every block is durable"));
}

TEST_F(ProcessTest, AMemoryThatIsLargerThanFilesMayBeIsAnErrorAndNoSignal) {
  daemon_ = std::make_unique<DaemonProcess>(
      "/bin/bash",
      std::vector<std::string>{"-c", absl::StrCat("ulimit -f 2000; exec ", DaemonBinary(),
                                                  " --socket ", socket(), " --host-bytes 64MiB")});
  const Exit exit = daemon_->WaitExit();
  EXPECT_EQ(exit.signal, 0);
  EXPECT_EQ(exit.code, 1);
  EXPECT_THAT(daemon_->standard_error(), HasSubstr("File too large"));
}

TEST_F(ProcessTest, ASecondSigtermExitsAtOnce) {
  Start({"--drain-timeout", "10m"});
  Open("n", SmallSpec());
  // A Store that is never finished keeps the drain waiting.
  grpc::GenericStub stub(
      grpc::CreateChannel(absl::StrCat("unix:", socket()), grpc::InsecureChannelCredentials()));
  const LocalPass pass(socket());
  grpc::ClientContext context;
  pass.AddTo(&context);
  grpc::CompletionQueue queue;
  auto stream = stub.PrepareCall(&context, "/kvmill.v1.Cache/Store", &queue);
  void* tag = nullptr;
  bool ok = false;
  stream->StartCall(nullptr);
  ASSERT_TRUE(queue.Next(&tag, &ok) && ok);
  v1::StoreRequest begin;
  begin.mutable_begin()->mutable_namespace_()->set_name("n");
  stream->Write(ToByteBuffer(begin), nullptr);
  ASSERT_TRUE(queue.Next(&tag, &ok) && ok);
  // A reply to another call on the socket after the daemon has seen the stream.
  ASSERT_TRUE(client_->Stat().ok());
  daemon_->Signal(SIGTERM);
  while (daemon_->standard_error().find("draining") == std::string::npos) {
    ASSERT_EQ(kill(daemon_->pid(), 0), 0);
    usleep(1000);
  }
  daemon_->Signal(SIGTERM);
  const Exit exit = daemon_->WaitExit(std::chrono::seconds(60));
  EXPECT_TRUE(exit.in_time);
  EXPECT_EQ(exit.code, 1);
  grpc::Status status;
  stream->Finish(&status, nullptr);
  queue.Next(&tag, &ok);
}

TEST_F(ProcessTest, BadCommandLinesAreUsageErrors) {
  for (const std::vector<std::string>& arguments :
       std::vector<std::vector<std::string>>{{"--nope"},
                                             {"--host-bytes", "4XB"},
                                             {"--host-bytes"},
                                             {"--host-bytes", "1MiB"},
                                             {"--gpu-bytes", "1MiB"},
                                             {"--replication-rate", "1KiB"},
                                             {"--listen", "::1:7600"},
                                             {"--listen", "localhost"},
                                             {"--log-level", "loud"},
                                             {"--huge-pages", "yes"},
                                             {"--insecure=yes"},
                                             {"stray"}}) {
    EXPECT_EQ(Run(arguments).code, 2) << arguments[0];
    EXPECT_THAT(daemon_->standard_error(), StartsWith("kvmilld: "));
  }
}

TEST_F(ProcessTest, WhatCannotStartSaysWhyInOneLineAndExitsOne) {
  const struct {
    std::vector<std::string> arguments;
    std::string says;
  } cases[] = {
      {{"--listen", "127.0.0.1:0"}, "--insecure"},
      {{"--admin", "127.0.0.1:0"}, "--insecure"},
      {{"--config", Write("z.yaml", "host_bytes: 1MiB\n")},
       "z.yaml:1: host-bytes \"1MiB\": want at least 64MiB"},
      // Addresses that no host has (RFC 5737): seen before 4 GiB of memory are filled.
      {{"--metrics", "192.0.2.1:0"}, "--metrics 192.0.2.1:0: cannot listen there: "},
      {{"--listen", "192.0.2.1:7600", "--insecure"},
       "--listen 192.0.2.1:7600: cannot listen there"},
      {{"--admin", "[2001:db8::1]:0", "--insecure"},
       "--admin [2001:db8::1]:0: cannot listen there"},
      {{"--ucx", "192.0.2.1"}, "--ucx 192.0.2.1: cannot listen there: "},
      {{"--ucx", "192.0.2.1", "--check-config"}, "--ucx 192.0.2.1: cannot listen there: "},
      {{"--listen", "no.such.host.invalid:1", "--insecure", "--check-config"},
       "--listen no.such.host.invalid:1: cannot listen there: "},
      {{"--device", "cuda:99"}, "--device cuda:99: "},
      {{"--device", "host", "--gpu-bytes", "64MiB", "--encode-algorithm", "refined"},
       "--encode-algorithm refined: no kernel of a GPU does it"},
      {{"--device", "host", "--gpu-bytes", "64MiB", "--encode-algorithm", "refined",
        "--check-config"},
       "--encode-algorithm refined: no kernel of a GPU does it"},
      {{"--cluster", "etcd://127.0.0.1:2379"}, "needs --listen HOST:PORT"},
      {{"--config", directory_ / "absent.yaml"}, "cannot be read"},
      {{"--config", Write("a.yaml", "log_level: info\nhost_byte: 1GiB\n")},
       "a.yaml:2: unknown key \"host_byte\""},
      {{"--config", Write("b.yaml", "\nhost_bytes: 1XiB\n")}, "b.yaml:2: host-bytes \"1XiB\""},
      {{"--config", Write("c.yaml", "socket: [a, b]\n")},
       "c.yaml:1: key \"socket\": want a scalar"},
      {{"--config", Write("d.yaml", "socket: a\nsocket: b\n")}, "d.yaml:2: key \"socket\" again"},
      {{"--config", Write("e.yaml", "socket: {a: b\n")}, "e.yaml:"},
  };
  for (const auto& c : cases) {
    std::vector<std::string> arguments = {"--socket", socket()};
    arguments.insert(arguments.end(), c.arguments.begin(), c.arguments.end());
    EXPECT_EQ(Run(arguments).code, 1) << c.says;
    const std::string error = daemon_->standard_error();
    EXPECT_THAT(error, HasSubstr(c.says));
    EXPECT_EQ(std::count(error.begin(), error.end(), '\n'), 1) << error;
    EXPECT_EQ(daemon_->standard_output(), "");
  }
}

TEST_F(ProcessTest, APortThatIsTakenEndsTheStartBeforeMemoryIsFilledAndIsNoDrain) {
  Start({"--metrics", "127.0.0.1:0"});
  const std::string taken = ready_["metrics"].get<std::string>();
  const std::string other = directory_ / "other.sock";
  EXPECT_EQ(Run({"--socket", other, "--metrics", taken, "--check-config"}).code, 0)
      << "it may be its own port";
  Start({"--metrics", taken});
  DaemonProcess second(DaemonBinary(), {"--socket", other, "--metrics", taken});
  EXPECT_EQ(second.WaitExit().code, 1);
  const std::string error = second.standard_error();
  EXPECT_THAT(error, HasSubstr(absl::StrCat("--metrics ", taken, ": cannot listen there: ")));
  EXPECT_EQ(std::count(error.begin(), error.end(), '\n'), 1) << error;
  // What is only seen later is no drain either.
  daemon_->Signal(SIGKILL);
  daemon_->WaitExit();
  const std::string& free = taken;
  DaemonProcess third(DaemonBinary(), {"--socket", other, "--host-bytes", "64MiB", "--insecure",
                                       "--data-dir", directory_ / "data", "--disk-bytes", "1GiB",
                                       "--listen", free, "--admin", free});
  EXPECT_EQ(third.WaitExit().code, 1);
  EXPECT_THAT(third.standard_error(),
              HasSubstr(absl::StrCat("--admin ", free, ": cannot listen there")));
  EXPECT_THAT(third.standard_error(), Not(HasSubstr("drain")));
}

// Inherited by the daemon: its kernel has no huge pages to give.
TEST_F(ProcessTest, WithoutHugePagesADaemonRunsUnlessTheyAreDemanded) {
  const std::vector<std::string> small = {"--socket", socket(), "--host-bytes", "64MiB"};
  std::vector<std::string> demanding = small;
  demanding.insert(demanding.end(), {"--huge-pages", "on"});
  ASSERT_EQ(prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0), 0);
  const Exit refused = Run(demanding);
  const std::string why = daemon_->standard_error();
  Start({"--host-bytes", "64MiB"});
  ASSERT_EQ(prctl(PR_SET_THP_DISABLE, 0, 0, 0, 0), 0);
  EXPECT_EQ(refused.code, 1);
  EXPECT_THAT(why, HasSubstr("0 of 32 huge pages (2 MiB) could be had"));
  EXPECT_THAT(daemon_->standard_error(), HasSubstr("host memory: 0 of 64 MiB in huge pages: "));
  EXPECT_TRUE(client_->Stat().ok());
}

TEST_F(ProcessTest, FlagsOverrideTheFileAndThePrintedConfigurationReadsBack) {
  const std::string file = Write("k.yaml", "host_bytes: 1GiB\nlog_level: warn\n");
  EXPECT_EQ(
      Run({"--socket", socket(), "--config", file, "--log-level=error", "--print-config"}).code, 0);
  const std::string printed = daemon_->standard_output();
  EXPECT_THAT(printed, HasSubstr("host_bytes: \"1GiB\""));
  EXPECT_THAT(printed, HasSubstr("log_level: \"error\""));
  EXPECT_EQ(Run({"--config", Write("back.yaml", printed), "--print-config"}).code, 0);
  EXPECT_EQ(daemon_->standard_output(), printed);
  EXPECT_EQ(Run({"--config", file, "--check-config"}).code, 0);
  EXPECT_EQ(daemon_->standard_output(),
            absl::StrCat("kvmilld: the configuration is good: ", file, "\n"));
  EXPECT_EQ(Run({"--socket", socket(), "--node-id", "a b"}).code, 2);
  EXPECT_EQ(Run({"--socket", socket(), "--zone", "."}).code, 2);
}

TEST_F(ProcessTest, ASocketOfADeadDaemonIsReplacedAndALiveOneIsRefused) {
  Start();
  Kill();
  ASSERT_TRUE(std::filesystem::exists(socket()));
  Start();
  DaemonProcess second(DaemonBinary(), DefaultArguments());
  EXPECT_EQ(second.WaitExit().code, 1);
  EXPECT_THAT(second.standard_error(), HasSubstr("another daemon"));
  EXPECT_TRUE(client_->Stat().ok()) << "the first one goes on";
}

TEST_F(ProcessTest, APathThatIsNoSocketIsLeftAlone) {
  std::filesystem::create_directory(directory_ / "run");
  Write("run/kvmill.sock", "precious");
  EXPECT_EQ(Run(DefaultArguments()).code, 1);
  EXPECT_THAT(daemon_->standard_error(), HasSubstr("not a socket"));
  EXPECT_TRUE(std::filesystem::is_regular_file(socket()));
}

TEST_F(ProcessTest, TwoDaemonsDoNotShareADataDirectory) {
  StartDurable();
  DaemonProcess second(DaemonBinary(),
                       {"--socket", directory_ / "other.sock", "--host-bytes", "256MiB",
                        "--data-dir", directory_ / "data", "--disk-bytes", "1GiB"});
  EXPECT_EQ(second.WaitExit().code, 1);
  EXPECT_TRUE(client_->Stat().ok());
}

TEST_F(ProcessTest, EveryListenerServesWhatItShould) {
  Start({"--listen", "[::1]:0", "--admin", "127.0.0.1:0", "--insecure"});
  const auto tcp = Connect(ready_["listen"]);
  ASSERT_TRUE(tcp->Stat().ok());
  EXPECT_EQ(tcp->Status().status().code(), absl::StatusCode::kPermissionDenied);
  EXPECT_EQ(tcp->Drain().status().code(), absl::StatusCode::kPermissionDenied);
  EXPECT_EQ(tcp->Evict(Tier::kHost, 0).status().code(), absl::StatusCode::kPermissionDenied);
  EXPECT_EQ(tcp->Verify().status().code(), absl::StatusCode::kPermissionDenied);
  const auto admin = Connect(ready_["admin"]);
  EXPECT_TRUE(admin->Status().ok());
  EXPECT_EQ(admin->Stat().status().code(), absl::StatusCode::kUnimplemented);
  const auto status = client_->Status();
  ASSERT_TRUE(status.ok()) << status.status();
  EXPECT_EQ(status->encode_threads, 2u);
  EXPECT_EQ(status->stat.boot_id, ready_["boot_id"]);
}

TEST_F(ProcessTest, AnotherUserMayNotAdministerOnTheSocket) {
  if (geteuid() != 0) GTEST_SKIP() << "needs root to act as another user";
  Start();
  LetOthersIn();
  const auto status_for = [&](uid_t uid) { return Probe({"status"}, uid)->WaitExit().code; };
  EXPECT_EQ(status_for(65534), static_cast<int>(absl::StatusCode::kPermissionDenied));
  EXPECT_EQ(status_for(0), 0);
}

TEST_F(ProcessTest, HealthAndReflectionAnswer) {
  Start();
  const std::string address = absl::StrCat("unix:", socket());
  std::string reply;
  // HealthCheckResponse{status = SERVING}.
  EXPECT_TRUE(CallRaw(address, "/grpc.health.v1.Health/Check", "", &reply).ok());
  EXPECT_EQ(reply, std::string("\x08\x01"));
  // ServerReflectionRequest{list_services = "*"}.
  reply.clear();
  EXPECT_TRUE(CallRaw(address, "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
                      std::string("\x3a\x01*"), &reply)
                  .ok());
  for (const char* service : {"kvmill.v1.Cache", "kvmill.v1.Engine", "kvmill.v1.Admin"}) {
    EXPECT_THAT(reply, HasSubstr(service));
  }
  ASSERT_TRUE(client_->Drain().ok());
  reply.clear();
  EXPECT_TRUE(CallRaw(address, "/grpc.health.v1.Health/Check", "", &reply).ok());
  EXPECT_EQ(reply, std::string("\x08\x02")) << "NOT_SERVING while draining";
}

TEST_F(ProcessTest, ADaemonThatDoesNotExistIsUnavailable) {
  const auto client = Connect(absl::StrCat("unix:", directory_ / "nobody.sock"));
  EXPECT_TRUE(absl::IsUnavailable(client->Stat().status()));
}

TEST_F(ProcessTest, ABusyDaemonIsWaitedForAndOneThatNeverAnswersIsUnavailable) {
  Start();
  const std::unique_ptr<Client> other = Connect(absl::StrCat("unix:", socket()));
  daemon_->Signal(SIGSTOP);
  std::thread later([&] {
    std::this_thread::sleep_for(std::chrono::seconds(1));
    daemon_->Signal(SIGCONT);
  });
  const auto stat = other->Stat();  // The first call: it connects.
  later.join();
  EXPECT_TRUE(stat.ok()) << stat.status();
  daemon_->Signal(SIGSTOP);
  const absl::Time start = absl::Now();
  const auto never = Connect(absl::StrCat("unix:", socket()))->Stat();
  EXPECT_EQ(never.status().code(), absl::StatusCode::kUnavailable) << never.status();
  EXPECT_LT(absl::Now() - start, absl::Seconds(20));
  daemon_->Signal(SIGCONT);
}

TEST_F(ProcessTest, AStoppedDaemonMeetsTheDeadlineAndGivesTheMemoryBack) {
  Start();
  const ClientNamespace ns = Open("n", SmallSpec());
  daemon_->Signal(SIGSTOP);
  {
    // More than socket and windows take, so that the transport holds on to some of it.
    Sequence sequence(SmallSpec(), 64 * 512, 1);
    const std::vector<StoreBlock> blocks = sequence.Blocks("s");
    const auto stored = client_->Store(ns, blocks, {}, {absl::Milliseconds(300)});
    EXPECT_EQ(stored.status().code(), absl::StatusCode::kDeadlineExceeded) << stored.status();
    PageCollector pages;
    const auto fetched = client_->Fetch(ns, KeysOf("s", 3), pages, {absl::Milliseconds(100)});
    EXPECT_EQ(fetched.status().code(), absl::StatusCode::kDeadlineExceeded) << fetched.status();
    EXPECT_EQ(client_->Stat({absl::Milliseconds(100)}).status().code(),
              absl::StatusCode::kDeadlineExceeded);
  }  // The memory is gone here; the sanitizers would see a late read.
  daemon_->Signal(SIGCONT);
  Sequence sequence(SmallSpec(), 64, 2);
  EXPECT_EQ(Put(ns, "t", sequence).blocks_stored, 1u);
  EXPECT_FALSE(Get(ns, KeysOf("t", 1)).empty());
}

TEST_F(ProcessTest, ADaemonKilledMidCallIsUnavailableAndItsSuccessorIsNoticed) {
  StartDurable();
  const ClientNamespace ns = Open("n", SmallSpec());
  Sequence sequence(SmallSpec(), 64 * 2, 1);
  ASSERT_EQ(Put(ns, "s", sequence, true).blocks_stored, 2u);
  const auto before = Get(ns, KeysOf("s", 2));
  const std::string boot_id = client_->boot_id();
  EXPECT_EQ(boot_id, ready_["boot_id"]);
  const std::unique_ptr<Client> client = std::move(client_);
  daemon_->Signal(SIGSTOP);  // So that the call is still running when the daemon dies.
  absl::StatusOr<ServerStat> stat = absl::UnknownError("no answer");
  std::atomic<bool> done{false};
  client->StatAsync({}, [&](absl::StatusOr<ServerStat> result) {
    stat = std::move(result);
    done.store(true, std::memory_order_release);
  });
  Kill();
  while (!done.load(std::memory_order_acquire)) usleep(1000);
  EXPECT_TRUE(absl::IsUnavailable(stat.status())) << stat.status();
  StartDurable();
  client_ = Connect(absl::StrCat("unix:", socket()));
  // The old client reconnects by itself; the first tries may meet the back-off.
  for (int i = 0; i < 3000 && !client->Stat().ok(); ++i) usleep(10'000);
  EXPECT_EQ(client->boot_id(), ready_["boot_id"]);
  EXPECT_NE(client->boot_id(), boot_id);
  EXPECT_EQ(Get(ns, KeysOf("s", 2)), before);
}

TEST_F(ProcessTest, ARestartedDaemonWithoutADiskGetsItsNamespacesAgain) {
  Start();
  const ClientNamespace ns = Open("n", SmallSpec());
  const std::unique_ptr<Client> client = std::move(client_);
  Kill();
  Start();
  client_ = nullptr;
  for (int i = 0; i < 3000 && !client->Stat().ok(); ++i) usleep(10'000);
  const auto hits = client->Lookup(ns, KeysOf("s", 1));
  ASSERT_TRUE(hits.ok()) << hits.status();
  EXPECT_EQ(hits->hit_blocks, 0u);
  Sequence sequence(SmallSpec(), 64, 2);
  const std::vector<StoreBlock> blocks = sequence.Blocks("s");
  const auto stored = client->Store(ns, blocks, {});
  ASSERT_TRUE(stored.ok()) << stored.status();
  EXPECT_EQ(stored->blocks_stored, 1u);
}

TEST_F(ProcessTest, DurableBlocksSurviveKillsWhileOthersAreStored) {
  // Each round: store some blocks durably, kill the daemon while it stores more, restart, and
  // compare what is there. Acknowledged as durable: right. Every other one: right or absent.
  std::vector<std::pair<std::string, std::vector<std::vector<std::uint16_t>>>> durable;
  for (std::uint32_t round = 0; round < 4; ++round) {
    StartDurable();
    const ClientNamespace ns = Open("n", SmallSpec());
    for (const auto& [name, values] : durable) {
      EXPECT_EQ(Get(ns, KeysOf(name, 6)), values) << name << " after round " << round;
    }
    if (round > 0) {
      Sequence expected(SmallSpec(), 64 * 128, 100 + round - 1);
      const std::string name = absl::StrCat("open", round - 1);
      for (std::uint32_t b = 0; b < 128; ++b) {
        const auto got = Get(ns, {KeyOf(name, b)});
        if (got.empty()) continue;
        EXPECT_LT(expected.RelativeError(got, b * 64, 64), 0.35) << b;
      }
    }
    Sequence sequence(SmallSpec(), 64 * 6, round);
    const std::string name = absl::StrCat("durable", round);
    ASSERT_EQ(Put(ns, name, sequence, true).blocks_stored, 6u);
    durable.emplace_back(name, Get(ns, KeysOf(name, 6)));
    Sequence more(SmallSpec(), 64 * 128, 100 + round);
    const std::vector<StoreBlock> blocks = more.Blocks(absl::StrCat("open", round));
    std::atomic<bool> done{false};
    client_->StoreAsync(ns, blocks, {}, {},
                        [&](const absl::StatusOr<StoreResult>&) { done.store(true); });
    usleep(round * 7'000);  // Another moment of the store each time.
    Kill();
    while (!done.load()) usleep(1000);
  }
}

}  // namespace
}  // namespace kvmill::testing
