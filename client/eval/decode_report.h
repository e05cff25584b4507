// The report of `kvmill eval decode --html`.
#ifndef KVMILL_CLIENT_EVAL_DECODE_REPORT_H_
#define KVMILL_CLIENT_EVAL_DECODE_REPORT_H_

#include <string>
#include <vector>

#include "client/eval/decode_study.h"
#include "client/eval/html_parts.h"

namespace kvmill::eval {

// Task by task and format by format: right answers with intervals, decode against prefill; KL of
// answers as box plots with sign tests against the first method; KL by position, where there are
// parts.
std::string DecodeReport(const ReportSubject& subject, const std::vector<DecodeRow>& rows);

}  // namespace kvmill::eval

#endif  // KVMILL_CLIENT_EVAL_DECODE_REPORT_H_
