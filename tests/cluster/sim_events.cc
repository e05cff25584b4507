#include "tests/cluster/sim_events.h"

#include <algorithm>
#include <cmath>
#include <cstdio>

namespace kvmill {

SimEvents::EventId SimEvents::At(std::int64_t nanos, std::function<void()> event) {
  const EventId id = next_++;
  const std::int64_t time = std::max(nanos, now_);
  events_.emplace(Place{time, id}, std::move(event));
  times_.emplace(id, time);
  return id;
}

void SimEvents::Cancel(EventId event) {
  const auto found = times_.find(event);
  if (found == times_.end()) return;
  const auto place = events_.find({found->second, event});
  times_.erase(found);
  // What the event owned may cancel others as it is destroyed.
  const std::function<void()> destroyed = std::move(place->second);
  events_.erase(place);
}

void SimEvents::RunUntil(std::int64_t nanos, const std::function<void()>& after_each) {
  while (!events_.empty() && events_.begin()->first.first <= nanos) {
    const auto first = events_.begin();
    now_ = first->first.first;
    const std::function<void()> event = std::move(first->second);
    times_.erase(first->first.second);
    events_.erase(first);
    ++run_;
    event();
    after_each();
  }
  now_ = std::max(now_, nanos);
}

std::int64_t SimEvents::Uniform(std::int64_t low, std::int64_t high) {
  return low + static_cast<std::int64_t>(random_() % static_cast<std::uint64_t>(high - low + 1));
}

bool SimEvents::Chance(double probability) {
  return static_cast<double>(random_() >> 11) * 0x1p-53 < probability;
}

std::int64_t SimEvents::Exponential(std::int64_t mean_nanos) {
  const double u = (static_cast<double>(random_() >> 11) + 0.5) * 0x1p-53;
  return static_cast<std::int64_t>(-std::log(u) * static_cast<double>(mean_nanos)) + 1;
}

void SimEvents::Trace(const std::string& line) {
  if (trace_) std::printf("%12.6f %s\n", static_cast<double>(now_) / 1e9, line.c_str());
}

}  // namespace kvmill
