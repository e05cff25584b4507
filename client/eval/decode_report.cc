#include "client/eval/decode_report.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace kvmill::eval {
namespace {

// One figure's rows: those of a task and format over all positions, one a method, in the mode that
// was measured first.
std::vector<const DecodeRow*> Whole(const std::vector<DecodeRow>& rows, absl::string_view task,
                                    absl::string_view format) {
  std::vector<const DecodeRow*> whole;
  for (const DecodeRow& row : rows) {
    if (row.part || row.task != task || row.format != format) continue;
    if (whole.empty() || row.mode == whole.front()->mode) whole.push_back(&row);
  }
  return whole;
}

std::string SignText(const SignTest& test, absl::string_view smaller, absl::string_view greater) {
  return absl::StrFormat("%s %d, %s %d, p = %s", smaller, test.smaller, greater, test.greater,
                         PText(test.p));
}

std::string Line(absl::string_view style, double x1, double x2, double y1, double y2) {
  return absl::StrFormat("<line class=\"%s\" x1=\"%.2f\" x2=\"%.2f\" y1=\"%g\" y2=\"%g\"/>", style,
                         x1, x2, y1, y2);
}

std::string RightRow(const DecodeRow& row, const std::vector<DecodeRow>& rows) {
  const DecodeComparison comparison = Compare(row, rows);
  const auto right = static_cast<std::size_t>(std::lround(row.exact_match * row.n));
  const Interval interval = ShareInterval(right, row.n);
  std::string text = absl::StrCat(Percent(row.exact_match), " (", Percent(interval.from), " to ",
                                  Percent(interval.to), "), n = ", row.n);
  std::string svg = absl::StrCat(
      "<svg viewBox=\"0 0 100 10\" preserveAspectRatio=\"none\" role=\"img\" aria-label=\"",
      Escaped(row.method), ": ", text, "\">");
  for (int tick = 0; tick <= 100; tick += 25) svg += Line("grid", tick, tick, 0, 10);
  absl::StrAppendFormat(&svg, "<rect class=\"%s\" x=\"0\" y=\"2\" width=\"%.2f\" height=\"6\"/>",
                        comparison.first ? "first-box" : "box",
                        std::max(0.1, 100 * row.exact_match));
  svg += Line("whisker", 100 * interval.from, 100 * interval.to, 5, 5);
  const DecodeRow* const prefill =
      row.mode == DecodeMode::kDecode ? InMode(row, DecodeMode::kPrefill, rows) : nullptr;
  if (prefill != nullptr) {
    svg += Line("mark", 100 * prefill->exact_match, 100 * prefill->exact_match, 1, 9);
    absl::StrAppend(&text, "; prefill ", Percent(prefill->exact_match));
  }
  absl::StrAppend(&text, "<br><span class=\"dim\">",
                  comparison.first ? "the others are tested against it"
                                   : SignText(comparison.wrong, "right where it is wrong in",
                                              "wrong where it is right in"),
                  "</span>");
  return FigureRow(Escaped(row.method), absl::StrFormat("%.2f bits", row.bits_per_element),
                   svg + "</svg>", text, comparison.first);
}

std::string RightFigure(const std::vector<const DecodeRow*>& whole,
                        const std::vector<DecodeRow>& rows) {
  std::string out = absl::StrCat("<h3>Right answers, ", Escaped(whole[0]->task), ", ",
                                 Escaped(whole[0]->format), "</h3>\n");
  for (const DecodeRow* row : whole) out += RightRow(*row, rows);
  return out + FigureAxis({{0, "0 %"}, {25, "25 %"}, {50, "50 %"}, {75, "75 %"}, {100, "100 %"}},
                          "bar: of answers; line: 95 % interval; mark: prefill");
}

std::string KlText(double kl) { return absl::StrFormat("%.2g", kl); }

std::string KlFigure(const std::vector<const DecodeRow*>& whole,
                     const std::vector<DecodeRow>& rows) {
  std::vector<Spread> spreads;
  std::vector<double> values;
  for (const DecodeRow* row : whole) {
    spreads.push_back(SpreadOf(row->answer_kl));
    const Spread& s = spreads.back();
    // The least of many answers may be nearly 0, and would leave no room for the rest.
    values.insert(values.end(), {s.lower, s.median, s.max});
  }
  const LogAxis axis = AxisOf(values);
  std::string out = absl::StrCat("<h3>KL of answers, ", Escaped(whole[0]->task), ", ",
                                 Escaped(whole[0]->format), "</h3>\n");
  for (std::size_t i = 0; i < whole.size(); ++i) {
    const DecodeRow& row = *whole[i];
    const Spread& s = spreads[i];
    const DecodeComparison comparison = Compare(row, rows);
    const std::string text =
        absl::StrCat(KlText(s.median), " (", KlText(s.lower), " to ", KlText(s.upper), "), mean ",
                     KlText(row.kl), ", n = ", s.n);
    out += FigureRow(
        Escaped(row.method), absl::StrFormat("%.2f bits", row.bits_per_element),
        BoxPlot(s, axis, comparison.first, absl::StrCat(row.method, ": ", text)),
        absl::StrCat(text, "<br><span class=\"dim\">",
                     comparison.first ? "the others are tested against it"
                                      : SignText(comparison.kl, "smaller in", "greater in"),
                     "</span>"),
        comparison.first);
  }
  std::vector<Tick> ticks;
  const std::vector<double> all = Ticks(axis);
  for (std::size_t i = 0; i<all.size(); i += all.size()> 8 ? 2 : 1) {
    ticks.push_back({axis.At(all[i]), KlText(all[i])});
  }
  return out + FigureAxis(ticks, "mean KL of an answer, nats, logarithmic");
}

// The parts of a row, in order.
std::vector<const DecodeRow*> Parts(const DecodeRow& whole, DecodeMode mode,
                                    const std::vector<DecodeRow>& rows) {
  std::vector<const DecodeRow*> parts;
  for (const DecodeRow& row : rows) {
    if (row.part && row.task == whole.task && row.format == whole.format &&
        row.method == whole.method && row.mode == mode) {
      parts.push_back(&row);
    }
  }
  return parts;
}

std::string Polyline(const std::vector<const DecodeRow*>& parts, const LogAxis& axis, double length,
                     const std::string& style) {
  std::string points;
  for (const DecodeRow* part : parts) {
    absl::StrAppendFormat(&points, "%.2f,%.2f ",
                          50.0 * (part->position_from + part->position_to) / length,
                          100 - axis.At(part->kl));
  }
  return absl::StrCat("<polyline class=\"", style, "\" points=\"", points, "\"/>");
}

std::string PositionFigure(const std::vector<const DecodeRow*>& whole,
                           const std::vector<DecodeRow>& rows) {
  std::vector<double> values;
  for (const DecodeRow* row : whole) {
    for (const DecodeMode mode : {DecodeMode::kDecode, DecodeMode::kPrefill}) {
      for (const DecodeRow* part : Parts(*row, mode, rows)) values.push_back(part->kl);
    }
  }
  if (values.empty()) return "";
  const LogAxis axis = AxisOf(values);
  std::string out = absl::StrCat(
      "<h3>KL by position, ", Escaped(whole[0]->task), ", ", Escaped(whole[0]->format),
      "</h3>\n<p class=\"dim\">Across: the tokens of the answer, 0 to ", whole[0]->position_to,
      ". Up: mean KL, ", KlText(std::pow(10.0, axis.from)), " to ", KlText(std::pow(10.0, axis.to)),
      ", logarithmic, a line every half decade. Solid: decode; dashed: prefill.</p>\n<div "
      "class=\"cells\">\n");
  for (const DecodeRow* row : whole) {
    const bool first = Compare(*row, rows).first;
    const std::string style = first ? "first-line" : "line";
    std::string svg;
    for (const double tick : Ticks(axis)) {
      svg += Line("grid", 0, 100, 100 - axis.At(tick), 100 - axis.At(tick));
    }
    svg += Polyline(Parts(*row, DecodeMode::kPrefill, rows), axis, row->position_to,
                    style + " dashed");
    svg += Polyline(Parts(*row, DecodeMode::kDecode, rows), axis, row->position_to, style);
    absl::StrAppend(&out, "<div><p", first ? " class=\"first\"" : "", ">", Escaped(row->method),
                    "</p><svg viewBox=\"0 0 100 100\" preserveAspectRatio=\"none\" role=\"img\" "
                    "aria-label=\"KL by position, ",
                    Escaped(row->method), "\">", svg, "</svg></div>\n");
  }
  return out + "</div>\n";
}

}  // namespace

std::string DecodeReport(const ReportSubject& subject, const std::vector<DecodeRow>& rows) {
  std::string out = PageBegin(subject);
  absl::StrAppend(
      &out,
      "<p class=\"dim\">Decode: blocks are quantized as they fill, and what later tokens make of "
      "them goes into the cache. Prefill: every token sees quantized K and V of the unquantized "
      "run, so that no error builds up; most published tests look like this. KL is that of the "
      "next token from the unquantized run. Sign tests are two-sided, answer by answer against the "
      "first method in the same format; answers out of one text are not independent.</p>\n");
  std::vector<std::pair<std::string, std::string>> seen;
  std::string task;
  for (const DecodeRow& row : rows) {
    if (row.part) continue;
    if (row.task != task) {
      task = row.task;
      absl::StrAppend(&out, "<h2>", Escaped(task), "</h2>\n");
    }
    if (row.method == row.format) {  // fp32, fp16: a line each.
      absl::StrAppend(&out, "<p>", Escaped(row.method), ": ", Percent(row.exact_match), " of ",
                      row.n, " answers right, KL ", KlText(row.kl), ", perplexity ",
                      absl::StrFormat("%.4f", row.perplexity), ".</p>\n");
      continue;
    }
    const std::pair<std::string, std::string> figure(row.task, row.format);
    if (std::find(seen.begin(), seen.end(), figure) != seen.end()) continue;
    seen.push_back(figure);
    const std::vector<const DecodeRow*> whole = Whole(rows, row.task, row.format);
    absl::StrAppend(&out, RightFigure(whole, rows), KlFigure(whole, rows),
                    PositionFigure(whole, rows));
  }
  return out + PageEnd();
}

}  // namespace kvmill::eval
