#include "client/eval/methods.h"

#include <algorithm>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "client/eval/kitty.h"
#include "client/eval/kvarn.h"
#include "client/eval/kvquant.h"
#include "client/eval/polarquant.h"
#include "client/eval/round_to_nearest.h"
#include "client/eval/turboquant.h"

namespace kvmill::eval {
namespace {

constexpr absl::string_view kBaselines = "baselines";
constexpr absl::string_view kAblations = "ablations";
constexpr absl::string_view kRefinements = "refinements";

std::unique_ptr<Quantizer> Rounded(const TileFormat& f, Axis key_axis, std::size_t group,
                                   bool rotate, float clip_ratio = 1) {
  return MakeRounding({.key_bits = f.key_bits,
                       .value_bits = f.value_bits,
                       .key_axis = key_axis,
                       .group = group,
                       .rotate = rotate,
                       .clip_ratio = clip_ratio});
}

template <int kIterations>
std::unique_ptr<Quantizer> Iterated(const TileFormat& f) {
  return MakeKvarnWith(f, {.iterations = kIterations});
}

const Method kMethods[] = {
    {"kvarn", "", "KVarN, by the kernels of kvmilld (3-bit V: as kvarn-reference)",
     [](const TileFormat& f) { return HasTiles(f) ? MakeKvarn(f) : MakeKvarnWith(f, {}); }},
    {"rtn", kBaselines, "round to nearest, K and V per token",
     [](const TileFormat& f) { return Rounded(f, Axis::kPerToken, f.head_dim, false); }},
    {"kivi-g32", kBaselines, "KIVI: K per channel, V per token, groups of 32",
     [](const TileFormat& f) { return Rounded(f, Axis::kPerChannel, 32, false); }},
    {"kivi-g128", kBaselines, "KIVI with groups of 128",
     [](const TileFormat& f) { return Rounded(f, Axis::kPerChannel, 128, false); }},
    {"hadamard-kivi", kBaselines, "Hadamard rotation, then KIVI's axes, groups of 128",
     [](const TileFormat& f) { return Rounded(f, Axis::kPerChannel, 128, true); }},
    {"quarot", kBaselines, "QuaRot: Hadamard rotation, per token, range cut to 0.95",
     [](const TileFormat& f) { return Rounded(f, Axis::kPerToken, 128, true, 0.95f); }},
    {"turboquant", kBaselines, "TurboQuant: random rotation, Lloyd-Max codebook",
     [](const TileFormat& f) { return MakeTurboQuant(f.key_bits, f.value_bits, f.head_dim); }},
    {"polarquant", kBaselines, "PolarQuant: radius and angle of K's pairs, V per token",
     [](const TileFormat& f) { return MakePolarQuant(f.key_bits, f.value_bits, f.group); }},
    {"kvquant-1pct", kBaselines, "KVQuant: K per channel, levels by k-means, 1 % kept",
     [](const TileFormat& f) { return MakeKvQuant(f.key_bits, f.value_bits, f.group, 0.01); }},
    {"kitty", kBaselines, "Kitty: KIVI's axes, an eighth of K's channels with 4 bits",
     [](const TileFormat& f) { return MakeKitty(f.key_bits, f.value_bits, f.group, 0.125); }, true},
    {"kitty-pro", kBaselines, "Kitty with a quarter of K's channels with 4 bits",
     [](const TileFormat& f) { return MakeKitty(f.key_bits, f.value_bits, f.group, 0.25); }, true},
    {"kvarn-reference", kAblations, "KVarN as the ablations have it, nothing taken away",
     [](const TileFormat& f) { return MakeKvarnWith(f, {}); }},
    {"kvarn-no-rotation", kAblations, "without the rotation",
     [](const TileFormat& f) { return MakeKvarnWith(f, {.rotate = false}); }},
    {"kvarn-no-normalization", kAblations, "without the normalization",
     [](const TileFormat& f) { return MakeKvarnWith(f, {.iterations = 0}); }},
    {"kvarn-token-axis", kAblations, "normalized over tokens only",
     [](const TileFormat& f) { return MakeKvarnWith(f, {.channel_axis = false}); }},
    {"kvarn-channel-axis", kAblations, "normalized over channels only",
     [](const TileFormat& f) { return MakeKvarnWith(f, {.token_axis = false}); }},
    {"kvarn-open-clamp", kAblations, "scales of less than exp(-0.3), too",
     [](const TileFormat& f) { return MakeKvarnWith(f, {.log_scale_min = -10}); }},
    {"kvarn-1-iteration", kAblations, "1 iteration instead of 8", Iterated<1>},
    {"kvarn-4-iterations", kAblations, "4 iterations", Iterated<4>},
    {"kvarn-16-iterations", kAblations, "16 iterations", Iterated<16>},
    {"refined", kRefinements, "least squares, then stretched: --algorithm refined",
     [](const TileFormat& f) {
       return HasTiles(f) ? MakeKvarn(f, Algorithm::kRefined)
                          : MakeKvarnWith(f, {.refit = true, .stretch = true});
     }},
    {"refined-refit", kRefinements, "least squares alone for S and Z",
     [](const TileFormat& f) { return MakeKvarnWith(f, {.refit = true}); }},
    {"refined-refit-k", kRefinements, "least squares for K alone",
     [](const TileFormat& f) { return MakeKvarnWith(f, {.refit_keys = true}); }},
    {"refined-refit-v", kRefinements, "least squares for V alone",
     [](const TileFormat& f) { return MakeKvarnWith(f, {.refit_values = true}); }},
    {"refined-clip-v", kRefinements, "clipping search for V",
     [](const TileFormat& f) { return MakeKvarnWith(f, {.clip_values = true}); }},
    {"refined-clip-v-refit", kRefinements, "clipping search for V, least squares for both",
     [](const TileFormat& f) { return MakeKvarnWith(f, {.clip_values = true, .refit = true}); }},
    {"refined-all", kRefinements, "clipping search and least squares for K and V",
     [](const TileFormat& f) {
       return MakeKvarnWith(f, {.clip_keys = true, .clip_values = true, .refit = true});
     }},
};

}  // namespace

absl::StatusOr<TileFormat> ParseStudyFormat(absl::string_view name, std::uint32_t head_dim) {
  // As a name of a tile, where 4 stands in for 3.
  constexpr std::size_t kDigit = 3;
  std::string tile(name);
  const bool three = kDigit < tile.size() && tile[kDigit] == '3';
  if (three) tile[kDigit] = '4';
  absl::StatusOr<TileFormat> format = ParseTileFormat(tile, head_dim);
  if (format.ok() && three) format->value_bits = 3;
  return format;
}

absl::Span<const Method> AllMethods() { return kMethods; }

absl::StatusOr<std::vector<const Method*>> FindMethods(absl::Span<const std::string> names) {
  std::vector<const Method*> found;
  const auto add = [&](const Method& method) {
    if (std::find(found.begin(), found.end(), &method) == found.end()) found.push_back(&method);
  };
  for (const std::string& name : names) {
    bool known = false;
    for (const Method& method : kMethods) {
      if (name != method.name && (name.empty() || name != method.set)) continue;
      known = true;
      add(method);
    }
    if (known) continue;
    return absl::InvalidArgumentError(absl::StrCat(
        "there is no method '", name, "'; methods: ",
        absl::StrJoin(kMethods, ", ",
                      [](std::string* out, const Method& m) { absl::StrAppend(out, m.name); }),
        "; sets: ", kBaselines, ", ", kAblations, ", ", kRefinements));
  }
  return found;
}

}  // namespace kvmill::eval
