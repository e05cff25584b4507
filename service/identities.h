// Who is who over TCP: certificates and tokens, and the tenants that they stand for.
#ifndef KVMILL_SERVICE_IDENTITIES_H_
#define KVMILL_SERVICE_IDENTITIES_H_

#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "storage/core/sha256.h"

namespace kvmill {

// What a call over TCP shows.
struct Credentials {
  std::vector<std::string> names;  // DNS names and URIs of its certificate, or its common name.
  std::string authorization;       // Of its metadata, "Bearer TOKEN"; empty without.
};

// Constant after it was made; thread-safe.
class Identities {
 public:
  struct Identity {
    std::string tenant;
    bool node = false;   // Of the cluster: may call Peer.
    bool admin = false;  // May call Admin, on --admin.
    bool names = false;  // Its tokens show names on the metrics port.
  };

  // Everybody who can connect is everything: --insecure.
  Identities() = default;
  // TLS: `nodes` are names in certificates of nodes, one at least. Every other certificate of an
  // authority is of the default tenant, and an administrator's; with Read that is for the file to
  // say.
  explicit Identities(std::vector<std::string> nodes);

  // Adds what a file says, which is YAML (docs/security.md):
  //
  //   tenants:
  //     NAME: {certificates: [NAME, ...], tokens: [sha256:HEX, ...], admin: true|false,
  //            metrics: true|false, quota: ...}
  //
  // What it says of quotas is read by ReadTenantQuotas (service/tenant_quotas.h). A file that says
  // nothing else names nobody: only nodes come in.
  // INVALID_ARGUMENT with file and line: an unknown key, a name or token that stands twice, a
  // digest that is none; a name that no tenant can have; certificates or tokens of a tenant of the
  // host (uid-N).
  absl::Status Read(const std::string& path);

  // UNAUTHENTICATED: neither a certificate nor a token, or a token that nobody has.
  // PERMISSION_DENIED: a certificate that stands for nobody. Messages never have a token.
  absl::StatusOr<Identity> Identify(const Credentials& shown) const;
  // Of a caller without TLS who shows a token: UNAUTHENTICATED also where everybody is everything.
  absl::StatusOr<Identity> IdentifyToken(absl::string_view authorization) const;

  // Tenants of which somebody is no longer known, or known as somebody else, with `next` in place
  // of these.
  std::set<std::string> LostBy(const Identities& next) const;

  // A certificate or a token stands for somebody.
  bool names_somebody() const { return !by_name_.empty() || !by_token_.empty(); }
  bool has_tokens() const { return !by_token_.empty(); }
  // Of those, one at least shows names on the metrics port.
  bool has_tokens_for_names() const;
  const std::vector<std::string>& nodes() const { return nodes_; }

 private:
  bool open_ = true;         // To everybody.
  bool restricted_ = false;  // To those that a file names.
  std::vector<std::string> nodes_;
  std::unordered_map<std::string, Identity> by_name_;  // Of certificates.
  // By SHA-256. They are few, and each call compares all of them: how long that takes says nothing
  // of a digest.
  std::vector<std::pair<Sha256Digest, Identity>> by_token_;
};

}  // namespace kvmill

#endif  // KVMILL_SERVICE_IDENTITIES_H_
