// The engine demo: the small model as two engines. One computes the K and V of a prompt, the other
// goes on from what client/eval/handover.h brought it and computes only what is missing. Both take
// the same steps in the same chunks, so that what the second one says is to the bit what the first
// one would have said.
#ifndef KVMILL_CLIENT_EVAL_ENGINE_DEMO_H_
#define KVMILL_CLIENT_EVAL_ENGINE_DEMO_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "client/eval/kv_cache.h"
#include "client/eval/tile_cache.h"
#include "client/eval/tiny_model.h"
#include "client/eval/tiny_tasks.h"
#include "kernels/tile_format.h"
#include "storage/core/namespace.h"

namespace kvmill::eval {

struct DemoPrompt {
  std::vector<Token> given;   // A text up to its first answer.
  std::vector<Token> answer;  // What is right behind it.

  // What is handed over: an engine feeds the last token itself, for the logits behind it.
  absl::Span<const Token> context() const {
    return absl::MakeConstSpan(given).first(given.size() - 1);
  }
  // Tokens of a cache that has room for all of it.
  std::uint32_t tokens_max() const {
    return static_cast<std::uint32_t>(given.size() + answer.size());
  }
};

// The first `count` texts that `kvmill eval decode` makes of the task with that seed.
// INVALID_ARGUMENT when the model cannot read them.
absl::StatusOr<std::vector<DemoPrompt>> MakePrompts(const TinyModel& model, const Task& task,
                                                    std::uint32_t count, std::uint64_t seed);

// The model's blocks. Its revision is a digest of the weights: K and V of other weights are of
// another namespace.
NamespaceSpec DemoNamespace(const TinyModel& model, const TileFormat& format,
                            std::uint32_t sink_blocks);

// An empty cache for a prompt and its answer, of such a namespace.
std::unique_ptr<TileCache> DemoCache(const TinyModel& model, const NamespaceSpec& spec,
                                     const DemoPrompt& prompt);

struct Prefilled {
  Recording recording;  // K and V of the context, for StorePrompt.
  absl::Duration time;
};
// Feeds the context to an empty cache.
Prefilled Prefill(const TinyModel& model, const DemoPrompt& prompt, KvCache& cache);

// SHA-256, in lower-case hex.
std::string HexDigest(absl::string_view bytes);

// Of all records that the cache has now, layer by layer.
std::string RecordsDigest(const TileCache& cache);

struct Continued {
  std::string logits_digest;  // Of the floats that the first generated token was taken from.
  std::vector<Token> tokens;  // Generated, each the likeliest.
  absl::Duration recompute;   // Of the given tokens that were not there, the last one included,
  absl::Duration generate;    // and of all generated ones.
};
// `cache` has the first `found` tokens of the context. `count` 0: only the logits.
Continued GoOn(const TinyModel& model, const DemoPrompt& prompt, std::uint32_t found,
               std::uint32_t count, KvCache& cache);

// The same without kvmill: context and answer over a cache in 16 bits.
struct InSixteenBits {
  absl::Duration prefill;
  Continued continued;
};
InSixteenBits RunInSixteenBits(const TinyModel& model, const DemoPrompt& prompt);

}  // namespace kvmill::eval

#endif  // KVMILL_CLIENT_EVAL_ENGINE_DEMO_H_
