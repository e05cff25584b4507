// The namespaces that this daemon knows, and the names they are bound to.
#ifndef KVMILL_STORAGE_NAMESPACE_TABLE_H_
#define KVMILL_STORAGE_NAMESPACE_TABLE_H_

#include <array>
#include <atomic>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "storage/core/block_key.h"
#include "storage/core/mutex.h"
#include "storage/core/namespace.h"
#include "storage/page_pool.h"

namespace kvmill {

// Constant after it was opened; lives as long as the table.
struct OpenedNamespace {
  NamespaceId id = 0;
  TenantId tenant_id = 0;
  std::string name;
  NamespaceSpec spec;
  Fingerprint fingerprint{};
};

// The pages of a whole block, all of its heads in tiles.
std::uint64_t BlockBytes(const NamespaceSpec& spec);

inline constexpr std::size_t kNamespaceNameBytesMax = 128;
inline constexpr std::size_t kNamespacesMax = 4096;
inline constexpr std::size_t kNamespaceNamesMax = 4 * kNamespacesMax;
// Half of them may have no namespace yet: those that quotas name.
inline constexpr std::size_t kTenantsMax = 2 * kNamespacesMax;

// Thread-safe. Namespaces are never forgotten while the daemon runs: ids and pointers stay valid.
class NamespaceTable {
 public:
  // INVALID_ARGUMENT for a bad name or spec, FAILED_PRECONDITION when the tenant's name is bound to
  // another identity, RESOURCE_EXHAUSTED beyond kNamespacesMax or kNamespaceNamesMax. `*unsaved`:
  // nobody called Saved for the name.
  absl::StatusOr<OpenedNamespace*> Open(absl::string_view name, const NamespaceSpec& spec,
                                        bool* unsaved);
  // The name survives a restart from now on. It is open.
  void Saved(absl::string_view tenant, absl::string_view name);
  // Names that Saved was not called for.
  struct UnsavedName {
    std::string name;
    const OpenedNamespace* space = nullptr;
  };
  std::vector<UnsavedName> Unsaved() const;

  // Null when unknown.
  OpenedNamespace* Find(NamespaceId id) const;
  OpenedNamespace* Find(absl::string_view tenant, absl::string_view name) const;
  OpenedNamespace* Find(const Fingerprint& fingerprint) const;
  std::vector<OpenedNamespace*> All() const;

  // Of a namespace that is open. Takes no lock.
  TenantId TenantOf(NamespaceId id) const { return tenant_of_[id].load(std::memory_order_acquire); }
  // The number of a tenant, which is new when it has no namespace. RESOURCE_EXHAUSTED when
  // namespaces to come would find no number.
  absl::StatusOr<TenantId> InternTenant(absl::string_view name);
  std::optional<TenantId> FindTenant(absl::string_view name) const;
  std::vector<std::string> TenantNames() const;  // By number.

 private:
  mutable Mutex mu_;
  std::array<std::atomic<TenantId>, kNamespacesMax> tenant_of_{};
  std::deque<OpenedNamespace> namespaces_
      ABSL_GUARDED_BY(mu_);  // By id; a deque never moves its elements.
  struct Name {
    NamespaceId id = 0;
    bool saved = false;
  };
  std::map<std::pair<std::string, std::string>, Name> by_name_ ABSL_GUARDED_BY(mu_);
  std::size_t saved_names_ ABSL_GUARDED_BY(mu_) = 0;
  std::map<Fingerprint, NamespaceId> by_fingerprint_ ABSL_GUARDED_BY(mu_);
  std::map<std::string, TenantId> tenants_ ABSL_GUARDED_BY(mu_);
  std::vector<std::string> tenant_names_ ABSL_GUARDED_BY(mu_);  // By number.
  TenantId InternLocked(absl::string_view name) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
};

}  // namespace kvmill

#endif  // KVMILL_STORAGE_NAMESPACE_TABLE_H_
