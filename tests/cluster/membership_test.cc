// Membership of several nodes on simulated time: every rule of design section 9 about outages, who
// may hold an id, and seeds of anything that can go wrong.
#include "service/cluster/membership.h"

#include <gmock/gmock.h>

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/cluster/sim_etcd.h"
#include "tests/cluster/sim_events.h"
#include "tests/cluster/sim_loop.h"
#include "tests/cluster/sim_network.h"
#include "tests/cluster/sim_registry.h"
#include "tests/long_form.h"

namespace kvmill {
namespace {

using ::testing::HasSubstr;
using State = Registrar::State;
constexpr std::int64_t kLease = 10;  // Seconds.
constexpr std::int64_t kGrace = 30;
constexpr std::size_t kMachinesMax = 16;

// A cluster of processes that do nothing but be members. Machine 0 has the registry.
class Cluster {
 public:
  explicit Cluster(std::uint64_t seed = 1)
      : events_(seed, false),
        network_(events_, {.machines = kMachinesMax}),
        etcd_(events_, network_, 0) {}

  struct Process {
    std::unique_ptr<SimLoop> loop;
    std::unique_ptr<SimRegistry> registry;
    std::unique_ptr<Membership> membership;
    std::shared_ptr<const MembershipSnapshot> last = std::make_shared<MembershipSnapshot>();
    std::vector<std::string> refusals;
    std::string incarnation;
    std::size_t smallest = kMachinesMax;  // Membership that was ever published, after the first.
  };

  // `name` is what the test calls it; the id is the node's. `holder` "" has none.
  Process& Start(const std::string& name, const std::string& id, const std::string& holder = "",
                 SimNetwork::Machine machine = 0) {
    if (machine == 0) machine = 1 + processes_.size() % (kMachinesMax - 1);
    Process& process = processes_[name];
    process = Process();
    process.incarnation = absl::StrCat(++incarnations_);
    process.incarnation.resize(16, '.');
    process.loop = std::make_unique<SimLoop>(events_, 1'000'000 * incarnations_, 0);
    process.registry = std::make_unique<SimRegistry>(etcd_, network_, *process.loop, machine);
    machines_[name] = machine;
    Membership::Options options;
    options.self.member = {.id = id,
                           .incarnation = process.incarnation,
                           .address = absl::StrCat(name, ":7600"),
                           .zone = "",
                           .capacity_bytes = 1 << 30};
    if (!holder.empty()) {
      options.self.holder = holder;
      options.self.holder.resize(kHolderBytes, '.');
    }
    options.lease_seconds = kLease;
    options.grace_seconds = kGrace;
    options.seed = incarnations_ * 17;
    EXPECT_TRUE(Membership::Check(options).ok()) << Membership::Check(options);
    process.membership = std::make_unique<Membership>(
        *process.loop, *process.registry, options,
        [&process](const std::shared_ptr<const MembershipSnapshot>& snapshot) {
          EXPECT_GE(snapshot->version, process.last->version);
          if (process.last->version > 0) {
            EXPECT_EQ(snapshot->version > process.last->version,
                      snapshot->members != process.last->members);
          }
          if (snapshot->registration == State::kRefused &&
              process.last->registration != State::kRefused) {
            process.refusals.push_back(std::string(snapshot->problem.message()));
          }
          if (process.last->version > 0) {
            process.smallest = std::min(process.smallest, snapshot->members.size());
          }
          process.last = snapshot;
        });
    process.loop->Post([&process] { process.membership->Start(); });
    return process;
  }
  Process& Start(int number) {
    return Start(Name(number), Name(number), "", static_cast<SimNetwork::Machine>(number) + 1);
  }
  static std::string Name(int number) { return absl::StrCat("n", number); }

  // kill -9.
  void Kill(const std::string& name) {
    Process& process = processes_.at(name);
    process.membership.reset();
    process.registry.reset();
    process.loop.reset();
    processes_.erase(name);
  }
  void Run(double seconds) {
    events_.RunUntil(events_.now() + static_cast<std::int64_t>(seconds * 1e9), [] {});
  }
  Process& operator[](const std::string& name) { return processes_.at(name); }
  Process& operator[](int number) { return processes_.at(Name(number)); }
  const MembershipSnapshot& View(const std::string& name) { return *processes_.at(name).last; }
  const MembershipSnapshot& View(int number) { return View(Name(number)); }
  // "a b c-", by id; a draining one with a dash.
  std::string Members(const std::string& name) {
    std::string ids;
    for (const Member& member : View(name).members) {
      absl::StrAppend(&ids, ids.empty() ? "" : " ", member.id,
                      member.state == MemberState::kDraining ? "-" : "");
    }
    return ids;
  }
  std::string Members(int number) { return Members(Name(number)); }
  // Every process sees `members`, is registered, and knows that it is right.
  void ExpectAll(const std::string& members) {
    for (auto& [name, process] : processes_) {
      EXPECT_EQ(Members(name), members) << name;
      EXPECT_EQ(process.last->registration, State::kRegistered)
          << name << ": " << process.last->problem;
      EXPECT_FALSE(process.last->stale) << name;
      EXPECT_FALSE(process.last->keeping) << name;
      EXPECT_TRUE(process.last->problem.ok()) << name << ": " << process.last->problem;
      EXPECT_EQ(process.last->registry_id, etcd_.header().cluster_id) << name;
    }
  }
  void Partition(const std::string& name, bool parted) {
    network_.SetGroup(machines_.at(name), parted ? 1 : 0);
  }
  // The entry of an id, as the registry has it.
  std::optional<Registration> Entry(const std::string& id) {
    for (const Registry::Entry& entry : etcd_.List(MemberKey("/kvmill/", id)).entries) {
      if (entry.key == MemberKey("/kvmill/", id)) return *DecodeRegistration(entry.value);
    }
    return std::nullopt;
  }

  SimEvents events_;
  SimNetwork network_;
  SimEtcd etcd_;
  std::map<std::string, Process> processes_;
  std::map<std::string, SimNetwork::Machine> machines_;
  int incarnations_ = 0;
};

TEST(MembershipTest, EveryoneSeesEveryone) {
  Cluster cluster;
  for (int i = 0; i < 5; ++i) cluster.Start(i);
  cluster.Run(2);
  cluster.ExpectAll("n0 n1 n2 n3 n4");
  const std::uint64_t version = cluster.View(0).version;
  cluster.Run(100);
  cluster.ExpectAll("n0 n1 n2 n3 n4");
  EXPECT_EQ(cluster.View(0).version, version) << "nothing changed";
  EXPECT_EQ(cluster.etcd_.lease_count(), 5u) << "each renews the one it has";
}

TEST(MembershipTest, AKilledNodeIsGoneWithItsLease) {
  Cluster cluster;
  for (int i = 0; i < 3; ++i) cluster.Start(i);
  cluster.Run(20);
  cluster.Kill("n2");
  cluster.Run(5);
  EXPECT_EQ(cluster.Members(0), "n0 n1 n2");
  cluster.Run(kLease - 5 + 1.5);
  cluster.ExpectAll("n0 n1");
}

TEST(MembershipTest, ANodeThatIsRestartedIsBackAtOnceByItsHolder) {
  Cluster cluster;
  cluster.Start(0);
  cluster.Start("a1", "a", "lock of a");
  cluster.Run(5);
  cluster.Kill("a1");
  cluster.Start("a2", "a", "lock of a");
  cluster.Run(0.5);
  cluster.ExpectAll("a n0");
  EXPECT_EQ(cluster.View(0).members[0].incarnation, cluster["a2"].incarnation);
  EXPECT_TRUE(cluster["a2"].refusals.empty());
  // The lease of the one that was killed ends, and takes nothing with it.
  cluster.Run(3 * kLease);
  cluster.ExpectAll("a n0");
  EXPECT_EQ(cluster[0].smallest, 2u) << "it was never away";
}

TEST(MembershipTest, WithoutAHolderItWaitsForTheOldLeaseAndSaysSoOnce) {
  Cluster cluster;
  cluster.Start(0);
  auto& first = cluster.Start("a1", "a", "one lock");
  cluster.Run(5);
  const std::string incarnation = first.incarnation;
  cluster.Kill("a1");
  auto& second = cluster.Start("a2", "a", "another lock");
  cluster.Run(3);
  EXPECT_EQ(second.last->registration, State::kRefused);
  ASSERT_EQ(second.refusals.size(), 1u);
  EXPECT_THAT(second.refusals[0], HasSubstr("node id \"a\" is held by incarnation"));
  EXPECT_THAT(second.refusals[0], HasSubstr("at a1:7600"));
  EXPECT_EQ(cluster.Entry("a")->member.incarnation, incarnation);
  cluster.Run(kLease);
  EXPECT_EQ(second.refusals.size(), 1u);
  cluster.ExpectAll("a n0");
  EXPECT_EQ(cluster.Entry("a")->member.incarnation, second.incarnation);
}

TEST(MembershipTest, TwoLiveProcessesNeverHaveOneId) {
  Cluster cluster;
  cluster.Start("a1", "a");
  cluster.Run(5);
  cluster.Start("a2", "a");
  cluster.Run(10 * kLease);
  EXPECT_EQ(cluster["a2"].last->registration, State::kRefused);
  EXPECT_EQ(cluster["a2"].refusals.size(), 1u);
  EXPECT_EQ(cluster.Entry("a")->member.incarnation, cluster["a1"].incarnation);
  EXPECT_EQ(cluster["a1"].last->registration, State::kRegistered);
  bool left = false;
  cluster["a1"].membership->Leave(cluster["a1"].loop->clock().MonotonicNanos() + kSimSecond,
                                  [&left](const absl::Status& status) { left = status.ok(); });
  cluster.Run(0.5);
  EXPECT_TRUE(left);
  EXPECT_EQ(cluster["a2"].last->registration, State::kRegistered) << "it need not wait";
}

TEST(MembershipTest, CopiesOfOneNodeDoNotTakeTheIdFromEachOtherForEver) {
  Cluster cluster;
  cluster.Start("a1", "a", "copied lock");
  cluster.Run(5);
  cluster.Start("a2", "a", "copied lock");
  cluster.Run(1);
  const Registry::Revision revision = cluster.etcd_.header().revision;
  cluster.Run(10 * kLease);
  EXPECT_EQ(cluster.etcd_.header().revision, revision) << "nobody writes";
  EXPECT_EQ(cluster["a1"].last->registration, State::kRefused);
  EXPECT_EQ(cluster["a2"].last->registration, State::kRegistered);
  EXPECT_EQ(cluster.Entry("a")->member.incarnation, cluster["a2"].incarnation);
}

TEST(MembershipTest, ADrainingNodeIsSeenToBeAndThenLeaves) {
  Cluster cluster;
  for (int i = 0; i < 2; ++i) cluster.Start(i);
  cluster.Run(5);
  cluster[1].membership->SetState(MemberState::kDraining);
  cluster.Run(0.5);
  cluster.ExpectAll("n0 n1-");
  int done = 0;
  cluster[1].membership->Leave(cluster[1].loop->clock().MonotonicNanos() + kSimSecond,
                               [&done](const absl::Status& status) {
                                 EXPECT_TRUE(status.ok()) << status;
                                 ++done;
                               });
  cluster.Run(0.5);
  EXPECT_EQ(done, 1);
  EXPECT_EQ(cluster.Members(0), "n0") << "half of the members, but it said that it goes";
  EXPECT_FALSE(cluster.View(0).keeping);
  EXPECT_EQ(cluster.View(1).registration, State::kLeft);
  EXPECT_EQ(cluster.etcd_.lease_count(), 1u);
}

TEST(MembershipTest, LeavingEndsByTheDeadlineWhenNobodyAnswers) {
  Cluster cluster;
  cluster.Start(0);
  cluster.Run(5);
  cluster.etcd_.Stop();
  int done = 0;
  const auto leave = [&] {
    cluster[0].membership->Leave(cluster[0].loop->clock().MonotonicNanos() + kSimSecond,
                                 [&done](const absl::Status& status) {
                                   EXPECT_FALSE(status.ok());
                                   ++done;
                                 });
  };
  leave();
  cluster.Run(1.1);
  EXPECT_EQ(done, 1);
  // A node that is not registered has nothing to end.
  Cluster other;
  other.etcd_.Kill();
  other.Start(0);
  other.Run(1);
  other[0].membership->Leave(0, [&done](const absl::Status& status) {
    EXPECT_TRUE(status.ok());
    ++done;
  });
  EXPECT_EQ(done, 1) << "not within the call";
  other.Run(1);
  EXPECT_EQ(done, 2);
}

TEST(MembershipTest, AThirdMayVanishMoreAreKeptForAGrace) {
  for (const int killed : {3, 4}) {
    Cluster cluster;
    for (int i = 0; i < 9; ++i) cluster.Start(i);
    cluster.Run(20);
    for (int i = 9 - killed; i < 9; ++i) cluster.Kill(Cluster::Name(i));
    cluster.Run(kLease + 1.5);
    if (killed == 3) {
      cluster.ExpectAll("n0 n1 n2 n3 n4 n5");
      continue;
    }
    EXPECT_EQ(cluster.Members(0), "n0 n1 n2 n3 n4 n5 n6 n7 n8");
    EXPECT_TRUE(cluster.View(0).keeping);
    EXPECT_FALSE(cluster.View(0).stale);
    cluster.Run(kGrace - 3);
    EXPECT_EQ(cluster.Members(0), "n0 n1 n2 n3 n4 n5 n6 n7 n8");
    cluster.Run(5);
    cluster.ExpectAll("n0 n1 n2 n3 n4");
  }
}

TEST(MembershipTest, ThoseWhoAreKeptAndComeBackEndTheGrace) {
  Cluster cluster;
  for (int i = 0; i < 6; ++i) cluster.Start(i);
  cluster.Run(20);
  for (int i = 2; i < 5; ++i) cluster.Partition(Cluster::Name(i), true);
  cluster.Run(kLease + 3);
  EXPECT_TRUE(cluster.View(0).keeping);
  EXPECT_EQ(cluster.Members(0), "n0 n1 n2 n3 n4 n5");
  for (int i = 2; i < 5; ++i) cluster.Partition(Cluster::Name(i), false);
  cluster.Run(kLease / 2);
  cluster.ExpectAll("n0 n1 n2 n3 n4 n5");
  for (int i = 0; i < 6; ++i) EXPECT_EQ(cluster[i].last->members.size(), 6u);
}

TEST(MembershipTest, SlowDeathsAreNoMassExpiry) {
  Cluster cluster;
  for (int i = 0; i < 9; ++i) cluster.Start(i);
  cluster.Run(20);
  for (int i = 4; i < 9; ++i) {
    cluster.Kill(Cluster::Name(i));
    cluster.Run(kLease + 2);
    EXPECT_FALSE(cluster.View(0).keeping);
  }
  cluster.ExpectAll("n0 n1 n2 n3");
}

TEST(MembershipTest, WhenAllLeasesEndAtOnceNobodySeesAnEmptyCluster) {
  Cluster cluster;
  for (int i = 0; i < 8; ++i) cluster.Start(i);
  cluster.Run(20);
  for (int i = 0; i < 8; ++i) cluster[i].smallest = kMachinesMax;
  cluster.etcd_.ExpireAll();
  cluster.Run(kLease);
  cluster.ExpectAll("n0 n1 n2 n3 n4 n5 n6 n7");
  for (int i = 0; i < 8; ++i) EXPECT_GE(cluster[i].smallest, 6u);
}

TEST(MembershipTest, WithoutEtcdTheLastViewStaysAndIsStale) {
  for (const bool killed : {true, false}) {
    Cluster cluster;
    for (int i = 0; i < 3; ++i) cluster.Start(i);
    cluster.Run(20);
    if (killed) {
      cluster.etcd_.Kill();
    } else {
      cluster.etcd_.Stop();
    }
    cluster.Run(3);
    EXPECT_FALSE(cluster.View(0).stale) << "a moment is nothing";
    cluster.Run(kLease);
    for (int i = 0; i < 3; ++i) {
      EXPECT_EQ(cluster.Members(i), "n0 n1 n2");
      EXPECT_TRUE(cluster.View(i).stale);
      EXPECT_FALSE(cluster.View(i).problem.ok());
    }
    cluster.Run(600);
    EXPECT_EQ(cluster.Members(1), "n0 n1 n2");
    if (killed) {
      cluster.etcd_.Start();
    } else {
      cluster.etcd_.Continue();
    }
    cluster.Run(kLease);
    cluster.ExpectAll("n0 n1 n2");
    for (int i = 0; i < 3; ++i) EXPECT_EQ(cluster[i].last->members.size(), 3u);
  }
}

TEST(MembershipTest, WithoutEtcdAtTheStartItServesAlone) {
  Cluster cluster;
  cluster.etcd_.Kill();
  cluster.Start(0);
  cluster.Run(60);
  EXPECT_TRUE(cluster.View(0).stale);
  EXPECT_EQ(cluster.View(0).version, 0u);
  EXPECT_EQ(cluster.View(0).registration, State::kJoining);
  EXPECT_FALSE(cluster.View(0).problem.ok());
  cluster.etcd_.Start();
  cluster.Run(kLease);
  cluster.ExpectAll("n0");
}

TEST(MembershipTest, AnotherClusterIdMeansEverythingAnew) {
  Cluster cluster;
  for (int i = 0; i < 4; ++i) cluster.Start(i);
  cluster.Run(20);
  const std::uint64_t id = cluster.View(0).registry_id;
  for (int i = 0; i < 4; ++i) cluster[i].smallest = kMachinesMax;
  cluster.etcd_.Wipe();
  cluster.Run(kLease);
  EXPECT_NE(cluster.View(0).registry_id, id);
  cluster.ExpectAll("n0 n1 n2 n3");
  for (int i = 0; i < 4; ++i) EXPECT_GE(cluster[i].smallest, 3u);
  // And it goes on: one that dies now is gone with its lease.
  cluster.Kill("n3");
  cluster.Run(kLease + 1.5);
  cluster.ExpectAll("n0 n1 n2");
}

TEST(MembershipTest, AFallingRevisionMeansEverythingAnew) {
  for (const bool same_cluster : {true, false}) {
    Cluster cluster;
    for (int i = 0; i < 2; ++i) cluster.Start(i);
    cluster.Run(5);
    cluster.etcd_.Backup();
    for (int i = 2; i < 4; ++i) cluster.Start(i);
    cluster.Run(5);
    cluster[0].membership->SetState(MemberState::kDraining);
    cluster.Run(1);
    cluster[0].membership->SetState(MemberState::kServing);
    cluster.Run(10);
    const Registry::Revision before = cluster.etcd_.header().revision;
    cluster.etcd_.Restore(same_cluster);
    ASSERT_LT(cluster.etcd_.header().revision, before);
    cluster.Run(2 * kLease);
    cluster.ExpectAll("n0 n1 n2 n3");
    cluster.Kill("n3");
    cluster.Run(kLease + 1.5);
    cluster.ExpectAll("n0 n1 n2");
  }
}

TEST(MembershipTest, WhatIsCompactedDuringAGapIsListed) {
  Cluster cluster;
  for (int i = 0; i < 4; ++i) cluster.Start(i);
  cluster.Run(20);
  cluster.Partition("n0", true);
  cluster.Run(1);
  cluster.Start(4);
  cluster[1].membership->SetState(MemberState::kDraining);
  cluster[2].membership->SetState(MemberState::kDraining);
  cluster.Run(0.5);
  cluster[2].membership->Leave(cluster[2].loop->clock().MonotonicNanos() + kSimSecond, [](auto) {});
  cluster.Run(1);
  cluster.Kill("n2");
  cluster.etcd_.Compact(0);
  cluster.Run(1);
  cluster.Partition("n0", false);
  cluster.Run(kLease);
  cluster.ExpectAll("n0 n1- n3 n4");
}

TEST(MembershipTest, ANodeThatIsCutOffServesOnAndRegistersAgain) {
  Cluster cluster;
  for (int i = 0; i < 4; ++i) cluster.Start(i);
  cluster.Run(20);
  cluster.Partition("n0", true);
  cluster.Run(2 * kLease + 2);
  EXPECT_EQ(cluster.Members(1), "n1 n2 n3");
  EXPECT_EQ(cluster.Members(0), "n0 n1 n2 n3");
  EXPECT_TRUE(cluster.View(0).stale);
  cluster.Partition("n0", false);
  cluster.Run(kLease / 2);
  cluster.ExpectAll("n0 n1 n2 n3");
}

TEST(MembershipTest, AStoppedProcessComesBackUnlessAnotherHasItsIdNow) {
  Cluster cluster;
  cluster.Start(0);
  cluster.Start(1);
  cluster.Start("a1", "a");
  cluster.Run(20);
  cluster["a1"].loop->Stop();
  cluster.Run(2 * kLease);
  EXPECT_EQ(cluster.Members(0), "n0 n1");
  cluster["a1"].loop->Continue();
  cluster.Run(2);
  cluster.ExpectAll("a n0 n1");
  cluster["a1"].loop->Stop();
  cluster.Run(2 * kLease);
  cluster.Start("a2", "a");
  cluster.Run(1);
  EXPECT_EQ(cluster["a2"].last->registration, State::kRegistered);
  cluster["a1"].loop->Continue();
  cluster.Run(2 * kLease);
  EXPECT_EQ(cluster["a1"].last->registration, State::kRefused);
  EXPECT_EQ(cluster.Entry("a")->member.incarnation, cluster["a2"].incarnation);
}

TEST(MembershipTest, AnEntryThatIsDeletedByHandIsWrittenAgain) {
  Cluster cluster;
  for (int i = 0; i < 4; ++i) cluster.Start(i);
  cluster.Run(20);
  const Registry::Listing listing = cluster.etcd_.List(MemberKey("/kvmill/", "n1"));
  ASSERT_TRUE(cluster.etcd_.Delete(listing.entries[0].key, listing.entries[0].mod_revision)->done);
  cluster.Run(1);
  cluster.ExpectAll("n0 n1 n2 n3");
}

TEST(MembershipTest, EntriesThatCannotBeReadAreNoMembers) {
  Cluster cluster;
  cluster.Start(0);
  cluster.Run(5);
  const Registry::LeaseId lease = cluster.etcd_.Grant(600)->id;
  ASSERT_TRUE(cluster.etcd_.Put({"/kvmill/members/x", "kvmill.member/2 id=x", lease, 0})->done);
  ASSERT_TRUE(cluster.etcd_.Put({"/kvmill/members/b", "rubbish", lease, 0})->done);
  ASSERT_TRUE(
      cluster.etcd_
          .Put({"/kvmill/members/y",
                *EncodeRegistration({{"z", std::string(16, 'i'), "z:1", "", 1}, ""}), lease, 0})
          ->done);
  cluster.Run(1);
  cluster.ExpectAll("n0");
  // Nor is such an id free.
  cluster.Start("b", "b");
  cluster.Run(5);
  EXPECT_EQ(cluster["b"].last->registration, State::kRefused);
  EXPECT_THAT(cluster["b"].refusals.at(0), HasSubstr("cannot be read"));
}

TEST(MembershipTest, OptionsOutOfBoundsAreNamed) {
  Membership::Options good;
  good.self.member = {"a", std::string(16, 'i'), "a:1", "", 1};
  EXPECT_TRUE(Membership::Check(good).ok());
  const auto refused = [&](auto change, const char* name) {
    Membership::Options bad = good;
    change(bad);
    EXPECT_THAT(std::string(Membership::Check(bad).message()), HasSubstr(name));
  };
  refused([](auto& o) { o.lease_seconds = 1; }, "lease of 1 s: want 2 to 600");
  refused([](auto& o) { o.lease_seconds = 601; }, "lease of 601 s");
  refused([](auto& o) { o.grace_seconds = 3601; }, "grace of 3601 s: want 0 to 3600");
  refused([](auto& o) { o.prefix = ""; }, "prefix of 0 bytes");
  refused([](auto& o) { o.prefix = std::string(Registry::kKeyBytesMax, 'p'); }, "prefix of 512");
  refused([](auto& o) { o.self.member.zone = "a b"; }, "zone");
}

// Seeds of anything: processes killed, stopped and restarted, machines cut off, the registry
// killed, stopped, compacted, emptied and restored, leases ended. When it has been quiet for long
// enough, every process is a member, everyone sees the same and knows it.
TEST(MembershipTest, SeedsOfAnythingEndInOneView) {
  const int seeds = LongForm() ? 2000 : 60;
  for (int seed = 1; seed <= seeds; ++seed) {
    SCOPED_TRACE(absl::StrCat("seed ", seed));
    Cluster cluster(static_cast<std::uint64_t>(seed));
    SimEvents& chance = cluster.events_;
    constexpr int kNodes = 6;
    std::string all;
    for (int i = 0; i < kNodes; ++i) {
      cluster.Start(Cluster::Name(i), Cluster::Name(i), absl::StrCat("lock ", i),
                    static_cast<SimNetwork::Machine>(i) + 1);
      absl::StrAppend(&all, all.empty() ? "" : " ", Cluster::Name(i));
    }
    for (int step = 0; step < 40; ++step) {
      cluster.Run(static_cast<double>(chance.Uniform(1, 8'000)) / 1000);
      const std::string name = Cluster::Name(static_cast<int>(chance.Uniform(0, kNodes - 1)));
      switch (chance.Uniform(0, 11)) {
        case 0:
        case 1:
          cluster.Kill(name);
          cluster.Start(name, name, chance.Chance(0.5) ? absl::StrCat("lock ", name.substr(1)) : "",
                        cluster.machines_[name]);
          break;
        case 2:
          cluster[name].loop->Stop();
          break;
        case 3:
          cluster[name].loop->Continue();
          break;
        case 4:
          cluster.Partition(name, true);
          break;
        case 5:
          cluster.Partition(name, false);
          break;
        case 6:
          cluster.etcd_.Kill();
          cluster.Run(static_cast<double>(chance.Uniform(0, 20)));
          cluster.etcd_.Start();
          break;
        case 7:
          cluster.etcd_.Stop();
          cluster.Run(static_cast<double>(chance.Uniform(0, 20)));
          cluster.etcd_.Continue();
          break;
        case 8:
          cluster.etcd_.Compact(chance.Uniform(0, 3));
          break;
        case 9:
          cluster.etcd_.Wipe();
          break;
        case 10:
          if (chance.Chance(0.5)) {
            cluster.etcd_.Backup();
          } else {
            cluster.etcd_.Restore(chance.Chance(0.5));
          }
          break;
        default:
          cluster.etcd_.ExpireAll();
          break;
      }
    }
    for (int i = 0; i < kNodes; ++i) {
      cluster[i].loop->Continue();
      cluster.Partition(Cluster::Name(i), false);
    }
    cluster.Run(kGrace + 3 * kLease);
    cluster.ExpectAll(all);
    EXPECT_EQ(cluster.etcd_.entry_count(), static_cast<std::size_t>(kNodes));
    EXPECT_EQ(cluster.etcd_.lease_count(), static_cast<std::size_t>(kNodes));
    for (int i = 0; i < kNodes; ++i) {
      EXPECT_LE(cluster[i].registry->open(), 2u) << "more than the watch and a renewal";
    }
    if (::testing::Test::HasFailure()) break;
  }
}

}  // namespace
}  // namespace kvmill
