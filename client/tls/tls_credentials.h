// gRPC's credentials from TlsFiles. Internal to client/ and service/.
#ifndef KVMILL_CLIENT_TLS_TLS_CREDENTIALS_H_
#define KVMILL_CLIENT_TLS_TLS_CREDENTIALS_H_

#include <grpcpp/security/credentials.h>
#include <grpcpp/security/server_credentials.h>
#include <grpcpp/support/channel_arguments.h>

#include <cstdint>
#include <memory>

#include "client/tls/tls_files.h"

namespace kvmill {

// By then files that changed are used, for credentials of the whole process; those that do not fit
// each other are not, a warning says what is wrong, and those of before stay (checked_tls_files.h).
inline constexpr unsigned kTlsRefreshSeconds = 5;

// Without TLS those of a connection that is not protected. Files that cannot be read make
// connections fail, until they can.
std::shared_ptr<grpc::ChannelCredentials> ChannelCredentialsOf(const TlsFiles& files);
// What else a channel with these credentials needs.
void SetTlsArguments(const TlsFiles& files, grpc::ChannelArguments* arguments);

// Of a server that has a certificate. Clients must show one, too; or, with `certificate_optional`,
// may do without: then somebody else has to ask who they are. One that is shown must be right.
std::shared_ptr<grpc::ServerCredentials> ServerCredentialsOf(const TlsFiles& files,
                                                             bool certificate_optional);

// Unix time at which the certificate ends that connections of these files show now; 0 when there
// are no credentials of them, or none with a certificate.
std::int64_t ShownCertificateEndSeconds(const TlsFiles& files);

}  // namespace kvmill

#endif  // KVMILL_CLIENT_TLS_TLS_CREDENTIALS_H_
