// DataPlane: fetch calls.
#include <chrono>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "client/convert.h"
#include "service/cluster_blocks.h"
#include "service/data_plane_calls.h"
#include "service/request.h"
#include "storage/core/status_macros.h"

namespace kvmill {
namespace {

constexpr std::size_t kMessageBytesOfBlock = 256;  // Of a block's error, in a reply's header.
constexpr std::size_t kEntryBytesMax = 64 + kMessageBytesOfBlock;  // Without its page sizes.
constexpr std::size_t kPageSizeBytesMax = 5;

std::vector<std::byte> ToHeader(const google::protobuf::MessageLite& message) {
  std::vector<std::byte> header(message.ByteSizeLong());
  message.SerializeWithCachedSizesToArray(reinterpret_cast<std::uint8_t*>(header.data()));
  return header;
}

}  // namespace

void DataPlane::StartFetch(const PeerPtr& peer, const v1::DataFetch& request,
                           std::unique_ptr<IncomingCall> call, std::unique_ptr<Running> running) {
  auto fetch = std::make_shared<FetchCall>();
  fetch->running = std::move(running);
  fetch->peer = peer;
  fetch->request = CurrentRequest();
  fetch->call = std::move(call);
  fetch->next = request.first_group();
  const absl::Status status = [&]() -> absl::Status {
    KVMILL_ASSIGN_OR_RETURN(fetch->keys, KeysFromProto(request.keys()));
    KVMILL_ASSIGN_OR_RETURN(fetch->elsewhere, FromProto(request.elsewhere()));
    return absl::OkStatus();
  }();
  if (!status.ok()) return fetch->call->Respond({.status = status});
  v1::NamespaceRef ref;
  ref.set_fingerprint(request.fingerprint());
  // Nodes that copy ask so: `local_only`.
  absl::StatusOr<TieredStore::NamespaceInfo> ns = fetch->elsewhere.local_only
                                                      ? context_.ResolveForNode(peer->caller, ref)
                                                      : context_.Resolve(peer->caller, ref);
  if (ns.ok()) return FetchFrom(*std::move(ns), fetch);
  Caller caller = peer->caller;
  caller.request = fetch->request;
  if (!context_.Learn(ns.status(), caller, ref, fetch->elsewhere, DeadlineOf(*fetch),
                      [this, fetch](absl::StatusOr<TieredStore::NamespaceInfo> learned) {
                        const ServedRequest served(fetch->request);
                        if (learned.ok()) return FetchFrom(*std::move(learned), fetch);
                        fetch->call->Respond({.status = learned.status()});
                      })) {
    fetch->call->Respond({.status = ns.status()});
  }
}

std::chrono::system_clock::time_point DataPlane::DeadlineOf(const FetchCall& fetch) const {
  return std::chrono::system_clock::now() +
         std::chrono::nanoseconds(fetch.call->deadline_nanos() - transport_->NowNanos());
}

void DataPlane::FetchFrom(TieredStore::NamespaceInfo ns, const FetchCallPtr& fetch) {
  fetch->ns = std::move(ns);
  const std::size_t groups = fetch->ns.spec.groups.size();
  if (fetch->keys.empty() || fetch->next >= groups) {
    const absl::Status status = absl::InvalidArgumentError(
        absl::StrCat("a fetch of ", fetch->keys.size(), " keys from layer group ", fetch->next,
                     " of ", groups, " on"));
    return fetch->call->Respond({.status = status});
  }
  if (Gather(*fetch, false)) return Answer(fetch);
  const auto gather_later = [this, fetch] {
    context_.io_pool.Post([this, fetch] {
      const ServedRequest served(fetch->request);
      Gather(*fetch, true);
      Answer(fetch);
    });
  };
  // What this node lacks its peers may have.
  ClusterBlocks* const cluster = context_.BlocksOfPeers(fetch->peer->caller, fetch->elsewhere);
  const auto settled = [fetch, gather_later](std::size_t keys) {
    if (keys < fetch->keys.size() && !fetch->call->cancelled()) return true;
    gather_later();
    return false;
  };
  if (cluster == nullptr ||
      !cluster->Bring(fetch->ns, fetch->keys, fetch->elsewhere, DeadlineOf(*fetch), settled)) {
    gather_later();
  }
}

// A miss here: it is on disk, or nowhere, or in the other memory.
BlockRef DataPlane::FromMemory(const FetchCall& fetch, const BlockId& id) const {
  PageMemory where = PageMemory::kHost;
  if (sends_gpu_memory_ && !fetch.memory.has_value()) where = PageMemory::kInPlace;
  if (fetch.memory == Tier::kGpu) where = PageMemory::kGpu;
  return context_.store.FetchFromMemory(id, FetchPath::kUcx, where);
}

bool DataPlane::Gather(FetchCall& fetch, bool may_block) {
  const std::size_t groups = fetch.ns.spec.groups.size();
  for (; fetch.next < fetch.keys.size() * groups; ++fetch.next) {
    BlockId id;
    id.namespace_id = fetch.ns.id;
    id.group = static_cast<std::uint8_t>(fetch.next % groups);
    id.key = fetch.keys[fetch.next / groups];
    const std::size_t entry_bytes =
        kEntryBytesMax + fetch.ns.spec.groups[id.group].layers.size() * kPageSizeBytesMax;
    if (fetch.reply.groups_size() > 0 && (fetch.payload_bytes >= kFetchReplyBytes ||
                                          fetch.reply_bytes + entry_bytes > kCallHeaderBytesMax)) {
      break;
    }
    if (fetch.call->cancelled()) break;
    BlockRef block = FromMemory(fetch, id);
    absl::Status status;
    if (!block.valid()) {
      if (fetch.memory == Tier::kGpu) break;  // Another reply has it.
      if (sends_gpu_memory_ && fetch.memory == Tier::kHost &&
          context_.store.Touch(absl::MakeConstSpan(&id, 1)) > 0) {
        break;  // It is on the GPU: another reply sends it from there.
      }
      if (!may_block) return false;
      absl::StatusOr<BlockRef> loaded = context_.store.Fetch(id, FetchPath::kUcx);
      if (loaded.ok()) {
        block = *std::move(loaded);
      } else {
        status = absl::Status(loaded.status().code(),
                              loaded.status().message().substr(0, kMessageBytesOfBlock));
      }
    }
    v1::FetchReply* entry = fetch.reply.add_groups();
    entry->set_block(static_cast<std::uint32_t>(fetch.next / groups));
    entry->set_group(id.group);
    ToProto(status, entry->mutable_status());
    if (block.valid()) {
      entry->set_tier(ToProto(block.tier()));
      entry->set_token_count(block.token_count());
      fetch.memory = block.memory();
      std::uint64_t block_bytes = 0;
      for (const absl::Span<const std::byte>& page : block.pages()) {
        entry->add_page_bytes(static_cast<std::uint32_t>(page.size()));
        block_bytes += page.size();
      }
      fetch.payload_bytes += block_bytes;
      if (block.tier() == Tier::kGpu) {
        (block.memory() == Tier::kGpu ? gpu_bytes_from_gpu_ : gpu_bytes_from_host_)
            .fetch_add(block_bytes, std::memory_order_relaxed);
      }
      fetch.blocks.push_back(std::move(block));
    }
    constexpr std::size_t kFieldBytesMax = 4;  // Tag and length of the entry.
    fetch.reply_bytes += entry->ByteSizeLong() + kFieldBytesMax;
  }
  return true;
}

void DataPlane::Answer(const FetchCallPtr& fetch) {
  SourceSpans payload;
  for (const BlockRef& block : fetch->blocks) {
    payload.insert(payload.end(), block.pages().begin(), block.pages().end());
  }
  DataPlane* const plane = fetch->running->plane();
  fetch->peer->bytes->out.fetch_add(fetch->payload_bytes, std::memory_order_relaxed);
  const std::unique_ptr<IncomingCall> call = std::move(fetch->call);
  const std::int64_t start_nanos = plane->transport_->NowNanos();
  // The pins live as long as this closure.
  call->Respond(
      {.header = ToHeader(fetch->reply),
       .payload = std::move(payload),
       .payload_memory = fetch->memory == Tier::kGpu ? MemoryKind::kCuda : MemoryKind::kHost,
       .done = [fetch, plane, start_nanos](const absl::Status& status) {
         if (!status.ok() || fetch->blocks.empty()) return;
         plane->fetch_seconds_.Observe(
             static_cast<double>(plane->transport_->NowNanos() - start_nanos) * 1e-9);
       }});
}

}  // namespace kvmill
