// A frame of `kvmill top` as lines of printable ASCII. Pure.
#ifndef KVMILL_CLIENT_CLI_TOP_FRAME_H_
#define KVMILL_CLIENT_CLI_TOP_FRAME_H_

#include <cstddef>
#include <string>
#include <vector>

#include "client/cli/top_model.h"

namespace kvmill::cli {

struct TopLine {
  enum class Style { kPlain, kHeading, kAlarm };
  std::string text;  // At most as long as the frame is wide, without spaces at the end.
  Style style = Style::kPlain;
};

// What does not fit into `width` columns is left out, the less important first; the last lines are
// those that can be missed when a terminal is low. `width` is at least 1.
std::vector<TopLine> DrawTop(const TopView& view, std::size_t width);

}  // namespace kvmill::cli

#endif  // KVMILL_CLIENT_CLI_TOP_FRAME_H_
