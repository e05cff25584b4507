#include "client/cli/command.h"

#include <exception>
#include <fstream>
#include <iostream>
#include <map>
#include <sstream>
#include <utility>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "client/cli/client_options.h"
#include "client/cli/human.h"
#include "client/client.h"
#include "client/explained.h"
#include "client/server_address.h"
#include "client/units.h"
#include "storage/core/status_macros.h"

namespace kvmill::cli {
namespace {

constexpr absl::string_view kUsagePayload = "kvmill.cli/usage";

// One line, whatever a library put into its message.
std::string OneLine(absl::string_view text) {
  return absl::StrReplaceAll(text, {{"\r", " "}, {"\n", " "}});
}

// A full disk under a script's output must not look like success.
constexpr char kUnwritable[] = "standard output could not be written";

int ExitCodeOf(const absl::Status& status) {
  if (status.ok()) return kDone;
  if (status.GetPayload(kUsagePayload)) return kUsage;
  return absl::IsNotFound(status) ? kNotFound : kFailed;
}

// What editors put behind the token is none of it.
absl::StatusOr<std::string> ReadTokenFile(const std::string& path) {
  std::ifstream file(path);
  std::stringstream text;
  if (file) text << file.rdbuf();
  std::string token(absl::StripTrailingAsciiWhitespace(text.str()));
  if (file && !token.empty()) return token;
  return UsageError(absl::StrCat("--token-file ", path, ": want a file with a token"));
}

// What to do next, where the code alone tells.
std::string HintFor(const absl::Status& status, bool default_server) {
  if (status.GetPayload(kExplainedPayload)) return "";  // Its text does.
  switch (status.code()) {
    case absl::StatusCode::kUnavailable:
      return absl::StrCat(
          " (is kvmilld running there? It answers once its start is over. --server names its "
          "socket or address",
          default_server
              ? absl::StrCat("; without it that is unix:$XDG_RUNTIME_DIR/kvmill.sock, or, "
                             "without XDG_RUNTIME_DIR, unix:",
                             DefaultSocketPath(""))
              : "",
          ")");
    case absl::StatusCode::kDeadlineExceeded:
      return " (no answer in time, the outcome is unknown; try a longer --timeout)";
    case absl::StatusCode::kResourceExhausted:
      // Blocks that find no room come with a time to wait; other limits are not about room.
      return RetryAfter(status) > absl::ZeroDuration()
                 ? " (the daemon is full: evict, or try again later)"
                 : "";
    default:
      return "";
  }
}

}  // namespace

absl::Status UsageError(absl::string_view message) {
  absl::Status status = absl::InvalidArgumentError(message);
  status.SetPayload(kUsagePayload, absl::Cord());
  return status;
}

CommandLine::CommandLine(const std::string& default_server, const std::string& token)
    : root_("kvmill: look after KV-cache tiles, in files and in a running kvmilld", "kvmill") {
  flags_.server = default_server;
  flags_.token = token;
  root_.require_subcommand(1);
  root_.set_version_flag("--version", KVMILL_VERSION);
  root_.get_formatter()->column_width(34);
  root_.footer(
      "Exit codes: 0 done, 1 failed, 2 wrong usage, 3 not found (a miss).\n"
      "'kvmill COMMAND --help' explains a command. First steps, with a daemon on the default "
      "socket:\n"
      "  kvmill put --namespace demo --format k4v2_g128 --sequence s1 --kv prefill_\n"
      "  kvmill get --namespace demo --sequence s1 --out again_\n");
}

void CommandLine::AddCommonFlags(CLI::App& app) {
  const std::string group = "Common options";
  app.add_flag("--json", flags_.json, "One JSON document on standard output")->group(group);
  app.add_option_function<std::string>(
         "--server",
         [this](const std::string& text) {
           if (const auto address = ParseServerAddress(text); !address.ok()) {
             throw CLI::ValidationError("--server", std::string(address.status().message()));
           }
           flags_.server = text;
         },
         "Daemon: unix:PATH, HOST:PORT or [IPv6]:PORT (default " + flags_.server + ")")
      ->group(group)
      ->type_name("ADDR");
  app.add_option_function<std::string>(
         "--timeout",
         [this](const std::string& text) {
           const absl::StatusOr<absl::Duration> timeout = ParseTimeout(text);
           if (!timeout.ok()) {
             throw CLI::ValidationError("--timeout", std::string(timeout.status().message()));
           }
           flags_.timeout = *timeout;
         },
         "Longest wait for one answer of the daemon, as 500ms or 30s (default 60s)")
      ->group(group)
      ->type_name("DURATION");
  const std::string remote = "To a daemon over TCP";
  app.add_option("--tls-ca", flags_.tls.ca, "PEM authorities of the daemon's certificate")
      ->group(remote)
      ->type_name("FILE");
  app.add_option("--tls-cert", flags_.tls.certificate, "PEM certificate to show, with --tls-key")
      ->group(remote)
      ->type_name("FILE");
  app.add_option("--tls-key", flags_.tls.key, "PEM key of that certificate")
      ->group(remote)
      ->type_name("FILE");
  app.add_option("--tls-server-name", flags_.tls.server_name,
                 "Name in the daemon's certificate, where it is not the host of --server")
      ->group(remote)
      ->type_name("NAME");
  app.add_option("--token-file", flags_.token_file,
                 "File with the token to show; else KVMILL_TOKEN has it, if anything")
      ->group(remote)
      ->type_name("FILE");
}

CLI::App* CommandLine::Add(CLI::App& parent, const std::string& name, const std::string& summary,
                           const std::string& help, Body body) {
  CLI::App* app = parent.add_subcommand(name, summary);
  AddCommonFlags(*app);
  app->footer(help);
  app->callback([this, app, name, body = std::move(body)] {
    selected_name_ =
        app->get_parent() == &root_ ? name : app->get_parent()->get_name() + " " + name;
    selected_ = body;
  });
  return app;
}

void CommandLine::AddPath(CLI::App& app, bool* map) {
  std::map<std::string, DataPath> paths = {
      {"auto", DataPath::kAuto}, {"inline", DataPath::kInline}, {"ucx", DataPath::kUcx}};
  if (map != nullptr) paths["map"] = DataPath::kAuto;
  const std::string in_place = map != nullptr ? "map (in place), " : "";
  app.add_option_function<std::string>(
         "--path",
         [this, paths, map](const std::string& name) {
           flags_.path = paths.at(name);
           if (map != nullptr) *map = name == "map";
         },
         "How blocks travel: inline (gRPC), ucx, " + in_place +
             "or auto (default): ucx to daemons elsewhere that offer it")
      ->check(CLI::IsMember(paths))
      ->type_name("PATH");
  app.add_flag("--data-plane-plaintext", flags_.data_plane_plaintext,
               "UCX without encryption, as the daemon was started");
  const std::map<std::string, RdmaUse> uses = {
      {"auto", RdmaUse::kAuto}, {"expected", RdmaUse::kExpected}, {"required", RdmaUse::kRequired}};
  app.add_option_function<std::string>(
         "--rdma", [this, uses](const std::string& name) { flags_.rdma = uses.at(name); },
         "UCX without RDMA: expected warns, required does not use it, auto (default) warns where "
         "this host has RDMA")
      ->check(CLI::IsMember(uses))
      ->type_name("USE");
}

int CommandLine::Run(int argc, char** argv) {
  AddCommonFlags(root_);
  const std::string default_server = flags_.server;
  try {
    root_.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == 0) {  // --help and --version.
      root_.exit(error);
      if (std::cout.flush()) return kDone;
      std::cerr << "kvmill: " << kUnwritable << "\n";
      return kFailed;
    }
    const CLI::App* app = &root_;
    std::string name = "kvmill";
    while (!app->get_subcommands().empty()) {
      app = app->get_subcommands().front();
      absl::StrAppend(&name, " ", app->get_name());
    }
    std::string message = OneLine(error.what());
    // A word that is no command: CLI11 only says that one is required.
    const std::vector<std::string> unknown = app->remaining();
    if (!app->get_subcommands(nullptr).empty() && !unknown.empty()) {
      message = absl::StrCat("there is no command '", unknown.front(), "'");
    } else if (!unknown.empty()) {  // Rather than what is missing because of it.
      message = absl::StrCat("there is no flag or argument '", unknown.front(), "' here");
    }
    std::cerr << name << ": " << message << "; see '" << name << " --help'\n";
    return kUsage;
  }
  absl::Status status;
  try {
    status = selected_();
  } catch (const std::exception& error) {
    // Libraries below may throw where memory ends; our own code does not.
    status = absl::InternalError(error.what());
  }
  if (status.ok() && !std::cout.flush()) status = absl::InternalError(kUnwritable);
  if (!status.ok()) {
    std::cerr << "kvmill " << selected_name_ << ": " << OneLine(status.message());
    if (ExitCodeOf(status) == kFailed) {
      std::cerr << HintFor(status, flags_.server == default_server);
    }
    if (ExitCodeOf(status) == kUsage) {
      std::cerr << "; see 'kvmill " << selected_name_ << " --help'";
    }
    std::cerr << "\n";
  }
  return ExitCodeOf(status);
}

CLI::Option* AddBytes(CLI::App& app, const std::string& name, std::uint64_t& bytes,
                      const std::string& help) {
  return app
      .add_option_function<std::string>(
          name,
          [name, &bytes](const std::string& text) {
            const absl::StatusOr<std::uint64_t> parsed = ParseBytes(text);
            if (!parsed.ok()) {
              throw CLI::ValidationError(name, std::string(parsed.status().message()));
            }
            bytes = *parsed;
          },
          help)
      ->type_name("SIZE");
}

absl::StatusOr<Client::Options> ClientOptions(const CommonFlags& flags) {
  Client::Options options;
  options.address = flags.server;
  options.timeout = flags.timeout;
  options.path = flags.path;
  options.data_plane_plaintext = flags.data_plane_plaintext;
  options.rdma = flags.rdma;
  options.tls = flags.tls;
  options.token = flags.token;
  if (!flags.token_file.empty()) {
    KVMILL_ASSIGN_OR_RETURN(options.token, ReadTokenFile(flags.token_file));
  }
  return options;
}

absl::StatusOr<std::unique_ptr<Client>> Connect(const CommonFlags& flags) {
  KVMILL_ASSIGN_OR_RETURN(const Client::Options options, ClientOptions(flags));
  return Client::Create(options);
}

absl::StatusOr<TileFormat> FormatFlag(const std::string& name, std::uint32_t head_dim) {
  absl::StatusOr<TileFormat> format = ParseTileFormat(name, head_dim);
  if (!format.ok()) return UsageError(format.status().message());
  return format;
}

}  // namespace kvmill::cli
