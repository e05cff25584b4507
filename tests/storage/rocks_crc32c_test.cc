#include "storage/rocks_crc32c.h"

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <string>

namespace rocksdb {
namespace crc32c {
std::uint32_t Extend(std::uint32_t init_crc, const char* data, std::size_t bytes);
}  // namespace crc32c
}  // namespace rocksdb

namespace kvmill {
namespace {

// The obvious loop: reflected Castagnoli polynomial, one bit at a time (RFC 3720, section 12.1).
std::uint32_t Crc32cByBits(std::uint32_t crc, const std::string& data) {
  crc = ~crc;
  for (const char c : data) {
    crc ^= static_cast<unsigned char>(c);
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) != 0 ? 0x82F63B78u : 0u);
  }
  return ~crc;
}

TEST(RocksCrc32cTest, GivesThePublishedChecksums) {
  EXPECT_EQ(rocksdb::crc32c::Extend(0, "123456789", 9), 0xE3069283u);
  const std::string zeros(32, '\0');  // RFC 3720, section B.4.
  EXPECT_EQ(rocksdb::crc32c::Extend(0, zeros.data(), zeros.size()), 0x8A9136AAu);
  const std::string ones(32, '\xFF');
  EXPECT_EQ(rocksdb::crc32c::Extend(0, ones.data(), ones.size()), 0x62A8AB43u);
  EXPECT_EQ(rocksdb::crc32c::Extend(0, "", 0), 0u);
}

TEST(RocksCrc32cTest, EqualsTheLoopAtEveryLengthOffsetAndCut) {
  std::string data(4200, '\0');
  std::uint32_t state = 1;
  for (char& c : data) c = static_cast<char>((state = state * 1664525u + 1013904223u) >> 24);
  for (std::size_t offset = 0; offset < 17; ++offset) {
    for (const std::size_t bytes :
         {1u, 2u, 7u, 8u, 15u, 16u, 63u, 64u, 65u, 255u, 1023u, 1024u, 4096u, 4183u}) {
      const std::string part = data.substr(offset, bytes);
      const std::uint32_t want = Crc32cByBits(0, part);
      const char* const at = data.data() + offset;
      EXPECT_EQ(rocksdb::crc32c::Extend(0, at, bytes), want) << offset << " " << bytes;
      const std::size_t cut = bytes / 3;
      const std::uint32_t head = rocksdb::crc32c::Extend(0, at, cut);
      EXPECT_EQ(rocksdb::crc32c::Extend(head, at + cut, bytes - cut), want)
          << offset << " " << bytes;
    }
  }
}

}  // namespace
}  // namespace kvmill
