// Numbers as people read them. Sizes are parsed by client/units.h.
#ifndef KVMILL_CLIENT_CLI_HUMAN_H_
#define KVMILL_CLIENT_CLI_HUMAN_H_

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace kvmill::cli {

// As ParseDuration in client/units.h, but a bare number is seconds, and it must be more than 0 and
// at most 365 days. INVALID_ARGUMENT naming the text.
absl::StatusOr<absl::Duration> ParseTimeout(absl::string_view text);

std::string HumanBytes(std::uint64_t bytes);        // "13.5 KiB"
std::string HumanCount(std::uint64_t count);        // "1,918"
std::string HumanMicroseconds(std::uint64_t us);    // "1.25 ms"
std::string HumanSeconds(double seconds);           // "3.2 s", "4 min 10 s", "2 h 5 min"
std::string HumanPercent(double fraction);          // "4.45 %"
std::string HumanNumber(double value, int digits);  // Fixed point; "-" when not finite.

}  // namespace kvmill::cli

#endif  // KVMILL_CLIENT_CLI_HUMAN_H_
