// Real daemons of a cluster with two tenants, who call the same things by the same names.
#ifndef KVMILL_TESTS_CLUSTER_TENANTS_FIXTURE_H_
#define KVMILL_TESTS_CLUSTER_TENANTS_FIXTURE_H_

#include <fstream>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "storage/core/sha256.h"
#include "tests/cluster/cluster_fixture.h"
#include "tests/integration/test_certificates.h"

namespace kvmill::testing {

class TenantsTest : public ClusterTest {
 protected:
  static constexpr std::uint32_t kBlocks = 40;  // Two runs.
  static constexpr char kNode[] = "";  // Who shows a node's certificate, in place of a tenant.

  void SetUp() override {
    ClusterTest::SetUp();
    ASSERT_FALSE(HasFatalFailure());
    tenants_ = WriteTenants("tenants.yaml", "");
  }
  std::vector<std::string> Trust() const override {
    return {"--tls-ca", authority_.ca_path(), "--tls-cert", node_.certificate,   "--tls-key",
            node_.key,  "--tenants",          tenants_,     "--tls-server-name", "node.example"};
  }
  // Tenants team-a and team-b, whose token is the name of the tenant; `of_b`, `of_a`: more of them.
  std::string WriteTenants(const std::string& name, const std::string& of_b,
                           const std::string& of_a = "") {
    const auto digest = [](const std::string& token) {
      const Sha256Digest bytes = Sha256(token);
      return absl::BytesToHexString(
          absl::string_view(reinterpret_cast<const char*>(bytes.data()), bytes.size()));
    };
    const std::string path = directory_ / name;
    std::ofstream(path) << "tenants:\n  team-a: {tokens: [\"sha256:" << digest("team-a") << "\"]"
                        << of_a << "}\n  team-b: {tokens: [\"sha256:" << digest("team-b") << "\"]"
                        << of_b << "}\n";
    return path;
  }
  // Each tenant has an arena, a quarter of the memory, so that none has to leave for another.
  void StartNodes(const std::vector<std::string>& more = {}) {
    for (const char* name : {"a", "b"}) {
      StartTenantsNode(name, more);
      ASSERT_FALSE(HasFatalFailure());
    }
    for (const char* name : {"a", "b"}) Until([&] { return MembersOf(name) == "a b"; });
  }
  void StartTenantsNode(const std::string& name, const std::vector<std::string>& more = {}) {
    std::vector<std::string> arguments = {
        "--host-bytes",   "256MiB", "--admin",         "127.0.0.1:0",
        "--peer-timeout", "5s",     "--drain-timeout", "60s"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    StartNode(name, name, kLongLease, arguments);
  }

  // `listener`: of the ready line.
  Client::Options OptionsOf(const std::string& node, const std::string& tenant,
                            const std::string& listener = "listen") {
    Client::Options options;
    options.address = nodes_.at(node).ready[listener].get<std::string>();
    options.timeout = absl::Seconds(60);
    options.tls = {authority_.ca_path(), "", "", "node.example"};
    options.token = tenant;
    if (tenant == kNode) {
      options.tls.certificate = node_.certificate;
      options.tls.key = node_.key;
    }
    return options;
  }
  Client& ClientOf(const std::string& node, const std::string& tenant) {
    std::unique_ptr<Client>& client = clients_[{node, tenant}];
    if (client != nullptr) return *client;
    auto made = Client::Create(OptionsOf(node, tenant));
    EXPECT_TRUE(made.ok()) << made.status();
    client = *std::move(made);
    return *client;
  }
  // One spec and one name, for all.
  ClientNamespace OpenOn(const std::string& node, const std::string& tenant) {
    const auto ns = ClientOf(node, tenant).OpenNamespace("shared", SmallSpec());
    EXPECT_TRUE(ns.ok()) << ns.status();
    return ns.ok() ? *ns : ClientNamespace();
  }
  void PutOn(const std::string& node, const std::string& tenant, std::uint32_t seed) {
    Sequence values(SmallSpec(), kBlocks * SmallSpec().block_tokens, seed);
    const auto stored = ClientOf(node, tenant).Store(OpenOn(node, tenant), values.Blocks("s"), {});
    ASSERT_TRUE(stored.ok()) << stored.status();
    ASSERT_EQ(stored->blocks_stored, kBlocks);
  }
  std::uint32_t HitsOn(const std::string& node, const std::string& tenant,
                       const Elsewhere& elsewhere = {}) {
    CallOptions call;
    call.elsewhere = elsewhere;
    const auto found =
        ClientOf(node, tenant).Lookup(OpenOn(node, tenant), KeysOf("s", kBlocks), {}, call);
    EXPECT_TRUE(found.ok()) << found.status();
    return found.ok() ? found->hit_blocks : 99;
  }
  using Pages = std::map<std::tuple<std::uint32_t, int, std::uint32_t>, std::string>;
  Pages FetchOn(const std::string& node, const std::string& tenant, const std::string& hint = "") {
    CallOptions call;
    call.elsewhere.hint = hint;
    PageCollector sink;
    const auto fetched =
        ClientOf(node, tenant).Fetch(OpenOn(node, tenant), KeysOf("s", kBlocks), sink, call);
    EXPECT_TRUE(fetched.ok()) << fetched.status();
    return sink.pages;
  }

  TestAuthority authority_;
  TestAuthority::Files node_ = authority_.Issue("n", "DNS:node.example");
  std::string tenants_;  // Of nodes that are started from now on.
  std::map<std::pair<std::string, std::string>, std::unique_ptr<Client>> clients_;
};

}  // namespace kvmill::testing

#endif  // KVMILL_TESTS_CLUSTER_TENANTS_FIXTURE_H_
