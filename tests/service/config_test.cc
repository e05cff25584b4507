#include "service/config.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <stdlib.h>
#include <sys/stat.h>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <string>
#include <utility>
#include <vector>

#include "service/cluster_config.h"
#include "service/disk_config.h"
#include "service/flags.h"
#include "service/loaded_config.h"
#include "service/node_devices.h"
#include "service/running_config.h"
#include "storage/encryption_keys.h"
#include "tests/integration/test_certificates.h"

namespace kvmill {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::Pair;
using ::testing::StartsWith;
using ::testing::UnorderedElementsAre;

class ConfigFileTest : public ::testing::Test {
 protected:
  ConfigFileTest() {
    std::string pattern = ::testing::TempDir() + "kvmill-config-XXXXXX";
    directory_ = mkdtemp(pattern.data());
  }
  ~ConfigFileTest() override { std::filesystem::remove_all(directory_); }

  absl::Status Apply(const std::string& yaml, Config* config) {
    std::ofstream(path()) << yaml;
    return ApplyYamlFile(path(), config);
  }
  std::string path() const { return directory_ + "/kvmilld.yaml"; }

 private:
  std::string directory_;
};

TEST_F(ConfigFileTest, ReadsScalarsOfEveryStyleAndLeavesTheRestAlone) {
  Config config;
  config.node_id = "kept";
  ASSERT_TRUE(Apply("# it's a comment with a \" in it\n"
                    "socket: '/run/it''s.sock'\n"
                    "data_dir: \"/data \\\"x\\\"\"   # and another's\n"
                    "host_bytes: 3GiB\n"
                    "insecure: true\n"
                    "log_level: warn\n"
                    "encode_threads: 1024\n"
                    "drain_timeout: 1m30s\n\n \t\r\n",
                    &config)
                  .ok());
  EXPECT_EQ(config.socket, "/run/it's.sock");
  EXPECT_EQ(config.data_dir, "/data \"x\"");
  EXPECT_EQ(config.host_bytes, std::uint64_t{3} << 30);
  EXPECT_TRUE(config.insecure);
  EXPECT_EQ(config.log_level, "warn");
  EXPECT_EQ(config.encode_threads, 1024u);
  EXPECT_EQ(config.drain_timeout, absl::Seconds(90));
  EXPECT_EQ(config.node_id, "kept");
}

TEST_F(ConfigFileTest, AnEmptyFileChangesNothing) {
  for (const char* yaml : {"", "\n", "# nothing\n", "---\n"}) {
    Config config;
    EXPECT_TRUE(Apply(yaml, &config).ok()) << yaml;
    EXPECT_EQ(ToYaml(config), ToYaml(Config())) << yaml;
  }
}

// yaml-cpp by itself takes the first two and hands out a value that goes on to the end of the file.
TEST_F(ConfigFileTest, AQuoteThatIsNeverClosedIsRefusedWithOneClearError) {
  const struct {
    const char* yaml;
    int line;
  } cases[] = {{"log_level: info\nsocket: \"/run/kvmill.sock\n", 2},
               {"socket: '/run/kvmill.sock\nlog_level: info\n\n  \n", 2},
               {"socket: \"/run/kvmill.sock", 1},
               {"socket: '/run/it''s\r\n", 1},
               {"socket: \"/run/x\\\"\n", 1},
               {"\"socket: x\n", 1}};
  for (const auto& c : cases) {
    Config config;
    const absl::Status status = Apply(c.yaml, &config);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << c.yaml;
    EXPECT_EQ(status.message(),
              path() + ":" + std::to_string(c.line) + ": the file ends inside a quoted value");
    EXPECT_EQ(config.socket, "") << c.yaml;
  }
}

TEST_F(ConfigFileTest, WhatIsNoMapOfKnownScalarsIsRefusedByFileAndLine) {
  const struct {
    const char* yaml;
    const char* error;  // After "FILE:".
  } cases[] = {
      {"log_level: info\nhost_byte: 1GiB\n", "2: unknown key \"host_byte\""},
      {"host-bytes: 1GiB\n", "1: unknown key \"host-bytes\""},
      {"socket: a\nlisten: b:1\nsocket: c\n", "3: key \"socket\" again"},
      {"socket: [a, b]\n", "1: key \"socket\": want a scalar"},
      {"socket:\n  path: b\n", "1: key \"socket\": want a scalar"},
      {"socket:\n", "1: key \"socket\": want a scalar"},
      {"- socket\n", "1: want a map of options"},
      {"socket\n", "1: want a map of options"},
      {"[a]: b\n", "1: a key is not a scalar"},
      {"socket: {a: b\n", "1: "},
      {"\nhost_bytes: 1XiB\n", "2: host-bytes \"1XiB\": "},
  };
  for (const auto& c : cases) {
    Config config;
    const absl::Status status = Apply(c.yaml, &config);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << c.yaml;
    EXPECT_THAT(std::string(status.message()), StartsWith(path() + ":" + c.error)) << c.yaml;
  }
  Config config;
  const absl::Status absent = ApplyYamlFile(path() + ".absent", &config);
  EXPECT_EQ(absent.code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(absent.message()), HasSubstr(path() + ".absent"));
}

TEST_F(ConfigFileTest, WhatIsNoTextOfOneDocumentIsRefused) {
  const std::string_view nul("socket: a\0b\n", 12);
  const struct {
    std::string yaml;
    const char* error;  // After "FILE:".
  } cases[] = {
      {"socket: a\nzone: \"\xff\"\n", "2: byte 0xff is not UTF-8"},
      {"zone: \xc0\xaf\n", "1: byte 0xc0 is not UTF-8"},
      {"zone: \xed\xa0\x80\n", "1: byte 0xed is not UTF-8"},
      {"\n\nzone: \xe2\x82", "3: byte 0xe2 is not UTF-8"},
      {std::string(nul), "1: control character 0x00"},
      {"zone: a\n# \x1b[2J\n", "2: control character 0x1b"},
      {"zone: \"a\\nb\"\n", "1: zone \"a\\nb\": has a control character"},
      {"zone: a\n---\nzone: b\n", "3: a second document"},
      {std::string(kConfigFileBytesMax + 1, '#'), " is larger than 1048576 bytes"},
      {"etcd_password: s3cret-word\n", "1: unknown key \"etcd_password\""},
      {"zone: ~\n", "1: key \"zone\": want a scalar"},
      {"lease_ttl: \"\"\n", "1: lease-ttl \"\": "},
      {"copies: 99999999999999999999999\n",
       "1: copies \"99999999999999999999999\": want a number from 0 to 4"},
      {"host_bytes: 1e300GiB\n", "1: host-bytes \"1e300GiB\": "},
      {"host_bytes: 99999999999999999999999999\n",
       "1: host-bytes \"99999999999999999999999999\": "},
      {"session_grace: 9999999999999h\n", "1: session-grace \"9999999999999h\": "},
  };
  for (const auto& c : cases) {
    Config config;
    const absl::Status status = Apply(c.yaml, &config);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << c.error;
    EXPECT_THAT(std::string(status.message()), StartsWith(path() + ":" + c.error));
    EXPECT_THAT(std::string(status.message()), Not(HasSubstr("s3cret-word")));
  }
  Config config;
  EXPECT_TRUE(Apply("data_dir: \"\xe2\x82\xac\xf0\x9f\x98\x80\"\r\n", &config).ok());
  EXPECT_EQ(config.data_dir, "\xe2\x82\xac\xf0\x9f\x98\x80");
  const absl::Status folder = ApplyYamlFile(::testing::TempDir(), &config);
  EXPECT_EQ(folder.code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(folder.message()), HasSubstr("is a directory, want a file"));
}

TEST_F(ConfigFileTest, FlagsWinOverTheFileAndItIsKnownWhereAValueComesFrom) {
  std::ofstream(path()) << "zone: from-file\nlog_level: warn\ncopies: 2\n";
  const absl::StatusOr<LoadedConfig> loaded = LoadConfig(
      {path(), {{"zone", "from-flag"}, {"copies", "1"}, {"copies", "3"}}, "/run/x", "w"});
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  EXPECT_EQ(loaded->config.zone, "from-flag");
  EXPECT_EQ(loaded->config.copies, 3u);
  EXPECT_EQ(loaded->config.log_level, "warn");
  EXPECT_EQ(loaded->config.socket, "/run/x/kvmill.sock");
  EXPECT_EQ(loaded->config.etcd_password, "w");
  EXPECT_EQ(loaded->sources.size(), ConfigOptions().size());
  EXPECT_EQ(loaded->sources.at("zone"), OptionSource::kFlag);
  EXPECT_EQ(loaded->sources.at("log-level"), OptionSource::kFile);
  EXPECT_EQ(loaded->sources.at("socket"), OptionSource::kDefault);
  const auto bad_flag = LoadConfig({path(), {{"copies", "5"}}, "", ""});
  EXPECT_EQ(bad_flag.status().message(), "--copies \"5\": want a number from 0 to 4");
  const auto bad_file = LoadConfig({path() + ".absent", {}, "", ""});
  EXPECT_EQ(bad_file.status().code(), absl::StatusCode::kNotFound);
}

TEST_F(ConfigFileTest, WhatIsInForceAfterAReload) {
  LoadedConfig started = *LoadConfig({"", {{"socket", "/s"}, {"copies", "1"}}, "", ""});
  RunningConfig running(started, "file.yaml", SystemClock());
  std::ofstream(path()) << "log_level: error\ncopies: 4\nzone: z\ndrain_timeout: 1m\n";
  const LoadedConfig wanted = *LoadConfig({path(), {{"socket", "/s"}}, "", ""});
  const Config effective = WithReloadable(started.config, wanted.config);
  EXPECT_EQ(effective.log_level, "error");
  EXPECT_EQ(effective.drain_timeout, absl::Minutes(1));
  EXPECT_EQ(effective.copies, 1u);
  EXPECT_EQ(effective.zone, "");
  EXPECT_THAT(ChangedOptions(started.config, effective),
              ::testing::ElementsAre("log-level", "drain-timeout"));
  EXPECT_THAT(ChangedOptions(effective, wanted.config), ::testing::ElementsAre("zone", "copies"));
  running.Refused(absl::InvalidArgumentError("bad"));
  EXPECT_EQ(running.stats().problem, "bad");
  EXPECT_TRUE(running.stats().last_refused);
  EXPECT_EQ(running.config().log_level, "info");
  running.Applied(effective, wanted);
  const RunningConfig::Stats stats = running.stats();
  EXPECT_EQ(stats.applied, 1u);
  EXPECT_EQ(stats.refused, 1u);
  EXPECT_FALSE(stats.last_refused);
  EXPECT_EQ(stats.problem, "");
  EXPECT_EQ(stats.pending_options, 2u);
  for (const RunningConfig::Option& option : running.Options()) {
    EXPECT_EQ(option.value, GetOption(option.name, effective)) << option.name;
    if (option.name == "copies") {
      EXPECT_EQ(option.pending, "4");
      EXPECT_EQ(option.source, OptionSource::kFlag) << "of the value in force";
    } else if (option.name == "log-level") {
      EXPECT_FALSE(option.pending.has_value());
      EXPECT_EQ(option.source, OptionSource::kFile);
      EXPECT_TRUE(option.reloadable);
      EXPECT_EQ(option.default_value, "info");
    }
  }
}

TEST_F(ConfigFileTest, ThePrintedConfigurationReadsBackToTheSame) {
  Config config;
  config.socket = "/run/a \"quoted\\path\": # [x]";
  config.listen = "[::1]:0";
  config.insecure = true;
  config.data_dir = "it's";
  config.host_bytes = 100'000'001;
  config.disk_bytes = std::uint64_t{3} << 40;
  config.device = "cuda:3";
  config.encode_threads = 7;
  config.eviction_policy = "lru";
  config.drain_timeout = absl::Milliseconds(2500);
  Config back;
  const std::string printed = ToYaml(config);
  ASSERT_TRUE(Apply(printed, &back).ok()) << printed;
  EXPECT_EQ(ToYaml(back), printed);
  EXPECT_EQ(back.socket, config.socket);
  EXPECT_EQ(back.drain_timeout, config.drain_timeout);
}

TEST(ConfigTest, BadValuesAreRefusedNamingOptionValueAndWhatIsAllowed) {
  const struct {
    const char* name;
    const char* value;
    const char* allowed;
  } cases[] = {
      {"host-high-watermark", "0", "want a number from 1 to 100"},
      {"host-low-watermark", "100", "want a number from 0 to 99"},
      {"gpu-high-watermark", "101", "want a number from 1 to 100"},
      {"gpu-low-watermark", "90%", "want a number from 0 to 99"},
      {"guard-action", "fallback", "want alert|fall-back|refuse"},
      {"encode-algorithm", "refine", "want kvarn|refined"},
      {"guard-key-error", "0.6", "want a number from 0 to 1000"},
      {"guard-value-error", "1001", "want a number from 0 to 1000"},
      {"guard-samples", "0", "want a number from 1 to 1048576"},
      {"host-bytes", "", "want a number with B, KiB"},
      {"host-bytes", "-1", "want a number with B, KiB"},
      {"host-bytes", "1.5B", "a whole number of bytes"},
      {"host-bytes", "9999999TiB", "below 2^63"},
      {"disk-bytes", "4 GiB", "want a number with B, KiB"},
      {"gpu-bytes", "lots", "want a number with B, KiB"},
      {"listen", "localhost", "no port; want HOST:PORT or [IPV6]:PORT"},
      {"listen", "localhost:70000", "port \"70000\" is not a number from 0 to 65535"},
      {"admin", "::1:80", "an IPv6 address needs brackets"},
      {"metrics", ":80", "no host"},
      {"insecure", "yes", "want true or false"},
      {"device", "gpu", "want auto, host or cuda:N"},
      {"device", "cuda:-1", "want auto, host or cuda:N"},
      {"log-level", "loud", "want trace|debug|info|warn|error|off"},
      {"encode-threads", "1025", "want a number from 0 to 1024"},
      {"encode-threads", "-1", "want a number from 0 to 1024"},
      {"eviction-policy", "mru", "want one of returns, lru, arc"},
      {"drain-timeout", "5", "want a number with ms, s, m or h"},
      {"drain-timeout", "-1s", "want at least 0"},
      {"drain-timeout", "1h1ms", "want 0 to 1h"},
      {"session-grace", "inf", "want 0 to 1h"},
      {"ucx", "127.0.0.1:65521", "port 65521: want at most 65520, the data port is one of the 15"},
      {"ucx", "[::1]:65535", "port 65535: want at most 65520"},
  };
  for (const auto& c : cases) {
    Config config;
    const absl::Status status = SetOption(c.name, c.value, &config);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << c.name << " " << c.value;
    const std::string message(status.message());
    EXPECT_THAT(message, StartsWith(std::string(c.name) + " \"" + c.value + "\": "));
    EXPECT_THAT(message, HasSubstr(c.allowed));
    EXPECT_EQ(ToYaml(config), ToYaml(Config())) << "changed by " << c.name << " " << c.value;
  }
  Config config;
  EXPECT_THAT(std::string(SetOption("host_bytes", "1", &config).message()),
              HasSubstr("unknown option \"host_bytes\""));
}

TEST(ConfigTest, WhatThisBuildCannotDoIsRefusedWithValueAndRemedy) {
  const auto check = [](const std::vector<std::pair<std::string, std::string>>& options) {
    Config config;
    config.socket = "/run/kvmill.sock";
    for (const auto& [name, value] : options) {
      EXPECT_TRUE(SetOption(name, value, &config).ok()) << name << " " << value;
    }
    const absl::Status status = CheckConfig(config);
    return std::string(status.message());
  };
  EXPECT_EQ(check({}), "");
  EXPECT_EQ(check({{"listen", "[::]:1"}, {"admin", "h:2"}, {"insecure", "true"}}), "");
  EXPECT_THAT(check({{"listen", "0.0.0.0:7171"}}), HasSubstr("--listen 0.0.0.0:7171: "));
  EXPECT_THAT(check({{"listen", "0.0.0.0:7171"}}), HasSubstr("--insecure"));
  EXPECT_THAT(check({{"admin", "h:1"}}), HasSubstr("--admin h:1: "));
  EXPECT_EQ(check({{"gpu-bytes", "64MiB"}, {"device", "cuda:1"}}), "");
  Config unparsed;
  unparsed.socket = "/run/kvmill.sock";
  unparsed.gpu_bytes = 1 << 20;
  EXPECT_THAT(std::string(CheckConfig(unparsed).message()),
              HasSubstr("--gpu-bytes 1MiB: want 0 or at least 64MiB"));
  EXPECT_EQ(check({{"ucx", "10.0.0.1"}, {"data-plane-plaintext", "true"}}), "");
  EXPECT_EQ(check({{"ucx", "10.0.0.1"}, {"rdma", "required"}}), "");
  EXPECT_EQ(check({{"rdma", "expected"}}), "");
  EXPECT_THAT(check({{"rdma", "required"}}), HasSubstr("--rdma required: is of the data plane"));
  EXPECT_EQ(check({{"host-high-watermark", "100"}, {"host-low-watermark", "99"}}), "");
  EXPECT_THAT(check({{"host-low-watermark", "95"}}),
              HasSubstr("--host-low-watermark 95: want less than --host-high-watermark, 95"));
  EXPECT_THAT(check({{"gpu-high-watermark", "50"}}),
              HasSubstr("--gpu-low-watermark 90: want less than --gpu-high-watermark, 50"));
  EXPECT_EQ(check({{"encode-algorithm", "refined"}}), "");
  EXPECT_THAT(check({{"encode-algorithm", "refined"}, {"gpu-bytes", "64MiB"}}),
              HasSubstr("--encode-algorithm refined: no kernel of a GPU does it; want kvarn"));
  Config config;
  DeviceInfo gpu;
  gpu.kind = DeviceKind::kCuda;
  gpu.name = "cuda:7";
  EXPECT_TRUE(CheckEncodes(config, gpu).ok());
  config.encode_algorithm = "refined";
  EXPECT_EQ(CheckEncodes(config, gpu).code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(CheckEncodes(config, gpu).message()), HasSubstr("device cuda:7"));
  EXPECT_TRUE(CheckEncodes(config, DeviceInfo()).ok());
  EXPECT_EQ(check({{"error-sample-interval", "0"}}), "");
  EXPECT_THAT(check({{"error-sample-interval", "0"}, {"guard-action", "fall-back"}}),
              HasSubstr("--guard-action fall-back: looks at samples"));
  EXPECT_THAT(check({{"socket", std::string(200, 's')}}), HasSubstr("200 bytes, want 1 to 102"));
}

// A cluster's address with a prefix of so many bytes between its slashes, in parts that are names.
std::string LongPrefix(std::size_t bytes) {
  std::string prefix(bytes, 'p');
  for (std::size_t at = 60; at + 1 < bytes; at += 60) prefix[at] = '/';
  return "etcd://h:1/" + prefix;
}

TEST(ConfigTest, AClusterNeedsWhatPeersAndEtcdNeed) {
  using Options = std::vector<std::pair<std::string, std::string>>;
  const std::string dir = ::testing::TempDir();
  const std::string file = dir + "kvmill-config-test-pem";
  std::ofstream(file) << "secret-bytes\n";
  const auto check = [](Options more, const std::string& password = "") {
    Options options = {{"socket", "/tmp/k.sock"},
                       {"insecure", "true"},
                       {"cluster", "etcd://h:1,[::1]:2/a/b"},
                       {"listen", "127.0.0.1:0"},
                       {"node-id", "node-1"}};
    options.insert(options.end(), more.begin(), more.end());
    Config config;
    config.etcd_password = password;
    for (const auto& [name, value] : options) {
      const absl::Status set = SetOption(name, value, &config);
      if (!set.ok()) return std::string(set.message());
    }
    return std::string(CheckConfig(config).message());
  };
  EXPECT_EQ(check({}), "");
  EXPECT_EQ(check({{"node-id", ""}}), "") << "the host name will do";
  EXPECT_EQ(check({{"zone", "eu-1a"}, {"advertise", "node-1.example:0"}}), "");
  testing::TestAuthority authority;
  const testing::TestAuthority::Files good = authority.Issue("node", "DNS:node.example");
  const testing::TestAuthority::Files other = authority.Issue("other", "DNS:other.example");
  const testing::TestAuthority::Files server =
      authority.Issue("server", "DNS:server.example", /*over=*/false, "serverAuth");
  const std::string ca = authority.ca_path();
  EXPECT_EQ(check({{"etcd-ca", ca}}), "");
  EXPECT_EQ(check({{"etcd-ca", ca}, {"etcd-cert", good.certificate}, {"etcd-key", good.key}}), "");
  EXPECT_EQ(check({{"etcd-user", "mill"}}, "word"), "");
  EXPECT_EQ(check({{"etcd-user", "mill"}, {"etcd-password-file", file}}), "");
  const struct {
    Options options;
    const char* says;
  } refused[] = {
      {{{"cluster", "consul://h:1"}},
       "cluster \"consul://h:1\": want none or etcd://HOST:PORT,..."},
      {{{"cluster", "etcd://"}}, "cluster \"etcd://\": "},
      {{{"cluster", "etcd://h"}}, "cluster \"etcd://h\": "},
      {{{"cluster", "etcd://h:1,"}}, "cluster \"etcd://h:1,\": "},
      {{{"cluster", "etcd://h:0"}}, "server \"h:0\": want a port"},
      {{{"cluster", "etcd://::1:2"}}, "cluster \"etcd://::1:2\": "},
      {{{"cluster", "etcd://h:+5"}}, "port \"+5\" is not a number from 0 to 65535"},
      {{{"cluster", "etcd://h: 5"}}, "port \" 5\" is not a number from 0 to 65535"},
      {{{"cluster", "etcd://h:5 ,i:5"}}, "port \"5 \" is not a number from 0 to 65535"},
      {{{"cluster", "etcd://h i:5"}}, "address \"h i:5\": \" \" in the host"},
      {{{"cluster", "etcd://h:1,i:1,H:1"}}, "server \"H:1\" is named twice"},
      {{{"cluster", "etcd://h:1/a//b"}}, "part of the prefix \"\""},
      {{{"cluster", "etcd://h:1/"}}, "part of the prefix \"\""},
      {{{"cluster", "etcd://h:1//"}}, "part of the prefix \"\""},
      {{{"cluster", "etcd://h:1/a b"}}, "part of the prefix \"a b\": want 1 to 64"},
      {{{"cluster", "etcd://h:1/a/.."}}, "part of the prefix \"..\": want a name"},
      {{{"cluster", LongPrefix(440)}}, "prefix of 442 bytes: want at most 440"},
      {{{"cluster", "etcd://u:secret@h:1"}}, "cluster \"etcd://...@h:1\": users are not part"},
      {{{"listen", ""}}, "needs --listen HOST:PORT"},
      {{{"listen", "0.0.0.0:7600"}}, "--listen 0.0.0.0:7600: peers cannot reach a wildcard"},
      {{{"listen", "[::]:7600"}}, "say --advertise HOST:PORT"},
      {{{"advertise", "0.0.0.0:1"}}, "--advertise 0.0.0.0:1: peers cannot reach a wildcard"},
      {{{"advertise", "a b:5"}}, "advertise \"a b:5\": address \"a b:5\": \" \" in the host"},
      {{{"advertise", "a:+5"}}, "advertise \"a:+5\": address \"a:+5\": port \"+5\""},
      {{{"node-id", ".."}}, "node id \"..\": want a name"},
      {{{"cluster", "none"}, {"node-id", "a b"}}, "node id \"a b\": want 1 to 64"},
      {{{"zone", "."}}, "zone \".\": want a name"},
      {{{"node-id", "node/1"}}, "node id \"node/1\": want 1 to 64"},
      {{{"zone", "a b"}}, "zone \"a b\": zone \"a b\""},
      {{{"lease-ttl", "1s"}}, "lease-ttl \"1s\": want 2s to 10m"},
      {{{"lease-ttl", "2500ms"}}, "--lease-ttl 2.5s: want whole seconds"},
      {{{"lease-ttl", "1h"}}, "lease-ttl \"1h\": want 2s to 10m"},
      {{{"member-grace", "2h"}}, "want 0 to 1h"},
      {{{"peer-timeout", "11s"}}, "want 10ms to 10s"},
      {{{"peer-timeout", "9ms"}}, "want 10ms to 10s"},
      {{{"share-uids", "true"}}, "--share-uids: needs --tls-cert, --tls-key and --tls-ca"},
      {{{"etcd-ca", dir}}, "--etcd-ca "},
      {{{"etcd-ca", "/absent"}}, "--etcd-ca /absent: cannot be read (No such file"},
      {{{"etcd-ca", file}}, "holds no certificate, want PEM"},
      {{{"etcd-ca", ca}, {"etcd-cert", good.certificate}, {"etcd-key", other.key}},
       "is not the key of"},
      {{{"etcd-ca", ca}, {"etcd-cert", server.certificate}, {"etcd-key", server.key}},
       "--etcd-cert "},
      {{{"etcd-ca", file}, {"etcd-cert", file}}, "needs --etcd-key and --etcd-ca"},
      {{{"etcd-cert", file}, {"etcd-key", file}}, "needs --etcd-key and --etcd-ca"},
      {{{"etcd-user", "mill"}}, "--etcd-user mill: needs a password"},
      {{{"etcd-user", "mill"}, {"etcd-password-file", "/absent"}},
       "--etcd-password-file /absent: "},
  };
  for (const auto& c : refused) {
    EXPECT_THAT(check(c.options), HasSubstr(c.says));
    EXPECT_THAT(check(c.options), Not(HasSubstr("secret-bytes")));
  }
  std::remove(file.c_str());
}

TEST(ConfigTest, ServersAndPrefixOfACluster) {
  const auto cluster = ParseCluster("etcd://a:1,[fd00::1]:2379/x/y/");
  ASSERT_TRUE(cluster.ok()) << cluster.status();
  ASSERT_EQ(cluster->servers.size(), 2u);
  EXPECT_EQ(cluster->servers[0].ToString(), "a:1");
  EXPECT_EQ(cluster->servers[1].ToString(), "[fd00::1]:2379");
  EXPECT_EQ(cluster->prefix, "/x/y/");
  EXPECT_EQ(ParseCluster("etcd://a:1")->prefix, "/kvmill/");
  EXPECT_EQ(ParseCluster("etcd://a:1,a:2,[fd00::1]:1")->servers.size(), 3u);
  EXPECT_TRUE(ParseCluster(LongPrefix(438)).ok());
  EXPECT_TRUE(ParseCluster("none")->servers.empty());
}

TEST(ConfigTest, KeysOfTheDiskNeedADiskAndOneSource) {
  const std::string key = std::string(31 * 2, 'a') + "bc";
  const std::string file = ::testing::TempDir() + "kvmill-disk-key";
  std::ofstream(file) << key << "\n";
  ASSERT_EQ(chmod(file.c_str(), 0600), 0);
  Config config;
  config.socket = "/tmp/k.sock";
  EXPECT_EQ(*DiskKeysOf(config), nullptr);
  config.disk_key_file = file;
  EXPECT_THAT(std::string(CheckConfig(config).message()),
              HasSubstr("--disk-key-file " + file + ": needs --data-dir"));
  config.data_dir = "/data";
  EXPECT_TRUE(CheckConfig(config).ok()) << CheckConfig(config);
  ASSERT_TRUE(DiskKeysOf(config).ok());
  EXPECT_EQ((*DiskKeysOf(config))->keys().size(), 1u);
  EXPECT_THAT(ToYaml(config), HasSubstr("disk_key_file: \"" + file + "\""));
  EXPECT_THAT(ToYaml(config), Not(HasSubstr(key)));
  config.disk_keys = *EncryptionKeys::Parse(key);
  EXPECT_THAT(std::string(CheckConfig(config).message()), HasSubstr("want one of them"));
  config.disk_key_file.clear();
  EXPECT_TRUE(CheckConfig(config).ok());
  EXPECT_THAT(ToYaml(config), Not(HasSubstr(key)));
  config.disk_keys = nullptr;
  config.disk_key_file = "/absent";
  EXPECT_THAT(std::string(CheckConfig(config).message()),
              HasSubstr("--disk-key-file /absent: cannot be read: "));
  std::remove(file.c_str());
}

TEST(ConfigTest, APasswordIsNowherePrinted) {
  Config config;
  config.etcd_password = "s3cret-word";
  EXPECT_THAT(ToYaml(config), Not(HasSubstr("s3cret-word")));
}

TEST(ConfigTest, OthersBlocksAreSharedWhereNodesAreKnown) {
  Config config;
  config.insecure = true;
  config.share_uids = true;
  EXPECT_FALSE(SharedTenantsOf(config).Has("team-a"));
  EXPECT_FALSE(SharedTenantsOf(config).Has("uid-7"));
  config.insecure = false;
  config.tls = {"ca", "certificate", "key", ""};
  EXPECT_TRUE(SharedTenantsOf(config).Has("team-a"));
  EXPECT_TRUE(SharedTenantsOf(config).Has("uid-7"));
  config.share_uids = false;
  EXPECT_FALSE(SharedTenantsOf(config).Has("uid-7"));
  EXPECT_TRUE(SharedTenantsOf(config).Has("default"));
}

TEST(ConfigTest, APeersAddressIsTheRealOne) {
  Config config;
  config.cluster = "etcd://h:1";
  config.node_id = "node-1";
  const std::string incarnation(16, 'i');
  const auto address = [&] {
    const auto options = MakeMembershipOptions(config, "10.0.0.1:7600", "", incarnation, "");
    return options.ok() ? options->self.member.address : std::string(options.status().message());
  };
  EXPECT_EQ(address(), "10.0.0.1:7600");
  config.advertise = "node-1.example:0";
  EXPECT_EQ(address(), "node-1.example:7600");
  config.advertise = "[fd00::1]:99";
  EXPECT_EQ(address(), "[fd00::1]:99");
  config.data_dir = "/d";
  EXPECT_EQ(MakeMembershipOptions(config, "10.0.0.1:7600", "", incarnation, "")
                ->self.member.capacity_bytes,
            config.host_bytes + config.disk_bytes);
}

TEST(ConfigTest, AnAdminAddressIsSaidWhereOthersReachIt) {
  Config config;
  config.cluster = "etcd://h:1";
  config.node_id = "node-1";
  const auto admin = [&](const std::string& listen, const std::string& bound) {
    const auto options = MakeMembershipOptions(config, listen, bound, std::string(16, 'i'), "");
    return options.ok() ? options->self.member.admin_address
                        : std::string(options.status().message());
  };
  EXPECT_EQ(admin("10.0.0.1:7600", ""), "");
  EXPECT_EQ(admin("10.0.0.1:7600", "10.0.0.1:7601"), "10.0.0.1:7601");
  EXPECT_EQ(admin("10.0.0.1:7600", "0.0.0.0:7601"), "10.0.0.1:7601");
  EXPECT_EQ(admin("[fd00::1]:7600", "[::]:7601"), "[fd00::1]:7601");
  // A loopback address would be another machine's own.
  for (const char* loopback :
       {"127.0.0.1:7601", "127.9.9.9:7601", "[::1]:7601", "localhost:7601"}) {
    EXPECT_EQ(admin("10.0.0.1:7600", loopback), "") << loopback;
    EXPECT_EQ(admin("127.0.0.1:7600", loopback), loopback);
  }
  config.advertise = "node-1.example:7600";
  EXPECT_EQ(admin("0.0.0.0:7600", "[::]:7601"), "node-1.example:7601");
}

TEST(ConfigTest, TheDataPlaneHasANumericAddressWithOrWithoutAPort) {
  const auto address = [](const std::string& text) {
    const auto parsed = ParseUcxAddress(text);
    return parsed.ok() ? parsed->ToString() : std::string(parsed.status().message());
  };
  EXPECT_EQ(address("10.0.0.1"), "10.0.0.1:0");
  EXPECT_EQ(address("10.0.0.1:7172"), "10.0.0.1:7172");
  EXPECT_EQ(address("fd00::1"), "[fd00::1]:0");
  EXPECT_EQ(address("[fd00::1]"), "[fd00::1]:0");
  EXPECT_EQ(address("[fd00::1]:7172"), "[fd00::1]:7172");
  for (const char* wildcard : {"0.0.0.0", "0.0.0.0:7172", "::", "[::]", "[::]:7172", "0::0"}) {
    EXPECT_THAT(address(wildcard), HasSubstr("want one address of this host")) << wildcard;
  }
  for (const char* bad : {"host", "host:1", "10.0.0.1:99999", "10.0.0", "[fd00::1", "[]", ":"}) {
    EXPECT_FALSE(ParseUcxAddress(bad).ok()) << bad;
    Config config;
    const absl::Status status = SetOption("ucx", bad, &config);
    EXPECT_THAT(std::string(status.message()), HasSubstr(std::string("ucx \"") + bad));
  }
}

TEST(FlagsTest, BothSpellingsAndSwitchesAndTheLastValueWins) {
  const auto flags =
      ParseFlags(std::vector<std::string>{"--host-bytes", "1GiB", "--socket=a=b", "--insecure",
                                          "--config", "f.yaml", "--socket=", "--check-config"});
  ASSERT_TRUE(flags.ok()) << flags.status();
  EXPECT_THAT(flags->options, UnorderedElementsAre(Pair("host-bytes", "1GiB"),
                                                   Pair("insecure", "true"), Pair("socket", "")));
  EXPECT_EQ(flags->config_file, "f.yaml");
  EXPECT_TRUE(flags->check_config);
  EXPECT_FALSE(flags->print_config || flags->help || flags->version);
}

TEST(FlagsTest, BadArgumentsAreNamed) {
  const struct {
    std::vector<std::string> arguments;
    const char* error;
  } cases[] = {
      {{"x"}, "x"},
      {{"-q"}, "-q"},
      {{"--host_bytes", "1"}, "--host_bytes"},
      {{"--insecure=true"}, "--insecure takes no value"},
      {{"--help=1"}, "--help takes no value"},
      {{"--socket"}, "--socket"},
      {{"--socket", "--insecure"}, "--socket"},
      {{"--insecure", "--config"}, "--config"},
  };
  for (const auto& c : cases) {
    const absl::Status status = ParseFlags(c.arguments).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << c.error;
    EXPECT_THAT(std::string(status.message()), HasSubstr(c.error));
  }
}

TEST(FlagsTest, HelpNamesEveryOption) {
  const std::string help = FlagsHelp();
  for (const OptionInfo& option : ConfigOptions()) {
    EXPECT_THAT(help, HasSubstr("  --" + option.name +
                                (option.value_name.empty() ? " " : " " + option.value_name)));
    EXPECT_THAT(help, HasSubstr(option.help));
  }
}

}  // namespace
}  // namespace kvmill
