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

// Where a reader in another process wants the pages of a block.
enum class PageMemory : std::uint8_t {
  kHost = 0,     // Host memory; of a block on the GPU a copy.
  kInPlace = 1,  // Where they are: host memory or the GPU's.
  kGpu = 2,      // The GPU's; the block is brought there first.
};

}  // namespace kvmill

#endif  // KVMILL_STORAGE_CORE_TIER_H_
