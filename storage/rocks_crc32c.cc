#include "storage/rocks_crc32c.h"

#include <dlfcn.h>
#include <isa-l/crc.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace rocksdb {
namespace crc32c {

// As declared in RocksDB's util/crc32c.h, which is not installed: the checksum of what `init_crc`
// is the checksum of, followed by `data`.
__attribute__((visibility("default"))) std::uint32_t Extend(std::uint32_t init_crc,
                                                            const char* data, std::size_t bytes) {
  constexpr std::size_t kBytesMax = std::size_t{1} << 30;  // ISA-L counts in int.
  std::uint32_t crc = ~init_crc;
  while (bytes > 0) {
    const std::size_t step = std::min(bytes, kBytesMax);
    // ISA-L takes a mutable pointer and does not write through it.
    crc = crc32_iscsi(reinterpret_cast<unsigned char*>(const_cast<char*>(data)),
                      static_cast<int>(step), crc);
    data += step;
    bytes -= step;
  }
  return ~crc;
}

}  // namespace crc32c
}  // namespace rocksdb

namespace kvmill {

bool RocksUsesFastCrc32c() {
  // What the dynamic linker finds first is what the library's calls go to.
  static const bool fast = dlsym(RTLD_DEFAULT, "_ZN7rocksdb6crc32c6ExtendEjPKcm") ==
                           reinterpret_cast<void*>(&rocksdb::crc32c::Extend);
  return fast;
}

}  // namespace kvmill
