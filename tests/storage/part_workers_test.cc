#include "storage/part_workers.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cstddef>
#include <thread>
#include <vector>

namespace kvmill {
namespace {

TEST(PartWorkersTest, EveryPartIsDoneOnceBeforeRunReturns) {
  for (const std::size_t thread_count : {0u, 1u, 3u}) {
    PartWorkers workers(thread_count);
    for (std::size_t part_count = 0; part_count < 20; ++part_count) {
      std::vector<std::atomic<int>> calls(part_count);
      workers.Run(part_count, [&](std::size_t part) { ++calls[part]; });
      for (std::size_t part = 0; part < part_count; ++part) {
        EXPECT_EQ(calls[part], 1) << thread_count << " threads, part " << part;
      }
    }
  }
}

// Two parts that wait for each other end only when two threads work on them.
TEST(PartWorkersTest, AnIdleWorkerHelps) {
  PartWorkers workers(1);
  std::atomic<int> arrived{0};
  workers.Run(2, [&](std::size_t) {
    ++arrived;
    while (arrived < 2) std::this_thread::yield();
  });
  EXPECT_EQ(arrived, 2);
}

TEST(PartWorkersTest, ACallerDoesNotWaitForABusyWorker) {
  PartWorkers workers(1);
  std::atomic<int> inside{0};
  std::atomic<bool> release{false};
  std::thread holder([&] {  // Holds itself and the only worker.
    workers.Run(2, [&](std::size_t) {
      ++inside;
      while (!release) std::this_thread::yield();
    });
  });
  while (inside < 2) std::this_thread::yield();
  std::size_t parts = 0;
  workers.Run(5, [&](std::size_t) { ++parts; });  // One thread only: no race.
  EXPECT_EQ(parts, 5u);
  release = true;
  holder.join();
}

TEST(PartWorkersTest, ManyCallersShareTheWorkers) {
  PartWorkers workers(2);
  std::vector<std::thread> callers;
  std::atomic<std::size_t> total{0};
  for (std::size_t t = 0; t < 4; ++t) {
    callers.emplace_back([&] {
      for (std::size_t i = 0; i < 500; ++i) {
        std::atomic<std::size_t> mine{0};
        workers.Run(i % 7, [&](std::size_t) { ++mine; });
        EXPECT_EQ(mine, i % 7);
        total += mine;
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(total, 4 * (500 / 7 * 21 + 0 + 1 + 2));
}

}  // namespace
}  // namespace kvmill
