// A program with the CUDA kernels in it starts without a driver, and says what is missing when it
// is asked for a device.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <fstream>
#include <sstream>
#include <string>

#include "kernels/attention.h"
#include "kernels/decode.h"
#include "kernels/encode.h"

namespace kvmill {
namespace {

std::string MappedFiles() {
  std::ifstream maps("/proc/self/maps");
  std::ostringstream text;
  text << maps.rdbuf();
  return text.str();
}

TEST(CudaLinkTest, NoDriverAndNoRuntimeIsLinked) {
  EXPECT_THAT(MappedFiles(), testing::Not(testing::HasSubstr("libcuda")));
}

TEST(CudaLinkTest, WithoutADeviceTheLaunchersAnswer) {
  if (access("/dev/nvidiactl", F_OK) == 0) GTEST_SKIP() << "there is a device";
  const TileFormat format;
  const AttentionSequence sequence;
  AttentionArgs attention;
  attention.shape.q_heads = attention.shape.kv_heads = 1;
  attention.sequences = {&sequence, 1};
  for (const absl::Status& status :
       {EncodeTilesCuda(format, Frame::kModel, nullptr, 1, nullptr, nullptr),
        DecodeTilesCuda(format, Frame::kModel, nullptr, 1, nullptr),
        AttentionCuda(attention, 1, nullptr, nullptr)}) {
    // UNIMPLEMENTED in builds without CUDA.
    EXPECT_TRUE(status.code() == absl::StatusCode::kInternal ||
                status.code() == absl::StatusCode::kUnimplemented)
        << status;
    EXPECT_FALSE(status.message().empty());
  }
}

}  // namespace
}  // namespace kvmill
