// Tile formats as values, and the byte layout of a record.
//
// One tile is one block of `group` tokens of one KV head. Its record is eight sections without
// padding:
//
//   K codes | K S[D] | K Z[D] | K T[G] | V codes | V T[D] | V S[G] | V Z[G]
//
// K codes are [D channels][G tokens], V codes [G tokens][D channels]; 8/bits codes per byte along
// the last dimension, low bits first. With 3 bits a row is its codes' low two bits, packed as codes
// of 2 bits are, then their high bits, 8 per byte, low bits first. S (scale), Z (zero) and T (the
// other axis) are fp16, little-endian. The value of a code q is
//
//   K[d,t] = (q * S[d] + Z[d]) * T[t]          V[t,d] = (q * S[t] + Z[t]) * T[d]
//
// in the rotated frame.
// Source of the format: arXiv:2606.03458. Everything here is constexpr and thread-safe; nothing
// allocates but ToString.
#ifndef KVMILL_KERNELS_TILE_FORMAT_H_
#define KVMILL_KERNELS_TILE_FORMAT_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"

namespace kvmill {

inline constexpr std::uint32_t kHeadDimMax = 256;
inline constexpr std::uint32_t kGroupMax = 128;

// A value type: two formats are the same when their four numbers are.
struct TileFormat {
  std::uint8_t key_bits = 4;     // 2, 3 or 4.
  std::uint8_t value_bits = 2;   // 2 or 4.
  std::uint16_t group = 128;     // Tokens of a tile, G: 64 or 128.
  std::uint16_t head_dim = 128;  // Channels of a head, D: 64, 128 or 256.

  friend constexpr bool operator==(const TileFormat& a, const TileFormat& b) {
    return a.key_bits == b.key_bits && a.value_bits == b.value_bits && a.group == b.group &&
           a.head_dim == b.head_dim;
  }
  friend constexpr bool operator!=(const TileFormat& a, const TileFormat& b) { return !(a == b); }
};

// Byte offsets of the sections of a record, and its size.
struct RecordLayout {
  std::size_t k_codes, k_scale, k_zero, k_token;    // K codes, S[D], Z[D], T[G].
  std::size_t v_codes, v_channel, v_scale, v_zero;  // V codes, T[D], S[G], Z[G].
  std::size_t bytes;                                // Of the whole record.
};

constexpr RecordLayout LayoutOf(const TileFormat& f) {
  const std::size_t d = f.head_dim;
  const std::size_t g = f.group;
  RecordLayout l{};
  l.k_codes = 0;
  l.k_scale = l.k_codes + d * g * f.key_bits / 8;
  l.k_zero = l.k_scale + 2 * d;
  l.k_token = l.k_zero + 2 * d;
  l.v_codes = l.k_token + 2 * g;
  l.v_channel = l.v_codes + d * g * f.value_bits / 8;
  l.v_scale = l.v_channel + 2 * d;
  l.v_zero = l.v_scale + 2 * g;
  l.bytes = l.v_zero + 2 * g;
  return l;
}

constexpr std::size_t RecordBytes(const TileFormat& f) { return LayoutOf(f).bytes; }

// 16-bit K and V of the same tokens: what a record is compared with, and the size of a raw head of
// a full block.
constexpr std::size_t RawBytes(const TileFormat& f, std::size_t token_count) {
  return std::size_t{2} * 2 * f.head_dim * token_count;
}

// OK, or INVALID_ARGUMENT naming the field, its value and the allowed ones.
absl::Status ValidateTileFormat(const TileFormat& format);

// "k4v2_g128" (and head_dim, which the name does not carry) to a format. INVALID_ARGUMENT names
// what is wrong with `name`.
absl::StatusOr<TileFormat> ParseTileFormat(std::string_view name, std::uint32_t head_dim);

// "k4v2_g128": without head_dim, the form that ParseTileFormat reads.
std::string ToString(const TileFormat& format);

// Every supported format, for tests and tables: 6 bit pairs x 2 groups x 3 head_dims; those with
// 3-bit keys come last.
constexpr std::size_t kTileFormatCount = 36;
TileFormat TileFormatAt(std::size_t index);  // index < kTileFormatCount.

}  // namespace kvmill

#endif  // KVMILL_KERNELS_TILE_FORMAT_H_
