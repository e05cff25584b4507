#include "service/cluster/replicator.h"

#include <algorithm>
#include <iterator>
#include <utility>

namespace kvmill {

namespace {

// Runs that are looked at to find work for peers, of those that nodes that leave hand over, all
// together and at least of each, and of the others.
constexpr std::size_t kUrgentPopsMax = 1024, kUrgentPopsMin = 2 * kListRunsMax, kPopsMax = 256;
constexpr std::int64_t kFullNanos = 1'000'000'000;

// How many of the first blocks of a run are among them.
std::size_t LeadingOf(const RunKeys& blocks) {
  std::size_t count = 0;
  for (const std::uint8_t place : blocks.places) count += place == count;
  return count;
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

void Replicator::Evicted(std::uint64_t anchor_hash) {
  const std::int64_t until = loop_.clock().MonotonicNanos() + options_.rest_nanos;
  resting_[anchor_hash] = until;
  resting_order_.emplace_back(until, anchor_hash);
  if (resting_order_.size() <= kRestingMax) return;
  const auto [oldest, hash] = resting_order_.front();
  resting_order_.pop_front();
  const auto found = resting_.find(hash);
  if (found != resting_.end() && found->second == oldest) resting_.erase(found);
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
    std::uint8_t count = stays ? options_.held(said.anchor_hash) : std::uint8_t{0};
    for (const Pointer& pointer : pointers_.Find(said.anchor_hash)) {
      // What this node said to itself may be out of date.
      if (pointer.holder == from.id || pointer.holder == options_.self_id) continue;
      if (Stays(pointer)) count = std::max(count, pointer.count);
    }
    if (stays && count < said.count) Add(said.anchor_hash, Reason::kHandedOver, leaver);
    counts.push_back(count);
  }
  return counts;
}

bool Replicator::Stays(const Pointer& pointer) const {
  if (view_ == nullptr) return false;
  const auto leaving = leaving_.find(pointer.holder);
  if (leaving != leaving_.end() && leaving->second == pointer.incarnation) return false;
  const auto index = view_->IndexOf(pointer.holder);
  return index.has_value() && *index < view_->serving_count() &&
         view_->members()[*index].incarnation == pointer.incarnation;
}

// As a home: of the first R always, as the one of rank R when nobody outside of them has as much.
bool Replicator::Keeps(std::uint64_t anchor_hash, const std::vector<Pointer>& pointers) const {
  const auto ranking = view_->table().Ranking(view_->table().ShardOf(anchor_hash));
  std::size_t rank = 0;
  while (rank < ranking.size() && view_->members()[ranking[rank]].id != options_.self_id) ++rank;
  if (rank >= ranking.size()) return false;
  if (rank != options_.copies || rank == 0) return rank < options_.copies;
  const auto first = ranking.subspan(0, options_.copies);
  return std::none_of(pointers.begin(), pointers.end(), [&](const Pointer& pointer) {
    // The pointers that are known of begin with who has the most.
    if (pointer.count < pointers.front().count || !Stays(pointer)) return false;
    return pointer.holder != options_.self_id &&
           std::none_of(first.begin(), first.end(), [&](MemberIndex index) {
             return view_->members()[index].id == pointer.holder;
           });
  });
}

bool Replicator::Busy(const Member& member) const {
  return std::any_of(jobs_.begin(), jobs_.end(),
                     [&](const auto& job) { return job.second.source.id == member.id; });
}

Replicator::Source Replicator::SourceOf(std::uint64_t anchor_hash, Reason reason) const {
  Source source;
  const std::uint8_t held = options_.held(anchor_hash);
  if (view_ == nullptr || pointers_.MostOf(anchor_hash) <= held) return source;
  const std::vector<Pointer> pointers = pointers_.Find(anchor_hash);
  if (reason == Reason::kHome && !Keeps(anchor_hash, pointers)) return source;
  if (reason != Reason::kHandedOver) {
    const auto resting = resting_.find(anchor_hash);
    if (resting != resting_.end() && loop_.clock().MonotonicNanos() < resting->second) {
      return source;
    }
  }
  for (const Pointer& pointer : pointers) {
    const auto index = view_->IndexOf(pointer.holder);
    if (!index.has_value() || pointer.holder == options_.self_id || pointer.count <= held) continue;
    const Member& member = view_->members()[*index];
    if (member.incarnation != pointer.incarnation) continue;
    if (!Busy(member) && !health_.Paused(member)) return {false, *index};
    source.later = true;
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
  const Source source = SourceOf(anchor_hash, reason);
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
    const Source source = SourceOf(place.anchor_hash, item->second.reason);
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
  job.hashes = hashes;
  job.call = peers_.ListRuns(
      source, std::move(hashes), loop_.clock().MonotonicNanos() + options_.list_nanos,
      [this, id](const absl::StatusOr<std::vector<HeldRun>>& runs) { Listed(id, runs); });
}

void Replicator::Listed(JobId id, const absl::StatusOr<std::vector<HeldRun>>& runs) {
  Job& job = jobs_.at(id);
  job.call = 0;
  if (!runs.ok()) return EndJob(id, PeerHealth::Fault::kFailed);
  if (!ValidRuns(job.hashes, *runs)) return EndJob(id, PeerHealth::Fault::kLied);
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
    const std::uint64_t block =
        std::max(std::min(run.bytes / has.keys.size(), options_.call_bytes), block_bytes_);
    const std::uint64_t most =
        std::clamp<std::uint64_t>(options_.call_bytes / block, 1, kRunBlocks);
    RunKeys wanted{.anchor = has.anchor, .keys = {}, .places = {}};
    std::size_t next = job.next;
    for (; next < has.keys.size() && wanted.keys.size() < most; ++next) {
      if (options_.bytes(run.fingerprint, has.keys[next]) > 0) continue;
      wanted.keys.push_back(has.keys[next]);
      wanted.places.push_back(has.places[next]);
    }
    if (wanted.keys.empty()) {
      // Somebody else may have more, and was busy.
      const std::uint64_t hash = run.anchor_hash;
      const Item item = items_.at(hash);
      const bool more = LeadingOf(has) < pointers_.MostOf(hash);
      Done(&job, hash);
      if (more && item.tries + 1u < kTriesMax && Add(hash, item.reason, item.leaver)) {
        items_.at(hash).tries = static_cast<std::uint8_t>(item.tries + 1);
      }
      job.runs.pop_back();
      job.next = 0;
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
    if (!absl::IsNotFound(status)) came += estimate;
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
