#include "client/eval/html_parts.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_replace.h"

namespace kvmill::eval {
namespace {

constexpr const char* kStyle = R"(
:root{color-scheme:light dark;--ground:#fff;--text:#1b1f24;--dim:#57606a;--line:#d0d7de;--box:#3a6ea5;--first:#a8480c;--soft:#f3f5f7}
@media (prefers-color-scheme:dark){:root{--ground:#14171a;--text:#e4e7ea;--dim:#9aa4ad;--line:#3a4249;--box:#7db2e8;--first:#f2a65a;--soft:#1e2327}}
*{box-sizing:border-box}
body{margin:0 auto;max-width:60rem;padding:1rem;background:var(--ground);color:var(--text);font:1rem/1.5 system-ui,sans-serif}
h1{font-size:1.4rem}h2{font-size:1.15rem;margin-top:2rem}h3{font-size:1rem;margin-bottom:.3rem}
p,li{max-width:46rem}.dim{color:var(--dim)}
.row{display:grid;grid-template-columns:11rem 1fr 21rem;gap:.2rem .8rem;align-items:center;border-top:1px solid var(--line);padding:.2rem 0}
.row>:last-child{font-variant-numeric:tabular-nums;font-size:.85rem}
.row svg,.axis{width:100%;height:1.6rem;display:block}
.axis{position:relative;font-size:.75rem;color:var(--dim)}.axis span{position:absolute;transform:translateX(-50%)}
.axis span:first-child{transform:none}.axis span:last-child{transform:translateX(-100%)}
.first{color:var(--first);font-weight:600}
.box{fill:var(--box);fill-opacity:.35;stroke:var(--box)}.first-box{fill:var(--first);fill-opacity:.35;stroke:var(--first)}
.mark{stroke:var(--text);stroke-width:2}.whisker{stroke:var(--dim)}.grid{stroke:var(--line)}
.box,.first-box,.mark,.whisker,.grid{vector-effect:non-scaling-stroke}
.wide{overflow-x:auto;background:var(--soft);border-radius:.4rem}
.wide svg{min-width:34rem;width:100%;display:block}
.wide text{fill:var(--text);font:12px system-ui,sans-serif}.wide .tick{fill:var(--dim)}
.dot{fill:var(--box)}.first-dot{fill:var(--first)}
ol{columns:2 20rem;padding-left:2rem}
.cells{display:grid;grid-template-columns:repeat(auto-fill,minmax(13rem,1fr));gap:.8rem}
.cells svg{width:100%;height:6rem;display:block;background:var(--soft);border-radius:.3rem}
.cells p{margin:0;font-size:.85rem}
.line{fill:none;stroke:var(--box);stroke-width:2}.first-line{fill:none;stroke:var(--first);stroke-width:2}
.dashed{stroke-dasharray:4 3}.line,.first-line{vector-effect:non-scaling-stroke}
@media (max-width:44rem){.row{grid-template-columns:1fr}.row>svg,.row>.axis{order:3}ol{columns:1}}
)";

}  // namespace

std::string Escaped(absl::string_view text) {
  return absl::StrReplaceAll(
      text, {{"&", "&amp;"}, {"<", "&lt;"}, {">", "&gt;"}, {"\"", "&quot;"}, {"'", "&#39;"}});
}

std::string Percent(double x) {
  if (!std::isfinite(x)) return "-";
  return absl::StrFormat(x < 0.01 ? "%.3f %%" : "%.2f %%", 100 * x);
}

std::string PText(double p) { return absl::StrFormat(p < 0.001 ? "%.1e" : "%.3f", p); }

std::string PageBegin(const ReportSubject& subject) {
  std::string out = absl::StrCat(
      "<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><meta name=\"viewport\" "
      "content=\"width=device-width,initial-scale=1\"><title>",
      Escaped(subject.title), "</title><style>", kStyle, "</style></head><body>\n<h1>",
      Escaped(subject.title), "</h1>\n");
  for (const std::string& line : subject.lines) {
    absl::StrAppend(&out, "<p>", Escaped(line), "</p>\n");
  }
  return out;
}

std::string PageEnd() { return "</body></html>\n"; }

double LogAxis::At(double x) const {
  if (!(x > 0)) return 0;
  if (!std::isfinite(x)) return 100;
  return std::clamp(100 * (std::log10(x) - from) / (to - from), 0.0, 100.0);
}

LogAxis AxisOf(const std::vector<double>& values) {
  double low = INFINITY, high = 0;
  for (const double x : values) {
    if (!(x > 0) || !std::isfinite(x)) continue;
    low = std::min(low, x);
    high = std::max(high, x);
  }
  if (high == 0) return {};
  LogAxis axis{std::floor(2 * std::log10(low)) / 2, std::ceil(2 * std::log10(high)) / 2};
  if (axis.to <= axis.from) axis.to = axis.from + 0.5;
  return axis;
}

std::vector<double> Ticks(const LogAxis& axis) {
  std::vector<double> ticks;
  for (double e = axis.from; e < axis.to + 0.01; e += 0.5) ticks.push_back(std::pow(10.0, e));
  return ticks;
}

std::string FigureRow(absl::string_view name, absl::string_view bits, absl::string_view svg,
                      absl::string_view text, bool first) {
  return absl::StrCat("<div class=\"row\"><span", first ? " class=\"first\"" : "", ">", name,
                      " <span class=\"dim\">", bits, "</span></span>", svg, "<span>", text,
                      "</span></div>\n");
}

std::string FigureAxis(const std::vector<Tick>& ticks, absl::string_view note) {
  std::string out = "<div class=\"row\"><span></span><div class=\"axis\">";
  for (const Tick& tick : ticks) {
    absl::StrAppendFormat(&out, "<span style=\"left:%.2f%%\">%s</span>", tick.at, tick.label);
  }
  return absl::StrCat(out, "</div><span class=\"dim\">", note, "</span></div>\n");
}

std::string BoxPlot(const Spread& s, const LogAxis& axis, bool first,
                    absl::string_view description) {
  std::string svg = absl::StrCat(
      "<svg viewBox=\"0 0 100 10\" preserveAspectRatio=\"none\" role=\"img\" aria-label=\"",
      Escaped(description), "\">");
  for (const double tick : Ticks(axis)) {
    absl::StrAppendFormat(&svg, "<line class=\"grid\" x1=\"%.2f\" x2=\"%.2f\" y1=\"0\" y2=\"10\"/>",
                          axis.At(tick), axis.At(tick));
  }
  absl::StrAppendFormat(&svg, "<line class=\"whisker\" x1=\"%.2f\" x2=\"%.2f\" y1=\"5\" y2=\"5\"/>",
                        axis.At(s.min), axis.At(s.max));
  absl::StrAppendFormat(&svg, "<rect class=\"%s\" x=\"%.2f\" y=\"2\" width=\"%.2f\" height=\"6\"/>",
                        first ? "first-box" : "box", axis.At(s.lower),
                        axis.At(s.upper) - axis.At(s.lower));
  absl::StrAppendFormat(&svg,
                        "<line class=\"mark\" x1=\"%.2f\" x2=\"%.2f\" y1=\"1\" y2=\"9\"/></svg>",
                        axis.At(s.median), axis.At(s.median));
  return svg;
}

}  // namespace kvmill::eval
