#include "service/cluster/replicator.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "absl/hash/hash.h"

namespace kvmill {

namespace {

// Runs that are looked at to find work for peers, of those that nodes that leave hand over, all
// together and at least of each, and of the others.
constexpr std::size_t kUrgentPopsMax = 1024, kUrgentPopsMin = 2 * kListRunsMax, kPopsMax = 256;
constexpr std::int64_t kFullNanos = 1'000'000'000;
// Lists of more blocks than this rest, for so long a block: 13 s for the longest one.
constexpr std::uint64_t kLongList = 1024;
constexpr std::int64_t kListRestNanos = 100'000;

std::uint64_t HolderWord(const std::string& id, const std::string& incarnation) {
  return absl::HashOf(id, incarnation);
}

// What a holder said to have of a run: another word when it said something else.
std::uint64_t CompareWord(std::uint64_t anchor_hash, const PointerTable::Holder& holder) {
  const RunSketch& said = holder.sketch;
  return absl::HashOf(anchor_hash, HolderWord(holder.id, holder.incarnation), said.sum, said.blocks,
                      said.count);
}

}  // namespace

Replicator::Replicator(Loop& loop, Peers& peers, PeerHealth& health, const PointerTable& pointers,
                       Options options)
    : loop_(loop),
      peers_(peers),
      health_(health),
      pointers_(pointers),
      options_(std::move(options)),
      limit_(loop.clock(), options_.rate) {
  timer_ = loop_.After(options_.tick_nanos, [this] { Tick(); });
}

Replicator::~Replicator() {
  loop_.Cancel(timer_);
  loop_.Cancel(rate_timer_);
  for (const auto& [id, job] : jobs_) {
    if (job.call != 0) peers_.Cancel(job.call);
  }
}

void Replicator::SetView(std::shared_ptr<const ClusterView> view) {
  view_ = std::move(view);
  sweep_ = pointers_.anchors();
  std::vector<JobId> lost;
  for (const auto& [id, job] : jobs_) {
    const auto index = view_->IndexOf(job.source.id);
    if (!index.has_value() || view_->members()[*index].incarnation != job.source.incarnation) {
      lost.push_back(id);
    }
  }
  for (const JobId id : lost) EndJob(id, std::nullopt);
  std::erase_if(leavers_,
                [this](const auto& leaver) { return !view_->IndexOf(leaver.first).has_value(); });
}

void Replicator::SetMembers(const std::vector<Member>& members) {
  std::map<std::string, std::string> leaving;
  for (const Member& member : members) {
    const auto known = leaving_.find(member.id);
    if (member.state == MemberState::kDraining ||
        (known != leaving_.end() && known->second == member.incarnation)) {
      leaving[member.id] = member.incarnation;
    }
  }
  leaving_ = std::move(leaving);
}

void Replicator::Announced(const std::vector<Announcement>& announcements) {
  if (options_.copies == 0) return;
  for (const Announcement& said : announcements) Add(said.anchor_hash, Reason::kHome);
}

void Replicator::Hot(std::uint64_t anchor_hash) { Add(anchor_hash, Reason::kHot); }

void Replicator::Evicted(std::uint64_t anchor_hash, std::uint64_t key_hash) {
  const std::int64_t now = loop_.clock().MonotonicNanos();
  evicted_.Put(anchor_hash, now);
  resting_.Put(key_hash, now);
}

bool Replicator::Rests(std::uint64_t key_hash) const {
  const std::int64_t* since = resting_.Find(key_hash);
  return since != nullptr && loop_.clock().MonotonicNanos() < *since + options_.rest_nanos;
}

bool Replicator::Lacks(std::uint64_t anchor_hash, const RunSketch& held,
                       const PointerTable::Holder& holder, Reason reason) const {
  if (holder.id == options_.self_id) return false;
  if (reason == Reason::kHot) return HoldsStraight(held, holder.sketch) == Holds::kNo;
  if (HoldsAll(held, holder.sketch) == Holds::kYes) return false;
  const Comparison* compared = compared_.Find(CompareWord(anchor_hash, holder));
  if (compared == nullptr || (reason == Reason::kHandedOver && !compared->whole)) return true;
  // What was here then may have gone since.
  const std::int64_t* evicted = evicted_.Find(anchor_hash);
  if (evicted != nullptr && *evicted >= compared->at) return true;
  return loop_.clock().MonotonicNanos() >= compared->at + options_.rest_nanos;
}

std::vector<std::uint8_t> Replicator::HandedOver(const Member& from,
                                                 const std::vector<Announcement>& announcements) {
  std::vector<std::uint8_t> counts;
  counts.reserve(announcements.size());
  const auto index = view_ == nullptr ? std::nullopt : view_->IndexOf(options_.self_id);
  const bool stays = !leaves_ && index.has_value() && *index < view_->serving_count();
  leaving_[from.id] = from.incarnation;
  const Leaver leaver = LeaverOf(from);
  for (const Announcement& said : announcements) {
    // How many places of it are safe with who has `theirs`.
    const auto safe = [&said](const RunSketch& theirs, bool all) -> std::uint8_t {
      if (all) return said.sketch.count;
      return std::min(CommonPlaces(theirs, said.sketch),
                      static_cast<std::uint8_t>(said.sketch.count - 1));
    };
    std::uint8_t count = 0;
    if (said.sketch.count > 0 && stays) {
      const RunSketch held = options_.held(said.anchor_hash);
      const PointerTable::Holder holder{from.id, from.incarnation, said.sketch};
      count = safe(held, !Lacks(said.anchor_hash, held, holder, Reason::kHandedOver));
    }
    for (const PointerTable::Holder& holder : pointers_.HoldersOf(said.anchor_hash)) {
      // What this node said to itself may be out of date.
      if (holder.id == from.id || holder.id == options_.self_id || !Stays(holder)) continue;
      if (said.sketch.count == 0) continue;
      const bool all = HoldsAll(holder.sketch, said.sketch) == Holds::kYes;
      count = std::max(count, safe(holder.sketch, all));
    }
    if (stays && count < said.sketch.count) Add(said.anchor_hash, Reason::kHandedOver, leaver);
    counts.push_back(count);
  }
  return counts;
}

bool Replicator::Stays(const PointerTable::Holder& holder) const {
  if (view_ == nullptr) return false;
  const auto leaving = leaving_.find(holder.id);
  if (leaving != leaving_.end() && leaving->second == holder.incarnation) return false;
  const auto index = view_->IndexOf(holder.id);
  return index.has_value() && *index < view_->serving_count() &&
         view_->members()[*index].incarnation == holder.incarnation;
}

// As a home: of the first R always; as the one of rank R when one of those has what nobody outside
// of them is known to have all of.
bool Replicator::Keeps(std::uint64_t anchor_hash,
                       const std::vector<PointerTable::Holder>& holders) const {
  const auto ranking = view_->table().Ranking(view_->table().ShardOf(anchor_hash));
  std::size_t rank = 0;
  while (rank < ranking.size() && view_->members()[ranking[rank]].id != options_.self_id) ++rank;
  if (rank >= ranking.size()) return false;
  if (rank != options_.copies || rank == 0) return rank < options_.copies;
  const auto first = ranking.subspan(0, options_.copies);
  const auto among_first = [&](const PointerTable::Holder& holder) {
    return std::any_of(first.begin(), first.end(),
                       [&](MemberIndex index) { return view_->members()[index].id == holder.id; });
  };
  const auto has_all_outside = [&](const RunSketch& sketch) {
    return std::any_of(holders.begin(), holders.end(), [&](const PointerTable::Holder& holder) {
      return holder.id != options_.self_id && Stays(holder) && !among_first(holder) &&
             HoldsAll(holder.sketch, sketch) == Holds::kYes;
    });
  };
  return std::any_of(holders.begin(), holders.end(), [&](const PointerTable::Holder& holder) {
    return holder.id != options_.self_id && !has_all_outside(holder.sketch);
  });
}

bool Replicator::ListRests(std::uint64_t anchor_hash, const Item& item) const {
  // One that was begun goes on, and who leaves cannot wait.
  if (item.after_hash != 0 || item.reason == Reason::kHandedOver) return false;
  const std::int64_t* until = list_rests_.Find(anchor_hash);
  return until != nullptr && loop_.clock().MonotonicNanos() < *until;
}

bool Replicator::Busy(const Member& member) const {
  return std::any_of(jobs_.begin(), jobs_.end(),
                     [&](const auto& job) { return job.second.source.id == member.id; });
}

Replicator::Source Replicator::SourceOf(std::uint64_t anchor_hash, const Item& item) const {
  Source source;
  if (view_ == nullptr) return source;
  const RunSketch held = options_.held(anchor_hash);
  std::vector<PointerTable::Holder> holders = pointers_.HoldersOf(anchor_hash);
  const auto lacks = [&](const PointerTable::Holder& holder) {
    return Lacks(anchor_hash, held, holder, item.reason);
  };
  if (std::none_of(holders.begin(), holders.end(), lacks)) return source;
  if (item.reason == Reason::kHome && !Keeps(anchor_hash, holders)) return source;
  // Whoever's list was begun goes on with it; when it was ended the others have their turn.
  const bool begun = item.after_hash != 0;
  std::stable_partition(holders.begin(), holders.end(), [&](const PointerTable::Holder& holder) {
    return (HolderWord(holder.id, holder.incarnation) == item.source) == begun;
  });
  for (const PointerTable::Holder& holder : holders) {
    const auto index = view_->IndexOf(holder.id);
    if (!index.has_value() || !lacks(holder)) continue;
    const Member& member = view_->members()[*index];
    if (member.incarnation != holder.incarnation) continue;
    const bool busy = Busy(member);
    if (!busy && !health_.Paused(member)) return {false, *index};
    source.later = true;
    if (begun && busy && HolderWord(holder.id, holder.incarnation) == item.source) return source;
  }
  return source;
}

// Whether the run is, or was already, among those that are to be copied.
bool Replicator::Add(std::uint64_t anchor_hash, Reason reason, Leaver leaver) {
  const auto found = items_.find(anchor_hash);
  if (found != items_.end()) {
    Item& item = found->second;
    const bool first = leaver != 0 && item.leaver == 0;
    // Two that leave have it: it does not wait behind all of one's that may be stuck. Once, so that
    // stale places do not pile up.
    const bool other = leaver != 0 && item.leaver != 0 && item.leaver != leaver && !item.moved;
    item.reason = std::max(item.reason, reason);
    item.moved |= other;
    if (first || other) item.leaver = leaver;
    if ((first || other) && item.serial != 0) Push(anchor_hash);
    return true;
  }
  const Source source = SourceOf(anchor_hash, {.reason = reason});
  if (!source.member.has_value() && !source.later) return false;
  const bool own_room = leaver != 0 && urgent_[leaver].size() < kLeaverMin;
  if (items_.size() >= (reason == Reason::kHandedOver ? 2 : 1) * kQueueMax && !own_room) {
    sweep_again_ = true;
    return false;
  }
  items_[anchor_hash] = {.reason = reason, .leaver = leaver};
  Push(anchor_hash);
  return true;
}

Replicator::Leaver Replicator::LeaverOf(const Member& member) {
  const auto [found, added] = leavers_.try_emplace(member.id, next_leaver_);
  next_leaver_ += added;
  return found->second;
}

void Replicator::Push(std::uint64_t anchor_hash) {
  Item& item = items_.at(anchor_hash);
  item.serial = next_serial_++;
  Queue& queue = item.leaver != 0 ? urgent_[item.leaver] : queue_;
  queue.push_back({anchor_hash, item.serial});
}

void Replicator::Tick() {
  timer_ = loop_.After(options_.tick_nanos, [this] { Tick(); });
  if (view_ == nullptr) return;
  Sweep();
  StartJobs();
}

void Replicator::Sweep() {
  if (options_.copies == 0) return;
  const std::int64_t now = loop_.clock().MonotonicNanos();
  if (sweep_ == 0) {
    if (now < next_sweep_ && !sweep_again_) return;
    next_sweep_ = now + options_.sweep_nanos;
    sweep_again_ = false;
    sweep_ = pointers_.anchors();
  }
  sweep_ = std::min(sweep_, pointers_.anchors());
  for (std::size_t i = 0; i < kSweepSlice && sweep_ > 0 && items_.size() < kQueueMax; ++i) {
    Add(pointers_.AnchorAt(--sweep_), Reason::kHome);
  }
}

void Replicator::StartJobs() {
  std::erase_if(urgent_, [](const auto& entry) { return entry.second.empty(); });
  std::vector<Leaver> turns;
  const auto next = urgent_.upper_bound(last_served_);
  for (auto it = next; it != urgent_.end(); ++it) turns.push_back(it->first);
  for (auto it = urgent_.begin(); it != next; ++it) turns.push_back(it->first);
  const std::size_t pops =
      std::max(kUrgentPopsMin, kUrgentPopsMax / std::max<std::size_t>(turns.size(), 1));
  for (const Leaver leaver : turns) {
    if (StartJobs(&urgent_.at(leaver), pops, /*ordered=*/true)) last_served_ = leaver;
  }
  StartJobs(&queue_, kPopsMax, /*ordered=*/false);
}

bool Replicator::StartJobs(Queue* queue, std::size_t pops, bool ordered) {
  if (jobs_.size() >= kJobsMax || loop_.clock().MonotonicNanos() < full_until_) return false;
  std::vector<Place> later;
  std::map<MemberIndex, std::vector<Place>> of;  // By source.
  while (pops > 0 && !queue->empty()) {
    const Place place = queue->front();
    queue->pop_front();
    const auto item = items_.find(place.anchor_hash);
    if (item == items_.end() || item->second.serial != place.serial) continue;  // Stale.
    --pops;
    if (ListRests(place.anchor_hash, item->second)) {
      later.push_back(place);
      continue;
    }
    const Source source = SourceOf(place.anchor_hash, item->second);
    if (source.member.has_value()) {
      of[*source.member].push_back(place);
    } else if (source.later) {
      later.push_back(place);
    } else {
      items_.erase(item);
    }
  }
  queue->insert(ordered ? queue->begin() : queue->end(), later.begin(), later.end());
  bool started = false;
  for (auto& [index, places] : of) {
    const Member& source = view_->members()[index];
    std::size_t taken = 0;
    if (jobs_.size() < kJobsMax && health_.Admit(source)) {
      taken = std::min(places.size(), kListRunsMax);
      std::vector<std::uint64_t> hashes;
      for (std::size_t i = 0; i < taken; ++i) {
        hashes.push_back(places[i].anchor_hash);
        items_.at(hashes.back()).serial = 0;
      }
      StartJob(source, std::move(hashes));
      started = true;
    }
    queue->insert(queue->begin(), places.begin() + static_cast<std::ptrdiff_t>(taken),
                  places.end());
  }
  return started;
}

void Replicator::StartJob(const Member& source, std::vector<std::uint64_t> hashes) {
  const JobId id = next_job_++;
  Job& job = jobs_[id];
  job.source = source;
  std::vector<RunList> lists;
  for (const std::uint64_t hash : hashes) {
    const std::vector<PointerTable::Holder> holders = pointers_.HoldersOf(hash);
    const PointerTable::Holder* holder = HolderIn(holders, source);
    const std::uint64_t word = HolderWord(source.id, source.incarnation);
    Item& item = items_.at(hash);
    if (item.source != word || item.after_hash == 0) {
      item.source = word;
      item.said = holder == nullptr ? 0 : CompareWord(hash, *holder);
      item.after_place = 0;
      item.after_hash = 0;
      item.listed = 0;
      item.missed = item.rests = false;
    }
    lists.push_back({hash, item.after_place, item.after_hash});
  }
  job.lists = lists;
  job.hashes = std::move(hashes);
  job.call = peers_.ListRuns(
      source, std::move(lists), loop_.clock().MonotonicNanos() + options_.list_nanos,
      [this, id](const absl::StatusOr<std::vector<HeldRun>>& runs) { Listed(id, runs); });
}

const PointerTable::Holder* Replicator::HolderIn(const std::vector<PointerTable::Holder>& holders,
                                                 const Member& member) const {
  const auto found =
      std::find_if(holders.begin(), holders.end(), [&](const PointerTable::Holder& holder) {
        return holder.id == member.id && holder.incarnation == member.incarnation;
      });
  return found == holders.end() ? nullptr : &*found;
}

void Replicator::Listed(JobId id, const absl::StatusOr<std::vector<HeldRun>>& runs) {
  Job& job = jobs_.at(id);
  job.call = 0;
  if (!runs.ok()) return EndJob(id, PeerHealth::Fault::kFailed);
  if (!ValidRuns(job.lists, *runs)) return EndJob(id, PeerHealth::Fault::kLied);
  health_.Succeeded(job.source);
  job.runs.assign(runs->rbegin(), runs->rend());
  const std::vector<std::uint64_t> asked = job.hashes;
  for (const std::uint64_t hash : asked) {
    if (std::none_of(runs->begin(), runs->end(),
                     [hash](const HeldRun& run) { return run.anchor_hash == hash; })) {
      Done(&job, hash);  // It was evicted there.
    }
  }
  Advance(id);
}

void Replicator::Done(Job* job, std::uint64_t anchor_hash) {
  std::erase(job->hashes, anchor_hash);
  items_.erase(anchor_hash);
}

// Asks for the next blocks that are not here, when the rate allows it.
void Replicator::Advance(JobId id) {
  Job& job = jobs_.at(id);
  while (!job.runs.empty()) {
    const HeldRun& run = job.runs.back();
    const RunKeys& has = run.blocks;
    // As the peer says, within reason: it cannot have the limit passed by, or stopped for long.
    const std::uint64_t said = run.bytes / std::max<std::size_t>(has.keys.size(), 1);
    const std::uint64_t block =
        std::max({std::uint64_t{1}, block_bytes_, std::min(said, options_.call_bytes)});
    const std::uint64_t most =
        std::clamp<std::uint64_t>(options_.call_bytes / block, 1, kRunBlocks);
    const std::size_t places = PlacesOf(job, run);
    const bool wants_all = items_.at(run.anchor_hash).reason == Reason::kHandedOver;
    RunKeys wanted{.anchor = has.anchor, .keys = {}, .places = {}};
    std::size_t next = job.next;
    for (; next < has.keys.size() && wanted.keys.size() < most; ++next) {
      if (has.places[next] >= places || options_.bytes(run.fingerprint, has.keys[next]) > 0)
        continue;
      if (!wants_all && Rests(KeyHash(run.fingerprint, has.keys[next]))) continue;
      wanted.keys.push_back(has.keys[next]);
      wanted.places.push_back(has.places[next]);
    }
    if (wanted.keys.empty()) {
      if (!Looked(&job)) return EndJob(id, PeerHealth::Fault::kLied);
      continue;
    }
    job.waits = !limit_.Ready();
    if (job.waits) return WaitForRate();
    job.next = next;
    job.pulled = wanted.keys;
    job.charged = job.pulled.size() * block;
    limit_.Charge(job.charged);
    job.call = peers_.Pull(job.source, run.fingerprint, std::move(wanted),
                           loop_.clock().MonotonicNanos() + options_.pull_nanos,
                           [this, id](const absl::StatusOr<std::vector<absl::Status>>& statuses) {
                             Pulled(id, statuses);
                           });
    return;
  }
  EndJob(id, std::nullopt);
}

std::size_t Replicator::PlacesOf(const Job& job, const HeldRun& run) const {
  if (items_.at(run.anchor_hash).reason != Reason::kHot) return kRunBlocks;
  const std::vector<PointerTable::Holder> holders = pointers_.HoldersOf(run.anchor_hash);
  const PointerTable::Holder* const from = HolderIn(holders, job.source);
  return from == nullptr ? 0 : StraightPlaces(from->sketch);
}

bool Replicator::Looked(Job* job) {
  const HeldRun run = std::move(job->runs.back());
  job->runs.pop_back();
  job->next = 0;
  const std::uint64_t hash = run.anchor_hash;
  const RunKeys& has = run.blocks;
  Item& known = items_.at(hash);
  known.listed += has.keys.size();
  for (const BlockKey& key : has.keys) {
    if (options_.bytes(run.fingerprint, key) > 0) continue;
    (Rests(KeyHash(run.fingerprint, key)) ? known.rests : known.missed) = true;
  }
  const bool hot = known.reason == Reason::kHot;
  const std::vector<PointerTable::Holder> holders = pointers_.HoldersOf(hash);
  const PointerTable::Holder* const from = HolderIn(holders, job->source);
  if (run.more && !(hot && has.places.back() >= PlacesOf(*job, run))) {
    if (known.listed <= kRunListMax) {
      known.after_place = has.places.back();
      known.after_hash = KeyHash(run.fingerprint, has.keys.back());
      std::erase(job->hashes, hash);
      Push(hash);
      return true;
    }
    // Of more than kRunListMax blocks no more are announced, and no more are looked at.
    if (from == nullptr || from->sketch.blocks < kRunListMax) return false;
    known.rests = true;
  }
  const Item item = known;
  Done(job, hash);
  if (item.listed > kLongList) {
    list_rests_.Put(hash, loop_.clock().MonotonicNanos() +
                              static_cast<std::int64_t>(item.listed) * kListRestNanos);
  }
  // Not when that changed while it was gone through, or was not all.
  if (from != nullptr && CompareWord(hash, *from) == item.said && !item.missed && !hot &&
      item.listed >= from->sketch.blocks) {
    compared_.Put(item.said, {loop_.clock().MonotonicNanos(), !item.rests});
  }
  // Somebody else may have more, and was busy. What came just now is known here a moment later.
  RunSketch listed;
  for (std::size_t i = 0; i < has.keys.size() && has.places[i] <= listed.count; ++i) {
    const std::size_t place = has.places[i];
    const bool several = place < listed.count;
    listed.tags[place] =
        several ? RunSketch::kSeveral : TagOf(KeyHash(run.fingerprint, has.keys[i]));
    listed.count = static_cast<std::uint8_t>(place + 1);
    listed.sum = 1;
  }
  const bool paged = item.listed > has.keys.size();
  const RunSketch held = options_.held(hash);
  const bool more =
      std::any_of(holders.begin(), holders.end(), [&](const PointerTable::Holder& holder) {
        // Its holder, too, when that has said something else since the list was begun.
        return (&holder != from || CompareWord(hash, holder) != item.said) &&
               (paged || HoldsAll(listed, holder.sketch) != Holds::kYes) &&
               Lacks(hash, held, holder, item.reason);
      });
  // What a source said anew meanwhile is no failure: the last of it must not wait for a sweep.
  const bool anew = from != nullptr && CompareWord(hash, *from) != item.said;
  const auto tries = static_cast<std::uint8_t>(item.tries + (anew ? 0 : 1));
  if (more && tries < kTriesMax && Add(hash, item.reason, item.leaver)) {
    items_.at(hash).tries = tries;
    items_.at(hash).source = item.source;
  }
  return true;
}

void Replicator::SetRate(std::uint64_t bytes_per_second) {
  limit_.SetRate(bytes_per_second);
  if (rate_timer_ == 0) return;
  loop_.Cancel(rate_timer_);  // It was for the rate of before.
  rate_timer_ = 0;
  WaitForRate();
}

void Replicator::WaitForRate() {
  if (rate_timer_ != 0) return;
  rate_timer_ = loop_.At(limit_.ReadyAt(), [this] {
    rate_timer_ = 0;
    std::vector<JobId> waiting;
    for (const auto& [id, job] : jobs_) {
      if (job.waits) waiting.push_back(id);
    }
    for (const JobId id : waiting) {
      if (jobs_.contains(id)) Advance(id);
    }
  });
}

void Replicator::Pulled(JobId id, const absl::StatusOr<std::vector<absl::Status>>& statuses) {
  Job& job = jobs_.at(id);
  job.call = 0;
  const std::uint64_t estimate = job.charged / job.pulled.size();
  if (!statuses.ok() || statuses->size() != job.pulled.size()) {
    stats_.failed_blocks += job.pulled.size();
    return EndJob(id, statuses.ok() ? PeerHealth::Fault::kLied : PeerHealth::Fault::kFailed);
  }
  const Fingerprint& fingerprint = job.runs.back().fingerprint;
  bool lied = false, full = false;
  std::uint64_t came = 0;
  for (std::size_t i = 0; i < statuses->size(); ++i) {
    const absl::Status& status = (*statuses)[i];
    if (status.ok()) {
      const std::uint64_t bytes = options_.bytes(fingerprint, job.pulled[i]);
      if (bytes > 0) block_bytes_ = bytes;
      came += bytes > 0 ? bytes : estimate;
      ++stats_.copied_blocks;
      stats_.copied_bytes += bytes > 0 ? bytes : estimate;
      continue;
    }
    ++stats_.failed_blocks;
    lied |= absl::IsDataLoss(status);
    full |= absl::IsResourceExhausted(status);
    // A quota has no room for it, or its tenant is not shared here: it is not asked for again at
    // once.
    const bool refused = absl::IsFailedPrecondition(status);
    if (refused) resting_.Put(KeyHash(fingerprint, job.pulled[i]), loop_.clock().MonotonicNanos());
    if (!absl::IsNotFound(status) && !refused) came += estimate;
  }
  if (came > job.charged) {
    limit_.Charge(came - job.charged);
  } else {
    limit_.Refund(job.charged - came);
  }
  if (full) full_until_ = loop_.clock().MonotonicNanos() + kFullNanos;
  if (lied) return EndJob(id, PeerHealth::Fault::kLied);
  health_.Succeeded(job.source);
  if (full) return EndJob(id, std::nullopt);
  Advance(id);
}

void Replicator::EndJob(JobId id, std::optional<PeerHealth::Fault> fault) {
  const auto node = jobs_.extract(id);
  const Job& job = node.mapped();
  if (job.call != 0) peers_.Cancel(job.call);
  if (fault.has_value()) health_.Failed(job.source, *fault);
  for (const std::uint64_t hash : job.hashes) {
    Item& item = items_.at(hash);
    if (++item.tries == kTriesMax) {
      items_.erase(hash);
    } else {
      Push(hash);
    }
  }
  if (view_ != nullptr) StartJobs();
}

}  // namespace kvmill
