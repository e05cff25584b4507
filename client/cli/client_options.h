// What the common flags say of the daemon and of who calls it.
#ifndef KVMILL_CLIENT_CLI_CLIENT_OPTIONS_H_
#define KVMILL_CLIENT_CLI_CLIENT_OPTIONS_H_

#include "absl/status/statusor.h"
#include "client/cli/command.h"
#include "client/client.h"

namespace kvmill::cli {

// UsageError for a token file that is none.
absl::StatusOr<Client::Options> ClientOptions(const CommonFlags& flags);

}  // namespace kvmill::cli

#endif  // KVMILL_CLIENT_CLI_CLIENT_OPTIONS_H_
