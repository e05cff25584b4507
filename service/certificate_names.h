// Whose certificate a call over TLS shows.
#ifndef KVMILL_SERVICE_CERTIFICATE_NAMES_H_
#define KVMILL_SERVICE_CERTIFICATE_NAMES_H_

#include <grpcpp/server_context.h>

#include <string>
#include <vector>

namespace kvmill {

// Its DNS names and URIs, or its common name where it has neither. Empty without a certificate.
std::vector<std::string> CertificateNames(const grpc::ServerContextBase& call);

}  // namespace kvmill

#endif  // KVMILL_SERVICE_CERTIFICATE_NAMES_H_
