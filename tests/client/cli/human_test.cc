#include "client/cli/human.h"

#include <limits>

#include "gtest/gtest.h"

namespace kvmill::cli {
namespace {

TEST(HumanTest, BytesHaveThreeOrFourDigits) {
  EXPECT_EQ(HumanBytes(0), "0 B");
  EXPECT_EQ(HumanBytes(1023), "1023 B");
  EXPECT_EQ(HumanBytes(1024), "1.00 KiB");
  EXPECT_EQ(HumanBytes(13824), "13.5 KiB");
  EXPECT_EQ(HumanBytes(std::uint64_t{4} << 30), "4.00 GiB");
}

TEST(HumanTest, CountsAreGroupedByThree) {
  EXPECT_EQ(HumanCount(0), "0");
  EXPECT_EQ(HumanCount(999), "999");
  EXPECT_EQ(HumanCount(1000), "1,000");
  EXPECT_EQ(HumanCount(1234567), "1,234,567");
}

TEST(HumanTest, TimesTakeTheUnitThatFits) {
  EXPECT_EQ(HumanMicroseconds(999), "999 us");
  EXPECT_EQ(HumanMicroseconds(1250), "1.25 ms");
  EXPECT_EQ(HumanMicroseconds(2500000), "2.5 s");
  EXPECT_EQ(HumanSeconds(250), "4 min 10 s");
  EXPECT_EQ(HumanSeconds(7500), "2 h 5 min");
  EXPECT_EQ(HumanSeconds(3 * 86400.0), "3 d 0 h");
}

TEST(HumanTest, NumbersThatAreNoneAreDashes) {
  EXPECT_EQ(HumanNumber(std::numeric_limits<double>::quiet_NaN(), 2), "-");
  EXPECT_EQ(HumanNumber(4.736, 2), "4.74");
  EXPECT_EQ(HumanPercent(0.0445), "4.45 %");
}

TEST(HumanTest, TimeoutsTakeUnitsOrSeconds) {
  EXPECT_EQ(*ParseTimeout("500ms"), absl::Milliseconds(500));
  EXPECT_EQ(*ParseTimeout("30"), absl::Seconds(30));
  EXPECT_EQ(*ParseTimeout("1.5"), absl::Milliseconds(1500));
  for (const char* bad : {"", "0", "-1", "nan", "inf", "5 parsecs", "1e300"}) {
    EXPECT_FALSE(ParseTimeout(bad).ok()) << bad;
  }
}

}  // namespace
}  // namespace kvmill::cli
