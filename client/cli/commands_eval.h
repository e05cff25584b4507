// The commands of `kvmill eval`, hung below the root.
#ifndef KVMILL_CLIENT_CLI_COMMANDS_EVAL_H_
#define KVMILL_CLIENT_CLI_COMMANDS_EVAL_H_

#include "client/cli/command.h"

namespace kvmill::cli {

void AddEvalCommands(CommandLine& line);                // eval error, and below it:
void AddEvalDecode(CommandLine& line, CLI::App& eval);  // eval decode
void AddEvalEngine(CommandLine& line, CLI::App& eval);  // eval prefill, eval continue

}  // namespace kvmill::cli

#endif  // KVMILL_CLIENT_CLI_COMMANDS_EVAL_H_
