#include "client/eval/report_html.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace kvmill::eval {
namespace {

std::string SignText(const MethodSummary& summary, std::size_t metric, bool first) {
  if (first) return "the others are tested against it";
  const SignTest& test = summary.signs[metric];
  return absl::StrFormat("smaller in %d, greater in %d, p = %s", test.smaller, test.greater,
                         PText(test.p));
}

std::string SpreadText(const Spread& s) {
  return absl::StrCat(Percent(s.median), " (", Percent(s.lower), " to ", Percent(s.upper),
                      "), n = ", s.n);
}

std::string BoxRow(const MethodSummary& summary, std::size_t metric, const LogAxis& axis,
                   bool first) {
  const Spread& s = summary.spreads[metric];
  return FigureRow(Escaped(summary.method), absl::StrFormat("%.2f bits", summary.bits_per_element),
                   BoxPlot(s, axis, first, absl::StrCat(summary.method, ": ", SpreadText(s))),
                   absl::StrCat(SpreadText(s), "<br><span class=\"dim\">",
                                SignText(summary, metric, first), "</span>"),
                   first);
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
  std::vector<Tick> ticks;
  for (const double tick : Ticks(axis)) {
    ticks.push_back({axis.At(tick), absl::StrFormat("%.3g %%", 100 * tick)});
  }
  return out + FigureAxis(ticks, "of the norm, logarithmic");
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
  std::string out = PageBegin(subject);
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
  return out + PageEnd();
}

}  // namespace kvmill::eval
