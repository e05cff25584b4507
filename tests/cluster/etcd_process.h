// A real etcd of one server, on the loopback, as a child process.
#ifndef KVMILL_TESTS_CLUSTER_ETCD_PROCESS_H_
#define KVMILL_TESTS_CLUSTER_ETCD_PROCESS_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "client/server_address.h"
#include "tests/integration/daemon_process.h"
#include "tests/integration/test_certificates.h"

namespace kvmill::testing {

// A TCP port of 127.0.0.1 that nobody had a moment ago.
std::uint16_t FreePort();

// An authority, and a certificate of 127.0.0.1, ::1 and localhost.
class TestCertificates {
 public:
  const std::string& ca_path() const { return authority_.ca_path(); }
  const std::string& certificate_path() const { return node_.certificate; }
  const std::string& key_path() const { return node_.key; }

 private:
  TestAuthority authority_;
  TestAuthority::Files node_ = authority_.Issue("node", TestAuthority::kLoopback);
};

// Not thread-safe. Ports and data stay through Kill and Start. The destructor kills it.
class EtcdProcess {
 public:
  // With certificates it speaks TLS only and asks clients for theirs.
  explicit EtcdProcess(const TestCertificates* certificates = nullptr);

  // Both return when it answers; false: it does not in time.
  bool Start();
  // Of a cluster that has nothing in it. Its id differs, unless `same_id`.
  bool StartEmpty(bool same_id = false);
  void Kill();  // kill -9.
  void Stop();  // SIGSTOP: it keeps its connections and says nothing.
  void Continue();

  HostPort address() const { return {"127.0.0.1", client_port_}; }
  HostPort address_ipv6() const { return {"::1", client_port_}; }

  // Runs etcdctl against it. False: it failed; what it said is in `said`.
  bool Control(const std::vector<std::string>& arguments, std::string* said = nullptr);

 private:
  std::vector<std::string> Arguments() const;

  const TestCertificates* const certificates_;
  TemporaryDirectory directory_;
  std::string token_ = "first";
  int generation_ = 0;
  std::uint16_t client_port_ = 0, peer_port_ = 0, health_port_ = 0;
  std::unique_ptr<DaemonProcess> process_;
};

}  // namespace kvmill::testing

#endif  // KVMILL_TESTS_CLUSTER_ETCD_PROCESS_H_
