#include "service/store_call.h"

#include "absl/strings/str_cat.h"
#include "client/convert.h"
#include "service/page_chunk.h"
#include "service/status_grpc.h"
#include "service/store_chunk.h"
#include "storage/core/status_macros.h"

namespace kvmill {
namespace {

// Chunks of pages that wait to be encoded: as the window of bytes, they keep the pool busy.
constexpr std::uint64_t kPageChunksMax = 256;

// The caller has nothing more of the block.
bool IsEnd(const v1::StoreChunk& head) {
  return head.has_pages() && head.layer_count() == 0 && head.last();
}

}  // namespace

StoreCall* StoreCall::Start(ServiceContext& context, const absl::StatusOr<Caller>& caller) {
  auto call = std::make_shared<StoreCall>(context);
  call->self_ = call;
  const std::uint32_t streams =
      context.counters.store_streams.fetch_add(1, std::memory_order_relaxed) + 1;
  MutexLock lock(call->mu_);
  if (streams > kStoreStreamsMax) {
    call->Fail(absl::ResourceExhaustedError(
        absl::StrCat(streams, " Store streams at once: at most ", kStoreStreamsMax)));
  } else if (!caller.ok()) {
    call->Fail(caller.status());
  } else if (absl::Status accepts = context.CheckAcceptsStores(); !accepts.ok()) {
    call->Fail(accepts);
  } else {
    call->caller_ = *caller;
    call->StartRead(&call->message_);
  }
  return call.get();
}

void StoreCall::OnDone() {
  context_.counters.store_streams.fetch_sub(1, std::memory_order_relaxed);
  self_.reset();  // Last statement: may destroy this.
}

void StoreCall::OnCancel() {
  MutexLock lock(mu_);
  Fail(absl::CancelledError("the caller gave up"));
}

void StoreCall::OnReadDone(bool ok) {
  absl::Status status;
  if (ok) status = begun_ ? HandleChunk() : HandleBegin();
  message_.Clear();
  MutexLock lock(mu_);
  reading_ = false;
  if (!ok) reads_done_ = true;
  if (!status.ok()) {
    Fail(status);
  } else {
    Advance();
  }
}

void StoreCall::OnWriteDone(bool ok) {
  MutexLock lock(mu_);
  writing_ = false;
  replies_.pop_front();
  if (!ok) {
    Fail(absl::CancelledError("a reply could not be written"));
  } else {
    Advance();
  }
}

absl::Status StoreCall::HandleBegin() {
  v1::StoreRequest request;
  if (!FromByteBuffer(message_, &request) || !request.has_begin()) {
    return absl::InvalidArgumentError("the first message of a Store must be `begin`");
  }
  KVMILL_ASSIGN_OR_RETURN(namespace_, context_.Resolve(caller_, request.begin().namespace_()));
  wait_durable_ = request.begin().wait() == v1::WAIT_DURABLE;
  if (wait_durable_ && context_.data_dir.empty()) {
    return absl::FailedPreconditionError(
        "wait durable: this daemon has no disk tier (it was started without --data-dir)");
  }
  if (request.begin().has_pages()) {
    const v1::PageSource& pages = request.begin().pages();
    KVMILL_ASSIGN_OR_RETURN(
        pages_, context_.sessions.BeginPageStore(caller_, pages.session_id(), pages.registration(),
                                                 namespace_.id, pages.store()));
    v1::StoreReply reply;
    reply.mutable_begun();
    MutexLock lock(mu_);
    if (!finished_) replies_.push_back(ToByteBuffer(reply));
  }
  begun_ = true;
  return absl::OkStatus();
}

absl::Status StoreCall::CheckFits(const Chunk& chunk) const {
  if (!reads_pages()) return CheckChunk(namespace_, chunk.head, chunk.bulk.bulk_bytes());
  if (IsEnd(chunk.head)) return absl::OkStatus();
  return CheckPageChunk(namespace_, *pages_.memory, chunk.head);
}

std::uint64_t StoreCall::CostOf(const Chunk& chunk) const {
  return reads_pages() ? kStoreWindowBytes / kPageChunksMax : chunk.bulk.bulk_bytes();
}

absl::StatusOr<WriteResult> StoreCall::Encode(const Chunk& chunk, BlockWriter& writer) const {
  if (!reads_pages()) {
    return kvmill::WriteChunk(namespace_, chunk.head, chunk.bulk.pieces(), writer);
  }
  if (IsEnd(chunk.head)) return WriteResult{};
  KVMILL_RETURN_IF_ERROR(pages_.reads->BeginRead());
  absl::StatusOr<WriteResult> result =
      WritePageChunk(namespace_, *pages_.memory, chunk.head, writer);
  pages_.reads->EndRead();
  ServiceCounters& counters = context_.counters;
  (IsOnGpu(*pages_.memory, chunk.head) ? counters.gpu_page_bytes_in : counters.page_bytes_in)
      .fetch_add(BytesOfPageChunk(namespace_, chunk.head), std::memory_order_relaxed);
  return result;
}

absl::Status StoreCall::HandleChunk() {
  auto chunk = std::make_shared<Chunk>();
  KVMILL_RETURN_IF_ERROR(chunk->bulk.Parse(message_, kChunkField, &chunk->head));
  context_.counters.inline_bytes_in.fetch_add(chunk->bulk.bulk_bytes(), std::memory_order_relaxed);
  const BlockNumber number(chunk->head.sequence(), chunk->head.group());
  BlockId id;
  BlockOrigin origin;
  absl::Status fits = IdentityOfChunk(namespace_, chunk->head, &id, &origin);
  if (fits.ok()) fits = CheckFits(*chunk);

  MutexLock lock(mu_);
  if (finished_) return absl::OkStatus();
  if (blocks_.size() >= kOpenBlocksMax && blocks_.find(number) == blocks_.end()) {
    return absl::ResourceExhaustedError(
        absl::StrCat(blocks_.size(), " unfinished blocks in one Store: at most ", kOpenBlocksMax));
  }
  Block& block = blocks_[number];
  if (block.phase == Block::Phase::kNew) {
    block.id = id;
    block.origin = origin;
  } else if (fits.ok() && !(block.id == id && block.origin == origin)) {
    fits = absl::InvalidArgumentError(absl::StrCat(
        "block ", number.first, ": its chunks differ in key, parent, token_count or block_index"));
  }
  block.last = block.last || chunk->head.last();
  if (!fits.ok() && block.phase != Block::Phase::kClosed) {
    Close(number, block, v1::STORE_FAILED, fits, WriteResult{});
  } else if (reads_pages() && IsEnd(chunk->head) && block.phase == Block::Phase::kNew) {
    Close(number, block, v1::STORE_PARTIAL, absl::OkStatus(), WriteResult{});
  }
  if (block.phase == Block::Phase::kClosed) {  // What still comes of it is dropped.
    EraseIfOver(number);
    return absl::OkStatus();
  }
  ++block.pending;
  ++tasks_;
  window_used_bytes_ += CostOf(*chunk);
  switch (block.phase) {
    case Block::Phase::kNew:
      block.phase = Block::Phase::kStarting;
      context_.encode_pool.Post(
          [self = shared_from_this(), number, chunk] { self->BeginBlock(number, chunk); });
      break;
    case Block::Phase::kStarting:
      block.waiting.push_back(std::move(chunk));
      break;
    case Block::Phase::kOpen:
      context_.encode_pool.Post(
          [self = shared_from_this(), number, chunk] { self->WriteChunk(number, chunk); });
      break;
    case Block::Phase::kClosed:
      break;
  }
  return absl::OkStatus();
}

void StoreCall::BeginBlock(BlockNumber number, const ChunkPtr& chunk) {
  BlockId id;
  BlockOrigin origin;
  bool wanted = false;
  {
    MutexLock lock(mu_);
    const Block& block = blocks_.at(number);
    id = block.id;
    origin = block.origin;
    wanted = !finished_ && block.phase == Block::Phase::kStarting;
  }
  absl::StatusOr<BlockWriter> writer = absl::CancelledError("the call is over");
  if (wanted) writer = context_.store.BeginStore(id, origin);
  {
    MutexLock lock(mu_);
    Block& block = blocks_.at(number);
    const std::vector<ChunkPtr> waiting = std::move(block.waiting);
    block.waiting.clear();
    if (writer.ok() && block.phase == Block::Phase::kStarting) {
      block.writer = *std::move(writer);
      block.phase = Block::Phase::kOpen;
    } else if (block.phase == Block::Phase::kStarting) {
      const bool existing = absl::IsAlreadyExists(writer.status());
      Close(number, block, existing ? v1::STORE_EXISTING : v1::STORE_FAILED,
            existing ? absl::OkStatus() : writer.status(), WriteResult{});
    }
    if (block.phase == Block::Phase::kOpen) {
      for (const ChunkPtr& other : waiting) {
        context_.encode_pool.Post(
            [self = shared_from_this(), number, other] { self->WriteChunk(number, other); });
      }
    } else {
      for (const ChunkPtr& other : waiting) Release(block, *other);
      Release(block, *chunk);
      EraseIfOver(number);
      Advance();
      return;
    }
  }
  WriteChunk(number, chunk);
}

void StoreCall::WriteChunk(BlockNumber number, const ChunkPtr& chunk) {
  std::optional<BlockWriter> writer;
  {
    MutexLock lock(mu_);
    Block& block = blocks_.at(number);
    if (block.phase == Block::Phase::kOpen && !finished_) writer = block.writer;
  }
  if (!writer.has_value()) {
    MutexLock lock(mu_);
    Release(blocks_.at(number), *chunk);
    EraseIfOver(number);
    Advance();
    return;
  }
  const absl::StatusOr<WriteResult> result = Encode(*chunk, *writer);
  writer.reset();
  ChunkDone(number, *chunk, result);
}

void StoreCall::ChunkDone(BlockNumber number, const Chunk& chunk,
                          const absl::StatusOr<WriteResult>& result) {
  bool settle = false;
  {
    MutexLock lock(mu_);
    Block& block = blocks_.at(number);
    // The chunk that seals a block may be back before others that were written before it.
    const bool sealed = block.result.has_value() &&
                        block.result->result().outcome() == v1::STORE_STORED && result.ok();
    if (block.phase == Block::Phase::kOpen || sealed) {
      block.raw_bytes += RawBytesOfChunk(namespace_, chunk.head);
    }
    if (block.phase == Block::Phase::kOpen) {
      if (!result.ok()) {
        const bool existing = absl::IsAlreadyExists(result.status());
        Close(number, block, existing ? v1::STORE_EXISTING : v1::STORE_FAILED,
              existing ? absl::OkStatus() : result.status(), WriteResult{});
      } else {
        block.existing_heads += result->existing_heads;
        if (result->sealed) {
          Close(number, block, v1::STORE_STORED, absl::OkStatus(), *result);
        } else if (block.last && block.pending == 1) {
          settle = true;
        }
      }
    }
    if (!settle) {
      Release(block, chunk);
      EraseIfOver(number);
      Advance();
      return;
    }
  }
  Settle(number);
  MutexLock lock(mu_);
  Release(blocks_.at(number), chunk);
  EraseIfOver(number);
  Advance();
}

void StoreCall::Settle(BlockNumber number) {
  BlockId id;
  BlockOrigin origin;
  bool shared = false;
  {
    MutexLock lock(mu_);
    const Block& block = blocks_.at(number);
    id = block.id;
    origin = block.origin;
    shared = block.existing_heads > 0;
  }
  // Another stream wrote some of the heads: it may have sealed the block meanwhile.
  const bool existing =
      shared && absl::IsAlreadyExists(context_.store.BeginStore(id, origin).status());
  MutexLock lock(mu_);
  Block& block = blocks_.at(number);
  if (block.phase != Block::Phase::kOpen) return;
  Close(number, block, existing ? v1::STORE_EXISTING : v1::STORE_PARTIAL, absl::OkStatus(),
        WriteResult{});
}

void StoreCall::Release(Block& block, const Chunk& chunk) {
  --block.pending;
  --tasks_;
  window_used_bytes_ -= CostOf(chunk);
  if (block.pending > 0 || !block.result.has_value()) return;
  block.result->mutable_result()->set_raw_bytes(block.raw_bytes);
  if (!finished_) replies_.push_back(ToByteBuffer(*block.result));
  block.result.reset();
}

void StoreCall::Close(BlockNumber number, Block& block, v1::StoreOutcome outcome,
                      const absl::Status& status, const WriteResult& sealed) {
  block.phase = Block::Phase::kClosed;
  block.writer.reset();
  if (wait_durable_ && (outcome == v1::STORE_STORED || outcome == v1::STORE_EXISTING)) {
    durable_ids_.push_back(block.id);
  }
  v1::StoreReply reply;
  v1::StoreResult* result = reply.mutable_result();
  result->set_sequence(number.first);
  result->set_group(number.second);
  ToProto(status, result->mutable_status());
  result->set_outcome(outcome);
  result->set_raw_bytes(block.raw_bytes);
  FillSealed(sealed, result);
  if (finished_) return;
  if (block.pending > 0) {
    block.result = std::move(reply);
  } else {
    replies_.push_back(ToByteBuffer(reply));
  }
}

void StoreCall::EraseIfOver(BlockNumber number) {
  const auto it = blocks_.find(number);
  if (it->second.phase == Block::Phase::kClosed && it->second.last && it->second.pending == 0) {
    blocks_.erase(it);
  }
}

void StoreCall::Advance() {
  if (finished_) return;
  if (!reads_done_ && !reading_ && window_used_bytes_ < kStoreWindowBytes &&
      replies_.size() < kStoreRepliesMax) {
    reading_ = true;
    StartRead(&message_);
  }
  if (reads_done_ && tasks_ == 0 && !completing_) {
    completing_ = true;
    for (auto& [number, block] : blocks_) {  // The caller never said `last`.
      if (block.phase != Block::Phase::kClosed) {
        Close(number, block, v1::STORE_PARTIAL, absl::OkStatus(), WriteResult{});
      }
    }
    blocks_.clear();
    if (wait_durable_) {
      context_.io_pool.Post([self = shared_from_this()] { self->MakeDurable(); });
    } else {
      v1::StoreReply reply;
      reply.mutable_summary();
      replies_.push_back(ToByteBuffer(reply));
      summarized_ = true;
    }
  }
  if (writing_) return;
  if (!replies_.empty()) {
    writing_ = true;
    StartWrite(&replies_.front());
  } else if (summarized_) {
    finished_ = true;
    Finish(grpc::Status::OK);
  }
}

void StoreCall::MakeDurable() {
  std::vector<BlockId> ids;
  {
    MutexLock lock(mu_);
    ids = std::move(durable_ids_);
    durable_ids_.clear();
  }
  std::vector<absl::Status> results(ids.size());
  absl::Status status = context_.store.MakeDurable(ids, absl::MakeSpan(results));
  for (std::size_t i = 0; status.ok() && i < results.size(); ++i) {
    if (!results[i].ok()) {
      status = absl::Status(
          results[i].code(),
          absl::StrCat("block ", ids[i].key.ToHex(), " is not durable: ", results[i].message()));
    }
  }
  v1::StoreReply reply;
  ToProto(status, reply.mutable_summary()->mutable_durable());
  MutexLock lock(mu_);
  if (finished_) return;
  replies_.push_back(ToByteBuffer(reply));
  summarized_ = true;
  Advance();
}

void StoreCall::Fail(const absl::Status& status) {
  if (finished_) return;
  finished_ = true;
  Finish(StatusToGrpc(status));
}

}  // namespace kvmill
