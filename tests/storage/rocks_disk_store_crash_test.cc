// Durability under kill -9. A child process opens the store, writes, removes and flushes, and says
// on a pipe what was acknowledged; the parent kills it at a random moment, opens the store and
// checks: every acknowledged block is right, every acknowledged removal holds, and whatever else is
// there is right. The directory lives on from round to round, so every round also recovers from the
// one before. `--rounds N` runs longer, `--seed N` repeats a run.
#include <fcntl.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <set>
#include <string>
#include <tuple>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "tests/long_form.h"
#include "tests/storage/disk_store_fixture.h"

namespace kvmill {
namespace {

int rounds = ShortOrLong(20, 100);  // Each checks all blocks so far.
std::uint64_t seed = 1;

constexpr std::size_t kPageBytes = 14 * 1024;

// Sizes follow from the number, so that rounds need not agree on them.
TestBlock BlockOf(std::uint64_t number) { return MakeBlock(number, 1 + number % 5, kPageBytes); }

// Whether the writer removes it, three blocks later.
bool IsRemoved(std::uint64_t number) { return number % 10 == 6; }

RocksDiskStoreOptions OptionsOf(const std::string& directory, std::uint64_t capacity_bytes,
                                bool encrypted) {
  RocksDiskStoreOptions options;
  options.directory = directory;
  options.capacity_bytes = capacity_bytes;
  options.memtable_bytes = 1 << 20;
  if (encrypted) options.keys = TestKeys({1});
  return options;
}

// The child: never returns but by an error. Lines: "A n" all blocks below n were written and
// flushed; "R n" block n was removed and that was flushed.
int RunWriter(const std::string& directory, std::uint64_t first, std::uint64_t capacity_bytes,
              bool encrypted, std::uint64_t writer_seed) {
  auto store = RocksDiskStore::Open(OptionsOf(directory, capacity_bytes, encrypted));
  if (!store.ok()) {
    std::fprintf(stderr, "writer: %s\n", store.status().ToString().c_str());
    return 1;
  }
  std::mt19937_64 random(writer_seed);
  for (std::uint64_t number = first;; ++number) {
    absl::Status status = WriteBlock(**store, BlockOf(number));
    std::string said;
    if (status.ok() && random() % 4 == 0) {
      status = (*store)->Flush();
      said = absl::StrCat("A ", number + 1, "\n");
    }
    if (status.ok() && number >= 3 && IsRemoved(number - 3)) {
      status = (*store)->Remove({TestId(number - 3)});
      if (status.ok()) status = (*store)->Flush();
      absl::StrAppend(&said, "A ", number + 1, "\nR ", number - 3, "\n");
    }
    if (!status.ok()) {
      std::fprintf(stderr, "writer: %s\n", status.ToString().c_str());
      return 1;
    }
    if (write(STDOUT_FILENO, said.data(), said.size()) != static_cast<ssize_t>(said.size())) {
      return 1;
    }
  }
}

// Capacity, and whether files are encrypted.
class DiskCrashTest : public ::testing::TestWithParam<std::tuple<std::uint64_t, bool>> {
 protected:
  static std::uint64_t capacity_bytes() { return std::get<0>(GetParam()); }
  static bool encrypted() { return std::get<1>(GetParam()); }

  // Starts a writer, kills it `delay_us` after its first word, and notes what it acknowledged.
  void WriteAndKill(std::uint64_t first, std::uint64_t delay_us) {
    int fds[2];
    ASSERT_EQ(pipe2(fds, O_CLOEXEC), 0);
    const std::string args[] = {"--writer",
                                temp_.Sub("disk"),
                                absl::StrCat(first),
                                absl::StrCat(capacity_bytes()),
                                absl::StrCat(encrypted() ? 1 : 0),
                                absl::StrCat(seed + first)};
    const pid_t child = fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      dup2(fds[1], STDOUT_FILENO);
      execl("/proc/self/exe", "writer", args[0].c_str(), args[1].c_str(), args[2].c_str(),
            args[3].c_str(), args[4].c_str(), args[5].c_str(), static_cast<char*>(nullptr));
      _exit(127);
    }
    close(fds[1]);
    std::string said;
    char buffer[4096];
    ssize_t bytes = read(fds[0], buffer, sizeof(buffer));
    usleep(static_cast<useconds_t>(delay_us));
    kill(child, SIGKILL);
    for (; bytes > 0; bytes = read(fds[0], buffer, sizeof(buffer))) {
      said.append(buffer, static_cast<std::size_t>(bytes));
    }
    close(fds[0]);
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    ASSERT_TRUE(WIFSIGNALED(status)) << "writer ended by itself, status " << status;
    ASSERT_FALSE(said.empty());
    for (std::size_t at = 0; at < said.size();) {
      const std::size_t end = said.find('\n', at);
      ASSERT_NE(end, std::string::npos);  // Lines are shorter than PIPE_BUF: written whole.
      const std::uint64_t number = std::strtoull(said.c_str() + at + 2, nullptr, 10);
      if (said[at] == 'A') {
        acknowledged_ = number;
      } else {
        removed_.insert(number);
      }
      at = end + 1;
    }
  }

  TempDirectory temp_;
  std::uint64_t acknowledged_ = 0;   // Every block below, of all rounds since `first_`, is durable.
  std::set<std::uint64_t> removed_;  // Acknowledged removals of all rounds.
};

TEST_P(DiskCrashTest, WhatWasAcknowledgedSurvivesKillNine) {
  std::mt19937_64 random(seed);
  std::printf("seed %llu\n", static_cast<unsigned long long>(seed));
  const bool churns = capacity_bytes() == kDiskCapacityBytesMin;
  std::uint64_t first = 0;
  std::set<std::uint64_t> durable;
  for (int round = 0; round < (churns ? (rounds + 1) / 2 : rounds); ++round) {
    acknowledged_ = first;
    ASSERT_NO_FATAL_FAILURE(WriteAndKill(first, random() % 150'000));
    for (std::uint64_t number = first; number < acknowledged_; ++number) {
      if (!IsRemoved(number)) durable.insert(number);
    }

    auto store = RocksDiskStore::Open(OptionsOf(temp_.Sub("disk"), capacity_bytes(), encrypted()));
    ASSERT_TRUE(store.ok()) << store.status();
    std::set<std::uint64_t> found;
    ASSERT_TRUE((*store)
                    ->Scan([&](const DiskBlockMeta& meta) {
                      std::uint64_t number = 0;
                      EXPECT_TRUE(absl::SimpleAtoi(meta.id.key.view().substr(6), &number));
                      EXPECT_EQ(meta.id, TestId(number));
                      EXPECT_TRUE(found.insert(number).second);
                      return true;
                    })
                    .ok());
    for (const std::uint64_t number : found) {
      const auto pages = ReadBlock(**store, TestId(number));
      // The store's evictor may have dropped it since the scan.
      if (churns && absl::IsNotFound(pages.status())) continue;
      ASSERT_TRUE(pages.ok()) << "round " << round << ", block " << number << ": "
                              << pages.status();
      ASSERT_EQ(*pages, BlockOf(number).pages) << "round " << round << ", block " << number;
      first = std::max(first, number + 1);
    }
    first = std::max(first, acknowledged_);
    for (const std::uint64_t number : removed_) {
      ASSERT_FALSE(found.contains(number)) << "round " << round << ", removed block " << number;
    }
    for (const std::uint64_t number : durable) {
      // What the cap may have dropped is excused: all but the last quarter of it.
      if (churns && number + capacity_bytes() / 4 / (5 * kPageBytes) < acknowledged_) continue;
      ASSERT_TRUE(found.contains(number)) << "round " << round << ", durable block " << number;
    }
  }
  EXPECT_GT(acknowledged_, static_cast<std::uint64_t>(rounds) / 2);
}

INSTANTIATE_TEST_SUITE_P(Capacity, DiskCrashTest,
                         ::testing::Combine(::testing::Values(std::uint64_t{4} << 30,
                                                              kDiskCapacityBytesMin),
                                            ::testing::Bool()),
                         [](const auto& param_info) {
                           return absl::StrCat(
                               std::get<0>(param_info.param) == kDiskCapacityBytesMin ? "Churn"
                                                                                      : "Roomy",
                               std::get<1>(param_info.param) ? "Encrypted" : "");
                         });

}  // namespace
}  // namespace kvmill

int main(int argc, char** argv) {
  if (argc == 7 && std::strcmp(argv[1], "--writer") == 0) {
    const auto number = [&](int index) { return std::strtoull(argv[index], nullptr, 10); };
    return kvmill::RunWriter(argv[2], number(3), number(4), number(5) != 0, number(6));
  }
  ::testing::InitGoogleTest(&argc, argv);
  for (int i = 1; i + 1 < argc; i += 2) {
    if (std::strcmp(argv[i], "--rounds") == 0) kvmill::rounds = std::atoi(argv[i + 1]);
    if (std::strcmp(argv[i], "--seed") == 0) {
      kvmill::seed = std::strtoull(argv[i + 1], nullptr, 10);
    }
  }
  return RUN_ALL_TESTS();
}
