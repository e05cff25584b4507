// Between protobuf messages and our own types; used by the client and the service. Conversions to
// our types check ranges: INVALID_ARGUMENT names field and value.
#ifndef KVMILL_CLIENT_CONVERT_H_
#define KVMILL_CLIENT_CONVERT_H_

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "client/elsewhere.h"
#include "client/engine_geometry.h"
#include "kvmill/v1/common.pb.h"
#include "kvmill/v1/engine.pb.h"
#include "storage/core/block_key.h"
#include "storage/core/namespace.h"
#include "storage/core/tier.h"

namespace kvmill {

// Versions of the protocol that differ by at most one talk to each other.
inline constexpr std::uint32_t kProtocolVersion = 1;
inline constexpr const char* kSoftwareVersion = "0.1.0";
// FAILED_PRECONDITION naming both versions.
absl::Status CheckProtocolVersion(std::uint32_t theirs);

// Initial metadata of every reply: the daemon's boot id in lower-case hex.
inline constexpr const char* kBootIdMetadata = "kvmill-boot-id";
// Initial metadata of calls over TLS whose client has a token (RFC 6750): the scheme, then the
// token.
inline constexpr const char* kTokenMetadata = "authorization";
inline constexpr const char* kTokenScheme = "Bearer ";

void ToProto(const NamespaceSpec& spec, v1::NamespaceSpec* out);
// The tenant stays empty.
absl::StatusOr<NamespaceSpec> FromProto(const v1::NamespaceSpec& spec);

v1::Tier ToProto(Tier tier);
absl::StatusOr<Tier> FromProto(v1::Tier tier);
v1::PageMemory ToProto(PageMemory memory);
absl::StatusOr<PageMemory> FromProto(v1::PageMemory memory);

void ToProto(const EngineGeometry& geometry, v1::EngineGeometry* out);
absl::StatusOr<EngineGeometry> FromProto(const v1::EngineGeometry& geometry);

void ToProto(const Elsewhere& elsewhere, v1::Elsewhere* out);
absl::StatusOr<Elsewhere> FromProto(const v1::Elsewhere& elsewhere);

// NamespaceRef.fingerprint and its like.
absl::StatusOr<Fingerprint> FingerprintFromBytes(absl::string_view bytes);
inline absl::string_view AsBytes(const Fingerprint& fingerprint) {
  return absl::string_view(reinterpret_cast<const char*>(fingerprint.data()), fingerprint.size());
}

// An empty key (no parent) is allowed here.
absl::StatusOr<BlockKey> OptionalKeyFromBytes(absl::string_view bytes);

// How long to wait before a store that found no room is tried again.
inline constexpr std::uint32_t kRetryAfterMs = 100;

// A retry hint travels along: RetryAfter() of client.h reads it.
void ToProto(const absl::Status& status, v1::BlockStatus* out);
absl::Status FromProto(const v1::BlockStatus& status);

}  // namespace kvmill

#endif  // KVMILL_CLIENT_CONVERT_H_
