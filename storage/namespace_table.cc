#include "storage/namespace_table.h"

#include "absl/strings/str_cat.h"
#include "storage/core/namespace_difference.h"
#include "storage/core/page_layout.h"
#include "storage/core/status_macros.h"

namespace kvmill {

std::uint64_t BlockBytes(const NamespaceSpec& spec) {
  std::uint64_t bytes = 0;
  for (const LayerGroup& group : spec.groups) {
    bytes += group.layers.size() * UniformPageBytes(FormatOf(spec, group), spec.block_tokens,
                                                    SlotKind::kTile, group.kv_heads);
  }
  return bytes;
}

absl::StatusOr<OpenedNamespace*> NamespaceTable::Open(absl::string_view name,
                                                      const NamespaceSpec& spec, bool* unsaved) {
  *unsaved = true;
  if (name.empty() || name.size() > kNamespaceNameBytesMax) {
    return absl::InvalidArgumentError(absl::StrCat("namespace name of ", name.size(),
                                                   " bytes: want 1 to ", kNamespaceNameBytesMax));
  }
  for (char c : name) {
    if (static_cast<unsigned char>(c) <= ' ' || c == 127) {
      return absl::InvalidArgumentError("namespace name holds a space or a control character");
    }
  }
  KVMILL_RETURN_IF_ERROR(ValidateNamespace(spec));
  const Fingerprint fingerprint = FingerprintOf(spec);

  MutexLock lock(mu_);
  const auto key = std::make_pair(spec.tenant, std::string(name));
  if (auto it = by_name_.find(key); it != by_name_.end()) {
    OpenedNamespace& bound = namespaces_[it->second.id];
    *unsaved = !it->second.saved;
    if (bound.spec == spec) return &bound;
    return absl::FailedPreconditionError(
        absl::StrCat("namespace \"", name, "\" is bound to another identity: ",
                     DescribeDifference(spec, bound.spec, "in this request", "at the daemon")));
  }
  if (by_name_.size() >= kNamespaceNamesMax) {
    return absl::ResourceExhaustedError(
        absl::StrCat(by_name_.size(), " namespace names are bound, at most ", kNamespaceNamesMax));
  }
  if (auto it = by_fingerprint_.find(fingerprint); it != by_fingerprint_.end()) {
    // The same identity under a second name: one namespace, two names.
    by_name_[key].id = it->second;
    return &namespaces_[it->second];
  }
  if (namespaces_.size() >= kNamespacesMax) {
    return absl::ResourceExhaustedError(
        absl::StrCat(namespaces_.size(), " namespaces are open, at most ", kNamespacesMax));
  }
  const NamespaceId id = static_cast<NamespaceId>(namespaces_.size());
  OpenedNamespace& opened = namespaces_.emplace_back();
  opened.id = id;
  opened.tenant_id = InternLocked(spec.tenant);
  tenant_of_[id].store(opened.tenant_id, std::memory_order_release);
  opened.name = std::string(name);
  opened.spec = spec;
  opened.fingerprint = fingerprint;
  by_name_[key].id = id;
  by_fingerprint_[fingerprint] = id;
  return &opened;
}

TenantId NamespaceTable::InternLocked(absl::string_view name) {
  const auto [it, is_new] =
      tenants_.try_emplace(std::string(name), static_cast<TenantId>(tenants_.size()));
  if (is_new) tenant_names_.push_back(it->first);
  return it->second;
}

absl::StatusOr<TenantId> NamespaceTable::InternTenant(absl::string_view name) {
  MutexLock lock(mu_);
  const std::size_t left = kTenantsMax - tenants_.size();
  if (left <= kNamespacesMax - namespaces_.size() && !tenants_.contains(std::string(name))) {
    return absl::ResourceExhaustedError(absl::StrCat("tenant \"", name, "\": ", tenants_.size(),
                                                     " tenants are known, at most ", kTenantsMax,
                                                     " with those of namespaces to come"));
  }
  return InternLocked(name);
}

std::optional<TenantId> NamespaceTable::FindTenant(absl::string_view name) const {
  MutexLock lock(mu_);
  const auto it = tenants_.find(std::string(name));
  if (it == tenants_.end()) return std::nullopt;
  return it->second;
}

std::vector<std::string> NamespaceTable::TenantNames() const {
  MutexLock lock(mu_);
  return tenant_names_;
}

void NamespaceTable::Saved(absl::string_view tenant, absl::string_view name) {
  MutexLock lock(mu_);
  Name& saved = by_name_.at(std::make_pair(std::string(tenant), std::string(name)));
  if (!saved.saved) ++saved_names_;
  saved.saved = true;
}

std::vector<NamespaceTable::UnsavedName> NamespaceTable::Unsaved() const {
  std::vector<UnsavedName> unsaved;
  MutexLock lock(mu_);
  if (saved_names_ == by_name_.size()) return unsaved;
  for (const auto& [key, name] : by_name_) {
    if (!name.saved) unsaved.push_back({key.second, &namespaces_[name.id]});
  }
  return unsaved;
}

OpenedNamespace* NamespaceTable::Find(NamespaceId id) const {
  MutexLock lock(mu_);
  // The elements are handed out for their counters; the table itself does not change.
  return id < namespaces_.size() ? const_cast<OpenedNamespace*>(&namespaces_[id]) : nullptr;
}

OpenedNamespace* NamespaceTable::Find(absl::string_view tenant, absl::string_view name) const {
  MutexLock lock(mu_);
  auto it = by_name_.find(std::make_pair(std::string(tenant), std::string(name)));
  return it == by_name_.end() ? nullptr : const_cast<OpenedNamespace*>(&namespaces_[it->second.id]);
}

OpenedNamespace* NamespaceTable::Find(const Fingerprint& fingerprint) const {
  MutexLock lock(mu_);
  auto it = by_fingerprint_.find(fingerprint);
  return it == by_fingerprint_.end() ? nullptr
                                     : const_cast<OpenedNamespace*>(&namespaces_[it->second]);
}

std::vector<OpenedNamespace*> NamespaceTable::All() const {
  MutexLock lock(mu_);
  std::vector<OpenedNamespace*> all;
  for (const OpenedNamespace& opened : namespaces_)
    all.push_back(const_cast<OpenedNamespace*>(&opened));
  return all;
}

}  // namespace kvmill
