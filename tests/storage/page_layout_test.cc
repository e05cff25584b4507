#include "storage/core/page_layout.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <random>
#include <vector>

#include "storage/core/checksum.h"
#include "tests/long_form.h"

namespace kvmill {
namespace {

using ::testing::HasSubstr;

PageIdentity Identity(std::size_t heads, std::size_t tokens = 128) {
  PageIdentity identity;
  for (std::size_t i = 0; i < identity.fingerprint.size(); ++i) {
    identity.fingerprint[i] = static_cast<std::byte>(i + 1);
  }
  identity.key =
      *BlockKey::FromHex("a0a1a2a3a4a5a6a7a8a9aaabacadaeafb0b1b2b3b4b5b6b7b8b9babbbcbdbebf");
  identity.group_index = 1;
  identity.layer = 7;
  identity.head_count = static_cast<std::uint16_t>(heads);
  identity.token_count = static_cast<std::uint16_t>(tokens);
  identity.source_dtype = DType::kBFloat16;
  identity.frame = Frame::kRotated;
  return identity;
}

std::vector<std::byte> MakePage(const PageIdentity& identity, const std::vector<SlotKind>& kinds) {
  std::vector<std::byte> page(PageBytes(identity.format, identity.token_count, kinds),
                              std::byte{0xEE});
  InitPage(identity, kinds, absl::MakeSpan(page));
  for (std::size_t head = 0; head < kinds.size(); ++head) {
    const auto contents = SlotContents(absl::MakeSpan(page), head);
    for (std::size_t i = 0; i < contents.size(); ++i) {
      contents[i] = static_cast<std::byte>(i * 31 + head);
    }
  }
  SealPage(absl::MakeSpan(page));
  return page;
}

// A page whose writer was wrong but sealed it all the same.
void Reseal(std::vector<std::byte>& page) { SealHeader(absl::MakeSpan(page)); }

template <typename T>
void Poke(std::vector<std::byte>& page, std::size_t offset, T value) {
  std::memcpy(page.data() + offset, &value, sizeof(value));
}

const std::vector<SlotKind> kMixed = {SlotKind::kTile, SlotKind::kRaw, SlotKind::kAbsent,
                                      SlotKind::kTile};

TEST(PageLayoutTest, OffsetsAreTheDocumentedOnes) {
  EXPECT_EQ(offsetof(PageHeader, version), 4u);
  EXPECT_EQ(offsetof(PageHeader, head_count), 6u);
  EXPECT_EQ(offsetof(PageHeader, page_bytes), 8u);
  EXPECT_EQ(offsetof(PageHeader, fingerprint), 16u);
  EXPECT_EQ(offsetof(PageHeader, key), 32u);
  EXPECT_EQ(offsetof(PageHeader, key_bytes), 96u);
  EXPECT_EQ(offsetof(PageHeader, group_index), 97u);
  EXPECT_EQ(offsetof(PageHeader, layer), 98u);
  EXPECT_EQ(offsetof(PageHeader, token_count), 100u);
  EXPECT_EQ(offsetof(PageHeader, head_dim), 102u);
  EXPECT_EQ(offsetof(PageHeader, block_tokens), 104u);
  EXPECT_EQ(offsetof(PageHeader, key_bits), 106u);
  EXPECT_EQ(offsetof(PageHeader, value_bits), 107u);
  EXPECT_EQ(offsetof(PageHeader, source_dtype), 108u);
  EXPECT_EQ(offsetof(PageHeader, frame), 109u);
  EXPECT_EQ(offsetof(PageHeader, checksum), 112u);
  EXPECT_EQ(offsetof(PageSlot, offset_bytes), 4u);
  EXPECT_EQ(offsetof(PageSlot, length_bytes), 8u);
  EXPECT_EQ(offsetof(PageSlot, checksum), 16u);
}

TEST(PageLayoutTest, SizesAddUp) {
  const TileFormat format;  // k4v2_g128, D 128: records of 13824 bytes.
  ASSERT_EQ(RecordBytes(format), 13824u);
  EXPECT_EQ(PageHeaderBytes(1), 192u);
  EXPECT_EQ(PageHeaderBytes(8), 320u);
  EXPECT_EQ(UniformPageBytes(format, 128, SlotKind::kTile, 8), 320u + 8 * 13824u);
  EXPECT_EQ(UniformPageBytes(format, 128, SlotKind::kRaw, 8), 320u + 8 * 65536u);
  EXPECT_EQ(UniformPageBytes(format, 1, SlotKind::kRaw, 1), 192u + 512u);
  EXPECT_EQ(UniformPageBytes(format, 128, SlotKind::kAbsent, 8), 320u);
  EXPECT_EQ(PageBytes(format, 128, kMixed), 256u + 2 * 13824u + 65536u);
  for (std::size_t i = 0; i < kTileFormatCount; ++i) {
    const TileFormat f = TileFormatAt(i);
    EXPECT_EQ(UniformPageBytes(f, f.group, SlotKind::kTile, 3) % kPageAlignment, 0u);
    EXPECT_EQ(PageBytes(f, f.group, std::vector<SlotKind>(3, SlotKind::kTile)),
              UniformPageBytes(f, f.group, SlotKind::kTile, 3));
  }
}

TEST(PageLayoutTest, SealedPageReadsBack) {
  const PageIdentity identity = Identity(kMixed.size());
  const std::vector<std::byte> page = MakePage(identity, kMixed);
  const auto view = PageView::Parse(page);
  ASSERT_TRUE(view.ok()) << view.status();
  ASSERT_EQ(view->head_count(), kMixed.size());
  std::size_t offset = PageHeaderBytes(kMixed.size());
  for (std::size_t head = 0; head < kMixed.size(); ++head) {
    EXPECT_EQ(view->slot(head).kind, kMixed[head]);
    const auto contents = view->contents(head);
    EXPECT_EQ(contents.size(), SlotBytes(identity.format, kMixed[head], 128));
    if (contents.empty()) continue;
    EXPECT_EQ(contents.data() - page.data(), static_cast<std::ptrdiff_t>(offset));
    EXPECT_EQ(offset % kPageAlignment, 0u);
    EXPECT_EQ(contents[5], static_cast<std::byte>(5 * 31 + head));
    EXPECT_EQ(view->slot(head).checksum, Checksum(contents));
    EXPECT_TRUE(view->VerifySlot(head).ok());
    offset += (contents.size() + 63) / 64 * 64;
  }
  EXPECT_EQ(offset, page.size());
  const PageIdentity got = view->identity();
  EXPECT_EQ(got.fingerprint, identity.fingerprint);
  EXPECT_EQ(got.key, identity.key);
  EXPECT_EQ(got.layer, 7);
  EXPECT_TRUE(VerifyPage(identity, page).ok());
}

// A page on a GPU: its header was copied here, its contents are places that nobody looks at.
TEST(PageLayoutTest, APageThatCannotBeReadIsParsedByItsTable) {
  const std::vector<std::byte> page = MakePage(Identity(4), kMixed);
  const std::vector<std::byte> table(page.begin(), page.begin() + PageHeaderBytes(4));
  const std::vector<std::byte> hidden(page.size(), std::byte{0xEE});
  const auto view = PageView::ParseApart(table, hidden);
  ASSERT_TRUE(view.ok()) << view.status();
  const PageView whole = *PageView::Parse(page);
  for (std::size_t head = 0; head < 4; ++head) {
    EXPECT_EQ(view->slot(head).kind, kMixed[head]);
    EXPECT_EQ(view->contents(head).size(), whole.contents(head).size());
    EXPECT_EQ(view->contents(head).data() - hidden.data(),
              whole.contents(head).data() - page.data());
  }
  EXPECT_EQ(view->identity().layer, 7);
  EXPECT_FALSE(PageView::ParseApart(absl::MakeSpan(table).first(table.size() - 64), hidden).ok());
  EXPECT_FALSE(PageView::ParseApart(table, absl::MakeSpan(hidden).first(hidden.size() - 64)).ok());
  EXPECT_FALSE(PageView::ParseApart(absl::MakeSpan(table).first(100), hidden).ok());
}

TEST(PageLayoutTest, EqualPagesHaveEqualBytesWhateverWasThereBefore) {
  const PageIdentity identity = Identity(2, 3);
  const std::vector<SlotKind> kinds(2, SlotKind::kRaw);
  std::vector<std::byte> a = MakePage(identity, kinds);
  std::vector<std::byte> b(a.size(), std::byte{0x11});
  InitPage(identity, kinds, absl::MakeSpan(b));
  for (std::size_t head = 0; head < 2; ++head) {
    const auto from = SlotContents(absl::MakeSpan(a), head);
    std::memcpy(SlotContents(absl::MakeSpan(b), head).data(), from.data(), from.size());
    SealSlot(absl::MakeSpan(b), head);
  }
  SealHeader(absl::MakeSpan(b));
  EXPECT_EQ(a, b);
}

TEST(PageLayoutTest, EveryFlippedBitOfHeaderAndSlotTableIsDetected) {
  const PageIdentity identity = Identity(kMixed.size());
  std::vector<std::byte> page = MakePage(identity, kMixed);
  const std::size_t covered = sizeof(PageHeader) + kMixed.size() * sizeof(PageSlot);
  for (std::size_t bit = 0; bit < covered * 8; ++bit) {
    page[bit / 8] ^= std::byte{1} << (bit % 8);
    EXPECT_EQ(PageView::Parse(page).status().code(), absl::StatusCode::kDataLoss) << bit;
    page[bit / 8] ^= std::byte{1} << (bit % 8);
  }
  EXPECT_TRUE(PageView::Parse(page).ok());
}

TEST(PageLayoutTest, FlippedContentsAreDetectedAndTheHeadIsNamed) {
  const PageIdentity identity = Identity(kMixed.size());
  std::vector<std::byte> page = MakePage(identity, kMixed);
  const auto view = PageView::Parse(page);
  ASSERT_TRUE(view.ok());
  for (std::size_t head : {0u, 1u, 3u}) {
    const PageSlot slot = view->slot(head);
    for (std::size_t at : {0u, 1u, slot.length_bytes / 2, slot.length_bytes - 1}) {
      page[slot.offset_bytes + at] ^= std::byte{0x10};
      const absl::Status status = VerifyPage(identity, page);
      EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
      EXPECT_THAT(std::string(status.message()),
                  HasSubstr("layer 7 head " + std::to_string(head) + ": xxh3 0x"));
      for (std::size_t other = 0; other < kMixed.size(); ++other) {
        EXPECT_EQ(view->VerifySlot(other).ok(), other != head);
      }
      page[slot.offset_bytes + at] ^= std::byte{0x10};
    }
  }
}

TEST(PageLayoutTest, AnotherPageIsRefusedNamingTheField) {
  const PageIdentity want = Identity(kMixed.size());
  const struct {
    const char* field;
    std::function<void(PageIdentity&)> change;
  } cases[] = {
      {"page namespace 02", [](PageIdentity& i) { i.fingerprint[0] = std::byte{2}; }},
      {"page key a0a1", [](PageIdentity& i) { i.key = *BlockKey::FromHex("a0a1"); }},
      {"page layer group 2, want 1", [](PageIdentity& i) { i.group_index = 2; }},
      {"page layer 8, want 7", [](PageIdentity& i) { i.layer = 8; }},
      {"page token count 127, want 128", [](PageIdentity& i) { i.token_count = 127; }},
      {"page format k2v2_g128", [](PageIdentity& i) { i.format.key_bits = 2; }},
      {"page format k4v4_g128", [](PageIdentity& i) { i.format.value_bits = 4; }},
      {"D 64", [](PageIdentity& i) { i.format.head_dim = 64; }},
      {"source dtype", [](PageIdentity& i) { i.source_dtype = DType::kFloat16; }},
      {"frame", [](PageIdentity& i) { i.frame = Frame::kModel; }},
  };
  for (const auto& c : cases) {
    PageIdentity other = want;
    c.change(other);
    const absl::Status status = VerifyPage(want, MakePage(other, kMixed));
    EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << c.field;
    EXPECT_THAT(std::string(status.message()), HasSubstr(c.field));
  }
  PageIdentity wider = Identity(5);
  std::vector<SlotKind> kinds = kMixed;
  kinds.push_back(SlotKind::kTile);
  EXPECT_THAT(std::string(VerifyPage(want, MakePage(wider, kinds)).message()),
              HasSubstr("page head count 5, want 4"));
}

TEST(PageLayoutTest, WrongSizesAreRefused) {
  const PageIdentity identity = Identity(kMixed.size());
  std::vector<std::byte> page = MakePage(identity, kMixed);
  for (std::size_t size : {std::size_t{0}, std::size_t{1}, sizeof(PageHeader) - 1,
                           sizeof(PageHeader), page.size() - 1}) {
    EXPECT_EQ(PageView::Parse(absl::MakeConstSpan(page).first(size)).status().code(),
              absl::StatusCode::kDataLoss)
        << size;
  }
  page.push_back(std::byte{});
  EXPECT_EQ(PageView::Parse(page).status().code(), absl::StatusCode::kDataLoss);
}

// The checksum is right and the page still wrong: whoever wrote it was.
TEST(PageLayoutTest, WellSealedNonsenseIsRefused) {
  const std::size_t slot0 = sizeof(PageHeader);
  const std::size_t absent = sizeof(PageHeader) + 2 * sizeof(PageSlot);
  const struct {
    const char* message;
    std::function<void(std::vector<std::byte>&)> change;
  } cases[] = {
      {"key bytes 0", [](auto& p) { Poke<std::uint8_t>(p, 96, 0); }},
      {"key bytes 65", [](auto& p) { Poke<std::uint8_t>(p, 96, 65); }},
      {"token count 0", [](auto& p) { Poke<std::uint16_t>(p, 100, 0); }},
      {"token count 129", [](auto& p) { Poke<std::uint16_t>(p, 100, 129); }},
      {"format", [](auto& p) { Poke<std::uint16_t>(p, 102, 100); }},
      {"format", [](auto& p) { Poke<std::uint8_t>(p, 106, 5); }},
      {"source dtype 2", [](auto& p) { Poke<std::uint8_t>(p, 108, 2); }},
      {"frame 2", [](auto& p) { Poke<std::uint8_t>(p, 109, 2); }},
      {"slot 0 kind 3", [=](auto& p) { Poke<std::uint8_t>(p, slot0, 3); }},
      {"slot 0 length", [=](auto& p) { Poke<std::uint32_t>(p, slot0 + 8, 13825); }},
      {"slot 0 length", [=](auto& p) { Poke<std::uint8_t>(p, slot0, 2); }},
      {"slot 0 offset", [=](auto& p) { Poke<std::uint32_t>(p, slot0 + 4, 0); }},
      {"slot 0 offset", [=](auto& p) { Poke<std::uint32_t>(p, slot0 + 4, 0xFFFFFFC0); }},
      {"slot 2 is absent", [=](auto& p) { Poke<std::uint32_t>(p, absent + 4, 0xFFFFFFC0); }},
      {"slot 2 is absent", [=](auto& p) { Poke<std::uint32_t>(p, absent + 8, 64); }},
  };
  for (const auto& c : cases) {
    std::vector<std::byte> page = MakePage(Identity(kMixed.size()), kMixed);
    c.change(page);
    Reseal(page);
    const absl::Status status = PageView::Parse(page).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << c.message;
    EXPECT_THAT(std::string(status.message()), HasSubstr(c.message));
  }
  std::vector<std::byte> page = MakePage(Identity(kMixed.size()), kMixed);
  Poke<std::uint16_t>(page, 6, 0);
  Reseal(page);
  EXPECT_THAT(std::string(PageView::Parse(page).status().message()), HasSubstr("head count 0"));
}

// Whatever the bytes: an error, or a page whose contents can be read without leaving it.
TEST(PageLayoutTest, ParseTakesAnyBytes) {
  std::mt19937_64 random(20261129);
  const std::vector<std::byte> good = MakePage(Identity(kMixed.size()), kMixed);
  const std::size_t covered = sizeof(PageHeader) + kMixed.size() * sizeof(PageSlot);
  int accepted = 0;
  for (int round = 0; round < ShortOrLong(20000, 1'000'000); ++round) {
    std::vector<std::byte> page = good;
    if (round % 8 == 0) {
      page.resize(random() % 512);
      for (std::byte& b : page) b = static_cast<std::byte>(random());
    } else {
      for (std::uint64_t flips = 1 + random() % 3; flips > 0; --flips) {
        page[random() % covered] = static_cast<std::byte>(random());
      }
      // The number of heads decides what is sealed; it must not lead outside here either.
      std::uint16_t heads = 0;
      std::memcpy(&heads, page.data() + 6, sizeof(heads));
      if (PageHeaderBytes(heads) <= page.size()) Reseal(page);
    }
    const auto view = PageView::Parse(page);
    if (!view.ok()) {
      EXPECT_EQ(view.status().code(), absl::StatusCode::kDataLoss);
      continue;
    }
    ++accepted;
    for (std::size_t head = 0; head < view->head_count(); ++head) {
      const auto contents = view->contents(head);
      ASSERT_GE(contents.data(), page.data());
      ASSERT_LE(contents.data() + contents.size(), page.data() + page.size());
      (void)view->VerifySlot(head).ok();
    }
    EXPECT_EQ(view->identity().head_count, view->head_count());
  }
  EXPECT_GT(accepted, 0);
}

}  // namespace
}  // namespace kvmill
