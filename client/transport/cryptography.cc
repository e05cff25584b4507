#include "client/transport/cryptography.h"

#include <openssl/core_names.h>
#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/kdf.h>
#include <openssl/params.h>
#include <openssl/rand.h>

#include <algorithm>
#include <cstring>

#include "storage/core/check.h"

namespace kvmill {
namespace {

const unsigned char* Bytes(absl::Span<const std::byte> span) {
  return reinterpret_cast<const unsigned char*>(span.data());
}
unsigned char* Bytes(std::byte* data) { return reinterpret_cast<unsigned char*>(data); }

OSSL_PARAM Utf8(const char* name, const char* value) {
  return OSSL_PARAM_construct_utf8_string(name, const_cast<char*>(value), 0);
}
OSSL_PARAM Octets(const char* name, absl::Span<const std::byte> value) {
  return OSSL_PARAM_construct_octet_string(name, const_cast<std::byte*>(value.data()),
                                           value.size());
}

// Update takes an int; OpenSSL's own limit for one nonce is far above a segment.
constexpr std::size_t kUpdateBytesMax = std::size_t{1} << 30;

}  // namespace

void RandomBytes(absl::Span<std::byte> out) {
  KVMILL_CHECK(RAND_bytes(Bytes(out.data()), static_cast<int>(out.size())) == 1);
}

bool SecretEqual(absl::Span<const std::byte> a, absl::Span<const std::byte> b) {
  return a.size() == b.size() && CRYPTO_memcmp(a.data(), b.data(), a.size()) == 0;
}

void EraseSecret(absl::Span<std::byte> secret) { OPENSSL_cleanse(secret.data(), secret.size()); }

Secret Hmac(const Secret& key, std::initializer_list<absl::Span<const std::byte>> parts) {
  EVP_MAC* const mac = EVP_MAC_fetch(nullptr, "HMAC", nullptr);
  KVMILL_CHECK(mac != nullptr);
  EVP_MAC_CTX* const context = EVP_MAC_CTX_new(mac);
  KVMILL_CHECK(context != nullptr);
  const std::array<OSSL_PARAM, 2> parameters = {Utf8(OSSL_MAC_PARAM_DIGEST, "SHA256"),
                                                OSSL_PARAM_construct_end()};
  KVMILL_CHECK(EVP_MAC_init(context, Bytes(key), key.size(), parameters.data()) == 1);
  for (const absl::Span<const std::byte> part : parts) {
    KVMILL_CHECK(EVP_MAC_update(context, Bytes(part), part.size()) == 1);
  }
  Secret result;
  std::size_t bytes = 0;
  KVMILL_CHECK(EVP_MAC_final(context, Bytes(result.data()), &bytes, result.size()) == 1);
  KVMILL_CHECK(bytes == result.size());
  EVP_MAC_CTX_free(context);
  EVP_MAC_free(mac);
  return result;
}

Secret Hkdf(const Secret& key, absl::Span<const std::byte> salt, absl::string_view info) {
  EVP_KDF* const kdf = EVP_KDF_fetch(nullptr, "HKDF", nullptr);
  KVMILL_CHECK(kdf != nullptr);
  EVP_KDF_CTX* const context = EVP_KDF_CTX_new(kdf);
  KVMILL_CHECK(context != nullptr);
  const std::array<OSSL_PARAM, 5> parameters = {
      Utf8(OSSL_KDF_PARAM_DIGEST, "SHA256"), Octets(OSSL_KDF_PARAM_KEY, key),
      Octets(OSSL_KDF_PARAM_SALT, salt),
      Octets(OSSL_KDF_PARAM_INFO, {reinterpret_cast<const std::byte*>(info.data()), info.size()}),
      OSSL_PARAM_construct_end()};
  Secret result;
  KVMILL_CHECK(EVP_KDF_derive(context, Bytes(result.data()), result.size(), parameters.data()) ==
               1);
  EVP_KDF_CTX_free(context);
  EVP_KDF_free(kdf);
  return result;
}

struct SegmentCipher::Context {
  explicit Context(bool seals) : encrypt(seals), evp(EVP_CIPHER_CTX_new()) {
    KVMILL_CHECK(evp != nullptr);
  }
  ~Context() { EVP_CIPHER_CTX_free(evp); }

  const bool encrypt;
  EVP_CIPHER_CTX* const evp;
};

SegmentCipher::SegmentCipher(const Secret& key, Direction direction)
    : context_(std::make_unique<Context>(direction == Direction::kSeal)) {
  KVMILL_CHECK(EVP_CipherInit_ex(context_->evp, EVP_aes_256_gcm(), nullptr, Bytes(key), nullptr,
                                 context_->encrypt ? 1 : 0) == 1);
}

SegmentCipher::~SegmentCipher() = default;

void SegmentCipher::Begin(Part part, std::uint64_t counter,
                          absl::Span<const std::byte> authenticated) {
  std::array<std::byte, 12> nonce;
  std::memcpy(nonce.data(), &part, 4);
  std::memcpy(nonce.data() + 4, &counter, 8);
  KVMILL_CHECK(EVP_CipherInit_ex(context_->evp, nullptr, nullptr, nullptr, Bytes(nonce), -1) == 1);
  if (authenticated.empty()) return;
  int bytes = 0;
  KVMILL_CHECK(EVP_CipherUpdate(context_->evp, nullptr, &bytes, Bytes(authenticated),
                                static_cast<int>(authenticated.size())) == 1);
}

void SegmentCipher::Update(absl::Span<const std::byte> in, std::byte* out) {
  while (!in.empty()) {
    const std::size_t bytes = std::min(in.size(), kUpdateBytesMax);
    int written = 0;
    KVMILL_CHECK(EVP_CipherUpdate(context_->evp, Bytes(out), &written, Bytes(in),
                                  static_cast<int>(bytes)) == 1);
    KVMILL_CHECK(static_cast<std::size_t>(written) == bytes);  // GCM is a stream.
    in.remove_prefix(bytes);
    out += bytes;
  }
}

SegmentTag SegmentCipher::Finish() {
  SegmentTag tag;
  int written = 0;
  std::array<unsigned char, 16> rest;  // Always empty.
  KVMILL_CHECK(EVP_CipherFinal_ex(context_->evp, rest.data(), &written) == 1 && written == 0);
  KVMILL_CHECK(EVP_CIPHER_CTX_ctrl(context_->evp, EVP_CTRL_AEAD_GET_TAG,
                                   static_cast<int>(tag.size()), tag.data()) == 1);
  return tag;
}

bool SegmentCipher::Verify(const SegmentTag& tag) {
  SegmentTag expected = tag;
  KVMILL_CHECK(EVP_CIPHER_CTX_ctrl(context_->evp, EVP_CTRL_AEAD_SET_TAG,
                                   static_cast<int>(expected.size()), expected.data()) == 1);
  int written = 0;
  std::array<unsigned char, 16> rest;
  return EVP_CipherFinal_ex(context_->evp, rest.data(), &written) == 1;
}

}  // namespace kvmill
