// eval error: what quantizing does to K, V and attention, method against method.
#include "client/cli/commands_eval.h"

#include <algorithm>
#include <iostream>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "client/cli/files.h"
#include "client/cli/human.h"
#include "client/cli/kv_files.h"
#include "client/cli/output.h"
#include "client/eval/error_study.h"
#include "client/eval/report_html.h"
#include "client/eval/shipped_data.h"
#include "storage/core/status_macros.h"

namespace kvmill::cli {
namespace {

std::string ErrorHelp() {
  std::string help =
      "K and V (as `put` takes them) go through each method with each format, head by head, and "
      "what\n"
      "a decoder gives back is compared with them, over the tokens of whole tiles. Without --kv: "
      "the K\n"
      "and V of the small model that comes with kvmill. The formats' bits are those of each "
      "method's\n"
      "codes; bits_per_element counts what lies beside them, too. Compare at equal bits.\n"
      "\n"
      "  rel_error_k      |K' - K| / |K| (Frobenius, one head); rel_error_v likewise\n"
      "  token_p95_k      |k' - k| / |k| that 95 % of the tokens stay below\n"
      "  magnitude_error  |E_M| / |K|, E_M = (|k'| - |k|) k / |k| of each token\n"
      "  direction_error  |E_D| / |K|, E_D = k' - k - E_M\n"
      "  attention_error  |o' - o| / |o| over 64 queries a head; o from K and V as they came\n"
      "  queries          given (PREFIXL00_q.npy, [tokens, query heads, head_dim], of every "
      "layer)\n"
      "                   or surrogate: keys plus noise, from --seed\n"
      "\n"
      "The table has medians over layers and heads, quartiles, and a sign test against the first\n"
      "method (in how many heads the attention error is smaller : greater). *: no other method of\n"
      "the table has a smaller median attention error with as few bits. --json has every head.\n"
      "\n"
      "Methods; the names of sets (baselines, ablations, refinements) stand for all of theirs:\n";
  for (const eval::Method& method : eval::AllMethods()) {
    absl::StrAppendFormat(&help, "  %-24s%s%s\n", method.name, method.summary,
                          method.two_bit_keys ? " (2-bit keys only)" : "");
  }
  absl::StrAppend(&help,
                  "docs/quality.md says how each differs from its paper.\n"
                  "\n"
                  "Example:\n"
                  "  kvmill eval error --kv prefill_ --formats k4v2_g128 --html report.html\n");
  return help;
}

struct ErrorFlags {
  std::string kv, html;
  std::vector<std::string> methods = {"kvarn", "baselines"};
  std::vector<std::string> formats = {"k4v2_g128", "k2v2_g128"};
  std::uint64_t seed = 1;
  bool markdown = false;
  bool bf16 = false;
};

absl::StatusOr<std::vector<std::optional<Tensor>>> LoadQueries(const std::string& prefix,
                                                               std::size_t layers, DType dtype) {
  std::vector<std::optional<Tensor>> queries(layers);
  std::size_t found = 0;
  for (std::size_t layer = 0; layer < layers; ++layer) {
    const std::string path = LayerPath(prefix, layer, "_q.npy");
    if (!FileExists(path)) continue;
    KVMILL_ASSIGN_OR_RETURN(queries[layer], ReadNpy(path, dtype));
    ++found;
  }
  if (found != 0 && found != layers) {
    return absl::InvalidArgumentError(
        absl::StrCat(found, " of ", layers, " layers have a file of queries (",
                     LayerPath(prefix, 0, "_q.npy"), " and so on); all must have one, or none"));
  }
  return queries;
}

Json RowJson(const eval::ErrorRow& row) {
  return {{"method", row.method},
          {"format", row.format},
          {"bits_per_element", row.bits_per_element},
          {"layer", row.layer},
          {"head", row.head},
          {"n", row.n},
          {"rel_error_k", row.k.relative},
          {"rel_error_v", row.v.relative},
          {"token_p95_k", row.k.token_p95},
          {"magnitude_error", row.k.magnitude},
          {"direction_error", row.k.direction},
          {"attention_error", row.attention_error},
          {"queries", row.given_queries ? "given" : "surrogate"},
          {"token_p50_k", row.k.token_p50},
          {"token_p99_k", row.k.token_p99},
          {"token_p50_v", row.v.token_p50},
          {"token_p95_v", row.v.token_p95},
          {"token_p99_v", row.v.token_p99},
          {"magnitude_error_v", row.v.magnitude},
          {"direction_error_v", row.v.direction},
          {"raw_blocks", row.raw_blocks}};
}

std::string Percent(double x) { return HumanNumber(100 * x, 2); }

using Align = Table::Align;
const std::vector<std::pair<std::string, Align>>& Columns() {
  static const auto* const columns =
      new std::vector<std::pair<std::string, Align>>{{"method", Align::kLeft},
                                                     {"format", Align::kLeft},
                                                     {"bits", Align::kRight},
                                                     {"attention %", Align::kRight},
                                                     {"quartiles", Align::kRight},
                                                     {"K %", Align::kRight},
                                                     {"V %", Align::kRight},
                                                     {"K p95 %", Align::kRight},
                                                     {"magnitude %", Align::kRight},
                                                     {"direction %", Align::kRight},
                                                     {"n", Align::kRight},
                                                     {"better:worse", Align::kRight},
                                                     {"p", Align::kRight}};
  return *columns;
}

std::vector<std::string> Cells(const eval::MethodSummary& summary, absl::string_view first) {
  // In the order of eval::Metrics().
  const auto median = [&](std::size_t metric) { return Percent(summary.spreads[metric].median); };
  const eval::Spread& attention = summary.spreads[0];
  const eval::SignTest& test = summary.signs[0];
  const bool is_first = summary.method == first;
  return {absl::StrCat(summary.method, summary.best_at_its_bits ? " *" : ""),
          summary.format,
          HumanNumber(summary.bits_per_element, 2),
          median(0),
          absl::StrCat(Percent(attention.lower), " - ", Percent(attention.upper)),
          median(1),
          median(2),
          median(3),
          median(4),
          median(5),
          absl::StrCat(attention.n),
          is_first ? "-" : absl::StrCat(test.smaller, ":", test.greater),
          is_first ? "-" : absl::StrFormat(test.p < 0.001 ? "%.1e" : "%.3f", test.p)};
}

// What the numbers are of, for people: files, sizes, queries.
std::vector<std::string> Subject(const ErrorFlags& flags, const std::vector<LayerTensors>& layers,
                                 const std::vector<eval::ErrorRow>& rows) {
  std::size_t heads = 0;
  for (const LayerTensors& layer : layers) heads += layer.k.heads;
  std::vector<std::string> lines;
  lines.push_back(
      absl::StrCat(flags.kv.empty() ? "K and V of the model that comes with kvmill" : flags.kv,
                   ": ", layers.size(), " layers, ", heads, " heads (layer by layer), ",
                   rows.front().n, " of ", layers[0].k.tokens, " tokens, those of whole tiles"));
  lines.push_back(
      rows.front().given_queries
          ? std::string("queries: given, 64 a head")
          : absl::StrCat("queries: surrogate, 64 a head (keys plus noise, seed ", flags.seed, ")"));
  std::uint32_t raw = 0;
  for (const eval::ErrorRow& row : rows) raw += row.raw_blocks;
  if (raw > 0) {
    lines.push_back(absl::StrCat(raw,
                                 " halves of blocks did not fit into a tile and stayed in 16 "
                                 "bits; they are counted so"));
  }
  return lines;
}

absl::Status EvalError(const CommonFlags& common, const ErrorFlags& flags) {
  if (common.json && flags.markdown) return UsageError("--json and --markdown exclude each other");
  eval::ErrorStudy study;
  const auto methods = eval::FindMethods(flags.methods);
  if (!methods.ok()) {
    return UsageError(absl::StrCat("--methods: ", methods.status().message()));
  }
  study.methods = *methods;
  for (const std::string& name : flags.formats) {
    // The name is checked before files are read; 128 stands in for the head_dim they will tell.
    const auto format = eval::ParseStudyFormat(name, 128);
    if (!format.ok()) return UsageError(absl::StrCat("--formats: ", format.status().message()));
    if (std::find(study.formats.begin(), study.formats.end(), name) == study.formats.end()) {
      study.formats.push_back(name);
    }
  }
  study.seed = flags.seed;
  std::string prefix = flags.kv;
  if (prefix.empty()) {
    KVMILL_ASSIGN_OR_RETURN(prefix, eval::FindShippedKv());
  }
  const DType dtype = flags.bf16 ? DType::kBFloat16 : DType::kFloat16;
  KVMILL_ASSIGN_OR_RETURN(const std::vector<LayerTensors> layers, LoadLayers(prefix, dtype));
  KVMILL_ASSIGN_OR_RETURN(const std::vector<std::optional<Tensor>> queries,
                          LoadQueries(prefix, layers.size(), dtype));
  std::vector<eval::ErrorRow> rows;
  {
    Progress progress("measuring");
    study.progress = [&](std::size_t done, std::size_t total) {
      progress.Update(done, total, "heads and methods");
    };
    absl::StatusOr<std::vector<eval::ErrorRow>> measured =
        eval::MeasureErrors(study, layers, queries);
    if (!measured.ok()) {
      return absl::Status(measured.status().code(),
                          absl::StrCat(prefix, ": ", measured.status().message()));
    }
    rows = *std::move(measured);
  }
  const std::vector<std::string> subject = Subject(flags, layers, rows);
  if (!flags.html.empty()) {
    KVMILL_RETURN_IF_ERROR(
        WriteFile(flags.html, {eval::ErrorReport({"kvmill eval error", subject}, rows)}));
  }
  if (common.json) {
    Json list = Json::array();
    for (const eval::ErrorRow& row : rows) list.push_back(RowJson(row));
    PrintJson(list);
    return absl::OkStatus();
  }
  const std::vector<eval::MethodSummary> summaries = eval::Summarize(rows);
  const std::string& first = rows.front().method;
  Table table(Columns());
  if (flags.markdown) {
    for (const eval::MethodSummary& summary : summaries) {
      std::vector<std::string> cells = Cells(summary, first);
      cells[0] = absl::StrCat("`", summary.method, "`", summary.best_at_its_bits ? " \\*" : "");
      table.Add(std::move(cells));
    }
    table.PrintMarkdown();
    return absl::OkStatus();
  }
  for (const std::string& line : subject) std::cout << line << "\n";
  std::cout << "sign test against " << first << "; *: best with as few bits\n\n";
  for (const eval::MethodSummary& summary : summaries) table.Add(Cells(summary, first));
  table.Print();
  if (!flags.html.empty()) std::cout << "\nreport: " << flags.html << "\n";
  return absl::OkStatus();
}

}  // namespace

void AddEvalCommands(CommandLine& line) {
  CLI::App* eval =
      line.root().add_subcommand("eval", "Measure what quantizing does to a model's K and V");
  eval->require_subcommand(1);
  auto error = std::make_shared<ErrorFlags>();
  CLI::App* app = line.Add(*eval, "error", "Error of K, V and attention, method against method",
                           ErrorHelp(), [&line, error] { return EvalError(line.flags(), *error); });
  app->add_option("--kv", error->kv,
                  "What stands before L00_k.npy, L00_v.npy, L01_k.npy, ... (default: the K and V "
                  "that come with kvmill)")
      ->type_name("PREFIX");
  app->add_option("--methods", error->methods, "Methods and sets, the first is tested against")
      ->delimiter(',')
      ->type_name("NAME,...")
      ->default_str("kvarn,baselines");
  app->add_option("--formats", error->formats,
                  "Tile formats, also with 3-bit values; baselines take their bits and group")
      ->delimiter(',')
      ->type_name("FORMAT,...")
      ->default_str("k4v2_g128,k2v2_g128");
  app->add_option("--seed", error->seed, "Of surrogate queries")->capture_default_str();
  app->add_option("--html", error->html, "Also write a report with plots, one file")
      ->type_name("FILE");
  app->add_flag("--markdown", error->markdown, "The table alone, as Markdown");
  app->add_flag("--bf16", error->bf16, "The files hold bfloat16 bits");
  AddEvalDecode(line, *eval);
  AddEvalEngine(line, *eval);
}

}  // namespace kvmill::cli
