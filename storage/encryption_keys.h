// The secrets that the disk tier's files are encrypted with.
//
// The first key is for new files; the others only read files that were written when they were
// first. Keys are known by their ids, which say nothing about them and stand in the headers of
// files, in logs and in metrics.
#ifndef KVMILL_STORAGE_ENCRYPTION_KEYS_H_
#define KVMILL_STORAGE_ENCRYPTION_KEYS_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace kvmill {

inline constexpr std::size_t kEncryptionKeysMax = 16;

using EncryptionKeyId = std::array<std::byte, 8>;
std::string ToHex(const EncryptionKeyId& id);  // 16 digits.

// Files that one key encrypts.
struct EncryptionKeyUsage {
  std::string key;  // Its id.
  bool is_current = false;
  std::uint64_t files = 0;
  std::uint64_t bytes = 0;  // As the file system counts them.
};

// 32 bytes that are overwritten when they go.
class EncryptionKey {
 public:
  using Bytes = std::array<std::byte, 32>;

  explicit EncryptionKey(const Bytes& bytes);
  EncryptionKey(const EncryptionKey&) = default;
  EncryptionKey& operator=(const EncryptionKey&) = default;
  ~EncryptionKey();

  const EncryptionKeyId& id() const { return id_; }
  const Bytes& bytes() const { return bytes_; }

 private:
  Bytes bytes_;
  EncryptionKeyId id_;
};

// Immutable, thread-safe.
class EncryptionKeys {
 public:
  // One key a line, 64 hexadecimal digits; empty lines and lines that begin with # do not count.
  // INVALID_ARGUMENT names the line and what is wrong with it, never what it holds. Shared: the
  // store, its files and who configures them.
  static absl::StatusOr<std::shared_ptr<const EncryptionKeys>> Parse(absl::string_view text);
  // Of a file that others may neither read nor change, else FAILED_PRECONDITION. NOT_FOUND when it
  // cannot be read. Messages begin with the path.
  static absl::StatusOr<std::shared_ptr<const EncryptionKeys>> ReadFile(const std::string& path);
  // One key that nobody else has: for measurements and tests.
  static std::shared_ptr<const EncryptionKeys> Random();

  explicit EncryptionKeys(std::vector<EncryptionKey> keys) : keys_(std::move(keys)) {}

  const std::vector<EncryptionKey>& keys() const { return keys_; }  // At least one.
  const EncryptionKey& current() const { return keys_.front(); }
  // Its place in keys().
  std::optional<std::size_t> Find(const EncryptionKeyId& id) const;

 private:
  std::vector<EncryptionKey> keys_;
};

}  // namespace kvmill

#endif  // KVMILL_STORAGE_ENCRYPTION_KEYS_H_
