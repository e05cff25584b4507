#include "client/cli/output.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <iostream>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"

namespace kvmill::cli {
namespace {

std::string Padded(absl::string_view text, std::size_t width, Table::Align align) {
  const std::string space(width > text.size() ? width - text.size() : 0, ' ');
  return align == Table::Align::kLeft ? absl::StrCat(text, space) : absl::StrCat(space, text);
}

std::string WithoutTrailingSpace(std::string line) {
  line.erase(line.find_last_not_of(' ') + 1);
  return line;
}

}  // namespace

void PrintJson(const Json& document) {
  std::cout << document.dump(-1, ' ', false, Json::error_handler_t::replace) << std::endl;
}

void Report::Add(absl::string_view label, absl::string_view value, absl::string_view note) {
  lines_.push_back({std::string(label), std::string(value), std::string(note)});
}

void Report::Print() const {
  std::size_t label_width = 0, value_width = 0;
  for (const Line& line : lines_) {
    label_width = std::max(label_width, line.label.size());
    if (!line.note.empty()) value_width = std::max(value_width, line.value.size());
  }
  for (const Line& line : lines_) {
    std::cout << WithoutTrailingSpace(absl::StrCat(
                     Padded(line.label, label_width + 2, Table::Align::kLeft),
                     Padded(line.value, value_width + 2, Table::Align::kLeft), line.note))
              << "\n";
  }
  std::cout.flush();
}

void Table::Add(std::vector<std::string> cells) {
  cells.resize(columns_.size());
  rows_.push_back(std::move(cells));
}

void Table::Print() const {
  std::vector<std::string> heads;
  for (const auto& column : columns_) heads.push_back(column.first);
  std::vector<std::size_t> widths(columns_.size(), 0);
  const auto widen = [&](const std::vector<std::string>& row) {
    for (std::size_t c = 0; c < row.size(); ++c) widths[c] = std::max(widths[c], row[c].size());
  };
  widen(heads);
  for (const auto& row : rows_) widen(row);
  const auto print = [&](const std::vector<std::string>& row) {
    std::string line;
    for (std::size_t c = 0; c < row.size(); ++c) {
      absl::StrAppend(&line, c ? "  " : "", Padded(row[c], widths[c], columns_[c].second));
    }
    std::cout << WithoutTrailingSpace(std::move(line)) << "\n";
  };
  print(heads);
  for (const auto& row : rows_) print(row);
  std::cout.flush();
}

void Table::PrintMarkdown() const {
  const auto print = [](const std::vector<std::string>& cells) {
    std::cout << "| " << absl::StrJoin(cells, " | ") << " |\n";
  };
  std::vector<std::string> heads, rules;
  for (const auto& [name, align] : columns_) {
    heads.push_back(name);
    rules.push_back(align == Align::kLeft ? "---" : "---:");
  }
  print(heads);
  std::cout << "|" << absl::StrJoin(rules, "|") << "|\n";
  for (const auto& row : rows_) print(row);
  std::cout.flush();
}

Progress::Progress(absl::string_view what)
    : what_(what), terminal_(isatty(STDERR_FILENO) == 1), start_(absl::Now()), last_(start_) {}

Progress::~Progress() {
  if (shown_) std::fputs("\r\033[K", stderr);
}

void Progress::Update(std::uint64_t done, std::uint64_t total, absl::string_view unit) {
  if (!terminal_) return;
  const absl::Time now = absl::Now();
  if (now - start_ < absl::Seconds(2) || now - last_ < absl::Milliseconds(200)) return;
  last_ = now;
  shown_ = true;
  std::string line = absl::StrFormat("\r%s: %d", what_, done);
  if (total > 0) absl::StrAppend(&line, " of ", total);
  absl::StrAppend(&line, " ", unit, "\033[K");
  std::fputs(line.c_str(), stderr);
  std::fflush(stderr);
}

}  // namespace kvmill::cli
