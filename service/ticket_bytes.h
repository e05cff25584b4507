// Memory that tickets take, which cannot be evicted: of all together, and of each tenant.
#ifndef KVMILL_SERVICE_TICKET_BYTES_H_
#define KVMILL_SERVICE_TICKET_BYTES_H_

#include <cstdint>
#include <map>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "storage/core/mutex.h"

namespace kvmill {

// Thread-safe.
class TicketBytes {
 public:
  // `what`: who has them, in refusals.
  TicketBytes(std::string what, std::uint64_t bytes_max)
      : what_(std::move(what)), bytes_max_(bytes_max) {}

  // `tenant`: empty for the daemons' own, who may take all; another one may take the share of
  // kTicketShares, and is told of that alone, not of what others have. RESOURCE_EXHAUSTED names the
  // limit.
  absl::Status Take(const std::string& tenant, std::uint64_t bytes);
  void GiveBack(const std::string& tenant, std::uint64_t bytes);

  std::uint64_t bytes() const {
    MutexLock lock(mu_);
    return bytes_;
  }

 private:
  const std::string what_;
  const std::uint64_t bytes_max_;
  mutable Mutex mu_;
  std::uint64_t bytes_ ABSL_GUARDED_BY(mu_) = 0;
  std::map<std::string, std::uint64_t> shares_ ABSL_GUARDED_BY(mu_);  // By tenant, where not 0.
};

}  // namespace kvmill

#endif  // KVMILL_SERVICE_TICKET_BYTES_H_
