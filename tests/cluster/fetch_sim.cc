#include "tests/cluster/fetch_sim.h"

#include <algorithm>
#include <map>
#include <memory>
#include <set>

#include "absl/strings/str_cat.h"
#include "tests/cluster/fetch_sim_copies.h"
#include "tests/cluster/fetch_sim_node.h"

namespace kvmill {

namespace {

constexpr std::int64_t kStorm = 20 * kSimSecond;
// Until all nodes agree with the registry: a lease that has to end, a grace, and attempts that are
// a lease apart at most, twice.
constexpr std::int64_t kConverge = (3 * kSimLeaseSeconds + kSimGraceSeconds + 2) * kSimSecond;
// And then until what nodes that were homes before were told has died. No pause is left by then:
// those that doubled within a storm are not longer.
constexpr std::int64_t kCalm = kSimPointerLife + 2 * kSimSecond;

// For all blocks that there can be, to one node.
constexpr std::int64_t kLeaveMax = 60 * kSimSecond;

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
                                  {"one-history", FetchFault::kOneHistory},
                                  {"loses-events", FetchFault::kLosesEvents},
                                  {"no-grace", FetchFault::kNoGrace},
                                  {"ignores-rate", FetchFault::kIgnoresRate},
                                  {"lacks-copies", FetchFault::kLacksCopies},
                                  {"forgets-homes", FetchFault::kForgetsHomes},
                                  {"hasty-home", FetchFault::kHastyHome},
                                  {"wrong-digests", FetchFault::kWrongDigests},
                                  {"counts-places", FetchFault::kCountsPlaces},
                                  {"guesses", FetchFault::kGuesses}};

class FetchSim {
 public:
  explicit FetchSim(const FetchSimOptions& options)
      : options_(options),
        events_(options.seed, options.trace),
        machines_(options.nodes != 0    ? options.nodes
                  : events_.Chance(0.8) ? static_cast<std::size_t>(events_.Uniform(2, 5))
                                        : static_cast<std::size_t>(events_.Uniform(6, 14))),
        network_(events_,
                 {.machines = machines_ + 1, .late = 0.02, .loss = events_.Chance(0.5) ? 0.02 : 0}),
        etcd_(events_, network_, machines_),
        hosts_(machines_),
        disturbed_(machines_, 0) {
    world_.fault = options.fault;
    world_.copies = static_cast<std::size_t>(events_.Uniform(0, 2));
    world_.report = &report_;
    world_.fail = [this](const std::string& what) { Fail(what); };
    world_.has = [this](const std::string& id, const BlockKey& key) {
      return std::any_of(nodes_.begin(), nodes_.end(), [&](const auto& node) {
        return node->member().id == id && node->Has(key);
      });
    };
    world_.viewed = [this](std::size_t machine, const ClusterView* old, const ClusterView& view) {
      if (events_.tracing()) {
        std::string line = absl::StrCat("machine ", machine, " sees");
        for (const Member& member : view.members()) {
          const bool drains = member.state == MemberState::kDraining;
          absl::StrAppend(&line, " ", member.incarnation, drains ? " (draining)" : "");
        }
        events_.Trace(line);
      }
      CheckView(old, view);
      if (old != nullptr) CheckGrace(machine, *old, view);
    };
  }

  FetchSimReport Run() {
    for (std::size_t i = 0; i < machines_; ++i) {
      nodes_.push_back(std::make_unique<FetchSimNode>(world_, i));
      Start(i, false);
    }
    for (const std::int64_t end = events_.now() + kConverge; ok() && events_.now() < end;) {
      RunFor(2 * kSimSecond);
      if (MembersProblem().empty()) break;
    }
    CheckMembers();
    ScheduleWork();
    ScheduleTrouble();
    storm_ = true;
    RunFor(kStorm);
    storm_ = false;
    Heal();
    RunFor(kConverge);
    CheckMembers();
    RunFor(kCalm);
    CheckDigests();
    if (ok()) CheckRest();
    if (ok()) CheckCopies();
    if (ok()) CheckReading();
    for (auto& node : nodes_) {
      if (ok()) report_.calls += node->calls_started();
      if (ok()) report_.hedges += node->hedges_started();
      if (node->running()) node->Kill(true);
    }
    // Leases end, messages arrive.
    RunFor((kSimLeaseSeconds + 2) * kSimSecond);
    if (ok() && events_.pending() + etcd_.entry_count() + etcd_.watch_count() > 0) {
      Fail("something is left when every process is gone");
    }
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
      events_.RunUntil(std::min(end, events_.now() + kSimSecond), [this] { NoteAbsences(); });
      for (const auto& node : nodes_) {
        if (const std::string what = node->Check(false); !what.empty()) Fail(what);
      }
    }
  }

  void Start(std::size_t i, bool same_incarnation) {
    nodes_[i]->Start(same_incarnation);
    events_.Trace(absl::StrCat("start ", nodes_[i]->member().incarnation));
    Disturb(i);
  }
  void Kill(std::size_t i, bool lose_store) {
    events_.Trace(absl::StrCat("kill ", nodes_[i]->member().incarnation));
    nodes_[i]->Kill(lose_store);
  }
  // It may know less than others for a while.
  void Disturb(std::size_t i) { disturbed_[i] = events_.now(); }

  // Members as the registry has them.
  std::vector<Member> Registered() const {
    std::vector<Member> members;
    for (const Registry::Entry& entry : etcd_.List(MembersPrefix("/kvmill/")).entries) {
      const auto registration = DecodeRegistration(entry.value);
      if (registration.ok()) members.push_back(registration->member);
    }
    return members;
  }

  // Since when members are not in the registry.
  void NoteAbsences() {
    const Registry::Header now = etcd_.header();
    if (now.cluster_id == noted_.cluster_id && now.revision == noted_.revision) return;
    noted_ = now;
    std::set<std::string> present;
    for (const Member& member : Registered()) present.insert(member.id);
    for (const auto& node : nodes_) {
      const std::string& id = node->member().id;
      const auto since = absent_since_.find(id);
      if (!present.contains(id)) {
        absent_since_.try_emplace(id, events_.now());
      } else if (since != absent_since_.end()) {
        returned_[id] = {since->second, events_.now()};
        absent_since_.erase(since);
      }
    }
  }

  // Those that vanish from a view together, more than a third, have been gone for their grace. A
  // node that could not hear of their return is not asked.
  void CheckGrace(std::size_t machine, const ClusterView& old, const ClusterView& view) {
    const std::int64_t recent =
        events_.now() - (kSimGraceSeconds + 2 * kSimLeaseSeconds) * kSimSecond;
    if (disturbed_[machine] > recent || etcd_disturbed_ > recent) return;
    std::vector<std::string> vanished;
    for (const Member& member : old.serving()) {
      if (!view.IndexOf(member.id).has_value()) vanished.push_back(member.id);
    }
    const std::size_t all = vanished.size() + view.serving_count();
    // Whose grace is over is gone by itself, whoever goes at the same moment.
    std::erase_if(vanished, [this](const std::string& id) {
      return Absence(id) >= kSimGraceSeconds * kSimSecond - 500 * kSimMs;
    });
    if (vanished.size() * 3 <= all) return;
    Fail(absl::StrCat("machine ", machine, " dropped ", vanished[0], " with ", vanished.size() - 1,
                      " others of ", all, " without a grace"));
  }

  // For how long the registry has not had it; of one that came back within the last second, of
  // which nobody may have heard yet, for how long it was away.
  std::int64_t Absence(const std::string& id) const {
    if (const auto since = absent_since_.find(id); since != absent_since_.end()) {
      return events_.now() - since->second;
    }
    const auto returned = returned_.find(id);
    if (returned == returned_.end()) return 0;
    const auto [from, to] = returned->second;
    return to > events_.now() - kSimSecond ? to - from : 0;
  }

  // Empty when all nodes see the members that the registry has, and these are all nodes.
  std::string MembersProblem() const {
    const std::vector<Member> want = Registered();
    if (want.size() != machines_) {
      return absl::StrCat("the registry has ", want.size(), " members, not ", machines_);
    }
    for (const auto& node : nodes_) {
      std::vector<Member> seen;
      if (node->view() != nullptr) seen = node->view()->members();
      std::sort(seen.begin(), seen.end(),
                [](const Member& a, const Member& b) { return a.id < b.id; });
      if (seen != want) {
        return absl::StrCat(node->member().id, " does not see the registry's members");
      }
      if (node->snapshot().stale || node->snapshot().keeping ||
          node->snapshot().registration != Registrar::State::kRegistered) {
        return absl::StrCat(node->member().id, " does not know that it is right: ",
                            node->snapshot().problem.ToString());
      }
    }
    for (const Member& member : want) {
      const auto node = std::find_if(nodes_.begin(), nodes_.end(),
                                     [&](const auto& other) { return other->member() == member; });
      if (node == nodes_.end()) {
        return absl::StrCat(member.incarnation, " is registered and does not run");
      }
    }
    return "";
  }
  void CheckMembers() {
    if (const std::string what = MembersProblem(); ok() && !what.empty()) Fail(what);
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

  void CheckView(const ClusterView* old, const ClusterView& view) {
    const auto serving = [](const ClusterView& of) {
      std::set<std::string> ids;
      for (const Member& member : of.serving()) ids.insert(member.id);
      return ids;
    };
    // All whose members serve alike have these homes.
    std::string alike;
    for (const Member& member : view.serving()) absl::StrAppend(&alike, member.id, " ");
    std::vector<std::vector<std::string>>& known = homes_[alike];
    const bool first = known.empty();
    for (std::uint32_t shard = 0; shard < view.table().shard_count(); ++shard) {
      const std::vector<std::string> homes = Homes(view, shard);
      if (old != nullptr) {
        // Whoever is no home any more has gone, or made place for one that came.
        const std::set<std::string> before = serving(*old), now = serving(view);
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
      if (first) {
        known.push_back(homes);
      } else if (known[shard] != homes) {
        Fail(absl::StrCat("two views with the same homes differ in shard ", shard));
      }
    }
  }

  std::size_t Any() {
    return static_cast<std::size_t>(events_.Uniform(0, static_cast<std::int64_t>(machines_) - 1));
  }
  std::size_t AnyPrompt() {
    return static_cast<std::size_t>(events_.Uniform(0, static_cast<std::int64_t>(kSimPrompts) - 1));
  }

  void ScheduleWork() {
    events_.After(events_.Exponential(100 * kSimMs), [this] {
      if (!storm_) return;
      FetchSimNode& node = *nodes_[Any()];
      const std::size_t prompt = AnyPrompt();
      const std::size_t count = static_cast<std::size_t>(events_.Uniform(1, kSimPromptBlocks));
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
    if (events_.Chance(0.25)) return TroubleWithEtcd();
    if (!node.running()) return Start(i, events_.Chance(0.3));
    Disturb(i);
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
        if (events_.Chance(0.5)) return Leave(i);
        node.SetState(node.member().state == MemberState::kServing ? MemberState::kDraining
                                                                   : MemberState::kServing);
        events_.Trace(absl::StrCat(node.member().id, " drains, or not any more"));
        return;
      default:
        // Gone and back before anyone notices.
        Kill(i, true);
        return Start(i, events_.Chance(0.5));
    }
  }

  // As a process does that was told to end.
  void Leave(std::size_t i) {
    events_.Trace(absl::StrCat(nodes_[i]->member().id, " leaves"));
    const std::string life = nodes_[i]->member().incarnation;
    nodes_[i]->HandOver(events_.Uniform(0, 3 * kSimSecond), [this, i, life](const auto& report) {
      events_.Trace(
          absl::StrCat(life, " handed over ", report.blocks, " blocks, not ", report.blocks_left));
      events_.After(1, [this, i, life] {
        if (!storm_) return;
        if (nodes_[i]->running() && nodes_[i]->member().incarnation == life) Kill(i, true);
        nodes_[i]->SetState(MemberState::kServing);
      });
    });
  }

  bool AllListen() const {
    return std::all_of(nodes_.begin(), nodes_.end(), [this](const auto& node) {
      const std::size_t machine = SimHosts::MachineOf(node->member().address);
      return !node->stopped() && network_.group(machine) == 0 && !network_.slow(machine);
    });
  }

  void TroubleWithEtcd() {
    const std::int64_t what = events_.Uniform(0, 9);
    events_.Trace(absl::StrCat("etcd: ", what));
    if (what <= 1 || !etcd_.running()) {
      etcd_disturbed_ = events_.now();
      if (!etcd_.running()) {
        etcd_.Continue();
        etcd_.Start();
      } else if (what == 0) {
        etcd_.Kill();
      } else {
        etcd_.Stop();
      }
    } else if (what <= 3) {
      etcd_.Wipe();
    } else if (what == 4) {
      etcd_.Backup();
    } else if (what <= 6) {
      // With the same cluster id only when everybody hears of it at once: whoever is away while the
      // revision falls and rises again cannot know.
      etcd_.Restore(what == 5 && AllListen());
    } else if (what == 7) {
      etcd_.ExpireAll();
    } else {
      etcd_.Compact(events_.Uniform(0, 5));
    }
  }

  void Heal() {
    events_.Trace("everything is well");
    etcd_.Continue();
    etcd_.Start();
    etcd_disturbed_ = events_.now();
    for (std::size_t i = 0; i < machines_; ++i) {
      network_.SetGroup(i, 0);
      network_.SetSlow(i, 0);
      if (nodes_[i]->leaves()) Kill(i, true);
      if (!nodes_[i]->running()) Start(i, false);
      if (nodes_[i]->stopped()) nodes_[i]->Continue();
      hosts_[i].lies = 0;
      nodes_[i]->SetState(MemberState::kServing);
      Disturb(i);
    }
  }

  void CheckRest() {
    // What is listed to be compared now and then takes a moment.
    const auto works = [](const auto& node) { return !node->Check(true).empty(); };
    for (int i = 0; i < 10 && std::any_of(nodes_.begin(), nodes_.end(), works); ++i) {
      RunFor(200 * kSimMs);
    }
    for (const auto& node : nodes_) {
      if (const std::string what = node->Check(true); !what.empty()) return Fail(what);
    }
    for (std::size_t prompt = 0; prompt < kSimPrompts; ++prompt) {
      for (std::size_t run = 0; run < 3 && !network_.loses(); ++run) CheckPointers(prompt, run);
    }
  }

  // Nodes and homes agree on what was said, when homes need not forget any of it.
  void CheckDigests() {
    const auto differed = [this] {
      std::uint64_t sum = 0;
      for (const auto& node : nodes_) sum += node->differed();
      return sum;
    };
    if (!ok() || machines_ > PointerTable::kHoldersMax || network_.loses()) return;
    const std::uint64_t before = differed();
    RunFor(2 * kSimPointerLife / 3);
    if (differed() > before) Fail("digests differ in peace");
  }

  void CheckCopies() {
    CheckLacks();
    if (!ok() || !events_.Chance(0.3)) return;
    if (machines_ >= 3 && world_.copies > 0) LoseOne();
    if (ok()) LeaveOne();
    if (ok()) LeaveTogether();
    for (std::size_t i = 0; i < machines_; ++i) {
      if (!nodes_[i]->running()) Start(i, false);
    }
    RunFor(kConverge);
    CheckMembers();
    Recover();
    RunFor(kSimPointerLife);
  }

  void CheckLacks() {
    const std::vector<SimLack> lacks = LacksOf(nodes_, world_.copies);
    if (ok() && !lacks.empty()) Fail(ToString(lacks[0]));
  }

  // What is missing is copied in the time that rates predict; a second and a half for who must hear
  // of it, and what calls that get lost take.
  void Recover() {
    RunFor(PredictedNanos(nodes_, LacksOf(nodes_, world_.copies)) +
           (network_.loses() ? 20 * kSimSecond : 3 * kSimSecond / 2));
    CheckLacks();
  }

  void CheckKnown(const std::vector<std::size_t>& known, const std::string& how) {
    const std::vector<std::size_t> now = KnownBlocks(nodes_);
    for (std::size_t prompt = 0; prompt < known.size(); ++prompt) {
      if (now[prompt] >= known[prompt]) continue;
      Fail(absl::StrCat("blocks of prompt ", prompt, " are lost ", how, ": ", now[prompt], " of ",
                        known[prompt], " are left"));
    }
  }

  // A node dies with all that it had.
  void LoseOne() {
    const std::vector<std::size_t> known = KnownBlocks(nodes_);
    const std::size_t lost = Any();
    Kill(lost, true);
    CheckKnown(known, "with one node, and had copies");
    RunFor((kSimLeaseSeconds + 2) * kSimSecond);
    Recover();
  }

  // A node hands over what it has, and goes.
  void LeaveOne() {
    const std::vector<std::size_t> known = KnownBlocks(nodes_);
    std::size_t leaves = Any();
    while (!nodes_[leaves]->running()) leaves = Any();
    const std::int64_t limit = 25 * kSimSecond;
    std::optional<Handover::Report> report;
    nodes_[leaves]->HandOver(limit, [&](const Handover::Report& said) { report = said; });
    for (std::int64_t left = limit; left > 0 && ok() && !report; left -= kSimSecond) {
      RunFor(kSimSecond);
    }
    if (!ok()) return;
    if (!report || report->blocks_left > 0) {
      return Fail(absl::StrCat(nodes_[leaves]->member().id, " could not hand over ",
                               report ? report->blocks_left : 0, " blocks"));
    }
    Kill(leaves, true);
    CheckKnown(known, "with a node that left in order");
    nodes_[leaves]->SetState(MemberState::kServing);
  }

  // Several nodes hand over and go at about the same time: some, all but one, or all. What they had
  // is on those that stay; when nobody stays they say what may be lost.
  void LeaveTogether() {
    std::vector<std::size_t> running;
    for (std::size_t i = 0; i < machines_; ++i) {
      if (nodes_[i]->running()) running.push_back(i);
    }
    const std::vector<std::size_t> known = KnownBlocks(nodes_);
    const auto all = static_cast<std::int64_t>(running.size());
    const auto count = static_cast<std::size_t>(events_.Chance(0.3)   ? all
                                                : events_.Chance(0.3) ? all - 1
                                                                      : events_.Uniform(1, all));
    while (running.size() > count) {
      running.erase(running.begin() +
                    events_.Uniform(0, static_cast<std::int64_t>(running.size()) - 1));
    }
    std::map<std::size_t, Handover::Report> reports;
    std::size_t late = 0;
    for (const std::size_t i : running) {
      events_.After(events_.Uniform(0, kSimSecond), [this, i, &reports, &late] {
        if (!ok()) return;
        events_.Trace(absl::StrCat(nodes_[i]->member().id, " leaves with others"));
        const std::int64_t by = events_.now() + kLeaveMax;
        nodes_[i]->HandOver(kLeaveMax, [this, i, by, &reports, &late](const auto& report) {
          // Clocks run at different speeds.
          late += events_.now() > by + kLeaveMax / 100;
          reports[i] = report;
        });
      });
    }
    for (std::int64_t left = kLeaveMax + 2 * kSimSecond; left > 0 && ok() && reports.size() < count;
         left -= kSimSecond) {
      RunFor(kSimSecond);
    }
    if (!ok()) return;
    if (reports.size() < count || late > 0) return Fail("a node that leaves with others is late");
    std::uint64_t left = 0;
    for (const auto& [i, report] : reports) left += report.blocks_left;
    for (const std::size_t i : running) Kill(i, true);
    if (count < static_cast<std::size_t>(all)) {
      if (left > 0)
        Fail(absl::StrCat(count, " of ", all, " nodes that left had ", left, " blocks left"));
      CheckKnown(known, absl::StrCat("with ", count, " of ", all, " nodes that left together"));
    } else if (std::any_of(known.begin(), known.end(), [](std::size_t n) { return n > 0; }) &&
               left == 0) {
      Fail("all nodes left, and nobody said that blocks may be lost");
    }
    for (const std::size_t i : running) nodes_[i]->SetState(MemberState::kServing);
  }

  void CheckReading() {
    // Who was left alone has to be tried first; messages that get lost are no rest.
    for (const bool strict : {false, true}) {
      // What was pulled meanwhile has to be announced.
      RunFor(2 * kSimSecond);
      world_.peace = strict && !network_.loses();
      const std::vector<std::size_t> counts = KnownBlocks(nodes_);
      for (std::size_t i = 0; i < machines_ && ok(); ++i) {
        for (std::size_t prompt = 0; prompt < kSimPrompts && ok(); ++prompt) {
          ReadAll(i, prompt, counts[prompt], strict);
        }
      }
    }
  }

  // What nodes were told is true, or died.
  void CheckPointers(std::size_t prompt, std::size_t run) {
    for (const auto& node : nodes_) {
      for (const PointerTable::Holder& told : node->Told(prompt, run)) {
        const auto holder = std::find_if(nodes_.begin(), nodes_.end(), [&](const auto& other) {
          return other->member().id == told.id;
        });
        const RunSketch has = (*holder)->SketchOf(prompt, run);
        if (told.incarnation == (*holder)->member().incarnation && told.sketch == has) continue;
        Fail(absl::StrCat(node->member().id, " believes that ", told.incarnation, " has ",
                          told.sketch.count, " places and ", told.sketch.blocks, " blocks, not ",
                          has.count, " and ", has.blocks));
      }
    }
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
    // Prompts that part within their first run may have to be told apart by those who have them.
    const std::size_t most = runs + (SimPromptsLike(prompt) > 1 ? machines_ : 0);
    if (node.calls_started() - node.hedges_started() - calls > most) {
      Fail(absl::StrCat(node.member().id, " made more than ", most, " calls for ", runs, " runs"));
    }
  }

  const FetchSimOptions options_;
  SimEvents events_;
  const std::size_t machines_;
  SimNetwork network_;
  SimEtcd etcd_;
  SimHosts hosts_;
  FetchSimReport report_;
  FetchSimWorld world_{.events = events_, .network = network_, .hosts = hosts_, .etcd = etcd_};
  std::vector<std::unique_ptr<FetchSimNode>> nodes_;
  // When something last happened to a machine, and to the registry, that keeps them from hearing.
  std::vector<std::int64_t> disturbed_;
  std::int64_t etcd_disturbed_ = 0;
  Registry::Header noted_;
  std::map<std::string, std::int64_t> absent_since_;
  std::map<std::string, std::pair<std::int64_t, std::int64_t>> returned_;  // Last absences.
  // Rankings by shard, by the ids of those that serve.
  std::map<std::string, std::vector<std::vector<std::string>>> homes_;
  bool storm_ = false;
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
