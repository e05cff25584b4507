#include "tests/integration/daemon_process.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <sstream>

namespace kvmill::testing {
namespace {

using std::chrono::steady_clock;

int MillisUntil(steady_clock::time_point deadline) {
  const auto left =
      std::chrono::duration_cast<std::chrono::milliseconds>(deadline - steady_clock::now());
  return static_cast<int>(std::max<std::int64_t>(0, left.count()));
}

}  // namespace

TemporaryDirectory::TemporaryDirectory() {
  std::string name = (std::filesystem::temp_directory_path() / "kvmill-test-XXXXXX").string();
  path_ = mkdtemp(name.data()) == nullptr ? "" : name;
}

TemporaryDirectory::~TemporaryDirectory() {
  std::error_code error;
  if (!path_.empty()) std::filesystem::remove_all(path_, error);
}

DaemonProcess::DaemonProcess(const std::string& binary, const std::vector<std::string>& arguments,
                             uid_t uid) {
  int output[2];
  if (pipe2(output, O_CLOEXEC) != 0) return;
  const std::string error_path = directory_ / "stderr";
  std::vector<char*> argv;
  argv.push_back(const_cast<char*>(binary.c_str()));
  for (const std::string& argument : arguments) argv.push_back(const_cast<char*>(argument.c_str()));
  argv.push_back(nullptr);
  const pid_t parent = getpid();
  pid_ = fork();
  if (pid_ == 0) {
    // Dies with the test, however that ends.
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent) _exit(126);
    const int error_fd = open(error_path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    dup2(output[1], STDOUT_FILENO);
    dup2(error_fd, STDERR_FILENO);
    const int binary_fd = open(binary.c_str(), O_RDONLY | O_CLOEXEC);
    if (uid != 0) {
      if (setgid(uid) != 0 || setuid(uid) != 0) _exit(126);
      prctl(PR_SET_PDEATHSIG, SIGKILL);  // Forgotten by the change of user.
    }
    fexecve(binary_fd, argv.data(), environ);
    _exit(127);
  }
  close(output[1]);
  output_fd_ = output[0];
}

DaemonProcess::~DaemonProcess() {
  if (pid_ > 0 && !reaped_) {
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
  }
  if (output_fd_ >= 0) close(output_fd_);
  // What a sanitizer finds in the daemon ends it, which a test that kills it anyway would not see.
  const std::string said = standard_error();
  if (said.find("Sanitizer") != std::string::npos) {
    std::fprintf(stderr, "kvmilld: a sanitizer found something\n%s", said.c_str());
    std::abort();
  }
}

bool DaemonProcess::ReadOutput(steady_clock::time_point deadline) {
  pollfd fd{output_fd_, POLLIN, 0};
  if (poll(&fd, 1, MillisUntil(deadline)) <= 0) return false;
  char buffer[4096];
  const ssize_t bytes = read(output_fd_, buffer, sizeof(buffer));
  if (bytes <= 0) return false;
  output_.append(buffer, static_cast<std::size_t>(bytes));
  return true;
}

nlohmann::json DaemonProcess::WaitReady(std::chrono::seconds timeout) {
  const auto deadline = steady_clock::now() + timeout;
  while (output_.find('\n') == std::string::npos) {
    if (!ReadOutput(deadline)) return nullptr;
  }
  nlohmann::json line =
      nlohmann::json::parse(output_.substr(0, output_.find('\n')), nullptr, false);
  if (line.is_discarded() || !line.value("ready", false)) return nullptr;
  return line;
}

void DaemonProcess::Signal(int signal) const {
  if (pid_ <= 0 || reaped_) return;
  kill(pid_, signal);
  if (signal != SIGSTOP) return;
  // A thread that runs on another core stops a little later.
  const std::string tasks = "/proc/" + std::to_string(pid_) + "/task";
  const auto all_stopped = [&tasks] {
    std::error_code error;
    for (const auto& task : std::filesystem::directory_iterator(tasks, error)) {
      std::ifstream file(task.path() / "stat");
      std::stringstream text;
      text << file.rdbuf();
      const std::size_t name_end = text.str().rfind(')');
      if (name_end == std::string::npos) continue;
      const std::string state = text.str().substr(name_end, 3);
      if (state != ") T" && state != ") Z" && state != ") X") return false;  // Nor one that ended.
    }
    return true;
  };
  const auto deadline = steady_clock::now() + std::chrono::seconds(10);
  while (!all_stopped() && steady_clock::now() < deadline) usleep(100);
}

Exit DaemonProcess::WaitExit(std::chrono::seconds timeout) {
  const auto deadline = steady_clock::now() + timeout;
  Exit exit;
  if (pid_ <= 0 || reaped_) return exit;
  const int pidfd = static_cast<int>(syscall(SYS_pidfd_open, pid_, 0));
  pollfd fd{pidfd, POLLIN, 0};
  const bool ended = pidfd >= 0 && poll(&fd, 1, MillisUntil(deadline)) == 1;
  if (pidfd >= 0) close(pidfd);
  if (!ended) return exit;
  int status = 0;
  if (waitpid(pid_, &status, 0) != pid_) return exit;
  reaped_ = true;
  exit.in_time = true;
  if (WIFEXITED(status)) exit.code = WEXITSTATUS(status);
  if (WIFSIGNALED(status)) exit.signal = WTERMSIG(status);
  while (ReadOutput(deadline)) {
  }
  return exit;
}

int DaemonProcess::OpenDescriptors() const {
  const std::filesystem::directory_iterator all("/proc/" + std::to_string(pid_) + "/fd");
  return static_cast<int>(std::distance(begin(all), end(all)));
}

std::uint64_t DaemonProcess::ResidentKiB() const {
  std::ifstream file("/proc/" + std::to_string(pid_) + "/status");
  std::uint64_t kib = 0;
  for (std::string word; file >> word;) {
    if (word == "RssAnon:") file >> kib;
  }
  return kib;
}

std::string DaemonProcess::standard_error() const {
  std::ifstream file(directory_ / "stderr");
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

std::string DaemonProcess::ReadLine(std::chrono::seconds timeout) {
  const auto deadline = steady_clock::now() + timeout;
  std::size_t end = 0;
  while ((end = output_.find('\n', lines_end_)) == std::string::npos) {
    if (!ReadOutput(deadline)) return "";
  }
  const std::string line = output_.substr(lines_end_, end - lines_end_);
  lines_end_ = end + 1;
  return line;
}

std::string ProbeBinary() { return std::string(KVMILL_BIN_DIR) + "/../tests/client_probe"; }

std::string DaemonBinary() { return std::string(KVMILL_BIN_DIR) + "/kvmilld"; }

}  // namespace kvmill::testing
