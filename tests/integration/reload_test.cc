// The configuration changes while a daemon runs and serves: by SIGHUP, and by itself with
// --watch-config. Every option that can change is seen to change what the daemon does (those of the
// cluster in cluster_reload_test); bad files change nothing, one by one.
#include <gmock/gmock.h>
#include <grpcpp/create_channel.h>
#include <httplib.h>
#include <signal.h>
#include <sys/stat.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "client/events.h"
#include "client/server_address.h"
#include "client/tls/tls_credentials.h"
#include "kvmill/v1/cache.grpc.pb.h"
#include "kvmill/v1/engine.grpc.pb.h"
#include "kvmill/v1/peer.grpc.pb.h"
#include "tests/integration/daemon_fixture.h"
#include "tests/integration/test_certificates.h"

namespace kvmill::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

constexpr const char* kToken = "a-token-that-only-tests-have";
// printf %s a-token-that-only-tests-have | sha256sum
constexpr const char* kTokenDigest =
    "sha256:316c810560329ed9b617b33b49aaf6fba24cb57ecc94262a2729248660c6e1aa";

class ReloadTest : public DaemonTest {
 protected:
  std::string config_path() const { return directory_ / "kvmilld.yaml"; }
  std::string tenants_path() const { return directory_ / "tenants.yaml"; }
  void Write(const std::string& path, const std::string& text) const {
    const std::string next = path + ".next";
    std::ofstream(next) << text;
    std::filesystem::rename(next, path);
  }
  void WriteConfig(const std::string& more) const { Write(config_path(), fixed_ + more); }
  void WriteTenants(const std::string& more) const {
    Write(tenants_path(),
          absl::StrCat("tenants:\n  team-a:\n    certificates: [client.example]\n", more));
  }

  std::string Metrics() const {
    const HostPort address = *ParseHostPort(ready_["metrics"].get<std::string>());
    httplib::Client http(address.host, address.port);
    http.set_read_timeout(60);
    const auto answer = http.Get("/metrics");
    return answer ? answer->body : "";
  }
  double Metric(const std::string& series) const {
    for (const absl::string_view line : absl::StrSplit(Metrics(), '\n')) {
      const std::pair<absl::string_view, absl::string_view> parts =
          absl::StrSplit(line, absl::MaxSplits(' ', 1));
      double value = 0;
      if (parts.first == series && absl::SimpleAtod(parts.second, &value)) return value;
    }
    return -1;
  }
  double Applied() const { return Metric("kvmill_config_reloads_total{result=\"applied\"}"); }
  double Refused() const { return Metric("kvmill_config_reloads_total{result=\"refused\"}"); }

  static void Until(const std::function<bool()>& is_so, const std::string& what) {
    const auto give_up = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    while (!is_so()) {
      ASSERT_LT(std::chrono::steady_clock::now(), give_up) << what;
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
  }
  // SIGHUP, and waits until it was taken over, or refused.
  void Reload(bool good = true) {
    const double applied = Applied(), refused = Refused();
    daemon_->Signal(SIGHUP);
    Until([&] { return Applied() + Refused() > applied + refused; }, "no reload");
    EXPECT_EQ(Applied(), applied + (good ? 1 : 0)) << daemon_->standard_error();
    EXPECT_EQ(Metric("kvmill_config_refused"), good ? 0 : 1);
  }
  DaemonConfig Config() {
    const absl::StatusOr<DaemonConfig> config = client_->Configuration();
    EXPECT_TRUE(config.ok()) << config.status();
    return config.ok() ? *config : DaemonConfig();
  }
  static DaemonConfig::Option OptionOf(const DaemonConfig& config, const std::string& name) {
    for (const DaemonConfig::Option& option : config.options) {
      if (option.name == name) return option;
    }
    ADD_FAILURE() << "no option " << name;
    return {};
  }
  // What it logs from here on.
  std::string LogSince(std::size_t begin) const { return daemon_->standard_error().substr(begin); }

  // TLS with --tenants.
  void StartTls() {
    fixed_ =
        absl::StrCat("listen: \"127.0.0.1:0\"\nadmin: \"127.0.0.1:0\"\nmetrics: \"127.0.0.1:0\"\n",
                     "tls_cert: ", node_.certificate, "\ntls_key: ", node_.key,
                     "\ntls_ca: ", authority_.ca_path(), "\ntenants: ", tenants_path(), "\n");
    WriteConfig("error_sample_interval: 0\nsession_grace: 1h\ndrain_timeout: 1h\n");
    WriteTenants("");
    Start({"--config", config_path(), "--ucx", "127.0.0.1"});
  }
  TlsFiles FilesOf(const TestAuthority::Files& files) const {
    return {authority_.ca_path(), files.certificate, files.key, ""};
  }
  std::shared_ptr<grpc::Channel> ChannelOf(const TestAuthority::Files& files) const {
    grpc::ChannelArguments arguments;
    arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    return grpc::CreateCustomChannel(ready_["listen"].get<std::string>(),
                                     ChannelCredentialsOf(FilesOf(files)), arguments);
  }
  static void Prepare(grpc::ClientContext* call, const std::string& token) {
    call->set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(60));
    call->set_wait_for_ready(true);
    if (!token.empty()) call->AddMetadata("authorization", "Bearer " + token);
  }
  static grpc::StatusCode Stat(const std::shared_ptr<grpc::Channel>& channel,
                               const std::string& token = "") {
    grpc::ClientContext call;
    Prepare(&call, token);
    v1::StatReply reply;
    return v1::Cache::NewStub(channel)->Stat(&call, {}, &reply).error_code();
  }
  grpc::StatusCode ListRuns(const std::shared_ptr<grpc::Channel>& channel) const {
    grpc::ClientContext call;
    Prepare(&call, "");
    v1::ListRunsRequest request;
    request.set_incarnation(absl::HexStringToBytes(ready_["boot_id"].get<std::string>()));
    v1::ListRunsReply reply;
    return v1::Peer::NewStub(channel)->ListRuns(&call, request, &reply).error_code();
  }

  std::string fixed_ = "metrics: \"127.0.0.1:0\"\n";
  TestAuthority authority_;
  TestAuthority::Files node_ =
      authority_.Issue("node", absl::StrCat(TestAuthority::kLoopback, ",DNS:node.example"));
  TestAuthority::Files second_ = authority_.Issue("n2", "DNS:second.example");
  TestAuthority::Files client_cert_ = authority_.Issue("c", "DNS:client.example");
};

// A client that works all the time, and wants every answer.
class Load {
 public:
  Load(Client& client, const NamespaceSpec& spec)
      : client_(client), spec_(spec), thread_([this] { Run(); }) {}
  ~Load() { Stop(); }
  std::uint64_t rounds() const { return rounds_; }
  void Stop() {
    stop_ = true;
    if (thread_.joinable()) thread_.join();
  }

 private:
  void Run() {
    const auto ns = client_.OpenNamespace("load", spec_);
    ASSERT_TRUE(ns.ok()) << ns.status();
    Sequence sequence(spec_, 2 * spec_.block_tokens, 3);
    for (int i = 0; !stop_; ++i) {
      const std::string name = absl::StrCat("s", i % 8);
      const auto stored = client_.Store(*ns, sequence.Blocks(name), {});
      ASSERT_TRUE(stored.ok()) << stored.status();
      const auto found = client_.Lookup(*ns, KeysOf(name, 2));
      ASSERT_TRUE(found.ok()) << found.status();
      ASSERT_EQ(found->hit_blocks, 2u);
      PageCollector pages;
      const auto fetched = client_.Fetch(*ns, KeysOf(name, 2), pages);
      ASSERT_TRUE(fetched.ok()) << fetched.status();
      ASSERT_EQ(pages.pages.size(), 4u);
      ++rounds_;
    }
  }
  Client& client_;
  const NamespaceSpec spec_;
  std::atomic<bool> stop_{false};
  std::atomic<std::uint64_t> rounds_{0};
  std::thread thread_;
};

TEST_F(ReloadTest, EveryOptionChangesWhatTheDaemonDoesAndItsClientsNoticeNothing) {
  StartTls();
  ASSERT_FALSE(HasFatalFailure());
  Load load(*client_, SmallSpec());
  Until([&] { return load.rounds() > 0; }, "no load");
  const auto by_certificate = ChannelOf(client_cert_);
  const auto by_second = ChannelOf(second_);
  const auto by_token = ChannelOf({});
  std::string options = "error_sample_interval: 0\nsession_grace: 1h\ndrain_timeout: 1h\n";

  // tenants: connections that are there learn it with their next call.
  ASSERT_EQ(Stat(by_certificate), grpc::StatusCode::OK);
  ASSERT_EQ(Stat(by_token, kToken), grpc::StatusCode::UNAUTHENTICATED);
  WriteTenants(absl::StrCat("  team-b:\n    tokens: [\"", kTokenDigest, "\"]\n"));
  Reload();
  EXPECT_EQ(Stat(by_token, kToken), grpc::StatusCode::OK);
  EXPECT_EQ(Stat(by_certificate), grpc::StatusCode::OK);
  // A client whose data plane was let in by a token that is taken away is not let in again.
  {
    Client::Options remote_options;
    remote_options.address = ready_["listen"];
    remote_options.tls = FilesOf({});
    remote_options.token = kToken;
    const auto remote = Client::Create(remote_options);
    ASSERT_TRUE(remote.ok()) << remote.status();
    const auto ns = (*remote)->OpenNamespace("theirs", SmallSpec());
    ASSERT_TRUE(ns.ok()) << ns.status();
    Sequence sequence(SmallSpec(), SmallSpec().block_tokens, 5);
    ASSERT_TRUE((*remote)->Store(*ns, sequence.Blocks("t"), {}).ok());
    EXPECT_THAT((*remote)->ucx_transport(), HasSubstr("tcp"));
    EXPECT_GE(Metric("kvmill_data_connections"), 1);
    // And who watches its blocks is told of no more.
    const auto events = EventStream::Open(remote_options, {});
    ASSERT_TRUE(events.ok()) << events.status();
    const auto batch = (*events)->Next(absl::InfiniteDuration());
    ASSERT_TRUE(batch.ok()) << batch.status();
    WriteTenants("");
    Reload();
    EXPECT_EQ(Stat(by_token, kToken), grpc::StatusCode::UNAUTHENTICATED);
    absl::Status end;
    while (end.ok()) end = (*events)->Next(absl::InfiniteDuration()).status();
    EXPECT_TRUE(absl::IsUnauthenticated(end)) << end;
    Until([&] { return Metric("kvmill_data_connections") == 0; }, "the data plane lets them stay");
    PageCollector pages;
    const auto fetched = (*remote)->Fetch(*ns, KeysOf("t", 1), pages);
    EXPECT_FALSE(fetched.ok());
    EXPECT_TRUE(pages.pages.empty());
  }

  // tls-peers.
  EXPECT_EQ(ListRuns(by_second), grpc::StatusCode::PERMISSION_DENIED);
  WriteConfig(absl::StrCat(options, "tls_peers: node.example,second.example\n"));
  Reload();
  EXPECT_EQ(ListRuns(by_second), grpc::StatusCode::FAILED_PRECONDITION) << "in no cluster";
  WriteConfig(options);
  Reload();
  EXPECT_EQ(ListRuns(by_second), grpc::StatusCode::PERMISSION_DENIED);

  // log-level, by a line of a caller that is refused.
  std::size_t begin = daemon_->standard_error().size();
  WriteConfig(options + "log_level: error\n");
  Reload();
  EXPECT_EQ(Stat(by_token, "a-guess"), grpc::StatusCode::UNAUTHENTICATED);
  EXPECT_THAT(LogSince(begin), Not(HasSubstr("a caller is refused")));
  WriteConfig(options);
  Reload();
  EXPECT_EQ(Stat(by_token, "a-guess"), grpc::StatusCode::UNAUTHENTICATED);
  EXPECT_THAT(LogSince(begin), HasSubstr("a caller is refused"));
  // log-format.
  options += "log_format: json\n";
  WriteConfig(options);
  Reload();
  begin = daemon_->standard_error().size();
  EXPECT_EQ(Stat(by_token, "a-guess"), grpc::StatusCode::UNAUTHENTICATED);
  const nlohmann::json line = nlohmann::json::parse(LogSince(begin), nullptr, false);
  EXPECT_FALSE(line.is_discarded()) << LogSince(begin);
  EXPECT_EQ(line["level"], "info");

  // error-sample-interval and metrics-namespaces.
  EXPECT_THAT(Metrics(), Not(HasSubstr("kvmill_quantization_error_ratio_count")));
  const auto store = [&](const std::string& name) {
    NamespaceSpec spec = SmallSpec();
    spec.model = name;  // Else it is the load's namespace by another name.
    const ClientNamespace ns = Open(name, spec);
    Sequence sequence(spec, spec.block_tokens, 9);
    static int number = 0;
    EXPECT_EQ(Put(ns, absl::StrCat("n", ++number), sequence).blocks_stored, 1u);
  };
  WriteConfig(options + "error_sample_interval: 1\nmetrics_namespaces: 0\n");
  EXPECT_THAT(options, HasSubstr("error_sample_interval: 0\n"));
  Reload(/*good=*/false);  // The key is there twice.
  options = "session_grace: 1h\ndrain_timeout: 1h\nlog_format: json\nerror_sample_interval: 1\n";
  WriteConfig(options + "metrics_namespaces: 0\n");
  Reload();
  store("named");
  EXPECT_THAT(Metrics(), HasSubstr("namespace=\"other namespaces\""));
  EXPECT_THAT(Metrics(), Not(HasSubstr("namespace=\"named\"")));
  WriteConfig(options + "metrics_namespaces: 4\n");
  Reload();
  store("named");
  EXPECT_THAT(Metrics(), HasSubstr("namespace=\"named\""));

  // session-grace: a session whose stream broke, and that is there until it is over.
  const auto break_session = [&] {
    grpc::ClientContext call;
    Prepare(&call, "");
    const auto engine = v1::Engine::NewStub(by_certificate);
    const auto stream = engine->Session(&call);
    v1::SessionRequest request;
    request.mutable_open()->mutable_client()->set_protocol_version(1);
    EXPECT_TRUE(stream->Write(request));
    v1::SessionReply reply;
    EXPECT_TRUE(stream->Read(&reply));
    const std::uint32_t grace_ms = reply.opened().resume_grace_ms();
    call.TryCancel();
    while (stream->Read(&reply)) {
    }
    EXPECT_EQ(stream->Finish().error_code(), grpc::StatusCode::CANCELLED);
    return grace_ms;
  };
  const double sessions = Metric("kvmill_sessions");
  EXPECT_EQ(break_session(), 3'600'000u);
  EXPECT_EQ(Metric("kvmill_sessions"), sessions + 1) << "it may be resumed";
  options += "metrics_namespaces: 4\n";
  options.replace(options.find("1h"), 2, "0s");
  WriteConfig(options);
  Reload();
  Until([&] { return Metric("kvmill_sessions") == sessions; }, "a session of before stays");
  EXPECT_EQ(break_session(), 0u);
  Until([&] { return Metric("kvmill_sessions") == sessions; }, "a session stays");

  // Many at once, and the load goes on.
  const std::uint64_t rounds = load.rounds();
  for (int i = 0; i < 200; ++i) daemon_->Signal(SIGHUP);
  Until([&] { return load.rounds() > rounds + 20; }, "the load stands still");
  load.Stop();
  EXPECT_FALSE(HasFailure());

  // drain-timeout: a call that does not end has an hour no more.
  options.replace(options.find("1h"), 2, "1s");
  WriteConfig(options);
  Reload();
  EXPECT_EQ(OptionOf(Config(), "drain-timeout").value, "1s");
  grpc::ClientContext call;
  Prepare(&call, "");
  const auto cache = v1::Cache::NewStub(by_certificate);
  const auto open_store = cache->Store(&call);
  EXPECT_EQ(Stat(by_certificate), grpc::StatusCode::OK) << "after it, on the same connection";
  daemon_->Signal(SIGTERM);
  const Exit exit = daemon_->WaitExit(std::chrono::seconds(300));
  EXPECT_TRUE(exit.in_time);
  EXPECT_EQ(exit.code, 0);
  EXPECT_THAT(daemon_->standard_error(), Not(HasSubstr(kToken)));
}

TEST_F(ReloadTest, WatermarksThatChangeMoveBlocksOutOfMemory) {
  WriteConfig("host_high_watermark: 100\n");
  StartDurable({"--config", config_path()});
  ASSERT_FALSE(HasFatalFailure());
  const NamespaceSpec spec = SmallSpec();
  const ClientNamespace ns = Open("marks", spec);
  constexpr std::uint32_t kBlocks = 250;
  Sequence sequence(spec, kBlocks * spec.block_tokens, 4);
  ASSERT_EQ(Put(ns, "s", sequence, /*durable=*/true).blocks_stored, kBlocks);
  const std::string used = "kvmill_tier_used_bytes{tier=\"host\"}";
  const double before = Metric(used);
  ASSERT_GT(before, 0.012 * Metric("kvmill_tier_capacity_bytes{tier=\"host\"}"));
  std::this_thread::sleep_for(std::chrono::milliseconds(1500));
  EXPECT_EQ(Metric(used), before);
  WriteConfig("host_high_watermark: 1\nhost_low_watermark: 0\n");
  Reload();
  Until([&] { return Metric(used) == 0; }, "blocks stay in memory");
  EXPECT_EQ(Metric("kvmill_evicted_blocks_total{tier=\"host\",reason=\"watermark\"}"), kBlocks);
  EXPECT_EQ(Metric("kvmill_evicted_blocks_total{tier=\"host\",reason=\"capacity\"}"), 0);
  EXPECT_EQ(Get(ns, KeysOf("s", kBlocks)).size(), 4u) << "they are on disk";
}

TEST_F(ReloadTest, BadFilesChangeNothingAndTheDaemonServes) {
  StartTls();
  ASSERT_FALSE(HasFatalFailure());
  const auto channel = ChannelOf(client_cert_);
  const auto shown = [&] {
    std::string all;
    for (const DaemonConfig::Option& o : Config().options) {
      absl::StrAppend(&all, o.name, "=", o.value, " ", o.source, "\n");
    }
    return all;
  };
  const std::string before = shown();
  const std::string good = "error_sample_interval: 0\nsession_grace: 1h\ndrain_timeout: 1h\n";
  const std::string tenants_text = ReadText(tenants_path());
  const auto config_case = [this, good](const std::string& text) {
    return [this, text, good] { WriteConfig(good + text); };
  };
  const auto tenants_case = [this](const std::string& text) {
    return [this, text] { Write(tenants_path(), text); };
  };
  const struct {
    std::function<void()> spoil;
    std::string says;
  } cases[] = {
      // No more than the log takes from one place at once.
      {config_case("log_level: loud\n"), ":11: log-level \"loud\": want trace|debug|info"},
      {config_case("log_levle: debug\n"), ":11: unknown key \"log_levle\""},
      {config_case("peer_timeout: 5\n"), ":11: peer-timeout \"5\""},
      {config_case("log_level: debug\nzone: \"\xff\"\n"), ":12: byte 0xff is not UTF-8"},
      {config_case("log_level: \"debug\n"), "the file ends inside a quoted value"},
      {config_case("host_high_watermark: 90\n"),
       "--host-low-watermark 90: want less than --host-high-watermark, 90"},
      {config_case("log_level: debug\ninsecure: true\n"), "--insecure with --tls-"},
      {config_case("log_level: debug\n---\nlog_level: debug\n"), "a second document"},
      {[&] { Write(config_path(), "- a\n"); }, ":1: want a map of options"},
      {[&] { Write(config_path(), std::string(2 << 20, '#')); }, "is larger than 1048576 bytes"},
      {[&] { std::filesystem::remove(config_path()); }, "is no file (any more)"},
      {[&] {
         std::filesystem::remove(config_path());
         std::filesystem::create_directory(config_path());
       },
       "is no file (any more)"},
      {[&] {
         std::filesystem::remove(config_path());
         ASSERT_EQ(mkfifo(config_path().c_str(), 0600), 0);
       },
       "is no file (any more)"},
      {tenants_case(""), "want a map with the key \"tenants\""},
      {tenants_case("tenants: {}\n"), "nobody could come in"},
      {tenants_case(tenants_text + "    tokens: [a-plain-token]\n"), ":4: want sha256:"},
      {tenants_case(tenants_text + "    rights: all\n"), ":4: unknown key \"rights\""},
      {[&] { std::filesystem::remove(tenants_path()); }, "tenants.yaml: is no file (any more)"},
      {[&] { WriteConfig("tls_cert: /none\n"); }, ":8: key \"tls_cert\" again"},
  };
  for (const auto& c : cases) {
    SCOPED_TRACE(c.says);
    const std::size_t begin = daemon_->standard_error().size();
    c.spoil();
    Reload(/*good=*/false);
    const std::string said = LogSince(begin);
    EXPECT_THAT(said, HasSubstr(c.says));
    EXPECT_THAT(said, HasSubstr("nothing changes"));
    EXPECT_EQ(std::count(said.begin(), said.end(), '\n'), 1) << said;
    EXPECT_THAT(said, Not(HasSubstr("a-plain-token")));
    EXPECT_THAT(Config().problem, HasSubstr(c.says));
    EXPECT_EQ(shown(), before);
    EXPECT_EQ(Stat(channel), grpc::StatusCode::OK);
    std::filesystem::remove_all(config_path());
    WriteConfig(good);
    Write(tenants_path(), tenants_text);
  }
  Reload();
  EXPECT_EQ(Config().problem, "");
  EXPECT_EQ(shown(), before);
}

// quota: what is above a lower one leaves, what comes is bounded by it, and a higher one lets in.
TEST_F(ReloadTest, AQuotaHoldsFromTheReloadOn) {
  const auto write_hard = [&](std::uint64_t bytes) {
    Write(tenants_path(), absl::StrCat("tenants: {default: {quota: {hard: ", bytes, "}}}\n"));
  };
  const auto usage = [&] {
    const absl::StatusOr<std::vector<TenantQuotaUse>> tenants = client_->Quota();
    EXPECT_TRUE(tenants.ok()) << tenants.status();
    for (const TenantQuotaUse& tenant : *tenants) {
      if (tenant.tenant == "default") return tenant;
    }
    return TenantQuotaUse();
  };
  constexpr std::uint64_t kMuch = std::uint64_t{1} << 30;
  write_hard(kMuch);
  fixed_ += absl::StrCat("tenants: ", tenants_path(), "\n");
  WriteConfig("");
  Start({"--config", config_path()});
  ASSERT_FALSE(HasFatalFailure());
  const ClientNamespace ns = Open("n", SmallSpec());
  Sequence sequence(SmallSpec(), 8 * SmallSpec().block_tokens, 5);
  Put(ns, "a", sequence);
  const std::uint64_t all = usage().used_bytes;
  ASSERT_GT(all, 0u);
  EXPECT_EQ(usage().hard_bytes, kMuch);
  write_hard(all / 2);
  Reload();
  EXPECT_EQ(usage().hard_bytes, all / 2);
  Until([&] { return usage().charged_bytes <= all / 2; }, "nothing leaves");
  Sequence shorter(SmallSpec(), 2 * SmallSpec().block_tokens, 6);
  EXPECT_EQ(Put(ns, "b", shorter).blocks_failed, 0u);
  EXPECT_LE(usage().used_bytes, all / 2);
  // A bad file changes nothing.
  Write(tenants_path(), "tenants: {other: {quota: {hard: 1GiB}}}\n");
  Reload(/*good=*/false);
  EXPECT_EQ(usage().hard_bytes, all / 2);
  write_hard(kMuch);
  Reload();
  EXPECT_EQ(Put(ns, "c", sequence).blocks_failed, 0u);
  EXPECT_GT(usage().used_bytes, all / 2);
}

TEST_F(ReloadTest, WhatOnlyAnotherStartChangesIsKeptAndNamedOnce) {
  fixed_ += absl::StrCat("insecure: true\nlisten: \"127.0.0.1:0\"\n");
  WriteConfig("log_level: info\n");
  Start({"--config", config_path(), "--log-level", "info"});
  ASSERT_FALSE(HasFatalFailure());
  std::size_t begin = daemon_->standard_error().size();
  WriteConfig("log_level: error\nhost_bytes: 999MiB\nzone: z\nsession_grace: 7s\n");
  Reload();
  const std::string said = LogSince(begin);
  // The flags of the start are over the file: --host-bytes and --log-level are the fixture's.
  EXPECT_THAT(said, HasSubstr("only another start changes: zone\n"));
  EXPECT_THAT(said, HasSubstr("session-grace 30s -> 7s"));
  EXPECT_EQ(std::count(said.begin(), said.end(), '\n'), 2) << said;
  EXPECT_EQ(Metric("kvmill_config_pending_options"), 1);
  const DaemonConfig config = Config();
  EXPECT_EQ(config.file, config_path());
  EXPECT_EQ(OptionOf(config, "zone").value, "");
  EXPECT_EQ(OptionOf(config, "zone").pending, "z");
  EXPECT_EQ(OptionOf(config, "zone").source, "default");
  EXPECT_EQ(OptionOf(config, "session-grace").value, "7s");
  EXPECT_EQ(OptionOf(config, "session-grace").source, "file");
  EXPECT_EQ(OptionOf(config, "log-level").value, "info");
  EXPECT_EQ(OptionOf(config, "log-level").source, "flag");
  EXPECT_GE(config.loaded, absl::FromUnixSeconds(1'600'000'000));
  // Away from the file: the default again.
  fixed_ = "metrics: \"127.0.0.1:0\"\n";
  begin = daemon_->standard_error().size();
  WriteConfig("");
  Reload(/*good=*/true);
  EXPECT_THAT(LogSince(begin), HasSubstr("only another start changes: listen, insecure\n"));
  EXPECT_EQ(OptionOf(Config(), "session-grace").value, "30s");
  EXPECT_EQ(OptionOf(Config(), "listen").pending, "");
  // What goes together in the file and not with what is kept.
  begin = daemon_->standard_error().size();
  Write(config_path(), absl::StrCat("tls_cert: ", node_.certificate, "\ntls_key: ", node_.key,
                                    "\ntls_ca: ", authority_.ca_path(), "\ntls_peers: a\n"));
  Reload(/*good=*/false);
  EXPECT_THAT(LogSince(begin), HasSubstr("it does not go with what only another start changes"));
}

// As Kubernetes does with a ConfigMap: files behind a link to a folder, which is replaced.
TEST_F(ReloadTest, AFileThatIsWatchedIsReadAgainByItself) {
  namespace fs = std::filesystem;
  const auto put = [&](const std::string& name, const std::string& text) {
    fs::create_directory(directory_ / name);
    std::ofstream(directory_ / (name + "/kvmilld.yaml")) << fixed_ << text;
    fs::create_directory_symlink(directory_ / name, directory_ / "..next");
    fs::rename(directory_ / "..next", directory_ / "..data");
  };
  put("1", "log_level: info\n");
  fs::create_symlink(directory_ / "..data/kvmilld.yaml", directory_ / "mounted.yaml");
  Start({"--config", directory_ / "mounted.yaml", "--watch-config"});
  ASSERT_FALSE(HasFatalFailure());
  put("2", "log_level: warn\n");
  Until([&] { return Applied() == 1; }, "not read again");
  EXPECT_EQ(OptionOf(Config(), "log-level").value, "warn");
  put("3", "log_level: loud\n");
  Until([&] { return Refused() == 1; }, "not refused");
  EXPECT_EQ(OptionOf(Config(), "log-level").value, "warn");
  put("4", "log_level: error\n");
  Until([&] { return Applied() == 2; }, "not read again");
  EXPECT_EQ(OptionOf(Config(), "log-level").value, "error");
  EXPECT_EQ(Refused(), 1) << "a bad file is tried once";
}

TEST_F(ReloadTest, ASignalDuringTheStartWaitsForItsEnd) {
  WriteConfig("");
  std::vector<std::string> arguments = DefaultArguments();
  for (const std::string& more : {std::string("--config"), config_path()})
    arguments.push_back(more);
  daemon_ = std::make_unique<DaemonProcess>(DaemonBinary(), arguments);
  // As soon as it has begun: before that it is another program.
  Until(
      [&] {
        const std::string status = ReadText(absl::StrCat("/proc/", daemon_->pid(), "/status"));
        const std::size_t at = status.find("SigBlk:\t");
        std::uint64_t blocked = 0;
        return at != status.npos && absl::SimpleHexAtoi(status.substr(at + 8, 16), &blocked) &&
               (blocked & 1) != 0;
      },
      "SIGHUP is not blocked");
  daemon_->Signal(SIGHUP);
  ready_ = daemon_->WaitReady();
  ASSERT_FALSE(ready_.is_null()) << daemon_->standard_error();
  Until([&] { return Applied() == 1; }, "the signal was lost");
}

}  // namespace
}  // namespace kvmill::testing
