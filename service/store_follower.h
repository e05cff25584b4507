// A thread that keeps an account of what a store has, some ten milliseconds behind it.
//
// The store tells that something happened to a block; what it told waits in a bounded queue for the
// thread, which gathers for a moment and hands it to the account, which looks in the store what is
// so now. When the queue is full notices are dropped and the store is walked: the account is shown
// everything that is there, and then looks at what it has beyond that. It ends up right either way,
// since whatever is looked up is entered before anything else is looked up.
#ifndef KVMILL_SERVICE_STORE_FOLLOWER_H_
#define KVMILL_SERVICE_STORE_FOLLOWER_H_

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <thread>
#include <utility>
#include <vector>

#include "absl/types/span.h"
#include "storage/core/mutex.h"
#include "storage/tiered_store.h"

namespace kvmill {

// Of a StoreFollower, on whose thread all of this is called: one after the other, no lock held.
template <typename Notice>
class StoreAccount {
 public:
  // Before other work, and at least once in idle_max.
  virtual void Woken() {}

  // What happened since, in order; at most kNoticesAtOnce. Looks.
  virtual void Look(absl::Span<const Notice> notices) = 0;

  // A walk: everything is Found, in steps, and what is not may be gone, or have come meanwhile.
  // Look is called between the steps. A walk that Stop ends just stops.
  virtual void BeginWalk() = 0;
  virtual void Found(const BlockId& id, const TieredStore::HeldBlock& block) = 0;
  virtual void EndStep() = 0;
  // Looks at some of what was not found. False: there is no more.
  virtual bool SweepSome() = 0;
  virtual void EndWalk() {}

 protected:
  ~StoreAccount() = default;
};

// Thread-safe, but for Start and Stop, which are not called at the same time.
template <typename Notice>
class StoreFollower {
 public:
  static constexpr std::size_t kNoticesAtOnce = 256;

  struct Options {
    std::size_t queue_max = 16384;  // Notices, twice.
    // How long notices are gathered, so that the thread is not woken for each.
    std::chrono::milliseconds gather{10};
    std::chrono::milliseconds idle_max = std::chrono::hours(24);
  };

  StoreFollower(const Options& options, StoreAccount<Notice>& account)
      : options_(options), account_(account) {}
  ~StoreFollower() { Stop(); }
  StoreFollower(const StoreFollower&) = delete;
  StoreFollower& operator=(const StoreFollower&) = delete;

  // Once.
  void Start(const TieredStore& store) {
    store_ = &store;
    thread_ = std::thread([this] { Work(); });
  }
  // The account is not called any more. Idempotent.
  void Stop() {
    {
      MutexLock lock(mu_);
      stopping_ = true;
    }
    work_.NotifyAll();
    settled_.NotifyAll();
    if (thread_.joinable()) thread_.join();
  }

  // A short lock, which nobody holds while working.
  void Push(Notice notice) {
    {
      MutexLock lock(mu_);
      if (queue_.size() >= options_.queue_max) {
        ++stats_.dropped;
        walk_due_ = true;  // There is work already.
        return;
      }
      queue_.push_back(std::move(notice));
      if (queue_.size() > 1) return;
    }
    work_.NotifyOne();
  }
  void PushWalk() {
    {
      MutexLock lock(mu_);
      walk_due_ = true;
    }
    work_.NotifyOne();
  }

  struct Stats {
    std::uint64_t walks = 0;    // Of the whole store.
    std::uint64_t dropped = 0;  // Notices that found the queue full.
  };
  Stats stats() const {
    MutexLock lock(mu_);
    return stats_;
  }

  // Returns when the account knows all that was pushed before, or Stop was called. After Start.
  void WaitSettled() const {
    MutexLock lock(mu_);
    while (!Settled()) settled_.Wait(mu_);
  }
  // The same, but does not wait for what is pushed meanwhile. False: not within `limit`, as while
  // a large store is walked.
  bool CatchUp(std::chrono::nanoseconds limit) const {
    const auto until = std::chrono::steady_clock::now() + limit;
    MutexLock lock(mu_);
    const std::uint64_t round = rounds_begun_ + 1;  // One that takes all that waits now.
    while (!Settled() && rounds_done_ < round) {
      const auto left = until - std::chrono::steady_clock::now();
      if (left <= std::chrono::nanoseconds(0)) return false;
      settled_.WaitFor(mu_, left);
    }
    return true;
  }

 private:
  bool Settled() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    return stopping_ || (idle_ && queue_.empty() && !walk_due_);
  }

  void Work() {
    while (WaitForWork()) {
      account_.Woken();
      if (TakeWalk()) Walk();
      Drain();
    }
  }

  // Until there is something to do, and a little longer. False: Stop was called.
  bool WaitForWork() {
    MutexLock lock(mu_);
    rounds_done_ = rounds_begun_;
    settled_.NotifyAll();
    bool woken = true;
    while (woken && !stopping_ && !walk_due_ && queue_.empty()) {
      idle_ = true;
      settled_.NotifyAll();
      woken = work_.WaitFor(mu_, options_.idle_max);
    }
    idle_ = false;
    const auto until = std::chrono::steady_clock::now() + options_.gather;
    for (auto left = options_.gather; woken && !stopping_ && left.count() > 0;) {
      work_.WaitFor(mu_, left);
      left = std::chrono::ceil<std::chrono::milliseconds>(until - std::chrono::steady_clock::now());
    }
    ++rounds_begun_;
    return !stopping_;
  }

  bool TakeWalk() {
    MutexLock lock(mu_);
    const bool walk = std::exchange(walk_due_, false);
    stats_.walks += walk;
    return walk;
  }

  void Walk() {
    account_.BeginWalk();
    TieredStore::WalkCursor cursor;
    for (bool more = true; more;) {
      more = store_->Walk(&cursor, [this](const BlockId& id, const TieredStore::HeldBlock& block) {
        account_.Found(id, block);
      });
      account_.EndStep();
      Drain();
      if (stopping()) return;
    }
    while (account_.SweepSome()) {
      Drain();
      if (stopping()) return;
    }
    account_.EndWalk();
  }

  void Drain() {
    for (;;) {
      taken_.clear();
      {
        MutexLock lock(mu_);
        taken_.swap(queue_);
      }
      if (taken_.empty()) return;
      const absl::Span<const Notice> taken(taken_);
      for (std::size_t i = 0; i < taken.size(); i += kNoticesAtOnce) {
        account_.Look(taken.subspan(i, kNoticesAtOnce));
      }
    }
  }

  bool stopping() const {
    MutexLock lock(mu_);
    return stopping_;
  }

  const Options options_;
  StoreAccount<Notice>& account_;
  const TieredStore* store_ = nullptr;  // Constant once the thread is there.
  std::thread thread_;
  std::vector<Notice> taken_;  // Of the thread.

  mutable Mutex mu_;
  CondVar work_;
  mutable CondVar settled_;
  std::vector<Notice> queue_ ABSL_GUARDED_BY(mu_);
  bool walk_due_ ABSL_GUARDED_BY(mu_) = false;
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  bool idle_ ABSL_GUARDED_BY(mu_) = false;
  // Of what waits in the queue, and what is due by then: taken, and entered.
  std::uint64_t rounds_begun_ ABSL_GUARDED_BY(mu_) = 0;
  std::uint64_t rounds_done_ ABSL_GUARDED_BY(mu_) = 0;
  Stats stats_ ABSL_GUARDED_BY(mu_);
};

}  // namespace kvmill

#endif  // KVMILL_SERVICE_STORE_FOLLOWER_H_
