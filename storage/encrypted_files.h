// Which key each file of an encrypted spill directory was written with, and whether a directory may
// be opened with what keys were given.
#ifndef KVMILL_STORAGE_ENCRYPTED_FILES_H_
#define KVMILL_STORAGE_ENCRYPTED_FILES_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "storage/core/mutex.h"
#include "storage/encryption_keys.h"
#include "storage/file_cipher.h"

namespace kvmill {

// Before a database is opened without keys; changes nothing. FAILED_PRECONDITION, with what to do,
// when the directory has encrypted files. Reads the first kFileHeaderBytes of CURRENT, IDENTITY,
// manifests and tables, which are encrypted if anything is, and nothing of pages.
absl::Status CheckNotEncrypted(const std::string& directory);

// Thread-safe. Paths are those of files right below the directory.
class EncryptedFiles {
 public:
  // Before a database is opened with keys: reads the header of every file, and changes nothing.
  // FAILED_PRECONDITION, with what to do: a directory whose files are not encrypted, files of a key
  // that is not among `keys`, headers of another version. Shared: the database and its file system.
  static absl::StatusOr<std::shared_ptr<EncryptedFiles>> Load(
      std::string directory, std::shared_ptr<const EncryptionKeys> keys);

  const EncryptionKeys& keys() const { return *keys_; }

  // The cipher of a new file, which is noted.
  FileCipher Create(const std::string& path, CipherMode mode);
  // DATA_LOSS when the file has no header that is right: since Load() somebody else was here.
  // UNAVAILABLE when it cannot be read.
  absl::StatusOr<FileCipher> Open(const std::string& path, CipherMode mode) const;
  void Removed(const std::string& path);
  void Renamed(const std::string& from, const std::string& to);
  void Linked(const std::string& from, const std::string& to);

  // Whether it is known that a key other than the current one wrote it.
  bool IsOfOldKey(absl::string_view name) const;

  // One for each key, in the order of the keys.
  std::vector<EncryptionKeyUsage> Usage() const;

 private:
  using Places = absl::flat_hash_map<std::string, std::size_t>;  // File name -> place of its key.

  EncryptedFiles(std::string directory, std::shared_ptr<const EncryptionKeys> keys, Places files);

  const std::string directory_;
  // Shared with who configures the store.
  const std::shared_ptr<const EncryptionKeys> keys_;
  mutable Mutex mutex_;
  Places files_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace kvmill

#endif  // KVMILL_STORAGE_ENCRYPTED_FILES_H_
