// The examples of the documents, as their readers run them: each a process beside a real daemon.
#include <gmock/gmock.h>
#include <stdio.h>
#include <sys/wait.h>

#include <regex>
#include <string>

#include "tests/integration/daemon_process.h"

namespace kvmill::testing {
namespace {

using ::testing::HasSubstr;

struct Ended {
  int code = -1;
  std::string output;  // Both streams.
};

Ended RunExample(const std::string& name, const std::string& address) {
  Ended ended;
  const std::string command = std::string(KVMILL_EXAMPLES_DIR) + "/" + name +
                              (address.empty() ? "" : " '" + address + "'") + " 2>&1";
  FILE* pipe = popen(command.c_str(), "r");
  if (pipe == nullptr) return ended;
  char buffer[4096];
  std::size_t bytes;
  while ((bytes = fread(buffer, 1, sizeof(buffer), pipe)) > 0) ended.output.append(buffer, bytes);
  const int status = pclose(pipe);
  if (WIFEXITED(status)) ended.code = WEXITSTATUS(status);
  return ended;
}

class StoreAndFetchTest : public ::testing::TestWithParam<const char*> {};

TEST_P(StoreAndFetchTest, BringsABlockBack) {
  const TemporaryDirectory directory;
  const std::string socket = directory / "run/kvmill.sock";
  DaemonProcess daemon(DaemonBinary(), {"--socket", socket, "--host-bytes", "256MiB"});
  ASSERT_FALSE(daemon.WaitReady().is_null()) << daemon.standard_error();

  const std::regex said(
      R"(stored (\d), found (\d), fetched (\d+) tokens; 4-bit keys are off by (\d+\.\d) %\n)");
  for (const std::string stored : {"1", "0"}) {  // The second run finds the block of the first.
    const Ended ended = RunExample(GetParam(), "unix:" + socket);
    EXPECT_EQ(ended.code, 0) << ended.output;
    std::smatch match;
    ASSERT_TRUE(std::regex_match(ended.output, match, said)) << ended.output;
    EXPECT_EQ(match[1], stored);
    EXPECT_EQ(match[2], "1");
    EXPECT_EQ(match[3], "128");
    // 4 bits lose about 10 %; a mix-up of layers, heads or tokens would lose more than all.
    EXPECT_GT(std::stod(match[4]), 2);
    EXPECT_LT(std::stod(match[4]), 20);
  }
}

TEST_P(StoreAndFetchTest, WithoutADaemonTheReasonIsSaid) {
  const TemporaryDirectory directory;
  const Ended ended = RunExample(GetParam(), "unix:" + (directory / "none.sock"));
  EXPECT_EQ(ended.code, 1);
  EXPECT_THAT(ended.output, HasSubstr("UNAVAILABLE"));
}

TEST(ExamplesTest, WithoutAnAddressTheyAskForOne) {
  for (const char* name : {"store_and_fetch", "store_and_fetch_c", "map_and_attend",
                           "map_and_attend_c", "store_pages_c"}) {
    const Ended ended = RunExample(name, "");
    EXPECT_EQ(ended.code, 2) << name;
    EXPECT_THAT(ended.output, HasSubstr("usage: ")) << name;
    EXPECT_THAT(ended.output, HasSubstr(std::string(name) + " ADDRESS")) << name;
  }
}

struct Attending {
  const char* name;
  const char* stored_by;
  const char* said;
};

class MapAndAttendTest : public ::testing::TestWithParam<Attending> {};

TEST_P(MapAndAttendTest, AttendsInPlaceToWhatTheOtherExampleStored) {
  const TemporaryDirectory directory;
  const std::string socket = directory / "run/kvmill.sock";
  DaemonProcess daemon(DaemonBinary(), {"--socket", socket, "--host-bytes", "256MiB"});
  ASSERT_FALSE(daemon.WaitReady().is_null()) << daemon.standard_error();
  EXPECT_EQ(RunExample(GetParam().name, "unix:" + socket).code, 1) << "an unknown namespace";
  ASSERT_EQ(RunExample(GetParam().stored_by, "unix:" + socket).code, 0);
  const Ended ended = RunExample(GetParam().name, "unix:" + socket);
  EXPECT_EQ(ended.code, 0) << ended.output;
  std::smatch match;
  ASSERT_TRUE(std::regex_match(ended.output, match, std::regex(GetParam().said))) << ended.output;
  EXPECT_GT(std::stod(match[1]), 0.01);
}

TEST(StorePagesTest, StoresWhatIsInTheEnginesPagesAndBringsItBack) {
  const TemporaryDirectory directory;
  const std::string socket = directory / "run/kvmill.sock";
  DaemonProcess daemon(DaemonBinary(), {"--socket", socket, "--host-bytes", "256MiB"});
  ASSERT_FALSE(daemon.WaitReady().is_null()) << daemon.standard_error();
  const std::regex said(
      R"(stored 1 block from 8 pages in place, fetched 128 tokens; 4-bit keys are off by (\d+\.\d) %\n)");
  const Ended ended = RunExample("store_pages_c", "unix:" + socket);
  EXPECT_EQ(ended.code, 0) << ended.output;
  std::smatch match;
  ASSERT_TRUE(std::regex_match(ended.output, match, said)) << ended.output;
  EXPECT_GT(std::stod(match[1]), 2);
  EXPECT_LT(std::stod(match[1]), 20);
}

INSTANTIATE_TEST_SUITE_P(
    Programs, MapAndAttendTest,
    ::testing::Values(
        Attending{"map_and_attend", "store_and_fetch",
                  R"(attended to 128 tokens in place; the output has norm (\d+\.\d\d)\n)"},
        Attending{
            "map_and_attend_c", "store_and_fetch_c",
            R"(attended to 128 tokens in 8 tiles in place; the output has norm (\d+\.\d\d)\n)"}),
    [](const auto& test) { return std::string(test.param.name); });

INSTANTIATE_TEST_SUITE_P(Programs, StoreAndFetchTest,
                         ::testing::Values("store_and_fetch", "store_and_fetch_c"),
                         [](const auto& test) { return std::string(test.param); });

}  // namespace
}  // namespace kvmill::testing
