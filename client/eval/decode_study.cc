#include "client/eval/decode_study.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <iterator>
#include <map>
#include <memory>
#include <thread>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "client/eval/decode_scores.h"
#include "client/eval/float_cache.h"
#include "client/eval/tile_cache.h"
#include "storage/core/status_macros.h"

namespace kvmill::eval {
namespace {

constexpr absl::string_view kFp32 = "fp32";
constexpr absl::string_view kFp16 = "fp16";

// A method with a format and a mode; without a method a cache in 16 bits.
struct Candidate {
  const Method* method = nullptr;
  std::string format_name;
  TileFormat format;
  DecodeMode mode = DecodeMode::kDecode;
  std::shared_ptr<const Quantizer> quantizer;  // Shared by the modes; null of tiles.

  std::unique_ptr<KvCache> MakeCache(const DecodeStudy& study, std::uint32_t tokens) const {
    const TinyConfig& config = study.model->config();
    if (quantizer != nullptr) {
      return std::make_unique<FloatCache>(config,
                                          FloatCache::Options{.tokens_max = tokens,
                                                              .block_tokens = format.group,
                                                              .sink_blocks = study.sink_blocks,
                                                              .quantizer = quantizer.get()});
    }
    const std::uint32_t sinks = method == nullptr ? TileCache::kAllBlocks : study.sink_blocks;
    return std::make_unique<TileCache>(
        config, TileCache::Options{.tokens_max = tokens, .format = format, .sink_blocks = sinks});
  }
};

absl::StatusOr<std::vector<Candidate>> MakeCandidates(const DecodeStudy& study) {
  const std::uint32_t head_dim = study.model->config().head_dim;
  std::vector<Candidate> candidates(1);
  candidates[0].format_name = std::string(kFp16);
  candidates[0].format.head_dim = static_cast<std::uint16_t>(head_dim);
  for (const std::string& name : study.formats) {
    KVMILL_ASSIGN_OR_RETURN(const TileFormat format, ParseStudyFormat(name, head_dim));
    for (const Method* method : study.methods) {
      if (method->two_bit_keys && format.key_bits != 2) continue;
      // KVarN itself is not only quantized by the kernels, but attended to by them, where there are
      // tiles.
      std::shared_ptr<const Quantizer> quantizer;
      if (!method->set.empty() || !HasTiles(format)) quantizer = method->make(format);
      for (const DecodeMode mode : study.modes) {
        candidates.push_back({method, ToString(format), format, mode, quantizer});
      }
    }
  }
  if (candidates.size() == 1) {
    return absl::InvalidArgumentError(absl::StrCat("none of these methods has any of the formats ",
                                                   absl::StrJoin(study.formats, ", "),
                                                   ": they take 2-bit keys"));
  }
  return candidates;
}

// What all texts of a task gave for one candidate.
struct Gathered {
  std::vector<AnswerScores> answers;
  KvCache::Size size;

  void Add(std::vector<AnswerScores> more, const KvCache::Size& its) {
    std::move(more.begin(), more.end(), std::back_inserter(answers));
    size.bits += its.bits;
    size.elements += its.elements;
    size.raw_blocks += its.raw_blocks;
  }
};

struct TextScores {
  std::vector<AnswerScores> reference;
  std::vector<std::pair<std::vector<AnswerScores>, KvCache::Size>> candidates;
};

struct Text {
  std::size_t task = 0;  // Index.
  TaskText text;
  std::vector<Token> tokens;
};

absl::StatusOr<std::vector<Text>> MakeTexts(const DecodeStudy& study) {
  std::vector<Text> texts;
  for (std::size_t i = 0; i < study.tasks.size(); ++i) {
    const Task& task = *study.tasks[i].task;
    Random random = TaskRandom(task, study.seed);
    for (std::uint32_t answers = 0; answers < study.tasks[i].answers;
         answers += task.answers_a_text) {
      Text text{i, task.make(random), {}};
      KVMILL_ASSIGN_OR_RETURN(text.tokens, study.model->Encode(text.text.text));
      if (text.tokens.size() > study.model->config().tokens_max) {
        return absl::InvalidArgumentError(
            absl::StrCat("a text of task ", task.name, " has ", text.tokens.size(),
                         " tokens, and the model takes ", study.model->config().tokens_max));
      }
      texts.push_back(std::move(text));
    }
  }
  return texts;
}

class Measurement {
 public:
  Measurement(const DecodeStudy& study, const std::vector<Candidate>& candidates,
              const std::vector<Text>& texts)
      : study_(study), candidates_(candidates), texts_(texts), scores_(texts.size()) {}

  std::vector<TextScores> Run() {
    const std::size_t count =
        std::clamp<std::size_t>(study_.threads, 1, std::max<std::size_t>(texts_.size(), 1));
    std::vector<std::thread> helpers;
    for (std::size_t i = 1; i < count; ++i) helpers.emplace_back([this] { Work(false); });
    Work(true);
    for (std::thread& helper : helpers) helper.join();
    return std::move(scores_);
  }

 private:
  // Takes text after text. Each slot of scores_ is written by one thread, and read after all ended.
  void Work(bool caller) {
    for (;;) {
      const std::size_t i = next_.fetch_add(1, std::memory_order_relaxed);
      if (i >= texts_.size()) return;
      const Text& text = texts_[i];
      const DecodeReference reference(*study_.model, text.text, text.tokens);
      scores_[i].reference = reference.own();
      std::map<std::uint32_t, DecodeStart> starts;  // By tokens of a block.
      for (const Candidate& candidate : candidates_) {
        const auto cache =
            candidate.MakeCache(study_, static_cast<std::uint32_t>(text.tokens.size()));
        const auto score = [&] {
          if (candidate.mode == DecodeMode::kPrefill) return reference.ScoreWithoutFeedback(*cache);
          if (candidate.method == nullptr) return reference.Score(*cache);
          const std::uint32_t block = cache->block_tokens();
          auto start = starts.find(block);
          if (start == starts.end()) {
            start = starts.emplace(block, reference.Start(block, study_.sink_blocks)).first;
          }
          return reference.Score(*cache, start->second);
        };
        std::vector<AnswerScores> answers = score();
        scores_[i].candidates.emplace_back(std::move(answers), cache->size());
        const std::size_t done = done_.fetch_add(1, std::memory_order_relaxed) + 1;
        if (caller && study_.progress) study_.progress(done, texts_.size() * candidates_.size());
      }
    }
  }

  const DecodeStudy& study_;
  const std::vector<Candidate>& candidates_;
  const std::vector<Text>& texts_;
  std::vector<TextScores> scores_;
  std::atomic<std::size_t> next_{0}, done_{0};
};

void Fill(DecodeRow& row, const std::vector<AnswerScores>& answers) {
  double kl = 0, surprise = 0;
  std::uint64_t tokens = 0, agree = 0, right = 0;
  for (const AnswerScores& answer : answers) {
    double mine = 0;
    for (std::uint32_t i = row.position_from; i < row.position_to; ++i) {
      mine += static_cast<double>(answer.kl[i]);
      surprise += static_cast<double>(answer.surprise[i]);
      agree += answer.agree[i];
    }
    const std::uint32_t length = row.position_to - row.position_from;
    const bool wrong = answer.first_wrong < row.position_to;
    kl += mine;
    tokens += length;
    right += wrong ? 0 : 1;
    row.answer_kl.push_back(mine / length);
    row.answer_wrong.push_back(wrong ? 1 : 0);
  }
  const auto count = static_cast<double>(tokens);
  row.n = static_cast<std::uint32_t>(answers.size());
  row.exact_match = static_cast<double>(right) / static_cast<double>(answers.size());
  row.kl = kl / count;
  row.top1 = static_cast<double>(agree) / count;
  row.perplexity = std::exp(surprise / count);
}

// All positions, then their parts.
void AddRows(const DecodeRow& like, const Task& task, const Gathered& gathered,
             std::vector<DecodeRow>& rows) {
  const auto add = [&](std::uint32_t from, std::uint32_t to, bool part) {
    DecodeRow row = like;
    row.task = std::string(task.name);
    row.position_from = from;
    row.position_to = to;
    row.part = part;
    row.raw_blocks = gathered.size.raw_blocks;
    Fill(row, gathered.answers);
    rows.push_back(std::move(row));
  };
  add(0, task.answer_tokens, false);
  for (std::uint32_t from = 0; task.step > 0 && from < task.answer_tokens; from += task.step) {
    add(from, std::min(from + task.step, task.answer_tokens), true);
  }
}

}  // namespace

absl::string_view ToString(DecodeMode mode) {
  return mode == DecodeMode::kDecode ? "decode" : "prefill";
}

absl::StatusOr<std::vector<DecodeRow>> MeasureDecode(const DecodeStudy& study) {
  KVMILL_ASSIGN_OR_RETURN(const std::vector<Candidate> candidates, MakeCandidates(study));
  KVMILL_ASSIGN_OR_RETURN(const std::vector<Text> texts, MakeTexts(study));
  if (texts.empty()) return absl::InvalidArgumentError("no task has an answer to measure");
  std::vector<TextScores> scores = Measurement(study, candidates, texts).Run();
  std::vector<DecodeRow> rows;
  for (std::size_t t = 0; t < study.tasks.size(); ++t) {
    Gathered reference;
    std::vector<Gathered> gathered(candidates.size());
    for (std::size_t i = 0; i < texts.size(); ++i) {
      if (texts[i].task != t) continue;
      reference.Add(std::move(scores[i].reference), {});
      for (std::size_t c = 0; c < candidates.size(); ++c) {
        gathered[c].Add(std::move(scores[i].candidates[c].first), scores[i].candidates[c].second);
      }
    }
    if (reference.answers.empty()) continue;
    const Task& task = *study.tasks[t].task;
    DecodeRow like;
    like.method = like.format = std::string(kFp32);
    like.bits_per_element = 32;
    AddRows(like, task, reference, rows);
    for (std::size_t c = 0; c < candidates.size(); ++c) {
      const Candidate& candidate = candidates[c];
      const KvCache::Size& size = gathered[c].size;
      like.method =
          candidate.method == nullptr ? std::string(kFp16) : std::string(candidate.method->name);
      like.format = candidate.format_name;
      like.mode = candidate.mode;
      // Nothing is quantized: all of it has 16 bits.
      like.bits_per_element =
          size.elements == 0 ? 16
                             : static_cast<double>(size.bits) / static_cast<double>(size.elements);
      AddRows(like, task, gathered[c], rows);
    }
  }
  return rows;
}

DecodeComparison Compare(const DecodeRow& row, const std::vector<DecodeRow>& rows) {
  DecodeComparison comparison;
  const auto first = std::find_if(rows.begin(), rows.end(), [&](const DecodeRow& other) {
    return other.task == row.task && other.format == row.format && other.mode == row.mode &&
           other.position_from == row.position_from && other.position_to == row.position_to;
  });
  comparison.first = first == rows.end() || first->method == row.method;
  if (comparison.first) return comparison;
  comparison.wrong = TestSigns(row.answer_wrong, first->answer_wrong);
  comparison.kl = TestSigns(row.answer_kl, first->answer_kl);
  return comparison;
}

const DecodeRow* InMode(const DecodeRow& row, DecodeMode mode, const std::vector<DecodeRow>& rows) {
  for (const DecodeRow& other : rows) {
    if (other.task == row.task && other.method == row.method && other.format == row.format &&
        other.mode == mode && other.position_from == row.position_from &&
        other.position_to == row.position_to && other.part == row.part) {
      return &other;
    }
  }
  return nullptr;
}

}  // namespace kvmill::eval
