// What a connection that cannot be made most likely lacks. Internal to client/.
#ifndef KVMILL_CLIENT_CONNECTION_HINTS_H_
#define KVMILL_CLIENT_CONNECTION_HINTS_H_

#include <string>

#include "absl/status/status.h"
#include "client/server_address.h"
#include "client/tls/tls_files.h"

namespace kvmill {

// Of a call that gRPC itself ended: `status` with what to give behind its text, where that tells,
// and the payload kExplainedPayload then. `answered`: the daemon has answered this client before,
// so the connection can be made. Anything else stays as it is. Names of options are those of the
// command line, without dashes in front.
absl::Status ExplainConnection(absl::Status status, const ServerAddress& address,
                               const TlsFiles& tls, bool answered);

// Behind the error of a socket that lets this user not in: whose it is. Empty when that cannot be
// seen.
std::string WhoMayConnect(const std::string& socket_path);

}  // namespace kvmill

#endif  // KVMILL_CLIENT_CONNECTION_HINTS_H_
