// What the log has: requests by their ids and traces, administrators' calls, limits; and what it
// never has, whatever is done at the level that says most.
#include <gmock/gmock.h>
#include <grpcpp/create_channel.h>
#include <httplib.h>
#include <signal.h>

#include <chrono>
#include <cstdlib>
#include <fstream>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "client/mapped_blocks.h"
#include "client/request_context.h"
#include "client/server_address.h"
#include "client/tls/tls_credentials.h"
#include "kvmill/v1/admin.grpc.pb.h"
#include "kvmill/v1/cache.grpc.pb.h"
#include "storage/core/log.h"
#include "tests/integration/daemon_fixture.h"
#include "tests/integration/test_certificates.h"

namespace kvmill::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::MatchesRegex;
using ::testing::Not;

constexpr const char* kTraceId = "4bf92f3577b34da6a3ce929d0e0e4736";
constexpr const char* kSpanId = "00f067aa0ba902b7";
const std::string kTraceparent = absl::StrCat("00-", kTraceId, "-", kSpanId, "-01");

class LogsTest : public DaemonTest {
 protected:
  void StartInsecure(const std::vector<std::string>& more = {}) {
    std::vector<std::string> arguments = {"--insecure", "--listen",    "127.0.0.1:0",
                                          "--admin",    "127.0.0.1:0", "--log-format",
                                          "json",       "--metrics",   "127.0.0.1:0"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    Start(arguments);
  }
  std::vector<nlohmann::json> Lines(std::size_t begin = 0) const {
    std::vector<nlohmann::json> lines;
    const std::string text = daemon_->standard_error().substr(begin);
    for (const absl::string_view line : absl::StrSplit(text, '\n', absl::SkipEmpty())) {
      lines.push_back(nlohmann::json::parse(line, nullptr, false));
      EXPECT_TRUE(lines.back().is_object()) << line;
      for (const char* name : {"ts", "level", "msg"}) {
        EXPECT_TRUE(lines.back().contains(name)) << line;
      }
    }
    return lines;
  }
  // The one line that has this in its message.
  nlohmann::json LineWith(const std::string& text, std::size_t begin = 0) const {
    nlohmann::json found;
    for (const nlohmann::json& line : Lines(begin)) {
      if (!absl::StrContains(line["msg"].get<std::string>(), text)) continue;
      EXPECT_TRUE(found.is_null()) << "twice: " << line;
      found = line;
    }
    EXPECT_FALSE(found.is_null()) << text << " is not in " << daemon_->standard_error();
    return found;
  }
  // Calls Admin.Drain or Stat with metadata; the request id that came back.
  std::string Ask(const std::string& way, std::multimap<std::string, std::string> metadata) {
    grpc::ChannelArguments arguments;
    arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    const auto channel = grpc::CreateCustomChannel(ready_[way].get<std::string>(),
                                                   grpc::InsecureChannelCredentials(), arguments);
    grpc::ClientContext call;
    call.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(60));
    for (const auto& [key, value] : metadata) call.AddMetadata(key, value);
    if (way == "admin") {
      v1::BlockCount reply;
      v1::EvictRequest request;
      request.set_tier(v1::TIER_HOST);
      EXPECT_TRUE(v1::Admin::NewStub(channel)->Evict(&call, request, &reply).ok());
    } else {
      v1::StatReply reply;
      EXPECT_TRUE(v1::Cache::NewStub(channel)->Stat(&call, {}, &reply).ok());
    }
    const auto& trailing = call.GetServerTrailingMetadata();
    EXPECT_EQ(trailing.count(kRequestIdMetadata), 1u);
    const auto it = trailing.find(kRequestIdMetadata);
    return it == trailing.end() ? "" : std::string(it->second.data(), it->second.size());
  }
};

TEST_F(LogsTest, ARequestHasOneIdFromItsCallerToTheLogAndBack) {
  StartInsecure();
  ASSERT_FALSE(HasFatalFailure());
  EXPECT_EQ(Ask("listen", {{"x-request-id", "my-id:1"}}), "my-id:1");
  const std::string made = Ask("listen", {});
  EXPECT_THAT(made, MatchesRegex("[0-9a-f]{15}"));
  EXPECT_NE(Ask("listen", {}), made);
  for (const char* wrong : {"a b", "\"", "x,y"}) {
    EXPECT_THAT(Ask("listen", {{"x-request-id", wrong}}), MatchesRegex("[0-9a-f]{15}")) << wrong;
  }
  EXPECT_THAT(Ask("listen", {{"x-request-id", std::string(65, 'i')}}),
              MatchesRegex("[0-9a-f]{15}"));
  EXPECT_THAT(Ask("listen", {{"x-request-id", "a"}, {"x-request-id", "b"}}),
              MatchesRegex("[0-9a-f]{15}"));
  // An administrator's call is a line, with all of it.
  std::size_t begin = daemon_->standard_error().size();
  EXPECT_EQ(
      Ask("admin",
          {{"x-request-id", "evict-7"}, {"traceparent", kTraceparent}, {"tracestate", "rojo=1"}}),
      "evict-7");
  nlohmann::json line = LineWith("admin Evict by ipv4:127.0.0.1:", begin);
  EXPECT_EQ(line["level"], "info");
  EXPECT_EQ(line["audit"], "true");
  EXPECT_EQ(line["method"], "Evict");
  EXPECT_EQ(line["tenant"], "default");
  EXPECT_EQ(line["request_id"], "evict-7");
  EXPECT_EQ(line["trace_id"], kTraceId);
  EXPECT_EQ(line["span_id"], kSpanId);
  EXPECT_THAT(line["peer"].get<std::string>(), HasSubstr("ipv4:127.0.0.1:"));
  // A trace that is none is left out; the id is made, and is the one that comes back.
  begin = daemon_->standard_error().size();
  const std::string id = Ask("admin", {{"traceparent", kTraceparent + "-"}});
  line = LineWith("admin Evict", begin);
  EXPECT_EQ(line["request_id"], id);
  EXPECT_FALSE(line.contains("trace_id"));
}

// Whatever the level, and calls that only read but say names or keys, too.
TEST_F(LogsTest, WhatAdministratorsDoIsLoggedAtEveryLevel) {
  StartInsecure({"--log-level", "off"});
  ASSERT_FALSE(HasFatalFailure());
  const auto stub = v1::Admin::NewStub(
      grpc::CreateChannel(ready_["admin"].get<std::string>(), grpc::InsecureChannelCredentials()));
  const auto ask = [&](auto call, auto request, auto reply) {
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(60));
    static_cast<void>(call(&context, request, &reply));  // Its answer is not what is looked at.
  };
  using Context = grpc::ClientContext*;
  ask([&](Context c, const auto& q, auto* r) { return stub->Status(c, q, r); }, v1::StatusRequest(),
      v1::StatusReply());
  ask([&](Context c, const auto& q, auto* r) { return stub->Cluster(c, q, r); },
      v1::ClusterRequest(), v1::ClusterReply());
  EXPECT_EQ(daemon_->standard_error(), "") << "these say neither, and other lines are off";
  ask([&](Context c, const auto& q, auto* r) { return stub->Namespaces(c, q, r); },
      v1::NamespacesRequest(), v1::NamespacesReply());
  ask([&](Context c, const auto& q, auto* r) { return stub->Quota(c, q, r); }, v1::QuotaRequest(),
      v1::QuotaReply());
  ask([&](Context c, const auto& q, auto* r) { return stub->Config(c, q, r); }, v1::ConfigRequest(),
      v1::ConfigReply());
  ask([&](Context c, const auto& q, auto* r) { return stub->Where(c, q, r); }, v1::WhereRequest(),
      v1::WhereReply());
  ask([&](Context c, const auto& q, auto* r) { return stub->Verify(c, q, r); }, v1::VerifyRequest(),
      v1::VerifyReply());
  std::vector<std::string> methods;
  for (const nlohmann::json& line : Lines()) {
    EXPECT_EQ(line["audit"], "true") << line;
    methods.push_back(line["method"]);
  }
  EXPECT_THAT(methods, ::testing::ElementsAre("Namespaces", "Quota", "Config", "Where", "Verify"));
}

TEST_F(LogsTest, ClientsPassOnTheirScopeAndNameTheRequestInErrors) {
  StartInsecure();
  ASSERT_FALSE(HasFatalFailure());
  const std::unique_ptr<Client> remote = Connect(ready_["listen"]);
  std::size_t begin = daemon_->standard_error().size();
  {
    const RequestScope scope({.request_id = "c-1", .traceparent = kTraceparent});
    ASSERT_TRUE(client_->Evict(Tier::kHost, 0).ok());
  }
  nlohmann::json line = LineWith("admin Evict by fd:", begin);
  EXPECT_EQ(line["request_id"], "c-1");
  EXPECT_EQ(line["trace_id"], kTraceId);
  begin = daemon_->standard_error().size();
  {
    const RequestScope scope({.request_id = "c-2"});
    const auto refused = remote->Evict(Tier::kHost, 0);
    EXPECT_EQ(refused.status().code(), absl::StatusCode::kPermissionDenied);
    EXPECT_THAT(std::string(refused.status().message()), HasSubstr("(request c-2)"));
  }
  EXPECT_EQ(LineWith("admin calls are not served on --listen", begin)["request_id"], "c-2");
  // Without a scope the daemon's own.
  begin = daemon_->standard_error().size();
  const auto refused = remote->Evict(Tier::kHost, 0);
  const std::string id = LineWith("admin calls are not served", begin)["request_id"];
  EXPECT_THAT(std::string(refused.status().message()),
              HasSubstr(absl::StrCat("(request ", id, ")")));
  // A miss is an answer as any other.
  const auto unknown = remote->FindNamespace("none");
  EXPECT_EQ(unknown.status().code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(unknown.status().message()), Not(HasSubstr("(request")));
}

TEST_F(LogsTest, CallsOfTheDataPlaneCarryTheirRequest) {
  StartInsecure({"--ucx", "127.0.0.1", "--log-level", "debug"});
  ASSERT_FALSE(HasFatalFailure());
  const ClientNamespace ns = Open("n", SmallSpec());
  Sequence sequence(SmallSpec(), 64, 3);
  const auto client =
      Client::Create({.address = ready_["listen"].get<std::string>(), .path = DataPath::kUcx});
  ASSERT_TRUE(client.ok()) << client.status();
  std::size_t begin = daemon_->standard_error().size();
  {
    // The connection is made meanwhile, on other threads.
    const RequestScope scope({.request_id = "u-1", .traceparent = kTraceparent});
    ASSERT_TRUE((*client)->Store(ns, sequence.Blocks("s"), {}).ok());
  }
  nlohmann::json line = LineWith("data plane: a chunk", begin);
  EXPECT_EQ(line["request_id"], "u-1");
  EXPECT_EQ(line["trace_id"], kTraceId);
  EXPECT_EQ(line["span_id"], kSpanId);
  EXPECT_THAT(line["peer"].get<std::string>(), HasSubstr("127.0.0.1:"));
  begin = daemon_->standard_error().size();
  PageCollector pages;
  {
    const RequestScope scope({.request_id = "u-2"});
    ASSERT_TRUE((*client)->Fetch(ns, KeysOf("s", 1), pages).ok());
  }
  line = LineWith("data plane: a fetch of 1 keys", begin);
  EXPECT_EQ(line["request_id"], "u-2");
  EXPECT_FALSE(line.contains("trace_id"));
  // Nothing of it sticks to the connection.
  begin = daemon_->standard_error().size();
  ASSERT_TRUE((*client)->Fetch(ns, KeysOf("s", 1), pages).ok());
  EXPECT_THAT(daemon_->standard_error().substr(begin), Not(HasSubstr("data plane: a fetch")));
}

TEST_F(LogsTest, WhoeverIsRefusedDoesNotFloodTheLog) {
  StartInsecure();
  ASSERT_FALSE(HasFatalFailure());
  const std::unique_ptr<Client> remote = Connect(ready_["listen"]);
  const std::size_t begin = daemon_->standard_error().size();
  const auto start = std::chrono::steady_clock::now();
  constexpr std::uint32_t kCalls = 300;
  for (std::uint32_t i = 0; i < kCalls; ++i) EXPECT_FALSE(remote->Evict(Tier::kHost, 0).ok());
  for (int i = 0; i < 30; ++i) EXPECT_TRUE(client_->Evict(Tier::kHost, 0).ok());
  const auto seconds =
      std::chrono::duration_cast<std::chrono::seconds>(std::chrono::steady_clock::now() - start)
          .count();
  std::uint32_t refused = 0, audited = 0;
  std::string full;
  for (const nlohmann::json& line : Lines(begin)) {
    const std::string message = line["msg"];
    audited += line.contains("audit");
    if (absl::StrContains(message, "not served on --listen")) ++refused;
    if (absl::StrContains(message, "are left out")) full = message;
  }
  // On a machine that stands still there are several windows.
  const auto windows = static_cast<std::uint32_t>(seconds / kLogWindowSeconds + 1);
  EXPECT_LE(refused, windows * (kLogLinesMax + 1));
  EXPECT_EQ(audited, 30u) << "what an administrator did is never left out";
  if (windows == 1) {
    EXPECT_EQ(refused, kLogLinesMax + 1);
    EXPECT_THAT(full, HasSubstr("after 20: admin Evict by "));
  }
  const HostPort address = *ParseHostPort(ready_["metrics"].get<std::string>());
  const auto answer = httplib::Client(address.host, address.port).Get("/metrics");
  ASSERT_TRUE(answer);
  const std::string family = "\nkvmill_log_messages_suppressed_total ";
  const std::size_t at = answer->body.find(family);
  ASSERT_NE(at, std::string::npos);
  EXPECT_GE(std::atoi(answer->body.c_str() + at + family.size()),
            static_cast<int>(kCalls) - static_cast<int>(refused));
}

// Every secret that a run has, at the level that says most, in both formats.
TEST_F(LogsTest, SecretsAreNotInTheLog) {
  TestAuthority issuer;
  const TestAuthority::Files node =
      issuer.Issue("node", absl::StrCat(TestAuthority::kLoopback, ",DNS:node.example"));
  const std::string token = "a-token-that-only-tests-have";
  const std::string digest = "316c810560329ed9b617b33b49aaf6fba24cb57ecc94262a2729248660c6e1aa";
  const std::string password = "an-etcd-password-of-tests";
  const std::string salt = "a-salt-of-tests";
  const std::string tenants = directory_ / "tenants.yaml";
  const auto write_tenants = [&](const std::string& more) {
    std::ofstream(tenants) << "tenants:\n  team-a:\n    tokens: [\"sha256:" << digest << "\"]\n"
                           << more;
  };
  for (const char* format : {"text", "json"}) {
    write_tenants("");
    setenv("KVMILL_ETCD_PASSWORD", password.c_str(), 1);
    Start({"--log-level",  "trace",
           "--log-format", format,
           "--listen",     "127.0.0.1:0",
           "--admin",      "127.0.0.1:0",
           "--tls-cert",   node.certificate,
           "--tls-key",    node.key,
           "--tls-ca",     issuer.ca_path(),
           "--tenants",    tenants,
           "--ucx",        "127.0.0.1",
           "--data-dir",   directory_ / (std::string("data-") + format)});
    unsetenv("KVMILL_ETCD_PASSWORD");
    ASSERT_FALSE(HasFatalFailure());
    std::map<std::string, std::string> secrets = {{"token", token},
                                                  {"digest of the token", digest},
                                                  {"wrong token", "a-guess-of-tests"},
                                                  {"token by mistake", "a-plain-token"},
                                                  {"etcd's password", password},
                                                  {"salt", salt}};
    // Lines of keys in PEM; the certificates are no secrets.
    for (const absl::string_view line : absl::StrSplit(ReadText(node.key), '\n')) {
      if (line.size() > 40) secrets[absl::StrCat("key ", line)] = std::string(line);
    }
    ASSERT_GT(secrets.size(), 6u);
    const LocalPass pass(socket());
    ASSERT_FALSE(pass.token_hex().empty());
    secrets["token of the door"] = pass.token_hex();
    NamespaceSpec spec = SmallSpec();
    spec.salt = salt;
    Sequence sequence(spec, 2 * spec.block_tokens, 5);
    for (const std::string& shown : {token, std::string("a-guess-of-tests")}) {
      Client::Options options;
      options.address = ready_["listen"];
      options.tls.ca = issuer.ca_path();
      options.token = shown;
      const auto remote = Client::Create(options);
      ASSERT_TRUE(remote.ok()) << remote.status();
      const auto ns = (*remote)->OpenNamespace("n", spec);
      ASSERT_EQ(ns.ok(), shown == token) << ns.status();
      if (!ns.ok()) continue;
      ASSERT_TRUE((*remote)->Store(*ns, sequence.Blocks("s"), {}).ok());
      PageCollector pages;
      ASSERT_TRUE((*remote)->Fetch(*ns, KeysOf("s", 2), pages).ok());
      ASSERT_FALSE((*remote)->Evict(Tier::kHost, 0).ok());
    }
    const ClientNamespace ns = Open("mine", spec);
    ASSERT_EQ(Put(ns, "s", sequence, /*durable=*/true).blocks_stored, 2u);
    for (const BlockKey& key : KeysOf("s", 2)) secrets[key.ToHex()] = key.ToHex();
    ASSERT_TRUE(client_->Map(ns, KeysOf("s", 2), {}).ok());
    ASSERT_TRUE(client_->Verify().ok());
    ASSERT_TRUE(client_->Configuration().ok());
    const auto reload = [&](const std::string& says) {
      daemon_->Signal(SIGHUP);
      const auto give_up = std::chrono::steady_clock::now() + std::chrono::seconds(60);
      while (!absl::StrContains(daemon_->standard_error(), says)) {
        ASSERT_LT(std::chrono::steady_clock::now(), give_up) << says;
        std::this_thread::sleep_for(std::chrono::milliseconds(10));
      }
    };
    write_tenants("  team-b:\n    tokens: [a-plain-token]\n");
    reload("want sha256:");
    write_tenants("");
    reload("no option changes");
    daemon_->Signal(SIGTERM);
    ASSERT_EQ(daemon_->WaitExit().code, 0);
    const std::string log = daemon_->standard_error();
    EXPECT_THAT(log, HasSubstr("a caller is refused"));
    EXPECT_THAT(log, HasSubstr("a stream of a session begins"));
    for (const auto& [name, secret] : secrets) {
      EXPECT_FALSE(absl::StrContains(log, secret)) << name << " is in the log: " << log;
    }
  }
}

}  // namespace
}  // namespace kvmill::testing
