#include "service/held_announcer.h"

#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "storage/core/mutex.h"

namespace kvmill {

struct HeldAnnouncer::State {
  State(Loop& loop_of_node, std::function<void(const Announcement&)> set_on_loop)
      : loop(loop_of_node), set(std::move(set_on_loop)) {}

  Loop& loop;
  std::function<void(const Announcement&)> set;  // Of the loop; empty: the end.
  Mutex mu;
  // By anchor hash.
  absl::flat_hash_map<std::uint64_t, RunSketch> waiting ABSL_GUARDED_BY(mu);
  bool posted ABSL_GUARDED_BY(mu) = false;  // A task will take some.
};

HeldAnnouncer::HeldAnnouncer(Loop& loop, std::function<void(const Announcement&)> set)
    : state_(std::make_shared<State>(loop, std::move(set))) {}

HeldAnnouncer::~HeldAnnouncer() { state_->set = nullptr; }

void HeldAnnouncer::Changed(absl::Span<const Announcement> changes) {
  {
    MutexLock lock(state_->mu);
    for (const Announcement& change : changes) state_->waiting[change.anchor_hash] = change.sketch;
    if (state_->waiting.empty() || std::exchange(state_->posted, true)) return;
  }
  state_->loop.Post([state = state_] { Deliver(state); });
}

void HeldAnnouncer::Deliver(const std::shared_ptr<State>& state) {
  if (!state->set) return;
  std::vector<Announcement> taken;
  bool more = false;
  {
    MutexLock lock(state->mu);
    auto& waiting = state->waiting;
    for (auto it = waiting.begin(); it != waiting.end() && taken.size() < kAtOnce;) {
      taken.push_back({it->first, it->second});
      waiting.erase(it++);
    }
    more = !waiting.empty();
    state->posted = more;
    // What a walk left behind is not kept for the next one; and an iteration over what is mostly
    // empty would be slow.
    if (!more) waiting = {};
  }
  for (const Announcement& change : taken) state->set(change);
  if (more) state->loop.Post([state] { Deliver(state); });
}

std::size_t HeldAnnouncer::waiting() const {
  MutexLock lock(state_->mu);
  return state_->waiting.size();
}

}  // namespace kvmill
