// kvmilld: reads the configuration, starts the node, waits for a signal, drains.
#include <malloc.h>
#include <signal.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "client/convert.h"
#include "client/server_address.h"
#include "service/config.h"
#include "service/flags.h"
#include "service/leaving.h"
#include "service/listeners.h"
#include "service/metrics.h"
#include "service/node.h"
#include "storage/core/log.h"

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

// The first SIGTERM or SIGINT asks to leave, a further one ends the process at once.
void FollowSignals(const sigset_t& signals, const std::shared_ptr<Leaving>& leaving) {
  std::thread([signals, leaving] {
    int signal = 0;
    sigwait(&signals, &signal);
    const bool first = leaving->Ask();
    LogInfo(absl::StrCat("signal ", signal, ": draining", first ? "" : " already",
                         "; another one exits at once"));
    sigwait(&signals, &signal);
    _exit(kExitFailed);
  }).detach();
}

int Main(const std::vector<std::string>& arguments) {
  const absl::StatusOr<Flags> flags = ParseFlags(arguments);
  if (!flags.ok()) {
    Failed(flags.status());
    return kExitUsage;
  }
  if (flags->help) return Say(FlagsHelp());
  if (flags->version) return Say(absl::StrCat(kSoftwareVersion, "\n"));
  if (flags->print_metrics) return Say(MetricsReference());

  Config config;
  if (!flags->config_file.empty()) {
    const absl::Status status = ApplyYamlFile(flags->config_file, &config);
    if (!status.ok()) return Failed(status);
  }
  for (const auto& [name, value] : flags->options) {
    const absl::Status status = SetOption(name, value, &config);
    if (!status.ok()) {
      Failed(absl::Status(status.code(), absl::StrCat("--", status.message())));
      return kExitUsage;
    }
  }
  if (config.socket.empty()) {
    const char* runtime_dir = std::getenv("XDG_RUNTIME_DIR");
    config.socket = DefaultSocketPath(runtime_dir == nullptr ? "" : runtime_dir);
  }
  if (const char* password = std::getenv("KVMILL_ETCD_PASSWORD")) config.etcd_password = password;
  absl::Status status = CheckConfig(config);
  if (!status.ok()) return Failed(status);
  if (flags->print_config) return Say(ToYaml(config));
  if (flags->check_config) {
    // This may be the configuration of a daemon that runs, and has the ports.
    status = CheckListeners(config, /*with_ports=*/false);
    return status.ok() ? 0 : Failed(status);
  }
  status = SetLogLevel(config.log_level);
  if (!status.ok()) return Failed(status);

  status = RaiseOpenFilesLimit();
  if (!status.ok()) return Failed(status);

  // Before any thread: all of them inherit the mask, and only FollowSignals sees the signals.
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGTERM);
  sigaddset(&signals, SIGINT);
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);
  signal(SIGPIPE, SIG_IGN);
  // The transport's receive buffers come and go by the megabyte: keep them on the heap instead of
  // mapping and touching fresh pages for each.
  mallopt(M_MMAP_THRESHOLD, 64 << 20);
  mallopt(M_TRIM_THRESHOLD, 256 << 20);

  const auto leaving = std::make_shared<Leaving>();  // Of the thread that follows signals, too.
  absl::StatusOr<std::unique_ptr<Node>> node = Node::Start(config, *leaving);
  if (!node.ok()) return Failed(node.status());
  std::printf("%s\n", (*node)->ReadyLine().c_str());
  std::fflush(stdout);
  FollowSignals(signals, leaving);
  leaving->WaitUntilAsked();
  (*node)->Drain();
  return 0;
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
