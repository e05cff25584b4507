#include "kernels/tile_format.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace kvmill {
namespace {

constexpr std::uint8_t kKeyBits[] = {2, 3, 4};
constexpr std::uint8_t kValueBits[] = {2, 4};
constexpr std::uint16_t kGroups[] = {64, 128};
constexpr std::uint16_t kHeadDims[] = {64, 128, 256};

template <typename T, std::size_t N>
bool IsOneOf(T value, const T (&allowed)[N]) {
  for (T a : allowed) {
    if (a == value) return true;
  }
  return false;
}

absl::Status BadName(std::string_view name) {
  return absl::InvalidArgumentError(
      absl::StrCat("format \"", absl::string_view(name.data(), name.size()),
                   "\": want k{2,3,4}v{2,4}_g{64,128}, for example k4v2_g128"));
}

}  // namespace

absl::Status ValidateTileFormat(const TileFormat& f) {
  if (!IsOneOf(f.key_bits, kKeyBits)) {
    return absl::InvalidArgumentError(absl::StrCat("key_bits ", f.key_bits, ": want 2, 3 or 4"));
  }
  if (!IsOneOf(f.value_bits, kValueBits)) {
    return absl::InvalidArgumentError(absl::StrCat("value_bits ", f.value_bits, ": want 2 or 4"));
  }
  if (!IsOneOf(f.group, kGroups)) {
    return absl::InvalidArgumentError(absl::StrCat("group ", f.group, ": want 64 or 128"));
  }
  if (!IsOneOf(f.head_dim, kHeadDims)) {
    return absl::InvalidArgumentError(
        absl::StrCat("head_dim ", f.head_dim, ": want 64, 128 or 256"));
  }
  return absl::OkStatus();
}

absl::StatusOr<TileFormat> ParseTileFormat(std::string_view name, std::uint32_t head_dim) {
  // k4v2_g64, k4v2_g128: single-digit widths at fixed places, then the group.
  const std::size_t size = name.size();
  if (size < 8 || size > 9 || name[0] != 'k' || name[2] != 'v' || name.substr(4, 2) != "_g" ||
      name[6] == '0') {
    return BadName(name);
  }
  std::uint16_t group = 0;
  for (const std::size_t digit : {1u, 3u, 6u, 7u, 8u}) {
    if (digit >= size) continue;
    if (name[digit] < '0' || name[digit] > '9') return BadName(name);
    if (digit >= 6) group = static_cast<std::uint16_t>(group * 10 + (name[digit] - '0'));
  }
  if (head_dim > kHeadDimMax) {
    return absl::InvalidArgumentError(absl::StrCat("head_dim ", head_dim, ": want 64, 128 or 256"));
  }
  TileFormat format;
  format.key_bits = static_cast<std::uint8_t>(name[1] - '0');
  format.value_bits = static_cast<std::uint8_t>(name[3] - '0');
  format.group = group;
  format.head_dim = static_cast<std::uint16_t>(head_dim);
  absl::Status valid = ValidateTileFormat(format);
  if (!valid.ok()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "format \"", absl::string_view(name.data(), name.size()), "\": ", valid.message()));
  }
  return format;
}

std::string ToString(const TileFormat& f) {
  return absl::StrCat("k", f.key_bits, "v", f.value_bits, "_g", f.group);
}

TileFormat TileFormatAt(std::size_t index) {
  constexpr std::size_t kWithoutThree = 24;
  const bool three = index >= kWithoutThree;
  const std::size_t rest = three ? index - kWithoutThree : index / 2;
  TileFormat f;
  f.key_bits = three ? 3 : index % 2 == 0 ? 2 : 4;
  f.value_bits = kValueBits[rest % 2];
  f.group = kGroups[rest / 2 % 2];
  f.head_dim = kHeadDims[rest / 4 % 3];
  return f;
}

}  // namespace kvmill
