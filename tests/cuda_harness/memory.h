// The memory of the simulated device: named global allocations and the shared memory of the running
// block, each byte with its shadow.
#ifndef KVMILL_TESTS_CUDA_HARNESS_MEMORY_H_
#define KVMILL_TESTS_CUDA_HARNESS_MEMORY_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "tests/cuda_harness/shadow.h"

namespace kvmill {
namespace cuda_harness {

// A range of bytes that may be touched, inside a larger mapping that may not.
struct Region {
  std::string name;
  bool shared = false;
  std::unique_ptr<std::byte[]> storage;
  std::uintptr_t mapping = 0;  // With the red zones.
  std::size_t mapping_bytes = 0;
  std::uintptr_t first = 0;
  std::size_t bytes = 0;
  std::vector<Cell> cells;  // One a byte.
};

class Memory {
 public:
  Memory();
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  std::byte* Allocate(std::size_t bytes, const std::string& name);
  // Fresh shared memory for a block, filled with a pattern that is NaN as fp32, fp16 and bf16.
  std::byte* OpenShared(std::size_t bytes);

  // The region whose mapping holds the address, or null.
  Region* Find(std::uintptr_t address);

  static constexpr std::size_t kSharedBytesMax = 227 << 10;  // Of a block, on sm_90.
  static constexpr unsigned char kPoison = 0xFF;

 private:
  Region shared_;
  std::map<std::uintptr_t, std::unique_ptr<Region>> regions_;  // By where the mapping starts.
  Region* last_ = nullptr;
};

}  // namespace cuda_harness
}  // namespace kvmill

#endif  // KVMILL_TESTS_CUDA_HARNESS_MEMORY_H_
