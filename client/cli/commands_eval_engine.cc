// eval prefill, eval continue: a prompt from one engine to another one, in two processes.
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "client/cli/commands_eval.h"
#include "client/cli/human.h"
#include "client/cli/output.h"
#include "client/cli/sequence_lookup.h"
#include "client/eval/engine_demo.h"
#include "client/eval/handover.h"
#include "client/eval/shipped_data.h"
#include "storage/core/status_macros.h"

namespace kvmill::cli {
namespace {

constexpr const char* kPrefillHelp =
    "An engine that computes prompts: the small model that comes with kvmill reads texts of a "
    "task\n"
    "over a cache of tiles, and their K and V go to the daemon, in whole blocks and a tail. It "
    "keeps\n"
    "the last token of each to itself: whoever goes on feeds it for the logits behind it.\n"
    "\n"
    "Block keys: key(n) = SHA-256(\"kvmill-tiny-1\" | 0x00 | key(n-1) | tokens of block n, a byte "
    "each),\n"
    "nothing in place of key(-1). The namespace's revision is a digest of the weights.\n"
    "\n"
    "records_sha256 and logits_sha256 (of the floats behind the last token) are those of 'kvmill "
    "eval\n"
    "continue' with the same flags, which goes on from what it fetches: compare them.\n"
    "--reference: goes on here, too, over the same tiles, and once more without kvmill, in 16 "
    "bits.\n"
    "\n"
    "Example:\n"
    "  kvmill eval prefill --wait && kvmill eval continue --reference\n";

constexpr const char* kContinueHelp =
    "An engine that goes on with the prompts of 'kvmill eval prefill' (same flags, another "
    "process,\n"
    "perhaps another node): it makes the keys from the tokens, looks them up, fetches the tiles, "
    "computes\n"
    "what is missing, and writes on by itself, attending to the tiles as they came. What it writes "
    "is\n"
    "compared with the right answer, character by character.\n"
    "--reference: also computes prompt and answer without kvmill, in 16 bits, to compare text and "
    "time.\n"
    "Exit code 3, and no text, when nothing of any prompt was found.\n"
    "\n"
    "Example:\n"
    "  kvmill eval continue --reference\n";

constexpr std::uint32_t kPromptsMax = 100;  // The caches of all of them are in memory.

struct EngineFlags {
  std::string name = "tiny-lm";
  std::string model;
  std::string task = "chain-110";
  std::string format = "k4v2_g128";
  std::uint32_t prompts = 4;
  std::uint32_t sink_blocks = 0;
  std::uint64_t seed = 1;
  bool no_tail = false;
  bool reference = false;
  bool wait = false;  // Of prefill.
};

// What both engines start with.
struct Engine {
  eval::TinyModel model;
  std::vector<eval::DemoPrompt> prompts;
  std::unique_ptr<Client> client;
  ClientNamespace ns;

  // Of a prompt, what goes through the daemon.
  absl::Span<const eval::Token> Shared(const eval::DemoPrompt& prompt, bool no_tail) const {
    const std::size_t tail = no_tail ? prompt.context().size() % ns.spec.block_tokens : 0;
    return prompt.context().first(prompt.context().size() - tail);
  }
  std::uint64_t Fp16Bytes(std::uint64_t tokens) const {
    return tokens * 2 * 2 * model.config().layers * model.config().head_dim;
  }
};

absl::StatusOr<Engine> MakeEngine(const CommonFlags& common, const EngineFlags& flags) {
  const auto task = eval::FindTask(flags.task);
  if (!task.ok()) return UsageError(absl::StrCat("--task: ", task.status().message()));
  KVMILL_RETURN_IF_ERROR(FormatFlag(flags.format, 128).status());
  std::string path = flags.model;
  if (path.empty()) {
    KVMILL_ASSIGN_OR_RETURN(path, eval::FindShippedModel());
  }
  KVMILL_ASSIGN_OR_RETURN(eval::TinyModel model, eval::TinyModel::Load(path));
  KVMILL_ASSIGN_OR_RETURN(const TileFormat format,
                          FormatFlag(flags.format, model.config().head_dim));
  KVMILL_ASSIGN_OR_RETURN(std::vector<eval::DemoPrompt> prompts,
                          eval::MakePrompts(model, **task, flags.prompts, flags.seed));
  KVMILL_ASSIGN_OR_RETURN(std::unique_ptr<Client> client, Connect(common));
  KVMILL_ASSIGN_OR_RETURN(
      ClientNamespace ns,
      client->OpenNamespace(flags.name, eval::DemoNamespace(model, format, flags.sink_blocks)));
  return Engine{std::move(model), std::move(prompts), std::move(client), std::move(ns)};
}

std::uint64_t Microseconds(absl::Duration time) {
  return static_cast<std::uint64_t>(absl::ToInt64Microseconds(time));
}

Json Ratio(std::uint64_t above, std::uint64_t below) {
  if (below == 0) return nullptr;
  return static_cast<double>(above) / static_cast<double>(below);
}

std::string HumanRatio(std::uint64_t above, std::uint64_t below) {
  if (below == 0) return "-";
  return HumanNumber(static_cast<double>(above) / static_cast<double>(below), 2);
}

std::string TextOf(const Engine& engine, const std::vector<eval::Token>& tokens) {
  return engine.model.Decode(tokens);
}

// What became of the prompts, of all of them together and of each.
struct Outcome {
  struct Prompt {
    std::uint32_t found = 0;
    std::string records;
    eval::Continued continued;
    eval::InSixteenBits reference;
  };
  std::vector<Prompt> prompts;

  std::uint32_t Right(const Engine& engine, bool reference) const {
    std::uint32_t right = 0;
    for (std::size_t i = 0; i < prompts.size(); ++i) {
      const eval::Continued& run =
          reference ? prompts[i].reference.continued : prompts[i].continued;
      right += run.tokens == engine.prompts[i].answer ? 1 : 0;
    }
    return right;
  }
  template <class Of>
  std::uint64_t Total(Of of) const {
    absl::Duration total;
    for (const Prompt& prompt : prompts) total += of(prompt);
    return Microseconds(total);
  }
  std::uint64_t recompute_us() const {
    return Total([](const Prompt& p) { return p.continued.recompute; });
  }
  std::uint64_t generate_us() const {
    return Total([](const Prompt& p) { return p.continued.generate; });
  }
  std::uint64_t prefill_fp16_us() const {
    return Total([](const Prompt& p) { return p.reference.prefill; });
  }
  std::uint64_t generate_fp16_us() const {
    return Total([](const Prompt& p) { return p.reference.continued.generate; });
  }
  // Of all prompts: the digest of theirs, one after the other.
  std::string RecordsDigest() const {
    return eval::HexDigest(absl::StrJoin(
        prompts, "", [](std::string* out, const Prompt& p) { absl::StrAppend(out, p.records); }));
  }
  std::string LogitsDigest() const {
    return eval::HexDigest(absl::StrJoin(prompts, "", [](std::string* out, const Prompt& p) {
      absl::StrAppend(out, p.continued.logits_digest);
    }));
  }
};

double Share(std::uint32_t part, std::size_t of) {
  return static_cast<double>(part) / static_cast<double>(of);
}

// The fields that both commands end with. What was not run is null.
void AddOutcome(const Engine& engine, const Outcome& outcome, bool generated, bool reference,
                Json& json) {
  const std::size_t count = outcome.prompts.size();
  const auto when = [](bool known, Json value) { return known ? std::move(value) : Json(nullptr); };
  json["records_sha256"] = outcome.RecordsDigest();
  json["logits_sha256"] = outcome.LogitsDigest();
  json["generate_us"] = when(generated, outcome.generate_us());
  json["exact_match"] = when(generated, Share(outcome.Right(engine, false), count));
  json["prefill_fp16_us"] = when(reference, outcome.prefill_fp16_us());
  json["generate_fp16_us"] = when(reference, outcome.generate_fp16_us());
  json["exact_match_fp16"] = when(reference, Share(outcome.Right(engine, true), count));
  Json list = Json::array();
  for (std::size_t i = 0; i < count; ++i) {
    const Outcome::Prompt& prompt = outcome.prompts[i];
    const std::vector<eval::Token>& tokens = prompt.continued.tokens;
    const std::vector<eval::Token>& fp16 = prompt.reference.continued.tokens;
    list.push_back({{"tokens", engine.prompts[i].given.size()},
                    {"tokens_found", prompt.found},
                    {"records_sha256", prompt.records},
                    {"logits_sha256", prompt.continued.logits_digest},
                    {"prompt", TextOf(engine, engine.prompts[i].given)},
                    {"text", when(generated, TextOf(engine, tokens))},
                    {"right", when(generated, tokens == engine.prompts[i].answer)},
                    {"text_fp16", when(reference, TextOf(engine, fp16))},
                    {"right_fp16", when(reference, fp16 == engine.prompts[i].answer)}});
  }
  json["texts"] = std::move(list);
}

// Of a text, line by line: the last one, or the first with the last.
std::string LastLine(std::string text) {
  while (!text.empty() && text.back() == '\n') text.pop_back();
  return text.substr(text.rfind('\n') + 1);
}
std::string Ends(const std::string& text) {
  const std::string first = text.substr(0, text.find('\n')), last = LastLine(text);
  return first == last ? first : absl::StrCat(first, " ... ", last);
}

void ReportOutcome(const Engine& engine, const Outcome& outcome, bool reference, Report& report) {
  const std::size_t count = outcome.prompts.size();
  const auto right = [&](bool fp16) {
    return absl::StrCat(outcome.Right(engine, fp16), " of ", count);
  };
  report.Add("exact match", right(false),
             reference ? absl::StrCat("over 16 bits: ", right(true)) : "");
  report.Add("generated", HumanMicroseconds(outcome.generate_us()),
             reference
                 ? absl::StrCat("over 16 bits: ", HumanMicroseconds(outcome.generate_fp16_us()))
                 : "");
  report.Add("prompt 1 ends", LastLine(TextOf(engine, engine.prompts[0].given)));
  report.Add("and goes on", Ends(TextOf(engine, outcome.prompts[0].continued.tokens)));
  if (reference) {
    report.Add("over 16 bits", Ends(TextOf(engine, outcome.prompts[0].reference.continued.tokens)));
  }
}

absl::Status EvalPrefill(const CommonFlags& common, const EngineFlags& flags) {
  KVMILL_ASSIGN_OR_RETURN(const Engine engine, MakeEngine(common, flags));
  StoreOptions options;
  options.wait_durable = flags.wait;
  StoreResult total;
  Outcome outcome;
  absl::Duration prefill, store;
  std::uint64_t given = 0, stored = 0, blocks = 0, existing = 0, tail_tokens = 0;
  {
    Progress progress("computing");
    for (const eval::DemoPrompt& prompt : engine.prompts) {
      const auto cache = eval::DemoCache(engine.model, engine.ns.spec, prompt);
      const eval::Prefilled filled = eval::Prefill(engine.model, prompt, *cache);
      prefill += filled.time;
      const absl::Span<const eval::Token> shared = engine.Shared(prompt, flags.no_tail);
      const absl::Time start = absl::Now();
      KVMILL_ASSIGN_OR_RETURN(
          const StoreResult result,
          eval::StorePrompt(*engine.client, engine.ns, shared, filled.recording, options));
      store += absl::Now() - start;
      total.raw_bytes += result.raw_bytes;
      total.stored_bytes += result.stored_bytes;
      total.tile_bytes += result.tile_bytes;
      total.tile_raw_bytes += result.tile_raw_bytes;
      const std::size_t whole = shared.size() / engine.ns.spec.block_tokens;
      for (std::size_t b = 0; b < whole; ++b) {
        ++(result.blocks[b].outcome == StoreOutcome::kExisting ? existing : blocks);
      }
      given += prompt.given.size();
      stored += shared.size();
      tail_tokens += shared.size() % engine.ns.spec.block_tokens;
      Outcome::Prompt& its = outcome.prompts.emplace_back();
      its.records = eval::RecordsDigest(*cache);
      its.continued = eval::GoOn(
          engine.model, prompt, static_cast<std::uint32_t>(prompt.context().size()),
          flags.reference ? static_cast<std::uint32_t>(prompt.answer.size()) : 0, *cache);
      if (flags.reference) its.reference = eval::RunInSixteenBits(engine.model, prompt);
      progress.Update(outcome.prompts.size(), engine.prompts.size(), "prompts");
    }
  }
  if (common.json) {
    Json json = {{"task", flags.task},
                 {"prompts", engine.prompts.size()},
                 {"format", flags.format},
                 {"sink_blocks", flags.sink_blocks},
                 {"tokens", given},
                 {"tokens_stored", stored},
                 {"blocks_stored", blocks},
                 {"blocks_existing", existing},
                 {"tail_tokens", tail_tokens},
                 {"raw_bytes", total.raw_bytes},
                 {"encoded_bytes", total.stored_bytes},
                 {"compression_tiles", Ratio(total.tile_raw_bytes, total.tile_bytes)},
                 {"compression_total", Ratio(total.raw_bytes, total.stored_bytes)},
                 {"durable", flags.wait},
                 {"prefill_us", Microseconds(prefill)},
                 {"store_us", Microseconds(store)}};
    AddOutcome(engine, outcome, flags.reference, flags.reference, json);
    PrintJson(json);
    return absl::OkStatus();
  }
  Report report;
  report.Add("prompts", HumanCount(engine.prompts.size()),
             absl::StrCat(flags.task, ", ", HumanCount(given), " tokens"));
  report.Add("prefill", HumanMicroseconds(Microseconds(prefill)));
  report.Add("store", HumanMicroseconds(Microseconds(store)),
             absl::StrCat(flags.wait ? "durable" : "sealed", "; ", blocks, " blocks, ", existing,
                          " existed before; ", tail_tokens, " tokens in tails"));
  report.Add("16-bit K and V", HumanBytes(total.raw_bytes), "of what was stored");
  report.Add("stored", HumanBytes(total.stored_bytes), "pages with their headers");
  report.Add("compression", HumanRatio(total.raw_bytes, total.stored_bytes),
             absl::StrCat(HumanRatio(total.tile_raw_bytes, total.tile_bytes), " of the tiles"));
  if (flags.reference) ReportOutcome(engine, outcome, true, report);
  report.Print();
  return absl::OkStatus();
}

absl::Status EvalContinue(const CommonFlags& common, const EngineFlags& flags) {
  KVMILL_ASSIGN_OR_RETURN(const Engine engine, MakeEngine(common, flags));
  Outcome outcome;
  std::vector<std::unique_ptr<eval::TileCache>> caches;
  std::vector<Tier> tiers;
  absl::Duration fetch;
  std::uint64_t given = 0, found = 0, bytes = 0, generated = 0;
  for (const eval::DemoPrompt& prompt : engine.prompts) {
    caches.push_back(eval::DemoCache(engine.model, engine.ns.spec, prompt));
    const absl::Time start = absl::Now();
    KVMILL_ASSIGN_OR_RETURN(
        const eval::FetchedPrompt fetched,
        eval::FetchPrompt(*engine.client, engine.ns, engine.Shared(prompt, flags.no_tail),
                          *caches.back()));
    fetch += absl::Now() - start;
    given += prompt.given.size();
    found += fetched.tokens;
    bytes += fetched.page_bytes;
    tiers.insert(tiers.end(), fetched.tiers.begin(), fetched.tiers.end());
    Outcome::Prompt& its = outcome.prompts.emplace_back();
    its.found = fetched.tokens;
    its.records = eval::RecordsDigest(*caches.back());
  }
  if (found == 0) {
    return absl::NotFoundError(absl::StrCat("nothing of these prompts was found in namespace '",
                                            flags.name,
                                            "' ('kvmill eval prefill' with the same flags stores "
                                            "them)"));
  }
  {
    Progress progress("going on");
    for (std::size_t i = 0; i < engine.prompts.size(); ++i) {
      const eval::DemoPrompt& prompt = engine.prompts[i];
      Outcome::Prompt& its = outcome.prompts[i];
      its.continued = eval::GoOn(engine.model, prompt, its.found,
                                 static_cast<std::uint32_t>(prompt.answer.size()), *caches[i]);
      generated += its.continued.tokens.size();
      if (flags.reference) its.reference = eval::RunInSixteenBits(engine.model, prompt);
      progress.Update(i + 1, engine.prompts.size(), "prompts");
    }
  }
  if (common.json) {
    Json by_tier = Json::object();
    for (const auto& [name, count] : CountTiers(tiers)) by_tier[name] = count;
    Json json = {{"task", flags.task},
                 {"prompts", engine.prompts.size()},
                 {"format", flags.format},
                 {"sink_blocks", flags.sink_blocks},
                 {"tokens", given},
                 {"tokens_found", found},
                 {"tokens_recomputed", given - found},
                 {"tokens_generated", generated},
                 {"blocks", tiers.size()},
                 {"tiers", by_tier},
                 {"raw_bytes", engine.Fp16Bytes(found)},
                 {"fetched_bytes", bytes},
                 {"compression_total", Ratio(engine.Fp16Bytes(found), bytes)},
                 {"fetch_us", Microseconds(fetch)},
                 {"recompute_us", outcome.recompute_us()}};
    AddOutcome(engine, outcome, true, flags.reference, json);
    PrintJson(json);
    return absl::OkStatus();
  }
  const std::string from =
      absl::StrJoin(CountTiers(tiers), ", ", [](std::string* out, const auto& tier) {
        absl::StrAppend(out, tier.second, " from ", tier.first);
      });
  Report report;
  report.Add("prompts", HumanCount(engine.prompts.size()),
             absl::StrCat(flags.task, ", ", HumanCount(given), " tokens"));
  report.Add("found", HumanCount(found), absl::StrCat("tokens, in blocks: ", from));
  report.Add("recomputed", HumanCount(given - found),
             absl::StrCat("tokens, the last one of each among them; ",
                          HumanMicroseconds(outcome.recompute_us())));
  report.Add("16-bit K and V", HumanBytes(engine.Fp16Bytes(found)), "of what was found");
  report.Add("fetched", HumanBytes(bytes), "pages with their headers");
  report.Add("compression", HumanRatio(engine.Fp16Bytes(found), bytes));
  report.Add("fetch", HumanMicroseconds(Microseconds(fetch)),
             flags.reference ? absl::StrCat("computing the prompts instead, in 16 bits: ",
                                            HumanMicroseconds(outcome.prefill_fp16_us()))
                             : "");
  ReportOutcome(engine, outcome, flags.reference, report);
  report.Print();
  return absl::OkStatus();
}

void AddEngineFlags(CommandLine& line, CLI::App& app, EngineFlags& flags) {
  app.add_option("--namespace", flags.name, "Name of the namespace, bound at first use")
      ->capture_default_str();
  app.add_option("--task", flags.task, "Whose texts ('kvmill eval decode --help' lists tasks)")
      ->type_name("TASK")
      ->capture_default_str();
  app.add_option("--prompts", flags.prompts, "How many texts")
      ->check(CLI::Range(1u, kPromptsMax))
      ->type_name("N")
      ->capture_default_str();
  app.add_option("--seed", flags.seed, "Of the texts")->capture_default_str();
  app.add_option("--format", flags.format, std::string(kFormatHelp))
      ->type_name("FORMAT")
      ->capture_default_str();
  app.add_option("--sink-blocks", flags.sink_blocks, "First blocks that stay in 16 bits")
      ->check(CLI::Range(0u, 1000u))
      ->capture_default_str();
  app.add_flag("--no-tail", flags.no_tail,
               "Whole blocks only (another node's tails are not found)");
  app.add_flag("--reference", flags.reference, "Also without kvmill, in 16 bits");
  app.add_option("--model", flags.model,
                 "Header of a model's weights (default: the one that comes with kvmill)")
      ->type_name("FILE");
  line.AddPath(app);
}

}  // namespace

void AddEvalEngine(CommandLine& line, CLI::App& eval) {
  auto prefill = std::make_shared<EngineFlags>();
  CLI::App* app =
      line.Add(eval, "prefill", "Compute prompts with a small model and store their K and V",
               kPrefillHelp, [&line, prefill] { return EvalPrefill(line.flags(), *prefill); });
  AddEngineFlags(line, *app, *prefill);
  app->add_flag("--wait", prefill->wait, "Answer when the blocks survive a crash");
  auto go_on = std::make_shared<EngineFlags>();
  app = line.Add(eval, "continue", "Go on from what prefill stored, over the tiles as they are",
                 kContinueHelp, [&line, go_on] { return EvalContinue(line.flags(), *go_on); });
  AddEngineFlags(line, *app, *go_on);
}

}  // namespace kvmill::cli
