// Parts of views: which bytes, in which order, and which of them are copied.
#include "client/kv_view.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

namespace kvmill {
namespace {

constexpr std::uint32_t kTokens = 7;
constexpr std::uint32_t kHeads = 4;
constexpr std::size_t kHeadBytes = 8;
constexpr std::size_t kRowBytes = kHeads * kHeadBytes;

class KvViewTest : public ::testing::Test {
 protected:
  KvViewTest() : array(kTokens * kRowBytes) {
    for (std::size_t i = 0; i < array.size(); ++i) array[i] = static_cast<std::byte>(i);
  }

  // What a visit of the heads [begin, begin + count) hands over.
  void Visit(const KvView& view, std::uint32_t begin, std::uint32_t count, std::size_t run_min) {
    bytes.clear();
    runs.clear();
    rooms.clear();
    VisitKvPart(
        view, {kTokens, begin, count, kHeadBytes}, run_min,
        [this](const std::byte* data, std::size_t size) {
          runs.push_back(size);
          bytes.insert(bytes.end(), data, data + size);
        },
        [this](std::size_t size) {
          rooms.push_back(size);
          bytes.resize(size);
          return bytes.data();
        });
  }
  // The same of `array`, head by head.
  std::vector<std::byte> Want(std::uint32_t begin, std::uint32_t count) const {
    std::vector<std::byte> want;
    for (std::uint32_t token = 0; token < kTokens; ++token) {
      const std::byte* const row = array.data() + token * kRowBytes;
      want.insert(want.end(), row + begin * kHeadBytes, row + (begin + count) * kHeadBytes);
    }
    return want;
  }
  KvView Array() const { return KvView::Array(array.data(), kHeads, kHeadBytes / 2); }

  std::vector<std::byte> array;
  std::vector<std::byte> bytes;
  std::vector<std::size_t> runs;
  std::vector<std::size_t> rooms;
};

TEST_F(KvViewTest, AWholeArrayIsOneRun) {
  Visit(Array(), 0, kHeads, kTokens * kRowBytes);
  EXPECT_EQ(runs, std::vector<std::size_t>{kTokens * kRowBytes});
  EXPECT_TRUE(rooms.empty());
  EXPECT_EQ(bytes, array);
}

TEST_F(KvViewTest, RunsThatAreTooShortAreCopiedToOneRoom) {
  Visit(Array(), 0, kHeads, kTokens * kRowBytes + 1);
  EXPECT_TRUE(runs.empty());
  EXPECT_EQ(rooms, std::vector<std::size_t>{kTokens * kRowBytes});
  EXPECT_EQ(bytes, array);
}

TEST_F(KvViewTest, SomeHeadsAreARunOfEachToken) {
  Visit(Array(), 1, 2, 2 * kHeadBytes);
  EXPECT_EQ(runs, std::vector<std::size_t>(kTokens, 2 * kHeadBytes));
  EXPECT_EQ(bytes, Want(1, 2));
  Visit(Array(), 3, 1, kHeadBytes);
  EXPECT_EQ(runs, std::vector<std::size_t>(kTokens, kHeadBytes));
  EXPECT_EQ(bytes, Want(3, 1));
  Visit(Array(), 1, 2, 2 * kHeadBytes + 1);
  EXPECT_EQ(rooms, std::vector<std::size_t>{kTokens * 2 * kHeadBytes});
  EXPECT_EQ(bytes, Want(1, 2));
}

TEST_F(KvViewTest, PagesAreRunsAndTheLastMayBeShorter) {
  // Three tokens a page, not in order, behind 16 bytes of something else.
  constexpr std::uint32_t kPageTokens = 3;
  constexpr std::size_t kOffset = 16;
  std::vector<std::vector<std::byte>> memory(3);
  std::vector<const std::byte*> pages;
  for (std::size_t page = 0; page < memory.size(); ++page) {
    memory[page].resize(kOffset + kPageTokens * kRowBytes);
    for (std::size_t token = page * kPageTokens;
         token < kTokens && token < (page + 1) * kPageTokens; ++token) {
      std::copy_n(array.data() + token * kRowBytes, kRowBytes,
                  memory[page].data() + kOffset + token % kPageTokens * kRowBytes);
    }
    pages.push_back(memory[page].data());
  }
  KvView view = Array();
  view.data = nullptr;
  view.pages = pages.data();
  view.offset_bytes = kOffset;
  view.page_tokens = kPageTokens;
  Visit(view, 0, kHeads, kPageTokens * kRowBytes);
  EXPECT_EQ(runs, (std::vector<std::size_t>{3 * kRowBytes, 3 * kRowBytes, kRowBytes}));
  EXPECT_EQ(bytes, array);
  Visit(view, 2, 2, kRowBytes);
  EXPECT_EQ(rooms, std::vector<std::size_t>{kTokens * 2 * kHeadBytes});
  EXPECT_EQ(bytes, Want(2, 2));
}

TEST_F(KvViewTest, HeadsApartAreCopiedWhateverTheirStride) {
  // The array holds them [heads, tokens], and from the last head to the first.
  std::vector<std::byte> turned(array.size());
  for (std::uint32_t token = 0; token < kTokens; ++token) {
    for (std::uint32_t head = 0; head < kHeads; ++head) {
      std::copy_n(array.data() + token * kRowBytes + head * kHeadBytes, kHeadBytes,
                  turned.data() + ((kHeads - 1 - head) * kTokens + token) * kHeadBytes);
    }
  }
  KvView view;
  view.data = turned.data() + (kHeads - 1) * kTokens * kHeadBytes;
  view.token_stride_bytes = kHeadBytes;
  view.head_stride_bytes = -static_cast<std::ptrdiff_t>(kTokens * kHeadBytes);
  Visit(view, 1, 3, 1);
  EXPECT_EQ(rooms, std::vector<std::size_t>{kTokens * 3 * kHeadBytes});
  EXPECT_EQ(bytes, Want(1, 3));
  Visit(view, 2, 1, kTokens * kHeadBytes);  // One head is adjacent.
  EXPECT_EQ(runs, std::vector<std::size_t>{kTokens * kHeadBytes});
  EXPECT_EQ(bytes, Want(2, 1));
}

}  // namespace
}  // namespace kvmill
