// Whose blocks the nodes of a cluster share, and which namespace one of them means.
//
// A fingerprint is made of the tenant, too (storage/core/namespace.h): tenants with the same spec
// have other ones, so other anchors, homes and pointers, and pages that say whose they are. So what
// nodes tell each other of a fingerprint is of one tenant, whether or not they know of which; this
// says which tenants are spoken of at all.
#ifndef KVMILL_SERVICE_TENANTS_H_
#define KVMILL_SERVICE_TENANTS_H_

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "storage/core/namespace.h"
#include "storage/tiered_store.h"

namespace kvmill {

// The tenant of the daemon's own uid and root, and of everybody who comes over TCP and of whom
// nobody says otherwise (service/identities.h).
inline constexpr const char* kDefaultTenant = "default";
// Other users of the host are "uid-N". Nobody is called so over TCP.
inline constexpr absl::string_view kLocalTenantPrefix = "uid-";

// INVALID_ARGUMENT naming the text: no name of a tenant in the file of --tenants. `all` and `other`
// are none: metrics say so of tenants together (docs/decisions/0040-what-metrics-show.md).
absl::Status CheckTenantName(absl::string_view name);

// A value, constant once made; thread-safe.
class SharedTenants {
 public:
  struct Options {
    // Those that can be named in a file of --tenants: which ones there are, a node may hear of from
    // another one first. Only where nodes prove that they are: elsewhere who reaches a port is a
    // node, and would be given what is everybody's.
    bool named = false;
    // uid-N, likewise; and one number is one user on all nodes.
    bool local_users = false;
  };
  // The daemons' own alone.
  SharedTenants() = default;
  explicit SharedTenants(const Options& options) : options_(options) {}

  bool Has(absl::string_view tenant) const;

  // The namespace with this fingerprint, of whichever of those tenants. For what nodes ask, never
  // for clients, who have a tenant. NOT_FOUND: it is not open here, or not shared, which sounds the
  // same.
  absl::StatusOr<TieredStore::NamespaceInfo> Find(const TieredStore& store,
                                                  const Fingerprint& fingerprint) const;

 private:
  Options options_;
};

}  // namespace kvmill

#endif  // KVMILL_SERVICE_TENANTS_H_
