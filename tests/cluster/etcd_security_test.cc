// The registry and real etcd processes that want to know who calls: users and passwords, TLS.
#include <gmock/gmock.h>

#include <chrono>
#include <filesystem>
#include <future>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "client/tls/tls_credentials.h"
#include "tests/cluster/etcd_registry_fixture.h"

namespace kvmill::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

TEST_F(EtcdRegistryTest, UsersProveWhoTheyAre) {
  const auto control = [&](const std::vector<std::string>& arguments) {
    std::string said;
    const bool ok = etcd_.Control(arguments, &said);
    EXPECT_TRUE(ok) << arguments[0] << " " << arguments[1] << ": " << said;
  };
  control({"user", "add", "root:rootpw"});
  control({"user", "grant-role", "root", "root"});
  control({"user", "add", "mill:s3cret-word"});
  control({"role", "add", "members"});
  control({"role", "grant-permission", "--prefix=true", "members", "readwrite", "/t/"});
  control({"user", "grant-role", "mill", "members"});

  EtcdOptions options;
  options.servers = {etcd_.address()};
  options.user = "mill";
  options.password = "s3cret-word";
  Connect(options);
  EXPECT_TRUE(List().ok()) << "an etcd without users takes any";
  control({"auth", "enable"});

  const auto lease = Grant(60);
  ASSERT_TRUE(lease.ok()) << lease.status();
  const auto put = Put("/t/a", "1", lease->id);
  ASSERT_TRUE(put.ok() && put->done) << put.status();
  const auto other = List("/u/");
  EXPECT_EQ(other.status().code(), absl::StatusCode::kPermissionDenied) << other.status();
  EXPECT_THAT(std::string(other.status().message()),
              HasSubstr("(user \"mill\" of --etcd-user has to be allowed to read and write"));
  Watcher watcher;
  Watch(&watcher, put->header.revision);
  ASSERT_TRUE(watcher.WaitChanges(1));

  // Tokens are forgotten with the process: a new one is fetched without anybody noticing.
  etcd_.Kill();
  ASSERT_TRUE(etcd_.Start());
  ASSERT_TRUE(ListAgain().ok());
  ASSERT_TRUE(KeepAlive(lease->id).ok());
  // Nor do they need one call that has as long as etcd takes to check a password.
  etcd_.Kill();
  ASSERT_TRUE(etcd_.Start());
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  bool listed = false;
  while (!listed && std::chrono::steady_clock::now() < deadline) {
    listed = List("/t/", Millis(20)).ok();
  }
  EXPECT_TRUE(listed);
  // A watch that comes with a forgotten one breaks, and the next one gets through.
  etcd_.Kill();
  ASSERT_TRUE(etcd_.Start());
  bool watches = false;
  for (int i = 0; i < 100 && !watches; ++i) {
    Watcher again;
    const Registry::CallId id = Watch(&again, put->header.revision);
    watches = again.WaitFor([](const Watcher& w) { return w.ended || !w.changes.empty(); }) &&
              !again.ended;
    Cancel(id);
    if (!watches) std::this_thread::sleep_for(Millis(50));
  }
  EXPECT_TRUE(watches);

  options.password = "wr0ng-word";
  Connect(options);
  const auto refused = List();
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kUnauthenticated) << refused.status();
  EXPECT_THAT(std::string(refused.status().message()), Not(HasSubstr("wr0ng")));
  Watcher unknown;
  Watch(&unknown, 1);
  ASSERT_TRUE(unknown.WaitEnded());
  EXPECT_EQ(unknown.broken.code(), absl::StatusCode::kUnauthenticated) << unknown.broken;
  options.user = "";
  Connect(options);
  const absl::Status nobody = List().status();
  EXPECT_EQ(nobody.code(), absl::StatusCode::kUnauthenticated);
  EXPECT_THAT(std::string(nobody.message()), HasSubstr("it wants a user: --etcd-user NAME"));
}

TlsFiles FilesOf(const TestCertificates& certificates) {
  return {certificates.ca_path(), certificates.certificate_path(), certificates.key_path(), ""};
}

// A list from `registry` that has 15 s.
absl::Status ListOnce(EtcdRegistry& registry, ThreadLoop& loop) {
  std::promise<absl::Status> answer;
  loop.Run([&] {
    registry.List("/t/", loop.clock().MonotonicNanos() + 15'000 * kMs,
                  [&](const auto& listing) { answer.set_value(listing.status()); });
  });
  return answer.get_future().get();
}

TEST(EtcdTlsTest, BothEndsProveWhoTheyAre) {
  const TestCertificates certificates;
  const TestCertificates strangers;
  EtcdProcess etcd(&certificates);
  ASSERT_TRUE(etcd.Start());
  ThreadLoop loop(SystemClock());
  const auto list = [&](EtcdOptions options, const HostPort& server) {
    options.servers = {server};
    absl::StatusOr<std::unique_ptr<EtcdRegistry>> registry = EtcdRegistry::Create(options, loop);
    if (!registry.ok()) return registry.status();
    const absl::Status status = ListOnce(**registry, loop);
    loop.Run([&] { registry->reset(); });
    return status;
  };
  EtcdOptions right;
  right.tls = FilesOf(certificates);
  EXPECT_TRUE(list(right, etcd.address()).ok()) << list(right, etcd.address());
  // 127.0.0.2 is the same server, but not in its certificate.
  EXPECT_FALSE(list(right, {"127.0.0.2", etcd.address().port}).ok());

  EtcdOptions without_key = right;
  without_key.tls.certificate = without_key.tls.key = "";
  EXPECT_THAT(std::string(list(without_key, etcd.address()).message()),
              HasSubstr("if it wants a certificate: --etcd-cert FILE, --etcd-key FILE"));
  EtcdOptions stranger = right;
  stranger.tls.certificate = strangers.certificate_path();
  stranger.tls.key = strangers.key_path();
  EXPECT_FALSE(list(stranger, etcd.address()).ok());
  EtcdOptions mistrusts = right;
  mistrusts.tls.ca = strangers.ca_path();
  EXPECT_EQ(list(mistrusts, etcd.address()).code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(list(EtcdOptions{}, etcd.address()).message()),
              HasSubstr("if it wants TLS: --etcd-ca FILE"));
  EtcdOptions half = right;
  half.tls.key = "";
  EXPECT_EQ(list(half, etcd.address()).code(), absl::StatusCode::kInvalidArgument);
}

// Authority and certificates of etcd and of the registry change while it lives: the next connection
// is by the new ones. Files that do not fit each other are not taken meanwhile.
TEST(EtcdTlsTest, FilesChangeWithoutARestart) {
  const TestCertificates of_etcd, before, after;
  const TemporaryDirectory directory;
  const TlsFiles files{directory / "ca.pem", directory / "cert.pem", directory / "key.pem", ""};
  const auto replace = [](const std::string& path, const std::string& by) {
    const std::string next = path + ".next";
    std::filesystem::copy_file(by, next, std::filesystem::copy_options::overwrite_existing);
    std::filesystem::rename(next, path);
  };
  const auto replace_all = [&](const TlsFiles& old, const TestCertificates& by) {
    replace(old.ca, by.ca_path());
    replace(old.certificate, by.certificate_path());
    replace(old.key, by.key_path());
  };
  replace_all(FilesOf(of_etcd), before);
  replace_all(files, before);
  EtcdProcess etcd(&of_etcd);
  ASSERT_TRUE(etcd.Start());
  ThreadLoop loop(SystemClock());
  EtcdOptions options;
  options.servers = {etcd.address()};
  options.tls = files;
  auto registry = EtcdRegistry::Create(options, loop);
  ASSERT_TRUE(registry.ok()) << registry.status();
  EXPECT_TRUE(ListOnce(**registry, loop).ok()) << ListOnce(**registry, loop);

  // A certificate without its key is no reason to lose the connection, nor the next one.
  replace(files.certificate, after.certificate_path());
  std::this_thread::sleep_for(std::chrono::seconds(kTlsRefreshSeconds + 2));
  etcd.Kill();
  ASSERT_TRUE(etcd.Start());
  EXPECT_TRUE(ListOnce(**registry, loop).ok()) << ListOnce(**registry, loop);

  // From now on etcd is another authority's, and believes no other.
  etcd.Kill();
  replace_all(FilesOf(of_etcd), after);
  ASSERT_TRUE(etcd.Start());
  EXPECT_FALSE(ListOnce(**registry, loop).ok()) << "neither believes the other yet";
  replace_all(files, after);
  absl::Status listed = absl::UnknownError("not tried");
  const auto give_up = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  while (!listed.ok() && std::chrono::steady_clock::now() < give_up) {
    listed = ListOnce(**registry, loop);
    std::this_thread::sleep_for(Millis(200));
  }
  EXPECT_TRUE(listed.ok()) << listed;
  loop.Run([&] { registry->reset(); });
}

}  // namespace
}  // namespace kvmill::testing
