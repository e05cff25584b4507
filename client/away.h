// A daemon that is away, as WhenAway::kMiss has it: what its answers are replaced by, and which
// calls still look for it. Internal to client/.
#ifndef KVMILL_CLIENT_AWAY_H_
#define KVMILL_CLIENT_AWAY_H_

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "client/client.h"
#include "client/mapped_blocks.h"
#include "storage/core/block_key.h"
#include "storage/core/mutex.h"

namespace kvmill {

// Thread-safe. While the daemon is away one call after a pause looks for it, and the others need
// not wait for what that one finds.
class Away {
 public:
  using Now = std::chrono::steady_clock::time_point (*)();
  // `local`: through its socket, where a token that is refused is that of an earlier daemon.
  explicit Away(bool local, Now now = &std::chrono::steady_clock::now) : local_(local), now_(now) {}

  struct Look {
    absl::Status why;       // Not OK: the call is not to be made, for the daemon is away.
    bool is_probe = false;  // It is the one that looks.
  };
  Look Ask();
  // What a call that was made ended with. `reads`: it is one that a daemon serves as long as it
  // lives. (Stores end with UNAVAILABLE as soon as it drains.) True: the daemon answered.
  bool Note(const absl::Status& status, const Look& look, bool reads);
  // The call found no daemon, or lost it, or what it relied on was an earlier daemon's.
  bool IsAway(const absl::Status& status) const;

 private:
  const bool local_;
  const Now now_;
  Mutex mu_;
  absl::Status why_ ABSL_GUARDED_BY(mu_);  // OK: it is there, as far as is known.
  std::chrono::milliseconds pause_ ABSL_GUARDED_BY(mu_){0};
  std::chrono::steady_clock::time_point next_look_ ABSL_GUARDED_BY(mu_);
};

// Results of calls that found no daemon: all misses, nothing stored.
LookupResult MissedLookup(const absl::Status& why);
FetchResult MissedFetch(std::size_t key_count, const absl::Status& why);
StoreResult DroppedStore(std::size_t block_count, const absl::Status& why);
std::unique_ptr<MappedBlocks> MissedMap(const ClientNamespace& ns, absl::Span<const BlockKey> keys,
                                        std::uint32_t lease_ms, const absl::Status& why);

// The same of single blocks whose statuses say that the daemon was lost meanwhile.
void MissLostBlocks(const Away& away, FetchResult* result);
void DropLostBlocks(const Away& away, StoreResult* result);

}  // namespace kvmill

#endif  // KVMILL_CLIENT_AWAY_H_
