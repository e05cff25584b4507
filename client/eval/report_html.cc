#include "client/eval/report_html.h"

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
@media (max-width:44rem){.row{grid-template-columns:1fr}.row>svg,.row>.axis{order:3}ol{columns:1}}
)";

std::string Escaped(absl::string_view text) {
  return absl::StrReplaceAll(
      text, {{"&", "&amp;"}, {"<", "&lt;"}, {">", "&gt;"}, {"\"", "&quot;"}, {"'", "&#39;"}});
}

std::string Percent(double x) {
  if (!std::isfinite(x)) return "-";
  return absl::StrFormat(x < 0.01 ? "%.3f %%" : "%.2f %%", 100 * x);
}

// Where a value lies between two powers of ten, in percent of the way.
struct LogAxis {
  double from = -3, to = 0;  // Exponents.

  double At(double x) const {
    if (!(x > 0)) return 0;
    if (!std::isfinite(x)) return 100;
    return std::clamp(100 * (std::log10(x) - from) / (to - from), 0.0, 100.0);
  }
};

// Bounds in half decades, so that plots are filled.
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

std::string SignText(const MethodSummary& summary, std::size_t metric, bool first) {
  if (first) return "the others are tested against it";
  const SignTest& test = summary.signs[metric];
  return absl::StrFormat(
      "smaller in %d, greater in %d, p = %s", test.smaller, test.greater,
      test.p < 0.001 ? absl::StrFormat("%.1e", test.p) : absl::StrFormat("%.3f", test.p));
}

std::string SpreadText(const Spread& s) {
  return absl::StrCat(Percent(s.median), " (", Percent(s.lower), " to ", Percent(s.upper),
                      "), n = ", s.n);
}

std::string BoxRow(const MethodSummary& summary, std::size_t metric, const LogAxis& axis,
                   bool first) {
  const Spread& s = summary.spreads[metric];
  std::string svg = absl::StrCat(
      "<svg viewBox=\"0 0 100 10\" preserveAspectRatio=\"none\" role=\"img\" aria-label=\"",
      Escaped(summary.method), ": ", SpreadText(s), "\">");
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
  return absl::StrCat("<div class=\"row\"><span", first ? " class=\"first\"" : "", ">",
                      Escaped(summary.method), " <span class=\"dim\">",
                      absl::StrFormat("%.2f", summary.bits_per_element), " bits</span></span>", svg,
                      "<span>", SpreadText(s), "<br><span class=\"dim\">",
                      SignText(summary, metric, first), "</span></span></div>\n");
}

std::string BoxFigure(const std::vector<MethodSummary>& summaries, std::size_t metric,
                      absl::string_view format, absl::string_view first) {
  std::vector<double> values;
  for (const MethodSummary& s : summaries) {
    if (s.format != format) continue;
    const Spread& spread = s.spreads[metric];
    values.insert(values.end(), {spread.min, spread.median, spread.max});
  }
  const LogAxis axis = AxisOf(values);
  std::string out = absl::StrCat("<h3>", Metrics()[metric].title, ", ", Escaped(format), "</h3>\n");
  for (const MethodSummary& s : summaries) {
    if (s.format == format) out += BoxRow(s, metric, axis, s.method == first);
  }
  absl::StrAppend(&out, "<div class=\"row\"><span></span><div class=\"axis\">");
  for (const double tick : Ticks(axis)) {
    absl::StrAppendFormat(&out, "<span style=\"left:%.2f%%\">%s</span>", axis.At(tick),
                          absl::StrFormat("%.3g %%", 100 * tick));
  }
  return absl::StrCat(out, "</div><span class=\"dim\">of the norm, logarithmic</span></div>\n");
}

std::string BitsFigure(const std::vector<MethodSummary>& summaries, absl::string_view first) {
  constexpr double kWidth = 720, kHeight = 400, kLeft = 60, kRight = 20, kTop = 16, kBottom = 44;
  std::vector<double> values;
  double least = INFINITY, most = 0;
  for (const MethodSummary& s : summaries) {
    values.insert(values.end(), {s.spreads[0].lower, s.spreads[0].upper});
    least = std::min(least, s.bits_per_element);
    most = std::max(most, s.bits_per_element);
  }
  const double from = std::floor(2 * least - 0.2) / 2, to = std::ceil(2 * most + 0.2) / 2;
  const LogAxis axis = AxisOf(values);
  const auto x = [&](double bits) {
    return kLeft + (bits - from) / (to - from) * (kWidth - kLeft - kRight);
  };
  const auto y = [&](double error) {
    return kHeight - kBottom - axis.At(error) / 100 * (kHeight - kTop - kBottom);
  };
  std::string out = absl::StrFormat(
      "<div class=\"wide\"><svg viewBox=\"0 0 %g %g\" role=\"img\" aria-label=\"attention output "
      "error against bits per element\">\n",
      kWidth, kHeight);
  for (double bits = from; bits < to + 0.01; bits += 0.5) {
    absl::StrAppendFormat(&out,
                          "<line class=\"grid\" x1=\"%.1f\" x2=\"%.1f\" y1=\"%g\" y2=\"%g\"/><text "
                          "class=\"tick\" x=\"%.1f\" y=\"%g\" text-anchor=\"middle\">%.1f</text>\n",
                          x(bits), x(bits), kTop, kHeight - kBottom, x(bits),
                          kHeight - kBottom + 16, bits);
  }
  for (const double tick : Ticks(axis)) {
    absl::StrAppendFormat(&out,
                          "<line class=\"grid\" x1=\"%g\" x2=\"%g\" y1=\"%.1f\" y2=\"%.1f\"/><text "
                          "class=\"tick\" x=\"%g\" y=\"%.1f\" text-anchor=\"end\">%.3g %%</text>\n",
                          kLeft, kWidth - kRight, y(tick), y(tick), kLeft - 6, y(tick) + 4,
                          100 * tick);
  }
  absl::StrAppendFormat(&out,
                        "<text class=\"tick\" x=\"%g\" y=\"%g\" text-anchor=\"middle\">bits per "
                        "element, metadata included</text>\n",
                        (kLeft + kWidth - kRight) / 2, kHeight - 8);
  std::string list = "<ol>";
  for (std::size_t i = 0; i < summaries.size(); ++i) {
    const MethodSummary& s = summaries[i];
    const double at = x(s.bits_per_element);
    absl::StrAppendFormat(
        &out,
        "<g><title>%s, %s</title><line class=\"whisker\" x1=\"%.1f\" x2=\"%.1f\" y1=\"%.1f\" "
        "y2=\"%.1f\"/><circle class=\"%s\" cx=\"%.1f\" cy=\"%.1f\" r=\"5\"/><text x=\"%.1f\" "
        "y=\"%.1f\">%d</text></g>\n",
        Escaped(s.method), Escaped(s.format), at, at, y(s.spreads[0].lower), y(s.spreads[0].upper),
        s.method == first ? "first-dot" : "dot", at, y(s.spreads[0].median), at + 7,
        y(s.spreads[0].median) - 5, i + 1);
    absl::StrAppend(&list, "<li", s.method == first ? " class=\"first\"" : "", ">",
                    Escaped(s.method), ", ", Escaped(s.format), s.best_at_its_bits ? " *" : "",
                    "<br><span class=\"dim\">", absl::StrFormat("%.2f", s.bits_per_element),
                    " bits: ", SpreadText(s.spreads[0]), "; ", SignText(s, 0, s.method == first),
                    "</span></li>\n");
  }
  return absl::StrCat(out, "</svg></div>\n", list, "</ol>\n");
}

}  // namespace

std::string ErrorReport(const ReportSubject& subject, const std::vector<ErrorRow>& rows) {
  const std::vector<MethodSummary> summaries = Summarize(rows);
  const std::string first = rows.empty() ? "" : rows.front().method;
  std::string out = absl::StrCat(
      "<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><meta name=\"viewport\" "
      "content=\"width=device-width,initial-scale=1\"><title>",
      Escaped(subject.title), "</title><style>", kStyle, "</style></head><body>\n<h1>",
      Escaped(subject.title), "</h1>\n");
  for (const std::string& line : subject.lines)
    absl::StrAppend(&out, "<p>", Escaped(line), "</p>\n");
  absl::StrAppend(&out,
                  "<p class=\"dim\">One value a layer and head. Boxes are quartiles, lines go from "
                  "the least to "
                  "the greatest, the mark is the median. Sign tests are two-sided and compare head "
                  "by head with ",
                  Escaped(first),
                  " in the same format; heads of one model and text are not independent, so p "
                  "says how even the split is, not how it would be on another model.</p>\n");
  absl::StrAppend(&out,
                  "<h2>Attention output error against bits</h2>\n<p>Median and quartiles. Only "
                  "methods at the same bits compare. *: no other method has a smaller median with "
                  "as few bits.</p>\n",
                  BitsFigure(summaries, first));
  for (std::size_t metric = 0; metric < Metrics().size(); ++metric) {
    absl::StrAppend(&out, "<h2>", Metrics()[metric].title, "</h2>\n");
    std::string format;
    for (const MethodSummary& s : summaries) {
      if (s.format == format) continue;
      format = s.format;
      absl::StrAppend(&out, BoxFigure(summaries, metric, format, first));
    }
  }
  return absl::StrCat(out, "</body></html>\n");
}

}  // namespace kvmill::eval
