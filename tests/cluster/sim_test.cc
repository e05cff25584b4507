// The simulator itself: what its clocks, network and registry do must be what the real ones do, or
// what it finds, and does not find, means nothing. The registry is held to what
// service/cluster/registry.h says, as etcd_registry_test holds the real one.
#include <gmock/gmock.h>

#include <map>
#include <memory>
#include <optional>

#include "absl/strings/str_cat.h"
#include "tests/cluster/sim_etcd.h"
#include "tests/cluster/sim_loop.h"
#include "tests/cluster/sim_registry.h"
#include "tests/long_form.h"

namespace kvmill {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

class SimTest : public ::testing::Test {
 protected:
  void Run(std::int64_t nanos) {
    events_.RunUntil(events_.now() + nanos, [] {});
  }

  SimEvents events_{1, false};
};

TEST_F(SimTest, ALoopRunsTasksInOrderByItsOwnClock) {
  SimLoop loop(events_, 5 * kSimSecond, 200);
  std::vector<std::string> ran;
  const auto note = [&](const char* what) { return [&ran, what] { ran.push_back(what); }; };
  const std::int64_t start = loop.clock().MonotonicNanos();
  EXPECT_EQ(start, 5 * kSimSecond);
  loop.At(start + kSimSecond, note("timer"));
  loop.At(start + kSimSecond, note("timer after"));
  const auto cancelled = loop.After(kSimMs, note("cancelled"));
  loop.At(0, note("overdue"));
  loop.Post(note("post"));
  EXPECT_TRUE(ran.empty());
  loop.Cancel(cancelled);
  Run(kSimMs);
  EXPECT_THAT(ran, ElementsAre("overdue", "post"));
  std::int64_t at = 0;
  loop.At(start + 100 * kSimSecond, [&] { at = loop.clock().MonotonicNanos(); });
  Run(200 * kSimSecond);
  EXPECT_THAT(ran, ElementsAre("overdue", "post", "timer", "timer after"));
  EXPECT_GE(at, start + 100 * kSimSecond);
  EXPECT_LE(at, start + 100 * kSimSecond + 2);
  EXPECT_EQ(loop.clock().MonotonicNanos() - start, events_.now() + events_.now() / 5000);
  EXPECT_EQ(loop.waiting(), 0u);
}

TEST_F(SimTest, AStoppedProcessRunsItsTasksWhenItGoesOn) {
  SimLoop loop(events_, 0, 0);
  std::vector<int> ran;
  loop.After(kSimMs, [&] { ran.push_back(1); });
  const auto cancelled = loop.After(2 * kSimMs, [&] { ran.push_back(2); });
  loop.After(3 * kSimMs, [&] { ran.push_back(3); });
  loop.Stop();
  Run(10 * kSimMs);
  loop.Post([&] { ran.push_back(4); });
  Run(10 * kSimMs);
  EXPECT_TRUE(ran.empty());
  loop.Cancel(cancelled);
  loop.Continue();
  Run(0);
  EXPECT_THAT(ran, ElementsAre(1, 3, 4));
}

TEST_F(SimTest, ADeadProcessRunsNothing) {
  auto owned = std::make_shared<int>(0);
  {
    SimLoop loop(events_, 0, 0);
    loop.After(kSimMs, [owned] { ++*owned; });
    loop.Post([owned] { ++*owned; });
  }
  Run(kSimSecond);
  EXPECT_EQ(*owned, 0);
  EXPECT_EQ(owned.use_count(), 1);
  EXPECT_EQ(events_.pending(), 0u);
}

TEST_F(SimTest, NothingPassesWhereTheNetworkIsParted) {
  SimNetwork network(events_, {.machines = 3});
  int arrived = 0;
  network.Send(0, 1, [&] { ++arrived; });
  network.SetGroup(1, 1);  // While it is on its way.
  network.Send(1, 2, [&] { ++arrived; });
  network.Send(0, 2, [&] { arrived += 10; });
  Run(kSimSecond);
  EXPECT_EQ(arrived, 10);
  network.SetGroup(1, 0);
  network.SetSlow(1, kSimSecond);
  network.Send(0, 1, [&] { ++arrived; });
  Run(kSimSecond);
  EXPECT_EQ(arrived, 10);
  Run(kSimSecond);
  EXPECT_EQ(arrived, 11);
}

// One server, two clients.
class SimRegistryTest : public SimTest {
 protected:
  template <typename Answer>
  absl::StatusOr<Answer> Wait(
      const std::function<void(std::int64_t deadline, Registry::Done<Answer>)>& start,
      std::int64_t timeout = kSimSecond) {
    std::optional<absl::StatusOr<Answer>> answer;
    start(loop_.clock().MonotonicNanos() + timeout, [&](absl::StatusOr<Answer> got) {
      EXPECT_FALSE(answer.has_value()) << "twice";
      answer = std::move(got);
    });
    EXPECT_FALSE(answer.has_value()) << "within the call";
    for (std::int64_t waited = 0; !answer.has_value() && waited <= timeout; waited += kSimMs) {
      Run(kSimMs);
    }
    if (!answer.has_value()) return absl::InternalError("never completed");
    return *answer;
  }
  absl::StatusOr<Registry::Lease> Grant(std::int64_t seconds) {
    return Wait<Registry::Lease>(
        [&](auto deadline, auto done) { registry_->Grant(seconds, deadline, std::move(done)); });
  }
  absl::StatusOr<Registry::Lease> KeepAlive(Registry::LeaseId lease) {
    return Wait<Registry::Lease>(
        [&](auto deadline, auto done) { registry_->KeepAlive(lease, deadline, std::move(done)); });
  }
  absl::StatusOr<Registry::Written> Put(std::string key, std::string value, Registry::LeaseId lease,
                                        Registry::Revision expected) {
    return Wait<Registry::Written>([&](auto deadline, auto done) {
      registry_->Put({std::move(key), std::move(value), lease, expected}, deadline,
                     std::move(done));
    });
  }
  absl::StatusOr<Registry::Listing> List(std::string prefix) {
    return Wait<Registry::Listing>([&](auto deadline, auto done) {
      registry_->List(std::move(prefix), deadline, std::move(done));
    });
  }
  Registry::CallId Watch(std::string prefix, Registry::Revision from,
                         std::vector<std::string>* told) {
    Registry::WatchCalls calls;
    calls.started = [=](const Registry::Header& header) {
      told->push_back(absl::StrCat("started ", header.revision));
    };
    calls.events = [=](const std::vector<Registry::Event>& events) {
      for (const Registry::Event& event : events) {
        told->push_back(absl::StrCat(event.deleted ? "-" : "+", event.entry.key, "@",
                                     event.entry.mod_revision));
      }
    };
    calls.compacted = [=](Registry::Revision revision) {
      told->push_back(absl::StrCat("compacted ", revision));
    };
    calls.broken = [=](const absl::Status& status) {
      told->push_back(absl::StrCat("broken ", absl::StatusCodeToString(status.code())));
    };
    return registry_->Watch(std::move(prefix), from, 3 * kSimSecond, std::move(calls));
  }

  SimNetwork network_{events_, {.machines = 2, .late = 0}};
  SimEtcd etcd_{events_, network_, 1};
  SimLoop loop_{events_, kSimSecond, -50};
  std::unique_ptr<SimRegistry> registry_ = std::make_unique<SimRegistry>(etcd_, network_, loop_, 0);
};

TEST_F(SimRegistryTest, WritesCompareAndEndWithTheirLease) {
  const auto lease = *Grant(30);
  EXPECT_EQ(Put("m/a", "1", lease.id + 1, 0).status().code(), absl::StatusCode::kNotFound);
  const auto first = *Put("m/a", "1", lease.id, 0);
  ASSERT_TRUE(first.done);
  EXPECT_EQ(first.current->mod_revision, first.header.revision);
  const auto refused = *Put("m/a", "2", lease.id, 0);
  EXPECT_FALSE(refused.done);
  EXPECT_EQ(refused.current->value, "1");
  const auto second = *Put("m/a", "2", lease.id, first.current->mod_revision);
  EXPECT_TRUE(second.done);
  EXPECT_GT(second.header.revision, first.header.revision);
  EXPECT_TRUE(Put("n/a", "x", lease.id, 0)->done);
  EXPECT_EQ(List("m/")->entries.size(), 1u);
  EXPECT_EQ(List("m/")->entries[0].value, "2");
  Run(20 * kSimSecond);
  EXPECT_EQ(KeepAlive(lease.id)->seconds, 30);
  Run(25 * kSimSecond);
  EXPECT_EQ(List("m/")->entries.size(), 1u);
  Run(10 * kSimSecond);
  EXPECT_TRUE(List("m/")->entries.empty());
  EXPECT_EQ(KeepAlive(lease.id).status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(Put("m/a", "3", lease.id, 0).status().code(), absl::StatusCode::kNotFound);
}

TEST_F(SimRegistryTest, RefusesWhatIsOutOfBounds) {
  EXPECT_EQ(Grant(0).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(Put("", "", 1, 0).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(Put("k", std::string(Registry::kValueBytesMax + 1, 'x'), 1, 0).status().code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(Put("k", "v", 0, 0).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(registry_->open(), 0u);
}

TEST_F(SimRegistryTest, AWatchTellsWhatIsItsOwnInOrderAndLivesWhenItIsQuiet) {
  const auto lease = *Grant(60);
  std::vector<std::string> told;
  const auto watch = Watch("m/", 1, &told);
  Run(kSimMs);
  const auto a = *Put("m/a", "1", lease.id, 0);
  ASSERT_TRUE(Put("n/a", "1", lease.id, 0).ok());
  const auto b = *Put("m/b", "1", lease.id, 0);
  Run(30 * kSimSecond);
  EXPECT_THAT(told, ElementsAre("started 1", absl::StrCat("+m/a@", a.header.revision),
                                absl::StrCat("+m/b@", b.header.revision)));
  told.clear();
  Run(31 * kSimSecond);  // The lease ends: both in one revision.
  const std::string end = absl::StrCat("@", b.header.revision + 1);
  EXPECT_THAT(told, ElementsAre("-m/a" + end, "-m/b" + end));
  registry_->Cancel(watch);
  EXPECT_EQ(etcd_.watch_count(), 0u);
  told.clear();
  Run(60 * kSimSecond);
  EXPECT_TRUE(told.empty());
  EXPECT_EQ(events_.pending(), 0u);
}

TEST_F(SimRegistryTest, AKilledServerBreaksWatchesAndKeepsWhatWasWritten) {
  const auto lease = *Grant(10);
  ASSERT_TRUE(Put("m/a", "1", lease.id, 0).ok());
  std::vector<std::string> told;
  Watch("m/", 1, &told);
  Run(kSimSecond);
  etcd_.Kill();
  EXPECT_EQ(List("m/").status().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(told.back(), "broken UNAVAILABLE");
  Run(30 * kSimSecond);
  etcd_.Start();
  EXPECT_EQ(List("m/")->entries.size(), 1u);  // The lease began anew.
  Run(10 * kSimSecond);
  EXPECT_TRUE(List("m/")->entries.empty());
}

TEST_F(SimRegistryTest, AStoppedServerHoldsNobodyUp) {
  std::vector<std::string> told;
  Watch("m/", 1, &told);
  const auto lease = *Grant(60);
  etcd_.Stop();
  const auto put = Put("m/a", "1", lease.id, 0);
  EXPECT_EQ(put.status().code(), absl::StatusCode::kDeadlineExceeded);
  Run(5 * kSimSecond);
  EXPECT_EQ(told.back(), "broken DEADLINE_EXCEEDED");
  etcd_.Continue();
  Run(kSimSecond);
  EXPECT_TRUE(List("m/")->entries.empty()) << "written after its deadline";
}

TEST_F(SimRegistryTest, CompactedAndOtherHistoriesAreSeen) {
  const auto lease = *Grant(600);
  for (int i = 0; i < 10; ++i) ASSERT_TRUE(Put(absl::StrCat("m/", i), "", lease.id, 0).ok());
  etcd_.Backup();
  const auto last = *Put("m/x", "", lease.id, 0);
  etcd_.Compact(2);
  std::vector<std::string> told;
  Watch("m/", 3, &told);
  Run(kSimSecond);
  EXPECT_THAT(told, ElementsAre(absl::StrCat("compacted ", last.header.revision - 2)));
  told.clear();
  Watch("m/", last.header.revision, &told);
  Run(kSimSecond);
  EXPECT_EQ(told.back(), absl::StrCat("+m/x@", last.header.revision));
  etcd_.Restore(true);
  Run(kSimSecond);
  EXPECT_EQ(told.back(), "broken UNAVAILABLE");
  const auto restored = *List("m/");
  EXPECT_EQ(restored.header.cluster_id, last.header.cluster_id);
  EXPECT_EQ(restored.header.revision, last.header.revision - 1);
  EXPECT_EQ(restored.entries.size(), 10u);
  etcd_.Wipe();
  const auto empty = *List("m/");
  EXPECT_NE(empty.header.cluster_id, last.header.cluster_id);
  EXPECT_EQ(empty.header.revision, 1);
  EXPECT_TRUE(empty.entries.empty());
}

TEST_F(SimRegistryTest, CancelledCallsAndDeadClientsTellNothing) {
  bool told = false;
  const auto call = registry_->List("m/", loop_.clock().MonotonicNanos() + kSimSecond,
                                    [&](absl::StatusOr<Registry::Listing>) { told = true; });
  registry_->Cancel(call);
  Run(2 * kSimSecond);
  EXPECT_FALSE(told);
  std::vector<std::string> watched;
  Watch("m/", 1, &watched);
  registry_->List("m/", loop_.clock().MonotonicNanos() + kSimSecond,
                  [&](absl::StatusOr<Registry::Listing>) { told = true; });
  Run(100'000);
  registry_.reset();
  Run(10 * kSimSecond);
  EXPECT_FALSE(told);
  EXPECT_TRUE(watched.empty());
  EXPECT_EQ(etcd_.watch_count(), 0u);
  EXPECT_EQ(events_.pending(), 0u);
}

// Whatever happens to the server and the network, who lists, watches from there and lists again
// after every break knows in the end what is there.
class Follower {
 public:
  Follower(SimRegistry& registry, Loop& loop) : registry_(registry), loop_(loop) { List(); }
  const std::map<std::string, Registry::Revision>& entries() const { return entries_; }

 private:
  void Again() {
    loop_.After(100 * kSimMs, [this] { List(); });
  }
  void List() {
    registry_.List("m/", loop_.clock().MonotonicNanos() + kSimSecond,
                   [this](absl::StatusOr<Registry::Listing> listing) {
                     if (!listing.ok()) return Again();
                     entries_.clear();
                     for (const auto& entry : listing->entries) {
                       entries_[entry.key] = entry.mod_revision;
                     }
                     Watch(listing->header);
                   });
  }
  void Watch(const Registry::Header& listed) {
    seen_ = listed.revision;
    watch_ = registry_.Watch(
        "m/", listed.revision + 1, 2 * kSimSecond,
        {.started =
             [this, listed](const Registry::Header& now) {
               // Another history, or a server that lags behind.
               if (now.cluster_id == listed.cluster_id && now.revision >= listed.revision) return;
               registry_.Cancel(watch_);
               Again();
             },
         .events =
             [this](const std::vector<Registry::Event>& events) {
               for (const Registry::Event& event : events) {
                 // All keys of one lease go in one revision.
                 EXPECT_GE(event.entry.mod_revision, seen_);
                 seen_ = event.entry.mod_revision;
                 if (event.deleted) {
                   EXPECT_EQ(entries_.erase(event.entry.key), 1u) << event.entry.key;
                 } else {
                   entries_[event.entry.key] = event.entry.mod_revision;
                 }
               }
             },
         .compacted = [this](Registry::Revision) { Again(); },
         .broken = [this](const absl::Status&) { Again(); }});
  }

  SimRegistry& registry_;
  Loop& loop_;
  std::map<std::string, Registry::Revision> entries_;
  Registry::Revision seen_ = 0;
  Registry::CallId watch_ = 0;
};

TEST(SimRegistrySeedsTest, AFollowerKnowsInTheEnd) {
  for (std::uint64_t seed = 1; seed <= ShortOrLong<std::uint64_t>(200, 5000); ++seed) {
    SCOPED_TRACE(absl::StrCat("seed ", seed));
    SimEvents events(seed, false);
    SimNetwork network(events, {.machines = 3, .loss = 0.05});
    SimEtcd etcd(events, network, 0);
    SimLoop writer_loop(events, 7, 100), reader_loop(events, kSimSecond, -100);
    SimRegistry writer(etcd, network, writer_loop, 1), reader(etcd, network, reader_loop, 2);
    Follower follower(reader, reader_loop);
    Registry::LeaseId lease = 0;
    for (int step = 0; step < 60; ++step) {
      const std::int64_t deadline = writer_loop.clock().MonotonicNanos() + kSimSecond;
      const std::int64_t what = events.Uniform(0, 19);
      if (what < 3) {
        writer.Grant(events.Uniform(2, 20), deadline, [&](auto granted) {
          if (granted.ok()) lease = granted->id;
        });
      } else if (what < 14) {
        writer.Put({absl::StrCat("m/", step), "", std::max<Registry::LeaseId>(lease, 1), 0},
                   deadline, [](auto) {});
      } else if (what == 14) {
        events.Chance(0.5) ? etcd.Kill() : etcd.Stop();
      } else if (what == 15) {
        network.SetGroup(2, 1);
      } else if (what == 16) {
        etcd.Compact(events.Uniform(0, 3));
      } else if (what == 17) {
        // Never in the same cluster: a revision that fell and rose again between a list and its
        // watch cannot be seen.
        events.Chance(0.5) ? etcd.Wipe() : etcd.Restore(false);
      } else if (what == 18) {
        etcd.Backup();
      } else {
        reader_loop.Stop();
      }
      events.RunUntil(events.now() + events.Uniform(0, 2 * kSimSecond), [] {});
      if (events.Chance(0.5)) etcd.Continue();
      if (events.Chance(0.5)) etcd.Start();
      if (events.Chance(0.5)) network.SetGroup(2, 0);
      if (events.Chance(0.5)) reader_loop.Continue();
    }
    etcd.Continue();
    etcd.Start();
    network.SetGroup(2, 0);
    reader_loop.Continue();
    events.RunUntil(events.now() + 60 * kSimSecond, [] {});
    std::map<std::string, Registry::Revision> want;
    for (const auto& entry : etcd.List("m/").entries) want[entry.key] = entry.mod_revision;
    ASSERT_EQ(follower.entries(), want);
  }
}

}  // namespace
}  // namespace kvmill
