// Who are you, and can you prove it: what is said on a connection before anything else. The dialer
// says hello, the acceptor welcomes it, the dialer finishes; each message carries an HMAC over all
// that was said, with the key of the offer, and each side a random challenge. docs/formats.md has
// the layout and the reasons. Internal to client/transport/. Nothing here does I/O or keeps time.
#ifndef KVMILL_CLIENT_TRANSPORT_HANDSHAKE_H_
#define KVMILL_CLIENT_TRANSPORT_HANDSHAKE_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "client/transport/cryptography.h"
#include "client/transport/transport.h"
#include "storage/core/mutex.h"

namespace kvmill {

enum class HandshakeKind : std::uint8_t { kHello = 1, kWelcome = 2, kFinish = 3, kRefusal = 4 };

// As it lies on the wire, little-endian. Later versions append fields before the MAC, which is
// always the last 32 bytes; what is here never moves.
struct HandshakeMessage {
  std::uint32_t magic = 0x53484D4Bu;  // "KMHS"
  HandshakeKind kind = HandshakeKind::kHello;
  std::uint8_t encrypted = 0;     // 1: payloads are.
  std::uint16_t version = 0;      // Newest that the sender speaks; in a welcome and later, chosen.
  std::uint16_t version_min = 0;  // Oldest.
  std::uint16_t reserved = 0;
  std::uint32_t bytes = 0;  // Of the whole message.
  std::array<std::byte, 16> key_id{};
  NodeIdentity::Id sender{};
  std::uint64_t sender_incarnation = 0;
  std::uint64_t receiver_incarnation = 0;  // Whom the sender wants to reach.
  NodeIdentity::Id receiver{};
  std::array<std::byte, 32> challenge{};
  std::uint32_t calls_max = 0;  // What the sender takes from its peer.
  std::uint32_t segment_bytes_max = 0;
  std::uint64_t request_bytes_max = 0;
  Secret mac{};
};
static_assert(sizeof(HandshakeMessage) == 160);

enum class RefusalReason : std::uint8_t {
  kMalformed = 1,
  kVersion = 2,
  kEncryption = 3,
  kIncarnation = 4,
  kUnknownKey = 5,  // Or one whose time is up.
  kUsedKey = 6,
  kProof = 7,
  kBusy = 8,
  kNode = 9,  // The offer was made for another node.
};

// Why the sender hangs up. Not authenticated: it can say no more than that.
struct RefusalMessage {
  std::uint32_t magic = 0x53484D4Bu;
  HandshakeKind kind = HandshakeKind::kRefusal;
  RefusalReason reason = RefusalReason::kMalformed;
  std::uint16_t version = 0;  // Of the refusing side.
  std::uint16_t version_min = 0;
  std::uint16_t reserved = 0;
  std::uint32_t bytes = 16;
};
static_assert(sizeof(RefusalMessage) == 16);

inline constexpr std::size_t kHandshakeBytesMax = 1024;

// What both sides agreed on.
struct Agreement {
  NodeIdentity peer;
  std::uint16_t version = 0;
  bool encrypted = true;
  std::uint64_t owner_tag = 0;
  std::uint32_t peer_calls_max = 0;
  std::uint32_t peer_segment_bytes_max = 0;
  std::uint64_t peer_request_bytes_max = 0;
  Secret sending_key{};
  Secret receiving_key{};
};

// The offers of this process that may still be used, and the keys that were. Thread-safe.
class OfferBook {
 public:
  struct Entry {
    Secret key{};
    std::uint64_t owner_tag = 0;
    std::optional<NodeIdentity::Id> only_for;
    std::int64_t expires_nanos = 0;
    bool used = false;
  };
  using KeyId = std::array<std::byte, 16>;

  explicit OfferBook(std::uint32_t offers_max) : offers_max_(offers_max) {}
  ~OfferBook();

  // RESOURCE_EXHAUSTED when as many as may be are out.
  absl::Status Add(const KeyId& id, const Entry& entry, std::int64_t now_nanos);
  // Nothing when there is none, or when its time is up.
  std::optional<Entry> Find(const KeyId& id, std::int64_t now_nanos);
  // From now on it is used; it is remembered until it expires, to be named in refusals. False when
  // it is used already, or gone.
  bool Use(const KeyId& id);
  void Expire(std::int64_t now_nanos);
  std::size_t usable(std::int64_t now_nanos) const;

 private:
  void ExpireLocked(std::int64_t now_nanos) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  const std::uint32_t offers_max_;
  mutable Mutex mu_;
  std::map<KeyId, Entry> entries_ ABSL_GUARDED_BY(mu_);
};

struct HandshakeSide {
  NodeIdentity self;
  bool encrypted = true;
  std::uint16_t version = 1;
  std::uint16_t version_min = 1;
  std::uint32_t calls_max = 0;
  std::uint32_t segment_bytes_max = 0;
  std::uint64_t request_bytes_max = 0;
};

// The dialing side. Hello(), then OnMessage until it is done. After an error it is over.
class DialerHandshake {
 public:
  DialerHandshake(const HandshakeSide& side, const Offer& offer);
  ~DialerHandshake();
  absl::Span<const std::byte> hello() const { return hello_; }
  // The acceptor's welcome, or its refusal. Fills `finish`, to be sent before anything else.
  // UNAUTHENTICATED, ABORTED, FAILED_PRECONDITION, UNAVAILABLE as Transport::Connect says;
  // DATA_LOSS for what is no handshake.
  absl::StatusOr<Agreement> OnMessage(absl::Span<const std::byte> message,
                                      std::vector<std::byte>* finish);

 private:
  const HandshakeSide side_;
  Offer offer_;
  std::vector<std::byte> hello_;
};

// The accepting side.
class AcceptorHandshake {
 public:
  // `book` outlives it.
  AcceptorHandshake(const HandshakeSide& side, OfferBook* book);
  ~AcceptorHandshake();
  // The next message of the dialer. `reply` is what to send, also with an error (a refusal; hang up
  // after it). No agreement yet: send the welcome and wait for the finish.
  absl::StatusOr<std::optional<Agreement>> OnMessage(absl::Span<const std::byte> message,
                                                     std::int64_t now_nanos,
                                                     std::vector<std::byte>* reply);

 private:
  absl::StatusOr<std::optional<Agreement>> OnHello(absl::Span<const std::byte> message,
                                                   std::int64_t now_nanos,
                                                   std::vector<std::byte>* reply);
  absl::StatusOr<std::optional<Agreement>> OnFinish(absl::Span<const std::byte> message,
                                                    std::vector<std::byte>* reply);

  const HandshakeSide side_;
  OfferBook* const book_;
  bool welcomed_ = false;
  Secret key_{};
  Agreement agreement_;
  std::vector<std::byte> hello_;
  std::vector<std::byte> welcome_;
};

// A refusal as bytes.
std::vector<std::byte> MakeRefusal(const HandshakeSide& side, RefusalReason reason);

}  // namespace kvmill

#endif  // KVMILL_CLIENT_TRANSPORT_HANDSHAKE_H_
