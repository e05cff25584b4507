// A registry that misleads its caller, to plant mistakes that the caller could have made.
#ifndef KVMILL_TESTS_CLUSTER_SIM_FAULTY_REGISTRY_H_
#define KVMILL_TESTS_CLUSTER_SIM_FAULTY_REGISTRY_H_

#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tests/cluster/sim_events.h"
#include "tests/cluster/sim_registry.h"

namespace kvmill {

class SimFaultyRegistry : public Registry {
 public:
  enum class Fault {
    kNone,
    kOneHistory,   // Another cluster id, or a revision that falls, is never seen.
    kLosesEvents,  // Some of what a watch tells is not heard.
  };
  SimFaultyRegistry(SimEvents& events, std::unique_ptr<SimRegistry> real, Fault fault)
      : events_(events), real_(std::move(real)), fault_(fault) {}

  CallId Grant(std::int64_t seconds, std::int64_t deadline, Done<Lease> done) override {
    return real_->Grant(seconds, deadline, Mislead<Lease>(std::move(done)));
  }
  CallId KeepAlive(LeaseId lease, std::int64_t deadline, Done<Lease> done) override {
    return real_->KeepAlive(lease, deadline, Mislead<Lease>(std::move(done)));
  }
  CallId Revoke(LeaseId lease, std::int64_t deadline, Done<Header> done) override {
    return real_->Revoke(lease, deadline, std::move(done));
  }
  CallId Put(PutRequest request, std::int64_t deadline, Done<Written> done) override {
    return real_->Put(std::move(request), deadline, Mislead<Written>(std::move(done)));
  }
  CallId Delete(std::string key, Revision expected, std::int64_t deadline,
                Done<Written> done) override {
    return real_->Delete(std::move(key), expected, deadline, Mislead<Written>(std::move(done)));
  }
  CallId List(std::string prefix, std::int64_t deadline, Done<Listing> done) override {
    return real_->List(std::move(prefix), deadline,
                       [this, done = std::move(done)](absl::StatusOr<Listing> answer) {
                         // What is listed is what it is, in the history that was always there.
                         if (answer.ok()) HideCluster(&answer->header);
                         done(std::move(answer));
                       });
  }
  CallId Watch(std::string prefix, Revision from, std::int64_t silence, WatchCalls calls) override {
    auto started = std::move(calls.started);
    calls.started = [this, started](Header header) {
      Mislead(&header);
      started(header);
    };
    auto events = std::move(calls.events);
    calls.events = [this, events](std::vector<Event> told) {
      if (fault_ == Fault::kLosesEvents && events_.Chance(0.05)) return;
      events(std::move(told));
    };
    return real_->Watch(std::move(prefix), from, silence, std::move(calls));
  }
  void Cancel(CallId call) override { real_->Cancel(call); }

  std::size_t open() const { return real_->open(); }

 private:
  void HideCluster(Header* header) {
    if (fault_ != Fault::kOneHistory) return;
    if (cluster_id_ == 0) cluster_id_ = header->cluster_id;
    header->cluster_id = cluster_id_;
  }
  void Mislead(Header* header) {
    if (fault_ != Fault::kOneHistory) return;
    HideCluster(header);
    highest_ = std::max(highest_, header->revision);
    header->revision = highest_;
  }
  template <typename Answer>
  Done<Answer> Mislead(Done<Answer> done) {
    return [this, done = std::move(done)](absl::StatusOr<Answer> answer) {
      if (answer.ok()) Mislead(&answer->header);
      done(std::move(answer));
    };
  }

  SimEvents& events_;
  const std::unique_ptr<SimRegistry> real_;
  const Fault fault_;
  std::uint64_t cluster_id_ = 0;
  Revision highest_ = 0;
};

}  // namespace kvmill

#endif  // KVMILL_TESTS_CLUSTER_SIM_FAULTY_REGISTRY_H_
