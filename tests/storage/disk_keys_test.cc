#include "storage/disk_keys.h"

#include <string>

#include "gtest/gtest.h"
#include "tests/storage/disk_store_fixture.h"
#include "tests/storage/faulty_disk_store.h"

namespace kvmill {
namespace {

DiskBlockMeta SomeMeta() {
  DiskBlockMeta meta;
  meta.id = TestId(7);
  meta.parent = TestId(6).key;
  meta.token_count = 100;
  meta.page_bytes = {64, 64, 64, 128, 64};
  meta.epoch = 0x0102030405060708u;
  return meta;
}

TEST(DiskKeysTest, MetaComesBackAsItWas) {
  const DiskBlockMeta meta = SomeMeta();
  const std::string key = EncodeMetaKey(meta.id);
  EXPECT_EQ(key.size(), 16 + 1 + 32u);
  const std::string value = EncodeMetaValue(key, meta, 99);
  EXPECT_EQ(value.size(), 32 + 32 + 3 * 8u);  // Three runs.
  const auto decoded = DecodeMeta(key, value);
  ASSERT_TRUE(decoded.ok()) << decoded.status();
  EXPECT_EQ(decoded->meta.id, meta.id);
  EXPECT_EQ(decoded->meta.parent, meta.parent);
  EXPECT_EQ(decoded->meta.token_count, 100);
  EXPECT_EQ(decoded->meta.page_bytes, meta.page_bytes);
  EXPECT_EQ(decoded->meta.epoch, meta.epoch);
  EXPECT_EQ(decoded->block_number, 99u);
}

TEST(DiskKeysTest, AFirstBlockHasNoParent) {
  DiskBlockMeta meta = SomeMeta();
  meta.parent = BlockKey();
  const std::string key = EncodeMetaKey(meta.id);
  const auto decoded = DecodeMeta(key, EncodeMetaValue(key, meta, 1));
  ASSERT_TRUE(decoded.ok()) << decoded.status();
  EXPECT_TRUE(decoded->meta.parent.empty());
}

TEST(DiskKeysTest, LinksToParentsAndAnchorsComeBackAndCostNoByte) {
  DiskBlockMeta meta = SomeMeta();
  const std::string key = EncodeMetaKey(meta.id);
  const std::size_t size = EncodeMetaValue(key, meta, 1).size();
  const auto back = [&key](const DiskBlockMeta& of) {
    const auto decoded = DecodeMeta(key, EncodeMetaValue(key, of, 1));
    EXPECT_TRUE(decoded.ok()) << decoded.status();
    return decoded->meta;
  };
  // As versions wrote it that kept no places.
  EXPECT_EQ(EncodeMetaValue(key, meta, 1)[3], 0);
  EXPECT_EQ(back(meta).link, RunLink());

  meta.link = {KeyHash(meta.id.fingerprint, meta.parent), RunLink::Kind::kParent, 31};
  EXPECT_EQ(EncodeMetaValue(key, meta, 1).size(), size);
  EXPECT_EQ(EncodeMetaValue(key, meta, 1)[3], 32);
  EXPECT_EQ(back(meta).link, meta.link);
  EXPECT_EQ(back(meta).parent, meta.parent);

  meta.link = {0, RunLink::Kind::kFirst, 0};
  EXPECT_EQ(EncodeMetaValue(key, meta, 1)[3], 1);
  EXPECT_EQ(back(meta).link, meta.link);
  EXPECT_EQ(back(meta).parent, meta.parent);

  meta.link = {0x0807060504030201u, RunLink::Kind::kAnchor, 5};
  const std::string value = EncodeMetaValue(key, meta, 1);
  EXPECT_EQ(value[2], 8);
  EXPECT_EQ(static_cast<unsigned char>(value[3]), 0x86);
  EXPECT_EQ(value.substr(32, 8), "\1\2\3\4\5\6\7\x8");
  EXPECT_EQ(back(meta).link, meta.link);
  EXPECT_TRUE(back(meta).parent.empty());
  EXPECT_EQ(back(meta).page_bytes, meta.page_bytes);

  // The parent is not known any more: then the place says nothing after a restart.
  meta.parent = BlockKey();
  meta.link = {7, RunLink::Kind::kParent, 3};
  EXPECT_EQ(back(meta).link, RunLink());
}

TEST(DiskKeysTest, AnyFlippedBitOrCutIsDataLoss) {
  const DiskBlockMeta meta = SomeMeta();
  const std::string key = EncodeMetaKey(meta.id);
  const std::string value = EncodeMetaValue(key, meta, 99);
  for (std::size_t bit = 0; bit < value.size() * 8; ++bit) {
    std::string flipped = value;
    flipped[bit / 8] = static_cast<char>(flipped[bit / 8] ^ (1 << (bit % 8)));
    EXPECT_TRUE(absl::IsDataLoss(DecodeMeta(key, flipped).status())) << bit;
  }
  for (std::size_t size = 0; size < value.size(); ++size) {
    EXPECT_TRUE(absl::IsDataLoss(DecodeMeta(key, value.substr(0, size)).status())) << size;
  }
  EXPECT_TRUE(absl::IsDataLoss(DecodeMeta(key, value + "x").status()));
  EXPECT_TRUE(absl::IsDataLoss(DecodeMeta(EncodeMetaKey(TestId(8)), value).status()));
  EXPECT_TRUE(absl::IsDataLoss(DecodeMetaKey(key.substr(0, 17)).status()));
  EXPECT_TRUE(absl::IsDataLoss(DecodeMetaKey(std::string(82, 'x')).status()));
}

TEST(DiskKeysTest, PageKeysSortInTheOrderOfWriting) {
  const auto text = [](std::uint64_t number, std::size_t page) {
    const PageKey key = EncodePageKey(number, page);
    return std::string(key.begin(), key.end());
  };
  EXPECT_EQ(text(0x0102030405060708u, 0x090A), "\1\2\3\4\5\6\7\x8\x9\xA");
  EXPECT_LT(text(1, 65534), text(2, 0));
  EXPECT_LT(text(255, 255), text(255, 256));
  EXPECT_LT(text(255, 0), text(256, 0));
}

TEST(DiskKeysTest, EpochNamesAreParsedStrictly) {
  EXPECT_EQ(EpochName(0xAB), "epoch-00000000000000ab");
  EXPECT_EQ(EpochOfName(EpochName(UINT64_MAX)), UINT64_MAX);
  for (const char* name :
       {"", "meta", "epoch-", "epoch-00000000000000AB", "epoch-0000000000000000a",
        "epoch-000000000000000", "Epoch-0000000000000000"}) {
    EXPECT_FALSE(EpochOfName(name).has_value()) << name;
  }
}

TEST(DiskKeysTest, DamagedNamespacesAreDataLoss) {
  const std::string value = EncodeNamespaceValue("name", "encoding");
  EXPECT_EQ(*DecodeNamespaceValue("name", value), "encoding");
  EXPECT_TRUE(absl::IsDataLoss(DecodeNamespaceValue("other", value).status()));
  for (std::size_t i = 0; i < value.size(); ++i) {
    std::string flipped = value;
    flipped[i] = static_cast<char>(flipped[i] ^ 0x10);
    EXPECT_TRUE(absl::IsDataLoss(DecodeNamespaceValue("name", flipped).status())) << i;
    EXPECT_TRUE(absl::IsDataLoss(DecodeNamespaceValue("name", value.substr(0, i)).status())) << i;
  }
}

TEST(FaultyDiskStoreTest, KeepsTheContractUntilToldOtherwise) {
  FaultyDiskStore store;
  const TestBlock block = MakeBlock(1, 3, 100);
  const TestBlock later = MakeBlock(2, 3, 100);
  ASSERT_TRUE(WriteBlock(store, block).ok());
  EXPECT_TRUE(absl::IsAlreadyExists(WriteBlock(store, block)));
  ASSERT_TRUE(store.Flush().ok());
  ASSERT_TRUE(WriteBlock(store, later).ok());
  store.Crash();
  EXPECT_TRUE(absl::IsNotFound(store.Find(later.meta.id).status()));
  EXPECT_EQ(*ReadBlock(store, block.meta.id), block.pages);

  store.fail_write = 2;
  EXPECT_TRUE(WriteBlock(store, MakeBlock(3, 1, 10)).ok());
  EXPECT_TRUE(absl::IsUnavailable(WriteBlock(store, MakeBlock(4, 1, 10))));
  EXPECT_TRUE(WriteBlock(store, MakeBlock(4, 1, 10)).ok());
  store.full = true;
  EXPECT_TRUE(absl::IsResourceExhausted(WriteBlock(store, MakeBlock(5, 1, 10))));
  store.flip_read = true;
  EXPECT_NE(*ReadBlock(store, block.meta.id), block.pages);
  store.short_read = true;
  EXPECT_TRUE(absl::IsDataLoss(ReadBlock(store, block.meta.id).status()));
}

}  // namespace
}  // namespace kvmill
