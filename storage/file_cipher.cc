#include "storage/file_cipher.h"

#include <openssl/core_names.h>
#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/kdf.h>
#include <openssl/params.h>
#include <openssl/rand.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "storage/core/check.h"
#include "storage/core/checksum.h"

namespace kvmill {
namespace {

static_assert(std::endian::native == std::endian::little, "headers are written as they lie in RAM");

constexpr std::size_t kBlockBytes = 16;  // Of AES.
constexpr std::size_t kUpdateBytesMax = std::size_t{1} << 30;

using Block = std::array<unsigned char, kBlockBytes>;

const unsigned char* Bytes(const void* data) { return static_cast<const unsigned char*>(data); }
unsigned char* Bytes(void* data) { return static_cast<unsigned char*>(data); }

OSSL_PARAM Octets(const char* name, const void* data, std::size_t bytes) {
  return OSSL_PARAM_construct_octet_string(name, const_cast<void*>(data), bytes);
}

// Looked up once: each look-up takes locks of OpenSSL.
const EVP_CIPHER* Aes256Ctr() {
  static const EVP_CIPHER* const cipher = EVP_CIPHER_fetch(nullptr, "AES-256-CTR", nullptr);
  KVMILL_CHECK(cipher != nullptr);
  return cipher;
}
const EVP_CIPHER* Aes256Xts() {
  static const EVP_CIPHER* const cipher = EVP_CIPHER_fetch(nullptr, "AES-256-XTS", nullptr);
  KVMILL_CHECK(cipher != nullptr);
  return cipher;
}

// CTR counts up the whole block, big-endian: block i of a file has counter i.
Block CounterOf(std::uint64_t number) {
  Block block{};
  for (std::size_t i = 0; i < 8; ++i) {
    block[kBlockBytes - 1 - i] = static_cast<unsigned char>(number >> (8 * i));
  }
  return block;
}

// XTS's tweak is the unit's number, little-endian.
Block TweakOf(std::uint64_t number) {
  Block block{};
  std::memcpy(block.data(), &number, sizeof(number));
  return block;
}

void Update(EVP_CIPHER_CTX* context, const char* in, std::size_t bytes, char* out) {
  int written = 0;
  KVMILL_CHECK(
      EVP_CipherUpdate(context, Bytes(out), &written, Bytes(in), static_cast<int>(bytes)) == 1);
  KVMILL_CHECK(static_cast<std::size_t>(written) == bytes);
}

std::uint64_t ChecksumOf(absl::Span<const std::byte> bytes) {
  std::array<std::byte, kFileHeaderBytes> copy;
  std::memcpy(copy.data(), bytes.data(), copy.size());
  std::memset(copy.data() + offsetof(FileHeader, checksum), 0, sizeof(FileHeader::checksum));
  return Checksum(copy);
}

}  // namespace

void DeriveSecret(const EncryptionKey::Bytes& key, absl::Span<const std::byte> salt,
                  absl::string_view info, absl::Span<std::byte> out) {
  EVP_KDF* const kdf = EVP_KDF_fetch(nullptr, "HKDF", nullptr);
  KVMILL_CHECK(kdf != nullptr);
  EVP_KDF_CTX* const context = EVP_KDF_CTX_new(kdf);
  KVMILL_CHECK(context != nullptr);
  char digest[] = "SHA256";
  std::vector<OSSL_PARAM> parameters = {
      OSSL_PARAM_construct_utf8_string(OSSL_KDF_PARAM_DIGEST, digest, 0),
      Octets(OSSL_KDF_PARAM_KEY, key.data(), key.size()),
      Octets(OSSL_KDF_PARAM_INFO, info.data(), info.size())};
  if (!salt.empty()) parameters.push_back(Octets(OSSL_KDF_PARAM_SALT, salt.data(), salt.size()));
  parameters.push_back(OSSL_PARAM_construct_end());
  KVMILL_CHECK(EVP_KDF_derive(context, Bytes(out.data()), out.size(), parameters.data()) == 1);
  EVP_KDF_CTX_free(context);
  EVP_KDF_free(kdf);
}

HeaderFound ClassifyHeader(absl::Span<const std::byte> bytes) {
  using Kind = HeaderFound::Kind;
  if (bytes.size() < sizeof(kFileHeaderMagic) ||
      std::memcmp(bytes.data(), kFileHeaderMagic, sizeof(kFileHeaderMagic)) != 0) {
    return {.kind = Kind::kNone};
  }
  if (bytes.size() < kFileHeaderBytes) return {.kind = Kind::kDamaged};
  FileHeader header;
  std::memcpy(&header, bytes.data(), sizeof(header));
  if (header.checksum != ChecksumOf(bytes)) return {.kind = Kind::kDamaged};
  // Nobody knows what a later version keeps where the key is now.
  if (header.version != kFileHeaderVersion) {
    return {.kind = Kind::kOtherVersion, .version = header.version};
  }
  return {.kind = Kind::kWhole, .version = header.version, .key = header.key};
}

FileCipher::FileCipher(const EncryptionKeys& keys, CipherMode mode) {
  std::memcpy(header_.magic, kFileHeaderMagic, sizeof(header_.magic));
  header_.version = kFileHeaderVersion;
  header_.mode = mode;
  header_.unit_bytes = kCipherUnitBytes;
  header_.key = keys.current().id();
  KVMILL_CHECK(RAND_bytes(Bytes(header_.nonce.data()), static_cast<int>(header_.nonce.size())) ==
               1);
  header_.proof = Derive(keys.current());
}

absl::StatusOr<FileCipher> FileCipher::Open(const EncryptionKeys& keys, CipherMode mode,
                                            absl::Span<const std::byte> header) {
  const HeaderFound found = ClassifyHeader(header);
  switch (found.kind) {
    case HeaderFound::Kind::kNone:
      return absl::DataLossError("not an encrypted file");
    case HeaderFound::Kind::kDamaged:
      return absl::DataLossError("the header of the encrypted file is damaged");
    case HeaderFound::Kind::kOtherVersion:
      return absl::FailedPreconditionError(absl::StrCat("encrypted file with a header of version ",
                                                        found.version, ", want ",
                                                        kFileHeaderVersion));
    case HeaderFound::Kind::kWhole:
      break;
  }
  FileCipher cipher;
  std::memcpy(&cipher.header_, header.data(), sizeof(FileHeader));
  if (cipher.header_.mode != mode || cipher.header_.unit_bytes != kCipherUnitBytes) {
    return absl::DataLossError(absl::StrCat(
        "encrypted file of mode ", static_cast<unsigned>(cipher.header_.mode), ", units of ",
        cipher.header_.unit_bytes, ", want ", static_cast<unsigned>(mode), ", ", kCipherUnitBytes));
  }
  const std::optional<std::size_t> key = keys.Find(found.key);
  if (!key.has_value()) {
    return absl::FailedPreconditionError(
        absl::StrCat("encrypted with key ", ToHex(found.key), ", which is not there"));
  }
  const std::array<std::byte, 16> proof = cipher.Derive(keys.keys()[*key]);
  if (CRYPTO_memcmp(proof.data(), cipher.header_.proof.data(), proof.size()) != 0) {
    return absl::DataLossError(
        absl::StrCat("the header names key ", ToHex(found.key), " and was not written with it"));
  }
  return cipher;
}

FileCipher::~FileCipher() {
  OPENSSL_cleanse(key_.data(), key_.size());
  OPENSSL_cleanse(tail_key_.data(), tail_key_.size());
}

std::array<std::byte, 16> FileCipher::Derive(const EncryptionKey& key) {
  std::array<std::byte, 64 + 32 + 16> out;
  const std::string info =
      absl::StrCat("kvmill disk file 1 mode ", static_cast<unsigned>(header_.mode));
  DeriveSecret(key.bytes(), header_.nonce, info, absl::MakeSpan(out));
  std::array<std::byte, 16> proof;
  std::copy_n(out.begin(), 64, key_.begin());
  std::copy_n(out.begin() + 64, 32, tail_key_.begin());
  std::copy_n(out.begin() + 96, 16, proof.begin());
  OPENSSL_cleanse(out.data(), out.size());
  return proof;
}

void FileCipher::WriteHeader(char* out) const {
  std::memset(out, 0, kFileHeaderBytes);
  FileHeader header = header_;
  header.checksum = 0;
  std::memcpy(out, &header, sizeof(header));
  header.checksum =
      Checksum(absl::MakeConstSpan(reinterpret_cast<const std::byte*>(out), kFileHeaderBytes));
  std::memcpy(out, &header, sizeof(header));
}

CipherContext::CipherContext() : context_(EVP_CIPHER_CTX_new()) {
  KVMILL_CHECK(context_ != nullptr);
}
CipherContext::CipherContext(CipherContext&& other) noexcept
    : context_(std::exchange(other.context_, nullptr)) {}
CipherContext::~CipherContext() { EVP_CIPHER_CTX_free(context_); }  // Overwrites the keys.

StreamCipher::StreamCipher(const FileCipher& file) {
  KVMILL_CHECK(file.header_.mode == CipherMode::kStream);
  const Block counter{};
  KVMILL_CHECK(EVP_EncryptInit_ex2(context_.get(), Aes256Ctr(), Bytes(file.key_.data()),
                                   counter.data(), nullptr) == 1);
}

void StreamCipher::Run(std::uint64_t offset, const char* in, std::size_t bytes, char* out) {
  const Block counter = CounterOf(offset / kBlockBytes);
  KVMILL_CHECK(EVP_EncryptInit_ex2(context_.get(), nullptr, nullptr, counter.data(), nullptr) == 1);
  if (const std::size_t before = offset % kBlockBytes; before > 0) {
    const std::array<char, kBlockBytes> skipped{};
    std::array<char, kBlockBytes> unused;
    Update(context_.get(), skipped.data(), before, unused.data());
    OPENSSL_cleanse(unused.data(), unused.size());
  }
  while (bytes > 0) {
    const std::size_t step = std::min(bytes, kUpdateBytesMax);
    Update(context_.get(), in, step, out);
    in += step;
    out += step;
    bytes -= step;
  }
}

UnitCipher::UnitCipher(const FileCipher& file, Direction direction) : tail_key_(file.tail_key_) {
  KVMILL_CHECK(file.header_.mode == CipherMode::kUnits);
  const Block tweak{};
  KVMILL_CHECK(EVP_CipherInit_ex2(context_.get(), Aes256Xts(), Bytes(file.key_.data()),
                                  tweak.data(), direction == Direction::kEncrypt ? 1 : 0,
                                  nullptr) == 1);
}

UnitCipher::~UnitCipher() { OPENSSL_cleanse(tail_key_.data(), tail_key_.size()); }

void UnitCipher::Run(std::uint64_t first_unit, const char* in, std::size_t bytes, char* out) {
  for (std::uint64_t unit = first_unit; bytes > 0; ++unit) {
    const std::size_t step = std::min(bytes, kCipherUnitBytes);
    if (step < kBlockBytes) return RunTail(unit, in, step, out);
    const Block tweak = TweakOf(unit);
    KVMILL_CHECK(EVP_CipherInit_ex2(context_.get(), nullptr, nullptr, tweak.data(), -1, nullptr) ==
                 1);
    Update(context_.get(), in, step, out);
    in += step;
    out += step;
    bytes -= step;
  }
}

void UnitCipher::RunTail(std::uint64_t unit, const char* in, std::size_t bytes, char* out) {
  const CipherContext context;
  const Block counter = CounterOf(unit);
  KVMILL_CHECK(EVP_EncryptInit_ex2(context.get(), Aes256Ctr(), Bytes(tail_key_.data()),
                                   counter.data(), nullptr) == 1);
  Update(context.get(), in, bytes, out);
}

}  // namespace kvmill
