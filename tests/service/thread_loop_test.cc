#include "service/thread_loop.h"

#include <gmock/gmock.h>

#include <atomic>
#include <future>
#include <string>
#include <vector>

namespace kvmill {
namespace {

constexpr std::int64_t kMs = 1'000'000;

TEST(ThreadLoopTest, TasksRunInTheOrderOfTheCalls) {
  ThreadLoop loop(SystemClock());
  std::string order;
  for (const char c : {'a', 'b', 'c'}) loop.Post([&order, c] { order += c; });
  loop.Run([&order] { order += 'd'; });
  EXPECT_EQ(order, "abcd");
}

TEST(ThreadLoopTest, TimersRunByDeadlineAndThenByCall) {
  ThreadLoop loop(SystemClock());
  std::string order;
  std::promise<void> last;
  loop.Run([&] {
    const std::int64_t now = loop.clock().MonotonicNanos();
    loop.At(now + 40 * kMs, [&, now] {
      order += 'd';
      EXPECT_GE(loop.clock().MonotonicNanos(), now + 40 * kMs);
      last.set_value();
    });
    loop.At(now + 20 * kMs, [&order] { order += 'b'; });
    loop.At(now + 20 * kMs, [&order] { order += 'c'; });
    loop.At(now - 5, [&order] { order += 'a'; });
    EXPECT_EQ(order, "") << "not within the call";
  });
  last.get_future().wait();
  loop.Run([] {});
  EXPECT_EQ(order, "abcd");
}

TEST(ThreadLoopTest, CancelledTimersDoNotRunAndAreDestroyed) {
  ThreadLoop loop(SystemClock());
  const auto alive = std::make_shared<int>(0);
  std::string order;
  std::promise<void> last;
  loop.Run([&] {
    const std::int64_t now = loop.clock().MonotonicNanos();
    const Loop::TimerId first = loop.At(now + 5 * kMs, [&order, alive] { order += 'x'; });
    loop.Cancel(first);
    loop.Cancel(first);
    EXPECT_EQ(alive.use_count(), 1);
    // One that is due together with who cancels it.
    auto second = std::make_shared<Loop::TimerId>(0);
    loop.At(now + 10 * kMs, [&loop, &order, second] {
      order += 'a';
      loop.Cancel(*second);
    });
    *second = loop.At(now + 10 * kMs, [&order] { order += 'y'; });
    loop.At(now + 10 * kMs, [&order, &last] {
      order += 'b';
      last.set_value();
    });
  });
  last.get_future().wait();
  loop.Run([] {});
  EXPECT_EQ(order, "ab");
}

TEST(ThreadLoopTest, ATimerThatSetsItselfDoesNotKeepOthersOut) {
  ThreadLoop loop(SystemClock());
  std::atomic<bool> stop{false};
  std::atomic<int> runs{0};
  std::function<void()> again = [&] {
    ++runs;
    if (!stop) loop.After(0, again);
  };
  loop.Run([&] { loop.After(0, again); });
  for (int i = 0; i < 100; ++i) loop.Run([] {});
  EXPECT_GT(runs, 50);
  stop = true;
  loop.Stop();
}

TEST(ThreadLoopTest, WhatDidNotRunIsDestroyed) {
  const auto alive = std::make_shared<int>(0);
  std::atomic<int> ran{0};
  ThreadLoop loop(SystemClock());
  loop.Run([&] { loop.After(3'600'000 * kMs, [&ran, alive] { ++ran; }); });
  std::promise<void> inside;
  std::promise<void> go_on;
  loop.Post([&] {
    inside.set_value();
    go_on.get_future().wait();
  });
  inside.get_future().wait();
  std::thread stopper([&loop] { loop.Stop(); });
  // Posted until Stop says so; after that nothing is taken.
  loop.Post([&ran, alive] { ++ran; });
  go_on.set_value();
  stopper.join();
  loop.Post([&ran, alive] { ++ran; });
  EXPECT_EQ(alive.use_count(), 1);
  EXPECT_LE(ran, 1);
}

}  // namespace
}  // namespace kvmill
