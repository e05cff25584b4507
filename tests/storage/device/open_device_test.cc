// Names of devices, and what a machine without a GPU answers. The build may have CUDA or not.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <fstream>
#include <sstream>

#include "storage/device/device.h"

namespace kvmill {
namespace {

TEST(OpenDeviceTest, TakesNamesAndNothingElse) {
  const auto host = OpenDevice("host");
  ASSERT_TRUE(host.ok());
  EXPECT_EQ((*host)->info().kind, DeviceKind::kHost);
  EXPECT_EQ((*host)->info().name, "host");
  EXPECT_TRUE((*host)->info().host_accessible);
  EXPECT_GT((*host)->info().memory_bytes, 0u);
  EXPECT_GT((*host)->info().attention_workers, 0u);
  EXPECT_FALSE((*host)->info().description.empty());
  for (const char* name : {"", "cuda", "cuda:", "cuda:x", "cuda:-1", "cuda: 1", "cuda:+1", "gpu",
                           "host:0", "cuda:99999999999"}) {
    const auto device = OpenDevice(name);
    EXPECT_EQ(device.status().code(), absl::StatusCode::kInvalidArgument) << name;
  }
}

TEST(OpenDeviceTest, WithoutAGpuSaysSoAndAutoIsTheHost) {
  if (access("/dev/nvidiactl", F_OK) == 0) GTEST_SKIP() << "there is a device";
  const auto device = OpenDevice("cuda:0");
  EXPECT_EQ(device.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(device.status().message()),
              testing::AllOf(testing::StartsWith("cuda:0: "), testing::HasSubstr("host")));
  EXPECT_EQ((*OpenDevice("auto"))->info().name, "host");
}

TEST(OpenDeviceTest, NoDriverIsLinked) {
  std::ostringstream maps;
  maps << std::ifstream("/proc/self/maps").rdbuf();
  EXPECT_THAT(maps.str(), testing::Not(testing::HasSubstr("libcuda")));
}

}  // namespace
}  // namespace kvmill
