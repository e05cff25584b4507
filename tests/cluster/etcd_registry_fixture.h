// A registry that is connected to a real etcd, with calls that wait for their answers.
#ifndef KVMILL_TESTS_CLUSTER_ETCD_REGISTRY_FIXTURE_H_
#define KVMILL_TESTS_CLUSTER_ETCD_REGISTRY_FIXTURE_H_

#include <gmock/gmock.h>

#include <chrono>
#include <condition_variable>
#include <future>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "service/etcd/etcd_registry.h"
#include "service/thread_loop.h"
#include "tests/cluster/etcd_process.h"

namespace kvmill::testing {

using Millis = std::chrono::milliseconds;
inline constexpr std::int64_t kMs = 1'000'000;
// Of what must come. A busy machine, or its disk, may be slow.
inline constexpr Millis kMustCome{30'000};

// What a watch told, readable from the test's thread. After its end it hears nothing more.
class Watcher {
 public:
  Watcher() = default;
  ~Watcher() {
    const std::lock_guard<std::mutex> lock(line_->mu);
    line_->hears = false;
  }

  struct Change {
    std::string key;
    std::string value;  // "-" for a deletion.
    std::int64_t revision = 0;
    friend bool operator==(const Change&, const Change&) = default;
  };

  Registry::WatchCalls Calls() {
    Registry::WatchCalls calls;
    calls.started = [this, line = line_](const Registry::Header& header) {
      Note(*line, [&] { started = header; });
    };
    calls.events = [this, line = line_](const std::vector<Registry::Event>& events) {
      Note(*line, [&] {
        for (const Registry::Event& event : events) {
          changes.push_back(
              {event.entry.key, event.deleted ? "-" : event.entry.value, event.entry.mod_revision});
        }
      });
    };
    calls.compacted = [this, line = line_](Registry::Revision revision) {
      Note(*line, [&] {
        EXPECT_FALSE(ended) << "ended twice";
        ended = true;
        compacted = revision;
      });
    };
    calls.broken = [this, line = line_](const absl::Status& why) {
      Note(*line, [&] {
        EXPECT_FALSE(ended) << "ended twice";
        ended = true;
        broken = why;
      });
    };
    return calls;
  }

  template <typename Condition>
  bool WaitFor(Condition condition, Millis timeout = kMustCome) {
    std::unique_lock<std::mutex> lock(line_->mu);
    return changed_.wait_for(lock, timeout, [&] { return condition(*this); });
  }
  bool WaitStarted() {
    return WaitFor([](const Watcher& w) { return w.started.has_value(); });
  }
  bool WaitEnded(Millis timeout = kMustCome) {
    return WaitFor([](const Watcher& w) { return w.ended; }, timeout);
  }
  bool WaitChanges(std::size_t count) {
    return WaitFor([count](const Watcher& w) { return w.changes.size() >= count; });
  }

  std::optional<Registry::Header> started;
  std::vector<Change> changes;
  bool ended = false;
  Registry::Revision compacted = 0;
  absl::Status broken;

 private:
  // Outlives the watcher, since a watch does.
  struct Line {
    std::mutex mu;
    bool hears = true;
  };
  template <typename Task>
  void Note(Line& line, Task task) {
    const std::lock_guard<std::mutex> lock(line.mu);
    if (!line.hears) return;
    EXPECT_FALSE(ended) << "told after its end";
    task();
    changed_.notify_all();
  }
  const std::shared_ptr<Line> line_ = std::make_shared<Line>();
  std::condition_variable changed_;
};

class EtcdRegistryTest : public ::testing::Test {
 protected:
  void SetUp() override { ASSERT_TRUE(etcd_.Start()); }
  void TearDown() override { Disconnect(); }

  void Connect(EtcdOptions options) {
    Disconnect();
    auto made = EtcdRegistry::Create(options, loop_);
    ASSERT_TRUE(made.ok()) << made.status();
    registry_ = *std::move(made);
  }
  void Connect() {
    EtcdOptions options;
    options.servers = {etcd_.address()};
    Connect(options);
  }
  void Disconnect() {
    if (registry_ != nullptr) loop_.Run([this] { registry_.reset(); });
  }

  // Starts a call and waits for its answer, which must come.
  template <typename Answer, typename Start>
  absl::StatusOr<Answer> Await(Start start, Millis deadline) {
    // Of a call that never answers, the promise is left to it.
    const auto answer = std::make_shared<std::promise<absl::StatusOr<Answer>>>();
    std::future<absl::StatusOr<Answer>> future = answer->get_future();
    const auto begin = std::chrono::steady_clock::now();
    loop_.Run([&] {
      start(loop_.clock().MonotonicNanos() + deadline.count() * kMs,
            [answer](absl::StatusOr<Answer> result) { answer->set_value(std::move(result)); });
    });
    if (future.wait_for(deadline + kMustCome) != std::future_status::ready) {
      ADD_FAILURE() << "no answer";
      return absl::InternalError("no answer");
    }
    took_ = std::chrono::duration_cast<Millis>(std::chrono::steady_clock::now() - begin);
    return future.get();
  }

  absl::StatusOr<Registry::Lease> Grant(std::int64_t seconds, Millis deadline = kMustCome) {
    return Await<Registry::Lease>(
        [&](std::int64_t at, auto done) { registry_->Grant(seconds, at, done); }, deadline);
  }
  absl::StatusOr<Registry::Lease> KeepAlive(Registry::LeaseId lease, Millis deadline = kMustCome) {
    return Await<Registry::Lease>(
        [&](std::int64_t at, auto done) { registry_->KeepAlive(lease, at, done); }, deadline);
  }
  absl::StatusOr<Registry::Header> Revoke(Registry::LeaseId lease) {
    return Await<Registry::Header>(
        [&](std::int64_t at, auto done) { registry_->Revoke(lease, at, done); }, kMustCome);
  }
  absl::StatusOr<Registry::Written> Put(const std::string& key, const std::string& value,
                                        Registry::LeaseId lease, Registry::Revision expected = 0,
                                        Millis deadline = kMustCome) {
    return Await<Registry::Written>(
        [&](std::int64_t at, auto done) {
          registry_->Put({key, value, lease, expected}, at, done);
        },
        deadline);
  }
  absl::StatusOr<Registry::Written> Delete(const std::string& key, Registry::Revision expected) {
    return Await<Registry::Written>(
        [&](std::int64_t at, auto done) { registry_->Delete(key, expected, at, done); }, kMustCome);
  }
  absl::StatusOr<Registry::Listing> List(const std::string& prefix = "/t/",
                                         Millis deadline = kMustCome) {
    return Await<Registry::Listing>(
        [&](std::int64_t at, auto done) { registry_->List(prefix, at, done); }, deadline);
  }
  // List until it succeeds.
  absl::StatusOr<Registry::Listing> ListAgain(const std::string& prefix = "/t/") {
    absl::StatusOr<Registry::Listing> listing = List(prefix);
    for (int i = 0; i < 100 && !listing.ok(); ++i) {
      std::this_thread::sleep_for(Millis(50));
      listing = List(prefix);
    }
    return listing;
  }
  Registry::CallId Watch(Watcher* watcher, Registry::Revision from,
                         Millis silence = Millis(10'000)) {
    Registry::CallId id = 0;
    loop_.Run([&] { id = registry_->Watch("/t/", from, silence.count() * kMs, watcher->Calls()); });
    return id;
  }
  void Cancel(Registry::CallId id) {
    loop_.Run([&] { registry_->Cancel(id); });
  }

  EtcdProcess etcd_;
  ThreadLoop loop_{SystemClock()};
  std::unique_ptr<EtcdRegistry> registry_;
  Millis took_{0};  // By the last Await.
};

}  // namespace kvmill::testing

#endif  // KVMILL_TESTS_CLUSTER_ETCD_REGISTRY_FIXTURE_H_
