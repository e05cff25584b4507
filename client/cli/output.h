// What a command says: JSON for scripts, aligned text for people, progress for the impatient.
#ifndef KVMILL_CLIENT_CLI_OUTPUT_H_
#define KVMILL_CLIENT_CLI_OUTPUT_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "nlohmann/json.hpp"

namespace kvmill::cli {

using Json = nlohmann::ordered_json;  // Fields appear in the order of the contract.

// One document and a newline on standard output. Numbers that JSON does not have (NaN, infinity)
// become null.
void PrintJson(const Json& document);

// Lines of "label   value   note" with the values aligned.
class Report {
 public:
  void Add(absl::string_view label, absl::string_view value, absl::string_view note = "");
  void Print() const;  // Standard output.

 private:
  struct Line {
    std::string label, value, note;
  };
  std::vector<Line> lines_;
};

// Columns under a heading; numbers to the right.
class Table {
 public:
  enum class Align { kLeft, kRight };
  explicit Table(std::vector<std::pair<std::string, Align>> columns)
      : columns_(std::move(columns)) {}
  void Add(std::vector<std::string> cells);  // One a column.
  std::size_t row_count() const { return rows_.size(); }
  void Print() const;
  void PrintMarkdown() const;

 private:
  std::vector<std::pair<std::string, Align>> columns_;
  std::vector<std::vector<std::string>> rows_;
};

// A line on standard error that is rewritten while work goes on: only on a terminal, and only once
// the work has taken two seconds. One thread.
class Progress {
 public:
  explicit Progress(absl::string_view what);
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;
  ~Progress();  // Wipes the line.
  void Update(std::uint64_t done, std::uint64_t total, absl::string_view unit);

 private:
  std::string what_;
  bool terminal_;
  bool shown_ = false;
  absl::Time start_, last_;
};

}  // namespace kvmill::cli

#endif  // KVMILL_CLIENT_CLI_OUTPUT_H_
