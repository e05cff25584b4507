#include "storage/rocks_stream_files.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

namespace kvmill {
namespace {

using rocksdb::DataVerificationInfo;
using rocksdb::FSRandomAccessFile;
using rocksdb::FSReadRequest;
using rocksdb::FSSequentialFile;
using rocksdb::FSWritableFile;
using rocksdb::IODebugContext;
using rocksdb::IOOptions;
using rocksdb::IOStatus;
using rocksdb::Slice;

constexpr std::size_t kPieceBytes = 64 << 10;

class StreamWriter : public rocksdb::FSWritableFileOwnerWrapper {
 public:
  StreamWriter(std::unique_ptr<FSWritableFile> file, const FileCipher& cipher)
      : FSWritableFileOwnerWrapper(std::move(file)),
        header_(kFileHeaderBytes),
        cipher_(cipher),
        piece_(kPieceBytes) {
    cipher.WriteHeader(header_.data());
  }

  IOStatus Append(const Slice& data, const IOOptions& options, IODebugContext* dbg) override {
    if (failed_.ok() && !header_.empty()) {
      failed_ = target()->Append(Slice(header_.data(), header_.size()), options, dbg);
      header_.clear();
    }
    for (std::size_t done = 0; failed_.ok() && done < data.size();) {
      const std::size_t bytes = std::min(data.size() - done, piece_.size());
      cipher_.Run(bytes_, data.data() + done, bytes, piece_.data());
      failed_ = target()->Append(Slice(piece_.data(), bytes), options, dbg);
      bytes_ += bytes;
      done += bytes;
    }
    return failed_;
  }
  // The checksum that RocksDB hands on is of what is not encrypted.
  IOStatus Append(const Slice& data, const IOOptions& options, const DataVerificationInfo&,
                  IODebugContext* dbg) override {
    return Append(data, options, dbg);
  }
  // Of direct I/O only, which these files are not opened for.
  IOStatus PositionedAppend(const Slice&, std::uint64_t, const IOOptions&,
                            IODebugContext*) override {
    return IOStatus::NotSupported("PositionedAppend to an encrypted file");
  }
  IOStatus PositionedAppend(const Slice&, std::uint64_t, const IOOptions&,
                            const DataVerificationInfo&, IODebugContext*) override {
    return IOStatus::NotSupported("PositionedAppend to an encrypted file");
  }
  // To less, what is appended next would meet its key stream again.
  IOStatus Truncate(std::uint64_t size, const IOOptions&, IODebugContext*) override {
    if (size == bytes_) return IOStatus::OK();
    return IOStatus::NotSupported("truncation of an encrypted file");
  }
  std::uint64_t GetFileSize(const IOOptions&, IODebugContext*) override { return bytes_; }
  IOStatus InvalidateCache(std::size_t offset, std::size_t length) override {
    return target()->InvalidateCache(kFileHeaderBytes + offset, length);
  }
  IOStatus RangeSync(std::uint64_t offset, std::uint64_t bytes, const IOOptions& options,
                     IODebugContext* dbg) override {
    return target()->RangeSync(kFileHeaderBytes + offset, bytes, options, dbg);
  }
  void PrepareWrite(std::size_t offset, std::size_t length, const IOOptions& options,
                    IODebugContext* dbg) override {
    target()->PrepareWrite(kFileHeaderBytes + offset, length, options, dbg);
  }
  IOStatus Allocate(std::uint64_t offset, std::uint64_t length, const IOOptions& options,
                    IODebugContext* dbg) override {
    return target()->Allocate(kFileHeaderBytes + offset, length, options, dbg);
  }

 private:
  std::vector<char> header_;  // Not yet written.
  StreamCipher cipher_;
  std::vector<char> piece_;
  std::uint64_t bytes_ = 0;  // Without the header.
  IOStatus failed_;
};

class StreamReader : public rocksdb::FSRandomAccessFileOwnerWrapper {
 public:
  StreamReader(std::unique_ptr<FSRandomAccessFile> file, const FileCipher& cipher)
      : FSRandomAccessFileOwnerWrapper(std::move(file)), cipher_(cipher) {}

  IOStatus Read(std::uint64_t offset, std::size_t bytes, const IOOptions& options, Slice* result,
                char* scratch, IODebugContext* dbg) const override {
    Slice encrypted;
    IOStatus status =
        target()->Read(kFileHeaderBytes + offset, bytes, options, &encrypted, scratch, dbg);
    if (!status.ok()) return status;
    // Of its own: several threads read a file.
    StreamCipher(cipher_).Run(offset, encrypted.data(), encrypted.size(), scratch);
    *result = Slice(scratch, encrypted.size());
    return status;
  }
  // One by one, through Read().
  IOStatus MultiRead(FSReadRequest* requests, std::size_t count, const IOOptions& options,
                     IODebugContext* dbg) override {
    return FSRandomAccessFile::MultiRead(requests, count, options, dbg);
  }
  IOStatus ReadAsync(FSReadRequest& request, const IOOptions& options,
                     std::function<void(const FSReadRequest&, void*)> done, void* argument,
                     void** handle, rocksdb::IOHandleDeleter* deleter,
                     IODebugContext* dbg) override {
    return FSRandomAccessFile::ReadAsync(request, options, std::move(done), argument, handle,
                                         deleter, dbg);
  }
  IOStatus Prefetch(std::uint64_t offset, std::size_t bytes, const IOOptions& options,
                    IODebugContext* dbg) override {
    return target()->Prefetch(kFileHeaderBytes + offset, bytes, options, dbg);
  }
  IOStatus InvalidateCache(std::size_t offset, std::size_t length) override {
    return target()->InvalidateCache(kFileHeaderBytes + offset, length);
  }

 private:
  const FileCipher cipher_;
};

class StreamSequence : public rocksdb::FSSequentialFileOwnerWrapper {
 public:
  StreamSequence(std::unique_ptr<FSSequentialFile> file, const FileCipher& cipher)
      : FSSequentialFileOwnerWrapper(std::move(file)), cipher_(cipher) {}

  IOStatus Read(std::size_t bytes, const IOOptions& options, Slice* result, char* scratch,
                IODebugContext* dbg) override {
    Slice encrypted;
    IOStatus status = target()->Read(bytes, options, &encrypted, scratch, dbg);
    if (!status.ok()) return status;
    cipher_.Run(offset_, encrypted.data(), encrypted.size(), scratch);
    offset_ += encrypted.size();
    *result = Slice(scratch, encrypted.size());
    return status;
  }
  IOStatus Skip(std::uint64_t bytes) override {
    IOStatus status = target()->Skip(bytes);
    if (status.ok()) offset_ += bytes;
    return status;
  }
  IOStatus PositionedRead(std::uint64_t, std::size_t, const IOOptions&, Slice*, char*,
                          IODebugContext*) override {
    return IOStatus::NotSupported("PositionedRead of an encrypted file");
  }
  IOStatus InvalidateCache(std::size_t offset, std::size_t length) override {
    return target()->InvalidateCache(kFileHeaderBytes + offset, length);
  }

 private:
  StreamCipher cipher_;
  std::uint64_t offset_ = 0;
};

}  // namespace

std::unique_ptr<FSWritableFile> NewStreamWriter(std::unique_ptr<FSWritableFile> file,
                                                const FileCipher& cipher) {
  return std::make_unique<StreamWriter>(std::move(file), cipher);
}

std::unique_ptr<FSRandomAccessFile> NewStreamReader(std::unique_ptr<FSRandomAccessFile> file,
                                                    const FileCipher& cipher) {
  return std::make_unique<StreamReader>(std::move(file), cipher);
}

std::unique_ptr<FSSequentialFile> NewStreamSequence(std::unique_ptr<FSSequentialFile> file,
                                                    const FileCipher& cipher) {
  return std::make_unique<StreamSequence>(std::move(file), cipher);
}

}  // namespace kvmill
