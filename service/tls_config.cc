#include "service/tls_config.h"

#include <cstdint>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "client/tls/tls_checks.h"
#include "client/tls/tls_credentials.h"
#include "service/cluster_config.h"
#include "storage/core/log.h"

namespace kvmill {

std::shared_ptr<grpc::ServerCredentials> TcpCredentialsOf(const Config& config) {
  return config.tls.enabled() ? ServerCredentialsOf(config.tls, !config.tenants.empty())
                              : grpc::InsecureServerCredentials();
}

// Of a node of a cluster CheckConfig looked at it. Clients of another daemon may have authorities
// of their own.
void WarnOfAuthority(const Config& config) {
  if (!config.tls.enabled()) return;
  if (const absl::Status known = CheckTlsAuthority(config.tls); !known.ok()) {
    LogWarning(absl::StrCat(known.message(), ": clients need its authority in their tls-ca"));
  }
}

void WarnIfNobodyIsNamed(const Config& config, const Identities& identities) {
  if (!config.tls.enabled() || config.tenants.empty() || identities.names_somebody()) return;
  LogWarning(absl::StrCat("--tenants ", config.tenants,
                          ": names no certificate and no token: over TCP only nodes come in"));
}

void WarnOfUselessTokens(const Config& started, const Config& config,
                         const Identities& identities) {
  if (!started.tls.enabled() || !started.tenants.empty() || !identities.has_tokens()) return;
  LogWarning(absl::StrCat("--tenants ", config.tenants,
                          " has tokens: without a certificate they "
                          "let nobody in before another start, this one had no --tenants"));
}

std::vector<Metrics::CertificateEnd> CertificateEndsOf(const Config& config) {
  std::vector<Metrics::CertificateEnd> ends;
  const std::int64_t node_end = ShownCertificateEndSeconds(config.tls);
  if (node_end != 0) ends.push_back({"node", node_end});
  const std::int64_t etcd_end =
      config.cluster == "none" ? 0 : ShownCertificateEndSeconds(EtcdTlsOf(config));
  if (etcd_end != 0) ends.push_back({"etcd", etcd_end});
  return ends;
}

}  // namespace kvmill
