#include "tests/cluster/sim_peers.h"

#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "storage/core/check.h"

namespace kvmill {

std::string SimHosts::AddressOf(std::size_t machine) { return absl::StrCat("machine:", machine); }

std::size_t SimHosts::MachineOf(const std::string& address) {
  std::size_t machine = 0;
  KVMILL_CHECK(absl::SimpleAtoi(address.substr(address.find(':') + 1), &machine));
  return machine;
}

SimPeers::~SimPeers() {
  *alive_ = false;
  for (auto& [id, call] : calls_) loop().Cancel(call.timer);
}

Peers::CallId SimPeers::Start(const Member& member, std::int64_t deadline_nanos, Fail fail,
                              std::function<std::function<void()>(SimHosts::Host&)> serve) {
  const CallId id = next_++;
  Call& call = calls_[id];
  call.fail = fail;
  if (deadlines_) {
    call.timer = loop().At(deadline_nanos, [this, id, fail] {
      End(id, [&] { fail(absl::DeadlineExceededError("no answer in time")); });
    });
  }
  const std::size_t to = SimHosts::MachineOf(member.address);
  const auto back = [this, id, alive = alive_, from = to, to_me = machine_,
                     network = &network_](std::function<void()> run) {
    network->Send(from, to_me, [this, id, alive, run = std::move(run)] {
      if (!*alive) return;
      loop().Post([this, id, alive, run] {
        if (*alive) End(id, run);
      });
    });
  };
  network_.Send(machine_, to, [hosts = &hosts_, to, member, back, fail, serve = std::move(serve)] {
    SimHosts::Host& host = (*hosts)[to];
    // A machine without a process refuses; a process that is another one fails the handshake.
    if (host.service == nullptr) {
      return back([fail] { fail(absl::UnavailableError("nobody is there")); });
    }
    if (host.id != member.id || host.incarnation != member.incarnation) {
      return back([fail] { fail(ReplacedError("another process is there")); });
    }
    host.loop->Post([hosts, to, back, serve, alive = host.alive] {
      if (*alive) back(serve((*hosts)[to]));
    });
  });
  return id;
}

void SimPeers::End(CallId id, const std::function<void()>& run) {
  const auto node = calls_.extract(id);
  if (node.empty()) return;
  loop().Cancel(node.mapped().timer);
  run();
}

Member SimPeers::self() const {
  Member member;
  member.id = hosts_[machine_].id;
  member.incarnation = hosts_[machine_].incarnation;
  member.address = SimHosts::AddressOf(machine_);
  return member;
}

void SimPeers::Cancel(CallId id) {
  End(id, [] {});
}

Peers::CallId SimPeers::Locate(const Member& member, const Fingerprint& fingerprint,
                               std::vector<RunQuery> queries, std::int64_t deadline_nanos,
                               Done<std::vector<RunAnswer>> done) {
  KVMILL_CHECK(!queries.empty() && queries.size() <= kQueryRunsMax);
  return Start(member, deadline_nanos, done,
               [events = &events_, self = self(), fingerprint, queries = std::move(queries),
                done](SimHosts::Host& host) {
                 std::vector<RunAnswer> answers =
                     host.service->OnLocate(self, fingerprint, queries);
                 if (events->Chance(host.lies)) {
                   RunAnswer& answer = answers[static_cast<std::size_t>(
                       events->Uniform(0, static_cast<std::int64_t>(answers.size()) - 1))];
                   answer.present ^= std::uint32_t{1} << events->Uniform(0, 31);
                   for (Pointer& pointer : answer.pointers) {
                     pointer.blocks ^= std::uint32_t{1} << events->Uniform(0, 31);
                     pointer.perhaps ^= std::uint32_t{1} << events->Uniform(0, 31);
                   }
                   if (events->Chance(0.2)) answers.pop_back();
                 }
                 return [done, answers] { done(answers); };
               });
}

Peers::CallId SimPeers::Pull(const Member& member, const Fingerprint& fingerprint, RunKeys wanted,
                             std::int64_t deadline_nanos, Done<std::vector<absl::Status>> done) {
  std::vector<BlockKey> keys = std::move(wanted.keys);
  KVMILL_CHECK(!keys.empty() && keys.size() <= kRunBlocks);
  KVMILL_CHECK(wanted.places.size() == (wanted.anchor.empty() ? 0 : keys.size()));
  return Start(
      member, deadline_nanos, done,
      [this, events = &events_, fingerprint, keys = std::move(keys), done](SimHosts::Host& host) {
        std::vector<SimPeerService::Block> blocks = host.service->OnPull(fingerprint, keys);
        if (events->Chance(host.lies)) {
          SimPeerService::Block& block = blocks[static_cast<std::size_t>(
              events->Uniform(0, static_cast<std::int64_t>(blocks.size()) - 1))];
          if (!block.bytes.empty()) block.bytes[0] ^= 1;
        }
        return [this, fingerprint, keys, blocks, done] {
          std::vector<absl::Status> statuses;
          for (std::size_t i = 0; i < keys.size(); ++i) {
            statuses.push_back(blocks[i].found
                                   ? hosts_[machine_].service->Keep(fingerprint, keys[i], blocks[i])
                                   : absl::NotFoundError("the peer does not have it"));
          }
          done(std::move(statuses));
        };
      });
}

Peers::CallId SimPeers::Announce(const Member& member, std::vector<Announcement> announcements,
                                 std::int64_t deadline_nanos,
                                 std::function<void(absl::Status)> done) {
  KVMILL_CHECK(announcements.size() <= kAnnouncementsMax);
  return Start(
      member, deadline_nanos, done,
      [self = self(), announcements = std::move(announcements), done](SimHosts::Host& host) {
        host.service->OnAnnounce(self, announcements);
        return [done] { done(absl::OkStatus()); };
      });
}

Peers::CallId SimPeers::ListRuns(const Member& member, std::vector<RunList> lists,
                                 std::int64_t deadline_nanos, Done<std::vector<HeldRun>> done) {
  KVMILL_CHECK(!lists.empty() && lists.size() <= kListRunsMax);
  return Start(member, deadline_nanos, done,
               [events = &events_, lists = std::move(lists), done](SimHosts::Host& host) {
                 std::vector<HeldRun> runs = host.service->OnListRuns(lists);
                 if (!runs.empty() && !runs[0].blocks.keys.empty() && events->Chance(host.lies)) {
                   HeldRun& run = runs[static_cast<std::size_t>(
                       events->Uniform(0, static_cast<std::int64_t>(runs.size()) - 1))];
                   if (run.blocks.keys.empty()) run = runs[0];
                   switch (events->Uniform(0, 4)) {
                     case 0:
                       run.anchor_hash ^= std::uint64_t{1} << events->Uniform(0, 63);
                       break;
                     case 1:
                       run.bytes = 0;
                       break;
                     case 2:
                       run.blocks.keys.push_back(run.blocks.keys[0]);
                       run.blocks.places.push_back(kRunBlocks - 1);
                       break;
                     case 3:
                       run.more = !run.more;
                       break;
                     default:
                       run.blocks.keys[0] =
                           *BlockKey::FromBytes(absl::StrCat(run.blocks.keys[0].view(), "?"));
                   }
                 }
                 return [done, runs] { done(runs); };
               });
}

Peers::CallId SimPeers::HandOver(const Member& member, std::vector<Announcement> announcements,
                                 std::int64_t deadline_nanos,
                                 Done<std::vector<std::uint8_t>> done) {
  KVMILL_CHECK(!announcements.empty() && announcements.size() <= kAnnouncementsMax);
  return Start(member, deadline_nanos, done,
               [events = &events_, self = self(), announcements = std::move(announcements),
                done](SimHosts::Host& host) {
                 std::vector<std::uint8_t> counts = host.service->OnHandOver(self, announcements);
                 if (events->Chance(host.lies)) counts.pop_back();
                 return [done, counts] { done(counts); };
               });
}

Peers::CallId SimPeers::Compare(const Member& member, const Digests& digests,
                                std::int64_t deadline_nanos, Done<std::uint64_t> done) {
  return Start(member, deadline_nanos, done, [self = self(), digests, done](SimHosts::Host& host) {
    const std::uint64_t differ = host.service->OnCompare(self, digests);
    return [done, differ] { done(differ); };
  });
}

}  // namespace kvmill
