#include "tests/cluster/fetch_sim.h"

#include <algorithm>
#include <map>
#include <memory>
#include <set>

#include "absl/strings/str_cat.h"
#include "tests/cluster/fetch_sim_node.h"

namespace kvmill {

namespace {

constexpr std::size_t kPrompts = 6;
constexpr std::size_t kPromptBlocks = 80;
constexpr std::int64_t kStorm = 20 * kSimSecond;
// Until everyone has the last members (3 s), no pause is left (PeerHealth::kPauseMaxNanos) and
// pointers of processes that are gone have died.
constexpr std::int64_t kCalm = 34 * kSimSecond;

struct NamedFault {
  const char* name;
  FetchFault fault;
};
constexpr NamedFault kFaults[] = {{"trusts-bytes", FetchFault::kTrustsBytes},
                                  {"forgets-views", FetchFault::kForgetsViews},
                                  {"never-withdraws", FetchFault::kNeverWithdraws},
                                  {"immortal-pointers", FetchFault::kImmortalPointers},
                                  {"loses-calls", FetchFault::kLosesCalls},
                                  {"modulo", FetchFault::kModulo},
                                  {"old-members-win", FetchFault::kOldMembersWin}};

class FetchSim {
 public:
  explicit FetchSim(const FetchSimOptions& options)
      : options_(options),
        events_(options.seed, options.trace),
        machines_(options.nodes != 0 ? options.nodes
                                     : static_cast<std::size_t>(events_.Uniform(2, 12))),
        network_(events_,
                 {.machines = machines_, .late = 0.02, .loss = events_.Chance(0.5) ? 0.02 : 0}),
        hosts_(machines_) {
    world_.fault = options.fault;
    world_.report = &report_;
    world_.fail = [this](const std::string& what) { Fail(what); };
    world_.viewed = [this](auto* old, auto& view, std::uint64_t number) {
      CheckView(old, view, number);
    };
  }

  FetchSimReport Run() {
    for (std::size_t i = 0; i < machines_; ++i) {
      nodes_.push_back(std::make_unique<FetchSimNode>(world_, i));
      Start(i, false);
    }
    RunFor(5 * kSimSecond);
    ScheduleWork();
    ScheduleTrouble();
    storm_ = true;
    RunFor(kStorm);
    storm_ = false;
    Heal();
    RunFor(kCalm);
    if (ok()) CheckRest();
    for (auto& node : nodes_) {
      if (ok()) report_.calls += node->calls_started();
      if (ok()) report_.hedges += node->hedges_started();
      if (node->running()) node->Kill(true);
    }
    over_ = true;
    RunFor(kSimSecond + kSimSecond * 2 * static_cast<std::int64_t>(machines_));
    if (ok() && events_.pending() > 0) Fail("events are left when every process is gone");
    report_.events = events_.events_run();
    return report_;
  }

 private:
  bool ok() const { return report_.failure.empty(); }
  void Fail(const std::string& what) {
    events_.Trace("FAILED: " + what);
    if (ok()) {
      report_.failure = absl::StrCat(what, " at ", static_cast<double>(events_.now()) / 1e9, " s");
    }
  }

  void RunFor(std::int64_t nanos) {
    // Every second of it: is anything late?
    for (const std::int64_t end = events_.now() + nanos; events_.now() < end && ok();) {
      events_.RunUntil(std::min(end, events_.now() + kSimSecond), [] {});
      for (const auto& node : nodes_) {
        if (const std::string what = node->Check(false); !what.empty()) Fail(what);
      }
    }
  }

  // Members, as a registry would have them, on their way to everyone.
  void Start(std::size_t i, bool same_incarnation) {
    nodes_[i]->Start(same_incarnation);
    events_.Trace(absl::StrCat("start ", nodes_[i]->member().incarnation));
    members_[i] = nodes_[i]->member();
    Spread();
  }
  void Kill(std::size_t i, bool lose_store) {
    events_.Trace(absl::StrCat("kill ", nodes_[i]->member().incarnation));
    nodes_[i]->Kill(lose_store);
    const std::string incarnation = members_[i].incarnation;
    events_.After(events_.Uniform(kSimSecond, 3 * kSimSecond), [this, i, incarnation] {
      const auto known = members_.find(i);
      if (known == members_.end() || known->second.incarnation != incarnation) return;
      if (nodes_[i]->running()) return;
      members_.erase(i);
      Spread();
    });
  }
  void Spread() {
    ++number_;
    lists_[number_] = {};
    for (const auto& [i, member] : members_) lists_[number_].push_back(member);
    for (std::size_t i = 0; i < machines_; ++i) Deliver(i, number_);
  }
  void Deliver(std::size_t i, std::uint64_t number) {
    events_.After(events_.Uniform(0, 3 * kSimSecond), [this, i, number] {
      if (over_) return;
      if (nodes_[i]->running() && network_.group(i) == 0) {
        return nodes_[i]->SetMembers(lists_[number], number);
      }
      // Not reachable; a process that starts hears of the last list soon.
      if (number == number_) Deliver(i, number);
    });
  }

  // The ranking that is checked; the planted fault is in it alone.
  std::vector<std::string> Homes(const ClusterView& view, std::uint32_t shard) const {
    std::vector<std::string> ids;
    for (const MemberIndex index : view.table().Ranking(shard)) {
      ids.push_back(view.members()[index].id);
    }
    if (options_.fault == FetchFault::kModulo) {
      for (std::size_t i = 0; i < ids.size(); ++i) {
        ids[i] = view.members()[(shard + i) % view.serving_count()].id;
      }
    }
    return ids;
  }

  void CheckView(const ClusterView* old, const std::shared_ptr<const ClusterView>& view,
                 std::uint64_t number) {
    const auto serving = [](const ClusterView& of) {
      std::set<std::string> ids;
      for (const Member& member : of.serving()) ids.insert(member.id);
      return ids;
    };
    for (std::uint32_t shard = 0; shard < view->table().shard_count(); ++shard) {
      const std::vector<std::string> homes = Homes(*view, shard);
      if (old != nullptr) {
        // Whoever is no home any more has gone, or made place for one that came.
        const std::set<std::string> before = serving(*old), now = serving(*view);
        const std::vector<std::string> old_homes = Homes(*old, shard);
        for (std::size_t copies = 1; copies <= std::min(homes.size(), old_homes.size()); ++copies) {
          const auto end = homes.begin() + static_cast<std::ptrdiff_t>(copies);
          const auto old_end = old_homes.begin() + static_cast<std::ptrdiff_t>(copies);
          const auto came = std::count_if(
              homes.begin(), end, [&](const std::string& id) { return !before.contains(id); });
          const auto lost = std::count_if(old_homes.begin(), old_end, [&](const std::string& id) {
            return now.contains(id) && std::find(homes.begin(), end, id) == end;
          });
          if (lost > came) Fail(absl::StrCat("shard ", shard, " moved without need"));
        }
      }
      if (number == 0) continue;
      // All who have these members have these homes.
      const auto [known, first] = homes_.try_emplace({number, shard}, homes);
      if (!first && known->second != homes) {
        Fail(absl::StrCat("two views of members ", number, " differ in shard ", shard));
      }
    }
  }

  std::size_t Any() {
    return static_cast<std::size_t>(events_.Uniform(0, static_cast<std::int64_t>(machines_) - 1));
  }
  std::size_t AnyPrompt() { return static_cast<std::size_t>(events_.Uniform(0, kPrompts - 1)); }

  void ScheduleWork() {
    events_.After(events_.Exponential(100 * kSimMs), [this] {
      if (!storm_) return;
      FetchSimNode& node = *nodes_[Any()];
      const std::size_t prompt = AnyPrompt();
      const std::size_t count = static_cast<std::size_t>(events_.Uniform(1, kPromptBlocks));
      if (!node.running() || node.stopped()) {
        // Its engines have nobody to talk to.
      } else if (events_.Chance(0.25)) {
        node.Store(prompt, count);
      } else if (events_.Chance(0.3)) {
        for (int i = 0; i < 8; ++i) {
          node.EvictOne(prompt, static_cast<std::size_t>(events_.Uniform(0, 2)));
        }
      } else {
        const std::string hint = events_.Chance(0.3) ? nodes_[Any()]->member().id : "";
        node.Read(prompt, count, hint, events_.Uniform(50 * kSimMs, kSimSecond),
                  [](const std::vector<bool>&) {});
      }
      ScheduleWork();
    });
  }

  void ScheduleTrouble() {
    events_.After(events_.Exponential(700 * kSimMs), [this] {
      if (!storm_) return;
      Trouble(Any());
      ScheduleTrouble();
    });
  }

  void Trouble(std::size_t i) {
    FetchSimNode& node = *nodes_[i];
    if (!node.running()) return Start(i, events_.Chance(0.3));
    switch (events_.Uniform(0, 8)) {
      case 0:
      case 1:
        return Kill(i, events_.Chance(0.5));
      case 2:
        events_.Trace(absl::StrCat(node.stopped() ? "continue " : "stop ", node.member().id));
        return node.stopped() ? node.Continue() : node.Stop();
      case 3:
        events_.Trace(absl::StrCat("part or join ", node.member().id));
        return network_.SetGroup(i, network_.group(i) == 0 ? 1 : 0);
      case 4:
        return network_.SetSlow(i, network_.slow(i) ? 0 : events_.Uniform(0, 300 * kSimMs));
      case 5:
      case 6:
        hosts_[i].lies = hosts_[i].lies > 0 ? 0 : 0.5;
        events_.Trace(absl::StrCat(node.member().id, " lies ", hosts_[i].lies));
        return;
      case 7:
        node.SetState(node.member().state == MemberState::kServing ? MemberState::kDraining
                                                                   : MemberState::kServing);
        members_[i] = node.member();
        return Spread();
      default:
        // Gone and back before anyone notices.
        Kill(i, true);
        return Start(i, events_.Chance(0.5));
    }
  }

  void Heal() {
    events_.Trace("everything is well");
    for (std::size_t i = 0; i < machines_; ++i) {
      network_.SetGroup(i, 0);
      network_.SetSlow(i, 0);
      if (!nodes_[i]->running()) Start(i, false);
      if (nodes_[i]->stopped()) nodes_[i]->Continue();
      hosts_[i].lies = 0;
      nodes_[i]->SetState(MemberState::kServing);
      members_[i] = nodes_[i]->member();
    }
    Spread();
  }

  void CheckRest() {
    for (const auto& node : nodes_) {
      if (const std::string what = node->Check(true); !what.empty()) return Fail(what);
      if (node->members_number() != number_) {
        return Fail(absl::StrCat(node->member().id, " has members ", node->members_number(), " of ",
                                 number_));
      }
    }
    for (std::size_t prompt = 0; prompt < kPrompts; ++prompt) {
      for (std::size_t run = 0; run < 3 && !network_.loses(); ++run) CheckPointers(prompt, run);
    }
    // Who was left alone has to be tried first; messages that get lost are no rest.
    for (const bool strict : {false, true}) {
      // What was pulled meanwhile has to be announced.
      RunFor(2 * kSimSecond);
      std::vector<std::size_t> counts;
      for (std::size_t prompt = 0; prompt < kPrompts; ++prompt) counts.push_back(Known(prompt));
      for (std::size_t i = 0; i < machines_ && ok(); ++i) {
        for (std::size_t prompt = 0; prompt < kPrompts && ok(); ++prompt) {
          ReadAll(i, prompt, counts[prompt], strict);
        }
      }
    }
  }

  // What nodes were told is true, or died.
  void CheckPointers(std::size_t prompt, std::size_t run) {
    for (const auto& node : nodes_) {
      for (const Pointer& pointer : node->Told(prompt, run)) {
        const auto holder = std::find_if(nodes_.begin(), nodes_.end(), [&](const auto& other) {
          return other->member().id == pointer.holder;
        });
        const std::size_t has = (*holder)->Leading(prompt, run);
        if (pointer.incarnation == (*holder)->member().incarnation && pointer.count == has)
          continue;
        Fail(absl::StrCat(node->member().id, " believes that ", pointer.incarnation, " has ",
                          pointer.count, " blocks, not ", has));
      }
    }
  }

  // How many blocks of a prompt somebody has, up to the first gap.
  std::size_t Known(std::size_t prompt) const {
    std::size_t count = 0;
    for (std::size_t run = 0; count == run * kRunBlocks; ++run) {
      std::size_t most = 0;
      for (const auto& node : nodes_) most = std::max(most, node->Leading(prompt, run));
      if (most == 0) break;
      count += most;
    }
    return count;
  }

  void ReadAll(std::size_t i, std::size_t prompt, std::size_t count, bool strict) {
    if (count == 0) return;
    FetchSimNode& node = *nodes_[i];
    const std::uint64_t calls = node.calls_started() - node.hedges_started();
    bool done = false;
    std::size_t found = 0;
    node.Read(prompt, count, "", 2 * kSimSecond, [&](const std::vector<bool>& here) {
      done = true;
      found = static_cast<std::size_t>(std::count(here.begin(), here.end(), true));
    });
    for (const std::int64_t end = events_.now() + 3 * kSimSecond; !done && events_.now() < end;) {
      events_.RunUntil(events_.now() + kSimMs, [] {});
    }
    report_.blocks_asked += count;
    report_.blocks_found += found;
    const std::size_t runs = (count + kRunBlocks - 1) / kRunBlocks;
    if (!done) return Fail(absl::StrCat(node.member().id, " never ended a reading"));
    if (!strict || network_.loses()) return;
    if (found < count) {
      Fail(absl::StrCat(node.member().id, " found ", found, " of ", count, " blocks of prompt ",
                        prompt));
    }
    if (node.calls_started() - node.hedges_started() - calls > runs) {
      Fail(absl::StrCat(node.member().id, " made more than ", runs, " calls for ", runs, " runs"));
    }
  }

  const FetchSimOptions options_;
  SimEvents events_;
  const std::size_t machines_;
  SimNetwork network_;
  SimHosts hosts_;
  FetchSimReport report_;
  FetchSimWorld world_{.events = events_, .network = network_, .hosts = hosts_};
  std::vector<std::unique_ptr<FetchSimNode>> nodes_;
  std::map<std::size_t, Member> members_;
  std::uint64_t number_ = 0;
  std::map<std::uint64_t, std::vector<Member>> lists_;
  std::map<std::pair<std::uint64_t, std::uint32_t>, std::vector<std::string>> homes_;
  bool storm_ = false, over_ = false;
};

}  // namespace

std::optional<FetchFault> FetchFaultNamed(const std::string& name) {
  for (const NamedFault& fault : kFaults) {
    if (name == fault.name) return fault.fault;
  }
  return std::nullopt;
}

std::vector<std::string> FetchFaultNames() {
  std::vector<std::string> names;
  for (const NamedFault& fault : kFaults) names.emplace_back(fault.name);
  return names;
}

FetchSimReport RunFetchSim(const FetchSimOptions& options) { return FetchSim(options).Run(); }

}  // namespace kvmill
