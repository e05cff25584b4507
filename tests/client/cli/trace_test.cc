#include "client/cli/trace.h"

#include <cstdio>
#include <string>

#include "client/cli/files.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace kvmill::cli {
namespace {

using Requests = std::vector<std::vector<std::uint64_t>>;

class TraceTest : public testing::Test {
 protected:
  absl::StatusOr<Requests> Read(const std::string& text) {
    EXPECT_TRUE(WriteFile(path_, {text}).ok());
    return ReadTrace(path_);
  }
  ~TraceTest() override { std::remove(path_.c_str()); }
  const std::string path_ = testing::TempDir() + "kvmill_trace_test.jsonl";
};

TEST_F(TraceTest, RequestsComeInFileOrderAndOtherFieldsAreIgnored) {
  const absl::StatusOr<Requests> requests =
      Read("{\"timestamp\": 0, \"hash_ids\": [0, 1, 18446744073709551615]}\n\n{\"hash_ids\": []}");
  ASSERT_TRUE(requests.ok()) << requests.status();
  EXPECT_EQ(*requests, (Requests{{0, 1, 18446744073709551615u}, {}}));
}

TEST_F(TraceTest, BadLinesAreNamed) {
  for (const char* bad : {"{", "[1]", "{\"hash_ids\": 1}", "{}", "{\"hash_ids\": [-1]}",
                          "{\"hash_ids\": [1.5]}", "{\"hash_ids\": [\"a\"]}"}) {
    const absl::Status status = Read(std::string("{\"hash_ids\": [1]}\n") + bad).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << bad;
    EXPECT_THAT(std::string(status.message()), testing::HasSubstr(":2: ")) << bad;
  }
}

TEST_F(TraceTest, AnEmptyFileHasNoRequests) { EXPECT_TRUE(Read("")->empty()); }

}  // namespace
}  // namespace kvmill::cli
