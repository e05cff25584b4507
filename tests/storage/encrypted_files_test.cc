// What a start reads of a directory to tell whether it may be opened with what keys were given, and
// whom it sends away.
#include "storage/encrypted_files.h"

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "storage/core/checksum.h"
#include "tests/storage/disk_store_fixture.h"

namespace kvmill {
namespace {

using ::testing::HasSubstr;

// Bytes that this process asked files for, as the kernel counts them.
std::uint64_t BytesRead() {
  std::ifstream io("/proc/self/io");
  std::string name;
  std::uint64_t value = 0;
  io >> name >> value;
  EXPECT_EQ(name, "rchar:");
  return value;
}

std::string HeaderText(const std::vector<int>& keys, CipherMode mode) {
  std::string header(kFileHeaderBytes, '\0');
  FileCipher(*TestKeys(keys), mode).WriteHeader(header.data());
  return header;
}

// As a later version would write it: only magic, version and checksum are known to be where they
// are.
std::string OtherVersion(std::string header, std::uint16_t version) {
  std::memcpy(header.data() + offsetof(FileHeader, version), &version, sizeof(version));
  std::memset(header.data() + offsetof(FileHeader, checksum), 0, sizeof(FileHeader::checksum));
  const std::uint64_t checksum = Checksum(
      absl::MakeConstSpan(reinterpret_cast<const std::byte*>(header.data()), header.size()));
  std::memcpy(header.data() + offsetof(FileHeader, checksum), &checksum, sizeof(checksum));
  return header;
}

class EncryptedFilesTest : public ::testing::Test {
 protected:
  EncryptedFilesTest() { std::filesystem::create_directory(directory_); }

  void Write(const std::string& name, const std::string& contents) const {
    std::ofstream(directory_ + "/" + name, std::ios::binary) << contents;
  }
  absl::Status Load(const std::vector<int>& keys) const {
    return EncryptedFiles::Load(directory_, TestKeys(keys)).status();
  }

  TempDirectory temp_;
  const std::string directory_ = temp_.Sub("data");
};

TEST_F(EncryptedFilesTest, WithoutKeysNoPageIsRead) {
  for (const char* name : {"CURRENT", "IDENTITY", "MANIFEST-000001", "000002.sst"}) {
    Write(name, std::string(8192, 'x'));
  }
  const std::uint64_t at_first = BytesRead();
  ASSERT_TRUE(CheckNotEncrypted(directory_).ok());
  const std::uint64_t of_index = BytesRead() - at_first;
  EXPECT_GE(of_index, 4 * kFileHeaderBytes);
  for (int i = 100; i < 200; ++i) Write(absl::StrCat("000", i, ".blob"), std::string(8192, 'x'));
  const std::uint64_t before = BytesRead();
  ASSERT_TRUE(CheckNotEncrypted(directory_).ok());
  // A header's worth for what the kernel says about itself.
  EXPECT_LT(BytesRead() - before, of_index + kFileHeaderBytes) << "100 files of pages came on top";
}

TEST_F(EncryptedFilesTest, WithKeysEveryHeaderIsReadOnce) {
  const std::string stream = HeaderText({1}, CipherMode::kStream);
  Write("CURRENT", stream);
  for (int i = 100; i < 200; ++i) {
    Write(absl::StrCat("000", i, ".blob"), HeaderText({i % 2 + 1}, CipherMode::kUnits) + "page");
  }
  const std::uint64_t before = BytesRead();
  const auto files = EncryptedFiles::Load(directory_, TestKeys({1, 2}));
  const std::uint64_t read = BytesRead() - before;
  ASSERT_TRUE(files.ok()) << files.status();
  EXPECT_GE(read, 101 * kFileHeaderBytes);
  EXPECT_LT(read, 102 * kFileHeaderBytes);
  // And what is known of them comes from there.
  EXPECT_FALSE((*files)->IsOfOldKey("000100.blob"));
  EXPECT_TRUE((*files)->IsOfOldKey("000101.blob"));
  EXPECT_EQ((*files)->Usage()[0].files, 51u);
  EXPECT_EQ((*files)->Usage()[1].files, 50u);
}

// Each alone tells that a key is missing: the others may be gone.
TEST_F(EncryptedFilesTest, EveryFileOfTheIndexTellsThatADirectoryIsEncrypted) {
  const std::string id = ToHex(TestKeys({1})->current().id());
  for (const char* name : {"CURRENT", "IDENTITY", "MANIFEST-000001", "000002.sst"}) {
    Write(name, HeaderText({1}, CipherMode::kStream) + "behind");
    const absl::Status status = CheckNotEncrypted(directory_);
    EXPECT_TRUE(absl::IsFailedPrecondition(status)) << name << " " << status;
    EXPECT_THAT(status.message(), HasSubstr(absl::StrCat("is encrypted with key ", id)));
    std::filesystem::remove(directory_ + "/" + name);
  }
  EXPECT_TRUE(CheckNotEncrypted(directory_).ok());
}

TEST_F(EncryptedFilesTest, HeadersOfALaterVersionAreRefusedAndNamed) {
  Write("CURRENT", HeaderText({1}, CipherMode::kStream));
  Write("MANIFEST-000001", OtherVersion(HeaderText({1}, CipherMode::kStream), 2));
  for (const absl::Status& status : {CheckNotEncrypted(directory_), Load({1}), Load({2, 1})}) {
    EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
    EXPECT_THAT(status.message(), HasSubstr("1 file (4096 bytes) of it are encrypted with a header "
                                            "of version 2, want 1"));
    EXPECT_THAT(status.message(), HasSubstr("nothing was changed"));
  }
  // A version that only damage made is none.
  std::string damaged = HeaderText({1}, CipherMode::kStream);
  damaged[offsetof(FileHeader, version)] = 2;
  Write("MANIFEST-000001", damaged);
  EXPECT_TRUE(Load({1}).ok());
}

TEST_F(EncryptedFilesTest, ALaterVersionOfOneFileOpensWithNoKey) {
  const std::string header = OtherVersion(HeaderText({1}, CipherMode::kStream), 7);
  const absl::Status status =
      FileCipher::Open(
          *TestKeys({1}), CipherMode::kStream,
          absl::MakeConstSpan(reinterpret_cast<const std::byte*>(header.data()), header.size()))
          .status();
  EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
  EXPECT_THAT(status.message(), HasSubstr("version 7, want 1"));
}

// Of all files that a store wrote: one that nobody needs would be taken for damage, and deleted.
TEST(EncryptedStoreTest, AStoreOfALaterVersionIsLeftAsItIs) {
  const TempDirectory temp;
  RocksDiskStoreOptions options;
  options.directory = temp.Sub("data");
  options.capacity_bytes = kDiskCapacityBytesMin;
  options.keys = TestKeys({1});
  ASSERT_TRUE(RocksDiskStore::Open(options).ok());
  const auto contents = [&] {
    std::map<std::string, std::string> files;
    for (const auto& entry : std::filesystem::directory_iterator(options.directory)) {
      if (!entry.is_regular_file() || entry.path().filename() == "kvmill.lock") continue;
      std::ifstream file(entry.path(), std::ios::binary);
      files[entry.path().filename().string()] =
          std::string(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
    }
    return files;
  };
  const auto written = contents();
  ASSERT_TRUE(written.contains("IDENTITY"));
  for (const bool all : {true, false}) {
    for (const auto& [name, bytes] : written) {
      const bool later = !bytes.empty() && (all || name == "IDENTITY");
      std::ofstream(options.directory + "/" + name, std::ios::binary)
          << (later ? OtherVersion(bytes.substr(0, kFileHeaderBytes), 2) +
                          bytes.substr(kFileHeaderBytes)
                    : bytes);
    }
    const auto before = contents();
    for (const auto& keys : {TestKeys({1}), TestKeys({2, 1}), decltype(options.keys)()}) {
      options.keys = keys;
      const absl::Status status = RocksDiskStore::Open(options).status();
      EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
      EXPECT_THAT(status.message(), HasSubstr("version 2, want 1"));
      EXPECT_EQ(contents(), before);
    }
  }
  for (const auto& [name, bytes] : written) {
    std::ofstream(options.directory + "/" + name, std::ios::binary) << bytes;
  }
  options.keys = TestKeys({1});
  EXPECT_TRUE(RocksDiskStore::Open(options).ok());
}

}  // namespace
}  // namespace kvmill
