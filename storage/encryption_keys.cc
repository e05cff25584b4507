#include "storage/encryption_keys.h"

#include <fcntl.h>
#include <openssl/crypto.h>
#include <openssl/rand.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <system_error>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "storage/core/check.h"
#include "storage/file_cipher.h"

namespace kvmill {
namespace {

constexpr std::size_t kKeyDigits = 2 * sizeof(EncryptionKey::Bytes);
constexpr std::size_t kFileBytesMax = 16 << 10;

// -1: no hexadecimal digit.
int DigitOf(char digit) {
  if (digit >= '0' && digit <= '9') return digit - '0';
  const char lower = absl::ascii_tolower(static_cast<unsigned char>(digit));
  if (lower >= 'a' && lower <= 'f') return lower - 'a' + 10;
  return -1;
}

// Overwrites what it holds when it goes.
struct FileText {
  ~FileText() { OPENSSL_cleanse(bytes.data(), bytes.size()); }
  std::array<char, kFileBytesMax + 1> bytes{};
};

struct Descriptor {
  ~Descriptor() {
    if (fd >= 0) close(fd);
  }
  int fd;
};

}  // namespace

std::string ToHex(const EncryptionKeyId& id) {
  return absl::BytesToHexString({reinterpret_cast<const char*>(id.data()), id.size()});
}

EncryptionKey::EncryptionKey(const Bytes& bytes) : bytes_(bytes) {
  DeriveSecret(bytes_, {}, "kvmill disk key id", absl::MakeSpan(id_));
}

EncryptionKey::~EncryptionKey() { OPENSSL_cleanse(bytes_.data(), bytes_.size()); }

absl::StatusOr<std::shared_ptr<const EncryptionKeys>> EncryptionKeys::Parse(
    absl::string_view text) {
  std::vector<EncryptionKey> keys;
  keys.reserve(kEncryptionKeysMax);  // One copy of each: nothing moves.
  std::vector<int> lines;
  EncryptionKey::Bytes bytes;
  for (int line_number = 1; !text.empty(); ++line_number) {
    const std::size_t end = text.find('\n');
    const absl::string_view line = absl::StripAsciiWhitespace(text.substr(0, end));
    text.remove_prefix(end == text.npos ? text.size() : end + 1);
    if (line.empty() || line[0] == '#') continue;
    const auto wrong = [&](absl::string_view what) {
      OPENSSL_cleanse(bytes.data(), bytes.size());
      return absl::InvalidArgumentError(absl::StrCat("line ", line_number, ": ", what));
    };
    if (line.size() != kKeyDigits) {
      return wrong(absl::StrCat("a key of ", line.size(), " characters, want ", kKeyDigits,
                                " hexadecimal digits (openssl rand -hex 32)"));
    }
    for (std::size_t i = 0; i < bytes.size(); ++i) {
      const int high = DigitOf(line[2 * i]);
      const int low = DigitOf(line[2 * i + 1]);
      if (high < 0 || low < 0) {
        return wrong(absl::StrCat("character ", 2 * i + (high < 0 ? 1 : 2),
                                  " is no hexadecimal digit (openssl rand -hex 32 makes a key)"));
      }
      bytes[i] = static_cast<std::byte>(high << 4 | low);
    }
    if (std::count(bytes.begin(), bytes.end(), bytes[0]) == static_cast<int>(bytes.size())) {
      return wrong("a key of equal bytes is none (openssl rand -hex 32 makes one)");
    }
    if (keys.size() == kEncryptionKeysMax) {
      return wrong(absl::StrCat("more than ", kEncryptionKeysMax, " keys"));
    }
    for (std::size_t i = 0; i < keys.size(); ++i) {
      if (CRYPTO_memcmp(keys[i].bytes().data(), bytes.data(), bytes.size()) == 0) {
        return wrong(absl::StrCat("the key of line ", lines[i], " again"));
      }
    }
    keys.emplace_back(bytes);
    lines.push_back(line_number);
  }
  OPENSSL_cleanse(bytes.data(), bytes.size());
  if (keys.empty()) return absl::InvalidArgumentError("no key (openssl rand -hex 32 makes one)");
  return std::make_shared<const EncryptionKeys>(std::move(keys));
}

absl::StatusOr<std::shared_ptr<const EncryptionKeys>> EncryptionKeys::ReadFile(
    const std::string& path) {
  const auto unreadable = [&](int error) {
    return absl::NotFoundError(
        absl::StrCat(path, ": cannot be read: ", std::generic_category().message(error)));
  };
  // Links are followed: Kubernetes mounts secrets as such. What counts is the file that is read.
  const Descriptor file{open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK)};
  if (file.fd < 0) return unreadable(errno);
  struct stat info {};
  if (fstat(file.fd, &info) != 0) return unreadable(errno);
  if (!S_ISREG(info.st_mode)) {
    return absl::FailedPreconditionError(absl::StrCat(path, ": is no file"));
  }
  // A group may read: Kubernetes gives secrets to the group of the pod.
  if ((info.st_mode & (S_IRWXO | S_IWGRP)) != 0) {
    return absl::FailedPreconditionError(absl::StrFormat(
        "%s: holds keys and has mode %04o, others must not read it nor its group change it: chmod "
        "0600 it, and make a new key if somebody may have read this one",
        path, info.st_mode & 07777));
  }
  if (static_cast<std::uint64_t>(info.st_size) > kFileBytesMax) {
    return absl::InvalidArgumentError(absl::StrCat(
        path, ": ", info.st_size, " bytes are too many for keys, want at most ", kFileBytesMax));
  }
  FileText text;
  std::size_t size = 0;
  while (size < text.bytes.size()) {
    const ssize_t got = read(file.fd, text.bytes.data() + size, text.bytes.size() - size);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return unreadable(errno);
    if (got == 0) break;
    size += static_cast<std::size_t>(got);
  }
  auto keys = Parse(absl::string_view(text.bytes.data(), size));
  if (keys.ok()) return keys;
  return absl::Status(keys.status().code(), absl::StrCat(path, ": ", keys.status().message()));
}

std::shared_ptr<const EncryptionKeys> EncryptionKeys::Random() {
  EncryptionKey::Bytes bytes;
  KVMILL_CHECK(RAND_bytes(reinterpret_cast<unsigned char*>(bytes.data()),
                          static_cast<int>(bytes.size())) == 1);
  std::vector<EncryptionKey> keys = {EncryptionKey(bytes)};
  OPENSSL_cleanse(bytes.data(), bytes.size());
  return std::make_shared<const EncryptionKeys>(std::move(keys));
}

std::optional<std::size_t> EncryptionKeys::Find(const EncryptionKeyId& id) const {
  for (std::size_t i = 0; i < keys_.size(); ++i) {
    if (keys_[i].id() == id) return i;
  }
  return std::nullopt;
}

}  // namespace kvmill
