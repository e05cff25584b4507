#include "client/cli/human.h"

#include <array>
#include <cmath>
#include <cstddef>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "client/units.h"

namespace kvmill::cli {

absl::StatusOr<absl::Duration> ParseTimeout(absl::string_view text) {
  absl::Duration duration;
  double seconds = 0;
  if (absl::SimpleAtod(text, &seconds)) {
    duration = absl::Seconds(seconds);
  } else if (!absl::ParseDuration(text, &duration)) {
    return ParseDuration(text).status();
  }
  if (!(duration > absl::ZeroDuration()) || duration > absl::Hours(24 * 365)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "'", text, "' must be more than 0 and at most 8760h; write for example 500ms or 30s"));
  }
  return duration;
}

std::string HumanBytes(std::uint64_t bytes) {
  constexpr std::array<const char*, 5> kUnits = {"B", "KiB", "MiB", "GiB", "TiB"};
  double value = static_cast<double>(bytes);
  std::size_t unit = 0;
  while (value >= 1024 && unit + 1 < kUnits.size()) {
    value /= 1024;
    ++unit;
  }
  if (unit == 0) return absl::StrCat(bytes, " B");
  return absl::StrFormat("%.*f %s", value < 10 ? 2 : 1, value, kUnits[unit]);
}

std::string HumanCount(std::uint64_t count) {
  const std::string digits = absl::StrCat(count);
  std::string grouped;
  for (std::size_t i = 0; i < digits.size(); ++i) {
    if (i > 0 && (digits.size() - i) % 3 == 0) grouped.push_back(',');
    grouped.push_back(digits[i]);
  }
  return grouped;
}

std::string HumanMicroseconds(std::uint64_t us) {
  if (us < 1000) return absl::StrCat(us, " us");
  if (us < 1000000) return absl::StrFormat("%.2f ms", static_cast<double>(us) / 1e3);
  return HumanSeconds(static_cast<double>(us) / 1e6);
}

std::string HumanSeconds(double seconds) {
  if (seconds < 1) return absl::StrFormat("%.0f ms", seconds * 1e3);
  if (seconds < 60) return absl::StrFormat("%.1f s", seconds);
  const std::int64_t whole = std::llround(seconds);
  if (whole < 3600) return absl::StrFormat("%d min %d s", whole / 60, whole % 60);
  if (whole < 172800) return absl::StrFormat("%d h %d min", whole / 3600, whole % 3600 / 60);
  return absl::StrFormat("%d d %d h", whole / 86400, whole % 86400 / 3600);
}

std::string HumanPercent(double fraction) { return absl::StrFormat("%.2f %%", fraction * 100); }

std::string HumanNumber(double value, int digits) {
  return std::isfinite(value) ? absl::StrFormat("%.*f", digits, value) : "-";
}

}  // namespace kvmill::cli
