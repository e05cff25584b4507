#include "service/store_call.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "client/convert.h"
#include "service/status_grpc.h"
#include "storage/core/status_macros.h"

namespace kvmill {
namespace {

// Bytes of one layer's contribution to a chunk.
std::uint64_t LayerBytes(const TileFormat& format, const v1::StoreChunk& head) {
  return head.kind() == v1::CHUNK_RECORDS
             ? std::uint64_t{head.head_count()} * RecordBytes(format)
             : std::uint64_t{head.head_count()} * RawBytes(format, head.token_count());
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
  begun_ = true;
  return absl::OkStatus();
}

absl::Status StoreCall::CheckChunk(const Chunk& chunk) const {
  const v1::StoreChunk& head = chunk.head;
  const auto bad = [&](absl::string_view field, std::uint64_t value, std::uint64_t limit) {
    return absl::InvalidArgumentError(
        absl::StrCat("block ", head.sequence(), ": ", field, " ", value, ", want at most ", limit));
  };
  const LayerGroup& group = namespace_.spec.groups[head.group()];
  const std::uint64_t layer_end = std::uint64_t{head.layer_begin()} + head.layer_count();
  const std::uint64_t head_end = std::uint64_t{head.head_begin()} + head.head_count();
  if (layer_end > group.layers.size()) return bad("layer end", layer_end, group.layers.size());
  if (head_end > group.kv_heads) return bad("head end", head_end, group.kv_heads);
  if (head.layer_count() == 0 || head.head_count() == 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("block ", head.sequence(), ": a chunk of no layers or no heads"));
  }
  if (head.kind() != v1::CHUNK_PAGES16 && head.kind() != v1::CHUNK_RECORDS) {
    return bad("chunk kind", static_cast<std::uint64_t>(head.kind()), v1::CHUNK_RECORDS);
  }
  const std::uint64_t want =
      head.layer_count() * LayerBytes(FormatOf(namespace_.spec, group), head);
  if (chunk.bulk.bulk_bytes() != want) {
    return absl::InvalidArgumentError(absl::StrCat("block ", head.sequence(), ": chunk of ",
                                                   chunk.bulk.bulk_bytes(), " bytes, want ", want));
  }
  return absl::OkStatus();
}

absl::Status StoreCall::IdentityOf(const v1::StoreChunk& head, BlockId* id,
                                   BlockOrigin* origin) const {
  const std::uint32_t block_tokens = namespace_.spec.block_tokens;
  if (head.group() >= namespace_.spec.groups.size()) {
    return absl::InvalidArgumentError(absl::StrCat("block ", head.sequence(), ": layer group ",
                                                   head.group(), ", want below ",
                                                   namespace_.spec.groups.size()));
  }
  if (head.token_count() == 0 || head.token_count() > block_tokens) {
    return absl::InvalidArgumentError(absl::StrCat("block ", head.sequence(), ": token_count ",
                                                   head.token_count(), ", want 1 to ",
                                                   block_tokens));
  }
  KVMILL_ASSIGN_OR_RETURN(origin->parent, OptionalKeyFromBytes(head.parent()));
  origin->token_count = head.token_count();
  origin->block_index = head.block_index();
  id->namespace_id = namespace_.id;
  id->group = static_cast<std::uint8_t>(head.group());
  if (head.token_count() < block_tokens) {
    id->key = TailKey(origin->parent, head.token_count());
  } else {
    KVMILL_ASSIGN_OR_RETURN(id->key, BlockKey::FromBytes(head.key()));
  }
  return absl::OkStatus();
}

absl::Status StoreCall::HandleChunk() {
  auto chunk = std::make_shared<Chunk>();
  KVMILL_RETURN_IF_ERROR(chunk->bulk.Parse(message_, kChunkField, &chunk->head));
  context_.counters.inline_bytes_in.fetch_add(chunk->bulk.bulk_bytes(), std::memory_order_relaxed);
  const BlockNumber number(chunk->head.sequence(), chunk->head.group());
  BlockId id;
  BlockOrigin origin;
  absl::Status fits = IdentityOf(chunk->head, &id, &origin);
  if (fits.ok()) fits = CheckChunk(*chunk);

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
  }
  if (block.phase == Block::Phase::kClosed) {  // What still comes of it is dropped.
    EraseIfOver(number);
    return absl::OkStatus();
  }
  ++block.pending;
  ++tasks_;
  window_used_bytes_ += chunk->bulk.bulk_bytes();
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
  const absl::StatusOr<WriteResult> result = Encode(*writer, *chunk);
  writer.reset();
  ChunkDone(number, *chunk, result);
}

absl::StatusOr<WriteResult> StoreCall::Encode(BlockWriter& writer, const Chunk& chunk) {
  const v1::StoreChunk& head = chunk.head;
  const TileFormat format = FormatOf(namespace_.spec, namespace_.spec.groups[head.group()]);
  WriteResult total;
  const auto add = [&total](const WriteResult& part) {
    const std::uint32_t written = total.written_heads + part.written_heads;
    const std::uint32_t existing = total.existing_heads + part.existing_heads;
    if (part.sealed) total = part;
    total.written_heads = written;
    total.existing_heads = existing;
  };
  if (head.kind() == v1::CHUNK_RECORDS) {
    const RowTable records(chunk.bulk.pieces(), RecordBytes(format),
                           std::size_t{head.layer_count()} * head.head_count());
    std::size_t index = 0;
    for (std::uint32_t layer = 0; layer < head.layer_count(); ++layer) {
      for (std::uint32_t h = 0; h < head.head_count(); ++h) {
        KVMILL_ASSIGN_OR_RETURN(
            const WriteResult part,
            writer.WriteRecord(head.layer_begin() + layer, head.head_begin() + h,
                               absl::MakeConstSpan(records.rows()[index++], RecordBytes(format))));
        add(part);
      }
    }
    return total;
  }
  // A row is all heads of one token; each row is a page of one token to the encoder.
  const std::size_t head_bytes = std::size_t{2} * format.head_dim;
  const std::size_t tokens = head.token_count();
  const RowTable rows(chunk.bulk.pieces(), head_bytes * head.head_count(),
                      2 * tokens * head.layer_count());
  std::vector<HeadInput> inputs(head.head_count());
  for (std::uint32_t layer = 0; layer < head.layer_count(); ++layer) {
    for (std::size_t h = 0; h < inputs.size(); ++h) {
      HeadPages pages;
      pages.offset_bytes = h * head_bytes;
      pages.page_tokens = 1;
      pages.dtype = namespace_.spec.source_dtype;
      pages.pages = rows.rows() + 2 * tokens * layer;
      inputs[h].k = pages;
      pages.pages += tokens;
      inputs[h].v = pages;
    }
    KVMILL_ASSIGN_OR_RETURN(const WriteResult part, writer.WriteHeads(head.layer_begin() + layer,
                                                                      head.head_begin(), inputs));
    add(part);
  }
  return total;
}

void StoreCall::ChunkDone(BlockNumber number, const Chunk& chunk,
                          const absl::StatusOr<WriteResult>& result) {
  bool settle = false;
  {
    MutexLock lock(mu_);
    Block& block = blocks_.at(number);
    if (block.phase == Block::Phase::kOpen) {
      const TileFormat format = FormatOf(namespace_.spec, namespace_.spec.groups[block.id.group]);
      block.raw_bytes += std::uint64_t{chunk.head.layer_count()} * chunk.head.head_count() *
                         RawBytes(format, chunk.head.token_count());
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
  window_used_bytes_ -= chunk.bulk.bulk_bytes();
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
  result->set_stored_bytes(sealed.block_stored_bytes);
  result->set_tile_bytes(sealed.block_tile_bytes);
  result->set_tile_raw_bytes(sealed.block_tile_raw_bytes);
  result->set_raw_heads(sealed.block_raw_heads);
  if (!finished_) replies_.push_back(ToByteBuffer(reply));
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
