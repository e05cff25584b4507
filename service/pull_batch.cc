#include "service/pull_batch.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "storage/core/status_macros.h"
#include "storage/tenant_quotas.h"

namespace kvmill {

PullBatch::PullBatch(TieredStore& store, WorkerPool& workers, NamespaceId namespace_id,
                     std::shared_ptr<const ClientNamespace> ns, std::string boot_id_hex,
                     std::vector<Wanted> wanted)
    : store_(store),
      workers_(workers),
      namespace_id_(namespace_id),
      ns_(std::move(ns)),
      boot_id_hex_(std::move(boot_id_hex)),
      wanted_(std::move(wanted)),
      blocks_(wanted_.size()) {
  std::size_t pages = 0;
  for (const LayerGroup& group : ns_->spec.groups) pages += group.layers.size();
  for (Block& block : blocks_) {
    block.groups.resize(ns_->spec.groups.size());
    block.pages_left = pages;
  }
  for (const Wanted& wanted_block : wanted_) keys_.push_back(wanted_block.key);
}

void PullBatch::Start(Client& client, absl::Duration timeout, std::function<void(Result)> ended) {
  ended_ = std::move(ended);
  client_ = &client;
  CallOptions call;
  call.timeout = timeout;
  call.elsewhere.local_only = true;  // Or nodes would ask one another in a circle.
  client.FetchAsync(*ns_, keys_, *this, call,
                    [self = shared_from_this()](absl::StatusOr<FetchResult> result) {
                      self->Fetched(std::move(result));
                    });
}

absl::Status PullBatch::OnGroup(std::uint32_t block, std::uint8_t group, std::uint32_t token_count,
                                absl::Span<const std::uint32_t> page_bytes) {
  if (stopped_.load(std::memory_order_relaxed)) return absl::CancelledError("the pull is over");
  KVMILL_RETURN_IF_ERROR(CheckPeer());
  if (blocks_[block].pages_left == 0) return absl::InternalError("a block came twice");
  const BlockOrigin& origin = wanted_[block].origin;
  if (token_count != origin.token_count) {
    return absl::DataLossError(
        absl::StrCat("a block of ", token_count, " tokens came: want ", origin.token_count));
  }
  absl::StatusOr<BlockCopy> copy = store_.BeginCopy({namespace_id_, group, wanted_[block].key},
                                                    origin, page_bytes, absl::ZeroDuration());
  if (copy.ok()) {
    blocks_[block].groups[group] = *std::move(copy);
  } else if (absl::IsInvalidArgument(copy.status())) {
    return absl::DataLossError(copy.status().message());  // The sizes: all else is our own.
  } else if (IsQuotaRefusal(copy.status())) {
    // Not as when there is no room: others' blocks are not to wait for it.
    return absl::FailedPreconditionError(copy.status().message());
  } else if (!absl::IsAlreadyExists(copy.status())) {
    return copy.status();
  }
  return absl::OkStatus();
}

// The client notes who answers before it hands anything over that came in that answer, or on a
// connection that the answer led to.
absl::Status PullBatch::CheckPeer() const {
  const std::string boot_id_hex = client_->boot_id();
  if (boot_id_hex == boot_id_hex_) return absl::OkStatus();
  return absl::AbortedError(
      absl::StrCat("incarnation ", boot_id_hex, " answers, not ", boot_id_hex_));
}

absl::Span<std::byte> PullBatch::PageMemory(const PageId& id, std::size_t) {
  const BlockCopy& copy = blocks_[id.block].groups[id.group];
  return copy.valid() ? copy.pages()[id.layer_index] : absl::Span<std::byte>();
}

absl::Status PullBatch::OnPage(const PageId& id, const PageView& page) {
  Block& block = blocks_[id.block];
  const BlockCopy& copy = block.groups[id.group];
  if (copy.valid() && page.bytes().data() != copy.pages()[id.layer_index].data()) {
    return absl::InternalError("a page was received elsewhere than in the store's memory");
  }
  if (--block.pages_left > 0) return absl::OkStatus();
  // Its pages may have come in several answers: all of them before this one.
  block.status = CheckPeer();
  open_.fetch_add(1, std::memory_order_relaxed);
  workers_.Post([self = shared_from_this(), index = id.block] { self->Seal(index); });
  return absl::OkStatus();
}

void PullBatch::Seal(std::size_t index) {
  Block& block = blocks_[index];
  bool any = false;
  for (BlockCopy& copy : block.groups) {
    if (!copy.valid() || !block.status.ok()) continue;
    std::uint64_t bytes = 0;
    for (const auto& page : copy.pages()) bytes += page.size();
    const absl::Status sealed = copy.Commit();
    if (sealed.ok()) bytes_.fetch_add(bytes, std::memory_order_relaxed);
    any = any || sealed.ok();
    // Sealed here meanwhile: then it is there.
    if (!sealed.ok() && !absl::IsAlreadyExists(sealed)) block.status = sealed;
  }
  if (any) sealed_blocks_.fetch_add(1, std::memory_order_relaxed);
  block.groups.clear();
  Drop();
}

void PullBatch::Fetched(absl::StatusOr<FetchResult> result) {
  fetched_ = std::move(result);
  Drop();
}

void PullBatch::Drop() {
  // acq_rel: the last one sees what the others wrote.
  if (open_.fetch_sub(1, std::memory_order_acq_rel) > 1) return;
  Result result;
  result.sealed_blocks = sealed_blocks_.load(std::memory_order_relaxed);
  result.bytes = bytes_.load(std::memory_order_relaxed);
  if (fetched_.ok()) {
    result.transport = fetched_->transport;
    for (std::size_t i = 0; i < blocks_.size(); ++i) {
      absl::Status status = fetched_->blocks[i].status;
      if (status.ok()) status = blocks_[i].status;
      if (status.ok() && blocks_[i].pages_left > 0)
        status = absl::DataLossError("pages are missing");
      result.blocks->push_back(std::move(status));
    }
  } else {
    result.blocks = fetched_.status();
  }
  // The pages of what did not come whole are free before anyone hears of it.
  blocks_.clear();
  std::exchange(ended_, nullptr)(std::move(result));
}

}  // namespace kvmill
