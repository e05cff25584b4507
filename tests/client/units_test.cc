#include "client/units.h"

#include <gmock/gmock.h>

namespace kvmill {
namespace {

TEST(UnitsTest, SizesAreReadAndPrintedExactly) {
  const struct {
    const char* text;
    std::uint64_t bytes;
    const char* printed;
  } cases[] = {{"0", 0, "0"},
               {"4096", 4096, "4KiB"},
               {"1000B", 1000, "1000"},
               {"4GiB", std::uint64_t{4} << 30, "4GiB"},
               {"1.5GiB", std::uint64_t{3} << 29, "1536MiB"},
               {"2MB", 2'000'000, "2000000"},
               {"1TiB", std::uint64_t{1} << 40, "1TiB"}};
  for (const auto& c : cases) {
    const auto bytes = ParseBytes(c.text);
    ASSERT_TRUE(bytes.ok()) << bytes.status();
    EXPECT_EQ(*bytes, c.bytes);
    EXPECT_EQ(FormatBytes(c.bytes), c.printed);
    EXPECT_EQ(*ParseBytes(c.printed), c.bytes);
  }
}

TEST(UnitsTest, WhatIsNoSizeIsRefused) {
  for (const char* text : {"", "GiB", "-1", "4 GiB", "4gib", "1.5", "1.5B", "1e3", "0x10",
                           "9999999TiB", "99999999999999999999", "1..5GiB"}) {
    EXPECT_FALSE(ParseBytes(text).ok()) << text;
  }
}

TEST(UnitsTest, DurationsNeedAUnitAndAreNotNegative) {
  EXPECT_EQ(*ParseDuration("250ms"), absl::Milliseconds(250));
  EXPECT_EQ(*ParseDuration("1h30m"), absl::Minutes(90));
  EXPECT_EQ(*ParseDuration("0"), absl::ZeroDuration());
  for (const char* text : {"", "5", "-1s", "1 s", "s"})
    EXPECT_FALSE(ParseDuration(text).ok()) << text;
}

}  // namespace
}  // namespace kvmill
