#include "client/eval/engine_demo.h"

#include <cstddef>
#include <numeric>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "client/eval/tiny_decoder.h"
#include "storage/core/check.h"
#include "storage/core/sha256.h"
#include "storage/core/status_macros.h"

namespace kvmill::eval {
namespace {

absl::string_view BytesOf(absl::Span<const float> values) {
  return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(float)};
}

std::string Revision(const TinyModel& model) {
  std::string weights;
  const auto add = [&](absl::Span<const float> values) {
    absl::StrAppend(&weights, BytesOf(values));
  };
  add(model.embedding());
  add(model.output_norm());
  for (const TinyLayer& layer : model.layers()) {
    for (const std::vector<float>* values :
         {&layer.attention_norm, &layer.qkv, &layer.attention_out, &layer.mlp_norm, &layer.gate_up,
          &layer.down}) {
      add(*values);
    }
  }
  return HexDigest(weights);
}

}  // namespace

absl::StatusOr<std::vector<DemoPrompt>> MakePrompts(const TinyModel& model, const Task& task,
                                                    std::uint32_t count, std::uint64_t seed) {
  Random random = TaskRandom(task, seed);
  std::vector<DemoPrompt> prompts;
  while (prompts.size() < count) {
    const TaskText text = task.make(random);
    KVMILL_ASSIGN_OR_RETURN(const std::vector<Token> tokens, model.Encode(text.text));
    const TaskText::Range answer = text.answers.front();
    if (answer.end > model.config().tokens_max) {
      return absl::InvalidArgumentError(absl::StrCat("a text of task ", task.name, " has ",
                                                     answer.end, " tokens, and the model takes ",
                                                     model.config().tokens_max));
    }
    const auto begin = tokens.begin() + answer.begin, end = tokens.begin() + answer.end;
    prompts.push_back({{tokens.begin(), begin}, {begin, end}});
  }
  return prompts;
}

NamespaceSpec DemoNamespace(const TinyModel& model, const TileFormat& format,
                            std::uint32_t sink_blocks) {
  const TinyConfig& config = model.config();
  LayerGroup group;
  group.layers.resize(config.layers);
  std::iota(group.layers.begin(), group.layers.end(), std::uint16_t{0});
  group.kv_heads = 1;
  group.head_dim = static_cast<std::uint16_t>(config.head_dim);
  NamespaceSpec spec;
  spec.model = "tiny-lm";
  spec.revision = Revision(model);
  spec.hash_scheme = "kvmill-tiny-1";
  spec.source_dtype = DType::kFloat16;
  spec.groups = {std::move(group)};
  spec.block_tokens = format.group;
  spec.key_bits = format.key_bits;
  spec.value_bits = format.value_bits;
  spec.sink_blocks = sink_blocks;
  return spec;
}

std::unique_ptr<TileCache> DemoCache(const TinyModel& model, const NamespaceSpec& spec,
                                     const DemoPrompt& prompt) {
  TileCache::Options options;
  options.tokens_max = prompt.tokens_max();
  options.format = FormatOf(spec, spec.groups[0]);
  options.sink_blocks = spec.sink_blocks;
  return std::make_unique<TileCache>(model.config(), options);
}

Prefilled Prefill(const TinyModel& model, const DemoPrompt& prompt, KvCache& cache) {
  const absl::Time start = absl::Now();
  RecordingCache recorder(cache, model.config().layers, model.config().head_dim);
  TinyDecoder(model, recorder).Feed(prompt.context());
  const absl::Duration time = absl::Now() - start;
  return {recorder.recording(), time};
}

std::string HexDigest(absl::string_view bytes) {
  const Sha256Digest digest = Sha256(bytes);
  return absl::BytesToHexString({reinterpret_cast<const char*>(digest.data()), digest.size()});
}

std::string RecordsDigest(const TileCache& cache) {
  std::string bytes;
  for (const absl::Span<const std::byte> record : cache.Records()) {
    bytes.append(reinterpret_cast<const char*>(record.data()), record.size());
  }
  return HexDigest(bytes);
}

Continued GoOn(const TinyModel& model, const DemoPrompt& prompt, std::uint32_t found,
               std::uint32_t count, KvCache& cache) {
  const absl::Span<const Token> context = prompt.context();
  KVMILL_CHECK(found <= context.size());
  const absl::Time start = absl::Now();
  TinyDecoder decoder(model, cache, found);
  decoder.Feed(context.subspan(found));
  std::vector<float> logits(model.config().vocabulary);
  // On its own: a token more in its chunk may sum its logits in another order.
  decoder.Feed(absl::MakeConstSpan(&prompt.given.back(), 1), absl::MakeSpan(logits));
  const absl::Time ready = absl::Now();
  Continued continued;
  continued.logits_digest = HexDigest(BytesOf(logits));
  continued.recompute = ready - start;
  continued.tokens = decoder.Continue(logits, count);
  continued.generate = absl::Now() - ready;
  return continued;
}

InSixteenBits RunInSixteenBits(const TinyModel& model, const DemoPrompt& prompt) {
  TileCache::Options options;
  options.tokens_max = prompt.tokens_max();
  options.format.head_dim = static_cast<std::uint16_t>(model.config().head_dim);
  options.sink_blocks = TileCache::kAllBlocks;
  TileCache cache(model.config(), options);
  const absl::Time start = absl::Now();
  TinyDecoder(model, cache).Feed(prompt.context());
  InSixteenBits run;
  run.prefill = absl::Now() - start;
  run.continued = GoOn(model, prompt, static_cast<std::uint32_t>(prompt.context().size()),
                       static_cast<std::uint32_t>(prompt.answer.size()), cache);
  return run;
}

}  // namespace kvmill::eval
