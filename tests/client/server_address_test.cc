#include "client/server_address.h"

#include <gmock/gmock.h>

namespace kvmill {
namespace {

TEST(ServerAddressTest, AcceptsUnixPathsNamesAndBothAddressFamilies) {
  const auto path = ParseServerAddress("unix:/run/kvmill/kvmill.sock");
  ASSERT_TRUE(path.ok());
  EXPECT_EQ(path->unix_path, "/run/kvmill/kvmill.sock");
  EXPECT_EQ(path->ToString(), "unix:/run/kvmill/kvmill.sock");
  for (const char* text : {"localhost:7600", "10.0.0.1:0", "[::1]:7600", "[fe80::1%eth0]:65535"}) {
    const auto address = ParseServerAddress(text);
    ASSERT_TRUE(address.ok()) << address.status();
    EXPECT_EQ(address->ToString(), text);
  }
  EXPECT_EQ(ParseHostPort("[::1]:7600")->host, "::1");
  EXPECT_EQ(ParseHostPort("[::1]:7600")->port, 7600);
}

TEST(ServerAddressTest, RefusesWhatIsAmbiguousOrIncomplete) {
  for (const char* text : {"",
                           "localhost",
                           ":7600",
                           "localhost:",
                           "localhost:65536",
                           "localhost:-1",
                           "localhost:7600x",
                           "::1:7600",
                           "fe80::1",
                           "[::1]",
                           "[::1",
                           "[::1]7600",
                           "[localhost]:7600",
                           "unix:",
                           "dns:80",
                           "ipv4:80",
                           "h:+5",
                           "h: 5",
                           "h:5 ",
                           "h:",
                           "a b:5",
                           "h\n:5",
                           "h/x:5",
                           "u@h:5",
                           "h,i:5",
                           "[::1 ]:5"}) {
    EXPECT_EQ(ParseServerAddress(text).status().code(), absl::StatusCode::kInvalidArgument) << text;
  }
  EXPECT_EQ(ParseHostPort("unix:80").status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_TRUE(ParseHostPort(std::string(253, 'h') + ":1").ok());
  EXPECT_FALSE(ParseHostPort(std::string(254, 'h') + ":1").ok());
  EXPECT_FALSE(ParseServerAddress("unix:/" + std::string(200, 'p')).ok());
}

TEST(ServerAddressTest, TheDefaultSocketFollowsTheRuntimeDirectory) {
  EXPECT_EQ(DefaultSocketPath(""), "/run/kvmill/kvmill.sock");
  EXPECT_EQ(DefaultSocketPath("/run/user/7"), "/run/user/7/kvmill.sock");
}

}  // namespace
}  // namespace kvmill
