// kvmilld: reads the configuration, starts the node, follows signals, drains.
#include <malloc.h>
#include <signal.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <initializer_list>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "client/convert.h"
#include "client/grpc_log.h"
#include "service/config.h"
#include "service/flags.h"
#include "service/leaving.h"
#include "service/listeners.h"
#include "service/loaded_config.h"
#include "service/metrics.h"
#include "service/node.h"
#include "service/reload.h"
#include "service/running_config.h"
#include "storage/core/clock.h"
#include "storage/core/log.h"
#include "storage/encryption_keys.h"

namespace kvmill {
namespace {

constexpr int kExitFailed = 1;
constexpr int kExitUsage = 2;

int Failed(const absl::Status& status) {
  std::fprintf(stderr, "kvmilld: %s\n", std::string(status.message()).c_str());
  return kExitFailed;
}

// A full disk under a script's output must not look like success.
int Say(const std::string& text) {
  if (std::fputs(text.c_str(), stdout) >= 0 && std::fflush(stdout) == 0) return 0;
  return Failed(absl::InternalError("standard output could not be written"));
}

// Connections, arenas and disk files are descriptors. The soft limit is for programs that use
// select(); the hard one is what the operator allows.
absl::Status RaiseOpenFilesLimit() {
  constexpr rlim_t kOpenFilesMin = 256;
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return absl::OkStatus();
  limit.rlim_cur = limit.rlim_max;
  setrlimit(RLIMIT_NOFILE, &limit);
  if (limit.rlim_max < kOpenFilesMin) {
    return absl::FailedPreconditionError(absl::StrCat("the limit of open files is ", limit.rlim_max,
                                                      ": want at least ", kOpenFilesMin,
                                                      " (ulimit -Hn, LimitNOFILE=)"));
  }
  return absl::OkStatus();
}

// Keys of the disk tier from the environment, which they are wiped out of: it can be read in /proc
// as long as the process lives, and is inherited.
absl::StatusOr<std::shared_ptr<const EncryptionKeys>> TakeDiskKeys() {
  constexpr char kName[] = "KVMILL_DISK_KEY";
  char* const text = std::getenv(kName);
  if (text == nullptr) return std::shared_ptr<const EncryptionKeys>();
  auto keys = EncryptionKeys::Parse(text);
  explicit_bzero(text, strlen(text));
  unsetenv(kName);
  if (!keys.ok()) {
    return absl::Status(keys.status().code(), absl::StrCat(kName, ": ", keys.status().message()));
  }
  return *std::move(keys);
}

// They are for FollowSignals alone: all threads inherit the mask. Those that come earlier wait.
sigset_t Block(std::initializer_list<int> signals) {
  sigset_t set;
  sigemptyset(&set);
  for (const int signal : signals) sigaddset(&set, signal);
  pthread_sigmask(SIG_BLOCK, &set, nullptr);
  return set;
}

// SIGHUP reads the configuration again. The first SIGTERM or SIGINT asks to leave, a further one
// ends the process at once.
void FollowSignals(const sigset_t& signals, const std::shared_ptr<Leaving>& leaving,
                   const std::shared_ptr<Reloader>& reloader) {
  std::thread([signals, leaving, reloader] {
    for (bool leaves = false;;) {
      int signal = 0;
      sigwait(&signals, &signal);
      if (signal == SIGHUP) {
        if (!leaves) reloader->Ask();
        continue;
      }
      if (std::exchange(leaves, true)) _exit(kExitFailed);
      const bool first = leaving->Ask();
      LogInfo(absl::StrCat("signal ", signal, ": draining", first ? "" : " already",
                           "; another one exits at once"));
    }
  }).detach();
}

std::string Variable(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

int Main(const std::vector<std::string>& arguments) {
  // To read the configuration again, which it is about to do: no reason to end.
  Block({SIGHUP});
  const absl::StatusOr<Flags> flags = ParseFlags(arguments);
  if (!flags.ok()) {
    Failed(flags.status());
    return kExitUsage;
  }
  if (flags->help) return Say(FlagsHelp());
  if (flags->version) return Say(absl::StrCat(kSoftwareVersion, "\n"));
  if (flags->print_metrics) return Say(MetricsReference());
  if (flags->print_options) return Say(ConfigReference());

  absl::StatusOr<std::shared_ptr<const EncryptionKeys>> disk_keys = TakeDiskKeys();
  if (!disk_keys.ok()) return Failed(disk_keys.status());
  const ConfigInputs inputs = {flags->config_file, flags->options, Variable("XDG_RUNTIME_DIR"),
                               Variable("KVMILL_ETCD_PASSWORD"), *std::move(disk_keys)};
  // Flags alone first: what is wrong with them is wrong usage.
  absl::StatusOr<LoadedConfig> loaded = LoadConfig({"", inputs.flags, "", "", nullptr});
  if (!loaded.ok()) {
    Failed(loaded.status());
    return kExitUsage;
  }
  loaded = LoadConfig(inputs);
  if (!loaded.ok()) return Failed(loaded.status());
  const Config& config = loaded->config;
  absl::Status status = CheckConfig(config);
  if (!status.ok()) return Failed(status);
  if (flags->print_config) return Say(ToYaml(config));
  if (flags->check_config) {
    // This may be the configuration of a daemon that runs, and has the ports.
    status = CheckListeners(config, /*with_ports=*/false);
    if (!status.ok()) return Failed(status);
    return Say(absl::StrCat(
        "kvmilld: the configuration is good",
        flags->config_file.empty() ? "" : absl::StrCat(": ", flags->config_file), "\n"));
  }
  status = SetLogLevel(config.log_level);
  if (status.ok()) status = SetLogFormat(config.log_format);
  if (!status.ok()) return Failed(status);

  status = RaiseOpenFilesLimit();
  if (!status.ok()) return Failed(status);

  // Before any thread.
  const sigset_t signals = Block({SIGTERM, SIGINT, SIGHUP});
  signal(SIGPIPE, SIG_IGN);
  signal(SIGXFSZ, SIG_IGN);  // A file too large for `ulimit -f` is an error of who writes it.
  // The transport's receive buffers come and go by the megabyte: keep them on the heap instead of
  // mapping and touching fresh pages for each.
  mallopt(M_MMAP_THRESHOLD, 64 << 20);
  mallopt(M_TRIM_THRESHOLD, 256 << 20);

  TakeGrpcLog(std::getenv("GRPC_VERBOSITY") != nullptr);
  const auto running =
      std::make_shared<RunningConfig>(*std::move(loaded), inputs.file, SystemClock());
  const auto leaving = std::make_shared<Leaving>();  // Of the thread that follows signals, too.
  absl::StatusOr<std::unique_ptr<Node>> node = Node::Start(*running, *leaving);
  if (!node.ok()) return Failed(node.status());
  const std::shared_ptr<Reloader> reloader = Reloader::Start(
      inputs, running,
      [&node](const Config& next, Identities identities, const TenantQuotas& quotas) {
        return (*node)->Reload(next, std::move(identities), quotas);
      });
  std::printf("%s\n", (*node)->ReadyLine().c_str());
  std::fflush(stdout);
  FollowSignals(signals, leaving, reloader);
  leaving->WaitUntilAsked();
  reloader->Stop();
  return (*node)->Drain().ok() ? 0 : 1;  // What was not made durable was logged.
}

}  // namespace
}  // namespace kvmill

int main(int argc, char** argv) {
#ifdef NDEBUG
  // Debian's abseil is built to look for cycles at every lock, those of gRPC included.
  absl::SetMutexDeadlockDetectionMode(absl::OnDeadlockCycle::kIgnore);
#endif
  // UCX takes this from the environment only, which must not change once there are threads. Without
  // it --ucx HOST:PORT fails for a minute after a crash, as long as the kernel remembers
  // connections.
  setenv("UCX_TCP_CM_REUSEADDR", "y", /*overwrite=*/0);
  return kvmill::Main(std::vector<std::string>(argv + 1, argv + argc));
}
