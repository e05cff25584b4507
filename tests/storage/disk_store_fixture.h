// Shared by the disk tier's tests: temporary directories and blocks whose bytes follow from a
// number, so that a reader can tell right from wrong without keeping a copy.
#ifndef KVMILL_TESTS_STORAGE_DISK_STORE_FIXTURE_H_
#define KVMILL_TESTS_STORAGE_DISK_STORE_FIXTURE_H_

#include <stdlib.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_format.h"
#include "absl/types/span.h"
#include "gtest/gtest.h"
#include "storage/core/page_layout.h"
#include "storage/encryption_keys.h"
#include "storage/rocks_disk_store.h"

namespace kvmill {

class TempDirectory {
 public:
  TempDirectory() {
    std::string pattern = (std::filesystem::temp_directory_path() / "kvmill-disk-XXXXXX").string();
    const char* made = mkdtemp(pattern.data());
    if (made != nullptr) path_ = made;
  }
  ~TempDirectory() {
    std::error_code error;
    if (!path_.empty()) std::filesystem::remove_all(path_, error);
  }
  TempDirectory(const TempDirectory&) = delete;
  TempDirectory& operator=(const TempDirectory&) = delete;

  std::string Sub(const std::string& name) const { return path_ + "/" + name; }

 private:
  std::string path_;
};

// Block `number`, version `salt`: key, parent and bytes all follow from the two.
struct TestBlock {
  DiskBlockMeta meta;
  std::vector<std::vector<std::byte>> pages;

  std::vector<absl::Span<const std::byte>> views() const { return {pages.begin(), pages.end()}; }
};

inline DiskBlockId TestId(std::uint64_t number, std::uint8_t tenant = 1) {
  DiskBlockId id;
  id.fingerprint.fill(static_cast<std::byte>(tenant));
  id.group = static_cast<std::uint8_t>(number % 3);
  id.key = *BlockKey::FromBytes(absl::StrFormat("block-%026d", number));
  return id;
}

inline void FillPage(std::uint64_t seed, absl::Span<std::byte> page) {
  std::uint64_t state = seed * 0x9E3779B97F4A7C15u + 1;
  std::size_t i = 0;
  for (; i + 8 <= page.size(); i += 8) {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    std::memcpy(page.data() + i, &state, 8);
  }
  for (; i < page.size(); ++i) page[i] = static_cast<std::byte>(seed + i);
}

inline TestBlock MakeBlock(std::uint64_t number, std::size_t page_count, std::size_t page_bytes,
                           std::uint64_t salt = 0) {
  TestBlock block;
  block.meta.id = TestId(number);
  if (number > 0) block.meta.parent = TestId(number - 1).key;
  block.meta.token_count = 128;
  for (std::size_t i = 0; i < page_count; ++i) {
    block.pages.emplace_back(page_bytes);
    FillPage(((number * 1000 + i) << 8) + salt, absl::MakeSpan(block.pages.back()));
    block.meta.page_bytes.push_back(static_cast<std::uint32_t>(page_bytes));
  }
  return block;
}

inline absl::Status WriteBlock(DiskStore& store, const TestBlock& block) {
  return store.Write(block.meta, block.views());
}

// A real page, so that VerifyPage can judge it. 8 heads of k4v2 g128 D 128.
inline TestBlock RealBlock(PageIdentity* identity) {
  TestBlock block;
  block.meta.id = TestId(1);
  block.meta.token_count = 128;
  identity->fingerprint = block.meta.id.fingerprint;
  identity->key = block.meta.id.key;
  identity->group_index = block.meta.id.group;
  identity->head_count = 8;
  identity->token_count = 128;
  identity->format = TileFormat{.key_bits = 4, .value_bits = 2, .group = 128, .head_dim = 128};
  const std::vector<SlotKind> kinds(8, SlotKind::kTile);
  const std::size_t page_bytes = PageBytes(identity->format, 128, kinds);
  block.pages.emplace_back(page_bytes);
  const absl::Span<std::byte> page = absl::MakeSpan(block.pages[0]);
  InitPage(*identity, kinds, page);
  for (std::size_t head = 0; head < 8; ++head) FillPage(head + 1, SlotContents(page, head));
  SealPage(page);
  block.meta.page_bytes = {static_cast<std::uint32_t>(page_bytes)};
  return block;
}

// All pages, with lengths from the meta entry.
inline absl::StatusOr<std::vector<std::vector<std::byte>>> ReadBlock(DiskStore& store,
                                                                     const DiskBlockId& id) {
  const absl::StatusOr<DiskBlockMeta> meta = store.Find(id);
  if (!meta.ok()) return meta.status();
  std::vector<std::vector<std::byte>> pages;
  std::vector<absl::Span<std::byte>> out;
  pages.reserve(meta->page_bytes.size());
  for (const std::uint32_t page_bytes : meta->page_bytes) {
    pages.emplace_back(page_bytes);
    out.push_back(absl::MakeSpan(pages.back()));
  }
  const absl::Status status = store.Read(id, 0, out);
  if (!status.ok()) return status;
  return pages;
}

// Key `number` as a line of a key file.
inline std::string KeyText(int number) {
  std::string text;
  for (int i = 0; i < 32; ++i) absl::StrAppendFormat(&text, "%02x", (number * 37 + i * 5) & 0xFF);
  return text + "\n";
}

// The first one is for new files.
inline std::shared_ptr<const EncryptionKeys> TestKeys(const std::vector<int>& numbers) {
  std::string text;
  for (const int number : numbers) text += KeyText(number);
  return *EncryptionKeys::Parse(text);
}

// Instances of tests that run with and without encryption.
inline std::string EncryptionName(const ::testing::TestParamInfo<bool>& encrypted) {
  return encrypted.param ? "Encrypted" : "Plain";
}

// One-word verbs over a store in a temporary directory. The parameter: whether it is encrypted.
class DiskStoreTest : public ::testing::TestWithParam<bool> {
 protected:
  DiskStoreTest() {
    options_.directory = temp_.Sub("disk");
    options_.capacity_bytes = std::uint64_t{64} << 20;
    if (GetParam()) options_.keys = TestKeys({1});
  }

  void Open() {
    auto opened = RocksDiskStore::Open(options_);
    ASSERT_TRUE(opened.ok()) << opened.status();
    store_ = *std::move(opened);
  }
  void Close() { store_.reset(); }
  void Reopen() {
    Close();
    Open();
  }

  absl::Status Put(const TestBlock& block) { return WriteBlock(*store_, block); }
  // "right", "absent", or what is wrong.
  std::string Get(const TestBlock& block) {
    const auto pages = ReadBlock(*store_, block.meta.id);
    if (absl::IsNotFound(pages.status())) return "absent";
    if (!pages.ok()) return std::string(pages.status().message());
    return *pages == block.pages ? "right" : "wrong bytes";
  }

  TempDirectory temp_;
  RocksDiskStoreOptions options_;
  std::unique_ptr<RocksDiskStore> store_;
};

}  // namespace kvmill

#endif  // KVMILL_TESTS_STORAGE_DISK_STORE_FIXTURE_H_
