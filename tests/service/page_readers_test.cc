// Cancellation of stores of pages: what reads, what must not, and when the answer comes.
#include "service/page_readers.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <optional>
#include <random>
#include <thread>

#include "absl/status/status.h"

namespace kvmill {
namespace {

using ::testing::HasSubstr;

class PageReadersTest : public testing::Test {
 protected:
  PageReaders::StorePtr Begin(std::uint64_t number, const std::string& session = "s",
                              std::uint64_t registration = 1) {
    auto store = readers_.Begin("tenant", session, number, registration);
    EXPECT_TRUE(store.ok()) << store.status();
    return *std::move(store);
  }
  // Remembers the answer.
  PageReaders::Answer Into(std::optional<std::uint64_t>* answer) {
    return [answer](std::uint64_t stores) {
      EXPECT_FALSE(answer->has_value()) << "answered twice";
      *answer = stores;
    };
  }

  PageReaders readers_;
};

TEST_F(PageReadersTest, TheAnswerComesWhenTheLastReadEnds) {
  const auto one = Begin(1);
  const auto two = Begin(2);
  ASSERT_TRUE(one->BeginRead().ok());
  ASSERT_TRUE(one->BeginRead().ok());
  ASSERT_TRUE(two->BeginRead().ok());
  std::optional<std::uint64_t> of_one;
  std::optional<std::uint64_t> of_both;
  readers_.Cancel("tenant", "s", {1}, Into(&of_one));
  readers_.Cancel("tenant", "s", {1, 2, 99}, Into(&of_both));
  EXPECT_FALSE(one->BeginRead().ok()) << "cancelled";
  EXPECT_FALSE(two->BeginRead().ok());
  one->EndRead();
  EXPECT_FALSE(of_one.has_value());
  one->EndRead();
  EXPECT_EQ(of_one, 1u);
  EXPECT_FALSE(of_both.has_value());
  two->EndRead();
  EXPECT_EQ(of_both, 2u);
}

TEST_F(PageReadersTest, WhatRestsIsAnsweredAtOnceAndStaysCancelled) {
  const auto store = Begin(1);
  const auto other = Begin(2);
  ASSERT_TRUE(store->BeginRead().ok());
  store->EndRead();
  std::optional<std::uint64_t> answer;
  readers_.Cancel("tenant", "s", {1}, Into(&answer));
  EXPECT_EQ(answer, 1u);
  EXPECT_FALSE(store->BeginRead().ok());
  EXPECT_TRUE(other->BeginRead().ok());
  other->EndRead();
  std::optional<std::uint64_t> unknown;
  readers_.Cancel("tenant", "s", {7}, Into(&unknown));
  EXPECT_EQ(unknown, 0u);
}

TEST_F(PageReadersTest, StoresBelongToTenantSessionAndRegistration) {
  const auto store = Begin(1, "s", 5);
  std::optional<std::uint64_t> answer;
  readers_.Cancel("other", "s", {1}, Into(&answer));
  EXPECT_EQ(answer, 0u);
  answer.reset();
  readers_.Cancel("tenant", "t", {1}, Into(&answer));
  EXPECT_EQ(answer, 0u);
  readers_.CancelSession("r");
  readers_.CancelSession("t");
  answer.reset();
  readers_.CancelRegistration(4, Into(&answer));
  EXPECT_EQ(answer, 0u);
  ASSERT_TRUE(store->BeginRead().ok()) << "none of these was it";
  answer.reset();
  readers_.CancelRegistration(5, Into(&answer));
  EXPECT_FALSE(answer.has_value());
  store->EndRead();
  EXPECT_EQ(answer, 1u);
  EXPECT_EQ(store->BeginRead().code(), absl::StatusCode::kCancelled);
  const auto again = Begin(2, "s", 6);
  readers_.CancelSession("s");
  EXPECT_EQ(again->BeginRead().code(), absl::StatusCode::kAborted);
  EXPECT_EQ(store->BeginRead().code(), absl::StatusCode::kCancelled) << "the first reason stays";
}

// The session is gone, but not its read: whoever knows its id hears when it ends.
TEST_F(PageReadersTest, AStoreOutlivesItsSession) {
  auto store = Begin(1);
  ASSERT_TRUE(store->BeginRead().ok());
  readers_.CancelSession("s");
  std::optional<std::uint64_t> answer;
  readers_.Cancel("tenant", "s", {1}, Into(&answer));
  EXPECT_FALSE(answer.has_value());
  store->EndRead();
  EXPECT_EQ(answer, 1u);
  EXPECT_EQ(readers_.stores(), 1u);
  store.reset();
  EXPECT_EQ(readers_.stores(), 0u);
  answer.reset();
  readers_.Cancel("tenant", "s", {1}, Into(&answer));
  EXPECT_EQ(answer, 0u);
}

TEST_F(PageReadersTest, ANumberIsUsedOnceAtATime) {
  auto store = Begin(1);
  const absl::Status twice = readers_.Begin("tenant", "s", 1, 1).status();
  EXPECT_EQ(twice.code(), absl::StatusCode::kAlreadyExists);
  EXPECT_THAT(std::string(twice.message()), HasSubstr("store 1"));
  EXPECT_EQ(readers_.stores(), 1u) << "the refused one took nothing along";
  store.reset();
  const auto next = Begin(1);
  EXPECT_TRUE(next->BeginRead().ok()) << "it is not cancelled";
  next->EndRead();
}

// Threads read pages that a canceller overwrites as soon as it has its answer.
TEST_F(PageReadersTest, NobodyReadsAfterTheAnswer) {
  for (std::uint64_t round = 1; round <= 200; ++round) {
    const auto store = Begin(round);
    std::atomic<bool> free{false};
    std::atomic<int> wrong{0};
    std::atomic<int> reads{0};
    std::vector<std::thread> threads;
    for (int t = 0; t < 3; ++t) {
      threads.emplace_back([&] {
        while (store->BeginRead().ok()) {
          if (free.load()) ++wrong;
          ++reads;
          std::this_thread::yield();
          if (free.load()) ++wrong;
          store->EndRead();
        }
      });
    }
    while (reads < 3) std::this_thread::yield();
    readers_.Cancel("tenant", "s", {round}, [&](std::uint64_t) { free = true; });
    for (std::thread& thread : threads) thread.join();
    EXPECT_TRUE(free);
    EXPECT_EQ(wrong, 0);
  }
}

}  // namespace
}  // namespace kvmill
