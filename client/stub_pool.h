// Connections for calls that last: each takes one of the streams that a connection may have (128 at
// a daemon) until it ends, and what waits for a stream seems to have no answer. Internal to client/
// and service/.
#ifndef KVMILL_CLIENT_STUB_POOL_H_
#define KVMILL_CLIENT_STUB_POOL_H_

#include <cstddef>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "storage/core/mutex.h"

namespace kvmill {

// Stubs with a connection each, made when those before it have no room. Thread-safe.
template <typename Stub>
class StubPool {
 public:
  static constexpr long kCallsMax = 100;  // Of one connection.

  // `make`: a stub with a connection of its own, which is opened when it is first used.
  explicit StubPool(std::function<std::unique_ptr<Stub>()> make) : make_(std::move(make)) {}

  // For one call, which keeps it until it has ended.
  std::shared_ptr<Stub> Get() {
    MutexLock lock(mu_);
    for (const std::shared_ptr<Stub>& stub : stubs_) {
      // One is the pool's. It may be less by now.
      if (stub.use_count() <= kCallsMax) return stub;
    }
    return stubs_.emplace_back(make_());
  }
  std::size_t size() const {
    MutexLock lock(mu_);
    return stubs_.size();
  }

 private:
  const std::function<std::unique_ptr<Stub>()> make_;
  mutable Mutex mu_;
  std::vector<std::shared_ptr<Stub>> stubs_ ABSL_GUARDED_BY(mu_);
};

}  // namespace kvmill

#endif  // KVMILL_CLIENT_STUB_POOL_H_
