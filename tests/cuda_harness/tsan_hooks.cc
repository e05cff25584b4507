// What the compiler calls before every memory access of code compiled with -fsanitize=thread. No
// sanitizer runtime is linked: these are the harness's eyes.
#include <cstddef>
#include <cstdint>

#include "tests/cuda_harness/executor.h"

namespace kvmill {
namespace cuda_harness {
namespace {

void Check(void* address, std::size_t bytes, AccessKind kind, bool aligned) {
  if (kernel_thread == nullptr) return;
  const InHarness guard;
  Executor::Current()->Access(reinterpret_cast<std::uintptr_t>(address), bytes, kind, aligned);
}

}  // namespace
}  // namespace cuda_harness
}  // namespace kvmill

using kvmill::cuda_harness::AccessKind;
using kvmill::cuda_harness::Check;

// NOLINTBEGIN(bugprone-reserved-identifier): the compiler chose the names.
extern "C" {

void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}

#define KVMILL_HOOKS(bytes)                                                               \
  void __tsan_read##bytes(void* p) { Check(p, bytes, AccessKind::kRead, true); }          \
  void __tsan_write##bytes(void* p) { Check(p, bytes, AccessKind::kWrite, true); }        \
  void __tsan_volatile_read##bytes(void* p) { Check(p, bytes, AccessKind::kRead, true); } \
  void __tsan_volatile_write##bytes(void* p) { Check(p, bytes, AccessKind::kWrite, true); }
KVMILL_HOOKS(1)
KVMILL_HOOKS(2)
KVMILL_HOOKS(4)
KVMILL_HOOKS(8)
KVMILL_HOOKS(16)

#define KVMILL_UNALIGNED_HOOKS(bytes)                                                       \
  void __tsan_unaligned_read##bytes(void* p) { Check(p, bytes, AccessKind::kRead, false); } \
  void __tsan_unaligned_write##bytes(void* p) { Check(p, bytes, AccessKind::kWrite, false); }
KVMILL_UNALIGNED_HOOKS(2)
KVMILL_UNALIGNED_HOOKS(4)
KVMILL_UNALIGNED_HOOKS(8)
KVMILL_UNALIGNED_HOOKS(16)

void __tsan_read_range(void* p, std::size_t bytes) { Check(p, bytes, AccessKind::kRead, false); }
void __tsan_write_range(void* p, std::size_t bytes) { Check(p, bytes, AccessKind::kWrite, false); }

void* __tsan_memcpy(void* to, const void* from, std::size_t bytes) {
  __tsan_read_range(const_cast<void*>(from), bytes);
  __tsan_write_range(to, bytes);
  return __builtin_memcpy(to, from, bytes);
}
void* __tsan_memset(void* to, int value, std::size_t bytes) {
  __tsan_write_range(to, bytes);
  return __builtin_memset(to, value, bytes);
}

// Atomics of the launchers' host code (reference counts of a status). Kernels have AtomicAdd().
#define KVMILL_ATOMIC_HOOKS(bits)                                                                 \
  std::uint##bits##_t __tsan_atomic##bits##_load(const volatile std::uint##bits##_t* p, int) {    \
    return __atomic_load_n(p, __ATOMIC_SEQ_CST);                                                  \
  }                                                                                               \
  void __tsan_atomic##bits##_store(volatile std::uint##bits##_t* p, std::uint##bits##_t v, int) { \
    __atomic_store_n(p, v, __ATOMIC_SEQ_CST);                                                     \
  }                                                                                               \
  std::uint##bits##_t __tsan_atomic##bits##_fetch_add(volatile std::uint##bits##_t* p,            \
                                                      std::uint##bits##_t v, int) {               \
    return __atomic_fetch_add(p, v, __ATOMIC_SEQ_CST);                                            \
  }                                                                                               \
  std::uint##bits##_t __tsan_atomic##bits##_fetch_sub(volatile std::uint##bits##_t* p,            \
                                                      std::uint##bits##_t v, int) {               \
    return __atomic_fetch_sub(p, v, __ATOMIC_SEQ_CST);                                            \
  }
KVMILL_ATOMIC_HOOKS(32)
KVMILL_ATOMIC_HOOKS(64)

}  // extern "C"
// NOLINTEND(bugprone-reserved-identifier)
