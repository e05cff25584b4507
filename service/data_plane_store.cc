// DataPlane: store calls, and waiting until blocks are durable.
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/convert.h"
#include "service/data_plane_calls.h"
#include "service/request.h"
#include "service/store_chunk.h"
#include "storage/core/status_macros.h"

namespace kvmill {
namespace {

void Respond(IncomingCall& call, const v1::DataStoreReply& reply) {
  std::vector<std::byte> header(reply.ByteSizeLong());
  reply.SerializeWithCachedSizesToArray(reinterpret_cast<std::uint8_t*>(header.data()));
  call.Respond({.header = std::move(header)});
}

// The block's failure; the call itself is fine.
void RespondFailed(IncomingCall& call, const v1::StoreChunk& chunk, const absl::Status& status) {
  constexpr std::size_t kMessageBytesMax = 1024;
  v1::DataStoreReply reply;
  v1::StoreResult* result = reply.mutable_result();
  result->set_sequence(chunk.sequence());
  result->set_group(chunk.group());
  const bool existing = absl::IsAlreadyExists(status);
  result->set_outcome(existing ? v1::STORE_EXISTING : v1::STORE_FAILED);
  ToProto(existing ? absl::OkStatus()
                   : absl::Status(status.code(), status.message().substr(0, kMessageBytesMax)),
          result->mutable_status());
  Respond(call, reply);
}

}  // namespace

void DataPlane::StartStore(const PeerPtr& peer, v1::DataStore request,
                           std::unique_ptr<IncomingCall> call, std::unique_ptr<Running> running) {
  auto store = std::make_shared<StoreCall>();
  store->running = std::move(running);
  store->peer = peer;
  store->request = CurrentRequest();
  store->call = std::move(call);
  store->chunk = std::move(*request.mutable_chunk());
  store->bytes = store->call->payload_bytes();
  const absl::Status status = [&]() -> absl::Status {
    KVMILL_RETURN_IF_ERROR(context_.CheckAcceptsStores());
    if (request.wait() == v1::WAIT_DURABLE && context_.data_dir.empty()) {
      return absl::FailedPreconditionError(
          "wait durable: this daemon has no disk tier (it was started without --data-dir)");
    }
    KVMILL_ASSIGN_OR_RETURN(store->ns, Resolve(*peer, request.fingerprint()));
    return absl::OkStatus();
  }();
  if (!status.ok()) return store->call->Respond({.status = status});
  absl::Status fits = IdentityOfChunk(store->ns, store->chunk, &store->id, &store->origin);
  if (fits.ok() && store->bytes > kDataChunkBytesMax) {
    fits = absl::InvalidArgumentError(absl::StrCat("block ", store->chunk.sequence(), ": chunk of ",
                                                   store->bytes, " bytes, want at most ",
                                                   kDataChunkBytesMax));
  }
  const bool asks_only = store->chunk.layer_count() == 0 && store->bytes == 0;
  if (fits.ok() && !asks_only) fits = CheckChunk(store->ns, store->chunk, store->bytes);
  if (!fits.ok()) return RespondFailed(*store->call, store->chunk, fits);
  if (asks_only) return context_.encode_pool.Post([this, store] { Write(store); });

  Slab slab;
  {
    MutexLock lock(mu_);
    if (slabs_used_ * kDataChunkBytesMax >= kStagingBytesMax && !stopping_) {
      waiting_.push_back(std::move(store));
      return;
    }
    ++slabs_used_;
    if (!free_slabs_.empty()) {
      slab = std::move(free_slabs_.back());
      free_slabs_.pop_back();
    }
  }
  if (slab == nullptr) slab.reset(new std::byte[kDataChunkBytesMax]);
  Receive(store, std::move(slab));
}

void DataPlane::Receive(const StoreCallPtr& store, Slab slab) {
  store->slab = std::move(slab);
  store->receive_nanos = transport_->NowNanos();
  store->receiving = true;
  {
    MutexLock lock(mu_);
    receiving_.emplace(store->receive_nanos, store);
    if (!std::exchange(sweep_scheduled_, true)) ScheduleSweep();
  }
  IncomingCall& call = *store->call;
  call.Receive({absl::MakeSpan(store->slab.get(), store->bytes)}, MemoryKind::kHost,
               [this, store](const absl::Status& status) {
                 store->receiving = false;
                 if (!status.ok()) {
                   GiveBack(std::move(store->slab));
                   return store->call->Respond({.status = status});
                 }
                 store_seconds_.Observe(
                     static_cast<double>(transport_->NowNanos() - store->receive_nanos) * 1e-9);
                 store->peer->bytes->in.fetch_add(store->bytes, std::memory_order_relaxed);
                 context_.encode_pool.Post([this, store] { Write(store); });
               });
}

void DataPlane::GiveBack(Slab slab) {
  for (;;) {
    StoreCallPtr next;
    std::vector<StoreCallPtr> gone;  // Answered by being dropped, without the lock.
    {
      MutexLock lock(mu_);
      while (!waiting_.empty() && waiting_.front()->call->cancelled()) {
        gone.push_back(std::move(waiting_.front()));
        waiting_.pop_front();
      }
      if (waiting_.empty()) {
        --slabs_used_;
        free_slabs_.push_back(std::move(slab));
        return;
      }
      next = std::move(waiting_.front());
      waiting_.pop_front();
    }
    return Receive(next, std::move(slab));
  }
}

void DataPlane::Write(const StoreCallPtr& store) {
  const ServedRequest served(store->request);
  const v1::StoreChunk& chunk = store->chunk;
  v1::DataStoreReply reply;
  const absl::Status status = [&]() -> absl::Status {
    if (store->call->cancelled()) return absl::CancelledError("the caller gave up");
    KVMILL_ASSIGN_OR_RETURN(BlockWriter writer,
                            context_.store.BeginStore(store->id, store->origin));
    v1::StoreResult* result = reply.mutable_result();
    result->set_sequence(chunk.sequence());
    result->set_group(chunk.group());
    ToProto(absl::OkStatus(), result->mutable_status());
    result->set_outcome(v1::STORE_PARTIAL);
    if (store->slab == nullptr) return absl::OkStatus();
    const absl::Span<const std::byte> bytes(store->slab.get(), store->bytes);
    KVMILL_ASSIGN_OR_RETURN(const WriteResult written,
                            WriteChunk(store->ns, chunk, absl::MakeConstSpan(&bytes, 1), writer));
    reply.set_existing_heads(written.existing_heads);
    if (written.sealed) {
      result->set_outcome(v1::STORE_STORED);
      FillSealed(written, result);
    }
    return absl::OkStatus();
  }();
  if (store->slab != nullptr) GiveBack(std::move(store->slab));
  if (status.ok()) {
    Respond(*store->call, reply);
  } else {
    RespondFailed(*store->call, chunk, status);
  }
}

void DataPlane::StartDurable(const PeerPtr& peer, const v1::DataDurable& request,
                             std::unique_ptr<IncomingCall> call, std::unique_ptr<Running> running) {
  auto ids = std::make_shared<std::vector<BlockId>>();
  const absl::Status status = [&]() -> absl::Status {
    KVMILL_ASSIGN_OR_RETURN(const TieredStore::NamespaceInfo ns,
                            Resolve(*peer, request.fingerprint()));
    KVMILL_ASSIGN_OR_RETURN(const std::vector<BlockKey> keys, KeysFromProto(request.keys()));
    if (static_cast<std::size_t>(request.groups_size()) != keys.size()) {
      return absl::InvalidArgumentError(
          absl::StrCat(request.groups_size(), " layer groups of ", keys.size(), " keys"));
    }
    for (std::size_t i = 0; i < keys.size(); ++i) {
      const std::uint32_t group = request.groups(static_cast<int>(i));
      if (group >= ns.spec.groups.size()) {
        return absl::InvalidArgumentError(
            absl::StrCat("layer group ", group, ", want below ", ns.spec.groups.size()));
      }
      BlockId& id = ids->emplace_back();
      id.namespace_id = ns.id;
      id.group = static_cast<std::uint8_t>(group);
      id.key = keys[i];
    }
    return absl::OkStatus();
  }();
  if (!status.ok()) return call->Respond({.status = status});
  // std::function wants its captures to be copied.
  auto held = std::make_shared<StoreCall>();
  held->running = std::move(running);
  held->request = CurrentRequest();
  held->call = std::move(call);
  context_.io_pool.Post([this, held, ids] {
    const ServedRequest served(held->request);
    std::vector<absl::Status> results(ids->size());
    absl::Status durable = context_.store.MakeDurable(*ids, absl::MakeSpan(results));
    for (std::size_t i = 0; durable.ok() && i < results.size(); ++i) {
      if (results[i].ok()) continue;
      durable = absl::Status(
          results[i].code(),
          absl::StrCat("block ", (*ids)[i].key.ToHex(), " is not durable: ", results[i].message()));
    }
    held->call->Respond({.status = durable});
  });
}

}  // namespace kvmill
