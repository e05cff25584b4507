#include "service/cluster_blocks.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "service/cluster/anchor.h"
#include "service/heard_names.h"
#include "service/request.h"
#include "storage/core/log.h"
#include "storage/core/status_macros.h"
#include "storage/namespace_table.h"

namespace kvmill {
namespace {

GrpcPeers::Puller PullerOf(PeerPull& pull) {
  return {[&pull](Peers::CallId call, const Member& member, const Fingerprint& fingerprint,
                  RunKeys blocks, std::int64_t deadline_nanos,
                  Peers::Done<std::vector<absl::Status>> done) {
            pull.Pull(call, member, fingerprint, std::move(blocks), deadline_nanos,
                      std::move(done));
          },
          [&pull](Peers::CallId call) { pull.Cancel(call); }};
}

// For a call without a deadline, as for one that has a long one.
constexpr std::int64_t kBringNanosMax = 60'000'000'000;

}  // namespace

ClusterBlocks::ClusterBlocks(Loop& loop, TieredStore& store, PeerClients& clients,
                             const Options& options)
    : loop_(loop),
      store_(store),
      options_(options),
      peer_nanos_(options.peer_nanos),
      answers_(loop, store, PointerTable::Options(), options.shared),
      health_(loop.clock()),
      pull_(loop, store, clients, PullOptions(options)),
      peers_(loop, options.self, PullerOf(pull_), options.tls),
      lookup_(
          loop, peers_, health_,
          {.self_id = options.self.id,
           .copies = options.copies,
           .call_nanos = options.peer_nanos,
           .local = [this](const Fingerprint& fingerprint,
                           const RunQuery& query) { return answers_.Answer(fingerprint, query); }}),
      fetch_(loop, peers_, health_),
      learner_(loop, health_, LearnerOptions()),
      sources_(loop.clock(), SourceTable::Options()),
      bringer_(loop, lookup_, fetch_, sources_, {.lookup_nanos = options.peer_nanos}),
      announcer_(loop, peers_, health_,
                 {.self_id = options.self.id,
                  .copies = options.copies,
                  .to_self =
                      [this](const auto& announcements) {
                        answers_.pointers().Announced(options_.self, announcements);
                      }}),
      replicator_(loop, peers_, health_, answers_.pointers(), ReplicatorOptions()),
      handover_(loop, peers_, health_, {.self_id = options.self.id}),
      held_(
          loop, [this](const Announcement& run) { announcer_.Set(run); },
          // What left this node is not copied back at once.
          [this](const HeldTable::Left& block) {
            replicator_.Evicted(block.anchor_hash, block.key_hash);
          }) {
  answers_.SetReplicator(&replicator_);
  answers_.SetLister([this](const std::vector<RunList>& lists) { return ListRuns(lists); });
  PublishStats();
}

ClusterBlocks::~ClusterBlocks() {
  loop_.Cancel(stats_timer_);
  loop_.Cancel(close_timer_);
}

PeerPull::Options ClusterBlocks::PullOptions(const Options& options) {
  PeerPull::Options pull = options.pull;
  pull.shared = options.shared;
  return pull;
}

Replicator::Options ClusterBlocks::ReplicatorOptions() {
  Replicator::Options options;
  options.self_id = options_.self.id;
  options.copies = options_.copies;
  options.rate = options_.replication;
  options.held = [this](std::uint64_t hash) { return announcer_.SketchOf(hash); };
  options.bytes = [this](const Fingerprint& fingerprint, const BlockKey& key) {
    return BytesOf(fingerprint, key);
  };
  return options;
}

NamespaceLearner::Options ClusterBlocks::LearnerOptions() {
  NamespaceLearner::Options options;
  options.self_id = options_.self.id;
  options.tenant = kDefaultTenant;
  options.call_nanos = options_.peer_nanos;
  options.limit_nanos = 5 * options_.peer_nanos;
  options.ask = [this](const Member& member, const NamespaceQuestion& question,
                       std::int64_t deadline_nanos, Peers::Done<NamespaceLearner::Answer> done) {
    return peers_.DescribeNamespace(member, question, deadline_nanos, std::move(done));
  };
  options.cancel = [this](Peers::CallId call) { peers_.Cancel(call); };
  options.heard = [this](const NamespaceQuestion& question) -> absl::StatusOr<NamespaceSpec> {
    KVMILL_ASSIGN_OR_RETURN(
        TieredStore::NamespaceInfo info,
        FindHeard(store_, question.tenant.empty() ? kDefaultTenant : question.tenant,
                  question.name));
    return std::move(info.spec);
  };
  return options;
}

void ClusterBlocks::Learn(const NamespaceQuestion& question, const std::string& hint,
                          TimePoint deadline,
                          std::function<void(absl::StatusOr<TieredStore::NamespaceInfo>)> done) {
  const std::int64_t deadline_nanos =
      NanosOf(deadline, 5 * peer_nanos_.load(std::memory_order_relaxed));
  loop_.Post(
      [this, question, hint, deadline_nanos, done = std::move(done), request = CurrentRequest()] {
        const ServedRequest served(request);
        if (closed_) return done(absl::NotFoundError("no other node is asked: this one leaves"));
        learner_.Learn(question, hint, deadline_nanos,
                       [this, done](absl::StatusOr<DescribedNamespace> said) {
                         if (!said.ok()) return done(said.status());
                         pull_.Open(std::move(said->spec), said->name, done);
                       });
      });
}

std::uint64_t ClusterBlocks::BytesOf(const Fingerprint& fingerprint, const BlockKey& key) const {
  const auto space = options_.shared.Find(store_, fingerprint);
  if (!space.ok() || !store_.Present(space->id, {&key, 1})[0]) return 0;
  return BlockBytes(space->spec);
}

// On a thread of the service.
std::vector<HeldRun> ClusterBlocks::ListRuns(const std::vector<RunList>& lists) const {
  std::vector<HeldRun> runs;
  for (const RunList& list : lists) {
    const HeldRuns::Run first = options_.held->RunOf(list.anchor_hash, 1);
    // Without its anchor nobody could count the blocks to it.
    if (first.blocks.empty() || first.blocks[0].place != 0) continue;
    HeldRun run{.anchor_hash = list.anchor_hash, .fingerprint = first.fingerprint, .blocks = {}};
    run.blocks.anchor = first.blocks[0].key;
    const HeldRuns::Run held =
        options_.held->RunOf(list.anchor_hash, kListKeysMax, list.after_place, list.after_hash);
    // It left meanwhile: a first page of nothing would be taken for a lie.
    if (held.blocks.empty() && list.after_hash == 0) continue;
    run.more = held.more;
    for (const HeldRuns::Run::Block& block : held.blocks) {
      run.blocks.keys.push_back(block.key);
      run.blocks.places.push_back(block.place);
      run.bytes += block.bytes;
    }
    runs.push_back(std::move(run));
  }
  return runs;
}

void ClusterBlocks::ListHeld(std::promise<std::vector<Announcement>>* held) {
  // What HeldRuns has said comes some at a time.
  if (held_.waiting() > 0) return loop_.Post([this, held] { ListHeld(held); });
  held->set_value(announcer_.Held());
}

Handover::Report ClusterBlocks::HandOver(std::int64_t limit_nanos) {
  const std::int64_t deadline = loop_.clock().MonotonicNanos() + limit_nanos;
  std::promise<std::vector<Announcement>> held;
  loop_.Post([this] { replicator_.Leave(); });
  // Blocks that were stored a moment ago are known a moment later. A store so large that its first
  // walk takes longer hands over what that has found.
  if (options_.held != nullptr) {
    options_.held->CatchUp(std::chrono::nanoseconds(limit_nanos / 4));
  }
  loop_.Post([this, &held] { ListHeld(&held); });
  std::vector<Announcement> runs = held.get_future().get();
  options_.held->SortHottestFirst(&runs);  // Not on the loop: they may be many.
  std::promise<Handover::Report> told;
  loop_.Post([this, &told, &runs, deadline] {
    handover_.Start(std::move(runs), deadline,
                    [&told](const Handover::Report& report) { told.set_value(report); });
  });
  return told.get_future().get();
}

void ClusterBlocks::PublishStats() {
  constexpr std::int64_t kEveryNanos = 100'000'000;
  stats_timer_ = loop_.After(kEveryNanos, [this] { PublishStats(); });
  MutexLock lock(stats_mu_);
  stats_ = {.copied = replicator_.stats(),
            .queued_runs = replicator_.queued(),
            .handed_over_blocks = handover_.report().blocks,
            .left_blocks = handover_.running() ? 0 : handover_.report().blocks_left,
            .handing_over_blocks = handover_.running() ? handover_.report().blocks_left : 0,
            .differed_digests = announcer_.differed()};
}

// Three quarters of what is left, and at most `nanos_max`.
std::int64_t ClusterBlocks::NanosOf(TimePoint deadline, std::int64_t nanos_max) const {
  const std::int64_t now = loop_.clock().MonotonicNanos();
  const auto left = deadline - TimePoint::clock::now();
  if (left > std::chrono::nanoseconds(2 * nanos_max)) return now + nanos_max;
  const std::int64_t nanos = std::chrono::duration_cast<std::chrono::nanoseconds>(left).count();
  return now + std::min(nanos_max, nanos / 4 * 3);
}

void ClusterBlocks::SetMembers(const std::vector<Member>& members) {
  replicator_.SetMembers(members);
  handover_.SetMembers(members);
}

void ClusterBlocks::SetView(const std::shared_ptr<const ClusterView>& view) {
  const std::shared_ptr<const ClusterView> before = std::exchange(view_, view);
  answers_.SetView(view);
  health_.Keep(*view);
  // Who takes us for a stranger is known before somebody misses blocks because of it.
  if (options_.tls.enabled()) {
    for (const Member& member : view->members()) {
      const auto known = before == nullptr ? std::nullopt : before->IndexOf(member.id);
      if (known.has_value() && before->members()[*known].incarnation == member.incarnation)
        continue;
      peers_.Greet(member);
    }
  }
  peers_.Keep(*view);
  lookup_.SetView(view);
  learner_.SetView(view);
  announcer_.SetView(view);
  replicator_.SetView(view);
  handover_.SetView(view);
  const auto& members = view->members();
  if (closed_) return;
  has_peers_.store(std::any_of(members.begin(), members.end(),
                               [this](const Member& m) { return m.id != options_.self.id; }),
                   std::memory_order_relaxed);
}

void ClusterBlocks::Lookup(const Fingerprint& fingerprint,
                           std::shared_ptr<const std::vector<BlockKey>> keys, std::size_t first,
                           const std::string& hint, TimePoint deadline,
                           std::function<void(const std::vector<bool>& elsewhere)> done) {
  const bool too_many = lookups_.fetch_add(1, std::memory_order_relaxed) >= kLookupsMax;
  const std::int64_t deadline_nanos =
      NanosOf(deadline, peer_nanos_.load(std::memory_order_relaxed));
  loop_.Post([this, fingerprint, keys = std::move(keys), first, hint, deadline_nanos, too_many,
              done = std::move(done), served_request = CurrentRequest()]() mutable {
    const ServedRequest served(std::move(served_request));
    if (too_many || closed_) {
      lookups_.fetch_sub(1, std::memory_order_relaxed);
      return done({});
    }
    RemoteLookup::Request request;
    request.fingerprint = fingerprint;
    request.hint = hint;
    request.deadline_nanos = deadline_nanos;
    const absl::Span<const BlockKey> rest = absl::MakeConstSpan(*keys).subspan(first);
    // The keys begin with block 0: the anchor of a run that `first` is within is among them.
    const std::vector<AnchorRun> runs = RunsOf(rest, first, (*keys)[AnchorIndex(first)]);
    for (const AnchorRun& run : runs) {
      RunQuery& query = request.runs.emplace_back();
      query.anchor = run.anchor;
      query.first = static_cast<std::uint8_t>((first + run.first) % kRunBlocks);
      const auto begin = rest.begin() + static_cast<std::ptrdiff_t>(run.first);
      query.keys.assign(begin, begin + static_cast<std::ptrdiff_t>(run.count));
    }
    const std::vector<RunQuery> queries = request.runs;
    lookup_.Start(
        std::move(request), [this, fingerprint, keys, first, runs, queries,
                             done = std::move(done)](std::vector<RemoteLookup::Run> found) {
          std::vector<bool> elsewhere(keys->size(), false);
          for (std::size_t r = 0; r < runs.size(); ++r) {
            std::erase_if(found[r].sources, [](const auto& source) { return source.self; });
            for (const RemoteLookup::Source& source : found[r].sources) {
              for (std::size_t i = 0; i < runs[r].count; ++i) {
                if ((source.blocks >> i & 1) != 0) elsewhere[first + runs[r].first + i] = true;
              }
            }
          }
          lookups_.fetch_sub(1, std::memory_order_relaxed);
          done(elsewhere);
          // The fetch that follows comes to this loop, too, and later.
          for (std::size_t r = 0; r < runs.size(); ++r) {
            if (found[r].sources.empty()) continue;
            sources_.Remember(fingerprint, queries[r], std::move(found[r].sources));
          }
        });
  });
}

bool ClusterBlocks::Bring(const TieredStore::NamespaceInfo& space, absl::Span<const BlockKey> keys,
                          const Elsewhere& elsewhere, TimePoint deadline,
                          BlockBringer::Progress progress) {
  if (!has_peers() || elsewhere.local_only) return false;
  std::vector<bool> missing = store_.Present(space.id, keys);
  missing.flip();
  if (std::none_of(missing.begin(), missing.end(), [](bool is) { return is; })) return false;
  if (brings_.fetch_add(1, std::memory_order_relaxed) >= kBringsMax) {
    brings_.fetch_sub(1, std::memory_order_relaxed);
    return false;
  }
  BlockBringer::Request request;
  request.fingerprint = space.fingerprint;
  request.keys.assign(keys.begin(), keys.end());
  request.missing = std::move(missing);
  request.first_block = elsewhere.first_block;
  request.anchor = elsewhere.anchor;
  request.hint = elsewhere.hint;
  request.block_bytes = BlockBytes(space.spec);
  request.deadline_nanos = NanosOf(deadline, kBringNanosMax);
  request.within = [of = CurrentRequest()](const std::function<void()>& ask) {
    const ServedRequest served(of);
    ask();
  };
  loop_.Post([this, request = std::move(request), progress = std::move(progress)]() mutable {
    const std::size_t all = request.keys.size();
    if (closed_) {
      brings_.fetch_sub(1, std::memory_order_relaxed);
      progress(all);
      return;
    }
    bringer_.Start(std::move(request),
                   [this, all, progress = std::move(progress)](std::size_t settled) {
                     const bool wanted = progress(settled);
                     if (settled == all || !wanted) {
                       brings_.fetch_sub(1, std::memory_order_relaxed);
                     }
                     return wanted;
                   });
  });
  return true;
}

void ClusterBlocks::SetPeerNanos(std::int64_t nanos) {
  peer_nanos_.store(nanos, std::memory_order_relaxed);
  loop_.Post([this, nanos] {
    lookup_.SetCallNanos(nanos);
    bringer_.SetLookupNanos(nanos);
    learner_.SetNanos(nanos, 5 * nanos);
  });
}

void ClusterBlocks::SetReplicationRate(std::uint64_t bytes_per_second) {
  loop_.Post([this, bytes_per_second] { replicator_.SetRate(bytes_per_second); });
}

void ClusterBlocks::EndWaiting(std::int64_t nanos) {
  loop_.Post([this, nanos] {
    close_timer_ = loop_.At(nanos, [this] {
      closed_ = true;
      has_peers_.store(false, std::memory_order_relaxed);
      bringer_.EndAll();
      lookup_.CompleteAll();
      learner_.CompleteAll();
    });
  });
}

// As others know it, or else as it will say.
Member ClusterBlocks::SelfMember() const {
  const auto index = view_ == nullptr ? std::nullopt : view_->IndexOf(options_.self.id);
  return index.has_value() ? view_->members()[*index] : options_.self;
}

void ClusterBlocks::Find(const Fingerprint& fingerprint, const RunQuery& asked, TimePoint deadline,
                         std::function<void(Where)> done) {
  const std::int64_t deadline_nanos =
      NanosOf(deadline, peer_nanos_.load(std::memory_order_relaxed));
  // Whoever says no anchor may not know it. If the block is here this node does.
  RunQuery query = asked;
  if (query.first == 0 && query.anchor == query.keys[0] && options_.held != nullptr) {
    const auto place = options_.held->PlaceOf(fingerprint, query.keys[0]);
    if (place.has_value() && place->place > 0) {
      const HeldRuns::Run run = options_.held->RunOf(place->anchor_hash, 1);
      if (!run.blocks.empty() && run.blocks[0].place == 0) {
        query.anchor = run.blocks[0].key;
        query.first = place->place;
      }
    }
  }
  loop_.Post([this, fingerprint, query, deadline_nanos, done = std::move(done),
              served_request = CurrentRequest()] {
    const ServedRequest served(served_request);
    Where where;
    if (view_ != nullptr && !query.anchor.empty()) {
      for (const MemberIndex home : view_->HomesOf(fingerprint, query.anchor)) {
        where.homes.push_back(view_->members()[home]);
      }
    }
    if (closed_) return done(std::move(where));
    RemoteLookup::Request request;
    request.fingerprint = fingerprint;
    request.runs = {query};
    request.everybody = true;
    request.all_members = true;
    request.deadline_nanos = deadline_nanos;
    lookup_.Start(std::move(request), [this, where = std::move(where),
                                       done](std::vector<RemoteLookup::Run> found) mutable {
      where.holders = std::move(found[0].sources);
      for (RemoteLookup::Source& holder : where.holders) {
        if (holder.self) holder.member = SelfMember();
      }
      done(std::move(where));
    });
  });
}

}  // namespace kvmill
