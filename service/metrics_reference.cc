// docs/metrics.md, from the table of metrics.cc.
#include <string>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "service/metrics.h"

namespace kvmill {
namespace {

constexpr char kIntroduction[] =
    "# Metrics\n"
    "\n"
    "`kvmilld --print-metrics` prints this page. `kvmilld --metrics HOST:PORT` serves the metrics "
    "at `/metrics` as Prometheus text.\n"
    "What may change and what values labels have is in [contracts.md](contracts.md#metrics), what "
    "to do about them in\n"
    "[operations.md](operations.md#alerts).\n"
    "\n"
    "Counters and histograms count since the start of the daemon (`kvmill_start_time_seconds`), "
    "gauges are of now. Blocks are\n"
    "(block, layer group) pairs. Each event is counted once, where it is decided.\n"
    "\n";

// What the end of the name says.
std::string UnitOf(absl::string_view name, absl::string_view type) {
  if (absl::EndsWith(name, "_info")) return "";
  absl::ConsumeSuffix(&name, "_total");
  for (const auto& [end, unit] :
       std::initializer_list<std::pair<const char*, const char*>>{{"_bytes", "bytes"},
                                                                  {"_bytes_ingested", "bytes"},
                                                                  {"_bytes_stored", "bytes"},
                                                                  {"_seconds", "seconds"},
                                                                  {"_ratio", "ratio"},
                                                                  {"_blocks", "blocks"},
                                                                  {"_tokens", "tokens"}}) {
    if (absl::EndsWith(name, end)) return unit;
  }
  return type == "histogram" ? "" : "count";
}

}  // namespace

std::string MetricsReference() {
  std::string text = absl::StrCat(kIntroduction,
                                  "| family | type | unit | labels | meaning |\n"
                                  "|---|---|---|---|---|\n");
  for (const MetricInfo& info : MetricInfos()) {
    std::string labels;
    for (const absl::string_view label : absl::StrSplit(info.labels, ' ', absl::SkipEmpty())) {
      absl::StrAppend(&labels, labels.empty() ? "" : " ", "`", label, "`");
    }
    absl::StrAppend(&text, "| `", info.name, "` | ", info.type, " | ", UnitOf(info.name, info.type),
                    " | ", labels, " | ", absl::StrReplaceAll(info.help, {{"|", "\\|"}}), " |\n");
  }
  return text;
}

}  // namespace kvmill
