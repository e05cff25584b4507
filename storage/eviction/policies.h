// The policies that CreateEvictionPolicy knows. Internal to storage/eviction; options are valid.
#ifndef KVMILL_STORAGE_EVICTION_POLICIES_H_
#define KVMILL_STORAGE_EVICTION_POLICIES_H_

#include <cstddef>
#include <memory>

#include "storage/eviction/policy.h"

namespace kvmill {

// Rounded to the nearest.
inline std::size_t BytesPerEntry(std::size_t bytes, std::uint32_t entries_max) {
  return (bytes + entries_max / 2) / entries_max;
}

std::unique_ptr<EvictionPolicy> NewReturnsPolicy(const EvictionPolicy::Options& options);
std::unique_ptr<EvictionPolicy> NewLruPolicy(const EvictionPolicy::Options& options);
std::unique_ptr<EvictionPolicy> NewArcPolicy(const EvictionPolicy::Options& options);
std::unique_ptr<EvictionPolicy> NewTinyLfuPolicy(const EvictionPolicy::Options& options);
std::unique_ptr<EvictionPolicy> NewS3FifoPolicy(const EvictionPolicy::Options& options);
std::unique_ptr<EvictionPolicy> NewSievePolicy(const EvictionPolicy::Options& options);

}  // namespace kvmill

#endif  // KVMILL_STORAGE_EVICTION_POLICIES_H_
