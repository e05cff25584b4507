// What is remembered of the last so many things, each known by a hash. Not thread-safe.
#ifndef KVMILL_SERVICE_CLUSTER_RECENT_H_
#define KVMILL_SERVICE_CLUSTER_RECENT_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <utility>

#include "absl/container/flat_hash_map.h"

namespace kvmill {

template <typename Value>
class Recent {
 public:
  // `max` of them at most, one that was put again counts twice for a while.
  explicit Recent(std::size_t max) : max_(max) {}

  // In place of what was known of it.
  void Put(std::uint64_t hash, Value value) {
    values_[hash] = {++number_, std::move(value)};
    order_.emplace_back(number_, hash);
    if (order_.size() <= max_) return;
    const auto [number, oldest] = order_.front();
    order_.pop_front();
    const auto found = values_.find(oldest);
    if (found != values_.end() && found->second.first == number) values_.erase(found);
  }

  // Null: nothing is known. Until the next Put.
  const Value* Find(std::uint64_t hash) const {
    const auto found = values_.find(hash);
    return found == values_.end() ? nullptr : &found->second.second;
  }

 private:
  const std::size_t max_;
  std::uint64_t number_ = 0;  // Of the last Put.
  absl::flat_hash_map<std::uint64_t, std::pair<std::uint64_t, Value>> values_;
  std::deque<std::pair<std::uint64_t, std::uint64_t>> order_;  // Numbers and hashes.
};

}  // namespace kvmill

#endif  // KVMILL_SERVICE_CLUSTER_RECENT_H_
