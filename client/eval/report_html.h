// The report of `kvmill eval error --html`: one file that asks nobody for anything.
#ifndef KVMILL_CLIENT_EVAL_REPORT_HTML_H_
#define KVMILL_CLIENT_EVAL_REPORT_HTML_H_

#include <string>
#include <vector>

#include "client/eval/error_study.h"
#include "client/eval/html_parts.h"

namespace kvmill::eval {

// HTML with inline SVG: attention error against bits, then a box plot per metric and format, each
// row with median, quartiles, n and the sign test against the first method of `rows`. Values are on
// logarithmic axes, which start below the smallest that is not 0.
std::string ErrorReport(const ReportSubject& subject, const std::vector<ErrorRow>& rows);

}  // namespace kvmill::eval

#endif  // KVMILL_CLIENT_EVAL_REPORT_HTML_H_
