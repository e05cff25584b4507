// Blob files, the pages: read and written past the page cache, in large pieces, through a few
// buffers, and encrypted and decrypted on the way where there is a key.
//
// Why not RocksDB's own direct I/O: it aligns its buffers to the logical sector (512 bytes), not to
// a memory page, allocates them per file, and reads a block's pages into as many fresh allocations.
// On disks that take one physically contiguous piece a request, a buffer of huge pages is several
// times faster than scattered 4 KiB pages, and one off by 512 bytes is ten times slower (numbers in
// docs/perf.md). Pages that lie side by side in a file are read with one request.
#ifndef KVMILL_STORAGE_ROCKS_BLOB_FILES_H_
#define KVMILL_STORAGE_ROCKS_BLOB_FILES_H_

#include <memory>
#include <string>

#include "rocksdb/file_system.h"
#include "storage/encrypted_files.h"
#include "storage/file_cipher.h"
#include "storage/io_buffers.h"

namespace kvmill {

// `buffers` must outlive the file. `cipher` is null for a file that is not encrypted, else of mode
// kUnits; it is not used after the call.
rocksdb::IOStatus NewBlobWriter(const std::string& path, bool direct_io,
                                const rocksdb::FileOptions& options, const FileCipher* cipher,
                                IoBuffers& buffers, std::unique_ptr<rocksdb::FSWritableFile>* file);

// A file that is written and closed. `files` is null where nothing is encrypted; not used after the
// call. The file is thread-safe.
rocksdb::IOStatus NewBlobReader(const std::string& path, bool direct_io,
                                const EncryptedFiles* files, IoBuffers& buffers,
                                std::unique_ptr<rocksdb::FSRandomAccessFile>* file);

}  // namespace kvmill

#endif  // KVMILL_STORAGE_ROCKS_BLOB_FILES_H_
