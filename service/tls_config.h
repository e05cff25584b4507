// What the configuration says of those who come in over TCP: what servers ask of them, and what an
// operator is warned of.
//
// For node.cc. Who is who is in identities.h, what files must hold in client/tls/tls_checks.h: what
// is refused, CheckConfig refuses. Here are warnings, of what may be meant so.
#ifndef KVMILL_SERVICE_TLS_CONFIG_H_
#define KVMILL_SERVICE_TLS_CONFIG_H_

#include <grpcpp/security/server_credentials.h>

#include <memory>
#include <vector>

#include "service/config.h"
#include "service/identities.h"
#include "service/metrics.h"

namespace kvmill {

// Of --listen and --admin.
std::shared_ptr<grpc::ServerCredentials> TcpCredentialsOf(const Config& config);

// Reads the certificate.
void WarnOfAuthority(const Config& config);

// `identities` are those of `config`.
void WarnIfNobodyIsNamed(const Config& config, const Identities& identities);

// `identities` are those of `config`, which a daemon reads that started with `started`: its servers
// ask what they asked then.
void WarnOfUselessTokens(const Config& started, const Config& config, const Identities& identities);

// When the certificates end that this daemon shows now.
std::vector<Metrics::CertificateEnd> CertificateEndsOf(const Config& config);

}  // namespace kvmill

#endif  // KVMILL_SERVICE_TLS_CONFIG_H_
