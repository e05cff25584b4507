// kvmilld with keys of the disk: from a file and from the environment, where they must not turn up,
// and what a start with other keys says.
#include <gmock/gmock.h>
#include <httplib.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/stat.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/server_address.h"
#include "storage/encryption_keys.h"
#include "tests/integration/daemon_fixture.h"

namespace kvmill::testing {
namespace {

using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr char kKey[] = "8d7f1c2b3a4958677685948392a1b0cfde0112233445566778899aabbccddee1";
constexpr char kUnusedKey[] = "f0e1d2c3b4a5968778695a4b3c2d1e0ff0e1d2c3b4a5968778695a4b3c2d1e0f";
constexpr char kOtherKey[] = "00112233445566778899aabbccddeeff00112233445566778899aabbccddeef0";

std::string ContentsOf(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return std::string(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
}

class DiskKeyTest : public DaemonTest {
 protected:
  std::string KeyFile(const std::string& name, const std::string& text) {
    const std::string path = directory_ / name;
    std::ofstream(path) << text;
    EXPECT_EQ(chmod(path.c_str(), 0600), 0);
    return path;
  }
  void Stop() {
    client_.reset();
    daemon_->Signal(SIGTERM);
    ASSERT_EQ(daemon_->WaitExit().code, 0) << daemon_->standard_error();
  }
  // What a start with `more` says that must fail.
  std::string Refusal(const std::vector<std::string>& more) {
    std::vector<std::string> arguments = DefaultArguments();
    for (const char* flag : {"--data-dir", "", "--disk-bytes", "1GiB"}) {
      arguments.push_back(*flag == '\0' ? directory_ / "data" : std::string(flag));
    }
    arguments.insert(arguments.end(), more.begin(), more.end());
    DaemonProcess daemon(DaemonBinary(), arguments);
    EXPECT_EQ(daemon.WaitExit().code, 1);
    return daemon.standard_error();
  }
  std::string MetricsText() {
    const auto address = ParseHostPort(ready_["metrics"].get<std::string>());
    httplib::Client http(address->host, address->port);
    const auto result = http.Get("/metrics");
    return result ? result->body : std::string();
  }
  std::string AllFiles() const {
    std::string all;
    for (const auto& entry : std::filesystem::directory_iterator(directory_ / "data")) {
      all += ContentsOf(entry.path().string());
    }
    return all;
  }
};

std::string IdOf(const char* key) { return ToHex((*EncryptionKeys::Parse(key))->current().id()); }

TEST_F(DiskKeyTest, BlocksComeBackWithTheirKeyAndWithNoOther) {
  const std::string file = KeyFile("key", absl::StrCat(kKey, "\n"));
  StartDurable({"--disk-key-file", file, "--metrics", "127.0.0.1:0"});
  const ClientNamespace ns = Open("a-model-of-nobody-else", SmallSpec());
  Sequence sequence(SmallSpec(), 128, 1);
  ASSERT_EQ(Put(ns, "s", sequence, /*durable=*/true).blocks.size(), 2u);
  EXPECT_THAT(MetricsText(), HasSubstr(absl::StrCat("kvmill_disk_key_bytes{key=\"", IdOf(kKey),
                                                    "\",state=\"current\"} ")));
  EXPECT_THAT(daemon_->standard_error(), HasSubstr(IdOf(kKey)));
  EXPECT_THAT(daemon_->standard_error(), Not(HasSubstr(std::string(kKey).substr(0, 12))));
  ASSERT_NO_FATAL_FAILURE(Stop());
  EXPECT_THAT(AllFiles(), Not(HasSubstr("a-model-of-nobody-else")));

  const std::string without = Refusal({});
  EXPECT_THAT(without, HasSubstr(absl::StrCat("is encrypted with key ", IdOf(kKey))));
  const std::string other =
      Refusal({"--disk-key-file", KeyFile("other", absl::StrCat(kOtherKey, "\n"))});
  EXPECT_THAT(other, HasSubstr(absl::StrCat("the keys given are ", IdOf(kOtherKey))));
  for (const std::string& said : {without, other}) {
    EXPECT_THAT(said, Not(HasSubstr(std::string(kKey).substr(0, 12))));
    EXPECT_THAT(said, Not(HasSubstr(std::string(kOtherKey).substr(0, 12))));
  }

  // A new key above it.
  StartDurable({"--disk-key-file",
                KeyFile("both", absl::StrCat(kOtherKey, "\n", kKey, "\n", kUnusedKey, "\n")),
                "--metrics", "127.0.0.1:0"});
  const ClientNamespace again = Open("a-model-of-nobody-else", SmallSpec());
  const auto decoded = Get(again, KeysOf("s", 2));
  ASSERT_FALSE(decoded.empty());
  EXPECT_LT(sequence.RelativeError(decoded, 0, 128), 0.6);
  const std::string metrics = MetricsText();
  EXPECT_THAT(metrics, HasSubstr(absl::StrCat(IdOf(kKey), "\",state=\"old\"} ")));
  EXPECT_THAT(metrics, HasSubstr(absl::StrCat(IdOf(kOtherKey), "\",state=\"current\"} ")));
  const auto stat = client_->Stat();
  ASSERT_TRUE(stat.ok()) << stat.status();
  ASSERT_EQ(stat->disk_keys.size(), 3u);
  EXPECT_EQ(stat->disk_keys[0].key, IdOf(kOtherKey));
  EXPECT_TRUE(stat->disk_keys[0].is_current);
  EXPECT_GT(stat->disk_keys[0].files, 0u);
  EXPECT_EQ(stat->disk_keys[1].key, IdOf(kKey));
  EXPECT_FALSE(stat->disk_keys[1].is_current);
  EXPECT_GT(stat->disk_keys[1].files, 0u) << "the page is still in its epoch";
  EXPECT_GT(stat->disk_keys[1].bytes, 0u);
  // As the command says it, with nothing of a key but its id.
  DaemonProcess said(KVMILL_CLI, {"stat", "--json", "--server", "unix:" + socket()});
  ASSERT_EQ(said.WaitExit().code, 0) << said.standard_error();
  const nlohmann::json keys = nlohmann::json::parse(said.standard_output())["disk_keys"];
  ASSERT_EQ(keys.size(), 3u);
  EXPECT_EQ(keys[0]["key"], IdOf(kOtherKey));
  EXPECT_EQ(keys[0]["state"], "current");
  EXPECT_EQ(keys[1]["key"], IdOf(kKey));
  EXPECT_EQ(keys[1]["state"], "old");
  EXPECT_EQ(keys[1]["files"], stat->disk_keys[1].files);
  for (const char* key : {kKey, kOtherKey, kUnusedKey}) {
    EXPECT_THAT(said.standard_output(), Not(HasSubstr(std::string(key).substr(0, 12))));
  }

  // People are told that a key without files may go.
  DaemonProcess human(KVMILL_CLI, {"stat", "--server", "unix:" + socket()});
  ASSERT_EQ(human.WaitExit().code, 0) << human.standard_error();
  EXPECT_THAT(human.standard_output(), ContainsRegex(IdOf(kUnusedKey) + " +old, may go +0"));
  EXPECT_THAT(human.standard_output(), Not(ContainsRegex(IdOf(kKey) + " +old, may go")));
}

TEST_F(DiskKeyTest, APlainDirectoryIsLeftAsItIs) {
  StartDurable();
  const ClientNamespace ns = Open("a-model-of-nobody-else", SmallSpec());
  Sequence sequence(SmallSpec(), 64, 1);
  ASSERT_EQ(Put(ns, "s", sequence, /*durable=*/true).blocks.size(), 1u);
  ASSERT_NO_FATAL_FAILURE(Stop());
  EXPECT_THAT(AllFiles(), HasSubstr("a-model-of-nobody-else"));
  EXPECT_THAT(Refusal({"--disk-key-file", KeyFile("key", kKey)}),
              HasSubstr("not encrypted in place"));
  StartDurable();
  EXPECT_FALSE(Get(Open("a-model-of-nobody-else", SmallSpec()), KeysOf("s", 1)).empty());
}

TEST_F(DiskKeyTest, AKeyOfTheEnvironmentIsWipedOutOfIt) {
  ASSERT_EQ(setenv("KVMILL_DISK_KEY", kKey, 1), 0);
  const std::string both = Refusal({"--disk-key-file", KeyFile("key", kOtherKey)});
  StartDurable();
  DaemonProcess printed(
      DaemonBinary(), {"--socket", socket(), "--data-dir", directory_ / "data", "--print-config"});
  EXPECT_EQ(printed.WaitExit().code, 0) << printed.standard_error();
  DaemonProcess idle(DaemonBinary(), {"--socket", directory_ / "idle.sock"});
  EXPECT_EQ(idle.WaitExit().code, 1);
  ASSERT_EQ(setenv("KVMILL_DISK_KEY", "0123", 1), 0);
  const std::string bad = Refusal({});
  ASSERT_EQ(unsetenv("KVMILL_DISK_KEY"), 0);

  const std::string start = std::string(kKey).substr(0, 12);
  EXPECT_THAT(both, HasSubstr("the environment has KVMILL_DISK_KEY, too"));
  EXPECT_THAT(bad, HasSubstr("KVMILL_DISK_KEY: line 1: a key of 4 characters"));
  EXPECT_THAT(idle.standard_error(), HasSubstr("KVMILL_DISK_KEY: needs --data-dir"));
  EXPECT_THAT(printed.standard_output(), HasSubstr("disk_key_file: \"\""));
  EXPECT_THAT(printed.standard_output(), Not(HasSubstr(start)));
  const std::string environment = ContentsOf(absl::StrCat("/proc/", daemon_->pid(), "/environ"));
  EXPECT_THAT(environment, HasSubstr("PATH="));
  EXPECT_THAT(environment, Not(HasSubstr(start)));
  EXPECT_THAT(daemon_->standard_error(), HasSubstr(IdOf(kKey)));
  EXPECT_THAT(daemon_->standard_error(), Not(HasSubstr(start)));
}

TEST_F(DiskKeyTest, AFileThatOthersCanReadIsRefused) {
  const std::string file = KeyFile("key", kKey);
  ASSERT_EQ(chmod(file.c_str(), 0644), 0);
  const std::string said = Refusal({"--disk-key-file", file});
  EXPECT_THAT(said, HasSubstr(absl::StrCat("--disk-key-file ", file, ": holds keys")));
  EXPECT_THAT(said, HasSubstr("chmod 0600"));
  EXPECT_FALSE(std::filesystem::exists(directory_ / "data"));
}

}  // namespace
}  // namespace kvmill::testing
