// Where blocks are, as lookups found out a while ago: whoever looks a prompt up fetches it next.
//
// Bounded and forgetful; what it says is as good as what peers said then. Lives on the loop.
#ifndef KVMILL_SERVICE_CLUSTER_SOURCE_TABLE_H_
#define KVMILL_SERVICE_CLUSTER_SOURCE_TABLE_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "service/cluster/peers.h"
#include "service/cluster/remote_lookup.h"
#include "storage/core/clock.h"

namespace kvmill {

class SourceTable {
 public:
  struct Options {
    std::size_t blocks_max = 65536;  // About 200 bytes each.
    std::int64_t life_nanos = 60'000'000'000;
  };
  // A run, or a part of one, as it was looked up. Bits of sources are places in query.keys.
  struct Run {
    Fingerprint fingerprint{};
    RunQuery query;
    std::vector<RemoteLookup::Source> sources;
    std::int64_t since = 0;
  };
  struct Found {
    const Run* run = nullptr;  // Null: nothing is known. Good until the next Remember.
    std::size_t index = 0;     // Of the block, in run->query.keys.
  };

  SourceTable(const Clock& clock, const Options& options) : clock_(clock), options_(options) {}

  // Replaces what was known of these blocks.
  void Remember(const Fingerprint& fingerprint, RunQuery query,
                std::vector<RemoteLookup::Source> sources);
  Found Find(const Fingerprint& fingerprint, const BlockKey& key) const;
  // It was not where it should have been.
  void Forget(const Fingerprint& fingerprint, const BlockKey& key);

  std::size_t blocks() const { return places_.size(); }

 private:
  using RunPtr = std::shared_ptr<const Run>;  // Of the queue and of the places of its blocks.
  struct Place {
    RunPtr run;
    std::size_t index = 0;
  };

  const Clock& clock_;
  const Options options_;
  // By the hash of namespace and key; which block it is says the run.
  absl::flat_hash_map<std::uint64_t, Place> places_;
  std::deque<RunPtr> order_;  // The oldest first.
  std::size_t ordered_ = 0;   // Blocks of all of order_.
};

}  // namespace kvmill

#endif  // KVMILL_SERVICE_CLUSTER_SOURCE_TABLE_H_
