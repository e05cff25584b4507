// Collects what became of the (block, layer group)s of one Store. Internal to client/.
#ifndef KVMILL_CLIENT_STORE_RESULTS_H_
#define KVMILL_CLIENT_STORE_RESULTS_H_

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "client/client.h"
#include "kvmill/v1/cache.pb.h"

namespace kvmill {

// Not thread-safe.
class StoreResults {
 public:
  StoreResults(std::size_t block_count, std::size_t group_count);

  // Whether the result of this (block, layer group) is known; also true for one that does not
  // exist.
  bool closed(std::uint32_t block, std::uint32_t group) const;
  // The first one of a (block, layer group) counts.
  void Add(const v1::StoreResult& result);
  StoreResult Take() { return std::move(result_); }

 private:
  std::size_t group_count_;
  StoreResult result_;
  std::vector<std::uint32_t> open_groups_;  // Per block: results still due.
  std::vector<bool> closed_;                // Per (block, group).
};

}  // namespace kvmill

#endif  // KVMILL_CLIENT_STORE_RESULTS_H_
