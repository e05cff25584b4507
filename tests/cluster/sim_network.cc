#include "tests/cluster/sim_network.h"

#include <utility>

namespace kvmill {

std::int64_t SimNetwork::Delay(Machine from, Machine to) {
  const std::int64_t most =
      events_.Chance(options_.late) ? options_.late_nanos : options_.delay_max_nanos;
  return events_.Uniform(options_.delay_min_nanos, most) + slow_[from] + slow_[to];
}

void SimNetwork::Send(Machine from, Machine to, std::function<void()> arrive) {
  if (!Reaches(from, to) || events_.Chance(options_.loss)) return;
  events_.After(Delay(from, to), [this, from, to, arrive = std::move(arrive)] {
    if (Reaches(from, to)) arrive();
  });
}

}  // namespace kvmill
