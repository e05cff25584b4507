#include "service/fetch_call.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/bulk_codec.h"
#include "client/convert.h"
#include "service/cluster_blocks.h"
#include "service/status_grpc.h"
#include "storage/core/status_macros.h"

namespace kvmill {
namespace {

// Large enough that per-message costs vanish, small enough that the client works on one message
// while the next one travels.
constexpr std::size_t kFetchMessageBytes = std::size_t{1} << 20;

// What a slice of a pinned page owns.
struct SliceOwner {
  std::shared_ptr<const BlockRef> block;
  std::atomic<std::uint64_t>* pinned_slices;
};

void ReleaseSlice(void* owner) {
  auto* o = static_cast<SliceOwner*>(owner);
  std::atomic<std::uint64_t>* const pinned_slices = o->pinned_slices;
  delete o;  // Before the count: when it is 0, no block is pinned by a slice.
  pinned_slices->fetch_sub(1, std::memory_order_release);
}

grpc::Slice SliceOf(const std::shared_ptr<const BlockRef>& block, absl::Span<const std::byte> bytes,
                    ServiceCounters& counters) {
  counters.pinned_slices.fetch_add(1, std::memory_order_relaxed);
  auto* owner = new SliceOwner{block, &counters.pinned_slices};
  // gRPC takes a mutable pointer and does not write through it.
  return grpc::Slice(const_cast<std::byte*>(bytes.data()), bytes.size(), &ReleaseSlice, owner);
}

}  // namespace

FetchCall* FetchCall::Start(ServiceContext& context, const absl::StatusOr<Caller>& caller,
                            std::chrono::system_clock::time_point deadline,
                            const grpc::ByteBuffer& request) {
  auto call = std::make_shared<FetchCall>(context);
  call->self_ = call;
  const std::uint32_t streams =
      context.counters.fetch_streams.fetch_add(1, std::memory_order_relaxed) + 1;
  absl::Status status = streams > kFetchStreamsMax
                            ? absl::ResourceExhaustedError(absl::StrCat(
                                  streams, " Fetch streams at once: at most ", kFetchStreamsMax))
                            : call->Begin(caller, deadline, request);
  MutexLock lock(call->mu_);
  if (!status.ok()) {
    call->Fail(status);
  } else {
    call->Advance();
  }
  return call.get();
}

absl::Status FetchCall::Begin(const absl::StatusOr<Caller>& caller,
                              std::chrono::system_clock::time_point deadline,
                              const grpc::ByteBuffer& request) {
  KVMILL_RETURN_IF_ERROR(caller.status());
  v1::FetchRequest fetch;
  if (!FromByteBuffer(request, &fetch)) {
    return absl::InvalidArgumentError("FetchRequest does not parse");
  }
  KVMILL_ASSIGN_OR_RETURN(keys_, KeysFromProto(fetch.keys()));
  KVMILL_ASSIGN_OR_RETURN(const Elsewhere elsewhere, FromProto(fetch.elsewhere()));
  // Nodes that copy ask so: `local_only`.
  absl::StatusOr<TieredStore::NamespaceInfo> info =
      elsewhere.local_only ? context_.ResolveForNode(*caller, fetch.namespace_())
                           : context_.Resolve(*caller, fetch.namespace_());
  if (info.ok()) {
    Bring(*std::move(info), *caller, elsewhere, deadline);
    return absl::OkStatus();
  }
  if (context_.Learn(info.status(), *caller, fetch.namespace_(), elsewhere, deadline,
                     [self = shared_from_this(), caller = *caller, elsewhere,
                      deadline](absl::StatusOr<TieredStore::NamespaceInfo> learned) {
                       if (learned.ok()) {
                         self->Bring(*std::move(learned), caller, elsewhere, deadline);
                       }
                       MutexLock lock(self->mu_);
                       if (!learned.ok()) return self->Fail(learned.status());
                       self->Advance();
                     })) {
    return absl::OkStatus();
  }
  return info.status();
}

void FetchCall::Bring(TieredStore::NamespaceInfo space, const Caller& caller,
                      const Elsewhere& elsewhere, std::chrono::system_clock::time_point deadline) {
  namespace_ = std::move(space);
  const RequestScope scope(caller.request);
  ClusterBlocks* const cluster = context_.BlocksOfPeers(caller, elsewhere);
  if (cluster == nullptr || !cluster->Bring(namespace_, keys_, elsewhere, deadline,
                                            [self = shared_from_this()](std::size_t keys) {
                                              return self->Settled(keys);
                                            })) {
    MutexLock lock(mu_);
    begun_ = true;
    settled_keys_ = keys_.size();
  }
}

bool FetchCall::Settled(std::size_t keys) {
  MutexLock lock(mu_);
  begun_ = true;
  settled_keys_ = keys;
  Advance();
  return !finished_;
}

void FetchCall::OnDone() {
  context_.counters.fetch_streams.fetch_sub(1, std::memory_order_relaxed);
  {
    MutexLock lock(mu_);
    message_.Clear();
    ready_.clear();
  }
  self_.reset();  // Last statement: may destroy this.
}

void FetchCall::OnCancel() {
  MutexLock lock(mu_);
  Fail(absl::CancelledError("the caller gave up"));
}

void FetchCall::OnWriteDone(bool ok) {
  MutexLock lock(mu_);
  writing_ = false;
  message_.Clear();
  if (!ok) {
    Fail(absl::CancelledError("a reply could not be written"));
  } else {
    Advance();
  }
}

void FetchCall::Load() {
  const std::size_t groups = namespace_.spec.groups.size();
  for (;;) {
    std::size_t index = 0;
    {
      MutexLock lock(mu_);
      if (finished_ || next_load_ == settled_keys_ * groups || ready_.size() >= kReadyBlocksMax) {
        loading_ = false;
        Advance();
        return;
      }
      index = next_load_++;
    }
    ReadyBlock ready;
    ready.block = static_cast<std::uint32_t>(index / groups);
    ready.group = static_cast<std::uint32_t>(index % groups);
    BlockId id;
    id.namespace_id = namespace_.id;
    id.group = static_cast<std::uint8_t>(ready.group);
    id.key = keys_[ready.block];
    absl::StatusOr<BlockRef> ref = context_.store.Fetch(id);
    if (ref.ok()) {
      ready.pages = std::make_shared<const BlockRef>(*std::move(ref));
    } else {
      ready.status = ref.status();
    }
    MutexLock lock(mu_);
    if (finished_) continue;
    ready_.push_back(std::move(ready));
    Advance();
  }
}

void FetchCall::Advance() {
  if (finished_ || !begun_) return;
  const std::size_t groups = namespace_.spec.groups.size();
  if (!loading_ && next_load_ < settled_keys_ * groups && ready_.size() < kReadyBlocksMax) {
    loading_ = true;
    context_.io_pool.Post([self = shared_from_this()] { self->Load(); });
  }
  if (writing_) return;
  if (NextMessage()) {
    writing_ = true;
    StartWrite(&message_);
  } else if (next_load_ == keys_.size() * groups && !loading_) {
    finished_ = true;
    Finish(grpc::Status::OK);
  }
}

bool FetchCall::NextMessage() {
  if (!ready_.empty() && head_written_ &&
      (ready_.front().pages == nullptr || page_ == ready_.front().pages->pages().size())) {
    ready_.pop_front();
    head_written_ = false;
    page_ = page_offset_ = 0;
    offset_bytes_ = 0;
  }
  if (ready_.empty()) return false;
  const ReadyBlock& front = ready_.front();
  v1::FetchReply head;
  head.set_block(front.block);
  head.set_group(front.group);
  if (!head_written_) {
    ToProto(front.status, head.mutable_status());
    if (front.pages != nullptr) {
      head.set_tier(ToProto(front.pages->tier()));
      head.set_token_count(front.pages->token_count());
      for (const auto& page : front.pages->pages()) {
        head.add_page_bytes(static_cast<std::uint32_t>(page.size()));
      }
    }
    head_written_ = true;
  }
  head.set_offset_bytes(offset_bytes_);
  std::vector<grpc::Slice> slices(1);
  std::size_t bytes = 0;
  if (front.pages != nullptr) {
    const auto pages = front.pages->pages();
    while (page_ < pages.size() && bytes < kFetchMessageBytes) {
      const absl::Span<const std::byte> rest = pages[page_].subspan(page_offset_);
      const std::size_t take = std::min(rest.size(), kFetchMessageBytes - bytes);
      slices.push_back(SliceOf(front.pages, rest.first(take), context_.counters));
      bytes += take;
      page_offset_ += take;
      if (page_offset_ == pages[page_].size()) {
        ++page_;
        page_offset_ = 0;
      }
    }
    offset_bytes_ += bytes;
    context_.counters.inline_bytes_out.fetch_add(bytes, std::memory_order_relaxed);
  }
  slices[0] = grpc::Slice(EncodeBulkHead(head, 0, bytes));
  message_ = grpc::ByteBuffer(slices.data(), slices.size());
  return true;
}

void FetchCall::Fail(const absl::Status& status) {
  if (finished_) return;
  finished_ = true;
  Finish(StatusToGrpc(status));
}

}  // namespace kvmill
