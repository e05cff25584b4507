#include "service/identities.h"

#include <yaml-cpp/yaml.h>

#include <algorithm>
#include <cstring>
#include <set>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "client/convert.h"
#include "service/callers.h"
#include "service/cluster/registration.h"
#include "service/config.h"
#include "storage/core/status_macros.h"

namespace kvmill {
namespace {

constexpr absl::string_view kDigestScheme = "sha256:";

using Tokens = std::vector<std::pair<Sha256Digest, Identities::Identity>>;

const Identities::Identity* Find(const Tokens& tokens, const Sha256Digest& digest) {
  const Identities::Identity* found = nullptr;
  for (const auto& [known, identity] : tokens) {
    if (SameDigest(known, digest)) found = &identity;
  }
  return found;
}

// Walks the file; every error has its place.
class Reader {
 public:
  using Map = std::unordered_map<std::string, Identities::Identity>;

  Reader(const std::string& path, Map* by_name, Tokens* by_token)
      : path_(path), by_name_(*by_name), by_token_(*by_token) {}

  absl::Status ReadFile(const YAML::Node& root) {
    if (!root.IsMap()) return At(root, "want a map with the key \"tenants\"");
    for (const auto& entry : root) {
      KVMILL_ASSIGN_OR_RETURN(const std::string key, TextOf(entry.first, "a key"));
      if (key != "tenants") return At(entry.first, absl::StrCat("unknown key \"", key, "\""));
      if (!entry.second.IsMap()) return At(entry.second, "tenants: want a map of names");
      for (const auto& tenant : entry.second) {
        KVMILL_RETURN_IF_ERROR(ReadTenant(tenant.first, tenant.second));
      }
    }
    if (by_name_.empty() && by_token_.empty() && !has_quotas_) {
      return At(root, "names no certificate and no token: nobody could come in");
    }
    return absl::OkStatus();
  }

 private:
  absl::Status At(const YAML::Node& node, absl::string_view what) const {
    return absl::InvalidArgumentError(absl::StrCat(path_, ":", node.Mark().line + 1, ": ", what));
  }

  absl::StatusOr<std::string> TextOf(const YAML::Node& node, absl::string_view what) const {
    if (node.IsScalar() && !node.Scalar().empty()) return node.Scalar();
    return At(node, absl::StrCat(what, ": want a text"));
  }

  absl::Status ReadTenant(const YAML::Node& name, const YAML::Node& fields) {
    KVMILL_ASSIGN_OR_RETURN(const std::string tenant, TextOf(name, "the name of a tenant"));
    if (const absl::Status status = CheckTenantName(tenant); !status.ok()) {
      return At(name, status.message());
    }
    const bool is_local = absl::StartsWith(tenant, kLocalTenantPrefix);
    if (!tenants_.insert(tenant).second) {
      return At(name, absl::StrCat("tenant \"", tenant, "\" again"));
    }
    if (!fields.IsMap()) return At(fields, "want certificates, tokens, admin, metrics, quota");
    Identities::Identity identity{.tenant = tenant};
    KVMILL_ASSIGN_OR_RETURN(identity.admin, ReadFlag(fields, "admin"));
    KVMILL_ASSIGN_OR_RETURN(const bool metrics, ReadFlag(fields, "metrics"));
    identity.names = metrics || identity.admin;
    for (const auto& field : fields) {
      KVMILL_ASSIGN_OR_RETURN(const std::string key, TextOf(field.first, "a key"));
      if (key == "quota") {
        has_quotas_ = true;
        continue;
      }
      if (is_local) {
        return At(name, absl::StrCat("tenant \"", tenant,
                                     "\": names with uid- are of local users: want a quota only"));
      }
      if (key == "admin" || key == "metrics") continue;
      if (key != "certificates" && key != "tokens") {
        return At(field.first,
                  absl::StrCat("unknown key \"", key,
                               "\": want certificates, tokens, admin, metrics or quota"));
      }
      if (!field.second.IsSequence()) return At(field.second, absl::StrCat(key, ": want a list"));
      for (const YAML::Node& entry : field.second) {
        KVMILL_RETURN_IF_ERROR(key == "tokens" ? ReadToken(entry, identity)
                                               : ReadCertificate(entry, identity));
      }
    }
    return absl::OkStatus();
  }

  absl::StatusOr<bool> ReadFlag(const YAML::Node& fields, const char* key) const {
    const YAML::Node flag = fields[key];
    if (!flag.IsDefined()) return false;
    const std::string text = flag.IsScalar() ? flag.Scalar() : "";
    if (text == "true" || text == "false") return text == "true";
    return At(flag, absl::StrCat(key, ": want true or false"));
  }

  absl::Status ReadCertificate(const YAML::Node& node, const Identities::Identity& identity) {
    KVMILL_ASSIGN_OR_RETURN(const std::string name, TextOf(node, "the name in a certificate"));
    if (by_name_.try_emplace(name, identity).second) return absl::OkStatus();
    return At(node, absl::StrCat("certificate \"", name, "\" again"));
  }

  absl::Status ReadToken(const YAML::Node& node, const Identities::Identity& identity) {
    // What stands there may be a token by mistake: it is not repeated.
    const absl::Status wrong =
        At(node,
           "want sha256: and the 64 hex digits of a token's digest (printf %s TOKEN | sha256sum)");
    const std::string text = node.IsScalar() ? node.Scalar() : "";
    const std::string hex = text.substr(std::min(kDigestScheme.size(), text.size()));
    if (!absl::StartsWith(text, kDigestScheme) || hex.size() != 2 * sizeof(Sha256Digest) ||
        !std::all_of(hex.begin(), hex.end(), absl::ascii_isxdigit)) {
      return wrong;
    }
    const std::string bytes = absl::HexStringToBytes(hex);
    Sha256Digest digest;
    std::memcpy(digest.data(), bytes.data(), digest.size());
    if (Find(by_token_, digest) != nullptr) return At(node, "this token again");
    by_token_.emplace_back(digest, identity);
    return absl::OkStatus();
  }

  const std::string& path_;
  Map& by_name_;
  Tokens& by_token_;
  std::set<std::string> tenants_;
  bool has_quotas_ = false;
};

}  // namespace

Identities::Identities(std::vector<std::string> nodes) : open_(false), nodes_(std::move(nodes)) {}

absl::Status Identities::Read(const std::string& path) {
  const absl::StatusOr<std::string> text = ReadConfigFile(path);
  if (!text.ok()) return absl::InvalidArgumentError(text.status().message());
  restricted_ = true;
  try {  // yaml-cpp throws; nothing of it leaves this function.
    return Reader(path, &by_name_, &by_token_).ReadFile(YAML::Load(*text));
  } catch (const YAML::Exception& error) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, ":", error.mark.line + 1, ": ", error.msg));
  }
}

absl::StatusOr<Identities::Identity> Identities::Identify(const Credentials& shown) const {
  if (open_) return Identity{kDefaultTenant, true, true};
  // A token says more than a certificate that several may share.
  if (!shown.authorization.empty()) return IdentifyToken(shown.authorization);
  if (shown.names.empty()) {
    return absl::UnauthenticatedError(
        "this daemon wants to know who calls: show a certificate, or a token");
  }
  for (const std::string& name : shown.names) {
    if (std::find(nodes_.begin(), nodes_.end(), name) != nodes_.end()) {
      return Identity{kDefaultTenant, true, true};
    }
  }
  if (!restricted_) return Identity{kDefaultTenant, false, true};
  for (const std::string& name : shown.names) {
    const auto found = by_name_.find(name);
    if (found != by_name_.end()) return found->second;
  }
  // It goes to logs, too: whoever is signed for may have written it.
  return absl::PermissionDeniedError(absl::StrCat("the certificate of \"",
                                                  absl::CEscape(absl::StrJoin(shown.names, ", ")),
                                                  "\" is of no tenant that --tenants has"));
}

absl::StatusOr<Identities::Identity> Identities::IdentifyToken(
    absl::string_view authorization) const {
  absl::string_view token = authorization;
  if (absl::ConsumePrefix(&token, kTokenScheme)) {
    const Identity* const found = Find(by_token_, Sha256(token));
    if (found != nullptr) return *found;
  }
  return absl::UnauthenticatedError("the token is not one that --tenants of this daemon has");
}

bool Identities::has_tokens_for_names() const {
  return std::any_of(by_token_.begin(), by_token_.end(),
                     [](const auto& token) { return token.second.names; });
}

std::set<std::string> Identities::LostBy(const Identities& next) const {
  std::set<std::string> lost;
  // Who needed no name before, and needs one now.
  if ((open_ && !next.open_) || (!restricted_ && next.restricted_)) lost.insert(kDefaultTenant);
  for (const std::string& name : nodes_) {
    const absl::StatusOr<Identity> is = next.Identify({{name}, ""});
    if (!is.ok() || !is->node) lost.insert(kDefaultTenant);
  }
  for (const auto& [name, was] : by_name_) {
    const absl::StatusOr<Identity> is = next.Identify({{name}, ""});
    if (!is.ok() || is->tenant != was.tenant) lost.insert(was.tenant);
  }
  for (const auto& [digest, was] : by_token_) {
    const Identity* const is = Find(next.by_token_, digest);
    if (is == nullptr || is->tenant != was.tenant) lost.insert(was.tenant);
  }
  return lost;
}

}  // namespace kvmill
