// eval decode: what quantizing a cache as it fills does to what a small model says.
#include <algorithm>
#include <iostream>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "client/cli/commands_eval.h"
#include "client/cli/files.h"
#include "client/cli/human.h"
#include "client/cli/output.h"
#include "client/eval/decode_report.h"
#include "client/eval/decode_study.h"
#include "client/eval/shipped_data.h"
#include "storage/core/status_macros.h"

namespace kvmill::cli {
namespace {

std::string DecodeHelp() {
  std::string help =
      "The small model that comes with kvmill reads texts whose right continuation is known, over "
      "a\n"
      "cache that each method quantizes block by block as it fills: first blocks (--sink-blocks) "
      "and "
      "the\n"
      "unfinished one stay in 16 bits. Every token is given, and what the model says to be the "
      "next "
      "one\n"
      "is compared with what it says over an unquantized cache, and with the right one.\n"
      "\n"
      "  exact_match   answers without a wrong token up to position_to: what a greedy run of its "
      "own\n"
      "                gets right, since it writes the given tokens up to its first wrong one\n"
      "  kl            mean KL of the next token from the unquantized run, nats\n"
      "  top1          tokens whose likeliest is that of the unquantized run\n"
      "  perplexity    of the right tokens\n"
      "  position_from, position_to  tokens of the answer: all of them first, then parts of 100\n"
      "  mode          decode: as said. prefill: every token sees quantized K and V of the "
      "unquantized\n"
      "                run; no error builds up, as in tests that quantize a prompt once\n"
      "\n"
      "The table compares decode and prefill; better:worse are answers that a method has right "
      "where\n"
      "the first method has them wrong, and the other way round, p a two-sided sign test.\n"
      "\n"
      "Tasks:\n";
  for (const eval::Task& task : eval::AllTasks()) {
    absl::StrAppendFormat(&help, "  %-24s%s%s\n", task.name, task.summary,
                          task.answers > 0 ? absl::StrCat("; ", task.answers, " by default") : "");
  }
  absl::StrAppend(&help,
                  "Methods and sets: `kvmill eval error --help`. docs/quality.md has the numbers.\n"
                  "\n"
                  "Example:\n"
                  "  kvmill eval decode --methods kvarn,kivi-g128 --tasks chain-60 --answers 20 "
                  "--html report.html\n");
  return help;
}

struct DecodeFlags {
  std::string model, html;
  std::vector<std::string> methods = {"kvarn", "refined", "baselines"};
  std::vector<std::string> formats = {"k4v2_g128", "k2v2_g128"};
  std::vector<std::string> tasks = {"chain-60", "retrieval-100"};
  std::vector<std::string> modes = {"decode", "prefill"};
  std::uint32_t answers = 0;  // 0: the task's own.
  std::uint32_t sink_blocks = 1;
  std::uint64_t seed = 1;
  std::uint32_t threads = 0;  // 0: as many as the machine has.
  bool outliers = false;
  bool markdown = false;
  bool by_position = false;
};

// Without an answer count of their own, tasks that are not run by default get this many.
constexpr std::uint32_t kAnswersOfOthers = 50;

absl::Status Named(absl::string_view flag, const absl::Status& status) {
  return UsageError(absl::StrCat(flag, ": ", status.message()));
}

absl::StatusOr<eval::DecodeStudy> MakeStudy(const DecodeFlags& flags) {
  eval::DecodeStudy study;
  const auto methods = eval::FindMethods(flags.methods);
  if (!methods.ok()) return Named("--methods", methods.status());
  study.methods = *methods;
  for (const std::string& name : flags.formats) {
    const auto format = eval::ParseStudyFormat(name, 128);
    if (!format.ok()) return Named("--formats", format.status());
    if (std::find(study.formats.begin(), study.formats.end(), name) == study.formats.end()) {
      study.formats.push_back(name);
    }
  }
  for (const std::string& name : flags.tasks) {
    const auto task = eval::FindTask(name);
    if (!task.ok()) return Named("--tasks", task.status());
    const std::uint32_t own = (*task)->answers > 0 ? (*task)->answers : kAnswersOfOthers;
    const bool again = std::any_of(study.tasks.begin(), study.tasks.end(),
                                   [&](const auto& run) { return run.task == *task; });
    if (!again) study.tasks.push_back({*task, flags.answers > 0 ? flags.answers : own});
  }
  study.modes.clear();
  for (const auto mode : {eval::DecodeMode::kDecode, eval::DecodeMode::kPrefill}) {
    const auto named = std::find(flags.modes.begin(), flags.modes.end(), eval::ToString(mode));
    if (named != flags.modes.end()) study.modes.push_back(mode);
  }
  study.sink_blocks = flags.sink_blocks;
  study.seed = flags.seed;
  study.threads =
      flags.threads > 0 ? flags.threads : std::max(1u, std::thread::hardware_concurrency());
  return study;
}

Json RowJson(const eval::DecodeRow& row) {
  return {{"method", row.method},
          {"format", row.format},
          {"bits_per_element", row.bits_per_element},
          {"task", row.task},
          {"n", row.n},
          {"exact_match", row.exact_match},
          {"kl", row.kl},
          {"top1", row.top1},
          {"perplexity", row.perplexity},
          {"position_from", row.position_from},
          {"position_to", row.position_to},
          {"mode", std::string(eval::ToString(row.mode))},
          {"part", row.part},
          {"raw_blocks", row.raw_blocks}};
}

using Align = Table::Align;

std::string Percent(double x) { return HumanNumber(100 * x, 1); }
std::string Kl(double x) { return x == 0 ? "0" : absl::StrFormat("%.2g", x); }
std::string Code(const std::string& name, bool markdown) {
  return markdown ? absl::StrCat("`", name, "`") : name;
}

// A row for each task, method and format: both modes, all positions.
Table ModesTable(const std::vector<eval::DecodeRow>& rows, bool markdown) {
  Table table({{"task", Align::kLeft},
               {"method", Align::kLeft},
               {"format", Align::kLeft},
               {"bits", Align::kRight},
               {"n", Align::kRight},
               {"right %", Align::kRight},
               {"better:worse", Align::kRight},
               {"p", Align::kRight},
               {"prefill right %", Align::kRight},
               {"KL", Align::kRight},
               {"prefill KL", Align::kRight},
               {"top-1 %", Align::kRight},
               {"perplexity", Align::kRight}});
  for (const eval::DecodeRow& row : rows) {
    if (row.part) continue;
    const eval::DecodeRow* const decode = eval::InMode(row, eval::DecodeMode::kDecode, rows);
    const eval::DecodeRow* const prefill = eval::InMode(row, eval::DecodeMode::kPrefill, rows);
    if (decode != nullptr && &row != decode) continue;  // Beside its decode.
    const eval::DecodeComparison against = eval::Compare(row, rows);
    const auto of = [](const eval::DecodeRow* one, const std::string& text) {
      return one == nullptr ? std::string("-") : text;
    };
    table.Add(
        {row.task, Code(row.method, markdown), row.format, HumanNumber(row.bits_per_element, 2),
         absl::StrCat(row.n), of(decode, Percent(row.exact_match)),
         against.first ? "-" : absl::StrCat(against.wrong.smaller, ":", against.wrong.greater),
         against.first
             ? "-"
             : absl::StrFormat(against.wrong.p < 0.001 ? "%.1e" : "%.3f", against.wrong.p),
         prefill == nullptr ? "-" : Percent(prefill->exact_match), of(decode, Kl(row.kl)),
         prefill == nullptr ? "-" : Kl(prefill->kl), of(decode, Percent(row.top1)),
         of(decode, HumanNumber(row.perplexity, 4))});
  }
  return table;
}

// A row for each task, method, format and mode; a column for each part of the positions, with KL
// and answers that are right up to its end.
void PrintPositions(const std::vector<eval::DecodeRow>& rows, bool markdown) {
  bool printed = false;
  for (std::size_t begin = 0, end; begin < rows.size(); begin = end) {
    std::vector<std::pair<std::string, Align>> columns = {{"task", Align::kLeft},
                                                          {"method", Align::kLeft},
                                                          {"format", Align::kLeft},
                                                          {"mode", Align::kLeft}};
    for (end = begin; end < rows.size() && rows[end].task == rows[begin].task; ++end) {
      const eval::DecodeRow& row = rows[end];
      if (!row.part || row.method != rows[begin].method) continue;
      columns.emplace_back(absl::StrCat(row.position_from, "-", row.position_to), Align::kRight);
    }
    if (columns.size() == 4) continue;  // No parts.
    Table table(columns);
    for (std::size_t i = begin; i < end;) {
      const eval::DecodeRow& whole = rows[i];
      std::vector<std::string> cells = {whole.task, Code(whole.method, markdown), whole.format,
                                        std::string(eval::ToString(whole.mode))};
      for (++i; i < end && rows[i].part; ++i) {
        cells.push_back(absl::StrCat(Kl(rows[i].kl), " (", Percent(rows[i].exact_match), " %)"));
      }
      table.Add(std::move(cells));
    }
    if (std::exchange(printed, true)) std::cout << "\n";
    markdown ? table.PrintMarkdown() : table.Print();
  }
}

// What the numbers are of, for people.
std::vector<std::string> Subject(const DecodeFlags& flags, const eval::DecodeStudy& study,
                                 const std::vector<eval::DecodeRow>& rows) {
  const eval::TinyConfig& c = study.model->config();
  std::vector<std::string> lines;
  lines.push_back(absl::StrCat(
      flags.model.empty() ? "the model that comes with kvmill" : flags.model, ": ", c.layers,
      " layers, ", c.q_heads, " query heads, 1 KV head, head_dim ", c.head_dim,
      flags.outliers ? "; outliers in K and V that change nothing without quantization" : ""));
  lines.push_back(absl::StrCat("seed ", flags.seed, "; the first ", study.sink_blocks,
                               study.sink_blocks == 1 ? " block" : " blocks",
                               " and the unfinished one in 16 bits"));
  std::uint64_t raw = 0;
  for (const eval::DecodeRow& row : rows) raw += row.part ? 0 : row.raw_blocks;
  if (raw > 0) {
    lines.push_back(absl::StrCat(raw,
                                 " halves of blocks did not fit into a tile and stayed in 16 "
                                 "bits; they are counted so"));
  }
  return lines;
}

absl::Status EvalDecode(const CommonFlags& common, const DecodeFlags& flags) {
  if (common.json && flags.markdown) return UsageError("--json and --markdown exclude each other");
  KVMILL_ASSIGN_OR_RETURN(eval::DecodeStudy study, MakeStudy(flags));
  std::string path = flags.model;
  if (path.empty()) {
    KVMILL_ASSIGN_OR_RETURN(path, eval::FindShippedModel());
  }
  KVMILL_ASSIGN_OR_RETURN(eval::TinyModel model, eval::TinyModel::Load(path));
  if (flags.outliers) model = model.WithOutliers(flags.seed);
  study.model = &model;
  std::vector<eval::DecodeRow> rows;
  {
    Progress progress("measuring");
    study.progress = [&](std::size_t done, std::size_t total) {
      progress.Update(done, total, "texts and methods");
    };
    KVMILL_ASSIGN_OR_RETURN(rows, eval::MeasureDecode(study));
  }
  const std::vector<std::string> subject = Subject(flags, study, rows);
  if (!flags.html.empty()) {
    KVMILL_RETURN_IF_ERROR(
        WriteFile(flags.html, {eval::DecodeReport({"kvmill eval decode", subject}, rows)}));
  }
  if (common.json) {
    Json list = Json::array();
    for (const eval::DecodeRow& row : rows) list.push_back(RowJson(row));
    PrintJson(list);
    return absl::OkStatus();
  }
  if (!flags.markdown) {
    for (const std::string& line : subject) std::cout << line << "\n";
    std::cout << "sign test against " << study.methods.front()->name << "\n\n";
  }
  const Table table = ModesTable(rows, flags.markdown);
  flags.markdown ? table.PrintMarkdown() : table.Print();
  if (flags.by_position) {
    std::cout << "\n";
    PrintPositions(rows, flags.markdown);
  }
  if (!flags.markdown && !flags.html.empty()) std::cout << "\nreport: " << flags.html << "\n";
  return absl::OkStatus();
}

}  // namespace

void AddEvalDecode(CommandLine& line, CLI::App& eval) {
  auto flags = std::make_shared<DecodeFlags>();
  CLI::App* app =
      line.Add(eval, "decode", "What a small model says over a cache that is quantized as it fills",
               DecodeHelp(), [&line, flags] { return EvalDecode(line.flags(), *flags); });
  app->add_option("--methods", flags->methods, "Methods and sets, the first is tested against")
      ->delimiter(',')
      ->type_name("NAME,...")
      ->default_str("kvarn,refined,baselines");
  app->add_option("--formats", flags->formats,
                  "Tile formats, also with 3-bit values; baselines take their bits and group")
      ->delimiter(',')
      ->type_name("FORMAT,...")
      ->default_str("k4v2_g128,k2v2_g128");
  app->add_option("--tasks", flags->tasks, "Tasks, in this order")
      ->delimiter(',')
      ->type_name("TASK,...")
      ->default_str("chain-60,retrieval-100");
  app->add_option("--answers", flags->answers, "At least so many of each task (default: its own)")
      ->check(CLI::Range(1u, 100000u))
      ->type_name("N");
  app->add_option("--mode", flags->modes, "decode, prefill, or decode,prefill")
      ->delimiter(',')
      ->check(CLI::IsMember({"decode", "prefill"}))
      ->type_name("MODE,...")
      ->default_str("decode,prefill");
  app->add_option("--sink-blocks", flags->sink_blocks, "First blocks that stay in 16 bits")
      ->check(CLI::Range(0u, 1000u))
      ->capture_default_str();
  app->add_flag("--outliers", flags->outliers,
                "Scale channels of K and V up, and what reads them down: the same function, harder "
                "to quantize");
  app->add_option("--seed", flags->seed, "Of texts, and of which channels --outliers takes")
      ->capture_default_str();
  app->add_option("--threads", flags->threads, "Default: as many as the machine runs at a time")
      ->check(CLI::Range(1u, 1024u))
      ->type_name("N");
  app->add_option("--model", flags->model,
                  "Header of a model's weights (default: the one that comes with kvmill)")
      ->type_name("FILE");
  app->add_option("--html", flags->html, "Also write a report with plots, one file")
      ->type_name("FILE");
  app->add_flag("--markdown", flags->markdown, "The tables alone, as Markdown");
  app->add_flag("--by-position", flags->by_position,
                "Also by position in the answer, a table a task: KL, and answers right so far");
}

}  // namespace kvmill::cli
