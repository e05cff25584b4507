// A real daemon with a UCX data plane, its clients and its metrics, for integration tests.
#ifndef KVMILL_TESTS_INTEGRATION_UCX_FIXTURE_H_
#define KVMILL_TESTS_INTEGRATION_UCX_FIXTURE_H_

#include <gtest/gtest.h>
#include <httplib.h>
#include <unistd.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "client/server_address.h"
#include "tests/integration/daemon_fixture.h"

namespace kvmill::testing {

class UcxDaemonTest : public DaemonTest {
 protected:
  void StartUcx(const std::vector<std::string>& more = {},
                const std::string& address = "127.0.0.1") {
    std::vector<std::string> arguments = {"--ucx",     address,       "--listen",  "127.0.0.1:0",
                                          "--metrics", "127.0.0.1:0", "--insecure"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    Start(arguments);
  }
  std::unique_ptr<Client> UcxClient(Client::Options options = {}) const {
    if (options.address.empty()) options.address = ready_["listen"].get<std::string>();
    if (options.path == DataPath::kAuto) options.path = DataPath::kUcx;
    absl::StatusOr<std::unique_ptr<Client>> client = Client::Create(options);
    EXPECT_TRUE(client.ok()) << client.status();
    return client.ok() ? *std::move(client) : nullptr;
  }
  double Metric(const std::string& series) const {
    const HostPort address = *ParseHostPort(ready_["metrics"].get<std::string>());
    httplib::Client http(address.host, address.port);
    http.set_read_timeout(30, 0);
    const httplib::Result result = http.Get("/metrics");
    if (!result) return -1;
    const std::string name = absl::StrCat("\nkvmill_", series, " ");
    const std::size_t at = result->body.find(name);
    double value = -1;
    if (at == std::string::npos) return -1;
    const std::size_t begin = at + name.size();
    EXPECT_TRUE(absl::SimpleAtod(result->body.substr(begin, result->body.find('\n', begin) - begin),
                                 &value));
    return value;
  }
  bool Eventually(const std::function<bool()>& holds) const {
    for (int i = 0; i < 1500; ++i) {
      if (holds()) return true;
      usleep(10'000);
    }
    return false;
  }
  // Nothing of any call is left in the daemon.
  void ExpectIdle(double connections) {
    EXPECT_TRUE(Eventually([&] {
      return Metric("data_calls") == 0 && Metric("staging_bytes") == 0 &&
             Metric("data_connections") == connections && Metric("leases") == 0;
    })) << "calls "
        << Metric("data_calls") << " staging " << Metric("staging_bytes") << " connections "
        << Metric("data_connections") << " leases " << Metric("leases");
  }
};

}  // namespace kvmill::testing

#endif  // KVMILL_TESTS_INTEGRATION_UCX_FIXTURE_H_
