// The file system that RocksDB sees: POSIX as usual, except that blob files (`.blob`, the pages)
// are read and written as storage/rocks_blob_files.h says, and that, where there are keys, all
// files are encrypted: RocksDB sees contents and sizes without header and cipher. What stays
// readable are names, sizes and times of files, and the empty lock files.
#ifndef KVMILL_STORAGE_ROCKS_FILE_SYSTEM_H_
#define KVMILL_STORAGE_ROCKS_FILE_SYSTEM_H_

#include <memory>

#include "rocksdb/file_system.h"
#include "storage/encrypted_files.h"

namespace kvmill {

// `direct_io`: open blob files with O_DIRECT; otherwise the same calls go through the page cache.
// `files`: null where nothing is encrypted; shared with who asks it which keys are in use. A file
// that is not encrypted is damaged, not read as it is, where there are keys. Thread-safe, as are
// the files it opens as far as RocksDB needs it.
std::shared_ptr<rocksdb::FileSystem> NewRocksFileSystem(bool direct_io,
                                                        std::shared_ptr<EncryptedFiles> files);

}  // namespace kvmill

#endif  // KVMILL_STORAGE_ROCKS_FILE_SYSTEM_H_
