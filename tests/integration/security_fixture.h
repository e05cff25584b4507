// Daemons with TLS and everybody who may come to them, for the tests of security.
#ifndef KVMILL_TESTS_INTEGRATION_SECURITY_FIXTURE_H_
#define KVMILL_TESTS_INTEGRATION_SECURITY_FIXTURE_H_

#include <grpcpp/create_channel.h>

#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "client/tls/tls_credentials.h"
#include "storage/core/sha256.h"
#include "tests/integration/daemon_fixture.h"
#include "tests/integration/test_certificates.h"

namespace kvmill::testing {

inline constexpr const char* kToken = "a-token-that-only-tests-have";
inline constexpr const char* kOperatorToken = "a-token-of-operators";
inline constexpr const char* kWatcherToken = "a-token-of-watchers";
inline constexpr const char* kElsewhere = "198.51.100.1";

// What one caller shows.
struct Shown {
  bool tls = true;
  TestAuthority::Files files;  // Empty: no certificate.
  std::string token;
};

class SecurityTest : public DaemonTest {
 protected:
  static void SetUpTestSuite() { static_cast<void>(HasOwnNetwork()); }
  void SetUp() override { ASSERT_FALSE(ReadText(node_.key).empty()) << "openssl made no key"; }
  // Whether this process and its daemons have a network of their own, in which kElsewhere is an
  // address of theirs that is none of loopback. Wants root. Asked before there are other threads.
  static bool HasOwnNetwork();

  std::vector<std::string> TcpArguments() const {
    return {"--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0"};
  }
  std::vector<std::string> TlsArguments(const std::vector<std::string>& more = {}) const {
    std::vector<std::string> arguments = TcpArguments();
    for (const std::string& argument :
         {std::string("--tls-cert"), node_.certificate, std::string("--tls-key"), node_.key,
          std::string("--tls-ca"), authority_.ca_path()}) {
      arguments.push_back(argument);
    }
    arguments.insert(arguments.end(), more.begin(), more.end());
    return arguments;
  }
  static std::string Digest(const std::string& token) {
    const Sha256Digest digest = Sha256(token);
    return absl::StrCat("\"sha256:",
                        absl::BytesToHexString(absl::string_view(
                            reinterpret_cast<const char*>(digest.data()), digest.size())),
                        "\"");
  }
  std::string WriteTenants() {
    const std::string path = directory_ / "tenants.yaml";
    std::ofstream(path) << "tenants:\n"
                           "  team-a: {certificates: [client.example]}\n"
                           "  team-b: {certificates: [other.example], tokens: ["
                        << Digest(kToken)
                        << "]}\n"
                           "  watchers: {metrics: true, tokens: ["
                        << Digest(kWatcherToken)
                        << "]}\n"
                           "  default: {certificates: [operator.example], admin: true, tokens: ["
                        << Digest(kOperatorToken) << "]}\n";
    return path;
  }

  std::shared_ptr<grpc::Channel> ChannelTo(const std::string& address, const Shown& shown) const {
    grpc::ChannelArguments arguments;
    arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    TlsFiles files;
    if (shown.tls) files = FilesOf(shown.files);
    return grpc::CreateCustomChannel(address, ChannelCredentialsOf(files), arguments);
  }
  TlsFiles FilesOf(const TestAuthority::Files& files) const {
    return {authority_.ca_path(), files.certificate, files.key, ""};
  }
  // A client over TCP.
  absl::StatusOr<std::unique_ptr<Client>> ClientWith(const TlsFiles& tls,
                                                     const std::string& token = "") const {
    Client::Options options;
    options.address = ready_["listen"];
    options.timeout = absl::Seconds(60);
    options.tls = tls;
    options.token = token;
    return Client::Create(options);
  }

  TestAuthority authority_, other_authority_;
  TestAuthority::Files node_ =
      authority_.Issue("node", absl::StrCat(TestAuthority::kLoopback, ",DNS:node.example"));
  TestAuthority::Files client_ = authority_.Issue("c", "DNS:client.example");
  TestAuthority::Files other_ = authority_.Issue("other.example", "");
  TestAuthority::Files operator_ = authority_.Issue("o", "DNS:operator.example");
  TestAuthority::Files stranger_ = authority_.Issue("s", "DNS:stranger.example");
  TestAuthority::Files over_ = authority_.Issue("c", "DNS:client.example", /*over=*/true);
  TestAuthority::Files foreign_ = other_authority_.Issue("c", "DNS:client.example");
};

}  // namespace kvmill::testing

#endif  // KVMILL_TESTS_INTEGRATION_SECURITY_FIXTURE_H_
