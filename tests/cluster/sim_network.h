// The network of a simulated cluster: messages between numbered machines that take their time, get
// lost, and do not pass where the network is parted.
#ifndef KVMILL_TESTS_CLUSTER_SIM_NETWORK_H_
#define KVMILL_TESTS_CLUSTER_SIM_NETWORK_H_

#include <cstdint>
#include <functional>
#include <vector>

#include "tests/cluster/sim_events.h"

namespace kvmill {

class SimNetwork {
 public:
  using Machine = std::size_t;

  struct Options {
    std::size_t machines = 0;
    std::int64_t delay_min_nanos = 50'000;  // Of one message, uniform.
    std::int64_t delay_max_nanos = 500'000;
    double late = 0.01;  // Share of messages that take up to late_nanos.
    std::int64_t late_nanos = 20 * kSimMs;
    double loss = 0;  // Share that never comes.
  };
  SimNetwork(SimEvents& events, const Options& options)
      : events_(events),
        options_(options),
        groups_(options.machines, 0),
        slow_(options.machines, 0) {}

  // Machines of different groups do not reach each other.
  void SetGroup(Machine machine, int group) { groups_[machine] = group; }
  int group(Machine machine) const { return groups_[machine]; }
  bool Reaches(Machine a, Machine b) const { return groups_[a] == groups_[b]; }
  // Every message from or to it takes so much longer.
  void SetSlow(Machine machine, std::int64_t nanos) { slow_[machine] = nanos; }
  bool loses() const { return options_.loss > 0; }
  bool slow(Machine machine) const { return slow_[machine] > 0; }

  // Runs `arrive` later, unless the message is lost, or the network is parted when it leaves or
  // would arrive. What a machine does with it is the receiver's part: `arrive` belongs to nobody.
  void Send(Machine from, Machine to, std::function<void()> arrive);
  std::int64_t Delay(Machine from, Machine to);

 private:
  SimEvents& events_;
  const Options options_;
  std::vector<int> groups_;
  std::vector<std::int64_t> slow_;
};

}  // namespace kvmill

#endif  // KVMILL_TESTS_CLUSTER_SIM_NETWORK_H_
