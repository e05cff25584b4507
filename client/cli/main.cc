// kvmill: the command line. Commands live in client/cli/commands_*.cc.
#include <cstdlib>
#include <string>

#include "client/cli/command.h"
#include "client/cli/commands.h"
#include "client/cli/commands_eval.h"
#include "client/cli/commands_watch.h"
#include "client/grpc_log.h"
#include "client/server_address.h"

int main(int argc, char** argv) {
  using namespace kvmill::cli;  // NOLINT(google-build-using-namespace): the program is this.
  const char* runtime_dir = std::getenv("XDG_RUNTIME_DIR");
  const char* token = std::getenv("KVMILL_TOKEN");
  kvmill::TakeGrpcLog(std::getenv("GRPC_VERBOSITY") != nullptr);
  CommandLine line("unix:" + kvmill::DefaultSocketPath(runtime_dir ? runtime_dir : ""),
                   token == nullptr ? "" : token);
  AddTileCommands(line);
  AddStoreCommands(line);
  AddFetchCommands(line);
  AddRemovalCommands(line);
  AddInspectCommands(line);
  AddClusterCommands(line);
  AddConfigCommand(line);
  AddNamespacesCommand(line);
  AddTopCommand(line);
  AddWatchCommand(line);
  AddPlanCommands(line);
  AddEvalCommands(line);
  AddBenchCommands(line);
  return line.Run(argc, argv);
}
