// What RocksDB writes beside blob files, encrypted as a stream: tables, manifests, options, logs.
#ifndef KVMILL_STORAGE_ROCKS_STREAM_FILES_H_
#define KVMILL_STORAGE_ROCKS_STREAM_FILES_H_

#include <memory>

#include "rocksdb/file_system.h"
#include "storage/file_cipher.h"

namespace kvmill {

// Around a file that was just created. The header is written before the first byte, so that a file
// that nothing was appended to stays empty. After an append that failed all others fail: what
// reached the file is not known, and nothing else may be encrypted for its place.
std::unique_ptr<rocksdb::FSWritableFile> NewStreamWriter(
    std::unique_ptr<rocksdb::FSWritableFile> file, const FileCipher& cipher);

std::unique_ptr<rocksdb::FSRandomAccessFile> NewStreamReader(
    std::unique_ptr<rocksdb::FSRandomAccessFile> file, const FileCipher& cipher);

// `file` stands behind the header.
std::unique_ptr<rocksdb::FSSequentialFile> NewStreamSequence(
    std::unique_ptr<rocksdb::FSSequentialFile> file, const FileCipher& cipher);

}  // namespace kvmill

#endif  // KVMILL_STORAGE_ROCKS_STREAM_FILES_H_
