// What RocksDB writes beside blob files: tables, manifests, options, logs. As POSIX files of
// RocksDB's own, except that the error of the system decides what a failed call means
// (storage/rocks_io_status.h): RocksDB knows ENOSPC only.
#ifndef KVMILL_STORAGE_ROCKS_APPEND_FILE_H_
#define KVMILL_STORAGE_ROCKS_APPEND_FILE_H_

#include <cstdint>
#include <memory>
#include <string>

#include "rocksdb/file_system.h"

namespace kvmill {

// Creates the file, or empties it. An append that failed may have left a part of itself behind the
// file's size, which the next one writes over. `reserve_bytes`: so much of the disk is taken ahead
// of what is appended, where the file system can, so that a disk that others filled up still takes
// a little.
rocksdb::IOStatus NewAppendFile(const std::string& path, const rocksdb::FileOptions& options,
                                std::uint64_t reserve_bytes,
                                std::unique_ptr<rocksdb::FSWritableFile>* file);

}  // namespace kvmill

#endif  // KVMILL_STORAGE_ROCKS_APPEND_FILE_H_
