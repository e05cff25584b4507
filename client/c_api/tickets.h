// What of a redeem was told. Internal to client/c_api.
#ifndef KVMILL_CLIENT_C_API_TICKETS_H_
#define KVMILL_CLIENT_C_API_TICKETS_H_

#include <cstdint>
#include <memory>
#include <set>
#include <vector>

#include "absl/types/span.h"
#include "client/ticket.h"
#include "storage/core/mutex.h"

namespace kvmill::c_api {

// The blocks of a redeem that runs, and which of them changed since somebody looked: who does not
// take events costs the latest state, and one event. Thread-safe.
class RedeemProgress {
 public:
  // Whether an event is due: none is in the queue.
  bool Update(absl::Span<const RedeemedBlock> blocks, absl::Span<const std::uint32_t> changed);
  // As the event is taken.
  void Take(std::vector<RedeemedBlock>* blocks, std::vector<std::uint32_t>* changed);

 private:
  Mutex mu_;
  std::vector<RedeemedBlock> blocks_ ABSL_GUARDED_BY(mu_);
  std::set<std::uint32_t> changed_ ABSL_GUARDED_BY(mu_);
  bool told_ ABSL_GUARDED_BY(mu_) = false;
};

// The value of a KVMILL_REDEEM_UPDATE.
struct RedeemNews {
  std::shared_ptr<RedeemProgress> progress;  // With the redeem.
  std::vector<RedeemedBlock> blocks;
  std::vector<std::uint32_t> changed;
};

}  // namespace kvmill::c_api

#endif  // KVMILL_CLIENT_C_API_TICKETS_H_
