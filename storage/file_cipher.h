// How one file of the disk tier is encrypted (docs/formats.md, "Encrypted files").
//
// Every file begins with a header of kFileHeaderBytes: which key, and 32 random bytes of this file.
// From both comes a key of the file's own (HKDF-SHA256), so that no two files share a key stream
// however often a name, or a number, comes again. Two modes:
//
//   kStream  AES-256-CTR. For what grows by bytes: logs, manifests, tables. Bytes that are written
//            stay as they are. Whoever encrypts two different contents for one offset gives both
//            away: files are only appended to, and a name that comes again gets a new header.
//   kUnits   AES-256-XTS in units of kCipherUnitBytes, numbered from the start of the file, header
//            included. For pages: who knows what a page says cannot make it say something else,
//            since a changed byte of a unit makes 16 of it unforeseeable, and the page's checksum
//            is encrypted with it. The last unit may be shorter (ciphertext stealing); one of less
//            than 16 bytes is encrypted as a stream under a third key.
//
// Neither mode authenticates (docs/decisions/0048-encryption-at-rest.md).
#ifndef KVMILL_STORAGE_FILE_CIPHER_H_
#define KVMILL_STORAGE_FILE_CIPHER_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "storage/encryption_keys.h"

struct evp_cipher_ctx_st;

namespace kvmill {

inline constexpr std::size_t kFileHeaderBytes = 4096;  // What direct I/O takes.
inline constexpr std::size_t kCipherUnitBytes = 4096;
inline constexpr std::uint16_t kFileHeaderVersion = 1;
inline constexpr char kFileHeaderMagic[8] = {'K', 'V', 'M', 'I', 'L', 'L', '\x1A', 'E'};

enum class CipherMode : std::uint16_t { kStream = 1, kUnits = 2 };

// Little-endian. The rest of the header's kFileHeaderBytes is 0.
struct FileHeader {
  char magic[8];
  std::uint16_t version;
  CipherMode mode;
  std::uint32_t unit_bytes;
  EncryptionKeyId key;
  std::array<std::byte, 32> nonce;
  std::array<std::byte, 16> proof;  // Of the key: derived with the file's.
  std::uint64_t checksum;           // XXH3-64 of kFileHeaderBytes with this field 0.
};
static_assert(sizeof(FileHeader) == 80);

// HKDF-SHA256 of `key` into `out`.
void DeriveSecret(const EncryptionKey::Bytes& key, absl::Span<const std::byte> salt,
                  absl::string_view info, absl::Span<std::byte> out);

// What the first bytes of a file say, without its key. Magic, version and checksum lie where they
// lie in every version, so that a later one is told from damage.
struct HeaderFound {
  enum class Kind {
    kNone,  // Not the header of an encrypted file.
    kWhole,
    kOtherVersion,  // Whole, and `version` is not kFileHeaderVersion.
    kDamaged,
  };
  Kind kind = Kind::kNone;
  std::uint16_t version = 0;  // Of kWhole and kOtherVersion.
  EncryptionKeyId key{};      // Of kWhole.
};
HeaderFound ClassifyHeader(absl::Span<const std::byte> bytes);

// Keys of one file. Immutable, thread-safe; overwritten when it goes.
class FileCipher {
 public:
  // Of a new file, with the current key.
  FileCipher(const EncryptionKeys& keys, CipherMode mode);
  // Of a file that is there, from its first kFileHeaderBytes. DATA_LOSS: not a whole header of this
  // mode. FAILED_PRECONDITION: its key is not among `keys`, or its version is another.
  static absl::StatusOr<FileCipher> Open(const EncryptionKeys& keys, CipherMode mode,
                                         absl::Span<const std::byte> header);
  FileCipher(const FileCipher&) = default;
  FileCipher& operator=(const FileCipher&) = default;
  ~FileCipher();

  // Writes the header: kFileHeaderBytes.
  void WriteHeader(char* out) const;

 private:
  friend class StreamCipher;
  friend class UnitCipher;
  FileCipher() = default;
  std::array<std::byte, 16> Derive(const EncryptionKey& key);

  FileHeader header_{};
  std::array<std::byte, 64> key_{};  // XTS: two keys. CTR: the first half.
  std::array<std::byte, 32> tail_key_{};
};

// One thread's use of a FileCipher.
class CipherContext {
 public:
  CipherContext();
  CipherContext(CipherContext&& other) noexcept;
  CipherContext& operator=(CipherContext&&) = delete;
  ~CipherContext();
  evp_cipher_ctx_st* get() const { return context_; }

 private:
  evp_cipher_ctx_st* context_;
};

// Encrypts and decrypts, which is the same, bytes of a kStream file. Not thread-safe.
class StreamCipher {
 public:
  explicit StreamCipher(const FileCipher& file);
  // `offset`: of the first byte behind the header. `in` may be `out`.
  void Run(std::uint64_t offset, const char* in, std::size_t bytes, char* out);

 private:
  CipherContext context_;
};

// Encrypts, or decrypts, units of a kUnits file. Not thread-safe.
class UnitCipher {
 public:
  enum class Direction { kEncrypt, kDecrypt };
  UnitCipher(const FileCipher& file, Direction direction);
  ~UnitCipher();
  UnitCipher(const UnitCipher&) = delete;
  UnitCipher& operator=(const UnitCipher&) = delete;
  // Whole units from number `first_unit` on; the last one may be short if it is the file's last.
  // `in` may be `out`.
  void Run(std::uint64_t first_unit, const char* in, std::size_t bytes, char* out);

 private:
  void RunTail(std::uint64_t unit, const char* in, std::size_t bytes, char* out);

  CipherContext context_;
  std::array<std::byte, 32> tail_key_;
};

}  // namespace kvmill

#endif  // KVMILL_STORAGE_FILE_CIPHER_H_
