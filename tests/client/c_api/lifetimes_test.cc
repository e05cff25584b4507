// Queues, threads, deaths, forks: what happens around the operations of client/kvmill.h.
#include <poll.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <set>
#include <thread>

#include "tests/client/c_api/c_daemon.h"

namespace kvmill::testing {
namespace {

using Lifetimes = CApiTest;

std::size_t Entries(const std::string& folder) {
  return static_cast<std::size_t>(std::distance(std::filesystem::directory_iterator(folder),
                                                std::filesystem::directory_iterator()));
}

bool Readable(int fd) {
  pollfd p{fd, POLLIN, 0};
  return poll(&p, 1, 0) == 1;
}

TEST_F(Lifetimes, TheDescriptorIsReadableExactlyWhileEventsAreThere) {
  const int fd = kvmill_queue_fd(queue_);
  EXPECT_FALSE(Readable(fd));
  auto event = Init<kvmill_event>();
  EXPECT_EQ(kvmill_queue_next(queue_, 0, &event), KVMILL_DEADLINE_EXCEEDED);
  EXPECT_EQ(kvmill_queue_next(queue_, 20, &event), KVMILL_DEADLINE_EXCEEDED);
  for (const std::uint64_t tag : {1u, 2u}) {
    ASSERT_EQ(kvmill_stat(client_, nullptr, queue_, tag), KVMILL_OK);
    pollfd p{fd, POLLIN, 0};
    ASSERT_EQ(poll(&p, 1, 60000), 1);
  }
  ASSERT_EQ(kvmill_queue_drain(queue_, -1), KVMILL_OK);
  EXPECT_EQ(kvmill_queue_running(queue_), 0u);
  for (int left : {1, 0}) {
    ASSERT_TRUE(Readable(fd));
    ASSERT_EQ(kvmill_queue_next(queue_, 0, &event), KVMILL_OK);
    kvmill_result_free(event.result);
    EXPECT_EQ(Readable(fd), left == 1);
  }
}

TEST_F(Lifetimes, ManyThreadsShareAClientAndAQueue) {
  constexpr int kThreads = 4, kCalls = 50;
  std::atomic<int> bad{0};
  std::vector<std::thread> threads;
  std::vector<std::vector<std::uint64_t>> taken(kThreads);
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < kCalls; ++i) {
        const auto tag = static_cast<std::uint64_t>(t * kCalls + i);
        bad += kvmill_stat(client_, nullptr, queue_, tag) != KVMILL_OK;
        auto event = Init<kvmill_event>();
        bad += kvmill_queue_next(queue_, 60000, &event) != KVMILL_OK || event.code != KVMILL_OK;
        taken[static_cast<std::size_t>(t)].push_back(event.tag);
        kvmill_result_free(event.result);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(bad, 0);
  std::set<std::uint64_t> tags;
  for (const auto& some : taken) tags.insert(some.begin(), some.end());
  EXPECT_EQ(tags.size(), std::size_t{kThreads * kCalls}) << "each tag comes once";
}

TEST_F(Lifetimes, ADaemonThatDiesGivesOneErrorForEachCall) {
  kvmill_namespace* const ns = Open("dies");
  const SmallBlock block(5);
  Put(ns, "key", block);
  const std::vector<kvmill_store_layer> layers = Inputs(block);
  const kvmill_store_block stored = Block("other", layers);
  SmallBlock out;
  const std::vector<kvmill_fetch_output> outputs = Outputs(&out);
  const std::string name = "key";
  const kvmill_key key = Key(name);
  StopDaemon();
  for (std::uint64_t tag = 0; tag < 40; tag += 4) {
    ASSERT_EQ(kvmill_stat(client_, nullptr, queue_, tag), KVMILL_OK);
    ASSERT_EQ(kvmill_store(client_, ns, &stored, 1, nullptr, nullptr, queue_, tag + 1), KVMILL_OK);
    ASSERT_EQ(
        kvmill_fetch(client_, ns, &key, 1, outputs.data(), 2, nullptr, nullptr, queue_, tag + 2),
        KVMILL_OK);
    ASSERT_EQ(kvmill_lookup(client_, ns, &key, 1, nullptr, 0, nullptr, queue_, tag + 3), KVMILL_OK);
  }
  EXPECT_EQ(kvmill_queue_running(queue_), 40u);
  EXPECT_EQ(kvmill_queue_destroy(queue_), KVMILL_FAILED_PRECONDITION);
  KillDaemon();
  std::set<std::uint64_t> tags;
  for (int i = 0; i < 40; ++i) {
    auto event = Init<kvmill_event>();
    ASSERT_EQ(kvmill_queue_next(queue_, 60000, &event), KVMILL_OK) << kvmill_last_error();
    EXPECT_EQ(event.code, KVMILL_UNAVAILABLE) << kvmill_result_message(event.result);
    EXPECT_STRNE(kvmill_result_message(event.result), "");
    tags.insert(event.tag);
    kvmill_result_free(event.result);
  }
  EXPECT_EQ(tags.size(), 40u);
  auto event = Init<kvmill_event>();
  EXPECT_EQ(kvmill_queue_next(queue_, 50, &event), KVMILL_DEADLINE_EXCEEDED) << "and no more";

  char before[65], after[65];
  kvmill_client_boot_id(client_, before, sizeof(before));
  StartDaemon();  // The client finds the new one.
  EXPECT_EQ(BlockOf(Put(ns, "other", block)).outcome, static_cast<uint32_t>(KVMILL_BLOCK_STORED));
  kvmill_client_boot_id(client_, after, sizeof(after));
  EXPECT_STRNE(before, after);
  kvmill_namespace_free(ns);
}

TEST_F(Lifetimes, DestroyingAClientEndsItsCallsAndKeepsTheirEvents) {
  kvmill_namespace* const ns = Open("destroyed");
  SmallBlock out;
  const std::vector<kvmill_fetch_output> outputs = Outputs(&out);
  const std::string name = "key";
  const kvmill_key key = Key(name);
  StopDaemon();
  kvmill_client* const second = Connect();
  for (std::uint64_t tag = 0; tag < 10; ++tag) {
    ASSERT_EQ(kvmill_fetch(second, ns, &key, 1, outputs.data(), 2, nullptr, nullptr, queue_, tag),
              KVMILL_OK);
  }
  kvmill_namespace_free(ns);  // While they run.
  ASSERT_EQ(kvmill_client_destroy(second), KVMILL_OK);
  EXPECT_EQ(kvmill_queue_running(queue_), 0u);
  for (int i = 0; i < 5; ++i) {  // The others go with the queue.
    auto event = Init<kvmill_event>();
    ASSERT_EQ(kvmill_queue_next(queue_, 0, &event), KVMILL_OK);
    EXPECT_EQ(event.code, KVMILL_CANCELLED);
    kvmill_result_free(event.result);
  }
  ContinueDaemon();
}

TEST_F(Lifetimes, DeadlinesEndCalls) {
  StopDaemon();
  auto call = Init<kvmill_call_options>();
  call.timeout_ms = 50;
  EXPECT_EQ(Finish(kvmill_stat(client_, &call, queue_, 1)).event.code, KVMILL_DEADLINE_EXCEEDED);
  ContinueDaemon();
}

TEST_F(Lifetimes, AChildOfForkIsToldSoAndTheParentGoesOn) {
  EXPECT_EQ(Finish(kvmill_stat(client_, nullptr, queue_, 1)).event.code, KVMILL_OK);
  const pid_t child = fork();
  if (child == 0) {
    int bad = 0;
    auto event = Init<kvmill_event>();
    char boot_id[65];
    bad += kvmill_stat(client_, nullptr, queue_, 2) != KVMILL_FAILED_PRECONDITION;
    bad += std::string(kvmill_last_error()).find("fork") == std::string::npos;
    auto options = Init<kvmill_client_options>();
    options.address = "127.0.0.1:1";
    kvmill_client* other = nullptr;
    bad += kvmill_client_create(&options, &other) != KVMILL_FAILED_PRECONDITION;
    bad += kvmill_queue_next(queue_, -1, &event) != KVMILL_FAILED_PRECONDITION;
    bad += kvmill_queue_drain(queue_, -1) != KVMILL_FAILED_PRECONDITION;
    bad += kvmill_client_boot_id(client_, boot_id, 65) != KVMILL_FAILED_PRECONDITION;
    bad += kvmill_client_destroy(client_) != KVMILL_OK;
    bad += kvmill_queue_destroy(queue_) != KVMILL_OK;
    _exit(bad);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
  EXPECT_EQ(Finish(kvmill_stat(client_, nullptr, queue_, 3)).event.code, KVMILL_OK);
}

TEST_F(Lifetimes, ManyClientsAndQueuesLeaveNothingBehind) {
  const auto cycle = [&](int i) {
    kvmill_client* const client = Connect();
    kvmill_queue* queue = nullptr;
    ASSERT_EQ(kvmill_queue_create(&queue), KVMILL_OK);
    if (i % 4 == 0) {
      ASSERT_EQ(kvmill_stat(client, nullptr, queue, 1), KVMILL_OK);
      ASSERT_EQ(kvmill_queue_drain(queue, 60000), KVMILL_OK);
    }
    ASSERT_EQ(kvmill_client_destroy(client), KVMILL_OK);
    ASSERT_EQ(kvmill_queue_destroy(queue), KVMILL_OK);
  };
  for (int i = 0; i < 8; ++i) cycle(i);  // gRPC keeps what it made for the first.
  const std::size_t descriptors = Entries("/proc/self/fd");
  for (int i = 0; i < 300; ++i) cycle(i);
  // gRPC closes a connection soon after its channel went.
  for (int i = 0; i < 3000 && Entries("/proc/self/fd") > descriptors; ++i) usleep(10000);
  EXPECT_LE(Entries("/proc/self/fd"), descriptors);
  EXPECT_LE(Entries("/proc/self/task"), 64u);
}

}  // namespace
}  // namespace kvmill::testing
