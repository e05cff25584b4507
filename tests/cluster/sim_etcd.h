// The registry of a simulated cluster, as its servers see it: one history of entries, leases and
// watches, with what happens to a real one: killed, stopped, compacted, restored from a backup or
// from nothing.
#ifndef KVMILL_TESTS_CLUSTER_SIM_ETCD_H_
#define KVMILL_TESTS_CLUSTER_SIM_ETCD_H_

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "service/cluster/registry.h"
#include "tests/cluster/sim_network.h"

namespace kvmill {

class SimEtcd {
 public:
  using Machine = SimNetwork::Machine;
  using Revision = Registry::Revision;
  using LeaseId = Registry::LeaseId;
  using WatchId = std::uint64_t;

  SimEtcd(SimEvents& events, SimNetwork& network, Machine machine)
      : events_(events), network_(network), machine_(machine) {
    Begin();
  }

  Machine machine() const { return machine_; }
  std::int64_t now() const { return events_.now(); }
  bool running() const { return state_ == State::kRunning; }

  // Runs `request` here when it arrives from `from`: later when it is stopped, never when it dies
  // first. `refused` runs at the sender when nobody listens.
  void Receive(Machine from, std::function<void()> request, std::function<void()> refused);

  // kill -9, and start: what was written is still there, leases begin anew, watches are gone.
  void Kill();
  void Start();
  // SIGSTOP and SIGCONT. Leases do not end while it is stopped; those that are due end then.
  void Stop();
  void Continue();
  // Forgets the history up to now, but for the last `keep` revisions.
  void Compact(Revision keep);
  // Killed, and started from nothing: another cluster, revision 1.
  void Wipe();
  // Killed, and started from what Backup saved: the revision falls. Another cluster or not.
  void Backup();
  void Restore(bool same_cluster);
  // Every lease ends now.
  void ExpireAll();

  // What it does when a request arrives. Called from Receive's `request` only.
  absl::StatusOr<Registry::Lease> Grant(std::int64_t seconds);
  absl::StatusOr<Registry::Lease> KeepAlive(LeaseId lease);
  absl::StatusOr<Registry::Header> Revoke(LeaseId lease);
  absl::StatusOr<Registry::Written> Put(const Registry::PutRequest& request);
  absl::StatusOr<Registry::Written> Delete(const std::string& key, Revision expected);
  Registry::Listing List(const std::string& prefix) const;

  // One message of a watch, in order. Exactly one of them is set.
  struct WatchMessage {
    enum class Kind { kStarted, kEvents, kCompacted, kBroken, kAlive } kind = Kind::kAlive;
    Registry::Header header;
    std::vector<Registry::Event> events;
    Revision compacted = 0;
  };
  // `message` runs at machine `to`, in order, late when the network says so, until CloseWatch or
  // the server's death.
  WatchId OpenWatch(Machine to, const std::string& prefix, Revision from_revision,
                    std::function<void(WatchMessage)> message);
  void CloseWatch(WatchId watch);
  // The watcher asks whether anyone is there: kAlive, or kBroken when it is not known here.
  void Ping(WatchId watch, Machine to, std::function<void(WatchMessage)> message);

  // What is true now, for invariants.
  Registry::Header header() const { return {cluster_id_, revision_}; }
  std::size_t lease_count() const { return data_.leases.size(); }
  std::size_t watch_count() const { return watches_.size(); }
  std::size_t entry_count() const { return data_.entries.size(); }

 private:
  enum class State { kRunning, kStopped, kDead };
  struct Lease {
    std::int64_t seconds = 0;
    std::int64_t ends = 0;
    std::set<std::string> keys;
  };
  struct Data {
    std::map<std::string, Registry::Entry> entries;
    std::map<LeaseId, Lease> leases;
  };
  struct Change {
    Revision revision = 0;
    std::int64_t time = 0;
    std::vector<Registry::Event> events;
  };
  struct Watch {
    Machine to = 0;
    std::string prefix;
    Revision next = 0;
    std::int64_t lag = 0;  // Its server is so much behind.
    std::function<void(WatchMessage)> message;
    // A stream: what is on its way, and when it comes at the earliest.
    std::deque<std::pair<std::int64_t, WatchMessage>> under_way;
    bool closed = false;
  };

  void Begin();
  void EndConnections();
  void RenewAll();
  void ExpireDue();
  void ScheduleExpiry();
  void EndLease(LeaseId id);
  Registry::Written Conflict(const std::string& key) const;
  void Commit(std::vector<Registry::Event> events);
  void Feed(const std::shared_ptr<Watch>& watch);
  void SendTo(const std::shared_ptr<Watch>& watch, WatchMessage message, std::int64_t delay);
  void Deliver(const std::shared_ptr<Watch>& watch);

  SimEvents& events_;
  SimNetwork& network_;
  const Machine machine_;
  State state_ = State::kRunning;
  std::uint64_t cluster_id_ = 0;
  Revision revision_ = 1;
  Revision compacted_ = 0;  // The history up to it is gone.
  Data data_;
  std::deque<Change> history_;
  struct Saved {
    std::uint64_t cluster_id = 0;
    Revision revision = 0;
    Data data;
  };
  Saved backup_;
  std::map<WatchId, std::shared_ptr<Watch>> watches_;  // Shared with messages on their way.
  std::vector<std::function<void()>> waiting_;         // Requests that arrived while stopped.
  WatchId next_watch_ = 1;
  LeaseId next_lease_ = 1;
  SimEvents::EventId expiry_ = 0;
};

}  // namespace kvmill

#endif  // KVMILL_TESTS_CLUSTER_SIM_ETCD_H_
