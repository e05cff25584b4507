#include "service/cluster/source_table.h"

#include <utility>

#include "service/cluster/anchor.h"

namespace kvmill {

void SourceTable::Remember(const Fingerprint& fingerprint, RunQuery query,
                           std::vector<RemoteLookup::Source> sources) {
  const auto run = std::make_shared<const Run>(
      Run{fingerprint, std::move(query), std::move(sources), clock_.MonotonicNanos()});
  order_.push_back(run);
  ordered_ += run->query.keys.size();
  for (std::size_t i = 0; i < run->query.keys.size(); ++i) {
    places_[AnchorHash(fingerprint, run->query.keys[i])] = {run, i};
  }
  const std::int64_t oldest = clock_.MonotonicNanos() - options_.life_nanos;
  while (!order_.empty() && (ordered_ > options_.blocks_max || order_.front()->since <= oldest)) {
    const RunPtr old = std::move(order_.front());
    order_.pop_front();
    ordered_ -= old->query.keys.size();
    for (const BlockKey& key : old->query.keys) {
      const auto found = places_.find(AnchorHash(old->fingerprint, key));
      if (found != places_.end() && found->second.run == old) places_.erase(found);
    }
  }
}

SourceTable::Found SourceTable::Find(const Fingerprint& fingerprint, const BlockKey& key) const {
  const auto found = places_.find(AnchorHash(fingerprint, key));
  if (found == places_.end()) return {};
  const auto& [run, index] = found->second;
  if (run->since <= clock_.MonotonicNanos() - options_.life_nanos) return {};
  if (run->fingerprint != fingerprint || !(run->query.keys[index] == key)) return {};
  return {run.get(), index};
}

void SourceTable::Forget(const Fingerprint& fingerprint, const BlockKey& key) {
  if (Find(fingerprint, key).run != nullptr) places_.erase(AnchorHash(fingerprint, key));
}

}  // namespace kvmill
