#include "tests/cluster/fetch_sim_node.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "storage/core/checksum.h"
#include "tests/cluster/sketches.h"

namespace kvmill {

namespace {

constexpr Fingerprint kFingerprint{};
constexpr int kShardBitsOfSim = 4;
constexpr std::size_t kPromptsMax = 16;  // Of which hashes of anchors are known.
constexpr std::size_t kRunsMax = 8;      // Of a prompt.
// In blocks: of a second, and of a call.
constexpr std::uint64_t kSimRate = 40, kSimCall = 8;
constexpr std::size_t kSimListKeys = 24;  // Of one answer to ListRuns.

std::uint64_t ChecksumOf(const std::string& bytes) {
  return Checksum({reinterpret_cast<const std::byte*>(bytes.data()), bytes.size()});
}

struct Place {
  std::uint32_t prompt = 0, index = 0;
};
Place PlaceOf(const BlockKey& key) {
  Place place;
  std::memcpy(&place, key.data(), sizeof(place));
  return place;
}

}  // namespace

namespace {

// Prompts that have their first blocks in common.
struct Family {
  std::size_t first = 0, count = 0;  // Prompts,
  std::size_t shared = 0;            //   and blocks.
};
Family FamilyOf(std::size_t prompt) {
  if (prompt < 3) return {0, 3, 5};
  if (prompt < 5) return {3, 2, 20};
  return {prompt, 1, 0};
}

// A prompt and the run that a hash stands for.
const std::pair<std::size_t, std::size_t>* RunOf(std::uint64_t anchor_hash) {
  static const auto* const kRuns = [] {
    auto* runs = new std::map<std::uint64_t, std::pair<std::size_t, std::size_t>>();
    for (std::size_t prompt = 0; prompt < kPromptsMax; ++prompt) {
      for (std::size_t run = 0; run < kRunsMax; ++run) {
        (*runs)[AnchorHash(kFingerprint, SimKey(prompt, run * kRunBlocks))] = {prompt, run};
      }
    }
    return runs;
  }();
  const auto found = kRuns->find(anchor_hash);
  return found == kRuns->end() ? nullptr : &found->second;
}

}  // namespace

BlockKey SimKey(std::size_t prompt, std::size_t index) {
  if (index < FamilyOf(prompt).shared) prompt = FamilyOf(prompt).first;
  const Place place{static_cast<std::uint32_t>(prompt), static_cast<std::uint32_t>(index)};
  char bytes[16] = {};
  std::memcpy(bytes, &place, sizeof(place));
  return *BlockKey::FromBytes({bytes, sizeof(bytes)});
}

std::size_t SimPromptsLike(std::size_t prompt) { return FamilyOf(prompt).count; }

std::string SimBytes(const BlockKey& key) { return absl::StrCat("bytes of ", key.view()); }

std::vector<BlockKey> SimKeys(std::size_t prompt, std::size_t count) {
  std::vector<BlockKey> keys;
  for (std::size_t i = 0; i < count; ++i) keys.push_back(SimKey(prompt, i));
  return keys;
}

bool FetchSimNode::Has(const BlockKey& key) const {
  const Place place = PlaceOf(key);
  const auto found = store_.find(place.prompt);
  return key == SimKey(place.prompt, place.index) && found != store_.end() &&
         place.index < found->second.size() && !found->second[place.index].empty();
}

std::string& FetchSimNode::Slot(const BlockKey& key) {
  const Place place = PlaceOf(key);
  std::vector<std::string>& blocks = store_[place.prompt];
  if (blocks.size() <= place.index) blocks.resize(place.index + 1);
  return blocks[place.index];
}

FetchSimNode::FetchSimNode(FetchSimWorld& world, std::size_t machine)
    : world_(world), machine_(machine) {
  member_.id = absl::StrCat("node-", machine);
  member_.address = SimHosts::AddressOf(machine);
  member_.zone = absl::StrCat("zone-", world.events.Uniform(0, 2));
  member_.capacity_bytes = static_cast<std::uint64_t>(world.events.Uniform(1, 4)) << 40;
}

FetchSimNode::~FetchSimNode() = default;

namespace {

SimFaultyRegistry::Fault RegistryFault(FetchFault fault) {
  return fault == FetchFault::kOneHistory    ? SimFaultyRegistry::Fault::kOneHistory
         : fault == FetchFault::kLosesEvents ? SimFaultyRegistry::Fault::kLosesEvents
                                             : SimFaultyRegistry::Fault::kNone;
}

Membership::Options MembershipOptions(const FetchSimWorld& world, const Member& self,
                                      std::size_t machine) {
  Membership::Options options;
  options.self.member = self;
  // Half of the nodes have a lock file that says whose the entry is.
  if (machine % 2 == 0) options.self.holder = absl::StrCat("holder ", 100'000'000 + machine);
  options.lease_seconds = kSimLeaseSeconds;
  options.grace_seconds = world.fault == FetchFault::kNoGrace ? 0 : kSimGraceSeconds;
  options.seed = machine + 1;
  return options;
}

}  // namespace

FetchSimNode::Process::Process(FetchSimNode* node, const Member& self)
    : loop(node->world_.events, node->world_.events.Uniform(0, 100 * kSimSecond),
           node->world_.events.Uniform(-300, 300)),
      peers(node->world_.events, node->world_.network, node->world_.hosts, node->machine_),
      health(loop.clock()),
      pointers(loop.clock(), {.anchors_max = 64,
                              .life_nanos = node->world_.fault == FetchFault::kImmortalPointers
                                                ? 1'000'000 * kSimSecond
                                                : kSimPointerLife}),
      announcer(loop, peers, health,
                {.self_id = self.id,
                 .copies = node->world_.copies,
                 .tick_nanos = kSimSecond,
                 .repeat_nanos = kSimPointerLife / 3,
                 .compare_nanos = 2 * kSimSecond,
                 .withdraw_nanos = 3 * kSimSecond,
                 .to_self =
                     [this, self](const std::vector<Announcement>& told) {
                       pointers.Announced(self, told);
                     }}),
      lookup(loop, peers, health,
             {.self_id = self.id,
              .copies = node->world_.copies,
              .local =
                  [node](const Fingerprint& fingerprint, const RunQuery& query) {
                    return node->OnLocate(node->member_, fingerprint, {query})[0];
                  }}),
      fetch(loop, peers, health),
      hot(loop.clock()),
      // Four blocks of a burst, and a call that was begun last.
      metered(peers, loop.clock(),
              {.bytes_per_second = static_cast<double>(kSimRate * kSimBlockBytes),
               .burst_bytes = static_cast<double>((kSimRate / 10 + kSimCall + 1) * kSimBlockBytes),
               .block_bytes = static_cast<double>(kSimBlockBytes),
               .exceeded = [node] { node->world_.fail("copies come faster than they may"); }}),
      replicator(
          loop, metered, health, pointers,
          {.self_id = self.id,
           .copies = node->world_.fault == FetchFault::kLacksCopies && node->world_.copies > 0
                         ? node->world_.copies - 1
                         : node->world_.copies,
           .rate = {.bytes_per_second = kSimRate * kSimBlockBytes *
                                        (node->world_.fault == FetchFault::kIgnoresRate ? 3 : 1),
                    .ramp_nanos = 3 * kSimSecond},
           .call_bytes = kSimCall * kSimBlockBytes,
           .sweep_nanos = 5 * kSimSecond,
           .list_nanos = 500 * kSimMs,
           .pull_nanos = kSimSecond,
           .rest_nanos = 10 * kSimSecond,
           .held = [this, node](std::uint64_t hash) -> RunSketch {
             const auto* run = RunOf(hash);
             if (run == nullptr) return RunSketch();
             const RunSketch held = node->SketchOf(run->first, run->second);
             if (node->world_.fault != FetchFault::kCountsPlaces) return held;
             for (const PointerTable::Holder& holder : pointers.HoldersOf(hash)) {
               if (holder.sketch.count == held.count) return holder.sketch;
             }
             return held;
           },
           .bytes = [node](const Fingerprint&,
                           const BlockKey& key) { return node->Has(key) ? kSimBlockBytes : 0; }}),
      handover(loop, peers, health, {.self_id = self.id}),
      keeper({.shard_bits = kShardBitsOfSim,
              .background =
                  [this, node](std::function<void()> work, std::function<void()> done) {
                    work();
                    loop.After(node->world_.events.Uniform(0, 20 * kSimMs), std::move(done));
                  },
              .publish = [node](auto made) { node->OnView(made); },
              .refuse =
                  [node](const absl::Status& status) {
                    node->world_.fail(std::string(status.message()));
                  }}),
      registry(node->world_.events,
               std::make_unique<SimRegistry>(node->world_.etcd, node->world_.network, loop,
                                             node->machine_),
               RegistryFault(node->world_.fault)),
      membership(loop, registry, MembershipOptions(node->world_, self, node->machine_),
                 [node](const std::shared_ptr<const MembershipSnapshot>& snapshot) {
                   node->OnMembers(*snapshot);
                 }) {
  SimHosts::Host& host = node->world_.hosts[node->machine_];
  host.id = self.id;
  host.incarnation = self.incarnation;
  host.loop = &loop;
  host.service = node;
  host.alive = std::make_shared<bool>(true);
  if (node->world_.fault == FetchFault::kLosesCalls) peers.ForgetDeadlines();
}

FetchSimNode::Process::~Process() = default;

void FetchSimNode::Start(bool same_incarnation) {
  if (!same_incarnation) ++lives_;
  member_.incarnation = absl::StrCat(member_.id, "#", lives_);
  member_.incarnation.resize(16, '.');
  process_ = std::make_unique<Process>(this, member_);
  for (const auto& [prompt, blocks] : store_) {
    for (std::size_t run = 0; run < 8; ++run) Announce(prompt, run);
  }
  process_->loop.Post([this] { process_->membership.Start(); });
}

void FetchSimNode::SetState(MemberState state) {
  member_.state = state;
  if (running()) process_->loop.Post([this, state] { process_->membership.SetState(state); });
}

void FetchSimNode::HandOver(std::int64_t limit, std::function<void(const Handover::Report&)> done) {
  Process& process = *process_;
  if (process.handover.running()) return;
  SetState(MemberState::kDraining);
  process.handover_deadline = process.loop.clock().MonotonicNanos() + limit;
  process.replicator.Leave();
  process.handover.Start(process.announcer.Held(), process.handover_deadline, std::move(done));
}

void FetchSimNode::Kill(bool lose_store) {
  SimHosts::Host& host = world_.hosts[machine_];
  *host.alive = false;
  process_.reset();
  host = {};
  if (lose_store) {
    store_.clear();
  }
}

void FetchSimNode::OnMembers(const MembershipSnapshot& snapshot) {
  if (snapshot.version == 0 || snapshot.version == process_->members_version) return;
  process_->members_version = snapshot.version;
  process_->replicator.SetMembers(snapshot.members);
  process_->handover.SetMembers(snapshot.members);
  process_->keeper.SetMembers(snapshot.members);
}

void FetchSimNode::OnView(const std::shared_ptr<const ClusterView>& view) {
  Process& process = *process_;
  ++world_.report->views;
  world_.viewed(machine_, process.view.get(), *view);
  process.view = view;
  process.lookup.SetView(view);
  process.pointers.Keep(*view);
  process.health.Keep(*view);
  if (world_.fault != FetchFault::kForgetsViews || view->number() == 1) {
    process.announcer.SetView(view);
  }
  if (world_.fault != FetchFault::kForgetsHomes || view->number() == 1) {
    process.replicator.SetView(view);
  }
  process.handover.SetView(view);
}

std::size_t FetchSimNode::Leading(std::size_t prompt, std::size_t run) const {
  std::size_t count = 0;
  while (count < kRunBlocks && Has(SimKey(prompt, run * kRunBlocks + count))) ++count;
  return count;
}

std::vector<std::pair<std::size_t, BlockKey>> FetchSimNode::BlocksOf(std::size_t prompt,
                                                                     std::size_t run) const {
  std::vector<std::pair<std::size_t, BlockKey>> blocks;
  const auto add = [&](std::size_t of, std::size_t from) {
    for (std::size_t place = from; place < kRunBlocks; ++place) {
      const BlockKey key = SimKey(of, run * kRunBlocks + place);
      if (Has(key)) blocks.emplace_back(place, key);
    }
  };
  add(prompt, 0);
  const Family family = FamilyOf(prompt);
  for (std::size_t i = family.first; run == 0 && i < family.first + family.count; ++i) {
    if (i != prompt) add(i, family.shared);
  }
  std::sort(blocks.begin(), blocks.end(), [](const auto& a, const auto& b) {
    return std::pair(a.first, KeyHash(kFingerprint, a.second)) <
           std::pair(b.first, KeyHash(kFingerprint, b.second));
  });
  return blocks;
}

RunSketch FetchSimNode::SketchOf(std::size_t prompt, std::size_t run) const {
  std::vector<std::pair<std::size_t, std::uint64_t>> hashes;
  for (const auto& [place, key] : BlocksOf(prompt, run)) {
    hashes.emplace_back(place, KeyHash(kFingerprint, key));
  }
  return SketchOfBlocks(hashes);
}

std::vector<PointerTable::Holder> FetchSimNode::Told(std::size_t prompt, std::size_t run) const {
  return process_->pointers.HoldersOf(AnchorHash(kFingerprint, SimKey(prompt, run * kRunBlocks)));
}

void FetchSimNode::Announce(std::size_t prompt, std::size_t run) {
  process_->announcer.Set(
      {AnchorHash(kFingerprint, SimKey(prompt, run * kRunBlocks)), SketchOf(prompt, run)});
}

void FetchSimNode::Store(std::size_t prompt, std::size_t count) {
  for (const BlockKey& key : SimKeys(prompt, count)) Slot(key) = SimBytes(key);
  for (std::size_t run = 0; run * kRunBlocks < count; ++run) Announce(prompt, run);
}

void FetchSimNode::EvictOne(std::size_t prompt, std::size_t run) {
  const std::size_t leading = Leading(prompt, run);
  if (leading == 0) return;
  Slot(SimKey(prompt, run * kRunBlocks + leading - 1)).clear();
  if (world_.fault != FetchFault::kNeverWithdraws) Announce(prompt, run);
  process_->replicator.Evicted(
      AnchorHash(kFingerprint, SimKey(prompt, run * kRunBlocks)),
      KeyHash(kFingerprint, SimKey(prompt, run * kRunBlocks + leading - 1)));
}

std::vector<RunAnswer> FetchSimNode::OnLocate(const Member& from, const Fingerprint& fingerprint,
                                              const std::vector<RunQuery>& queries) {
  std::vector<RunAnswer> answers;
  for (const RunQuery& query : queries) {
    answers.push_back(AnswerOf(
        fingerprint, query, [this](const BlockKey& key) { return Has(key); }, process_->pointers));
    if (answers.back().pointers.empty() || from.id == member_.id) continue;
    if (world_.fault == FetchFault::kGuesses) {
      for (Pointer& pointer : answers.back().pointers) {
        pointer.blocks |= std::exchange(pointer.perhaps, 0);
      }
    }
    const std::uint64_t hash = AnchorHash(fingerprint, query.anchor);
    if (process_->hot.Asked(hash, from.id)) process_->replicator.Hot(hash);
  }
  return answers;
}

std::vector<SimPeerService::Block> FetchSimNode::OnPull(const Fingerprint&,
                                                        const std::vector<BlockKey>& keys) {
  std::vector<Block> blocks;
  for (const BlockKey& key : keys) {
    blocks.emplace_back();
    if (!Has(key)) continue;
    const std::string& bytes = Slot(key);
    blocks.back() = {true, bytes, ChecksumOf(bytes)};
  }
  return blocks;
}

void FetchSimNode::OnAnnounce(const Member& from, const std::vector<Announcement>& announcements) {
  if (world_.events.tracing()) {
    for (const Announcement& said : announcements) {
      world_.events.Trace(absl::StrCat(member_.id, " hears from ", from.incarnation, ": ",
                                       absl::Hex(said.anchor_hash), " ", said.sketch.count, " ",
                                       said.sketch.blocks));
    }
  }
  process_->pointers.Announced(from, announcements);
  process_->replicator.Announced(announcements);
}

std::vector<HeldRun> FetchSimNode::OnListRuns(const std::vector<RunList>& lists) {
  std::vector<HeldRun> runs;
  for (const RunList& list : lists) {
    const auto* of = RunOf(list.anchor_hash);
    if (of == nullptr) continue;
    const auto blocks = BlocksOf(of->first, of->second);
    if (blocks.empty() || blocks[0].first != 0) continue;
    HeldRun run;
    run.anchor_hash = list.anchor_hash;
    run.blocks.anchor = blocks[0].second;
    for (std::size_t i = 0; i < blocks.size(); ++i) {
      const std::uint64_t hash = KeyHash(kFingerprint, blocks[i].second);
      if (std::pair(blocks[i].first, hash) <=
          std::pair(std::size_t{list.after_place}, list.after_hash)) {
        continue;
      }
      run.more = run.blocks.keys.size() == kSimListKeys;
      if (run.more) break;
      run.blocks.keys.push_back(blocks[i].second);
      run.blocks.places.push_back(static_cast<std::uint8_t>(blocks[i].first));
    }
    run.bytes = run.blocks.keys.size() * kSimBlockBytes;
    runs.push_back(std::move(run));
  }
  return runs;
}

std::vector<std::uint8_t> FetchSimNode::OnHandOver(const Member& from,
                                                   const std::vector<Announcement>& announcements) {
  process_->pointers.Announced(from, announcements);
  std::vector<std::uint8_t> counts = process_->replicator.HandedOver(from, announcements);
  if (world_.events.tracing()) {
    for (std::size_t i = 0; i < counts.size(); ++i) {
      world_.events.Trace(absl::StrCat(member_.id, " takes over ", counts[i], " of ",
                                       announcements[i].sketch.count, " places of ",
                                       absl::Hex(announcements[i].anchor_hash)));
    }
  }
  if (world_.fault == FetchFault::kHastyHome) {
    for (std::size_t i = 0; i < counts.size(); ++i) counts[i] = announcements[i].sketch.count;
  }
  return counts;
}

std::uint64_t FetchSimNode::OnCompare(const Member& from, const Digests& digests) {
  Digests compared = digests;
  if (world_.fault == FetchFault::kWrongDigests) compared[0] ^= 1;
  return process_->pointers.Compare(from, compared);
}

absl::Status FetchSimNode::Keep(const Fingerprint&, const BlockKey& key, const Block& block) {
  if (ChecksumOf(block.bytes) != block.checksum && world_.fault != FetchFault::kTrustsBytes) {
    ++world_.report->blocks_refused;
    return absl::DataLossError("checksum");
  }
  if (block.bytes != SimBytes(key)) {
    world_.fail(absl::StrCat(member_.id, " keeps wrong bytes of ", key.ToHex()));
  }
  Slot(key) = block.bytes;
  const Place place = PlaceOf(key);
  Announce(place.prompt, place.index / kRunBlocks);
  return absl::OkStatus();
}

void FetchSimNode::Read(std::size_t prompt, std::size_t count, const std::string& hint,
                        std::int64_t timeout, std::function<void(std::vector<bool>)> done) {
  Process& process = *process_;
  const std::uint64_t id = process.next_reading++;
  Reading& reading = process.readings[id];
  const std::vector<BlockKey> keys = SimKeys(prompt, count);
  // Two thirds of the time to find out, the rest to pull.
  const std::int64_t now = process.loop.clock().MonotonicNanos();
  reading.deadline = now + timeout;
  reading.done = [this, keys, done = std::move(done)] {
    std::vector<bool> here;
    for (const BlockKey& key : keys) here.push_back(Has(key));
    done(std::move(here));
  };
  RemoteLookup::Request request{.hint = hint, .deadline_nanos = now + timeout * 2 / 3};
  for (const AnchorRun& run : RunsOf(keys)) {
    const auto begin = keys.begin() + static_cast<std::ptrdiff_t>(run.first);
    reading.runs.emplace_back(begin, begin + static_cast<std::ptrdiff_t>(run.count));
    request.runs.push_back({run.anchor, 0, reading.runs.back()});
  }
  ++world_.report->lookups;
  process.lookup.Start(std::move(request), [this, id](const std::vector<RemoteLookup::Run>& found) {
    Looked(id, found);
  });
}

void FetchSimNode::Looked(std::uint64_t id, const std::vector<RemoteLookup::Run>& found) {
  Process& process = *process_;
  Reading& reading = process.readings.at(id);
  const std::int64_t now = process.loop.clock().MonotonicNanos();
  if (found.size() != reading.runs.size()) world_.fail("a lookup lost runs");
  reading.open = 1;
  for (std::size_t i = 0; i < found.size(); ++i) {
    if (world_.events.tracing()) {
      std::string line =
          absl::StrCat(member_.id, " looked for ", reading.runs[i].size(), " blocks:");
      for (const RemoteLookup::Source& source : found[i].sources) {
        absl::StrAppend(&line, " ", source.member.id, source.told ? " has " : " may have ",
                        std::popcount(source.blocks));
      }
      world_.events.Trace(line);
    }
    for (const RemoteLookup::Source& source : found[i].sources) {
      for (std::size_t k = 0; world_.peace && k < reading.runs[i].size(); ++k) {
        if ((source.blocks >> k & 1) == 0 || world_.has(source.member.id, reading.runs[i][k])) {
          continue;
        }
        world_.fail(absl::StrCat(member_.id, " believes that ", source.member.id,
                                 source.told ? " has" : " was heard to have", " block ", k));
      }
    }
    ++reading.open;
    process.fetch.Start({.anchor = reading.runs[i].front(),
                         .keys = reading.runs[i],
                         .sources = found[i].sources,
                         .call_nanos = (reading.deadline - now) / 3,
                         .deadline_nanos = reading.deadline},
                        [this, id](std::uint32_t) { Ended(id); });
  }
  Ended(id);
}

void FetchSimNode::Ended(std::uint64_t id) {
  Process& process = *process_;
  if (--process.readings.at(id).open > 0) return;
  const auto node = process.readings.extract(id);
  node.mapped().done();
}

std::string FetchSimNode::Check(bool at_rest) const {
  if (!running() || stopped()) return "";
  const Process& process = *process_;
  const std::int64_t now = process.loop.clock().MonotonicNanos();
  for (const auto& [id, reading] : process.readings) {
    // A process that was stopped has just gone on, and does what is due first.
    if (now > reading.deadline + kSimSecond) {
      return absl::StrCat(member_.id, " has a reading that is overdue");
    }
  }
  if (process.handover.running() && now > process.handover_deadline + kSimSecond) {
    return absl::StrCat(member_.id, " hands over, and should have gone");
  }
  if (!at_rest) return "";
  if (!process.readings.empty() || process.lookup.running() + process.lookup.calls() > 0 ||
      process.fetch.running() > 0) {
    return absl::StrCat(member_.id, " has operations open");
  }
  if (process.replicator.queued() + process.replicator.jobs() > 0 && !world_.network.loses()) {
    return absl::StrCat(member_.id, " has ", process.replicator.queued(), " runs to copy");
  }
  if (process.announcer.untold() > 0 && !world_.network.loses()) {
    return absl::StrCat(member_.id, " has ", process.announcer.untold(), " anchors untold");
  }
  if (process.registry.open() > 2) {
    return absl::StrCat(member_.id, " has more open at the registry than a watch and a renewal");
  }
  if (process.health.size() > process.view->members().size() || process.pointers.anchors() > 64) {
    return absl::StrCat(member_.id, " remembers ", process.health.size(), " peers and ",
                        process.pointers.anchors(), " anchors");
  }
  return "";
}

}  // namespace kvmill
