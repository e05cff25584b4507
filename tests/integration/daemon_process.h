// A real kvmilld as a child process, for tests and benchmarks.
#ifndef KVMILL_TESTS_INTEGRATION_DAEMON_PROCESS_H_
#define KVMILL_TESTS_INTEGRATION_DAEMON_PROCESS_H_

#include <sys/types.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace kvmill::testing {

// A directory of its own below the system's temporary one, removed at the end.
class TemporaryDirectory {
 public:
  TemporaryDirectory();
  ~TemporaryDirectory();
  TemporaryDirectory(const TemporaryDirectory&) = delete;
  TemporaryDirectory& operator=(const TemporaryDirectory&) = delete;

  const std::string& path() const { return path_; }
  std::string operator/(const std::string& name) const { return path_ + "/" + name; }

 private:
  std::string path_;
};

// How a child ended.
struct Exit {
  bool in_time = false;
  int code = -1;   // Of exit().
  int signal = 0;  // That killed it.
};

// Not thread-safe. The destructor kills what still runs.
class DaemonProcess {
 public:
  // Starts `binary` with `arguments`; does not wait for it. Standard error goes to a file. With
  // `uid` as another user, who needs to read neither the binary nor the folders above.
  DaemonProcess(const std::string& binary, const std::vector<std::string>& arguments,
                uid_t uid = 0);
  ~DaemonProcess();
  DaemonProcess(const DaemonProcess&) = delete;
  DaemonProcess& operator=(const DaemonProcess&) = delete;

  // The ready line; null when the daemon ended, or printed something else, or time ran out.
  nlohmann::json WaitReady(std::chrono::seconds timeout = std::chrono::seconds(60));
  void Signal(int signal) const;  // SIGSTOP: returns when every thread has stopped.
  Exit WaitExit(std::chrono::seconds timeout = std::chrono::seconds(60));

  pid_t pid() const { return pid_; }
  int OpenDescriptors() const;
  std::uint64_t ResidentKiB() const;                       // Of anonymous memory.
  std::string standard_error() const;                      // So far.
  std::string standard_output() const { return output_; }  // Read so far.
  // The next line of standard output, without its end; empty when there is none in time.
  std::string ReadLine(std::chrono::seconds timeout = std::chrono::seconds(60));

 private:
  bool ReadOutput(std::chrono::steady_clock::time_point deadline);  // False at its end.

  TemporaryDirectory directory_;
  pid_t pid_ = -1;
  bool reaped_ = false;
  int output_fd_ = -1;
  std::string output_;
  std::size_t lines_end_ = 0;  // Of output_, what ReadLine has given.
};

// The kvmilld of this build.
std::string DaemonBinary();
// The client_probe of this build: a client in a process of its own.
std::string ProbeBinary();

}  // namespace kvmill::testing

#endif  // KVMILL_TESTS_INTEGRATION_DAEMON_PROCESS_H_
