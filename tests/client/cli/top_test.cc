// Rates and frames of `kvmill top`. The terminal is tested by top_test.py.
#include <algorithm>
#include <string>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_join.h"
#include "client/cli/top_frame.h"
#include "client/cli/top_model.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace kvmill::cli {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

const absl::Time kStart = absl::UnixEpoch() + absl::Hours(1'000);

ServerStat StatAt(double uptime_s, const std::string& boot_id = std::string(32, 'a')) {
  ServerStat stat;
  stat.boot_id = boot_id;
  stat.uptime_s = uptime_s;
  stat.tiers = {{Tier::kHost, 512 << 20, 1 << 30, 1234, 80, 10},
                {Tier::kDisk, 0, std::uint64_t{64} << 30, 0, 0, 0}};
  stat.lookup_requests = 10;
  stat.lookup_blocks = 100;
  stat.hit_blocks = 80;
  stat.stored_blocks = 50;
  stat.raw_bytes_ingested = 4'000'000;
  stat.encoded_bytes_stored = 1'000'000;
  stat.transfers = {{"map", "shm", 0, 1'000}, {"inline", "grpc", 5'000, 2'000}};
  stat.sessions = 3;
  return stat;
}

// Four seconds after `before`.
ServerStat Later(ServerStat before) {
  before.uptime_s += 4;
  before.lookup_requests += 8;
  before.lookup_blocks += 400;
  before.hit_blocks += 100;
  before.stored_blocks += 2;
  before.existing_blocks += 4;
  before.rejected_blocks += 6;
  before.fetched_blocks += 4000;
  before.fetch_misses += 40;
  before.tiers[0].evicted_blocks += 12;
  before.transfers[0].bytes_out += 8'000'000'000;
  before.transfers[1].bytes_in += 40;
  before.transfers.push_back({"ucx", "tcp/eth0", 4'000'000, 8'000});
  before.transfers.push_back({"pages", "shm", 12'000'000, 0});
  return before;
}

TEST(TopRatesTest, AreDifferencesByTheDaemonsClock) {
  const ServerStat before = StatAt(100);
  const std::optional<TopRates> rates = RatesBetween(before, Later(before));
  ASSERT_TRUE(rates.has_value());
  EXPECT_DOUBLE_EQ(rates->lookups, 2);
  EXPECT_DOUBLE_EQ(rates->lookup_blocks, 100);
  ASSERT_TRUE(rates->hit_rate.has_value());
  EXPECT_DOUBLE_EQ(*rates->hit_rate, 0.25);
  EXPECT_DOUBLE_EQ(rates->stored_blocks, 0.5);
  EXPECT_DOUBLE_EQ(rates->existing_blocks, 1);
  EXPECT_DOUBLE_EQ(rates->rejected_blocks, 1.5);
  EXPECT_DOUBLE_EQ(rates->fetched_blocks, 1000);
  EXPECT_DOUBLE_EQ(rates->fetch_misses, 10);
  EXPECT_DOUBLE_EQ(rates->evicted_blocks.at(Tier::kHost), 3);
  EXPECT_DOUBLE_EQ(rates->evicted_blocks.at(Tier::kDisk), 0);
  EXPECT_DOUBLE_EQ(rates->bytes_out.at({"map", "shm"}), 2e9);
  EXPECT_DOUBLE_EQ(rates->bytes_in.at({"inline", "grpc"}), 10);
  EXPECT_DOUBLE_EQ(rates->bytes_out.at({"inline", "grpc"}), 0);
  EXPECT_DOUBLE_EQ(rates->bytes_in.at({"ucx", "tcp/eth0"}), 1e6) << "a way that is new";
}

TEST(TopRatesTest, ThereAreNoneAcrossARestartOrWithoutTime) {
  const ServerStat before = StatAt(100);
  EXPECT_FALSE(RatesBetween(before, before).has_value());
  EXPECT_FALSE(RatesBetween(Later(before), before).has_value());
  ServerStat other = Later(before);
  other.boot_id = std::string(32, 'b');
  EXPECT_FALSE(RatesBetween(before, other).has_value()) << "even when it is up for longer";
}

TEST(TopRatesTest, ACounterThatWentBackHasNotMoved) {
  const ServerStat before = StatAt(100);
  ServerStat now = StatAt(101);
  now.stored_blocks = 1;
  now.hit_blocks = 70;
  now.transfers.clear();
  const std::optional<TopRates> rates = RatesBetween(before, now);
  ASSERT_TRUE(rates.has_value());
  EXPECT_EQ(rates->stored_blocks, 0);
  EXPECT_FALSE(rates->hit_rate.has_value()) << "nothing was looked up";
  now.lookup_blocks += 5;
  now.hit_blocks = before.hit_blocks + 6;
  EXPECT_EQ(RatesBetween(before, now)->hit_rate, 1.0) << "never more than all";
}

TEST(TopModelTest, SaysARestartForAWhileAndBeginsRatesAgain) {
  TopModel model("unix:/s", absl::Seconds(1), kStart);
  EXPECT_FALSE(model.View(kStart).stat.has_value());
  model.OnStat(StatAt(100), kStart);
  EXPECT_FALSE(model.View(kStart).rates.has_value());
  model.OnStat(Later(StatAt(100)), kStart + absl::Seconds(4));
  EXPECT_TRUE(model.View(kStart + absl::Seconds(4)).rates.has_value());
  EXPECT_EQ(model.View(kStart).previous_boot_id, "");

  const ServerStat reborn = StatAt(1, std::string(32, 'b'));
  const absl::Time then = kStart + absl::Seconds(9);
  model.OnStat(reborn, then);
  EXPECT_FALSE(model.View(then).rates.has_value());
  EXPECT_EQ(model.View(then).previous_boot_id, std::string(32, 'a'));
  model.OnStat(Later(reborn), then + absl::Seconds(4));
  EXPECT_TRUE(model.View(then).rates.has_value());
  EXPECT_NE(model.View(then + absl::Seconds(4)).previous_boot_id, "");
  EXPECT_EQ(model.View(then + absl::Minutes(1)).previous_boot_id, "");
}

TEST(TopModelTest, AnErrorKeepsTheLastAnswerAndEndsItsRates) {
  TopModel model("unix:/s", absl::Seconds(1), kStart);
  model.OnStat(StatAt(100), kStart);
  model.OnStat(Later(StatAt(100)), kStart + absl::Seconds(4));
  model.OnError(absl::UnavailableError("gone"));
  const TopView view = model.View(kStart + absl::Seconds(7));
  EXPECT_EQ(view.error.message(), "gone");
  EXPECT_EQ(view.silence, absl::Seconds(3));
  EXPECT_TRUE(view.stat.has_value());
  EXPECT_FALSE(view.rates.has_value());
  model.OnStat(StatAt(108), kStart + absl::Seconds(8));
  EXPECT_TRUE(model.View(kStart).error.ok());
  EXPECT_TRUE(model.View(kStart).rates.has_value()) << "the same life: its counters went on";
}

TopView ViewOf(const ServerStat& stat, bool rates = true) {
  TopModel model("unix:/run/kvmill/kvmill.sock", absl::Seconds(1), kStart);
  model.OnStat(stat, kStart);
  if (rates) model.OnStat(Later(stat), kStart + absl::Seconds(4));
  return model.View(kStart + absl::Seconds(4));
}

std::string Text(const std::vector<TopLine>& lines) {
  std::vector<std::string> text;
  for (const TopLine& line : lines) text.push_back(line.text);
  return absl::StrJoin(text, "\n");
}

TEST(TopFrameTest, ShowsTiersRatesAndHolds) {
  const std::string text = Text(DrawTop(ViewOf(StatAt(100)), 100));
  for (const char* want : {"unix:/run/kvmill/kvmill.sock",
                           "up 1 min 44 s",
                           "boot aaaaaaaa",
                           "every 1.0 s",
                           "host [#############.............]  50 % 512.0 MiB of 1.00 GiB",
                           "1,234 blocks",
                           "3.0 evicted/s",
                           "disk [..........................]   0 %",
                           "2.0/s           100 blocks/s",
                           "25.0 %          36.0 % since start  host 44.4 % of hits",
                           "0.5 blocks/s    1.0 existing/s",
                           "1.5 rejected/s",
                           "1,000 blocks/s  10 misses/s",
                           "map shm                      out 2.00 GB/s leased",
                           "inline grpc  in 10 B/s       out 0 B/s",
                           "ucx tcp/eth0 in 1.00 MB/s",
                           "out 2.00 kB/s",
                           "pages shm    in 3.00 MB/s\n",
                           "compression  4.00 ",
                           "sessions     3"}) {
    EXPECT_THAT(text, HasSubstr(want));
  }
  EXPECT_THAT(text, Not(HasSubstr("no answer")));
}

TEST(TopFrameTest, WithoutRatesThereAreDashes) {
  const std::string text = Text(DrawTop(ViewOf(StatAt(100), false), 80));
  EXPECT_THAT(text, HasSubstr("lookups      -               -\n"));
  EXPECT_THAT(text, HasSubstr("hit rate     -               80.0 % since start"));
  EXPECT_THAT(text, Not(HasSubstr("evicted/s")));
  EXPECT_THAT(text, Not(HasSubstr(" 0 blocks/s")));
}

TEST(TopFrameTest, NoLineIsLongerThanTheTerminal) {
  TopView view = ViewOf(StatAt(1e6));
  view.error = absl::UnavailableError(std::string(300, 'e'));
  view.previous_boot_id = std::string(32, 'b');
  for (std::size_t width = 1; width <= 200; ++width) {
    for (const TopLine& line : DrawTop(view, width)) {
      EXPECT_LE(line.text.size(), width);
      EXPECT_TRUE(line.text.empty() || line.text.back() != ' ');
    }
  }
}

TEST(TopFrameTest, FortyColumnsHaveEveryNumberThatMatters) {
  const std::string text = Text(DrawTop(ViewOf(StatAt(100)), 40));
  for (const char* want :
       {"host [##..]  50 % 512.0 MiB of 1.00 GiB", "25.0 %", "36.0 % since start", "0.5 blocks/s",
        "1,000 blocks/s", "in 1.00 MB/s", "out 2.00 GB/s leased", "4.00", "0 leases"}) {
    EXPECT_THAT(text, HasSubstr(want));
  }
}

TEST(TopFrameTest, TroublesAreAlarms) {
  ServerStat stat = StatAt(100);
  stat.draining = true;
  stat.checksum_failures = 2;
  TopView view = ViewOf(stat);
  view.error = absl::UnavailableError("connection\nrefused\x1b[2J");
  view.silence = absl::Seconds(12);
  view.previous_boot_id = std::string(32, 'b');
  std::vector<std::string> alarms;
  for (const TopLine& line : DrawTop(view, 80)) {
    if (line.style == TopLine::Style::kAlarm) alarms.push_back(line.text);
    EXPECT_TRUE(std::all_of(line.text.begin(), line.text.end(), [](unsigned char c) {
      return absl::ascii_isprint(c);
    })) << line.text;
  }
  ASSERT_EQ(alarms.size(), 4u);
  EXPECT_EQ(alarms[0], "no answer for 12.0 s, trying again: connection?refused?[2J");
  EXPECT_THAT(alarms[1], HasSubstr("bbbbbbbb"));
  EXPECT_THAT(alarms[2], HasSubstr("drains"));
  EXPECT_THAT(alarms[3], HasSubstr("2 copies"));

  view.error = absl::OkStatus();
  EXPECT_THAT(Text(DrawTop(view, 80)), HasSubstr("no answer for 12.0 s, waiting"));
  view.silence = absl::Seconds(2);
  EXPECT_THAT(Text(DrawTop(view, 80)), Not(HasSubstr("no answer")));
}

TEST(TopFrameTest, BeforeTheFirstAnswerThereIsNothingElse) {
  TopModel model("[::1]:7600", absl::Seconds(1), kStart);
  EXPECT_THAT(Text(DrawTop(model.View(kStart), 80)), HasSubstr("waiting for the first answer"));
  model.OnError(absl::UnavailableError("nobody there"));
  const std::string text = Text(DrawTop(model.View(kStart + absl::Seconds(5)), 80));
  EXPECT_THAT(text, HasSubstr("no answer for 5.0 s, trying again: nobody there"));
  EXPECT_THAT(text, Not(HasSubstr("hit rate")));
}

}  // namespace
}  // namespace kvmill::cli
