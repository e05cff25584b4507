#include "kernels/generation_check.h"

namespace kvmill {

void CheckGenerationsReference(const GenerationCheck* checks, std::size_t check_count,
                               std::uint32_t* changed) {
  // What was read before must not move behind the loads below.
  __atomic_thread_fence(__ATOMIC_ACQUIRE);
  for (std::size_t i = 0; i < check_count; ++i) {
    const std::uint64_t now = __atomic_load_n(checks[i].word, __ATOMIC_RELAXED);
    if (now != checks[i].expected || now % 2 != 0) ++*changed;
  }
}

}  // namespace kvmill
