#include "storage/error_guard.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "storage/core/log.h"

namespace kvmill {
namespace {

std::string Percent(double ratio) { return absl::StrCat(std::round(1000 * ratio) / 10, " %"); }

bool Above(double error, double limit) { return limit > 0 && error > limit; }

std::string BitsName(const NamespaceSpec& spec) {
  if (spec.sink_blocks == kAllBlocksRaw) return "raw";
  return absl::StrCat("k", int{spec.key_bits}, "v", int{spec.value_bits});
}

// Without what an earlier fall-back put behind it.
absl::string_view BaseName(absl::string_view name) {
  const std::size_t at = name.rfind('~');
  if (at == name.npos || at == 0) return name;
  for (const absl::string_view bits : {"k2v4", "k3v4", "k4v2", "k4v4", "raw"}) {
    if (name.substr(at + 1) == bits) return name.substr(0, at);
  }
  return name;
}

}  // namespace

std::optional<FallbackNamespace> FallbackOf(absl::string_view name, const NamespaceSpec& spec,
                                            bool key_above, bool value_above) {
  FallbackNamespace fallback{.name = "", .spec = spec};
  const auto raise = [&fallback](std::uint8_t* bits) {
    if (*bits == 4) fallback.spec.sink_blocks = kAllBlocksRaw;
    *bits = 4;
  };
  if (key_above) raise(&fallback.spec.key_bits);
  if (value_above) raise(&fallback.spec.value_bits);
  // Of raw blocks they say nothing: one namespace of them and not one for each way there.
  if (fallback.spec.sink_blocks == kAllBlocksRaw) {
    fallback.spec.key_bits = 4;
    fallback.spec.value_bits = 4;
  }
  fallback.name = absl::StrCat(BaseName(name), "~", BitsName(fallback.spec));
  if (fallback.spec == spec || fallback.name.size() > kNamespaceNameBytesMax) return std::nullopt;
  return fallback;
}

std::string ErrorGuard::MeasuredLocked(const Trip& trip) const {
  std::string text;
  const auto add = [&text](const char* half, double error, double limit) {
    absl::StrAppend(&text, text.empty() ? "" : " and ", Percent(error), " of ", half, " (limit ",
                    Percent(limit), ")");
  };
  if (trip.key_above) add("K", trip.key_error, options_.key_error_max);
  if (trip.value_above) add("V", trip.value_error, options_.value_error_max);
  return text;
}

std::string ErrorGuard::AdviceLocked(const OpenedNamespace& space, const Trip& trip) const {
  const std::optional<FallbackNamespace> fallback =
      FallbackOf(space.name, space.spec, trip.key_above, trip.value_above);
  if (!fallback.has_value()) return "its name is too long for a fall-back: use a higher format";
  const NamespaceSpec& spec = fallback->spec;
  return absl::StrCat(
      "use \"", fallback->name, "\" with ",
      spec.sink_blocks == kAllBlocksRaw ? absl::StrCat("sink_blocks ", spec.sink_blocks, ", ") : "",
      "key_bits ", int{spec.key_bits}, ", value_bits ", int{spec.value_bits}, " instead");
}

void ErrorGuard::SetOptions(const Options& options) {
  std::vector<Trip> over;
  {
    MutexLock lock(mu_);
    options_ = options;
    for (auto& [id, window] : windows_) {
      Trip& trip = window.tripped;
      if (window.trip == 0) continue;
      trip.key_above = Above(trip.key_error, options.key_error_max);
      trip.value_above = Above(trip.value_error, options.value_error_max);
      if (trip.key_above || trip.value_above) continue;
      over.push_back(std::move(trip));
      window = Window();
      tripped_count_.fetch_sub(1, std::memory_order_relaxed);
    }
  }
  for (const Trip& trip : over) {
    LogInfo(absl::StrCat("guard: namespace \"", trip.name, "\" is within the new limits"),
            {{"tenant", trip.tenant}, {"namespace", trip.name}});
  }
}

void ErrorGuard::Observe(const OpenedNamespace& space, double key_error, double value_error) {
  std::string line;
  {
    MutexLock lock(mu_);
    Window& window = windows_[space.id];
    if (window.trip != 0) return;
    window.key_sum += key_error;
    window.value_sum += value_error;
    if (++window.samples < options_.window_samples) return;
    Trip trip{.tenant = space.spec.tenant, .name = space.name};
    trip.key_error = window.key_sum / window.samples;
    trip.value_error = window.value_sum / window.samples;
    trip.key_above = Above(trip.key_error, options_.key_error_max);
    trip.value_above = Above(trip.value_error, options_.value_error_max);
    window = Window();
    if (!trip.key_above && !trip.value_above) return;
    window.trip = ++trips_;
    window.tripped = trip;
    tripped_count_.fetch_add(1, std::memory_order_relaxed);
    line = absl::StrCat(
        "guard: ", BitsName(space.spec), " tiles of namespace \"", space.name, "\" lose ",
        MeasuredLocked(trip), "; ",
        options_.action == GuardAction::kAlert ? "it goes on: " : "it takes no more blocks: ",
        AdviceLocked(space, trip));
  }
  LogWarning(line, {{"tenant", space.spec.tenant},
                    {"namespace", space.name},
                    {"fingerprint", ToHex(space.fingerprint)}});
}

absl::Status ErrorGuard::CheckStore(const OpenedNamespace& space) const {
  if (tripped_count_.load(std::memory_order_relaxed) == 0) return absl::OkStatus();
  MutexLock lock(mu_);
  if (options_.action == GuardAction::kAlert) return absl::OkStatus();
  const auto known = windows_.find(space.id);
  if (known == windows_.end() || known->second.trip == 0) return absl::OkStatus();
  const Trip& trip = known->second.tripped;
  return absl::FailedPreconditionError(
      absl::StrCat(BitsName(space.spec), " tiles of namespace \"", space.name, "\" lose ",
                   MeasuredLocked(trip), ", and it takes no more blocks: ",
                   options_.action == GuardAction::kFallBack ? AdviceLocked(space, trip)
                                                             : "--guard-action is refuse"));
}

std::optional<ErrorGuard::Trip> ErrorGuard::TripOf(NamespaceId id) const {
  if (tripped_count_.load(std::memory_order_relaxed) == 0) return std::nullopt;
  MutexLock lock(mu_);
  const auto known = windows_.find(id);
  if (known == windows_.end() || known->second.trip == 0) return std::nullopt;
  return known->second.tripped;
}

std::vector<ErrorGuard::Trip> ErrorGuard::trips() const {
  std::vector<std::pair<std::uint64_t, Trip>> numbered;
  {
    MutexLock lock(mu_);
    for (const auto& [id, window] : windows_) {
      if (window.trip != 0) numbered.emplace_back(window.trip, window.tripped);
    }
  }
  std::sort(numbered.begin(), numbered.end(),
            [](const auto& a, const auto& b) { return a.first < b.first; });
  std::vector<Trip> trips;
  for (auto& [number, trip] : numbered) trips.push_back(std::move(trip));
  return trips;
}

}  // namespace kvmill
