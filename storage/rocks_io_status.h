// What the files of the disk tier say to RocksDB when a call of the system failed.
#ifndef KVMILL_STORAGE_ROCKS_IO_STATUS_H_
#define KVMILL_STORAGE_ROCKS_IO_STATUS_H_

#include <cerrno>
#include <string>
#include <system_error>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "rocksdb/io_status.h"

namespace kvmill {

inline rocksdb::IOStatus ErrnoIoStatus(absl::string_view call, const std::string& path, int error) {
  using rocksdb::IOStatus;
  const std::string message =
      absl::StrCat(call, " ", path, ": ", std::generic_category().message(error));
  if (error == ENOSPC || error == EDQUOT || error == EFBIG) return IOStatus::NoSpace(message);
  return error == ENOENT ? IOStatus::PathNotFound(message) : IOStatus::IOError(message);
}

// Of a file that cannot be decrypted.
inline rocksdb::IOStatus ToIoStatus(const absl::Status& status) {
  const std::string message(status.message());
  if (status.ok()) return rocksdb::IOStatus::OK();
  if (absl::IsDataLoss(status)) return rocksdb::IOStatus::Corruption(message);
  return rocksdb::IOStatus::IOError(message);
}

}  // namespace kvmill

#endif  // KVMILL_STORAGE_ROCKS_IO_STATUS_H_
