// The frame that every command of `kvmill` hangs in: common flags, exit codes, one way to fail.
#ifndef KVMILL_CLIENT_CLI_COMMAND_H_
#define KVMILL_CLIENT_CLI_COMMAND_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "CLI/CLI.hpp"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "client/client.h"
#include "kernels/float16.h"
#include "kernels/tile_format.h"

namespace kvmill::cli {

enum ExitCode : int { kDone = 0, kFailed = 1, kUsage = 2, kNotFound = 3 };

// Flags of every command, and what `main` found in the environment.
struct CommonFlags {
  bool json = false;
  std::string server;  // As ParseServerAddress takes it.
  absl::Duration timeout = absl::Seconds(60);
  // Of commands with AddPath.
  DataPath path = DataPath::kAuto;
  bool data_plane_plaintext = false;
  RdmaUse rdma = RdmaUse::kAuto;
  // To a daemon over TCP.
  TlsFiles tls;
  std::string token_file;  // Empty: `token`.
  std::string token;       // KVMILL_TOKEN; may be empty.
};

// Builds the command tree and runs the one that was asked for.
class CommandLine {
 public:
  // Returns OK, NOT_FOUND for a miss (exit 3), UsageError (exit 2), or any other error (exit 1).
  using Body = std::function<absl::Status()>;

  CommandLine(const std::string& default_server, const std::string& token);
  CommandLine(const CommandLine&) = delete;
  CommandLine& operator=(const CommandLine&) = delete;

  CLI::App& root() { return root_; }
  const CommonFlags& flags() const { return flags_; }

  // A command below `parent` with the common flags; `help` is the text under its usage line. `body`
  // runs after the whole command line was read.
  CLI::App* Add(CLI::App& parent, const std::string& name, const std::string& summary,
                const std::string& help, Body body);

  // --path, --data-plane-plaintext and --rdma, for commands that move blocks. With `map` --path
  // takes `map` too, which sets it.
  void AddPath(CLI::App& app, bool* map = nullptr);

  // Reads the command line and runs the command. The exit code.
  int Run(int argc, char** argv);

 private:
  void AddCommonFlags(CLI::App& app);

  CLI::App root_;
  CommonFlags flags_;
  std::string selected_name_;
  Body selected_;
};

// INVALID_ARGUMENT that ends in exit code 2: the command line is wrong, not the world.
absl::Status UsageError(absl::string_view message);

// Options whose text is checked while the command line is read.
CLI::Option* AddBytes(CLI::App& app, const std::string& name, std::uint64_t& bytes,
                      const std::string& help);

// A client for the daemon that --server names; does not connect yet.
absl::StatusOr<std::unique_ptr<Client>> Connect(const CommonFlags& flags);

// --format and --head-dim, as a format. UsageError naming the text and the supported ones.
absl::StatusOr<TileFormat> FormatFlag(const std::string& name, std::uint32_t head_dim);

// Helps that several commands share.
inline constexpr absl::string_view kFormatHelp =
    "Tile format kXvY_gZ: bits of K (2, 3 or 4) and V (2 or 4), tokens of a block (64 or 128)";

}  // namespace kvmill::cli

#endif  // KVMILL_CLIENT_CLI_COMMAND_H_
