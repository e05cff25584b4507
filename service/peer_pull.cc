#include "service/peer_pull.h"

#include <algorithm>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "service/callers.h"
#include "service/cluster/cluster_view.h"
#include "storage/core/log.h"
#include "storage/core/run_link.h"
#include "storage/core/status_macros.h"

namespace kvmill {
namespace {

// For a first answer of a peer; pulls have deadlines of their own.
constexpr absl::Duration kHelloTimeout = absl::Seconds(5);

std::uint64_t BytesOfBlock(const NamespaceSpec& spec) {
  std::uint64_t bytes = 0;
  for (const LayerGroup& group : spec.groups) {
    bytes += group.layers.size() * UniformPageBytes(FormatOf(spec, group), spec.block_tokens,
                                                    SlotKind::kTile, group.kv_heads);
  }
  return bytes;
}

}  // namespace

struct PeerPull::Link {
  Member member;
  std::shared_ptr<Client> client;  // Null: retired. Shared with whoever destroys it.
  bool greeted = false;            // The process there is the member.
  bool greeting = false;
  std::size_t batches = 0;
  Options::Limit in_flight;
  std::int64_t used_nanos = 0;
};

PeerPull::PeerPull(Loop& loop, TieredStore& store, const Options& options)
    : loop_(loop),
      store_(store),
      options_(options),
      sealers_(options.seal_threads, "peer-seal"),
      closer_(1, "peer-close") {}

PeerPull::~PeerPull() {
  alive_.reset();
  if (idle_timer_ != 0) loop_.Cancel(idle_timer_);
  for (auto& [call, op] : ops_) {
    loop_.Cancel(op.timer);
    for (const auto& batch : op.batches) batch->Stop();
  }
  for (auto& [id, link] : links_) link->client.reset();
}

std::function<void()> PeerPull::IfAlive(std::function<void()> task) const {
  return [alive = std::weak_ptr<bool>(alive_), task = std::move(task)] {
    if (!alive.expired()) task();
  };
}

PeerPull::Stats PeerPull::stats() const {
  const auto value = [](const std::atomic<std::uint64_t>& counter) {
    return counter.load(std::memory_order_relaxed);
  };
  const Counters& c = counters_;
  return {value(c.pulls),
          value(c.failed_pulls),
          value(c.blocks),
          value(c.bytes),
          value(c.missing_blocks),
          value(c.damaged_blocks),
          value(c.blocks_in_flight),
          value(c.bytes_in_flight),
          value(c.clients)};
}

absl::Status PeerPull::Check(const RunKeys& blocks, std::int64_t deadline_nanos) const {
  if (blocks.keys.empty() || blocks.keys.size() > kRunBlocks) {
    return absl::InvalidArgumentError(
        absl::StrCat("a pull of ", blocks.keys.size(), " blocks: want 1 to ", kRunBlocks));
  }
  if (blocks.places.size() != (blocks.anchor.empty() ? 0 : blocks.keys.size())) {
    return absl::InvalidArgumentError(absl::StrCat(
        "a pull of ", blocks.keys.size(), " blocks with ", blocks.places.size(), " places"));
  }
  if (loop_.clock().MonotonicNanos() >= deadline_nanos) {
    return absl::DeadlineExceededError("the pull's deadline has passed");
  }
  // This one is among them.
  if (ops_.size() > options_.calls_max) {
    return absl::ResourceExhaustedError(
        absl::StrCat(options_.calls_max, " pulls are open: no more than that"));
  }
  return absl::OkStatus();
}

void PeerPull::Pull(Peers::CallId call, const Member& member, const Fingerprint& fingerprint,
                    RunKeys blocks, std::int64_t deadline_nanos,
                    Peers::Done<std::vector<absl::Status>> done) {
  counters_.pulls.fetch_add(1, std::memory_order_relaxed);
  Op& op = ops_[call];
  op.member = member;
  op.deadline_nanos = deadline_nanos;
  op.done = std::move(done);
  absl::Status status = Check(blocks, deadline_nanos);
  if (!status.ok()) {
    op.bad = true;
    op.timer = loop_.After(0, [this, call, status] { Finish(call, status); });
    return;
  }
  op.fingerprint = fingerprint;
  op.blocks = std::move(blocks);
  const auto space = store_.FindNamespace(kDefaultTenant, fingerprint);
  if (space.ok()) SetNamespace(&op, *space);
  op.timer = loop_.At(deadline_nanos, [this, call] {
    Finish(call, absl::DeadlineExceededError("the peer did not send the blocks in time"));
  });
  queue_.push_back(call);
  // Not within this call: a peer that cannot be reached may be known at once.
  loop_.Post(IfAlive([this] { Pump(); }));
}

void PeerPull::SetNamespace(Op* op, const TieredStore::NamespaceInfo& space) {
  auto ns = std::make_shared<ClientNamespace>();
  ns->name = space.name;
  ns->fingerprint = space.fingerprint;
  ns->spec = space.spec;
  op->namespace_id = space.id;
  op->ns = std::move(ns);
  op->block_bytes = BytesOfBlock(space.spec);
  for (std::size_t i = 0; i < op->blocks.keys.size(); ++i) {
    PullBatch::Wanted& wanted = op->wanted.emplace_back();
    wanted.key = op->blocks.keys[i];
    wanted.origin.token_count = space.spec.block_tokens;
    wanted.origin.index_known = !op->blocks.anchor.empty();
    if (!wanted.origin.index_known) continue;
    wanted.origin.block_index = op->blocks.places[i];
    wanted.origin.anchor_hash = KeyHash(op->fingerprint, op->blocks.anchor);
  }
  op->statuses.resize(op->wanted.size());
}

void PeerPull::Learn(Peers::CallId call, Op* op, const LinkPtr& link) {
  op->learning = true;
  const auto learned = [this, alive = std::weak_ptr<bool>(alive_), &loop = loop_,
                        call](absl::StatusOr<TieredStore::NamespaceInfo> space) {
    loop.Post([this, alive, call, space = std::move(space)] {
      if (!alive.expired()) Learned(call, space);
    });
  };
  // Opening it may write to the disk.
  link->client->FindNamespaceAsync(
      op->fingerprint, {},
      [&store = store_, &sealers = sealers_, fingerprint = op->fingerprint,
       learned](absl::StatusOr<ClientNamespace> found) {
        if (!found.ok()) return learned(found.status());
        sealers.Post([&store, fingerprint, learned, spec = std::move(found->spec)]() mutable {
          spec.tenant = kDefaultTenant;
          if (FingerprintOf(spec) != fingerprint) {
            return learned(absl::DataLossError("the peer describes another namespace"));
          }
          learned(store.OpenNamespace(absl::StrCat("peer-", ToHex(fingerprint)), spec));
        });
      });
}

void PeerPull::Open(NamespaceSpec spec, Peers::Done<TieredStore::NamespaceInfo> done) {
  sealers_.Post([&store = store_, &loop = loop_, alive = std::weak_ptr<bool>(alive_),
                 spec = std::move(spec), done = std::move(done)] {
    absl::StatusOr<TieredStore::NamespaceInfo> space =
        store.OpenNamespace(absl::StrCat("peer-", ToHex(FingerprintOf(spec))), spec);
    loop.Post([alive, space = std::move(space), done] {
      if (!alive.expired()) done(space);
    });
  });
}

void PeerPull::Learned(Peers::CallId call,
                       const absl::StatusOr<TieredStore::NamespaceInfo>& space) {
  const auto found = ops_.find(call);
  if (found == ops_.end()) return;
  Op& op = found->second;
  if (space.ok()) {
    SetNamespace(&op, *space);
  } else if (absl::IsNotFound(space.status())) {
    Finish(call, std::vector<absl::Status>(op.blocks.keys.size(), space.status()));
  } else {
    Finish(call, space.status());
  }
  Pump();
}

void PeerPull::Cancel(Peers::CallId call) {
  const auto found = ops_.find(call);
  if (found == ops_.end()) return;
  found->second.done = nullptr;
  Finish(call, absl::CancelledError("cancelled"));
}

absl::StatusOr<PeerPull::LinkPtr> PeerPull::LinkOf(const Member& member) {
  const LinkId id(member);
  if (const auto found = links_.find(id); found != links_.end()) return found->second;
  if (links_.size() >= options_.clients_max) {
    auto oldest = links_.end();
    for (auto it = links_.begin(); it != links_.end(); ++it) {
      const Link& link = *it->second;
      if (link.batches > 0 || link.greeting) continue;
      if (oldest == links_.end() || link.used_nanos < oldest->second->used_nanos) oldest = it;
    }
    if (oldest == links_.end()) return LinkPtr();
    Retire(LinkPtr(oldest->second), absl::UnavailableError("other peers are asked"));
  }
  Client::Options options;
  options.address = member.address;
  options.path = options_.path;
  options.data_plane_plaintext = options_.data_plane_plaintext;
  options.tls = options_.tls;
  options.encode_threads = 1;  // It neither encodes nor verifies.
  KVMILL_ASSIGN_OR_RETURN(std::unique_ptr<Client> client, Client::Create(options));
  auto link = std::make_shared<Link>();
  link->member = member;
  link->client = std::move(client);
  links_[id] = link;
  counters_.clients.store(links_.size(), std::memory_order_relaxed);
  if (idle_timer_ == 0) idle_timer_ = loop_.After(options_.idle_nanos, [this] { DropIdle(); });
  return link;
}

void PeerPull::Pump() {
  for (std::size_t i = 0; i < queue_.size();) {
    const Peers::CallId call = queue_[i];
    Op& op = ops_.at(call);
    const absl::StatusOr<LinkPtr> link = LinkOf(op.member);
    if (!link.ok()) {
      Finish(call, absl::UnavailableError(link.status().message()));
      i = 0;  // It left the queue, and whoever was told may have changed it.
      continue;
    }
    if (*link == nullptr) {
      ++i;
      continue;
    }
    Link& peer = **link;
    peer.used_nanos = loop_.clock().MonotonicNanos();
    if (peer.greeted) {
      if (const absl::Status known = CheckIncarnation(peer); !known.ok()) {
        Retire(LinkPtr(*link), known);
        i = 0;
        continue;
      }
    } else if (!peer.greeting) {
      SayHello(*link, op.fingerprint);
    }
    if (peer.greeted && op.ns == nullptr && !op.learning) Learn(call, &op, *link);
    while (peer.greeted && op.next < op.wanted.size()) {
      const std::size_t count =
          std::min<std::size_t>(op.wanted.size() - op.next,
                                std::max<std::uint64_t>(1, options_.batch_bytes / op.block_bytes));
      const auto fits = [&](const Options::Limit& used, const Options::Limit& limit) {
        return used.blocks == 0 || (used.blocks + count <= limit.blocks &&
                                    used.bytes + count * op.block_bytes <= limit.bytes);
      };
      if (!fits(peer.in_flight, options_.peer) || !fits(in_flight_, options_.all)) break;
      StartBatch(call, &op, *link, count);
    }
    if (op.ns != nullptr && op.next == op.wanted.size()) {
      queue_.erase(queue_.begin() + static_cast<std::ptrdiff_t>(i));
    } else {
      ++i;
    }
  }
}

void PeerPull::StartBatch(Peers::CallId call, Op* op, const LinkPtr& link, std::size_t count) {
  const std::size_t first = op->next;
  op->next += count;
  const auto begin = op->wanted.begin() + static_cast<std::ptrdiff_t>(first);
  auto batch = std::make_shared<PullBatch>(
      store_, sealers_, op->namespace_id, op->ns, absl::BytesToHexString(op->member.incarnation),
      std::vector<PullBatch::Wanted>(begin, begin + static_cast<std::ptrdiff_t>(count)));
  op->batches.push_back(batch);
  ++link->batches;
  const std::uint64_t bytes = count * op->block_bytes;
  for (Options::Limit* used : {&link->in_flight, &in_flight_}) {
    used->blocks += count;
    used->bytes += bytes;
  }
  counters_.blocks_in_flight.store(in_flight_.blocks, std::memory_order_relaxed);
  counters_.bytes_in_flight.store(in_flight_.bytes, std::memory_order_relaxed);
  const std::int64_t left_nanos =
      std::max<std::int64_t>(1'000'000, op->deadline_nanos - loop_.clock().MonotonicNanos());
  batch->Start(*link->client, absl::Nanoseconds(left_nanos),
               [this, alive = std::weak_ptr<bool>(alive_), &loop = loop_, call, link, first, bytes,
                batch](PullBatch::Result result) {
                 // The loop outlives this object, which may be gone when the task runs.
                 loop.Post([this, alive, call, link, first, bytes, batch,
                            result = std::move(result)]() mutable {
                   if (alive.expired()) return;
                   for (Options::Limit* used : {&link->in_flight, &in_flight_}) {
                     used->blocks -= batch->size();
                     used->bytes -= bytes;
                   }
                   --link->batches;
                   BatchEnded(call, link, first, batch, std::move(result));
                 });
               });
}

void PeerPull::BatchEnded(Peers::CallId call, const LinkPtr& link, std::size_t first,
                          const std::shared_ptr<PullBatch>& batch, PullBatch::Result result) {
  counters_.blocks_in_flight.store(in_flight_.blocks, std::memory_order_relaxed);
  counters_.bytes_in_flight.store(in_flight_.bytes, std::memory_order_relaxed);
  counters_.blocks.fetch_add(result.sealed_blocks, std::memory_order_relaxed);
  counters_.bytes.fetch_add(result.bytes, std::memory_order_relaxed);
  const auto found = ops_.find(call);
  absl::Status known = link->client == nullptr ? absl::OkStatus() : CheckIncarnation(*link);
  if (found != ops_.end()) {
    Op& op = found->second;
    op.batches.erase(std::remove(op.batches.begin(), op.batches.end(), batch), op.batches.end());
    // It has nothing of a namespace that it does not know.
    if (absl::IsNotFound(result.blocks.status())) {
      result.blocks = std::vector<absl::Status>(batch->size(), result.blocks.status());
    }
    if (result.blocks.ok()) {
      std::size_t damaged = 0;
      for (std::size_t i = 0; i < batch->size(); ++i) {
        const absl::Status& status = op.statuses[first + i] = std::move((*result.blocks)[i]);
        if (absl::IsNotFound(status)) {
          counters_.missing_blocks.fetch_add(1, std::memory_order_relaxed);
        }
        if (absl::IsDataLoss(status) && damaged++ == 0) {
          LogWarning(absl::StrCat("cluster: node \"", op.member.id, "\" at ", op.member.address,
                                  " sent block ", op.wanted[first + i].key.ToHex(),
                                  " damaged; it was dropped: ", status.message()));
        }
      }
      counters_.damaged_blocks.fetch_add(damaged, std::memory_order_relaxed);
      op.answered += batch->size();
    }
    if (!known.ok()) {
      // Retire says it to all.
    } else if (!result.blocks.ok()) {
      // What the client says of a call that it cancelled is about its own end.
      Finish(call, absl::IsCancelled(result.blocks.status())
                       ? absl::UnavailableError("the peer is asked no more")
                       : result.blocks.status());
    } else if (op.answered == op.wanted.size()) {
      std::vector<absl::Status> statuses = std::move(op.statuses);
      Finish(call, std::move(statuses));
    }
  }
  if (!known.ok()) Retire(link, known);
  Pump();
}

void PeerPull::SayHello(const LinkPtr& link, const Fingerprint& fingerprint) {
  link->greeting = true;
  ClientNamespace ns;
  ns.fingerprint = fingerprint;
  // A call that asks for nothing: whatever its answer is, it says who answers.
  CallOptions call;
  call.timeout = kHelloTimeout;
  link->client->TouchAsync(ns, {}, call,
                           [this, alive = std::weak_ptr<bool>(alive_), &loop = loop_,
                            link](const absl::StatusOr<std::uint64_t>& touched) {
                             loop.Post([this, alive, link, status = touched.status()] {
                               if (!alive.expired()) Greeted(link, status);
                             });
                           });
}

void PeerPull::Greeted(const LinkPtr& link, const absl::Status& status) {
  link->greeting = false;
  if (link->client == nullptr) return;  // Retired meanwhile.
  if (link->client->boot_id().empty()) {
    const absl::Status why = absl::UnavailableError(
        absl::StrCat("node \"", link->member.id, "\" at ", link->member.address,
                     " does not answer: ", status.message()));
    FailPullsFrom(link->member, why);
  } else if (const absl::Status known = CheckIncarnation(*link); !known.ok()) {
    Retire(link, known);
  } else {
    link->greeted = true;
  }
  Pump();
}

absl::Status PeerPull::CheckIncarnation(const Link& link) const {
  const std::string boot_id = link.client->boot_id();
  if (boot_id == absl::BytesToHexString(link.member.incarnation)) return absl::OkStatus();
  return absl::UnavailableError(absl::StrCat("at ", link.member.address, " answers incarnation ",
                                             boot_id, ", not node \"", link.member.id, "\" with ",
                                             absl::BytesToHexString(link.member.incarnation)));
}

void PeerPull::Retire(const LinkPtr& link, const absl::Status& why) {
  if (link->client == nullptr) return;
  links_.erase(LinkId(link->member));
  counters_.clients.store(links_.size(), std::memory_order_relaxed);
  // Its end waits for calls that it cancels, which are told here.
  closer_.Post([client = std::exchange(link->client, nullptr)]() mutable { client.reset(); });
  FailPullsFrom(link->member, why);
}

void PeerPull::FailPullsFrom(const Member& member, const absl::Status& why) {
  const LinkId id(member);
  std::vector<Peers::CallId> failed;
  for (const auto& [call, op] : ops_) {
    if (!op.bad && LinkId(op.member) == id) failed.push_back(call);
  }
  for (const Peers::CallId call : failed) Finish(call, why);
}

void PeerPull::Finish(Peers::CallId call, absl::StatusOr<std::vector<absl::Status>> result) {
  auto node = ops_.extract(call);
  if (node.empty()) return;
  Op& op = node.mapped();
  loop_.Cancel(op.timer);
  for (const auto& batch : op.batches) batch->Stop();
  if (!op.bad && (op.ns == nullptr || op.next < op.wanted.size())) {
    queue_.erase(std::remove(queue_.begin(), queue_.end(), call), queue_.end());
  }
  if (!result.ok()) counters_.failed_pulls.fetch_add(1, std::memory_order_relaxed);
  if (op.done != nullptr) op.done(std::move(result));
}

void PeerPull::Keep(const ClusterView& view) {
  std::vector<LinkPtr> gone;
  for (const auto& [id, link] : links_) {
    const auto index = view.IndexOf(link->member.id);
    if (!index.has_value() || !(LinkId(view.members()[*index]) == id)) gone.push_back(link);
  }
  for (const LinkPtr& link : gone) {
    Retire(link, absl::UnavailableError(
                     absl::StrCat("node \"", link->member.id, "\" is no member any more")));
  }
}

void PeerPull::DropIdle() {
  const std::int64_t oldest = loop_.clock().MonotonicNanos() - options_.idle_nanos;
  std::vector<LinkPtr> idle;
  for (const auto& [id, link] : links_) {
    if (link->batches == 0 && !link->greeting && link->used_nanos <= oldest) idle.push_back(link);
  }
  for (const LinkPtr& link : idle) Retire(link, absl::UnavailableError("the peer was idle"));
  idle_timer_ = links_.empty() ? 0 : loop_.After(options_.idle_nanos / 2, [this] { DropIdle(); });
}

}  // namespace kvmill
