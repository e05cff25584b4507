// Counts what a program allocates by operator new. It defines the operators: to be included by one
// file of a program.
#ifndef KVMILL_TESTS_COUNT_ALLOCATIONS_H_
#define KVMILL_TESTS_COUNT_ALLOCATIONS_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <new>

namespace kvmill::testing {

inline std::atomic<std::uint64_t> allocations{0};

}  // namespace kvmill::testing

// Not inlined: else the compiler sees malloc's memory given to operator delete, or the reverse.
[[gnu::noinline]] void* operator new(std::size_t bytes) {
  kvmill::testing::allocations.fetch_add(1, std::memory_order_relaxed);
  void* const memory = std::malloc(bytes);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, std::size_t /*bytes*/) noexcept {
  std::free(memory);
}

#endif  // KVMILL_TESTS_COUNT_ALLOCATIONS_H_
