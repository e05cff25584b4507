#include "client/transport/handshake.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "absl/strings/str_cat.h"
#include "storage/core/status_macros.h"

namespace kvmill {
namespace {

// What is signed begins with these, so that no message can stand for another.
constexpr absl::string_view kHelloLabel = "kvmill-handshake-1 hello";
constexpr absl::string_view kWelcomeLabel = "kvmill-handshake-1 welcome";
constexpr absl::string_view kFinishLabel = "kvmill-handshake-1 finish";

constexpr std::size_t kMacBytes = sizeof(HandshakeMessage::mac);

absl::Span<const std::byte> AsBytes(absl::string_view text) {
  return {reinterpret_cast<const std::byte*>(text.data()), text.size()};
}

// The fields that this version knows; the MAC from the end.
absl::StatusOr<HandshakeMessage> Parse(absl::Span<const std::byte> bytes, HandshakeKind kind) {
  HandshakeMessage message;
  if (bytes.size() < sizeof(message) || bytes.size() > kHandshakeBytesMax) {
    return absl::DataLossError(absl::StrCat("handshake: size is ", bytes.size()));
  }
  std::memcpy(static_cast<void*>(&message), bytes.data(), sizeof(message) - kMacBytes);
  std::memcpy(&message.mac, bytes.data() + bytes.size() - kMacBytes, kMacBytes);
  if (message.magic != HandshakeMessage{}.magic) {
    return absl::DataLossError(absl::StrCat("handshake: magic is ", message.magic));
  }
  if (message.kind != kind) {
    return absl::DataLossError(absl::StrCat("handshake: kind is ", static_cast<int>(message.kind)));
  }
  if (message.bytes != bytes.size()) {
    return absl::DataLossError(absl::StrCat("handshake: bytes is ", message.bytes));
  }
  if (message.encrypted > 1) {
    return absl::DataLossError(absl::StrCat("handshake: encrypted is ", message.encrypted));
  }
  if (message.version_min == 0 || message.version_min > message.version) {
    return absl::DataLossError(
        absl::StrCat("handshake: versions are ", message.version_min, " to ", message.version));
  }
  // Windows of zero would let nothing through, for ever.
  if (message.calls_max == 0 || message.request_bytes_max == 0 ||
      message.segment_bytes_max < kSegmentBytesMin ||
      message.segment_bytes_max > kSegmentBytesMax) {
    return absl::DataLossError(absl::StrCat("handshake: windows are ", message.calls_max,
                                            " calls, ", message.request_bytes_max,
                                            " bytes, segments of ", message.segment_bytes_max));
  }
  return message;
}

std::vector<std::byte> ToBytes(const HandshakeMessage& message) {
  std::vector<std::byte> bytes(sizeof(message));
  std::memcpy(bytes.data(), &message, sizeof(message));
  return bytes;
}

void PutMac(std::vector<std::byte>* message, const Secret& mac) {
  std::memcpy(message->data() + message->size() - kMacBytes, mac.data(), kMacBytes);
}

absl::Span<const std::byte> WithoutMac(absl::Span<const std::byte> message) {
  return message.first(message.size() - kMacBytes);
}

HandshakeMessage Fill(const HandshakeSide& side, HandshakeKind kind) {
  HandshakeMessage message;
  message.kind = kind;
  message.encrypted = side.encrypted ? 1 : 0;
  message.version = side.version;
  message.version_min = side.version_min;
  message.bytes = sizeof(message);
  message.sender = side.self.id;
  message.sender_incarnation = side.self.incarnation;
  message.calls_max = side.calls_max;
  message.segment_bytes_max = side.segment_bytes_max;
  message.request_bytes_max = side.request_bytes_max;
  return message;
}

NodeIdentity SenderOf(const HandshakeMessage& message) {
  return {message.sender, message.sender_incarnation};
}
NodeIdentity ReceiverOf(const HandshakeMessage& message) {
  return {message.receiver, message.receiver_incarnation};
}

Agreement Agree(const HandshakeMessage& theirs, const Secret& key, bool dialed,
                absl::Span<const std::byte> dialer_challenge,
                absl::Span<const std::byte> acceptor_challenge) {
  std::array<std::byte, 64> salt;
  std::copy(dialer_challenge.begin(), dialer_challenge.end(), salt.begin());
  std::copy(acceptor_challenge.begin(), acceptor_challenge.end(), salt.begin() + 32);
  const Secret from_dialer = Hkdf(key, salt, "kvmill-segments-1 from dialer");
  const Secret from_acceptor = Hkdf(key, salt, "kvmill-segments-1 from acceptor");
  Agreement agreement;
  agreement.peer = SenderOf(theirs);
  agreement.encrypted = theirs.encrypted == 1;
  agreement.version = theirs.version;
  agreement.peer_calls_max = theirs.calls_max;
  agreement.peer_segment_bytes_max = theirs.segment_bytes_max;
  agreement.peer_request_bytes_max = theirs.request_bytes_max;
  agreement.sending_key = dialed ? from_dialer : from_acceptor;
  agreement.receiving_key = dialed ? from_acceptor : from_dialer;
  return agreement;
}

absl::Status StatusOf(const RefusalMessage& refusal, const HandshakeSide& side) {
  switch (refusal.reason) {
    case RefusalReason::kMalformed:
      return absl::UnavailableError("the peer could not read the handshake");
    case RefusalReason::kVersion:
      return absl::FailedPreconditionError(absl::StrCat(
          "the peer speaks versions ", refusal.version_min, " to ", refusal.version,
          " of the transport's protocol, this side ", side.version_min, " to ", side.version));
    case RefusalReason::kEncryption:
      return absl::FailedPreconditionError(
          side.encrypted ? "the peer's data plane is plaintext, this side's is encrypted"
                         : "the peer's data plane is encrypted, this side's is plaintext");
    case RefusalReason::kIncarnation:
      return absl::AbortedError("another node, or another incarnation of it, answers there");
    case RefusalReason::kUnknownKey:
      return absl::UnauthenticatedError("the peer does not know the offer, or it expired");
    case RefusalReason::kUsedKey:
      return absl::UnauthenticatedError("the offer was used before");
    case RefusalReason::kProof:
      return absl::UnauthenticatedError("the peer does not accept the proof of the key");
    case RefusalReason::kBusy:
      return absl::UnavailableError("the peer has too many connections");
    case RefusalReason::kNode:
      return absl::UnauthenticatedError("the offer was made for another node");
  }
  return absl::UnavailableError(
      absl::StrCat("the peer refused for reason ", static_cast<int>(refusal.reason)));
}

}  // namespace

std::vector<std::byte> MakeRefusal(const HandshakeSide& side, RefusalReason reason) {
  RefusalMessage refusal;
  refusal.reason = reason;
  refusal.version = side.version;
  refusal.version_min = side.version_min;
  std::vector<std::byte> bytes(sizeof(refusal));
  std::memcpy(bytes.data(), &refusal, sizeof(refusal));
  return bytes;
}

OfferBook::~OfferBook() {
  for (auto& [id, entry] : entries_) EraseSecret(absl::MakeSpan(entry.key));
}

absl::Status OfferBook::Add(const KeyId& id, const Entry& entry, std::int64_t now_nanos) {
  const MutexLock lock(mu_);
  ExpireLocked(now_nanos);
  if (entries_.size() >= offers_max_) {
    return absl::ResourceExhaustedError(
        absl::StrCat(entries_.size(), " offers of connections are out already"));
  }
  entries_.emplace(id, entry);
  return absl::OkStatus();
}

std::optional<OfferBook::Entry> OfferBook::Find(const KeyId& id, std::int64_t now_nanos) {
  const MutexLock lock(mu_);
  const auto found = entries_.find(id);
  if (found == entries_.end() || found->second.expires_nanos <= now_nanos) return std::nullopt;
  return found->second;
}

bool OfferBook::Use(const KeyId& id) {
  const MutexLock lock(mu_);
  const auto found = entries_.find(id);
  if (found == entries_.end() || found->second.used) return false;
  found->second.used = true;
  EraseSecret(absl::MakeSpan(found->second.key));
  return true;
}

void OfferBook::Expire(std::int64_t now_nanos) {
  const MutexLock lock(mu_);
  ExpireLocked(now_nanos);
}

std::size_t OfferBook::usable(std::int64_t now_nanos) const {
  const MutexLock lock(mu_);
  std::size_t usable = 0;
  for (const auto& [id, entry] : entries_) {
    if (!entry.used && entry.expires_nanos > now_nanos) ++usable;
  }
  return usable;
}

void OfferBook::ExpireLocked(std::int64_t now_nanos) {
  for (auto entry = entries_.begin(); entry != entries_.end();) {
    if (entry->second.expires_nanos > now_nanos) {
      ++entry;
      continue;
    }
    EraseSecret(absl::MakeSpan(entry->second.key));
    entry = entries_.erase(entry);
  }
}

DialerHandshake::DialerHandshake(const HandshakeSide& side, const Offer& offer)
    : side_(side), offer_(offer) {
  HandshakeMessage hello = Fill(side_, HandshakeKind::kHello);
  hello.key_id = offer_.key_id;
  hello.receiver = offer_.node.id;
  hello.receiver_incarnation = offer_.node.incarnation;
  RandomBytes(absl::MakeSpan(hello.challenge));
  hello_ = ToBytes(hello);
  PutMac(&hello_, Hmac(offer_.key, {AsBytes(kHelloLabel), WithoutMac(hello_)}));
}

DialerHandshake::~DialerHandshake() { EraseSecret(absl::MakeSpan(offer_.key)); }

absl::StatusOr<Agreement> DialerHandshake::OnMessage(absl::Span<const std::byte> message,
                                                     std::vector<std::byte>* finish) {
  if (message.size() == sizeof(RefusalMessage)) {
    RefusalMessage refusal;
    std::memcpy(&refusal, message.data(), sizeof(refusal));
    if (refusal.magic == RefusalMessage{}.magic && refusal.kind == HandshakeKind::kRefusal) {
      return StatusOf(refusal, side_);
    }
  }
  KVMILL_ASSIGN_OR_RETURN(const HandshakeMessage welcome, Parse(message, HandshakeKind::kWelcome));
  if (!SecretEqual(welcome.mac,
                   Hmac(offer_.key, {AsBytes(kWelcomeLabel), hello_, WithoutMac(message)}))) {
    return absl::UnauthenticatedError("the peer did not prove that it knows the offer's key");
  }
  // Proven; what differs now is a mistake of the peer, not of an impostor.
  if (SenderOf(welcome) != offer_.node || ReceiverOf(welcome) != side_.self) {
    return absl::AbortedError(absl::StrCat("node ", SenderOf(welcome).ToString(),
                                           " answers, the offer was made by ",
                                           offer_.node.ToString()));
  }
  if (welcome.version < side_.version_min || welcome.version > side_.version) {
    return absl::FailedPreconditionError(
        absl::StrCat("the peer chose version ", welcome.version, " of the transport's protocol, ",
                     "this side speaks ", side_.version_min, " to ", side_.version));
  }
  if ((welcome.encrypted == 1) != side_.encrypted) {
    RefusalMessage refusal;
    refusal.reason = RefusalReason::kEncryption;
    return StatusOf(refusal, side_);
  }
  HandshakeMessage last = Fill(side_, HandshakeKind::kFinish);
  last.version = welcome.version;
  last.key_id = offer_.key_id;
  last.receiver = welcome.sender;
  last.receiver_incarnation = welcome.sender_incarnation;
  last.challenge = welcome.challenge;
  *finish = ToBytes(last);
  PutMac(finish, Hmac(offer_.key, {AsBytes(kFinishLabel), hello_, message, WithoutMac(*finish)}));
  HandshakeMessage hello;
  std::memcpy(&hello, hello_.data(), sizeof(hello));
  return Agree(welcome, offer_.key, /*dialed=*/true, hello.challenge, welcome.challenge);
}

AcceptorHandshake::AcceptorHandshake(const HandshakeSide& side, OfferBook* book)
    : side_(side), book_(book) {}

AcceptorHandshake::~AcceptorHandshake() { EraseSecret(absl::MakeSpan(key_)); }

absl::StatusOr<std::optional<Agreement>> AcceptorHandshake::OnMessage(
    absl::Span<const std::byte> message, std::int64_t now_nanos, std::vector<std::byte>* reply) {
  return welcomed_ ? OnFinish(message, reply) : OnHello(message, now_nanos, reply);
}

absl::StatusOr<std::optional<Agreement>> AcceptorHandshake::OnHello(
    absl::Span<const std::byte> message, std::int64_t now_nanos, std::vector<std::byte>* reply) {
  const auto refuse = [&](RefusalReason reason, std::string why) {
    *reply = MakeRefusal(side_, reason);
    return absl::PermissionDeniedError(why);
  };
  absl::StatusOr<HandshakeMessage> hello = Parse(message, HandshakeKind::kHello);
  if (!hello.ok()) return refuse(RefusalReason::kMalformed, std::string(hello.status().message()));
  if (hello->version_min > side_.version || hello->version < side_.version_min) {
    return refuse(
        RefusalReason::kVersion,
        absl::StrCat("the dialer speaks versions ", hello->version_min, " to ", hello->version,
                     ", this side ", side_.version_min, " to ", side_.version));
  }
  if (ReceiverOf(*hello) != side_.self) {
    return refuse(RefusalReason::kIncarnation,
                  absl::StrCat("the dialer wants node ", ReceiverOf(*hello).ToString(),
                               ", this is ", side_.self.ToString()));
  }
  std::optional<OfferBook::Entry> entry = book_->Find(hello->key_id, now_nanos);
  if (!entry.has_value()) {
    return refuse(RefusalReason::kUnknownKey, "no such offer, or it expired");
  }
  if (entry->used) return refuse(RefusalReason::kUsedKey, "the offer was used before");
  if (!SecretEqual(hello->mac, Hmac(entry->key, {AsBytes(kHelloLabel), WithoutMac(message)}))) {
    return refuse(RefusalReason::kProof, "the dialer does not know the offer's key");
  }
  if (entry->only_for.has_value() && *entry->only_for != hello->sender) {
    return refuse(RefusalReason::kNode, absl::StrCat("the offer was made for another node than ",
                                                     SenderOf(*hello).ToString()));
  }
  // After the proof: only who has the key learns how this side is configured.
  if ((hello->encrypted == 1) != side_.encrypted) {
    return refuse(RefusalReason::kEncryption, side_.encrypted
                                                  ? "the dialer wants plaintext, this side encrypts"
                                                  : "the dialer encrypts, this side is plaintext");
  }
  key_ = entry->key;
  const std::uint64_t owner_tag = entry->owner_tag;
  EraseSecret(absl::MakeSpan(entry->key));
  if (!book_->Use(hello->key_id)) {
    return refuse(RefusalReason::kUsedKey, "the offer was used before");
  }

  HandshakeMessage welcome = Fill(side_, HandshakeKind::kWelcome);
  welcome.version = std::min(side_.version, hello->version);
  welcome.version_min = std::min(side_.version_min, welcome.version);
  welcome.key_id = hello->key_id;
  welcome.receiver = hello->sender;
  welcome.receiver_incarnation = hello->sender_incarnation;
  RandomBytes(absl::MakeSpan(welcome.challenge));
  hello_.assign(message.begin(), message.end());
  welcome_ = ToBytes(welcome);
  PutMac(&welcome_, Hmac(key_, {AsBytes(kWelcomeLabel), hello_, WithoutMac(welcome_)}));
  *reply = welcome_;
  agreement_ = Agree(*hello, key_, /*dialed=*/false, hello->challenge, welcome.challenge);
  agreement_.version = welcome.version;
  agreement_.owner_tag = owner_tag;
  welcomed_ = true;
  return std::optional<Agreement>();
}

absl::StatusOr<std::optional<Agreement>> AcceptorHandshake::OnFinish(
    absl::Span<const std::byte> message, std::vector<std::byte>* reply) {
  absl::StatusOr<HandshakeMessage> finish = Parse(message, HandshakeKind::kFinish);
  if (!finish.ok()) {
    *reply = MakeRefusal(side_, RefusalReason::kMalformed);
    return finish.status();
  }
  if (!SecretEqual(finish->mac,
                   Hmac(key_, {AsBytes(kFinishLabel), hello_, welcome_, WithoutMac(message)}))) {
    *reply = MakeRefusal(side_, RefusalReason::kProof);
    return absl::PermissionDeniedError("the dialer's last message does not prove the key");
  }
  return std::optional<Agreement>(agreement_);
}

}  // namespace kvmill
