// What the harness remembers of every byte that a kernel may touch: who wrote it last, and who has
// read it since.
#ifndef KVMILL_TESTS_CUDA_HARNESS_SHADOW_H_
#define KVMILL_TESTS_CUDA_HARNESS_SHADOW_H_

#include <cstdint>

namespace kvmill {
namespace cuda_harness {

// Whose accesses a stamp stands for. Concurrent readers collapse into the smallest group that holds
// them: a later write is unordered with at least one of them unless the whole group is ordered.
enum class Who : std::uint8_t { kNobody, kThread, kWarp, kBlock, kBlocks };

// When an access was: kernel launch, block, barriers that the block had passed, full warp syncs
// that the warp had passed.
struct Stamp {
  std::uint32_t launch = 0;
  std::uint32_t block = 0;
  std::uint32_t barriers = 0;
  std::uint32_t warp_syncs = 0;
  std::uint16_t thread = 0;
  Who who = Who::kNobody;
  bool atomic = false;
};

struct Cell {
  Stamp write;
  Stamp read;
  bool written = false;  // Shared memory starts out without a value.
  bool pending = false;  // Destination of an asynchronous copy that nobody waited for.
};

// The stamp that stands for both readers, `before` not being ordered before `now`.
inline Stamp Join(const Stamp& before, const Stamp& now) {
  Stamp both = now;
  if (before.block != now.block || before.who == Who::kBlocks) {
    both.who = Who::kBlocks;
  } else if (before.thread / 32 != now.thread / 32 || before.who == Who::kBlock) {
    both.who = Who::kBlock;
  } else {
    both.who = Who::kWarp;
    if (before.warp_syncs > both.warp_syncs) both.warp_syncs = before.warp_syncs;
  }
  return both;
}

}  // namespace cuda_harness
}  // namespace kvmill

#endif  // KVMILL_TESTS_CUDA_HARNESS_SHADOW_H_
