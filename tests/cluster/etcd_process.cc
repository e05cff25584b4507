#include "tests/cluster/etcd_process.h"

#include <httplib.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <thread>

namespace kvmill::testing {
namespace {

bool RunTool(const std::string& binary, const std::vector<std::string>& arguments,
             std::string* said = nullptr) {
  DaemonProcess tool(binary, arguments);
  const Exit exit = tool.WaitExit(std::chrono::seconds(30));
  if (said != nullptr) *said = tool.standard_output() + tool.standard_error();
  return exit.in_time && exit.code == 0;
}

std::string Url(const std::string& scheme, const HostPort& address) {
  return scheme + "://" + address.ToString();
}

}  // namespace

std::uint16_t FreePort() {
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t bytes = sizeof(address);
  const bool bound = bind(fd, reinterpret_cast<sockaddr*>(&address), bytes) == 0 &&
                     getsockname(fd, reinterpret_cast<sockaddr*>(&address), &bytes) == 0;
  close(fd);
  return bound ? ntohs(address.sin_port) : std::uint16_t{0};
}

EtcdProcess::EtcdProcess(const TestCertificates* certificates) : certificates_(certificates) {}

std::vector<std::string> EtcdProcess::Arguments() const {
  const std::string peer = Url("http", {"127.0.0.1", peer_port_});
  const std::string scheme = certificates_ == nullptr ? "http" : "https";
  const std::string clients = Url(scheme, address()) + "," + Url(scheme, address_ipv6());
  std::vector<std::string> arguments = {
      "--name=one",
      "--data-dir=" + (directory_ / ("data" + std::to_string(generation_))),
      "--listen-client-urls=" + clients,
      "--advertise-client-urls=" + clients,
      "--listen-peer-urls=" + peer,
      "--initial-advertise-peer-urls=" + peer,
      "--initial-cluster=one=" + peer,
      "--initial-cluster-token=" + token_,
      "--listen-metrics-urls=" + Url("http", {"127.0.0.1", health_port_}),
      // Alone it is leader at once, and leases of one second are not made longer.
      "--heartbeat-interval=50",
      "--election-timeout=250",
  };
  if (certificates_ != nullptr) {
    arguments.insert(arguments.end(),
                     {"--client-cert-auth", "--trusted-ca-file=" + certificates_->ca_path(),
                      "--cert-file=" + certificates_->certificate_path(),
                      "--key-file=" + certificates_->key_path()});
  }
  return arguments;
}

bool EtcdProcess::Start() {
  using std::chrono::steady_clock;
  for (int attempt = 0; attempt < 3; ++attempt) {
    const bool first = client_port_ == 0;
    if (first) {
      client_port_ = FreePort();
      peer_port_ = FreePort();
      health_port_ = FreePort();
    }
    process_ = nullptr;
    process_ = std::make_unique<DaemonProcess>(KVMILL_ETCD, Arguments());
    const auto deadline = steady_clock::now() + std::chrono::seconds(20);
    while (steady_clock::now() < deadline) {
      httplib::Client health("127.0.0.1", health_port_);
      const auto answer = health.Get("/health");
      if (process_->WaitExit(std::chrono::seconds(0)).in_time) break;  // Then another's answer.
      if (answer && answer->body.find("true") != std::string::npos) return true;
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
    std::fprintf(stderr, "etcd does not answer:\n%s\n", process_->standard_error().c_str());
    // Perhaps somebody else took a port meanwhile: new ones do, or those some time later.
    if (first) {
      client_port_ = 0;
    } else {
      std::this_thread::sleep_for(std::chrono::seconds(1));
    }
  }
  return false;
}

bool EtcdProcess::StartEmpty(bool same_id) {
  Kill();
  ++generation_;
  if (!same_id) token_ += "+";
  return Start();
}

void EtcdProcess::Kill() {
  if (process_ == nullptr) return;
  process_->Signal(SIGKILL);
  process_->WaitExit();
  process_ = nullptr;
}

void EtcdProcess::Stop() { process_->Signal(SIGSTOP); }
void EtcdProcess::Continue() { process_->Signal(SIGCONT); }

bool EtcdProcess::Control(const std::vector<std::string>& arguments, std::string* said) {
  const std::string scheme = certificates_ == nullptr ? "http" : "https";
  std::vector<std::string> all = {"--endpoints=" + Url(scheme, address()), "--command-timeout=10s"};
  all.insert(all.end(), arguments.begin(), arguments.end());
  return RunTool(KVMILL_ETCDCTL, all, said);
}

}  // namespace kvmill::testing
