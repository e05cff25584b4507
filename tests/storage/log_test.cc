#include "storage/core/log.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "storage/core/log_line.h"

namespace kvmill {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using Verdict = LogLimiter::Verdict;

const absl::Time kTime = absl::FromUnixMillis(1'777'890'030'123);

TEST(LogLineTest, TextIsTimeLevelMessageAndFields) {
  EXPECT_EQ(TextLine(kTime, "info", "a message", {}), "2026-05-04T10:20:30.123Z info a message");
  EXPECT_EQ(TextLine(kTime, "error", "m", {{"peer", "10.0.0.1:7"}, {"why", "no room"}, {"e", ""}}),
            "2026-05-04T10:20:30.123Z error m peer=10.0.0.1:7 why=\"no room\" e=\"\"");
  EXPECT_EQ(TextLine(kTime, "info", "m", {{"v", "a\"b\\c=d"}}),
            "2026-05-04T10:20:30.123Z info m v=\"a\\\"b\\\\c=d\"");
}

// What a peer says must not look as if this daemon had said it.
TEST(LogLineTest, NothingInAMessageOrValueBeginsALine) {
  const std::string evil = "x\n2026-05-04T10:20:30.123Z info admin Drain\r\x1b[2J\x7f";
  const std::string line = TextLine(kTime, "info", evil, {{"v", evil}});
  for (const char c : line) EXPECT_TRUE(c >= 0x20 && c != 0x7f) << static_cast<int>(c);
  EXPECT_THAT(line, HasSubstr("info x\\n2026"));
  const std::string json = JsonLine(kTime, "info", evil, {{"v", evil}});
  EXPECT_EQ(json.find('\n'), json.npos);
  EXPECT_EQ(nlohmann::json::parse(json)["msg"], evil);
  EXPECT_EQ(nlohmann::json::parse(json)["v"], evil);
}

TEST(LogLineTest, JsonIsJsonWhateverTheBytes) {
  std::string all;
  for (int c = 0; c < 256; ++c) all.push_back(static_cast<char>(c));
  const auto line = nlohmann::json::parse(JsonLine(kTime, "warning", all, {{"v", all}}));
  EXPECT_EQ(line["ts"], "2026-05-04T10:20:30.123Z");
  EXPECT_EQ(line["level"], "warning");
  EXPECT_THAT(line["msg"].get<std::string>(), HasSubstr("\xEF\xBF\xBD"));
  EXPECT_THAT(line["v"].get<std::string>(), HasSubstr("ABC"));
  EXPECT_TRUE(absl::StartsWith(JsonLine(kTime, "info", "m", {}),
                               "{\"ts\":\"2026-05-04T10:20:30.123Z\",\"level\":\"info\",\"msg\":"));
}

TEST(LogLimiterTest, APlaceThatIsFullSaysSoOnceAndThenHowManyWereLeftOut) {
  LogLimiter limiter;
  const std::int64_t window = kLogWindowSeconds * 1'000'000'000;
  for (std::uint32_t i = 0; i < kLogLinesMax; ++i) {
    EXPECT_EQ(limiter.Admit("a.cc", 1, 5).verdict, Verdict::kLog) << i;
  }
  EXPECT_EQ(limiter.Admit("a.cc", 1, 6).verdict, Verdict::kLogThatFull);
  for (int i = 0; i < 7; ++i) {
    EXPECT_EQ(limiter.Admit("a.cc", 1, window + 4).verdict, Verdict::kLeaveOut) << i;
  }
  // Another place, of this file or another, has its own.
  EXPECT_EQ(limiter.Admit("a.cc", 2, 6).verdict, Verdict::kLog);
  EXPECT_EQ(limiter.Admit("b.cc", 1, 6).verdict, Verdict::kLog);
  EXPECT_EQ(limiter.left_out(), 8u);
  const LogLimiter::Answer after = limiter.Admit("a.cc", 1, window + 5);
  EXPECT_EQ(after.verdict, Verdict::kLogAfterGap);
  EXPECT_EQ(after.left_out, 8u);
  EXPECT_EQ(limiter.Admit("a.cc", 1, window + 6).verdict, Verdict::kLog);
  EXPECT_EQ(limiter.left_out(), 8u);
}

std::vector<std::string> Lines(const std::string& text) {
  return absl::StrSplit(text, '\n', absl::SkipEmpty());
}

TEST(LogTest, LevelFormatScopesAndTheLimit) {
  ::testing::internal::CaptureStderr();
  LogDebug("below the level");
  LogInfo("plain", {{"n", "1"}});
  EXPECT_TRUE(SetLogLevel("warn").ok());
  LogInfo("below the level");
  LogWarning("seen");
  for (const char* level : {"warn", "error", "off"}) {
    EXPECT_TRUE(SetLogLevel(level).ok());
    LogAudit(absl::StrCat("at ", level));
  }
  LogError("below the level");
  EXPECT_TRUE(SetLogLevel("debug").ok());
  EXPECT_TRUE(SetLogFormat("json").ok());
  {
    const std::string id = "r1";
    const LogScope outer(
        [](const void* of) {
          return std::vector<LogField>{{"request_id", *static_cast<const std::string*>(of)}};
        },
        &id);
    const LogScope inner([](const void*) { return std::vector<LogField>{{"peer", "p"}}; }, nullptr);
    LogDebug("in two");
  }
  LogAudit("audited");
  EXPECT_FALSE(SetLogLevel("loud").ok());
  EXPECT_EQ(SetLogFormat("xml").message(), "log format \"xml\": want text or json");
  const std::uint64_t before = SuppressedLogLines();
  for (std::uint32_t i = 0; i < kLogLinesMax + 30; ++i) LogError(absl::StrCat("error ", i));
  for (std::uint32_t i = 0; i < kLogLinesMax + 30; ++i) LogAudit("never left out");
  EXPECT_EQ(SuppressedLogLines() - before, 30u);
  EXPECT_TRUE(SetLogFormat("text").ok());
  EXPECT_TRUE(SetLogLevel("info").ok());
  const std::vector<std::string> lines = Lines(::testing::internal::GetCapturedStderr());
  ASSERT_EQ(lines.size(), 7 + kLogLinesMax + 1 + kLogLinesMax + 30);
  EXPECT_THAT(lines[0], HasSubstr("info plain n=1"));
  EXPECT_THAT(lines[1], HasSubstr("warning seen"));
  EXPECT_THAT(lines[2], HasSubstr("info at warn audit=true"));
  EXPECT_THAT(lines[3], HasSubstr("info at error audit=true"));
  EXPECT_THAT(lines[4], HasSubstr("info at off audit=true"));
  const auto in_two = nlohmann::json::parse(lines[5]);
  EXPECT_EQ(in_two["msg"], "in two");
  EXPECT_EQ(in_two["request_id"], "r1");
  EXPECT_EQ(in_two["peer"], "p");
  EXPECT_EQ(nlohmann::json::parse(lines[6])["audit"], "true");
  EXPECT_FALSE(nlohmann::json::parse(lines[6]).contains("request_id"));
  EXPECT_THAT(lines[7 + kLogLinesMax], HasSubstr("more lines of one kind are left out"));
}

}  // namespace
}  // namespace kvmill
