// HMAC, HKDF and AES-256-GCM by OpenSSL, as the transport needs them. Internal to
// client/transport/.
#ifndef KVMILL_CLIENT_TRANSPORT_CRYPTOGRAPHY_H_
#define KVMILL_CLIENT_TRANSPORT_CRYPTOGRAPHY_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "client/transport/segment.h"

namespace kvmill {

using Secret = std::array<std::byte, 32>;

// From the operating system; aborts when it has none, since nothing can be secure then.
void RandomBytes(absl::Span<std::byte> out);
// Does not tell by its duration where they differ.
bool SecretEqual(absl::Span<const std::byte> a, absl::Span<const std::byte> b);
void EraseSecret(absl::Span<std::byte> secret);

// HMAC-SHA-256 of the parts, one after the other.
Secret Hmac(const Secret& key, std::initializer_list<absl::Span<const std::byte>> parts);
// HKDF-SHA-256 (RFC 5869), 32 bytes.
Secret Hkdf(const Secret& key, absl::Span<const std::byte> salt, absl::string_view info);

// AES-256-GCM with one key. Nonces are (part, counter): a sender never uses a pair twice. Not
// thread-safe: of the transport's thread.
class SegmentCipher {
 public:
  enum class Part : std::uint32_t { kHead = 0, kData = 1 };

  enum class Direction { kSeal, kOpen };
  SegmentCipher(const Secret& key, Direction direction);
  ~SegmentCipher();
  SegmentCipher(const SegmentCipher&) = delete;
  SegmentCipher& operator=(const SegmentCipher&) = delete;

  // Begin, any number of Update, then Finish or Verify.
  void Begin(Part part, std::uint64_t counter, absl::Span<const std::byte> authenticated);
  // `out` may be `in`, and otherwise must not overlap it.
  void Update(absl::Span<const std::byte> in, std::byte* out);
  SegmentTag Finish();                 // Sealing.
  bool Verify(const SegmentTag& tag);  // Opening: false, and what Update wrote is worth nothing.

 private:
  struct Context;
  const std::unique_ptr<Context> context_;
};

}  // namespace kvmill

#endif  // KVMILL_CLIENT_TRANSPORT_CRYPTOGRAPHY_H_
