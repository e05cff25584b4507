#include "client/units.h"

#include <array>
#include <cmath>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"

namespace kvmill {
namespace {

constexpr std::array<std::pair<absl::string_view, std::uint64_t>, 10> kUnits = {{
    {"", 1},
    {"B", 1},
    {"KiB", std::uint64_t{1} << 10},
    {"MiB", std::uint64_t{1} << 20},
    {"GiB", std::uint64_t{1} << 30},
    {"TiB", std::uint64_t{1} << 40},
    {"KB", 1'000},
    {"MB", 1'000'000},
    {"GB", 1'000'000'000},
    {"TB", 1'000'000'000'000},
}};

}  // namespace

absl::StatusOr<std::uint64_t> ParseBytes(absl::string_view text) {
  const auto bad = [&] {
    return absl::InvalidArgumentError(
        absl::StrCat("size \"", text,
                     "\": want a number with B, KiB, MiB, GiB, TiB, KB, MB, GB or "
                     "TB, a whole number of bytes below 2^63"));
  };
  const std::size_t number_end = text.find_first_not_of("0123456789.");
  const absl::string_view number = text.substr(0, number_end);
  const absl::string_view unit =
      number_end == absl::string_view::npos ? absl::string_view() : text.substr(number_end);
  if (number.empty()) return bad();
  for (const auto& [name, factor] : kUnits) {
    if (unit != name) continue;
    std::uint64_t whole = 0;
    if (absl::SimpleAtoi(number, &whole)) {
      if (whole > (std::uint64_t{1} << 63) / factor) return bad();
      return whole * factor;
    }
    double value = 0;
    if (!absl::SimpleAtod(number, &value)) return bad();
    value *= static_cast<double>(factor);
    if (value != std::floor(value) || value > 9.0e18) return bad();
    return static_cast<std::uint64_t>(value);
  }
  return bad();
}

std::string FormatBytes(std::uint64_t bytes) {
  for (std::size_t i = 5; i >= 2; --i) {  // TiB down to KiB.
    const std::uint64_t factor = kUnits[i].second;
    if (bytes != 0 && bytes % factor == 0) return absl::StrCat(bytes / factor, kUnits[i].first);
  }
  return absl::StrCat(bytes);
}

absl::StatusOr<absl::Duration> ParseDuration(absl::string_view text) {
  absl::Duration duration;
  if (!absl::ParseDuration(text, &duration)) {
    return absl::InvalidArgumentError(
        absl::StrCat("duration \"", text, "\": want a number with ms, s, m or h"));
  }
  if (duration < absl::ZeroDuration()) {
    return absl::InvalidArgumentError(absl::StrCat("duration \"", text, "\": want at least 0"));
  }
  return duration;
}

}  // namespace kvmill
