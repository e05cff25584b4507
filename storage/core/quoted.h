// What somebody sent, in a message.
#ifndef KVMILL_STORAGE_CORE_QUOTED_H_
#define KVMILL_STORAGE_CORE_QUOTED_H_

#include <cstddef>
#include <string>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace kvmill {

// Longer ones are cut: an answer has room for a few kilobytes of text, and a request for megabytes.
inline constexpr std::size_t kQuotedBytesMax = 128;

// "text", escaped; of what is too long the beginning, and how long it is.
inline std::string Quoted(absl::string_view text) {
  if (text.size() <= kQuotedBytesMax) return absl::StrCat("\"", absl::CEscape(text), "\"");
  return absl::StrCat("\"", absl::CEscape(text.substr(0, kQuotedBytesMax)), "...\" (", text.size(),
                      " bytes)");
}

}  // namespace kvmill

#endif  // KVMILL_STORAGE_CORE_QUOTED_H_
