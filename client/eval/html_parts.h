// What the reports of `kvmill eval` are made of: one page of HTML that asks nobody for anything,
// with inline SVG in the reader's light or dark colours.
#ifndef KVMILL_CLIENT_EVAL_HTML_PARTS_H_
#define KVMILL_CLIENT_EVAL_HTML_PARTS_H_

#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "client/eval/statistics.h"

namespace kvmill::eval {

// What the numbers of a page are of; plain text, escaped here.
struct ReportSubject {
  std::string title;               // "kvmill eval error"
  std::vector<std::string> lines;  // Data, tokens, queries: a sentence each.
};

std::string PageBegin(const ReportSubject& subject);  // Up to the paragraphs of `lines`.
std::string PageEnd();

std::string Escaped(absl::string_view text);
std::string Percent(double x);  // "12.34 %"; "-" when not finite.
std::string PText(double p);    // "0.123", "1.2e-08"

// Where a value lies between two powers of ten, in percent of the way.
struct LogAxis {
  double from = -3, to = 0;  // Exponents.

  double At(double x) const;
};

// Bounds in half decades, so that plots are filled.
LogAxis AxisOf(const std::vector<double>& values);
std::vector<double> Ticks(const LogAxis& axis);

// A figure is rows of name, plot, text. `name` and `text` are HTML; of the first method or not.
std::string FigureRow(absl::string_view name, absl::string_view bits, absl::string_view svg,
                      absl::string_view text, bool first);
// The last row: where the ticks are (percent of the way) and what they say.
struct Tick {
  double at = 0;
  std::string label;
};
std::string FigureAxis(const std::vector<Tick>& ticks, absl::string_view note);

// Quartiles as a box, least and greatest as a line, the median as a mark.
std::string BoxPlot(const Spread& spread, const LogAxis& axis, bool first,
                    absl::string_view description);

}  // namespace kvmill::eval

#endif  // KVMILL_CLIENT_EVAL_HTML_PARTS_H_
