#include "service/drain_handover.h"

#include <cstdint>
#include <string>

#include "absl/strings/str_cat.h"
#include "storage/core/log.h"

namespace kvmill {
namespace {

// Of --drain-timeout, for blocks that only this node has; calls in flight get the rest, at least.
constexpr double kHandOverShare = 0.75;
// And until calls do without what peers have not sent: they get the rest to pass on what came.
constexpr double kWaitForPeersShare = 0.9;
constexpr double kCountShare = 0.05;  // To count what is not handed over.

}  // namespace

void HandOver(ClusterBlocks& blocks, const Clock& clock,
              std::chrono::system_clock::time_point deadline, bool has_disk, Leaving& leaving) {
  const std::chrono::nanoseconds left = deadline - std::chrono::system_clock::now();
  const auto share = [left](double of) {
    return static_cast<std::int64_t>(of * static_cast<double>(left.count()));
  };
  blocks.EndWaiting(clock.MonotonicNanos() + share(kWaitForPeersShare));
  const Handover::Report report = blocks.HandOver(share(kHandOverShare));
  const std::uint64_t left_out = blocks.CountLeftOut(std::chrono::nanoseconds(share(kCountShare)));
  leaving.HandedOver({.blocks = report.blocks,
                      .blocks_left = report.blocks_left,
                      .blocks_left_out = left_out,
                      .alone = report.alone});
  const char* const fate = has_disk ? "are missed until this one is back" : "may be lost";
  std::string line = absl::StrCat("drain: ", report.blocks, " blocks are on other nodes, ",
                                  report.blocks_left, " are not");
  if (report.blocks_left > 0) absl::StrAppend(&line, " and ", fate);
  if (report.alone) absl::StrAppend(&line, ": no other node stays in the cluster");
  if (left_out > 0) {
    absl::StrAppend(&line, "; ", left_out,
                    " that nodes do not copy (tails, tenants that are not shared) ", fate);
  }
  if (report.blocks_left == 0) {
    LogInfo(line);
  } else {
    LogWarning(line);
  }
}

}  // namespace kvmill
