// With the fake, every test ends with nothing done wrong and nothing left behind.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/storage/device/fake_cuda.h"

namespace kvmill {
namespace {

class NoProblems : public testing::EmptyTestEventListener {
 public:
  void OnTestStart(const testing::TestInfo&) override { fake_cuda::Boot({}); }
  void OnTestEnd(const testing::TestInfo&) override {
    EXPECT_THAT(fake_cuda::Leaks(), testing::IsEmpty());
    EXPECT_THAT(fake_cuda::Problems(), testing::IsEmpty());
  }
};

[[maybe_unused]] const bool listening = [] {
  testing::UnitTest::GetInstance()->listeners().Append(new NoProblems);  // GoogleTest owns it.
  return true;
}();

}  // namespace
}  // namespace kvmill
