#include "tests/integration/test_certificates.h"

#include <chrono>
#include <fstream>
#include <sstream>
#include <vector>

namespace kvmill::testing {
namespace {

void OpenSsl(const std::vector<std::string>& arguments) {
  DaemonProcess tool(KVMILL_OPENSSL, arguments);
  static_cast<void>(tool.WaitExit(std::chrono::seconds(60)));
}

const std::vector<std::string> kNewKey = {"-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256",
                                          "-nodes"};

std::vector<std::string> Joined(std::vector<std::string> all,
                                const std::vector<std::string>& more) {
  all.insert(all.end(), more.begin(), more.end());
  return all;
}

}  // namespace

TestAuthority::TestAuthority() : ca_path_(directory_ / "ca.pem"), ca_key_(directory_ / "ca.key") {
  OpenSsl(Joined(Joined({"req", "-x509"}, kNewKey), {"-subj", "/CN=test authority", "-days", "3",
                                                     "-keyout", ca_key_, "-out", ca_path_}));
}

TestAuthority::Files TestAuthority::Issue(const std::string& common_name, const std::string& names,
                                          bool over, const std::string& usage) {
  const std::string stem = directory_ / std::to_string(issued_++);
  const Files files{stem + ".pem", stem + ".key"};
  std::ofstream(stem + ".ext") << (names.empty() ? "" : "subjectAltName=" + names + "\n")
                               << "extendedKeyUsage=" << usage << "\n";
  OpenSsl(Joined(Joined({"req"}, kNewKey),
                 {"-subj", "/CN=" + common_name, "-keyout", files.key, "-out", stem + ".csr"}));
  // A negative number of days ends before now.
  OpenSsl({"x509", "-req", "-in", stem + ".csr", "-CA", ca_path_, "-CAkey", ca_key_,
           "-CAcreateserial", "-days", over ? "-1" : "2", "-extfile", stem + ".ext", "-out",
           files.certificate});
  return files;
}

std::string ReadText(const std::string& path) {
  std::ifstream file(path);
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

}  // namespace kvmill::testing
