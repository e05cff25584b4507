#include "service/tenant_quotas.h"

#include <yaml-cpp/yaml.h>

#include <cstdint>
#include <fstream>
#include <sstream>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "client/units.h"
#include "service/identities.h"
#include "service/tenants.h"
#include "storage/core/status_macros.h"

namespace kvmill {
namespace {

// Every error has its place.
class Reader {
 public:
  explicit Reader(const std::string& path) : path_(path) {}

  absl::StatusOr<TenantQuotas> ReadFile(const YAML::Node& root) {
    // What is no map is for Identities::Read to say.
    if (!root.IsMap() || !root["tenants"].IsDefined() || !root["tenants"].IsMap()) return quotas_;
    for (const auto& tenant : root["tenants"]) {
      if (!tenant.second.IsMap()) continue;
      for (const auto& field : tenant.second) {
        if (!field.first.IsScalar() || field.first.Scalar() != "quota") continue;
        KVMILL_RETURN_IF_ERROR(ReadQuota(tenant.first, field.second));
      }
    }
    return quotas_;
  }

 private:
  absl::Status At(const YAML::Node& node, absl::string_view what) const {
    return absl::InvalidArgumentError(absl::StrCat(path_, ":", node.Mark().line + 1, ": ", what));
  }

  absl::Status CheckTenant(const YAML::Node& node) const {
    if (!node.IsScalar()) return At(node, "the name of a tenant: want a text");
    const std::string& name = node.Scalar();
    if (const absl::Status status = CheckTenantName(name); !status.ok()) {
      return At(node, status.message());
    }
    // As TenantOf makes them: with another spelling nobody would have the quota.
    absl::string_view digits = name;
    if (!absl::ConsumePrefix(&digits, kLocalTenantPrefix)) return absl::OkStatus();
    std::uint32_t uid = 0;
    if (absl::SimpleAtoi(digits, &uid) && absl::StrCat(uid) == digits) return absl::OkStatus();
    return At(node, absl::StrCat("tenant \"", name, "\": want uid- and the number of a user"));
  }

  absl::Status ReadQuota(const YAML::Node& tenant, const YAML::Node& fields) {
    KVMILL_RETURN_IF_ERROR(CheckTenant(tenant));
    const std::string& name = tenant.Scalar();
    if (!fields.IsMap() || fields.size() == 0) {
      return At(fields, "quota: want soft, hard or both, as {soft: 10GiB, hard: 20GiB}");
    }
    if (quotas_.contains(name)) return At(tenant, absl::StrCat("quota of \"", name, "\" again"));
    if (quotas_.size() == kQuotasMax) {
      return At(tenant, absl::StrCat("more than ", kQuotasMax, " tenants with a quota"));
    }
    TenantQuota& quota = quotas_[name];
    for (const auto& field : fields) {
      const std::string key = field.first.IsScalar() ? field.first.Scalar() : "";
      if (key != "soft" && key != "hard") {
        return At(field.first, absl::StrCat("quota: unknown key \"", key, "\": want soft or hard"));
      }
      std::uint64_t& limit = key == "soft" ? quota.soft_bytes : quota.hard_bytes;
      if (limit != kNoQuota) return At(field.first, absl::StrCat("quota.", key, " again"));
      const std::string text = field.second.IsScalar() ? field.second.Scalar() : "";
      const absl::StatusOr<std::uint64_t> bytes = ParseBytes(text);
      if (!bytes.ok()) {
        return At(field.second, absl::StrCat("quota.", key, ": ", bytes.status().message()));
      }
      if (*bytes == 0) {
        return At(field.second, absl::StrCat("quota.", key, ": want more than 0 bytes"));
      }
      limit = *bytes;
    }
    if (quota.soft_bytes != kNoQuota && quota.soft_bytes > quota.hard_bytes) {
      return At(fields, absl::StrCat("quota.soft ", FormatBytes(quota.soft_bytes),
                                     ": want at most quota.hard, ", FormatBytes(quota.hard_bytes)));
    }
    return absl::OkStatus();
  }

  const std::string& path_;
  TenantQuotas quotas_;
};

}  // namespace

absl::StatusOr<TenantQuotas> ReadTenantQuotas(const std::string& path) {
  if (path.empty()) return TenantQuotas();
  std::ifstream file(path);
  std::stringstream text;
  if (file) text << file.rdbuf();
  if (!file) return absl::InvalidArgumentError(absl::StrCat(path, ": cannot be read"));
  try {  // yaml-cpp throws; nothing of it leaves this function.
    return Reader(path).ReadFile(YAML::Load(text.str()));
  } catch (const YAML::Exception& error) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, ":", error.mark.line + 1, ": ", error.msg));
  }
}

}  // namespace kvmill
