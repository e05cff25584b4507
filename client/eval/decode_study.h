// Methods and formats over a decode of the small model: what quantizing a cache as it fills does to
// logits and to answers.
#ifndef KVMILL_CLIENT_EVAL_DECODE_STUDY_H_
#define KVMILL_CLIENT_EVAL_DECODE_STUDY_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "client/eval/methods.h"
#include "client/eval/statistics.h"
#include "client/eval/tiny_model.h"
#include "client/eval/tiny_tasks.h"

namespace kvmill::eval {

enum class DecodeMode : std::uint8_t {
  kDecode,   // Blocks are quantized as they fill, and later tokens' K and V come from what is left.
  kPrefill,  // Every token sees quantized K and V of the unquantized run: errors do not feed back.
};
absl::string_view ToString(DecodeMode mode);  // "decode", "prefill"

struct DecodeStudy {
  struct TaskRun {
    const Task* task = nullptr;
    std::uint32_t answers = 0;  // At least; whole texts are measured.
  };
  const TinyModel* model = nullptr;
  std::vector<const Method*> methods;
  std::vector<std::string> formats;  // Names, as ParseStudyFormat takes them.
  std::vector<TaskRun> tasks;
  std::vector<DecodeMode> modes = {DecodeMode::kDecode, DecodeMode::kPrefill};
  std::uint32_t sink_blocks = 1;  // First blocks of a sequence, which stay in 16 bits.
  std::uint64_t seed = 1;         // Of the texts.
  std::uint32_t threads = 1;
  std::function<void(std::size_t done, std::size_t total)> progress;  // On the calling thread.
};

// Tokens [position_from, position_to) of all answers of one task, method, format and mode.
struct DecodeRow {
  std::string method;
  std::string format;           // "k4v2_g128"; of "fp32" and "fp16" the same word again.
  double bits_per_element = 0;  // Of what is quantized, metadata included.
  std::string task;
  std::uint32_t n = 0;     // Answers.
  double exact_match = 0;  // Answers without a wrong token before position_to.
  double kl = 0;           // Mean over tokens.
  double top1 = 0;         // Tokens whose likeliest is that of the unquantized run.
  double perplexity = 0;
  std::uint32_t position_from = 0, position_to = 0;  // From the beginning of the answer.
  DecodeMode mode = DecodeMode::kDecode;
  bool part = false;             // Of the positions; otherwise all.
  std::uint64_t raw_blocks = 0;  // Halves of blocks that stayed in 16 bits.
  // One an answer, the same answers in the same order in all rows of a task.
  std::vector<double> answer_kl;     // Mean over its tokens.
  std::vector<double> answer_wrong;  // 0 or 1.
};

// Task by task: fp32 (the unquantized run itself), fp16 (the cache without quantization), then
// formats, methods and modes, each with all positions first and then in parts of Task::step.
//
// Methods that do not have a format are left out with it; INVALID_ARGUMENT when nothing is left and
// for a bad format.
absl::StatusOr<std::vector<DecodeRow>> MeasureDecode(const DecodeStudy& study);

// Answer by answer against the first method's row of the same task, format, mode and positions.
struct DecodeComparison {
  bool first = false;  // It is that row, or one of fp32 and fp16: there is nothing to compare.
  SignTest wrong;      // smaller: right where the first is wrong.
  SignTest kl;
};
DecodeComparison Compare(const DecodeRow& row, const std::vector<DecodeRow>& rows);

// The same row in the other mode; null when it was not measured.
const DecodeRow* InMode(const DecodeRow& row, DecodeMode mode, const std::vector<DecodeRow>& rows);

}  // namespace kvmill::eval

#endif  // KVMILL_CLIENT_EVAL_DECODE_STUDY_H_
