// Huge pages (2 MiB) under memory that is shared by descriptor.
//
// A memfd has small pages unless the machine's administrator said otherwise (shmem_enabled).
// Readers that go through many blocks then wait for address translations: decision 0020. Linux 6.1
// gathers a range into a huge page on request, whatever that setting says, short of "deny".
//
// Internal to storage/, except for the choice. Thread-safe.
#ifndef KVMILL_STORAGE_HUGE_PAGES_H_
#define KVMILL_STORAGE_HUGE_PAGES_H_

#include <cstddef>
#include <cstdint>

namespace kvmill {

enum class HugePages : std::uint8_t {
  kAuto,  // As many as the kernel gives.
  kOn,    // Everything at the start, or no start.
  kOff,
};

// Puts 2 MiB of a shared, writable mapping of a memfd, aligned to as much, into one huge page, for
// everyone who maps them so aligned. What is there stays, what is not is zeroed. 0, or the errno:
// EINVAL: this kernel does not do it; others: not now, since no 2 MiB of free memory lie together.
int GatherHugePage(std::byte* extent);

}  // namespace kvmill

#endif  // KVMILL_STORAGE_HUGE_PAGES_H_
