// What the disk does to the store: flipped bytes, cut and missing files, no space, epochs that are
// gone. Nothing of it may crash, and no wrong byte may pass VerifyPage.
#include <fcntl.h>
#include <signal.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "storage/rocks_blocks.h"
#include "storage/rocks_database.h"
#include "tests/long_form.h"
#include "tests/storage/disk_store_fixture.h"

namespace kvmill {
namespace {

constexpr std::size_t kPageBytes = 14 * 1024;

class RocksDiskStoreFaultTest : public DiskStoreTest {
 protected:
  std::vector<std::string> BlobFiles() const {
    std::vector<std::string> files;
    for (const auto& entry : std::filesystem::directory_iterator(options_.directory)) {
      if (entry.path().extension() == ".blob") files.push_back(entry.path().string());
    }
    return files;
  }

  static void FlipByte(const std::string& path, off_t offset) {
    const int fd = open(path.c_str(), O_RDWR | O_CLOEXEC);
    ASSERT_GE(fd, 0);
    char byte = 0;
    ASSERT_EQ(pread(fd, &byte, 1, offset), 1);
    byte = static_cast<char>(byte ^ 0x40);
    ASSERT_EQ(pwrite(fd, &byte, 1, offset), 1);
    close(fd);
  }

  // Writes and flushes blocks until that fails, at most `blocks_max`; returns the failure.
  absl::Status Fill(std::uint64_t first, std::uint64_t blocks_max) {
    for (std::uint64_t i = first; i < first + blocks_max; ++i) {
      absl::Status status = Put(MakeBlock(i, 4, kPageBytes));
      if (status.ok() && i % 8 == 7) status = store_->Flush();
      if (!status.ok()) return status;
      ++filled_;
    }
    return absl::OkStatus();
  }

  // After the disk filled up during Fill(0, ..) and got room again.
  void ExpectRecovered() {
    // Each waits for it for write_wait_ms, in which a busy machine may not have found out.
    const auto soon = [](const std::function<absl::Status()>& call) {
      absl::Status status = call();
      for (int i = 0; i < 10 && !status.ok(); ++i) status = call();
      return status;
    };
    EXPECT_EQ(soon([&] { return store_->Flush(); }), absl::OkStatus());
    for (std::uint64_t i = 0; i < filled_; ++i) {
      EXPECT_EQ(Get(MakeBlock(i, 4, kPageBytes)), "right") << i;
    }
    const TestBlock later = MakeBlock(1'000'000, 4, kPageBytes);
    EXPECT_EQ(soon([&] { return Put(later); }), absl::OkStatus());
    EXPECT_TRUE(store_->Flush().ok());
    Reopen();
    EXPECT_EQ(Get(later), "right");
    for (std::uint64_t i = 0; i < filled_; ++i) {
      EXPECT_EQ(Get(MakeBlock(i, 4, kPageBytes)), "right") << i;
    }
  }

  std::uint64_t filled_ = 0;
};

TEST_P(RocksDiskStoreFaultTest, NoFlippedByteOfABlobFilePassesForThePage) {
  PageIdentity identity;
  const TestBlock block = RealBlock(&identity);
  Open();
  ASSERT_TRUE(Put(block).ok());
  Close();
  const std::vector<std::string> files = BlobFiles();
  ASSERT_EQ(files.size(), 1u);
  const auto file_bytes = static_cast<off_t>(std::filesystem::file_size(files[0]));
  int detected = 0;
  int harmless = 0;
  // Every byte of the file's own header and footer and of the page's header; samples of the rest.
  for (off_t offset = 0; offset < file_bytes;
       offset += offset < 512 || offset >= file_bytes - 40 ? 40 : ShortOrLong<off_t>(9973, 499)) {
    ASSERT_NO_FATAL_FAILURE(FlipByte(files[0], offset));
    Open();
    ASSERT_NE(store_, nullptr) << offset;
    const auto pages = ReadBlock(*store_, block.meta.id);
    if (!pages.ok()) {
      EXPECT_FALSE(absl::IsNotFound(pages.status())) << offset << " " << pages.status();
      ++detected;
    } else if (!VerifyPage(identity, (*pages)[0]).ok()) {
      ++detected;
    } else {
      EXPECT_EQ(*pages, block.pages) << offset;
      ++harmless;
    }
    Close();
    ASSERT_NO_FATAL_FAILURE(FlipByte(files[0], offset));
  }
  EXPECT_GT(detected, 15);
  EXPECT_LT(harmless, detected);
  Open();
  EXPECT_EQ(Get(block), "right");
}

TEST_P(RocksDiskStoreFaultTest, ACutBlobFileIsAnErrorForItsBlocksOnly) {
  Open();
  const TestBlock first = MakeBlock(1, 4, kPageBytes);
  ASSERT_TRUE(Put(first).ok());
  ASSERT_TRUE(store_->Flush().ok());
  const std::vector<std::string> files = BlobFiles();
  ASSERT_EQ(files.size(), 1u);
  const TestBlock second = MakeBlock(2, 4, kPageBytes);
  ASSERT_TRUE(Put(second).ok());
  Close();
  for (const std::uintmax_t left :
       {std::uintmax_t{3 * kPageBytes}, std::uintmax_t{10}, std::uintmax_t{0}}) {
    std::filesystem::resize_file(files[0], left);
    Open();
    ASSERT_NE(store_, nullptr) << left;
    const absl::Status status = ReadBlock(*store_, first.meta.id).status();
    EXPECT_TRUE(absl::IsDataLoss(status)) << left << " " << status;
    EXPECT_EQ(Get(second), "right") << left;
    Close();
  }
  // The damaged block can be removed and written again.
  Open();
  ASSERT_TRUE(store_->Remove({first.meta.id}).ok());
  ASSERT_TRUE(Put(first).ok());
  Reopen();
  EXPECT_EQ(Get(first), "right");
}

TEST_P(RocksDiskStoreFaultTest, ADamagedIndexIsRefusedInOneLineThatSaysWhatToDo) {
  Open();
  ASSERT_TRUE(Put(MakeBlock(1, 4, kPageBytes)).ok());
  Close();
  for (const auto& file : std::filesystem::directory_iterator(options_.directory)) {
    if (file.path().extension() == ".sst") std::filesystem::remove(file.path());
  }
  const absl::Status status = RocksDiskStore::Open(options_).status();
  EXPECT_TRUE(absl::IsDataLoss(status)) << status;
  EXPECT_EQ(status.message().find('\n'), absl::string_view::npos) << status;
  EXPECT_NE(status.message().find("move the directory away"), absl::string_view::npos) << status;
}

TEST_P(RocksDiskStoreFaultTest, AMissingBlobFileDoesNotKeepTheStoreFromOpening) {
  Open();
  const TestBlock first = MakeBlock(1, 4, kPageBytes);
  ASSERT_TRUE(Put(first).ok());
  Close();
  for (const std::string& file : BlobFiles()) std::filesystem::remove(file);
  Open();
  ASSERT_NE(store_, nullptr);
  const absl::Status status = ReadBlock(*store_, first.meta.id).status();
  EXPECT_TRUE(absl::IsDataLoss(status)) << status;
  const TestBlock second = MakeBlock(2, 4, kPageBytes);
  ASSERT_TRUE(Put(second).ok());
  Reopen();
  EXPECT_EQ(Get(second), "right");
}

TEST_P(RocksDiskStoreFaultTest, EntriesWhoseEpochIsGoneAreDroppedAtStart) {
  Open();
  const TestBlock lost = MakeBlock(1, 4, kPageBytes);
  ASSERT_TRUE(Put(lost).ok());
  Close();
  // A crash after the drop of the epoch and before the flush of the deletions leaves this behind.
  {
    auto database = RocksDatabase::Open(options_, 1 << 20, /*direct_io=*/true);
    ASSERT_TRUE(database.ok()) << database.status();
    auto epochs = (*database)->TakeEpochs();
    ASSERT_EQ(epochs.size(), 1u);
    ASSERT_TRUE((*database)->DropEpoch(epochs.begin()->second).ok());
  }
  Open();
  ASSERT_NE(store_, nullptr);
  EXPECT_EQ(Get(lost), "absent");
  EXPECT_EQ(store_->stats().block_count, 0u);
  ASSERT_TRUE(Put(lost).ok());
  EXPECT_EQ(Get(lost), "right");
  ASSERT_TRUE(store_->Remove({lost.meta.id}).ok());
  Close();
  auto database = RocksDatabase::Open(options_, 1 << 20, /*direct_io=*/true);
  ASSERT_TRUE(database.ok());
  int entries = 0;
  ASSERT_TRUE(ScanMeta(**database, [&](absl::string_view, const absl::StatusOr<DecodedMeta>&) {
                return ++entries > 0;
              }).ok());
  EXPECT_EQ(entries, 0);
}

// A file size limit stands in for a full disk where nothing can be mounted.
TEST_P(RocksDiskStoreFaultTest, WritesThatFailAreReportedAndTheStoreRecovers) {
  options_.memtable_bytes = 256 << 10;
  options_.write_wait_ms = 2000;
  Open();
  signal(SIGXFSZ, SIG_IGN);
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
  rlimit limited = before;
  limited.rlim_cur = 64 << 10;
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &limited), 0);
  const absl::Status full = Fill(0, 500);
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &before), 0);
  EXPECT_TRUE(absl::IsResourceExhausted(full)) << full;
  EXPECT_NE(full.message().find("bytes free"), absl::string_view::npos) << full;
  ExpectRecovered();
}

// Nothing grows any more, RocksDB's own log included, to which each flush that fails adds lines.
TEST_P(RocksDiskStoreFaultTest, ALogThatHasNoRoomEndsNothing) {
  options_.write_wait_ms = 2000;
  Open();
  signal(SIGXFSZ, SIG_IGN);
  EXPECT_EQ(Fill(0, 7), absl::OkStatus());
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
  rlimit limited = before;
  limited.rlim_cur = 16 << 10;
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &limited), 0);
  absl::Status full[2];
  for (absl::Status& status : full) status = store_->Flush();
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &before), 0);
  for (const absl::Status& status : full) {
    EXPECT_TRUE(absl::IsResourceExhausted(status)) << status;
  }
  ExpectRecovered();
}

TEST_P(RocksDiskStoreFaultTest, AFullDiskIsResourceExhaustedUntilThereIsRoom) {
  const std::string mount_point = temp_.Sub("tmpfs");
  ASSERT_EQ(mkdir(mount_point.c_str(), 0700), 0);
  if (mount("kvmill-test", mount_point.c_str(), "tmpfs", 0, "size=12m") != 0) {
    GTEST_SKIP() << "cannot mount a tmpfs: " << strerror(errno);
  }
  options_.directory = mount_point + "/disk";
  options_.memtable_bytes = 256 << 10;
  options_.write_wait_ms = 2000;
  // Takes room away and gives it back later.
  const std::string ballast = mount_point + "/ballast";
  const int fd = open(ballast.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  EXPECT_EQ(posix_fallocate(fd, 0, 6 << 20), 0);
  close(fd);
  Open();
  if (store_ != nullptr) {
    const absl::Status full = Fill(0, 500);
    EXPECT_TRUE(absl::IsResourceExhausted(full)) << full;
    EXPECT_GT(filled_, 0u);
    for (std::uint64_t i = 0; i < filled_; ++i) {
      EXPECT_EQ(Get(MakeBlock(i, 4, kPageBytes)), "right") << i;
    }
    std::filesystem::remove(ballast);
    ExpectRecovered();
  }
  Close();
  EXPECT_EQ(umount(mount_point.c_str()), 0);
}

INSTANTIATE_TEST_SUITE_P(Files, RocksDiskStoreFaultTest, ::testing::Bool(), EncryptionName);

}  // namespace
}  // namespace kvmill
