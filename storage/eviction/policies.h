// The policies that CreateEvictionPolicy knows. Internal to storage/eviction; options are valid.
#ifndef KVMILL_STORAGE_EVICTION_POLICIES_H_
#define KVMILL_STORAGE_EVICTION_POLICIES_H_

#include <memory>

#include "storage/eviction/policy.h"

namespace kvmill {

std::unique_ptr<EvictionPolicy> NewReturnsPolicy(const EvictionPolicy::Options& options);
std::unique_ptr<EvictionPolicy> NewLruPolicy(const EvictionPolicy::Options& options);
std::unique_ptr<EvictionPolicy> NewArcPolicy(const EvictionPolicy::Options& options);
std::unique_ptr<EvictionPolicy> NewTinyLfuPolicy(const EvictionPolicy::Options& options);
std::unique_ptr<EvictionPolicy> NewS3FifoPolicy(const EvictionPolicy::Options& options);
std::unique_ptr<EvictionPolicy> NewSievePolicy(const EvictionPolicy::Options& options);

}  // namespace kvmill

#endif  // KVMILL_STORAGE_EVICTION_POLICIES_H_
