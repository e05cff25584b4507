// The file system that RocksDB sees: everything is POSIX as usual, except that blob files (`.blob`,
// the pages) are read and written past the page cache, in large pieces, through a few buffers that
// live as long as the store.
//
// Why not RocksDB's own direct I/O: it aligns its buffers to the logical sector (512 bytes), not to
// a memory page, allocates them per file, and reads a block's pages into as many fresh allocations.
// On disks that take one physically contiguous piece a request, a buffer of huge pages is several
// times faster than scattered 4 KiB pages, and one off by 512 bytes is ten times slower (numbers in
// docs/perf.md). Pages that lie side by side in a file are read with one request.
#ifndef KVMILL_STORAGE_ROCKS_FILE_SYSTEM_H_
#define KVMILL_STORAGE_ROCKS_FILE_SYSTEM_H_

#include <memory>

#include "rocksdb/file_system.h"

namespace kvmill {

// `direct_io`: open blob files with O_DIRECT; otherwise the same calls go through the page cache.
// Thread-safe, as are the files it opens as far as RocksDB needs it.
std::shared_ptr<rocksdb::FileSystem> NewRocksFileSystem(bool direct_io);

}  // namespace kvmill

#endif  // KVMILL_STORAGE_ROCKS_FILE_SYSTEM_H_
