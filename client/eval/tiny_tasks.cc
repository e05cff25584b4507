#include "client/eval/tiny_tasks.h"

#include <cstddef>
#include <numeric>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"

namespace kvmill::eval {
namespace {

constexpr std::uint32_t kKeys = 26 * 26;
constexpr std::uint32_t kQuestions = 20;  // Of a retrieval text: most of the work is its context.

std::string Key(std::uint32_t number) {
  return {static_cast<char>('a' + number / 26), static_cast<char>('a' + number % 26)};
}

// 0 to count - 1, shuffled (Fisher and Yates).
std::vector<std::uint32_t> Shuffled(Random& random, std::uint32_t count) {
  std::vector<std::uint32_t> order(count);
  std::iota(order.begin(), order.end(), 0u);
  for (std::uint32_t i = count; i > 1; --i) std::swap(order[i - 1], order[random.Below(i)]);
  return order;
}

std::string FillerLine(Random& random) {
  // Spaces as often as in the training text.
  constexpr absl::string_view kCharacters = "abcdefghijklmnopqrstuvwxyz0123456789      ";
  std::string line = "#";
  for (std::uint64_t left = 3 + random.Below(21); left > 0; --left) {
    line += kCharacters[random.Below(kCharacters.size())];
  }
  return line + "\n";
}

const Task kTasks[] = {
    {"chain-60", "60 steps: 433 characters given, 600 written", 100, 1, 600, 100,
     [](Random& r) { return MakeChain(r, 60); }},
    {"chain-110", "110 steps: 783 characters given, 1,100 written", 0, 1, 1100, 100,
     [](Random& r) { return MakeChain(r, 110); }},
    {"retrieval-60", "a number out of 60 lines", 0, kQuestions, 5, 0,
     [](Random& r) { return MakeRetrieval(r, 60, 0, kQuestions); }},
    {"retrieval-100", "a number out of 100 lines and 400 characters of filler", 240, kQuestions, 5,
     0, [](Random& r) { return MakeRetrieval(r, 100, 400, kQuestions); }},
    {"retrieval-200", "a number out of 200 lines", 0, kQuestions, 5, 0,
     [](Random& r) { return MakeRetrieval(r, 200, 0, kQuestions); }},
};

}  // namespace

absl::Span<const Task> AllTasks() { return kTasks; }

absl::StatusOr<const Task*> FindTask(absl::string_view name) {
  for (const Task& task : kTasks) {
    if (task.name == name) return &task;
  }
  return absl::InvalidArgumentError(
      absl::StrCat("there is no task '", name,
                   "'; tasks: ", absl::StrJoin(kTasks, ", ", [](std::string* out, const Task& t) {
                     absl::StrAppend(out, t.name);
                   })));
}

Random TaskRandom(const Task& task, std::uint64_t seed) {
  for (const char c : task.name) seed = seed * 31 + static_cast<unsigned char>(c);
  return Random(seed);
}

TaskText MakeRetrieval(Random& random, std::uint32_t lines, std::uint32_t filler,
                       std::uint32_t questions) {
  const std::vector<std::uint32_t> keys = Shuffled(random, kKeys);
  std::vector<std::string> pairs;
  for (std::uint32_t i = 0; i < lines; ++i) {
    pairs.push_back(
        absl::StrCat(Key(keys[i]), absl::StrFormat("%05d", random.Below(100000)), "\n"));
  }
  std::vector<std::string> before(lines + 1);  // Filler before line i, or after the last.
  for (std::size_t size = 0; size < filler;) {
    const std::string line = FillerLine(random);
    size += line.size();
    before[random.Below(lines + 1)] += line;
  }
  TaskText out;
  out.text = "^^\n";
  for (std::uint32_t i = 0; i < lines; ++i) absl::StrAppend(&out.text, before[i], pairs[i]);
  absl::StrAppend(&out.text, before[lines], "ask\n");
  for (std::uint32_t i = 0; i < questions; ++i) {
    const std::string& pair = pairs[random.Below(lines)];
    const auto begin = static_cast<std::uint32_t>(out.text.size() + 2);
    out.text += pair;
    out.answers.push_back({begin, begin + 5});
  }
  return out;
}

TaskText MakeChain(Random& random, std::uint32_t steps) {
  const std::vector<std::uint32_t> keys = Shuffled(random, kKeys);
  const auto sum_text = [](std::uint32_t sum) { return absl::StrCat(sum % 10, sum / 10); };
  std::uint32_t sum = static_cast<std::uint32_t>(random.Below(100));
  const std::string start = absl::StrCat("!!", Key(keys[0]), "!!=", sum_text(sum), "\n");
  std::vector<std::string> operations;
  std::string answer;
  for (std::uint32_t i = 0; i < steps; ++i) {
    const auto digit = static_cast<std::uint32_t>(random.Below(10));
    const bool plus = random.Below(2) == 1;
    sum = (sum + (plus ? digit : 100 - digit)) % 100;
    operations.push_back(absl::StrCat(Key(keys[i]), i + 1 < steps ? Key(keys[i + 1]) : "..", digit,
                                      plus ? "+" : "-"));
    absl::StrAppend(&answer, operations.back(), "=", sum_text(sum), "\n");
  }
  TaskText out;
  out.text = "^^\n";
  for (const std::uint32_t i : Shuffled(random, steps))
    absl::StrAppend(&out.text, operations[i], "\n");
  out.text += start;
  const auto begin = static_cast<std::uint32_t>(out.text.size());
  out.text += answer;
  out.answers.push_back({begin, begin + static_cast<std::uint32_t>(answer.size())});
  return out;
}

}  // namespace kvmill::eval
