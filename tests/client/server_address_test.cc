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
  for (const char* text : {"", "localhost", ":7600", "localhost:", "localhost:65536",
                           "localhost:-1", "localhost:7600x", "::1:7600", "fe80::1", "[::1]",
                           "[::1", "[::1]7600", "[localhost]:7600", "unix:", "dns:80", "ipv4:80"}) {
    EXPECT_EQ(ParseServerAddress(text).status().code(), absl::StatusCode::kInvalidArgument) << text;
  }
  EXPECT_EQ(ParseHostPort("unix:80").status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_FALSE(ParseServerAddress("unix:/" + std::string(200, 'p')).ok());
}

TEST(ServerAddressTest, TheDefaultSocketFollowsTheRuntimeDirectory) {
  EXPECT_EQ(DefaultSocketPath(""), "/run/kvmill/kvmill.sock");
  EXPECT_EQ(DefaultSocketPath("/run/user/7"), "/run/user/7/kvmill.sock");
}

}  // namespace
}  // namespace kvmill
