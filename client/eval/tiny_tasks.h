// Texts that the small model was trained to continue, whose right continuation is known.
//
// Retrieval: `^^`, lines `kkddddd` (a two-letter key, five digits), filler lines `#...` between
// them, `ask`; then keys, each followed by its digits. Chain: `^^`, shuffled lines `kknnd+` (a key,
// the next key, a digit, a sign), `!!kk!!=SS`; the continuation follows the list from kk and writes
// `kknnd+=SS` a step, SS the running sum modulo 100, low digit first, the last next key `..`.
#ifndef KVMILL_CLIENT_EVAL_TINY_TASKS_H_
#define KVMILL_CLIENT_EVAL_TINY_TASKS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "client/eval/random.h"

namespace kvmill::eval {

// A text with its right answers in it.
struct TaskText {
  struct Range {
    std::uint32_t begin = 0, end = 0;
  };
  std::string text;
  std::vector<Range> answers;  // In order. What is not in one is given.
};

struct Task {
  absl::string_view name;     // "chain-60"
  absl::string_view summary;  // Half a line.
  std::uint32_t answers =
      0;  // How many are asked for when nobody says how many; 0: not by default.
  std::uint32_t answers_a_text = 0;
  std::uint32_t answer_tokens = 0;
  std::uint32_t step = 0;  // Tokens of a part that figures by position show; 0: no parts.
  TaskText (*make)(Random& random);
};

absl::Span<const Task> AllTasks();

// INVALID_ARGUMENT naming what is unknown, and everything that is known.
absl::StatusOr<const Task*> FindTask(absl::string_view name);

// Of the task's texts with that seed, the same whatever else is made.
Random TaskRandom(const Task& task, std::uint64_t seed);

// `lines` pairs with about `filler` characters of filler between them, and `questions` of them.
TaskText MakeRetrieval(Random& random, std::uint32_t lines, std::uint32_t filler,
                       std::uint32_t questions);
TaskText MakeChain(Random& random, std::uint32_t steps);

}  // namespace kvmill::eval

#endif  // KVMILL_CLIENT_EVAL_TINY_TASKS_H_
