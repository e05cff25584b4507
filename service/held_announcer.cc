#include "service/held_announcer.h"

#include <cstddef>
#include <deque>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "storage/core/mutex.h"

namespace kvmill {

struct HeldAnnouncer::State {
  State(Loop& loop_of_node, std::function<void(const Announcement&)> set_on_loop,
        std::function<void(const HeldTable::Left&)> gone_on_loop)
      : loop(loop_of_node), set(std::move(set_on_loop)), gone(std::move(gone_on_loop)) {}

  Loop& loop;
  std::function<void(const Announcement&)> set;  // Of the loop; empty: the end.
  const std::function<void(const HeldTable::Left&)> gone;
  Mutex mu;
  // By anchor hash.
  absl::flat_hash_map<std::uint64_t, RunSketch> waiting ABSL_GUARDED_BY(mu);
  std::deque<HeldTable::Left> left ABSL_GUARDED_BY(mu);
  bool posted ABSL_GUARDED_BY(mu) = false;  // A task will take some.
};

HeldAnnouncer::HeldAnnouncer(Loop& loop, std::function<void(const Announcement&)> set,
                             std::function<void(const HeldTable::Left&)> gone)
    : state_(std::make_shared<State>(loop, std::move(set), std::move(gone))) {}

HeldAnnouncer::~HeldAnnouncer() { state_->set = nullptr; }

void HeldAnnouncer::Changed(absl::Span<const Announcement> changes,
                            absl::Span<const HeldTable::Left> left) {
  {
    MutexLock lock(state_->mu);
    for (const Announcement& change : changes) state_->waiting[change.anchor_hash] = change.sketch;
    state_->left.insert(state_->left.end(), left.begin(), left.end());
    if (state_->left.size() > kLeftMax) {
      const std::size_t too_many = state_->left.size() - kLeftMax;
      state_->left.erase(state_->left.begin(),
                         state_->left.begin() + static_cast<std::ptrdiff_t>(too_many));
    }
    const bool nothing = state_->waiting.empty() && state_->left.empty();
    if (nothing || std::exchange(state_->posted, true)) return;
  }
  state_->loop.Post([state = state_] { Deliver(state); });
}

void HeldAnnouncer::Deliver(const std::shared_ptr<State>& state) {
  if (!state->set) return;
  std::vector<Announcement> taken;
  std::vector<HeldTable::Left> left;
  bool more = false;
  {
    MutexLock lock(state->mu);
    auto& waiting = state->waiting;
    for (auto it = waiting.begin(); it != waiting.end() && taken.size() < kAtOnce;) {
      taken.push_back({it->first, it->second});
      waiting.erase(it++);
    }
    while (!state->left.empty() && left.size() < kAtOnce) {
      left.push_back(state->left.front());
      state->left.pop_front();
    }
    more = !waiting.empty() || !state->left.empty();
    state->posted = more;
    // What a walk left behind is not kept for the next one; and an iteration over what is mostly
    // empty would be slow.
    if (waiting.empty()) waiting = {};
  }
  for (const HeldTable::Left& block : left) state->gone(block);
  for (const Announcement& change : taken) state->set(change);
  if (more) state->loop.Post([state] { Deliver(state); });
}

std::size_t HeldAnnouncer::waiting() const {
  MutexLock lock(state_->mu);
  return state_->waiting.size();
}

}  // namespace kvmill
