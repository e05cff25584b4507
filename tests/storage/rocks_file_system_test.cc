// What keeps a key stream from being used twice (docs/decisions/0048-encryption-at-rest.md): files
// that are encrypted as a stream are only appended to, not at all after an append that failed, and
// a name that comes again has a new header.
#include "storage/rocks_file_system.h"

#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <array>
#include <cerrno>
#include <cstddef>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "rocksdb/file_system.h"
#include "storage/rocks_io_status.h"
#include "storage/rocks_stream_files.h"
#include "tests/storage/disk_store_fixture.h"

namespace kvmill {
namespace {

using ::testing::HasSubstr;

using rocksdb::FileOptions;
using rocksdb::FSWritableFile;
using rocksdb::IODebugContext;
using rocksdb::IOOptions;
using rocksdb::IOStatus;
using rocksdb::Slice;

std::string ContentsOf(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return std::string(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
}

// A real file whose `failing`-th append, counted from 1, writes half of what it was given and
// fails. Those after it work.
class FailingFile : public rocksdb::FSWritableFileOwnerWrapper {
 public:
  FailingFile(std::unique_ptr<FSWritableFile> file, int failing)
      : FSWritableFileOwnerWrapper(std::move(file)), failing_(failing) {}

  using FSWritableFileOwnerWrapper::Append;
  IOStatus Append(const Slice& data, const IOOptions& options, IODebugContext* dbg) override {
    if (++appends_ != failing_) return target()->Append(data, options, dbg);
    IOStatus status = target()->Append(Slice(data.data(), data.size() / 2), options, dbg);
    return status.ok() ? IOStatus::IOError("the disk went away for a moment") : status;
  }

 private:
  const int failing_;
  int appends_ = 0;
};

class StreamWriterTest : public ::testing::Test {
 protected:
  std::unique_ptr<FSWritableFile> Create(int failing) {
    std::unique_ptr<FSWritableFile> file;
    const IOStatus status =
        rocksdb::FileSystem::Default()->NewWritableFile(path_, FileOptions(), &file, nullptr);
    EXPECT_TRUE(status.ok()) << status.ToString();
    return NewStreamWriter(std::make_unique<FailingFile>(std::move(file), failing), cipher_);
  }
  // What of the file is behind the header.
  std::string Decrypted() const {
    std::string bytes = ContentsOf(path_);
    bytes.erase(0, kFileHeaderBytes);
    StreamCipher(cipher_).Run(0, bytes.data(), bytes.size(), bytes.data());
    return bytes;
  }

  TempDirectory temp_;
  const std::string path_ = temp_.Sub("000001.log");
  const FileCipher cipher_{*TestKeys({1}), CipherMode::kStream};
  const IOOptions io_;
};

// The file would take the next append: at an offset where other bytes were encrypted already.
TEST_F(StreamWriterTest, AfterAnAppendThatFailedNothingIsEncryptedForItsPlace) {
  const std::string first(1000, 'a');
  const std::string second(150 << 10, 'b');  // Three pieces.
  // The header, the first, and each piece of the second.
  for (int failing = 1; failing <= 5; ++failing) {
    std::unique_ptr<FSWritableFile> file = Create(failing);
    const std::array<std::string, 2> texts = {first, second};
    IOStatus failed;
    for (const std::string& text : texts) {
      failed = file->Append(text, io_, nullptr);
      if (!failed.ok()) break;
    }
    ASSERT_TRUE(failed.IsIOError()) << failing << " " << failed.ToString();
    ASSERT_TRUE(file->Flush(io_, nullptr).ok());
    const std::string before = ContentsOf(path_);
    for (int i = 0; i < 3; ++i) {
      const IOStatus again = file->Append(std::string(1000, 'c'), io_, nullptr);
      EXPECT_EQ(again.ToString(), failed.ToString()) << failing;
      const IOStatus checked =
          file->Append(std::string(1000, 'c'), io_, rocksdb::DataVerificationInfo(), nullptr);
      EXPECT_EQ(checked.ToString(), failed.ToString()) << failing;
    }
    EXPECT_TRUE(file->Close(io_, nullptr).ok());
    EXPECT_EQ(ContentsOf(path_), before) << failing;
    if (failing == 1) {
      EXPECT_EQ(before.size(), kFileHeaderBytes / 2);
    } else {
      const std::string there = Decrypted();
      EXPECT_GT(there.size(), 0u) << failing;
      EXPECT_EQ(there, (first + second).substr(0, there.size())) << failing;
    }
  }
}

TEST_F(StreamWriterTest, BytesThatAreThereAreNotWrittenAgain) {
  std::unique_ptr<FSWritableFile> file = Create(/*failing=*/0);
  const std::string text(1000, 'a');
  ASSERT_TRUE(file->Append(text, io_, nullptr).ok());
  const std::string other(10, 'b');
  EXPECT_TRUE(file->PositionedAppend(other, 0, io_, nullptr).IsNotSupported());
  EXPECT_TRUE(file->PositionedAppend(other, 0, io_, rocksdb::DataVerificationInfo(), nullptr)
                  .IsNotSupported());
  EXPECT_TRUE(file->Truncate(999, io_, nullptr).IsNotSupported());
  EXPECT_TRUE(file->Truncate(0, io_, nullptr).IsNotSupported());
  EXPECT_TRUE(file->Truncate(1000, io_, nullptr).ok()) << "RocksDB does so before it closes a file";
  EXPECT_EQ(file->GetFileSize(io_, nullptr), 1000u);
  ASSERT_TRUE(file->Append(other, io_, nullptr).ok());
  ASSERT_TRUE(file->Close(io_, nullptr).ok());
  EXPECT_EQ(Decrypted(), text + other);
}

class EncryptedFileSystemTest : public ::testing::Test {
 protected:
  EncryptedFileSystemTest() {
    std::filesystem::create_directory(directory_);
    auto files = EncryptedFiles::Load(directory_, TestKeys({1}));
    EXPECT_TRUE(files.ok()) << files.status();
    file_system_ = NewRocksFileSystem(/*direct_io=*/false, *std::move(files));
  }
  static void WriteTo(std::unique_ptr<FSWritableFile> file, const std::string& text) {
    ASSERT_NE(file, nullptr);
    ASSERT_TRUE(file->Append(text, IOOptions(), nullptr).ok());
    ASSERT_TRUE(file->Close(IOOptions(), nullptr).ok());
  }
  void Write(const std::string& path, const std::string& text) {
    std::unique_ptr<FSWritableFile> file;
    ASSERT_TRUE(file_system_->NewWritableFile(path, FileOptions(), &file, nullptr).ok());
    WriteTo(std::move(file), text);
  }
  // Both begin with a header, and no block of 16 bytes is in both: equal ones at one place of one
  // key stream would be.
  static void ExpectNothingShared(const std::string& a, const std::string& b) {
    ASSERT_EQ(a.size(), b.size());
    ASSERT_GT(a.size(), kFileHeaderBytes);
    EXPECT_NE(a.substr(0, kFileHeaderBytes), b.substr(0, kFileHeaderBytes));
    for (std::size_t at = kFileHeaderBytes; at + 16 <= a.size(); at += 16) {
      EXPECT_NE(a.substr(at, 16), b.substr(at, 16)) << at;
    }
  }

  TempDirectory temp_;
  const std::string directory_ = temp_.Sub("data");
  std::shared_ptr<rocksdb::FileSystem> file_system_;
  const std::string text_ = std::string(320, 'a');
};

TEST_F(EncryptedFileSystemTest, AFileIsNotWrittenFurtherOrWithin) {
  for (const char* name : {"000001.log", "000002.blob"}) {
    const std::string path = directory_ + "/" + name;
    ASSERT_NO_FATAL_FAILURE(Write(path, text_));
    const std::string before = ContentsOf(path);
    std::unique_ptr<FSWritableFile> appended;
    std::unique_ptr<rocksdb::FSRandomRWFile> within;
    std::unique_ptr<rocksdb::MemoryMappedFileBuffer> mapped;
    for (const IOStatus& status :
         {file_system_->ReopenWritableFile(path, FileOptions(), &appended, nullptr),
          file_system_->NewRandomRWFile(path, FileOptions(), &within, nullptr),
          file_system_->NewMemoryMappedFileBuffer(path, &mapped),
          file_system_->Truncate(path, 100, IOOptions(), nullptr)}) {
      EXPECT_TRUE(status.IsNotSupported()) << status.ToString();
      EXPECT_THAT(status.ToString(), HasSubstr(path));
    }
    EXPECT_EQ(appended, nullptr);
    EXPECT_EQ(within, nullptr);
    EXPECT_EQ(mapped, nullptr);
    EXPECT_EQ(ContentsOf(path), before);
  }
}

TEST_F(EncryptedFileSystemTest, ALogThatIsUsedAgainIsANewFile) {
  const std::string old_path = directory_ + "/000001.log";
  const std::string path = directory_ + "/000002.log";
  ASSERT_NO_FATAL_FAILURE(Write(old_path, text_));
  const std::string before = ContentsOf(old_path);
  std::unique_ptr<FSWritableFile> file;
  ASSERT_TRUE(file_system_->ReuseWritableFile(path, old_path, FileOptions(), &file, nullptr).ok());
  EXPECT_FALSE(std::filesystem::exists(old_path));
  ASSERT_NO_FATAL_FAILURE(WriteTo(std::move(file), text_));
  ExpectNothingShared(before, ContentsOf(path));
  EXPECT_FALSE(file_system_->ReuseWritableFile(path, old_path, FileOptions(), &file, nullptr).ok())
      << "there is none";
}

TEST_F(EncryptedFileSystemTest, ANameThatComesAgainHasANewKeyStream) {
  const std::string path = directory_ + "/CURRENT";
  ASSERT_NO_FATAL_FAILURE(Write(path, text_));
  const std::string before = ContentsOf(path);
  ASSERT_NO_FATAL_FAILURE(Write(path, text_));
  ExpectNothingShared(before, ContentsOf(path));
}

TEST(PlainFileSystem, ALimitIsNoSpaceForEveryFile) {
  for (const int error : {ENOSPC, EDQUOT, EFBIG}) {
    EXPECT_TRUE(ErrnoIoStatus("append to", "a file", error).IsNoSpace()) << error;
  }
  EXPECT_FALSE(ErrnoIoStatus("append to", "a file", EIO).IsNoSpace());

  TempDirectory temp;
  const auto file_system = NewRocksFileSystem(/*direct_io=*/false, nullptr);
  const IOOptions io;
  signal(SIGXFSZ, SIG_IGN);
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
  for (const char* name : {"000001.sst", "MANIFEST-000002", "OPTIONS-000003", "000004.dbtmp"}) {
    const std::string path = temp.Sub(name);
    std::unique_ptr<FSWritableFile> file;
    ASSERT_TRUE(file_system->NewWritableFile(path, FileOptions(), &file, nullptr).ok());
    ASSERT_TRUE(file->Append(std::string(1000, 'a'), io, nullptr).ok());
    rlimit limited = before;
    limited.rlim_cur = 1500;
    ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &limited), 0);
    const IOStatus full = file->Append(std::string(1000, 'b'), io, nullptr);
    ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &before), 0);
    EXPECT_TRUE(full.IsNoSpace()) << name << " " << full.ToString();
    EXPECT_EQ(file->GetFileSize(io, nullptr), 1000u) << name;
    // Half of what failed is there; nothing is left of it.
    EXPECT_TRUE(file->Append(std::string(1000, 'c'), io, nullptr).ok()) << name;
    EXPECT_TRUE(file->Sync(io, nullptr).ok()) << name;
    EXPECT_TRUE(file->Close(io, nullptr).ok()) << name;
    EXPECT_EQ(ContentsOf(path), std::string(1000, 'a') + std::string(1000, 'c')) << name;
    struct stat info {};
    ASSERT_EQ(stat(path.c_str(), &info), 0);
    EXPECT_LE(info.st_blocks, 16) << name << ": what was reserved is given back";
  }
}

}  // namespace
}  // namespace kvmill
