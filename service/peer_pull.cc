#include "service/peer_pull.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "service/heard_names.h"
#include "storage/core/log.h"
#include "storage/core/quoted.h"
#include "storage/core/run_link.h"
#include "storage/core/status_macros.h"

namespace kvmill {
namespace {

std::uint64_t BytesOfBlock(const NamespaceSpec& spec) {
  std::uint64_t bytes = 0;
  for (const LayerGroup& group : spec.groups) {
    bytes += group.layers.size() * UniformPageBytes(FormatOf(spec, group), spec.block_tokens,
                                                    SlotKind::kTile, group.kv_heads);
  }
  return bytes;
}

}  // namespace

PeerPull::PeerPull(Loop& loop, TieredStore& store, PeerClients& clients, const Options& options)
    : loop_(loop),
      store_(store),
      clients_(clients),
      options_(options),
      sealers_(options.seal_threads, "peer-seal") {
  clients_.Watch([this] { PeersChanged(); });
}

PeerPull::~PeerPull() {
  alive_.reset();
  for (auto& [call, op] : ops_) {
    loop_.Cancel(op.timer);
    for (const auto& batch : op.batches) batch->Stop();
  }
  clients_.Close();
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
          value(c.bytes_in_flight)};
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
  const auto space = options_.shared.Find(store_, fingerprint);
  if (space.ok()) SetNamespace(&op, *space);
  op.timer = loop_.At(deadline_nanos, [this, call] {
    Finish(call, absl::DeadlineExceededError("the peer did not send the blocks in time"));
  });
  queue_.push_back(call);
  // Not within this call: a peer that cannot be reached may be known at once.
  PumpSoon();
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

void PeerPull::Learn(Peers::CallId call, Op* op) {
  op->learning = true;
  const auto learned = [this, alive = std::weak_ptr<bool>(alive_), &loop = loop_,
                        call](absl::StatusOr<TieredStore::NamespaceInfo> space) {
    loop.Post([this, alive, call, space = std::move(space)] {
      if (!alive.expired()) Learned(call, space);
    });
  };
  // Opening it may write to the disk.
  op->peer->client()->FindNamespaceAsync(
      op->fingerprint, {},
      [&store = store_, &sealers = sealers_, shared = options_.shared,
       fingerprint = op->fingerprint, learned](absl::StatusOr<ClientNamespace> found) {
        // FAILED_PRECONDITION is what this node itself refuses.
        if (absl::IsFailedPrecondition(found.status())) {
          return learned(absl::UnavailableError(found.status().message()));
        }
        if (!found.ok()) return learned(found.status());
        sealers.Post([&store, shared, fingerprint, learned, spec = std::move(found->spec),
                      heard = std::string(EngineName(found->name))]() mutable {
          // What is of its own tenant it does not say.
          if (spec.tenant.empty()) spec.tenant = kDefaultTenant;
          // The tenant is part of it: nobody can call one's blocks another's.
          if (FingerprintOf(spec) != fingerprint) {
            return learned(absl::DataLossError("the peer describes another namespace"));
          }
          if (!shared.Has(spec.tenant)) {
            return learned(absl::FailedPreconditionError(absl::StrCat(
                "blocks of tenant ", Quoted(spec.tenant), " are not shared with this node")));
          }
          learned(store.OpenNamespace(NameOfHeard(fingerprint, heard), spec));
        });
      });
}

void PeerPull::Open(NamespaceSpec spec, std::string heard,
                    Peers::Done<TieredStore::NamespaceInfo> done) {
  sealers_.Post([&store = store_, &loop = loop_, alive = std::weak_ptr<bool>(alive_),
                 spec = std::move(spec), heard = std::move(heard), done = std::move(done)] {
    absl::StatusOr<TieredStore::NamespaceInfo> space =
        store.OpenNamespace(NameOfHeard(FingerprintOf(spec), heard), spec);
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
  } else if (absl::IsNotFound(space.status()) || absl::IsFailedPrecondition(space.status())) {
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

absl::StatusOr<bool> PeerPull::Reach(Peers::CallId call, Op* op) {
  if (op->peer == nullptr) {
    absl::StatusOr<PeerPtr> peer = clients_.Get(op->member);
    // PeersChanged comes when there is room.
    if (absl::IsResourceExhausted(peer.status())) return false;
    KVMILL_RETURN_IF_ERROR(peer.status());
    op->peer = *std::move(peer);
    clients_.Begin(op->peer);
  }
  KVMILL_RETURN_IF_ERROR(clients_.Check(op->peer));
  if (op->peer->known()) return true;
  if (!std::exchange(op->greeting, true)) {
    clients_.Greet(op->peer, [this, call](const absl::Status& said) { Greeted(call, said); });
  }
  return false;
}

void PeerPull::Greeted(Peers::CallId call, const absl::Status& said) {
  const auto found = ops_.find(call);
  if (found == ops_.end()) return;
  found->second.greeting = false;
  if (!said.ok()) Finish(call, said);
  PumpSoon();
}

void PeerPull::PeersChanged() {
  std::vector<std::pair<Peers::CallId, absl::Status>> over;
  for (const auto& [call, op] : ops_) {
    if (op.peer != nullptr && !op.peer->closed().ok()) over.emplace_back(call, op.peer->closed());
  }
  for (const auto& [call, why] : over) Finish(call, why);
  Pump();
}

void PeerPull::PumpSoon() {
  if (std::exchange(pumping_, true)) return;
  loop_.Post([this, alive = std::weak_ptr<bool>(alive_)] {
    if (alive.expired()) return;
    pumping_ = false;
    Pump();
  });
}

void PeerPull::Pump() {
  for (std::size_t i = 0; i < queue_.size();) {
    const Peers::CallId call = queue_[i];
    Op& op = ops_.at(call);
    const absl::StatusOr<bool> reached = Reach(call, &op);
    if (!reached.ok()) {
      Finish(call, reached.status());
      i = 0;  // It left the queue, and whoever was told may have changed it.
      continue;
    }
    if (*reached && op.ns == nullptr && !op.learning) Learn(call, &op);
    if (*reached) StartBatches(call, &op);
    if (op.ns != nullptr && op.next == op.wanted.size()) {
      queue_.erase(queue_.begin() + static_cast<std::ptrdiff_t>(i));
    } else {
      ++i;
    }
  }
}

void PeerPull::StartBatches(Peers::CallId call, Op* op) {
  while (op->next < op->wanted.size()) {
    const std::size_t count =
        std::min<std::size_t>(op->wanted.size() - op->next,
                              std::max<std::uint64_t>(1, options_.batch_bytes / op->block_bytes));
    const auto fits = [&](const Options::Limit& used, const Options::Limit& limit) {
      return used.blocks == 0 || (used.blocks + count <= limit.blocks &&
                                  used.bytes + count * op->block_bytes <= limit.bytes);
    };
    const auto of_peer = in_flight_of_.find(PeerClients::PeerId(op->member));
    if (of_peer != in_flight_of_.end() && !fits(of_peer->second, options_.peer)) return;
    if (!fits(in_flight_, options_.all)) return;
    StartBatch(call, op, count);
  }
}

void PeerPull::Take(const PeerPtr& peer, std::size_t blocks, std::uint64_t bytes) {
  clients_.Begin(peer);
  for (Options::Limit* used : {&in_flight_of_[PeerClients::PeerId(peer->member())], &in_flight_}) {
    used->blocks += blocks;
    used->bytes += bytes;
  }
  counters_.blocks_in_flight.store(in_flight_.blocks, std::memory_order_relaxed);
  counters_.bytes_in_flight.store(in_flight_.bytes, std::memory_order_relaxed);
}

void PeerPull::GiveBack(const PeerPtr& peer, std::size_t blocks, std::uint64_t bytes) {
  const auto of_peer = in_flight_of_.find(PeerClients::PeerId(peer->member()));
  for (Options::Limit* used : {&of_peer->second, &in_flight_}) {
    used->blocks -= blocks;
    used->bytes -= bytes;
  }
  if (of_peer->second.blocks == 0) in_flight_of_.erase(of_peer);
  counters_.blocks_in_flight.store(in_flight_.blocks, std::memory_order_relaxed);
  counters_.bytes_in_flight.store(in_flight_.bytes, std::memory_order_relaxed);
  clients_.End(peer);
}

void PeerPull::StartBatch(Peers::CallId call, Op* op, std::size_t count) {
  const std::size_t first = op->next;
  op->next += count;
  const auto begin = op->wanted.begin() + static_cast<std::ptrdiff_t>(first);
  auto batch = std::make_shared<PullBatch>(
      store_, sealers_, op->namespace_id, op->ns, op->peer->boot_id(),
      std::vector<PullBatch::Wanted>(begin, begin + static_cast<std::ptrdiff_t>(count)));
  op->batches.push_back(batch);
  const std::uint64_t bytes = count * op->block_bytes;
  Take(op->peer, count, bytes);
  const RequestScope scope(op->request);
  const std::int64_t left_nanos =
      std::max<std::int64_t>(1'000'000, op->deadline_nanos - loop_.clock().MonotonicNanos());
  batch->Start(*op->peer->client(), absl::Nanoseconds(left_nanos),
               [this, alive = std::weak_ptr<bool>(alive_), &loop = loop_, call, peer = op->peer,
                first, bytes, batch](PullBatch::Result result) {
                 // The loop outlives this object, which may be gone when the task runs.
                 loop.Post([this, alive, call, peer, first, bytes, batch,
                            result = std::move(result)]() mutable {
                   if (alive.expired()) return;
                   GiveBack(peer, batch->size(), bytes);
                   BatchEnded(call, peer, first, batch, std::move(result));
                 });
               });
}

void PeerPull::BatchEnded(Peers::CallId call, const PeerPtr& peer, std::size_t first,
                          const std::shared_ptr<PullBatch>& batch, PullBatch::Result result) {
  counters_.blocks.fetch_add(result.sealed_blocks, std::memory_order_relaxed);
  counters_.bytes.fetch_add(result.bytes, std::memory_order_relaxed);
  if (result.bytes > 0) transports_.Came(peer->member().id, result.transport, result.bytes);
  const auto found = ops_.find(call);
  const absl::Status known = clients_.Check(peer);
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
      // What the client says of calls that its end has cancelled is about that.
      Finish(call, known);
    } else if (!result.blocks.ok()) {
      Finish(call, result.blocks.status());
    } else if (op.answered == op.wanted.size()) {
      std::vector<absl::Status> statuses = std::move(op.statuses);
      Finish(call, std::move(statuses));
    }
  }
  Pump();
}

void PeerPull::Finish(Peers::CallId call, absl::StatusOr<std::vector<absl::Status>> result) {
  auto node = ops_.extract(call);
  if (node.empty()) return;
  Op& op = node.mapped();
  loop_.Cancel(op.timer);
  if (op.peer != nullptr) clients_.End(op.peer);
  for (const auto& batch : op.batches) batch->Stop();
  if (!op.bad && (op.ns == nullptr || op.next < op.wanted.size())) {
    queue_.erase(std::remove(queue_.begin(), queue_.end(), call), queue_.end());
  }
  if (!result.ok()) counters_.failed_pulls.fetch_add(1, std::memory_order_relaxed);
  const RequestScope scope(op.request);  // Of what is asked next.
  if (op.done != nullptr) op.done(std::move(result));
}

}  // namespace kvmill
