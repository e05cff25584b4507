// A disk that fails again and again while the store tries to go on, each time at another point: no
// call may hang, and with room everything goes on without opening the store anew.
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "storage/disk_keys.h"
#include "storage/rocks_blocks.h"
#include "storage/rocks_database.h"
#include "tests/storage/disk_store_fixture.h"

namespace kvmill {
namespace {

// Only for what hangs: a busy machine is slow.
constexpr unsigned kHangSeconds = 150;

struct Blocks {
  const char* name;
  int per_flush;
  std::size_t pages;
  std::size_t page_bytes;
  int failing_flushes;  // Flushes with a limit go on until so many failed,
  int flushes_max;      // at most so many,
  bool must_fail;       // and all of them.
};

// The first fill blob files, the second tables, and the last the manifest, line by line.
constexpr Blocks kLarge{.name = "large blocks",
                        .per_flush = 4,
                        .pages = 4,
                        .page_bytes = 14 * 1024,
                        .failing_flushes = 2,
                        .flushes_max = 2,
                        .must_fail = true};
constexpr Blocks kSmall{.name = "small blocks",
                        .per_flush = 40,
                        .pages = 1,
                        .page_bytes = 16,
                        .failing_flushes = 2,
                        .flushes_max = 2,
                        .must_fail = false};
constexpr Blocks kSingle{.name = "single blocks",
                         .per_flush = 1,
                         .pages = 1,
                         .page_bytes = 16,
                         .failing_flushes = 2,
                         .flushes_max = 100,
                         .must_fail = false};

// In a process of its own, as the limit is one of processes.
class Child {
 public:
  Child(const RocksDiskStoreOptions& options, rlim_t limit, const Blocks& blocks)
      : options_(options), limit_(limit), blocks_(blocks) {}

  // What is wrong, or "".
  std::string Run() {
    if (!Open()) return problem_;
    if (!WriteSome() || !Flush().ok()) return "first flush";
    rlimit before{};
    getrlimit(RLIMIT_FSIZE, &before);
    rlimit limited = before;
    limited.rlim_cur = limit_;
    setrlimit(RLIMIT_FSIZE, &limited);
    int failed = 0;
    for (int i = 0; i < blocks_.flushes_max && failed < blocks_.failing_flushes; ++i) {
      WriteSome();
      const absl::Status status = Flush();
      if (status.ok()) continue;
      ++failed;
      if (!absl::IsResourceExhausted(status)) return absl::StrCat("with a limit: ", Text(status));
    }
    setrlimit(RLIMIT_FSIZE, &before);
    if (blocks_.must_fail && failed < blocks_.failing_flushes) return "a flush did not fail";
    if (failed > 0 && store_->stats().failed_flushes == 0) return "no failure was counted";

    absl::Status status = Flush();
    for (int i = 0; i < 20 && !status.ok(); ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(250));
      status = Flush();
    }
    if (!status.ok()) return absl::StrCat("with room again: ", Text(status));
    const std::uint64_t failures = store_->stats().failed_flushes;
    for (int i = 0; i < 3; ++i) {
      if (!WriteSome()) return "write after it";
      status = Flush();
      if (!status.ok()) return absl::StrCat("flush after it: ", Text(status));
    }
    if (store_->stats().failed_flushes != failures) return "a failure more was counted";
    if (!AllThere()) return problem_;
    store_.reset();
    if (!Open() || !AllThere()) return absl::StrCat("opened again: ", problem_);
    return "";
  }

 private:
  static std::string Text(const absl::Status& status) { return status.ToString(); }

  bool Open() {
    auto opened = RocksDiskStore::Open(options_);
    if (opened.ok()) {
      store_ = *std::move(opened);
    } else {
      problem_ = Text(opened.status());
    }
    return opened.ok();
  }

  TestBlock Block(std::uint64_t number) const {
    return MakeBlock(number, blocks_.pages, blocks_.page_bytes);
  }

  // Whether all were.
  bool WriteSome() {
    bool all = true;
    for (int i = 0; i < blocks_.per_flush; ++i, ++next_) {
      if (WriteBlock(*store_, Block(next_)).ok()) {
        written_.insert(next_);
      } else {
        all = false;
      }
    }
    return all;
  }

  absl::Status Flush() {
    const std::set<std::uint64_t> written = written_;
    absl::Status status = store_->Flush();
    if (status.ok()) durable_ = written;
    return status;
  }

  bool AllThere() {
    for (const std::uint64_t number : durable_) {
      const TestBlock block = Block(number);
      const auto pages = ReadBlock(*store_, block.meta.id);
      if (!pages.ok() || *pages != block.pages) {
        problem_ = absl::StrCat("block ", number, ": ", Text(pages.status()));
        return false;
      }
    }
    return true;
  }

  const RocksDiskStoreOptions options_;
  const rlim_t limit_;
  const Blocks blocks_;
  std::unique_ptr<RocksDiskStore> store_;
  std::uint64_t next_ = 0;
  std::set<std::uint64_t> written_;
  std::set<std::uint64_t> durable_;
  std::string problem_;
};

using RocksDiskStoreResumeTest = DiskStoreTest;

TEST_P(RocksDiskStoreResumeTest, NothingHangsAndAllGoesOnWithRoom) {
  options_.memtable_bytes = 256 << 10;
  options_.write_wait_ms = 2000;
  struct Case {
    rlim_t limit;
    const Blocks* blocks;
    pid_t pid;
  };
  std::vector<Case> cases;
  for (const rlim_t limit : {512, 4096, 4600, 8192, 16384}) {
    for (const Blocks* blocks : {&kLarge, &kSmall}) cases.push_back({limit, blocks, -1});
  }
  for (const rlim_t limit : {6144, 8192}) cases.push_back({limit, &kSingle, -1});

  // All at once: they wait more than they work.
  for (Case& one : cases) {
    options_.directory = temp_.Sub(
        absl::StrCat("disk-", one.limit, "-", one.blocks->pages, "-", one.blocks->per_flush));
    one.pid = fork();
    ASSERT_GE(one.pid, 0);
    if (one.pid > 0) continue;
    signal(SIGXFSZ, SIG_IGN);
    alarm(kHangSeconds);
    const std::string problem = Child(options_, one.limit, *one.blocks).Run();
    if (!problem.empty()) {
      static_cast<void>(fprintf(stderr, "%s, %llu bytes: %s\n", one.blocks->name,
                                static_cast<unsigned long long>(one.limit), problem.c_str()));
    }
    _exit(problem.empty() ? 0 : 1);
  }
  for (const Case& one : cases) {
    int status = 0;
    ASSERT_EQ(waitpid(one.pid, &status, 0), one.pid);
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0)
        << one.blocks->name << ", at most " << one.limit
        << " bytes a file: " << (WIFSIGNALED(status) ? strsignal(WTERMSIG(status)) : "see above");
  }
}

// RocksDB forgets such a failure until the next flush, whose memtables it then never flushes.
TEST_P(RocksDiskStoreResumeTest, AnEpochThatCouldNotBeginLosesNoFlush) {
  ASSERT_TRUE(std::filesystem::create_directory(options_.directory));
  auto opened = RocksDatabase::Open(options_, 256 << 10, /*direct_io=*/true);
  ASSERT_TRUE(opened.ok()) << opened.status();
  const std::unique_ptr<RocksDatabase> database = *std::move(opened);
  const absl::StatusOr<ColumnFamily> epoch = database->CreateEpoch(1);
  ASSERT_TRUE(epoch.ok()) << epoch.status();
  std::uint64_t next = 1;
  const auto put = [&] {
    TestBlock block = MakeBlock(next, 2, 1000);
    block.meta.epoch = 1;
    return PutBlock(*database, *epoch, EncodeMetaKey(block.meta.id), block.meta, next++,
                    block.views());
  };
  ASSERT_EQ(put(), absl::OkStatus());

  signal(SIGXFSZ, SIG_IGN);
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
  rlimit limited = before;
  limited.rlim_cur = 1;  // No file grows.
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &limited), 0);
  const absl::Status refused = database->CreateEpoch(2).status();
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &before), 0);
  EXPECT_TRUE(absl::IsResourceExhausted(refused)) << refused;
  EXPECT_EQ(database->failed_flushes(), 1u);

  EXPECT_EQ(database->Flush({*epoch}), absl::OkStatus());
  EXPECT_EQ(put(), absl::OkStatus());
  EXPECT_EQ(database->Flush({*epoch}), absl::OkStatus());
  EXPECT_EQ(database->CreateEpoch(2).status(), absl::OkStatus());
  EXPECT_EQ(database->failed_flushes(), 1u);
}

INSTANTIATE_TEST_SUITE_P(Files, RocksDiskStoreResumeTest, ::testing::Bool(), EncryptionName);

}  // namespace
}  // namespace kvmill
