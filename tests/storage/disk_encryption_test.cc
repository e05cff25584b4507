// Encryption of the disk tier: what can be read of its files without the key, which keys open which
// directory, changing the key, damage. What encryption must not change runs with it in
// rocks_disk_store_*_test.cc.
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/escaping.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "storage/core/page_layout.h"
#include "tests/long_form.h"
#include "tests/storage/disk_store_fixture.h"

namespace kvmill {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

constexpr std::size_t kPageBytes = 14 * 1024;

class DiskEncryptionTest : public DiskStoreTest {
 protected:
  DiskEncryptionTest() { options_.memtable_bytes = 256 << 10; }

  void OpenWith(const std::vector<int>& keys) {
    options_.keys = keys.empty() ? nullptr : TestKeys(keys);
    Reopen();
  }
  std::string RefusalWith(const std::vector<int>& keys) {
    Close();
    options_.keys = keys.empty() ? nullptr : TestKeys(keys);
    const absl::Status status = RocksDiskStore::Open(options_).status();
    EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
    return std::string(status.message());
  }

  // Name -> contents, of all files but the lock's, which says who looked last.
  std::map<std::string, std::string> Files() const {
    std::map<std::string, std::string> files;
    for (const auto& entry : std::filesystem::recursive_directory_iterator(options_.directory)) {
      if (!entry.is_regular_file() || entry.path().filename() == "kvmill.lock") continue;
      std::ifstream file(entry.path(), std::ios::binary);
      files[entry.path().filename().string()] =
          std::string(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
    }
    return files;
  }

  std::uint64_t BytesOf(int key) const {
    for (const EncryptionKeyUsage& usage : store_->key_usage()) {
      if (usage.key == ToHex(TestKeys({key})->current().id())) return usage.bytes;
    }
    return 0;
  }
};

// Both ways: a needle that is not found where nothing is encrypted proves nothing.
TEST_P(DiskEncryptionTest, OnlyWithoutAKeyIsWhatWasStoredFoundInTheFiles) {
  Open();
  TestBlock block = MakeBlock(41, 3, kPageBytes);
  block.meta.parent = *BlockKey::FromBytes("the-parent-key-of-the-block-of-41");
  const std::string marker = "somebody's prompt, as it lies in a page of K";
  std::memcpy(block.pages[1].data() + 5000, marker.data(), marker.size());
  ASSERT_TRUE(Put(block).ok());
  ASSERT_TRUE(store_
                  ->PutNamespace({.name = "a-name-of-a-namespace",
                                  .encoding = "the-salt-of-the-namespace-in-its-encoding"})
                  .ok());
  ASSERT_TRUE(store_->Flush().ok());
  // RocksDB's log, too: a second start renames it and writes about the files that it finds.
  Reopen();
  ASSERT_EQ(Get(block), "right");
  Close();
  const auto page_bytes = [&](std::size_t page, std::size_t at) {
    return std::string(reinterpret_cast<const char*>(block.pages[page].data()) + at, 24);
  };
  const std::vector<std::string> needles = {
      marker,
      page_bytes(0, 0),
      page_bytes(0, 4096 - 12),
      page_bytes(1, 9000),
      page_bytes(2, kPageBytes - 24),
      std::string(block.meta.id.key.view()),
      std::string(block.meta.parent.view()),
      std::string(16, '\x01'),  // The fingerprint.
      "a-name-of-a-namespace",
      "the-salt-of-the-namespace-in-its-encoding",
      "epoch-0000000000000001",  // A column family's, in manifest and options.
      "kvmill.lock",             // Not in any file.
  };
  const std::map<std::string, std::string> files = Files();
  EXPECT_GT(files.size(), 6u);
  for (const std::string& needle : needles) {
    const auto holder = std::find_if(files.begin(), files.end(), [&](const auto& file) {
      return file.second.find(needle) != std::string::npos;
    });
    const bool expected = !GetParam() && needle != "kvmill.lock";
    EXPECT_EQ(holder != files.end(), expected)
        << absl::CEscape(needle) << (holder == files.end() ? "" : " in " + holder->first);
  }
  for (const auto& [name, contents] : files) {
    if (contents.empty()) continue;
    EXPECT_EQ(contents.compare(0, 8, std::string("KVMILL\x1A", 7) + "E") == 0, GetParam()) << name;
  }
}

TEST_P(DiskEncryptionTest, ManyFlushesOfOddSizesComeBack) {
  Open();
  for (std::uint64_t i = 0; i < 12; ++i) {
    ASSERT_TRUE(Put(MakeBlock(i, 1 + i % 3, 1000 + 777 * i)).ok());
    ASSERT_TRUE(store_->Flush().ok());
  }
  Reopen();
  for (std::uint64_t i = 0; i < 12; ++i) {
    EXPECT_EQ(Get(MakeBlock(i, 1 + i % 3, 1000 + 777 * i)), "right") << i;
  }
}

INSTANTIATE_TEST_SUITE_P(Files, DiskEncryptionTest, ::testing::Bool(), EncryptionName);

// Those that say themselves which keys there are.
using DiskKeysTest = DiskEncryptionTest;

TEST_P(DiskKeysTest, ADirectoryOpensWithItsKeysOnlyAndARefusalChangesNothing) {
  OpenWith({1});
  const TestBlock block = MakeBlock(1, 4, kPageBytes);
  ASSERT_TRUE(Put(block).ok());
  Close();
  const auto before = Files();
  const std::string id = ToHex(TestKeys({1})->current().id());
  const std::string other = ToHex(TestKeys({2})->current().id());

  const std::string without = RefusalWith({});
  EXPECT_THAT(without, HasSubstr("is encrypted with key " + id + " and no key is given"));
  EXPECT_THAT(without, HasSubstr("--disk-key-file"));
  const std::string wrong = RefusalWith({2});
  EXPECT_THAT(wrong, HasSubstr("encrypted with key " + id + ", the keys given are " + other));
  EXPECT_THAT(wrong, HasSubstr("give that key too"));
  for (const std::string& said : {without, wrong}) {
    EXPECT_THAT(said, HasSubstr("move the directory away"));
    EXPECT_THAT(said, HasSubstr("nothing was changed"));
    EXPECT_THAT(said, Not(HasSubstr(KeyText(1).substr(0, 16))));
    EXPECT_THAT(said, Not(HasSubstr(KeyText(2).substr(0, 16))));
  }
  EXPECT_EQ(Files(), before);
  OpenWith({1});
  EXPECT_EQ(Get(block), "right");
}

TEST_P(DiskKeysTest, APlainDirectoryIsNotEncryptedInPlace) {
  OpenWith({});
  const TestBlock block = MakeBlock(1, 4, kPageBytes);
  ASSERT_TRUE(Put(block).ok());
  Close();
  const auto before = Files();
  const std::string refused = RefusalWith({1});
  EXPECT_THAT(refused, HasSubstr("not encrypted, and a key is given"));
  EXPECT_THAT(refused, HasSubstr("Move the directory away"));
  EXPECT_EQ(Files(), before);
  OpenWith({});
  EXPECT_EQ(Get(block), "right");
}

// Somebody who can write the disk does not get his own bytes in by leaving encryption away.
TEST_P(DiskKeysTest, APlainFileAmongEncryptedOnesIsDamage) {
  OpenWith({});
  PageIdentity identity;
  const TestBlock block = RealBlock(&identity);
  ASSERT_TRUE(Put(block).ok());
  Close();
  const auto plain = Files();
  std::filesystem::remove_all(options_.directory);
  OpenWith({1});
  ASSERT_TRUE(Put(block).ok());
  Close();
  bool replaced = false;
  for (const auto& [name, contents] : plain) {
    const std::string path = options_.directory + "/" + name;
    if (name.find(".blob") == std::string::npos || !std::filesystem::exists(path)) continue;
    std::ofstream(path, std::ios::binary | std::ios::trunc) << contents;
    replaced = true;
  }
  ASSERT_TRUE(replaced) << "both have one blob file of one number";
  OpenWith({1});
  ASSERT_NE(store_, nullptr);
  EXPECT_TRUE(absl::IsDataLoss(ReadBlock(*store_, block.meta.id).status()));
}

TEST_P(DiskKeysTest, FilesWithoutContentsDoNotKeepItFromOpening) {
  OpenWith({1});
  const TestBlock block = MakeBlock(1, 4, kPageBytes);
  ASSERT_TRUE(Put(block).ok());
  Close();
  std::ofstream(options_.directory + "/000900.log").flush();
  std::ofstream(options_.directory + "/000901.sst") << "torn";
  std::ofstream(options_.directory + "/000902.blob") << std::string("KVMILL\x1A", 7) << "E";
  OpenWith({1});
  ASSERT_NE(store_, nullptr);
  EXPECT_EQ(Get(block), "right");
}

TEST_P(DiskKeysTest, AfterANewKeyTheOldOneGoesAsBlocksDo) {
  options_.capacity_bytes = kDiskCapacityBytesMin;
  OpenWith({1});
  for (std::uint64_t i = 0; i < 40; ++i) ASSERT_TRUE(Put(MakeBlock(i, 4, kPageBytes)).ok());
  ASSERT_TRUE(store_->PutNamespace({.name = "n", .encoding = "e"}).ok());
  const std::uint64_t all_bytes = BytesOf(1);
  EXPECT_GT(all_bytes, 40 * 4 * kPageBytes);

  // The new key first, the old one below: everything is there.
  OpenWith({2, 1});
  ASSERT_NE(store_, nullptr);
  for (std::uint64_t i = 0; i < 40; ++i) {
    ASSERT_EQ(Get(MakeBlock(i, 4, kPageBytes)), "right") << i;
  }
  EXPECT_GT(BytesOf(1), 40 * 4 * kPageBytes);
  EXPECT_GT(BytesOf(2), 0u);
  EXPECT_THAT(RefusalWith({2}), HasSubstr(ToHex(TestKeys({1})->current().id())));

  // Blocks of the old key leave like others, and nothing else stays behind with it: tables of the
  // index, the database's name, logs.
  OpenWith({2, 1});
  ASSERT_NE(store_, nullptr);
  std::uint64_t next = 1000;
  const auto give_up = std::chrono::steady_clock::now() + std::chrono::minutes(5);
  while (BytesOf(1) > 0 && std::chrono::steady_clock::now() < give_up) {
    for (int i = 0; i < 32; ++i) ASSERT_TRUE(Put(MakeBlock(next++, 4, kPageBytes)).ok());
  }
  EXPECT_EQ(BytesOf(1), 0u);
  OpenWith({2});
  ASSERT_NE(store_, nullptr);
  EXPECT_EQ(Get(MakeBlock(next - 1, 4, kPageBytes)), "right");
  const auto namespaces = store_->Namespaces();
  ASSERT_TRUE(namespaces.ok()) << namespaces.status();
  ASSERT_EQ(namespaces->size(), 1u);
  EXPECT_EQ((*namespaces)[0].name, "n");
  EXPECT_EQ((*namespaces)[0].encoding, "e");
}

// A crash between two starts with two keys: some files have one, some the other.
TEST_P(DiskKeysTest, AKeyComesBackAsTheFirst) {
  for (const std::vector<int>& keys :
       std::vector<std::vector<int>>{{1}, {2, 1}, {1, 2}, {3, 2, 1}, {1, 3, 2}}) {
    OpenWith(keys);
    ASSERT_NE(store_, nullptr);
    const std::uint64_t number =
        10 * static_cast<std::uint64_t>(keys.size()) + static_cast<std::uint64_t>(keys[0]);
    ASSERT_TRUE(Put(MakeBlock(number, 2, kPageBytes)).ok());
  }
  OpenWith({2, 3, 1});
  ASSERT_NE(store_, nullptr);
  for (const std::uint64_t number : {11u, 22u, 21u, 33u, 31u}) {
    EXPECT_EQ(Get(MakeBlock(number, 2, kPageBytes)), "right") << number;
  }
}

// In every file, header and contents: the store does not open and says so, or has no wrong byte.
// And with the byte set right it is as it was.
TEST_P(DiskKeysTest, AFlippedByteOfAnyFileIsDamageAndNeverAWrongPage) {
  OpenWith({1});
  PageIdentity identity;
  const TestBlock block = RealBlock(&identity);
  ASSERT_TRUE(Put(block).ok());
  Close();
  const auto copy = temp_.Sub("copy");
  std::filesystem::copy(options_.directory, copy, std::filesystem::copy_options::recursive);
  int refused = 0;
  int missed = 0;
  for (const auto& [name, contents] : Files()) {
    if (contents.empty()) continue;
    const std::size_t step = std::max<std::size_t>(contents.size() / ShortOrLong(6, 60), 1);
    for (std::size_t offset = step / 3; offset < contents.size(); offset += step) {
      std::filesystem::remove_all(options_.directory);
      std::filesystem::copy(copy, options_.directory, std::filesystem::copy_options::recursive);
      {
        std::fstream file(options_.directory + "/" + name,
                          std::ios::binary | std::ios::in | std::ios::out);
        file.seekp(static_cast<std::streamoff>(offset));
        file.put(static_cast<char>(contents[offset] ^ 0x20));
      }
      auto opened = RocksDiskStore::Open(options_);
      if (!opened.ok()) {
        EXPECT_TRUE(absl::IsDataLoss(opened.status()) || absl::IsInternal(opened.status()))
            << name << " " << offset << " " << opened.status();
        ++refused;
        continue;
      }
      const auto pages = ReadBlock(**opened, block.meta.id);
      if (!pages.ok() || !VerifyPage(identity, (*pages)[0]).ok()) {
        ++missed;
      } else {
        EXPECT_EQ(*pages, block.pages) << name << " " << offset;
      }
    }
  }
  EXPECT_GT(refused, 0);
  EXPECT_GT(missed, 0);
  std::filesystem::remove_all(options_.directory);
  std::filesystem::copy(copy, options_.directory, std::filesystem::copy_options::recursive);
  OpenWith({1});
  EXPECT_EQ(Get(block), "right");
}

INSTANTIATE_TEST_SUITE_P(Files, DiskKeysTest, ::testing::Values(true), EncryptionName);

}  // namespace
}  // namespace kvmill
