// Where a block can be.
#ifndef KVMILL_STORAGE_CORE_TIER_H_
#define KVMILL_STORAGE_CORE_TIER_H_

#include <cstddef>
#include <cstdint>

namespace kvmill {

enum class Tier : std::uint8_t { kGpu = 0, kHost = 1, kDisk = 2, kPeer = 3 };
inline constexpr std::size_t kTierCount = 4;
constexpr const char* TierName(Tier tier) {
  constexpr const char* kNames[kTierCount] = {"gpu", "host", "disk", "peer"};
  return kNames[static_cast<std::size_t>(tier)];
}

}  // namespace kvmill

#endif  // KVMILL_STORAGE_CORE_TIER_H_
