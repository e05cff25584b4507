// How much host memory a process may still hope for. Asked before memory is promised: what is
// promised and not there ends in the out-of-memory killer.
#ifndef KVMILL_STORAGE_CORE_MEMORY_LIMIT_H_
#define KVMILL_STORAGE_CORE_MEMORY_LIMIT_H_

#include <cstdint>

namespace kvmill {

// What one process can hope to get: the machine's available memory or its control group's limit.
// UINT64_MAX when neither can be read. Thread-safe.
std::uint64_t MemoryLimitBytes();

}  // namespace kvmill

#endif  // KVMILL_STORAGE_CORE_MEMORY_LIMIT_H_
