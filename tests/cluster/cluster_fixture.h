// Real daemons of a cluster with a real etcd: the fixture of the cluster's tests.
#ifndef KVMILL_TESTS_CLUSTER_CLUSTER_FIXTURE_H_
#define KVMILL_TESTS_CLUSTER_CLUSTER_FIXTURE_H_

#include <gtest/gtest.h>
#include <httplib.h>
#include <signal.h>

#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/server_address.h"
#include "tests/cluster/etcd_process.h"
#include "tests/integration/daemon_fixture.h"

namespace kvmill::testing {

using Millis = std::chrono::milliseconds;
inline constexpr Millis kLease{2000};  // The shortest, for what is seen when one ends.
// Of nodes that are to stay on a machine that stands still now and then. Nothing waits for its end.
inline constexpr Millis kLongLease{60'000};
// By then it has happened on the slowest machine, and kLongLease has not ended.
inline constexpr Millis kSoon{30'000};

struct ClusterDaemon {
  std::unique_ptr<DaemonProcess> process;
  nlohmann::json ready;
  std::unique_ptr<Client> client;
};

// Node "a" is the fixture's daemon where a test calls Put and Get.
class ClusterTest : public DaemonTest {
 protected:
  void SetUp() override { ASSERT_TRUE(etcd_.Start()); }

  // How nodes know each other and their clients.
  virtual std::vector<std::string> Trust() const { return {"--insecure"}; }
  std::vector<std::string> ClusterArguments(const std::string& id, Millis lease) const {
    std::vector<std::string> arguments = {
        "--cluster",   absl::StrCat("etcd://", etcd_.address().ToString()),
        "--listen",    listen_,
        "--node-id",   id,
        "--lease-ttl", absl::StrCat(lease.count() / 1000, "s"),
        "--metrics",   "127.0.0.1:0"};
    for (const std::string& argument : Trust()) arguments.push_back(argument);
    return arguments;
  }
  // A daemon with a socket of its own, which a later one of the same name has again.
  void StartNode(const std::string& name, const std::string& id, Millis lease,
                 const std::vector<std::string>& more = {}) {
    ClusterDaemon& node = nodes_[name];
    node = ClusterDaemon();
    const std::string path = directory_ / (name + "/kvmill.sock");
    std::vector<std::string> arguments = {"--socket", path,       "--host-bytes",
                                          "64MiB",    "--device", "host"};
    for (const std::string& argument : ClusterArguments(id, lease)) arguments.push_back(argument);
    arguments.insert(arguments.end(), more.begin(), more.end());
    node.process = std::make_unique<DaemonProcess>(DaemonBinary(), arguments);
    node.ready = node.process->WaitReady();
    ASSERT_FALSE(node.ready.is_null()) << node.process->standard_error();
    node.client = Connect("unix:" + path);
    ASSERT_NE(node.client, nullptr);
  }
  void StartNode(const std::string& name, Millis lease) { StartNode(name, name, lease); }
  void KillNode(const std::string& name) {
    nodes_[name].process->Signal(SIGKILL);
    nodes_[name].process->WaitExit();
  }

  static ClusterStatus StatusOf(Client& client) {
    const absl::StatusOr<ClusterStatus> status = client.Cluster();
    EXPECT_TRUE(status.ok()) << status.status();
    return status.ok() ? *status : ClusterStatus();
  }
  ClusterStatus StatusOf(const std::string& name) { return StatusOf(*nodes_.at(name).client); }
  // "a b-": a dash for one that drains.
  static std::string MembersIn(const ClusterStatus& status) {
    std::string ids;
    for (const ClusterMember& member : status.members) {
      absl::StrAppend(&ids, ids.empty() ? "" : " ", member.id, member.draining ? "-" : "");
    }
    return ids;
  }
  std::string MembersOf(const std::string& name) { return MembersIn(StatusOf(name)); }
  // The time until it is so; the test fails when that is longer than `limit`.
  static Millis Until(Millis limit, const std::function<bool()>& is_so) {
    const auto begin = std::chrono::steady_clock::now();
    while (!is_so()) {
      if (std::chrono::steady_clock::now() - begin > limit) {
        ADD_FAILURE() << "not within " << limit.count() << " ms";
        break;
      }
      std::this_thread::sleep_for(Millis(20));
    }
    return std::chrono::duration_cast<Millis>(std::chrono::steady_clock::now() - begin);
  }
  static void Until(const std::function<bool()>& is_so) { Until(kSoon, is_so); }
  std::string Metrics(const std::string& name) {
    const HostPort address = *ParseHostPort(nodes_.at(name).ready["metrics"].get<std::string>());
    httplib::Client http(address.host, address.port);
    const auto answer = http.Get("/metrics");
    return answer ? answer->body : "";
  }

  EtcdProcess etcd_;
  std::string listen_ = "127.0.0.1:0";  // Of nodes that are started from now on.
  std::map<std::string, ClusterDaemon> nodes_;
};

}  // namespace kvmill::testing

#endif  // KVMILL_TESTS_CLUSTER_CLUSTER_FIXTURE_H_
