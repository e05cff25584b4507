#include "storage/core/memory_limit.h"

#include <algorithm>
#include <fstream>
#include <limits>
#include <string>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"

namespace kvmill {
namespace {

// First number in a file, as in the control group's memory.max; UINT64_MAX for "max" or no file.
std::uint64_t NumberIn(const std::string& path) {
  std::ifstream in(path);
  std::string word;
  std::uint64_t value = 0;
  if (in >> word && absl::SimpleAtoi(word, &value)) return value;
  return std::numeric_limits<std::uint64_t>::max();
}

std::uint64_t MachineAvailableBytes() {
  std::ifstream in("/proc/meminfo");
  std::string line;
  while (std::getline(in, line)) {
    absl::string_view rest = line;
    if (!absl::ConsumePrefix(&rest, "MemAvailable:") || !absl::ConsumeSuffix(&rest, "kB")) continue;
    std::uint64_t kib = 0;
    if (absl::SimpleAtoi(rest, &kib)) return kib * 1024;
  }
  return std::numeric_limits<std::uint64_t>::max();
}

// The smallest limit of this process's group and those above it (control groups version 2).
std::uint64_t ControlGroupLimitBytes() {
  std::ifstream in("/proc/self/cgroup");
  std::string line;
  std::uint64_t limit = std::numeric_limits<std::uint64_t>::max();
  while (std::getline(in, line)) {
    absl::string_view rest = line;
    if (!absl::ConsumePrefix(&rest, "0::/")) continue;
    std::string group(rest);
    for (;;) {
      limit = std::min(limit, NumberIn(absl::StrCat("/sys/fs/cgroup/", group, "/memory.max")));
      if (group.empty()) break;
      const std::size_t slash = group.rfind('/');
      group.resize(slash == std::string::npos ? 0 : slash);
    }
  }
  return limit;
}

}  // namespace

std::uint64_t MemoryLimitBytes() {
  return std::min(MachineAvailableBytes(), ControlGroupLimitBytes());
}

}  // namespace kvmill
