#include "storage/rocks_file_system.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "storage/file_cipher.h"
#include "storage/io_buffers.h"
#include "storage/rocks_append_file.h"
#include "storage/rocks_blob_files.h"
#include "storage/rocks_io_status.h"
#include "storage/rocks_stream_files.h"

namespace kvmill {
namespace {

using rocksdb::FileOptions;
using rocksdb::FSRandomAccessFile;
using rocksdb::FSSequentialFile;
using rocksdb::FSWritableFile;
using rocksdb::IODebugContext;
using rocksdb::IOOptions;
using rocksdb::IOStatus;

constexpr std::size_t kBuffersKept = 8;
// RocksDB's list of its files: a flush whose files found room must not fail for a line there, and a
// drop of an epoch, which is what makes room, writes one, too.
constexpr std::uint64_t kManifestReserveBytes = 64 << 10;

bool IsBlobFile(const std::string& path) { return absl::EndsWith(path, ".blob"); }

std::string NameOf(const std::string& path) { return path.substr(path.rfind('/') + 1); }

// RocksDB's own log, "LOG", and what it is renamed to.
bool IsLog(const std::string& path) { return absl::StartsWith(NameOf(path), "LOG"); }

std::uint64_t ReserveBytesOf(const std::string& path) {
  return absl::StartsWith(NameOf(path), "MANIFEST-") ? kManifestReserveBytes : 0;
}

// A log that the disk has no room for is lost, and nothing else: RocksDB must not hear of it, which
// in Debian's build ends the process at the next line after one that could not be written.
class LogWriter : public rocksdb::FSWritableFileOwnerWrapper {
 public:
  explicit LogWriter(std::unique_ptr<FSWritableFile> file)
      : FSWritableFileOwnerWrapper(std::move(file)) {}

  IOStatus Append(const rocksdb::Slice& data, const IOOptions& options,
                  IODebugContext* dbg) override {
    return Lost(target()->Append(data, options, dbg));
  }
  IOStatus Append(const rocksdb::Slice& data, const IOOptions& options,
                  const rocksdb::DataVerificationInfo& verification, IODebugContext* dbg) override {
    return Lost(target()->Append(data, options, verification, dbg));
  }
  IOStatus Flush(const IOOptions& options, IODebugContext* dbg) override {
    return Lost(target()->Flush(options, dbg));
  }
  IOStatus Sync(const IOOptions& options, IODebugContext* dbg) override {
    return Lost(target()->Sync(options, dbg));
  }
  IOStatus Fsync(const IOOptions& options, IODebugContext* dbg) override {
    return Lost(target()->Fsync(options, dbg));
  }
  IOStatus RangeSync(std::uint64_t offset, std::uint64_t bytes, const IOOptions& options,
                     IODebugContext* dbg) override {
    return Lost(target()->RangeSync(offset, bytes, options, dbg));
  }
  IOStatus Close(const IOOptions& options, IODebugContext* dbg) override {
    return Lost(target()->Close(options, dbg));
  }

 private:
  static IOStatus Lost(const IOStatus& status) {
    status.PermitUncheckedError();
    return IOStatus::OK();
  }
};

// Files that are written as ours, RocksDB's log as above; what else is read as it is.
class PlainFileSystem : public rocksdb::FileSystemWrapper {
 public:
  explicit PlainFileSystem(bool direct_io)
      : FileSystemWrapper(rocksdb::FileSystem::Default()), direct_io_(direct_io) {}

  const char* Name() const override { return "KvmillFileSystem"; }

  IOStatus NewWritableFile(const std::string& path, const FileOptions& options,
                           std::unique_ptr<FSWritableFile>* file, IODebugContext*) override {
    if (IsBlobFile(path)) {
      return NewBlobWriter(path, direct_io_, options, nullptr, buffers_, file);
    }
    IOStatus status = NewAppendFile(path, options, ReserveBytesOf(path), file);
    if (status.ok() && IsLog(path)) *file = std::make_unique<LogWriter>(std::move(*file));
    return status;
  }

  IOStatus NewRandomAccessFile(const std::string& path, const FileOptions& options,
                               std::unique_ptr<FSRandomAccessFile>* file,
                               IODebugContext* dbg) override {
    if (!IsBlobFile(path)) return target()->NewRandomAccessFile(path, options, file, dbg);
    return NewBlobReader(path, direct_io_, nullptr, buffers_, file);
  }

  // Through NewWritableFile: where files are encrypted the log, which may quote keys, is, too.
  IOStatus NewLogger(const std::string& path, const IOOptions& options,
                     std::shared_ptr<rocksdb::Logger>* result, IODebugContext* dbg) override {
    return FileSystem::NewLogger(path, options, result, dbg);
  }

 protected:
  const bool direct_io_;
  IoBuffers buffers_{kBuffersKept};
};

class EncryptedFileSystem : public PlainFileSystem {
 public:
  EncryptedFileSystem(bool direct_io, std::shared_ptr<EncryptedFiles> files)
      : PlainFileSystem(direct_io), files_(std::move(files)) {}

  const char* Name() const override { return "KvmillEncryptedFileSystem"; }

  IOStatus NewWritableFile(const std::string& path, const FileOptions& options,
                           std::unique_ptr<FSWritableFile>* file, IODebugContext*) override {
    if (IsBlobFile(path)) {
      const FileCipher cipher = files_->Create(path, CipherMode::kUnits);
      return NewBlobWriter(path, direct_io_, options, &cipher, buffers_, file);
    }
    std::unique_ptr<FSWritableFile> plain;
    IOStatus status = NewAppendFile(path, options, ReserveBytesOf(path), &plain);
    if (!status.ok()) return status;
    *file = NewStreamWriter(std::move(plain), files_->Create(path, CipherMode::kStream));
    if (IsLog(path)) *file = std::make_unique<LogWriter>(std::move(*file));
    return status;
  }

  // What a file held, and the key stream that it was encrypted with, do not come again: a new file.
  IOStatus ReuseWritableFile(const std::string& path, const std::string& old_path,
                             const FileOptions& options, std::unique_ptr<FSWritableFile>* file,
                             IODebugContext* dbg) override {
    IOStatus status = DeleteFile(old_path, options.io_options, dbg);
    return status.ok() ? NewWritableFile(path, options, file, dbg) : status;
  }
  IOStatus ReopenWritableFile(const std::string& path, const FileOptions&,
                              std::unique_ptr<FSWritableFile>*, IODebugContext*) override {
    return NotSupported("append again to", path);
  }
  IOStatus NewRandomRWFile(const std::string& path, const FileOptions&,
                           std::unique_ptr<rocksdb::FSRandomRWFile>*, IODebugContext*) override {
    return NotSupported("write within", path);
  }
  IOStatus NewMemoryMappedFileBuffer(const std::string& path,
                                     std::unique_ptr<rocksdb::MemoryMappedFileBuffer>*) override {
    return NotSupported("map", path);
  }
  IOStatus Truncate(const std::string& path, std::size_t, const IOOptions&,
                    IODebugContext*) override {
    return NotSupported("truncate", path);
  }

  IOStatus NewRandomAccessFile(const std::string& path, const FileOptions& options,
                               std::unique_ptr<FSRandomAccessFile>* file,
                               IODebugContext* dbg) override {
    if (IsBlobFile(path)) return NewBlobReader(path, direct_io_, files_.get(), buffers_, file);
    std::unique_ptr<FSRandomAccessFile> plain;
    IOStatus status = target()->NewRandomAccessFile(path, options, &plain, dbg);
    if (!status.ok()) return status;
    const absl::StatusOr<FileCipher> cipher = files_->Open(path, CipherMode::kStream);
    if (!cipher.ok()) return ToIoStatus(cipher.status());
    *file = NewStreamReader(std::move(plain), *cipher);
    return status;
  }

  IOStatus NewSequentialFile(const std::string& path, const FileOptions& options,
                             std::unique_ptr<FSSequentialFile>* file,
                             IODebugContext* dbg) override {
    std::unique_ptr<FSSequentialFile> plain;
    IOStatus status = target()->NewSequentialFile(path, options, &plain, dbg);
    if (!status.ok()) return status;
    std::uint64_t bytes = 0;
    status = target()->GetFileSize(path, options.io_options, &bytes, dbg);
    if (!status.ok()) return status;
    if (bytes == 0) {  // Nothing was appended to it.
      *file = std::move(plain);
      return status;
    }
    const absl::StatusOr<FileCipher> cipher = files_->Open(path, CipherMode::kStream);
    if (!cipher.ok()) return ToIoStatus(cipher.status());
    status = plain->Skip(kFileHeaderBytes);
    if (!status.ok()) return status;
    *file = NewStreamSequence(std::move(plain), *cipher);
    return status;
  }

  IOStatus GetFileSize(const std::string& path, const IOOptions& options, std::uint64_t* bytes,
                       IODebugContext* dbg) override {
    IOStatus status = target()->GetFileSize(path, options, bytes, dbg);
    if (status.ok()) *bytes -= std::min<std::uint64_t>(*bytes, kFileHeaderBytes);
    return status;
  }
  IOStatus GetChildrenFileAttributes(const std::string& path, const IOOptions& options,
                                     std::vector<rocksdb::FileAttributes>* result,
                                     IODebugContext* dbg) override {
    return FileSystem::GetChildrenFileAttributes(path, options, result, dbg);  // By GetFileSize.
  }

  IOStatus DeleteFile(const std::string& path, const IOOptions& options,
                      IODebugContext* dbg) override {
    IOStatus status = target()->DeleteFile(path, options, dbg);
    if (status.ok()) files_->Removed(path);
    return status;
  }
  IOStatus RenameFile(const std::string& from, const std::string& to, const IOOptions& options,
                      IODebugContext* dbg) override {
    IOStatus status = target()->RenameFile(from, to, options, dbg);
    if (status.ok()) files_->Renamed(from, to);
    return status;
  }
  IOStatus LinkFile(const std::string& from, const std::string& to, const IOOptions& options,
                    IODebugContext* dbg) override {
    IOStatus status = target()->LinkFile(from, to, options, dbg);
    if (status.ok()) files_->Linked(from, to);
    return status;
  }

 private:
  static IOStatus NotSupported(const char* what, const std::string& path) {
    return IOStatus::NotSupported(std::string("cannot ") + what + " an encrypted file: " + path);
  }

  const std::shared_ptr<EncryptedFiles> files_;
};

}  // namespace

std::shared_ptr<rocksdb::FileSystem> NewRocksFileSystem(bool direct_io,
                                                        std::shared_ptr<EncryptedFiles> files) {
  if (files == nullptr) return std::make_shared<PlainFileSystem>(direct_io);
  return std::make_shared<EncryptedFileSystem>(direct_io, std::move(files));
}

}  // namespace kvmill
