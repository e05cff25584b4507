// Brings what HeldRuns says to the loop, for the Announcer and the Replicator.
//
// Sketches that changed wait here until the loop takes them, some at a time, so that the walk of a
// large store neither fills its queue nor keeps it from anything else. Of an anchor only the last
// one waits. Of blocks that left kLeftMax wait, the last ones.
#ifndef KVMILL_SERVICE_HELD_ANNOUNCER_H_
#define KVMILL_SERVICE_HELD_ANNOUNCER_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>

#include "absl/types/span.h"
#include "service/cluster/held_table.h"
#include "service/cluster/loop.h"
#include "service/cluster/peers.h"

namespace kvmill {

class HeldAnnouncer {
 public:
  static constexpr std::size_t kAtOnce = 1024;  // Sketches, and blocks, a task of the loop.
  static constexpr std::size_t kLeftMax = 1 << 16;

  // Run on the loop: Announcer::Set, and before it what left, Replicator::Evicted. The loop
  // outlives this.
  HeldAnnouncer(Loop& loop, std::function<void(const Announcement&)> set,
                std::function<void(const HeldTable::Left&)> gone);
  // On the loop, or when it has stopped; nobody calls Changed any more. Neither runs any more.
  ~HeldAnnouncer();
  HeldAnnouncer(const HeldAnnouncer&) = delete;
  HeldAnnouncer& operator=(const HeldAnnouncer&) = delete;

  // Thread-safe: a HeldRuns::Listener.
  void Changed(absl::Span<const Announcement> changes, absl::Span<const HeldTable::Left> left = {});

  std::size_t waiting() const;  // Thread-safe.

 private:
  struct State;
  static void Deliver(const std::shared_ptr<State>& state);

  // Shared with what was posted, which may run, or be dropped, when this is gone.
  const std::shared_ptr<State> state_;
};

}  // namespace kvmill

#endif  // KVMILL_SERVICE_HELD_ANNOUNCER_H_
