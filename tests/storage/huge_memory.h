// What the kernel says of a mapping of shared memory.
#ifndef KVMILL_TESTS_STORAGE_HUGE_MEMORY_H_
#define KVMILL_TESTS_STORAGE_HUGE_MEMORY_H_

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <sstream>
#include <string>

namespace kvmill::testing {

// Bytes that this process has mapped as huge pages, of the mapping that `address` lies in.
inline std::uint64_t HugeBytesAt(const void* address) {
  const auto at = reinterpret_cast<std::uintptr_t>(address);
  std::ifstream file("/proc/self/smaps");
  std::string line;
  bool here = false;
  while (std::getline(file, line)) {
    std::uintptr_t begin = 0;
    std::uintptr_t end = 0;
    if (std::sscanf(line.c_str(), "%zx-%zx ", &begin, &end) == 2) here = begin <= at && at < end;
    unsigned long long kb = 0;
    if (here && std::sscanf(line.c_str(), "ShmemPmdMapped: %llu kB", &kb) == 1) return kb << 10;
  }
  ADD_FAILURE() << "no mapping at " << address;
  return 0;
}

// Whether this machine gives huge pages to every memfd, asked for or not.
inline bool SharedMemoryIsHugeAnyway() {
  std::ifstream file("/sys/kernel/mm/transparent_hugepage/shmem_enabled");
  std::stringstream text;
  text << file.rdbuf();
  return text.str().find("[always]") != std::string::npos ||
         text.str().find("[force]") != std::string::npos;
}

}  // namespace kvmill::testing

#endif  // KVMILL_TESTS_STORAGE_HUGE_MEMORY_H_
