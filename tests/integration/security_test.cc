// Over TCP with TLS, and without: both ends of TLS check each other, certificates change without a
// restart, tenants do not see each other. Who may do what is security_table_test.cc.
#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <httplib.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/fsuid.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "client/server_address.h"
#include "client/tls/tls_checks.h"
#include "tests/integration/security_fixture.h"

namespace kvmill::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

TEST_F(SecurityTest, ClientsCheckTheDaemon) {
  Start(TlsArguments());
  ASSERT_FALSE(HasFatalFailure());
  const auto stat = [&](const TlsFiles& tls) {
    const auto client = ClientWith(tls);
    EXPECT_TRUE(client.ok()) << client.status();
    return client.ok() ? (*client)->Stat().status() : client.status();
  };
  EXPECT_TRUE(stat(FilesOf(client_)).ok()) << stat(FilesOf(client_));
  TlsFiles named = FilesOf(client_);
  named.server_name = "node.example";
  EXPECT_TRUE(stat(named).ok()) << stat(named);
  // And errors say what is missing.
  const auto unavailable = [&](const TlsFiles& tls) {
    const absl::Status status = stat(tls);
    EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
    return std::string(status.message());
  };
  named.server_name = "another.example";
  EXPECT_THAT(unavailable(named),
              HasSubstr("the daemon's certificate is not of \"another.example\": give "
                        "tls-server-name"));
  TlsFiles mistrusts = FilesOf(client_);
  mistrusts.ca = other_authority_.ca_path();
  EXPECT_THAT(unavailable(mistrusts),
              HasSubstr(absl::StrCat("no authority in tls-ca ", mistrusts.ca, " vouches")));
  EXPECT_THAT(unavailable({}), HasSubstr("the daemon wants TLS, most likely: give tls-ca"));
  EXPECT_THAT(unavailable(FilesOf({})), HasSubstr("wants a certificate of its clients"));
  EXPECT_THAT(unavailable(FilesOf(foreign_)), HasSubstr("does not believe this client's"));
  Kill();
  std::vector<std::string> insecure = TcpArguments();
  insecure.emplace_back("--insecure");
  Start(insecure);
  ASSERT_FALSE(HasFatalFailure());
  EXPECT_TRUE(stat({}).ok()) << stat({});
  EXPECT_THAT(unavailable(FilesOf(client_)), HasSubstr("what listens there speaks no TLS"));
}

TEST_F(SecurityTest, BlocksTravelEncryptedAndTenantsDoNotSeeEachOthers) {
  Start(TlsArguments({"--tenants", WriteTenants(), "--ucx", "127.0.0.1"}));
  ASSERT_FALSE(HasFatalFailure());
  constexpr std::uint32_t kBlocks = 3;
  Sequence sequence(SmallSpec(), kBlocks * SmallSpec().block_tokens, 7);
  const auto keys = KeysOf("s", kBlocks);
  TlsFiles token_only = FilesOf({});
  const auto by_certificate = ClientWith(FilesOf(client_));
  const auto by_token = ClientWith(token_only, kToken);
  const auto by_common_name = ClientWith(FilesOf(other_));
  for (const auto* client : {&by_certificate, &by_token, &by_common_name}) {
    ASSERT_TRUE(client->ok()) << client->status();
  }
  const auto hits = [&](Client& client) -> int {
    const auto ns = client.OpenNamespace("shared", SmallSpec());
    EXPECT_TRUE(ns.ok()) << ns.status();
    if (!ns.ok()) return -1;
    const auto found = client.Lookup(*ns, keys);
    EXPECT_TRUE(found.ok()) << found.status();
    return found.ok() ? static_cast<int>(found->hit_blocks) : -1;
  };
  const auto ns = (*by_certificate)->OpenNamespace("shared", SmallSpec());
  ASSERT_TRUE(ns.ok()) << ns.status();
  const auto stored = (*by_certificate)->Store(*ns, sequence.Blocks("s"), {});
  ASSERT_TRUE(stored.ok()) << stored.status();
  EXPECT_EQ(stored->blocks_stored, kBlocks);
  EXPECT_THAT((*by_certificate)->ucx_transport(), HasSubstr("tcp"));
  PageCollector pages;
  const auto fetched = (*by_certificate)->Fetch(*ns, keys, pages);
  ASSERT_TRUE(fetched.ok()) << fetched.status();
  EXPECT_EQ(pages.pages.size(), kBlocks * 2);
  EXPECT_EQ(hits(**by_certificate), static_cast<int>(kBlocks));
  EXPECT_EQ(hits(**by_token), 0) << "the blocks of team-a";
  EXPECT_EQ(hits(**by_common_name), 0);
  // One tenant by two ways.
  const auto theirs = (*by_token)->OpenNamespace("shared", SmallSpec());
  ASSERT_TRUE(theirs.ok()) << theirs.status();
  ASSERT_TRUE((*by_token)->Store(*theirs, sequence.Blocks("s"), {}).ok());
  EXPECT_EQ(hits(**by_common_name), static_cast<int>(kBlocks));
  EXPECT_EQ(hits(*DaemonTest::client_), 0) << "nor does the daemon's own user";
}

// Who shows nothing holds a descriptor of the daemon for as long.
TEST_F(SecurityTest, WhoDoesNotEvenShakeHandsIsHungUpOn) {
  Start(TlsArguments());
  const absl::StatusOr<HostPort> address = ParseHostPort(ready_["listen"].get<std::string>());
  ASSERT_TRUE(address.ok());
  const int fd = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in to{};
  to.sin_family = AF_INET;
  to.sin_port = htons(address->port);
  ASSERT_EQ(inet_pton(AF_INET, address->host.c_str(), &to.sin_addr), 1);
  ASSERT_EQ(connect(fd, reinterpret_cast<const sockaddr*>(&to), sizeof to), 0);
  pollfd ended{fd, POLLIN, 0};
  EXPECT_EQ(poll(&ended, 1, 60'000), 1) << "still connected after a minute";
  char byte = 0;
  EXPECT_LE(recv(fd, &byte, 1, 0), 0);
  close(fd);
}

TEST_F(SecurityTest, CertificatesChangeWithoutARestart) {
  // Kubernetes mounts a secret so: files behind a link, which is replaced.
  namespace fs = std::filesystem;
  const auto put = [&](const std::string& name, const TestAuthority::Files& files,
                       const std::string& ca) {
    const fs::path folder = directory_ / name;
    fs::create_directory(folder);
    fs::copy_file(files.certificate, folder / "tls.crt");
    fs::copy_file(files.key, folder / "tls.key");
    std::ofstream(folder / "ca.crt") << ca;
    const fs::path link = directory_ / "new-link";
    fs::create_directory_symlink(folder, link);
    fs::rename(link, directory_ / "certificates");
  };
  const std::string old_ca = ReadText(authority_.ca_path());
  const std::string new_ca = ReadText(other_authority_.ca_path());
  const TestAuthority::Files new_node = other_authority_.Issue("node", TestAuthority::kLoopback);
  put("first", node_, old_ca);
  std::vector<std::string> arguments = TcpArguments();
  for (const char* const argument :
       {"--tls-cert", "tls.crt", "--tls-key", "tls.key", "--tls-ca", "ca.crt"}) {
    arguments.push_back(
        argument[0] == '-' ? argument : directory_ / (absl::StrCat("certificates/", argument)));
  }
  Start(arguments);
  ASSERT_FALSE(HasFatalFailure());
  const auto old_client = ClientWith(FilesOf(client_));
  ASSERT_TRUE(old_client.ok());
  ASSERT_TRUE((*old_client)->Stat().ok()) << (*old_client)->Stat().status();
  const auto connects = [&](const TlsFiles& tls) {
    const auto client = ClientWith(tls);
    return client.ok() && (*client)->Stat().ok();
  };
  const TlsFiles of_new{other_authority_.ca_path(), foreign_.certificate, foreign_.key, ""};
  EXPECT_FALSE(connects(of_new));

  put("second", new_node, old_ca + new_ca);
  const auto until = [&](const TlsFiles& tls, bool want) {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    while (connects(tls) != want && std::chrono::steady_clock::now() < deadline) {
      std::this_thread::sleep_for(std::chrono::milliseconds(200));
    }
    return connects(tls) == want;
  };
  EXPECT_TRUE(until(of_new, true)) << "the new authority";
  EXPECT_TRUE((*old_client)->Stat().ok()) << "a connection that is there goes on";
  // An old client that knows both authorities.
  const std::string both = directory_ / "both.pem";
  std::ofstream(both) << old_ca << new_ca;
  EXPECT_TRUE(connects({both, client_.certificate, client_.key, ""}));

  put("third", new_node, new_ca);
  EXPECT_TRUE(until({both, client_.certificate, client_.key, ""}, false)) << "the old one is out";
  EXPECT_TRUE(connects(of_new));
}

TEST_F(SecurityTest, FilesThatDoNotFitLeaveThoseOfBeforeInUse) {
  namespace fs = std::filesystem;
  const std::string certificate = directory_ / "node.pem", key = directory_ / "node.key";
  const auto put = [&](const std::string& from, const std::string& to) {
    fs::copy_file(from, directory_ / "new");
    fs::rename(directory_ / "new", to);
  };
  put(node_.certificate, certificate);
  put(node_.key, key);
  std::vector<std::string> arguments = TcpArguments();
  for (const std::string& argument :
       {std::string("--tls-cert"), certificate, std::string("--tls-key"), key,
        std::string("--tls-ca"), authority_.ca_path()}) {
    arguments.push_back(argument);
  }
  Start(arguments);
  ASSERT_FALSE(HasFatalFailure());
  const auto connects = [&](const std::string& name) {
    TlsFiles tls = FilesOf(client_);
    tls.server_name = name;
    const auto client = ClientWith(tls);
    return client.ok() && (*client)->Stat().ok();
  };
  const auto until = [](const std::function<bool()>& is_so) {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    while (!is_so() && std::chrono::steady_clock::now() < deadline) {
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
    }
    return is_so();
  };
  const auto says = [&](const std::string& text) {
    return until([&] { return absl::StrContains(daemon_->standard_error(), text); });
  };
  EXPECT_TRUE(connects("node.example"));

  const TestAuthority::Files next =
      authority_.Issue("node", absl::StrCat(TestAuthority::kLoopback, ",DNS:next.example"));
  put(next.certificate, certificate);
  EXPECT_TRUE(says(absl::StrCat("TLS: tls-key ", key, ": is not the key of ", certificate,
                                "; what was read before stays in use")))
      << daemon_->standard_error();
  // Longer than gRPC takes to see what it is given.
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(3);
  while (std::chrono::steady_clock::now() < end) ASSERT_TRUE(connects("node.example"));
  put(next.key, key);
  EXPECT_TRUE(until([&] { return connects("next.example"); })) << daemon_->standard_error();
  EXPECT_TRUE(says("TLS: the files changed, and are used from now on"));

  // Nor is one used that is over, or is for clients only.
  put(over_.certificate, certificate);
  put(over_.key, key);
  EXPECT_TRUE(says("the certificate ended at"));
  const TestAuthority::Files of_client =
      authority_.Issue("c", TestAuthority::kLoopback, false, "clientAuth");
  put(of_client.certificate, certificate);
  put(of_client.key, key);
  EXPECT_TRUE(says("the certificate is not for serverAuth"));
  EXPECT_TRUE(connects("next.example"));
}

TEST_F(SecurityTest, TheEndOfTheCertificateInUseIsAMetric) {
  const std::string certificate = directory_ / "node.pem", key = directory_ / "node.key";
  const auto put = [&](const TestAuthority::Files& files) {
    for (const auto& [from, to] : {std::pair(files.key, key), {files.certificate, certificate}}) {
      std::filesystem::copy_file(from, directory_ / "new");
      std::filesystem::rename(directory_ / "new", to);
    }
  };
  put(node_);
  // There is no etcd: the node waits for it, and has the certificate all the same.
  std::vector<std::string> arguments = {
      "--metrics",  "127.0.0.1:0",        "--cluster",   "etcd://127.0.0.1:1",
      "--etcd-ca",  authority_.ca_path(), "--etcd-cert", client_.certificate,
      "--etcd-key", client_.key,          "--listen",    "127.0.0.1:0",
      "--tls-cert", certificate,          "--tls-key",   key,
      "--tls-ca",   authority_.ca_path()};
  Start(arguments);
  ASSERT_FALSE(HasFatalFailure());
  const auto end_of = [&](const std::string& name) -> std::int64_t {
    const HostPort address = *ParseHostPort(ready_["metrics"].get<std::string>());
    const auto answer = httplib::Client(address.host, address.port).Get("/metrics");
    const std::string series =
        absl::StrCat("\nkvmill_tls_certificate_end_time_seconds{certificate=\"", name, "\"} ");
    const std::size_t at = answer ? answer->body.find(series) : std::string::npos;
    if (at == std::string::npos) return 0;
    return static_cast<std::int64_t>(
        std::strtod(answer->body.c_str() + at + series.size(), nullptr));
  };
  const auto end_in = [](const std::string& path) {
    return CertificateEndSeconds(path, ReadText(path)).value_or(-1);
  };
  // They are made for two days.
  const std::int64_t in_two_days = absl::ToUnixSeconds(absl::Now() + absl::Hours(48));
  EXPECT_LE(end_of("node"), in_two_days);
  EXPECT_GE(end_of("node"), in_two_days - 600);
  EXPECT_EQ(end_of("node"), end_in(node_.certificate));
  EXPECT_EQ(end_of("etcd"), end_in(client_.certificate));
  // It is that of the certificate in use, not of what lies there.
  put(over_);
  const auto until = [](const std::function<bool()>& is_so) {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    while (!is_so() && std::chrono::steady_clock::now() < deadline) {
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
    }
    return is_so();
  };
  EXPECT_TRUE(until(
      [&] { return absl::StrContains(daemon_->standard_error(), "the certificate ended at"); }));
  EXPECT_EQ(end_of("node"), end_in(node_.certificate));
  TestAuthority::Files next = node_;
  while (end_in(next.certificate) == end_in(node_.certificate)) {  // Seconds.
    next = authority_.Issue("node", absl::StrCat(TestAuthority::kLoopback, ",DNS:node.example"));
  }
  put(next);
  EXPECT_TRUE(until([&] { return end_of("node") == end_in(next.certificate); })) << end_of("node");
}

TEST_F(SecurityTest, ADaemonWithoutTlsHasNoCertificateToWatch) {
  Start({"--metrics", "127.0.0.1:0"});
  const HostPort address = *ParseHostPort(ready_["metrics"].get<std::string>());
  const auto answer = httplib::Client(address.host, address.port).Get("/metrics");
  ASSERT_TRUE(answer);
  EXPECT_THAT(answer->body, Not(HasSubstr("tls_certificate_end")));
}

TEST_F(SecurityTest, WhatCannotWorkIsSaidAtTheStart) {
  const auto says = [&](const std::vector<std::string>& arguments) {
    std::vector<std::string> all = DefaultArguments();
    all.insert(all.end(), arguments.begin(), arguments.end());
    all.emplace_back("--check-config");
    DaemonProcess daemon(DaemonBinary(), all);
    const Exit exit = daemon.WaitExit();
    EXPECT_NE(exit.code, 0);
    return daemon.standard_error();
  };
  const std::string broken = directory_ / "broken.pem";
  std::ofstream(broken) << "not PEM\n";
  const auto with = [&](const std::string& cert, const std::string& key, const std::string& ca) {
    return std::vector<std::string>{"--tls-cert", cert, "--tls-key", key, "--tls-ca", ca};
  };
  const std::string ca = authority_.ca_path();
  EXPECT_THAT(says({"--listen", "127.0.0.1:0"}), HasSubstr("--tls-cert, --tls-key and --tls-ca"));
  EXPECT_THAT(says({"--tls-ca", ca}), HasSubstr("all three of them"));
  EXPECT_THAT(says({"--tls-server-name", "n"}), HasSubstr("all three of them"));
  const std::string quotas = directory_ / "quotas.yaml";
  std::ofstream(quotas) << "tenants: {a: {certificates: [x], quota: {hard: 1GiB}}}\n";
  EXPECT_THAT(says({"--tenants", quotas}),
              HasSubstr("names certificates or tokens: needs --tls-cert"));
  EXPECT_THAT(says(with(node_.certificate, client_.key, ca)),
              HasSubstr(absl::StrCat(client_.key, ": is not the key of ", node_.certificate)));
  EXPECT_THAT(says(with(over_.certificate, over_.key, ca)),
              HasSubstr(absl::StrCat(over_.certificate, ": the certificate ended at 20")));
  EXPECT_THAT(says(with(broken, node_.key, ca)),
              HasSubstr(absl::StrCat(broken, ": holds no certificate")));
  EXPECT_THAT(says(with(node_.certificate, broken, ca)),
              HasSubstr(absl::StrCat(broken, ": holds no key")));
  EXPECT_THAT(says(with(node_.certificate, node_.key, directory_ / "none")),
              HasSubstr("/none: cannot be read (No such file"));
  EXPECT_THAT(says(with(node_.certificate, node_.key, directory_ / "none")),
              HasSubstr("kvmilld: tls-ca "));
  const TestAuthority::Files for_clients =
      authority_.Issue("c", TestAuthority::kLoopback, false, "clientAuth");
  const TestAuthority::Files for_servers =
      authority_.Issue("s", "DNS:node.example", false, "serverAuth");
  EXPECT_THAT(says(with(for_clients.certificate, for_clients.key, ca)),
              HasSubstr(absl::StrCat("tls-cert ", for_clients.certificate,
                                     ": the certificate is not for serverAuth")));
  // A node of a cluster shows it to others, which check it by the same authorities.
  const auto in_cluster = [&](const TestAuthority::Files& files) {
    std::vector<std::string> arguments = with(files.certificate, files.key, ca);
    for (const char* const argument :
         {"--listen", "127.0.0.1:0", "--cluster", "etcd://127.0.0.1:1"}) {
      arguments.emplace_back(argument);
    }
    return says(arguments);
  };
  EXPECT_THAT(in_cluster(for_servers), HasSubstr("the certificate is not for clientAuth"));
  EXPECT_THAT(in_cluster(foreign_), HasSubstr(absl::StrCat("no authority in tls-ca ", ca)));
  std::vector<std::string> both = TlsArguments({"--insecure"});
  EXPECT_THAT(says(both), HasSubstr("--insecure with --tls-...: want one of them"));

  const auto tenants = [&](const std::string& text) {
    const std::string path = directory_ / "t.yaml";
    std::ofstream(path) << text;
    return says(TlsArguments({"--tenants", path}));
  };
  EXPECT_THAT(tenants("tenants:\n  a:\n    certificate: [x]\n"),
              HasSubstr("t.yaml:3: unknown key \"certificate\""));
  EXPECT_THAT(tenants("tenants:\n  a:\n    certificates: [x]\n  b:\n    certificates: [y, x]\n"),
              HasSubstr("t.yaml:5: certificate \"x\" again"));
  const std::string with_token = tenants("tenants:\n  a:\n    tokens:\n      - hunter2\n");
  EXPECT_THAT(with_token, HasSubstr("t.yaml:4: want sha256:"));
  EXPECT_THAT(with_token, Not(HasSubstr("hunter2"))) << "it may be a token";
  EXPECT_THAT(tenants("tenants:\n  uid-7:\n    certificates: [x]\n"), HasSubstr("local users"));
  EXPECT_THAT(tenants("tenants:\n  a/b:\n    certificates: [x]\n"), HasSubstr("a/b"));
  for (const std::string name : {"all", "other"}) {  // Of certificates, and of quotas.
    const std::string says_so = absl::StrCat("t.yaml:2: tenant \"", name, "\": metrics have");
    EXPECT_THAT(tenants(absl::StrCat("tenants:\n  ", name, ":\n    certificates: [x]\n")),
                HasSubstr(says_so));
    EXPECT_THAT(tenants(absl::StrCat("tenants:\n  ", name, ":\n    quota: {hard: 1GiB}\n")),
                HasSubstr(says_so));
  }
  EXPECT_THAT(tenants("tenants:\n  a:\n    certificates: [x]\n    admin: maybe\n"),
              HasSubstr("t.yaml:4: admin: want true or false"));
  EXPECT_THAT(tenants("tenants:\n  a:\n    certificates: [x]\n    metrics: yes\n"),
              HasSubstr("t.yaml:4: metrics: want true or false"));
  EXPECT_THAT(tenants("tenants: {}\n"), HasSubstr("nobody could come in"));
  EXPECT_THAT(tenants("tenants: [\n"), HasSubstr("t.yaml:"));
  EXPECT_THAT(tenants("people: {}\n"), HasSubstr("t.yaml:1: unknown key \"people\""));
}

TEST_F(SecurityTest, ClientsSayWhatIsWrongWithTheirFiles) {
  ready_["listen"] = "127.0.0.1:1";
  const auto says = [&](const TlsFiles& tls, const std::string& token = "") {
    return std::string(ClientWith(tls, token).status().message());
  };
  const std::string ca = authority_.ca_path();
  EXPECT_THAT(says({}, kToken), HasSubstr("a token over TCP needs TLS"));
  EXPECT_THAT(says({ca, "", "", ""}, "two words"), HasSubstr("a space"));
  EXPECT_THAT(says({ca, "", "", ""}, std::string(5000, 'x')), HasSubstr("5000 characters"));
  EXPECT_THAT(says({ca, client_.certificate, "", ""}), HasSubstr("a certificate without its key"));
  EXPECT_THAT(says({"", client_.certificate, client_.key, ""}), HasSubstr("authorities"));
  EXPECT_THAT(says({directory_ / "none", "", "", ""}), HasSubstr("/none: cannot be read"));
}

TEST_F(SecurityTest, ACertificateOfAnUnknownAuthorityIsWarnedOf) {
  std::vector<std::string> arguments = TcpArguments();
  for (const std::string& argument :
       {std::string("--tls-cert"), foreign_.certificate, std::string("--tls-key"), foreign_.key,
        std::string("--tls-ca"), authority_.ca_path()}) {
    arguments.push_back(argument);
  }
  Start(arguments);
  ASSERT_FALSE(HasFatalFailure());
  EXPECT_THAT(daemon_->standard_error(), HasSubstr(absl::StrCat("tls-cert ", foreign_.certificate,
                                                                ": no authority in tls-ca")));
}

TEST_F(SecurityTest, TheCommandLineShowsWhoItIs) {
  Start(TlsArguments({"--tenants", WriteTenants()}));
  ASSERT_FALSE(HasFatalFailure());
  const auto run = [&](const std::vector<std::string>& arguments) {
    std::vector<std::string> all = {"stat", "--json", "--server", ready_["listen"]};
    all.insert(all.end(), arguments.begin(), arguments.end());
    DaemonProcess command(KVMILL_CLI, all);
    const int code = command.WaitExit().code;
    return absl::StrCat(code, " ", command.standard_output(), command.standard_error());
  };
  const std::string ca = authority_.ca_path();
  const std::string token_file = directory_ / "token";
  std::ofstream(token_file) << kToken << "\n";
  EXPECT_THAT(run({"--tls-ca", ca, "--tls-cert", client_.certificate, "--tls-key", client_.key}),
              HasSubstr("0 {"));
  EXPECT_THAT(run({"--tls-ca", ca, "--token-file", token_file}), HasSubstr("0 {"));
  EXPECT_THAT(run({"--tls-ca", ca}), HasSubstr("1 "));
  EXPECT_THAT(run({"--tls-ca", ca}), HasSubstr("show a certificate, or a token"));
  EXPECT_THAT(run({"--token-file", token_file}), HasSubstr("needs TLS"));
  EXPECT_THAT(run({"--tls-ca", ca, "--token-file", directory_ / "none"}), HasSubstr("2 "));
  // What went wrong, once, and gRPC's own lines about it not at all.
  const std::string mistrusts = run({"--tls-ca", other_authority_.ca_path()});
  EXPECT_THAT(mistrusts, HasSubstr("vouches for the daemon's certificate"));
  EXPECT_THAT(mistrusts, Not(HasSubstr("ssl_transport_security")));
  EXPECT_THAT(mistrusts, Not(HasSubstr("is kvmilld running"))) << "it is";
  EXPECT_THAT(daemon_->standard_error(), Not(HasSubstr("ssl_transport_security")));
  ready_["listen"] = ready_["admin"];
  EXPECT_THAT(
      run({"--tls-ca", ca, "--tls-cert", operator_.certificate, "--tls-key", operator_.key}),
      HasSubstr("its admin listener has admin commands alone"));
}

}  // namespace
}  // namespace kvmill::testing
