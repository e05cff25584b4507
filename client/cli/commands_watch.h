// watch: what happens to the blocks of a daemon.
#ifndef KVMILL_CLIENT_CLI_COMMANDS_WATCH_H_
#define KVMILL_CLIENT_CLI_COMMANDS_WATCH_H_

#include "client/cli/command.h"

namespace kvmill::cli {

void AddWatchCommand(CommandLine& line);

}  // namespace kvmill::cli

#endif  // KVMILL_CLIENT_CLI_COMMANDS_WATCH_H_
