// The score of a member for a shard, down to the last bit; docs/formats.md says the same in words.
//
// Part of placement.h, apart because the arithmetic is a contract and its use is not. Only +, -, *
// and / of doubles and integers: IEEE 754 fixes their results (nothing is contracted or reordered,
// cmake/KvmillTargets.cmake), while std::log differs between C libraries.
#ifndef KVMILL_SERVICE_CLUSTER_SCORE_H_
#define KVMILL_SERVICE_CLUSTER_SCORE_H_

#include <array>
#include <bit>
#include <cstdint>
#include <string>
#include <string_view>

#include "absl/types/span.h"
#include "storage/core/checksum.h"

namespace kvmill {

using MemberWords = std::array<std::uint64_t, 2>;
using ShardWords = std::array<std::uint64_t, 2>;

inline MemberWords WordsOfMember(std::string_view id) {
  MemberWords words;
  for (std::size_t i = 0; i < 2; ++i) {
    std::string bytes(id);
    bytes.push_back(static_cast<char>(i));
    words[i] = Checksum({reinterpret_cast<const std::byte*>(bytes.data()), bytes.size()});
  }
  return words;
}

// Number `n` of the sequence SplitMix64 (Steele, Lea, Flood 2014) from the state 0.
inline std::uint64_t SplitMix(std::uint64_t n) {
  std::uint64_t z = (n + 1) * 0x9e3779b97f4a7c15;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
  z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
  return z ^ (z >> 31);
}

inline ShardWords WordsOfShard(std::uint32_t shard) {
  return {SplitMix(2 * std::uint64_t{shard}), SplitMix(2 * std::uint64_t{shard} + 1)};
}

// 64 random bits of the pair.
inline std::uint64_t Draw(const MemberWords& member, const ShardWords& shard) {
  __extension__ using Wide = unsigned __int128;
  const Wide product = Wide{member[0] ^ shard[0]} * (member[1] ^ shard[1]);
  return static_cast<std::uint64_t>(product >> 64) ^ static_cast<std::uint64_t>(product);
}

// u, in (0, 1): the middle of one of 2^52 equal parts. Exact.
inline double Uniform(std::uint64_t draw) {
  return (static_cast<double>(static_cast<std::int64_t>(draw >> 12)) + 0.5) * 0x1p-52;
}

// 1 - u, exact.
inline double Distance(std::uint64_t draw) {
  return (static_cast<double>(static_cast<std::int64_t>(~draw >> 12)) + 0.5) * 0x1p-52;
}

// -ln(u): u = m·2^e with m in [0.75, 1.5), ln(m) = 2·artanh(s) with s = (m - 1) / (m + 1), as its
// series up to s^21, Horner's scheme. Within 1e-15 of the truth, not that anything needed it.
inline double MinusLog(double u) {
  std::uint64_t bits = std::bit_cast<std::uint64_t>(u);
  const std::uint64_t rounded = bits + (std::uint64_t{1} << 51);  // m >= 1.5: the next e.
  const double e = static_cast<double>(static_cast<std::int64_t>(rounded >> 52) - 1023);
  bits -= (static_cast<std::uint64_t>(static_cast<std::int64_t>(rounded >> 52) - 1023)) << 52;
  const double m = std::bit_cast<double>(bits);
  const double s = (m - 1.0) / (m + 1.0);
  const double z = s * s;
  constexpr std::array<double, 10> kTerms = {1.0 / 19, 1.0 / 17, 1.0 / 15, 1.0 / 13, 1.0 / 11,
                                             1.0 / 9,  1.0 / 7,  1.0 / 5,  1.0 / 3,  1.0};
  double sum = 1.0 / 21;
  for (const double term : kTerms) sum = sum * z + term;
  return -(e * 0x1.62e42fefa39efp-1 + 2.0 * s * sum);
}

inline double Score(std::uint64_t draw, double inverse_weight) {
  return MinusLog(Uniform(draw)) * inverse_weight;
}

}  // namespace kvmill

#endif  // KVMILL_SERVICE_CLUSTER_SCORE_H_
