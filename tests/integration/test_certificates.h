// Certificates for tests, made with openssl.
#ifndef KVMILL_TESTS_INTEGRATION_TEST_CERTIFICATES_H_
#define KVMILL_TESTS_INTEGRATION_TEST_CERTIFICATES_H_

#include <string>

#include "tests/integration/daemon_process.h"

namespace kvmill::testing {

// An authority with certificates that serve both ends of a connection. Its files go with it.
class TestAuthority {
 public:
  struct Files {
    std::string certificate, key;  // Paths.
  };

  TestAuthority();
  const std::string& ca_path() const { return ca_path_; }
  // `names` as openssl's subjectAltName takes them, "DNS:a,IP:127.0.0.1"; empty: none. Valid from
  // now for two days, or ended yesterday. `usage` is its extended key usage.
  Files Issue(const std::string& common_name, const std::string& names, bool over = false,
              const std::string& usage = "serverAuth,clientAuth");

  // A node's: 127.0.0.1, ::1 and localhost.
  static constexpr const char* kLoopback = "DNS:localhost,IP:127.0.0.1,IP:::1";

 private:
  TemporaryDirectory directory_;
  std::string ca_path_, ca_key_;
  int issued_ = 0;
};

// The whole file; empty when it cannot be read.
std::string ReadText(const std::string& path);

}  // namespace kvmill::testing

#endif  // KVMILL_TESTS_INTEGRATION_TEST_CERTIFICATES_H_
