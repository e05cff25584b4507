#include "storage/eviction/policy.h"

#include <array>
#include <string>

#include "absl/strings/str_cat.h"
#include "storage/eviction/policies.h"

namespace kvmill {
namespace {

constexpr std::array<std::string_view, 6> kNames = {"returns",   "lru",     "arc",
                                                    "w-tinylfu", "s3-fifo", "sieve"};
constexpr std::array kMakers = {&NewReturnsPolicy, &NewLruPolicy,    &NewArcPolicy,
                                &NewTinyLfuPolicy, &NewS3FifoPolicy, &NewSievePolicy};
static_assert(kNames.size() == kMakers.size());

constexpr std::uint32_t kEntriesMax = 1u << 31;  // Above them list sentinels need ids, too.

}  // namespace

const std::string_view kDefaultEvictionPolicy = kNames[0];

absl::Span<const std::string_view> EvictionPolicyNames() { return kNames; }

absl::StatusOr<std::unique_ptr<EvictionPolicy>> CreateEvictionPolicy(
    std::string_view name, const EvictionPolicy::Options& options) {
  const std::string called(name);  // Debian's absl::string_view is a type of its own.
  if (options.entries_max == 0 || options.entries_max > kEntriesMax) {
    return absl::InvalidArgumentError(absl::StrCat("eviction policy ", called, ": entries_max is ",
                                                   options.entries_max, ", must be 1 to ",
                                                   kEntriesMax));
  }
  if (options.capacity_blocks == 0 || options.capacity_blocks > options.entries_max) {
    return absl::InvalidArgumentError(
        absl::StrCat("eviction policy ", called, ": capacity_blocks is ", options.capacity_blocks,
                     ", must be 1 to entries_max, which is ", options.entries_max));
  }
  std::string known;
  for (std::size_t i = 0; i < kNames.size(); ++i) {
    if (kNames[i] == name) return kMakers[i](options);
    absl::StrAppend(&known, i == 0 ? "" : ", ", std::string(kNames[i]));
  }
  return absl::InvalidArgumentError(
      absl::StrCat("unknown eviction policy \"", called, "\"; known: ", known));
}

}  // namespace kvmill
