// The families of commands; each function hangs its commands below the root.
#ifndef KVMILL_CLIENT_CLI_COMMANDS_H_
#define KVMILL_CLIENT_CLI_COMMANDS_H_

#include "client/cli/command.h"

namespace kvmill::cli {

void AddTileCommands(CommandLine& line);       // encode, decode
void AddStoreCommands(CommandLine& line);      // put
void AddFetchCommands(CommandLine& line);      // lookup, get
void AddRemovalCommands(CommandLine& line);    // rm, clear, flush, evict
void AddInspectCommands(CommandLine& line);    // stat, ls, quota, verify
void AddClusterCommands(CommandLine& line);    // cluster status, members
void AddConfigCommand(CommandLine& line);      // config
void AddNamespacesCommand(CommandLine& line);  // namespaces
void AddTopCommand(CommandLine& line);         // top
void AddPlanCommands(CommandLine& line);       // replay, capacity
void AddBenchCommands(CommandLine& line);      // bench encode, lookup
// Called by AddBenchCommands.
void AddBenchAttention(CommandLine& line, CLI::App& bench);
void AddBenchData(CommandLine& line, CLI::App& bench);
void AddBenchDisk(CommandLine& line, CLI::App& bench);

}  // namespace kvmill::cli

#endif  // KVMILL_CLIENT_CLI_COMMANDS_H_
