#include "service/cluster/replicator.h"

#include <algorithm>
#include <iterator>
#include <utility>

namespace kvmill {

namespace {

// Runs that are looked at to find work for peers, of those that nodes that leave hand over and of
// the others.
constexpr std::size_t kUrgentPopsMax = 1024, kPopsMax = 256;
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
  for (const Announcement& said : announcements) {
    std::uint8_t count = stays ? options_.held(said.anchor_hash) : std::uint8_t{0};
    for (const Pointer& pointer : pointers_.Find(said.anchor_hash)) {
      // What this node said to itself may be out of date.
      if (pointer.holder == from.id || pointer.holder == options_.self_id) continue;
      if (Stays(pointer)) count = std::max(count, pointer.count);
    }
    if (stays && count < said.count) Add(said.anchor_hash, Reason::kHandedOver);
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
bool Replicator::Add(std::uint64_t anchor_hash, Reason reason) {
  const auto found = items_.find(anchor_hash);
  if (found != items_.end()) {
    found->second.reason = std::max(found->second.reason, reason);
    return true;
  }
  const Source source = SourceOf(anchor_hash, reason);
  if (!source.member.has_value() && !source.later) return false;
  if (items_.size() >= (reason == Reason::kHandedOver ? 2 : 1) * kQueueMax) {
    sweep_again_ = true;
    return false;
  }
  items_[anchor_hash] = {.reason = reason};
  QueueOf(anchor_hash).push_back(anchor_hash);
  return true;
}

std::deque<std::uint64_t>& Replicator::QueueOf(std::uint64_t anchor_hash) {
  return items_.at(anchor_hash).reason == Reason::kHandedOver ? urgent_ : queue_;
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
  StartJobs(&urgent_, kUrgentPopsMax);
  StartJobs(&queue_, kPopsMax);
}

void Replicator::StartJobs(std::deque<std::uint64_t>* queue, std::size_t pops) {
  if (jobs_.size() >= kJobsMax || loop_.clock().MonotonicNanos() < full_until_) return;
  std::vector<std::uint64_t> later;
  std::map<MemberIndex, std::vector<std::uint64_t>> of;  // By source.
  for (; pops > 0 && !queue->empty(); --pops) {
    const std::uint64_t hash = queue->front();
    queue->pop_front();
    const Source source = SourceOf(hash, items_.at(hash).reason);
    if (source.member.has_value()) {
      of[*source.member].push_back(hash);
    } else if (source.later) {
      later.push_back(hash);
    } else {
      items_.erase(hash);
    }
  }
  if (queue == &urgent_) {
    urgent_.insert(urgent_.begin(), later.begin(), later.end());  // Their order counts.
  } else {
    for (const std::uint64_t hash : later) QueueOf(hash).push_back(hash);
  }
  for (auto& [index, hashes] : of) {
    const Member& source = view_->members()[index];
    std::size_t taken = 0;
    if (jobs_.size() < kJobsMax && health_.Admit(source)) {
      taken = std::min(hashes.size(), kListRunsMax);
      StartJob(source, {hashes.begin(), hashes.begin() + static_cast<std::ptrdiff_t>(taken)});
    }
    for (std::size_t i = hashes.size(); i > taken; --i) {
      QueueOf(hashes[i - 1]).push_front(hashes[i - 1]);
    }
  }
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
      if (more && item.tries + 1u < kTriesMax && Add(hash, item.reason)) {
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
      QueueOf(hash).push_back(hash);
    }
  }
  if (view_ != nullptr) StartJobs();
}

}  // namespace kvmill
