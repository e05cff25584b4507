// SHA-256, for identities: namespace fingerprints and block keys that we derive ourselves.
#ifndef KVMILL_STORAGE_CORE_SHA256_H_
#define KVMILL_STORAGE_CORE_SHA256_H_

#include <array>
#include <cstddef>

#include "absl/strings/string_view.h"

namespace kvmill {

using Sha256Digest = std::array<std::byte, 32>;

// Thread-safe.
Sha256Digest Sha256(absl::string_view bytes);
// Takes as long wherever they differ.
bool SameDigest(const Sha256Digest& a, const Sha256Digest& b);

}  // namespace kvmill

#endif  // KVMILL_STORAGE_CORE_SHA256_H_
