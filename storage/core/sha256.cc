#include "storage/core/sha256.h"

#include <openssl/crypto.h>
#include <openssl/sha.h>

namespace kvmill {

Sha256Digest Sha256(absl::string_view bytes) {
  static_assert(sizeof(Sha256Digest) == SHA256_DIGEST_LENGTH);
  Sha256Digest digest;
  SHA256(reinterpret_cast<const unsigned char*>(bytes.data()), bytes.size(),
         reinterpret_cast<unsigned char*>(digest.data()));
  return digest;
}

bool SameDigest(const Sha256Digest& a, const Sha256Digest& b) {
  return CRYPTO_memcmp(a.data(), b.data(), a.size()) == 0;
}

}  // namespace kvmill
