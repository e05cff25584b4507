#include "storage/encrypted_files.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <filesystem>
#include <map>
#include <optional>
#include <system_error>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "storage/core/log.h"
#include "storage/core/status_macros.h"

namespace kvmill {
namespace {

using HeaderBytes = std::array<std::byte, kFileHeaderBytes>;

// How many bytes there were, up to a header; empty when the file cannot be read.
std::optional<std::size_t> ReadHeader(const std::string& path, HeaderBytes* header) {
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
  if (fd < 0) return std::nullopt;
  std::size_t size = 0;
  while (size < header->size()) {
    const ssize_t got =
        pread(fd, header->data() + size, header->size() - size, static_cast<off_t>(size));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) {
      close(fd);
      return std::nullopt;
    }
    if (got == 0) break;
    size += static_cast<std::size_t>(got);
  }
  close(fd);
  return size;
}

std::string NameOf(absl::string_view path) {
  const std::size_t slash = path.rfind('/');
  return std::string(slash == path.npos ? path : path.substr(slash + 1));
}

// Files in which RocksDB keeps what matters.
bool IsOfDatabase(absl::string_view name) {
  return name == "CURRENT" || absl::StartsWith(name, "MANIFEST-") || absl::EndsWith(name, ".sst") ||
         absl::EndsWith(name, ".blob") || absl::EndsWith(name, ".log");
}

struct Count {
  std::uint64_t files = 0;
  std::uint64_t bytes = 0;

  void Add(std::uint64_t file_bytes) {
    ++files;
    bytes += file_bytes;
  }
  std::string ToString() const {
    return absl::StrFormat("%d %s (%d bytes)", files, files == 1 ? "file" : "files", bytes);
  }
};

// These are encrypted if anything of a directory is: a database has a manifest from its first
// moment on.
bool TellsWhetherEncrypted(absl::string_view name) {
  return name == "CURRENT" || name == "IDENTITY" || absl::StartsWith(name, "MANIFEST-") ||
         absl::EndsWith(name, ".sst");
}

struct Census {
  Count plain;    // Of a database, not encrypted.
  Count damaged;  // Encrypted, with a header that is not right.
  std::map<std::uint16_t, Count> by_other_version;
  std::map<EncryptionKeyId, Count> by_key;
  std::map<std::string, EncryptionKeyId> key_of;  // By file name.
};

// At the files whose names are `wanted`.
Census Look(const std::string& directory, bool (*wanted)(absl::string_view name)) {
  Census census;
  std::error_code error;
  for (auto it = std::filesystem::directory_iterator(directory, error);
       !error && it != std::filesystem::directory_iterator(); it.increment(error)) {
    struct stat info {};
    const std::string path = it->path().string();
    const std::string name = NameOf(path);
    if (!wanted(name)) continue;
    if (lstat(path.c_str(), &info) != 0 || !S_ISREG(info.st_mode)) continue;
    HeaderBytes header;
    const std::optional<std::size_t> size = ReadHeader(path, &header);
    // A crash between the birth of a file and its first bytes leaves it empty.
    if (!size.has_value() || *size == 0) continue;
    const auto file_bytes = static_cast<std::uint64_t>(info.st_size);
    const HeaderFound found = ClassifyHeader(absl::MakeConstSpan(header).subspan(0, *size));
    switch (found.kind) {
      case HeaderFound::Kind::kNone:
        if (IsOfDatabase(name)) census.plain.Add(file_bytes);
        break;
      case HeaderFound::Kind::kDamaged:
        census.damaged.Add(file_bytes);
        break;
      case HeaderFound::Kind::kOtherVersion:
        census.by_other_version[found.version].Add(file_bytes);
        break;
      case HeaderFound::Kind::kWhole:
        census.by_key[found.key].Add(file_bytes);
        census.key_of.emplace(name, found.key);
        break;
    }
  }
  return census;
}

// Whoever goes on with files that only a later version reads takes them for damage.
absl::Status CheckVersions(const std::string& directory, const Census& census) {
  if (census.by_other_version.empty()) return absl::OkStatus();
  const auto& [version, count] = *census.by_other_version.begin();
  return absl::FailedPreconditionError(absl::StrCat(
      "disk tier ", directory, ": ", count.ToString(),
      " of it are encrypted with a header of version ", version, ", want ", kFileHeaderVersion,
      ": start the version of kvmill that wrote them, or move the directory away to start with an "
      "empty one; nothing was changed"));
}

std::string IdsOf(const EncryptionKeys& keys) {
  std::string ids;
  for (const EncryptionKey& key : keys.keys()) {
    absl::StrAppend(&ids, ids.empty() ? "" : ", ", ToHex(key.id()));
  }
  return ids;
}

}  // namespace

absl::Status CheckNotEncrypted(const std::string& directory) {
  const Census census = Look(directory, TellsWhetherEncrypted);
  KVMILL_RETURN_IF_ERROR(CheckVersions(directory, census));
  if (census.by_key.empty() && census.damaged.files == 0) return absl::OkStatus();
  std::string with;
  for (const auto& [key, count] : census.by_key) {
    absl::StrAppend(&with, with.empty() ? " with key " : ", ", ToHex(key));
  }
  return absl::FailedPreconditionError(absl::StrCat(
      "disk tier ", directory, " is encrypted", with,
      " and no key is given: give it (--disk-key-file), or move the directory away to start with "
      "an empty one; nothing was changed"));
}

absl::StatusOr<std::shared_ptr<EncryptedFiles>> EncryptedFiles::Load(
    std::string directory, std::shared_ptr<const EncryptionKeys> keys) {
  const Census census = Look(directory, [](absl::string_view) { return true; });
  KVMILL_RETURN_IF_ERROR(CheckVersions(directory, census));
  for (const auto& [key, count] : census.by_key) {
    if (keys->Find(key).has_value()) continue;
    return absl::FailedPreconditionError(absl::StrCat(
        "disk tier ", directory, ": ", count.ToString(), " of it are encrypted with key ",
        ToHex(key), ", the keys given are ", IdsOf(*keys),
        ": give that key too, in a line below the first, or move the directory away to start with "
        "an empty one; nothing was changed"));
  }
  if (census.plain.files > 0 && census.by_key.empty() && census.damaged.files == 0) {
    return absl::FailedPreconditionError(absl::StrCat(
        "disk tier ", directory, " has ", census.plain.ToString(),
        " that are not encrypted, and a key is given: what is there is not encrypted in place. "
        "Move the directory away to start with an empty one, or start without a key; nothing was "
        "changed"));
  }
  if (census.plain.files > 0 || census.damaged.files > 0) {
    LogWarning(absl::StrCat(
        "disk tier ", directory, ": ",
        Count{census.plain.files + census.damaged.files, census.plain.bytes + census.damaged.bytes}
            .ToString(),
        " without the header of an encrypted file are not read"));
  }
  Places places;
  for (const auto& [name, key] : census.key_of) places[name] = *keys->Find(key);
  return std::shared_ptr<EncryptedFiles>(
      new EncryptedFiles(std::move(directory), std::move(keys), std::move(places)));
}

EncryptedFiles::EncryptedFiles(std::string directory, std::shared_ptr<const EncryptionKeys> keys,
                               Places files)
    : directory_(std::move(directory)), keys_(std::move(keys)), files_(std::move(files)) {}

FileCipher EncryptedFiles::Create(const std::string& path, CipherMode mode) {
  FileCipher cipher(*keys_, mode);
  MutexLock lock(mutex_);
  files_[NameOf(path)] = 0;
  return cipher;
}

absl::StatusOr<FileCipher> EncryptedFiles::Open(const std::string& path, CipherMode mode) const {
  HeaderBytes header;
  const std::optional<std::size_t> size = ReadHeader(path, &header);
  if (!size.has_value()) {
    return absl::UnavailableError(
        absl::StrCat("read ", path, ": ", std::generic_category().message(errno)));
  }
  auto cipher = FileCipher::Open(*keys_, mode, absl::MakeConstSpan(header).subspan(0, *size));
  if (cipher.ok()) return cipher;
  return absl::DataLossError(absl::StrCat(path, ": ", cipher.status().message()));
}

void EncryptedFiles::Removed(const std::string& path) {
  MutexLock lock(mutex_);
  files_.erase(NameOf(path));
}

void EncryptedFiles::Renamed(const std::string& from, const std::string& to) {
  Linked(from, to);
  if (NameOf(from) != NameOf(to)) Removed(from);
}

void EncryptedFiles::Linked(const std::string& from, const std::string& to) {
  MutexLock lock(mutex_);
  const auto found = files_.find(NameOf(from));
  if (found == files_.end()) return;
  const std::size_t key = found->second;
  files_[NameOf(to)] = key;
}

bool EncryptedFiles::IsOfOldKey(absl::string_view name) const {
  MutexLock lock(mutex_);
  const auto found = files_.find(name);
  return found != files_.end() && found->second != 0;
}

std::vector<EncryptionKeyUsage> EncryptedFiles::Usage() const {
  std::vector<EncryptionKeyUsage> usage;
  for (const EncryptionKey& key : keys_->keys()) {
    usage.push_back({.key = ToHex(key.id()), .is_current = usage.empty()});
  }
  Places files;
  {
    MutexLock lock(mutex_);
    files = files_;
  }
  for (const auto& [name, place] : files) {
    struct stat info {};
    if (lstat(absl::StrCat(directory_, "/", name).c_str(), &info) != 0) continue;
    ++usage[place].files;
    usage[place].bytes += static_cast<std::uint64_t>(info.st_blocks) * 512;
  }
  return usage;
}

}  // namespace kvmill
