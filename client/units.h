// Sizes and durations as people write them, in flags and configuration files of the daemon.
#ifndef KVMILL_CLIENT_UNITS_H_
#define KVMILL_CLIENT_UNITS_H_

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace kvmill {

// "4GiB", "512MiB", "1.5GB", "4096": a number and B, KiB, MiB, GiB, TiB (1024) or KB, MB, GB, TB
// (1000); without a unit bytes. INVALID_ARGUMENT naming the text when it is none, not a whole
// number of bytes, or above 2^63.
absl::StatusOr<std::uint64_t> ParseBytes(absl::string_view text);

// The shortest exact form with a binary unit: 4294967296 is "4GiB", 1000 is "1000".
std::string FormatBytes(std::uint64_t bytes);

// "250ms", "1.5s", "2m", "1h30m": a unit is needed (but for 0). INVALID_ARGUMENT when it is none,
// or negative.
absl::StatusOr<absl::Duration> ParseDuration(absl::string_view text);

}  // namespace kvmill

#endif  // KVMILL_CLIENT_UNITS_H_
