// When room is made in a memory tier before somebody needs it.
#ifndef KVMILL_STORAGE_WATERMARKS_H_
#define KVMILL_STORAGE_WATERMARKS_H_

#include <cstdint>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace kvmill {

// In percent of the tier's capacity. Once more than `high` is used, blocks leave in the background
// until no more than `low` is. A tier is never more than full: a high mark of 100 is none.
struct Watermarks {
  std::uint32_t high_percent = 100;
  std::uint32_t low_percent = 95;
};

// INVALID_ARGUMENT says which is wrong.
inline absl::Status CheckWatermarks(Watermarks marks) {
  if (marks.high_percent < 1 || marks.high_percent > 100) {
    return absl::InvalidArgumentError(
        absl::StrCat("high watermark ", marks.high_percent, ": want 1 to 100 percent"));
  }
  if (marks.low_percent < marks.high_percent) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("low watermark ", marks.low_percent,
                                                 ": want less than the high one, ",
                                                 marks.high_percent, " percent"));
}

}  // namespace kvmill

#endif  // KVMILL_STORAGE_WATERMARKS_H_
