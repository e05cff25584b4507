#include "client/store_stream.h"

#include <grpcpp/support/async_stream.h>

#include <algorithm>
#include <atomic>
#include <deque>
#include <memory>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/bulk_codec.h"
#include "client/convert.h"
#include "client/kv_view.h"
#include "client/store_chunks.h"
#include "client/store_results.h"
#include "storage/core/mutex.h"
#include "storage/core/status_macros.h"

namespace kvmill {
namespace {

// Payload of one chunk: enough for the per-message costs to vanish, and the unit of work of the
// daemon's encoders.
constexpr std::size_t kChunkBytes = std::size_t{512} << 10;
// Runs of adjacent bytes below this are gathered into a buffer: a slice of its own costs more.
constexpr std::size_t kSliceBytesMin = 4096;

// Caller's memory that slices reference. Counts itself and every slice; the last one reports.
class Pins {
 public:
  explicit Pins(std::function<void()> released) : released_(std::move(released)) {}
  void Add() { count_.fetch_add(1, std::memory_order_relaxed); }
  static void Drop(void* pins) {
    auto* self = static_cast<Pins*>(pins);
    if (self->count_.fetch_sub(1, std::memory_order_acq_rel) == 1) {
      const std::function<void()> released = std::move(self->released_);
      delete self;
      released();
    }
  }
  bool only_self() const { return count_.load(std::memory_order_acquire) == 1; }

 private:
  std::atomic<std::uint64_t> count_{1};
  std::function<void()> released_;
};

// One (block, layer group) as a sequence of chunks: runs of layers, or runs of heads of one layer.
struct Cursor {
  std::size_t block = 0;
  std::uint32_t group = 0;
  std::uint32_t layer = 0;  // Within the group.
  std::uint32_t head = 0;   // Within the caller's heads.
};

class StoreStream {
 public:
  StoreStream(Connection& connection, WorkerPool* encoder, const ClientNamespace& ns,
              absl::Span<const StoreBlock> blocks, const StoreOptions& options,
              std::function<void(absl::StatusOr<StoreResult>)> done)
      : connection_(connection),
        encoder_(encoder),
        ns_(ns),
        blocks_(blocks),
        options_(options),
        done_(std::move(done)),
        pins_(new Pins([this] { connection_.Post([this] { Complete(); }); })),
        pieces_(ns_, blocks_, options_, kChunkBytes),
        more_(!blocks.empty()),
        results_(blocks.size(), ns.spec.groups.size()) {
    if (more_) next_ = pieces_.First();
  }

  void Start(std::chrono::system_clock::time_point deadline) {
    connection_.Admit(context_.get(), deadline, [this](const Connection::Admission& admission) {
      if (!admission.status.ok()) {
        status_ = admission.status;
        Pins::Drop(pins_);
        return;
      }
      started_ = true;
      pass_ = admission.pass;
      channel_ = connection_.channel();
      stream_ = channel_->generic.PrepareCall(context_.get(), "/kvmill.v1.Cache/Store",
                                              connection_.queue());
      stream_->StartCall(&start_done_);
    });
  }

 private:
  void OnStart(bool ok) {
    if (!ok) {
      EndSide(&writes_ended_);
      EndSide(&reads_ended_);
      return;
    }
    v1::StoreRequest begin;
    begin.mutable_begin()->mutable_namespace_()->set_fingerprint(
        std::string(AsBytes(ns_.fingerprint)));
    begin.mutable_begin()->set_wait(options_.wait_durable ? v1::WAIT_DURABLE : v1::WAIT_SEALED);
    outgoing_ = ToByteBuffer(begin);
    stream_->Read(&incoming_, &read_done_);
    stream_->Write(outgoing_, &write_done_);
  }

  void OnWrite(bool ok) {
    outgoing_.Clear();
    if (!ok) {  // The status says why.
      EndSide(&writes_ended_);
    } else if (encoder_ != nullptr) {
      encoder_->Post([this] { WriteNext(); });
    } else {
      WriteNext();
    }
  }

  void WriteNext() {
    if (encoder_ != nullptr ? NextEncoded() : NextChunk()) {
      stream_->Write(outgoing_, &write_done_);
    } else {
      stream_->WritesDone(&half_close_done_);
    }
  }

  void OnHalfClose(bool) { EndSide(&writes_ended_); }

  void OnRead(bool ok) {
    if (!ok) {
      EndSide(&reads_ended_);
      return;
    }
    v1::StoreReply reply;
    if (FromByteBuffer(incoming_, &reply)) HandleReply(reply);
    incoming_.Clear();
    stream_->Read(&incoming_, &read_done_);
  }

  // Both directions ended: the status is due.
  void EndSide(bool* ended) {
    {
      MutexLock lock(mu_);
      *ended = true;
      if (!writes_ended_ || !reads_ended_) return;
    }
    stream_->Finish(&grpc_status_, &finish_done_);
  }

  void OnFinish(bool) {
    connection_.NoteBootId(*context_);
    status_ = connection_.StatusOf(grpc_status_);
    if (absl::IsUnauthenticated(status_)) connection_.PassRefused(pass_);
    outgoing_.Clear();
    stream_.reset();
    // The call holds what it did not write; it goes with its context.
    connection_.ForgetContext(context_.get());
    context_.reset();
    // After a cancelled call the transport may sit on a write that its peer does not read: only
    // closing the connection makes it let go.
    const ChannelPtr channel = std::move(channel_);
    if (!status_.ok() && !pins_->only_self()) connection_.Replace(channel);
    Pins::Drop(pins_);  // Last: may lead to Complete() on another thread.
  }

  void HandleReply(const v1::StoreReply& reply) {
    MutexLock lock(mu_);
    if (reply.has_summary()) {
      durable_ = FromProto(reply.summary().durable());
      return;
    }
    if (reply.has_result()) results_.Add(reply.result());
  }

  // Builds the next message; false when everything was sent.
  bool NextChunk() {
    const std::size_t groups = ns_.spec.groups.size();
    if (at_.block == blocks_.size()) return false;
    const StoreBlock& block = blocks_[at_.block];
    const LayerGroup& group = ns_.spec.groups[at_.group];
    const std::uint32_t heads = options_.head_count == 0 ? group.kv_heads : options_.head_count;
    const TileFormat format = FormatOf(ns_.spec, group);
    const LayerInput* layers = block.layers.data() + first_layer_;
    const bool records = layers[at_.layer].records != nullptr;
    const std::size_t head_bytes =
        records ? RecordBytes(format) : RawBytes(format, block.token_count);

    v1::StoreChunk head;
    head.set_sequence(static_cast<std::uint32_t>(at_.block));
    head.set_group(at_.group);
    bool closed = false;
    {
      MutexLock lock(mu_);
      closed = results_.closed(static_cast<std::uint32_t>(at_.block), at_.group);
    }
    head.set_token_count(block.token_count);
    head.set_block_index(block.block_index);
    head.set_key(std::string(block.key.view()));
    head.set_parent(std::string(block.parent.view()));
    std::vector<grpc::Slice> slices(1);
    std::size_t bytes = 0;
    const auto layer_count = static_cast<std::uint32_t>(group.layers.size());
    if (closed) {  // Its result is there: the rest stays here. The daemon still wants to hear
                   // `last`.
      at_.layer = layer_count;
    } else {
      head.set_kind(records ? v1::CHUNK_RECORDS : v1::CHUNK_PAGES16);
      head.set_layer_begin(at_.layer);
      head.set_head_begin(options_.head_begin + at_.head);
      const std::uint32_t heads_max =
          static_cast<std::uint32_t>(std::max<std::size_t>(1, kChunkBytes / head_bytes));
      const std::uint32_t heads_now = std::min(heads - at_.head, heads_max);
      head.set_head_count(heads_now);
      std::uint32_t layers_now = 0;
      do {
        bytes +=
            AppendLayer(layers[at_.layer], format, block.token_count, at_.head, heads_now, &slices);
        ++layers_now;
        if (heads_now < heads) {  // A part of one layer.
          at_.head += heads_now;
          if (at_.head < heads) break;
          at_.head = 0;
        }
        ++at_.layer;
      } while (heads_now == heads && at_.layer < layer_count &&
               (layers[at_.layer].records != nullptr) == records &&
               bytes + head_bytes * heads <= kChunkBytes);
      head.set_layer_count(layers_now);
    }
    if (at_.layer == layer_count) {
      head.set_last(true);
      at_.layer = at_.head = 0;
      first_layer_ += layer_count;
      if (++at_.group == groups) {
        at_.group = 0;
        first_layer_ = 0;
        ++at_.block;
      }
    }
    slices[0] = grpc::Slice(EncodeBulkHead(head, kChunkField, bytes));
    outgoing_ = grpc::ByteBuffer(slices.data(), slices.size());
    return true;
  }

  // The same, of what is encoded here first.
  bool NextEncoded() {
    while (encoded_.empty()) {
      if (!more_) return false;
      EncodeNext();
    }
    // Slices share the chunk.
    const auto chunk = std::make_shared<StoreChunk>(std::move(encoded_.front()));
    encoded_.pop_front();
    std::vector<grpc::Slice> slices(1);
    std::size_t bytes = 0;
    for (const absl::Span<const std::byte>& span : chunk->bytes) {
      bytes += span.size();
      pins_->Add();
      slices.emplace_back(const_cast<std::byte*>(span.data()), span.size(), &ChunkSlice::Drop,
                          new ChunkSlice{chunk, pins_});
    }
    slices[0] = grpc::Slice(EncodeBulkHead(chunk->head, kChunkField, bytes));
    outgoing_ = grpc::ByteBuffer(slices.data(), slices.size());
    return true;
  }

  void EncodeNext() {
    const StorePiece piece = next_;
    bool closed = false;
    {
      MutexLock lock(mu_);
      closed = results_.closed(piece.block, piece.group);
    }
    if (!closed) {
      std::vector<StoreChunk> chunks;
      absl::Status status;
      if (pieces_.MayEncode(piece)) {
        status = pieces_.Encode(piece, &chunks);
      } else {
        chunks.push_back(pieces_.Gather(piece));
      }
      if (status.ok()) {
        chunks.back().head.set_last(piece.last);
        for (StoreChunk& chunk : chunks) encoded_.push_back(std::move(chunk));
        more_ = pieces_.Next(&next_);
        return;
      }
      v1::StoreResult failed;
      failed.set_sequence(piece.block);
      failed.set_group(piece.group);
      ToProto(status, failed.mutable_status());
      MutexLock lock(mu_);
      results_.Add(failed);
    }
    // Its result is there: the rest stays here. The daemon still wants to hear `last`.
    StoreChunk nothing;
    StorePiece no_layers = piece;
    no_layers.layer_count = 0;
    nothing.head = pieces_.HeadOf(no_layers);
    nothing.head.set_last(true);
    encoded_.push_back(std::move(nothing));
    more_ = pieces_.NextGroup(&next_);
  }

  std::size_t AppendLayer(const LayerInput& input, const TileFormat& format,
                          std::uint32_t token_count, std::uint32_t head, std::uint32_t head_count,
                          std::vector<grpc::Slice>* slices) {
    if (input.records != nullptr) {
      const std::size_t bytes = RecordBytes(format) * head_count;
      AppendBorrowed(input.records + RecordBytes(format) * head, bytes, slices);
      return bytes;
    }
    const KvPart part = {token_count, head, head_count, std::size_t{2} * format.head_dim};
    const auto borrow = [this, slices](const std::byte* data, std::size_t run_bytes) {
      AppendBorrowed(data, run_bytes, slices);
    };
    const auto room = [slices](std::size_t part_bytes) {
      // A new slice is not shared: its memory may be written.
      return reinterpret_cast<std::byte*>(
          const_cast<std::uint8_t*>(slices->emplace_back(part_bytes).begin()));
    };
    for (const KvView* view : {&input.k, &input.v}) {
      VisitKvPart(*view, part, kSliceBytesMin, borrow, room);
    }
    return RawBytes(format, token_count) * head_count;
  }

  void AppendBorrowed(const std::byte* data, std::size_t bytes, std::vector<grpc::Slice>* slices) {
    pins_->Add();
    // gRPC takes a mutable pointer and does not write through it.
    slices->emplace_back(const_cast<std::byte*>(data), bytes, &Pins::Drop, pins_);
  }

  void Complete() {
    absl::StatusOr<StoreResult> result = absl::UnknownError("");
    {
      MutexLock lock(mu_);
      if (!status_.ok()) {
        result = status_;
      } else if (options_.wait_durable && !durable_.ok()) {
        result = durable_;
      } else {
        result = results_.Take();
      }
    }
    const auto done = std::move(done_);
    Connection& connection = connection_;
    const bool started = started_;
    done(std::move(result));
    delete this;
    if (started) connection.End(nullptr);
  }

  // What a slice of an encoded chunk owns.
  struct ChunkSlice {
    std::shared_ptr<StoreChunk> chunk;
    Pins* pins;
    static void Drop(void* slice) {
      auto* const self = static_cast<ChunkSlice*>(slice);
      Pins* const pins = self->pins;
      delete self;
      Pins::Drop(pins);
    }
  };

  Connection& connection_;
  WorkerPool* const encoder_;  // Null: what travels is as it came.
  const ClientNamespace ns_;
  const absl::Span<const StoreBlock> blocks_;
  const StoreOptions options_;
  std::function<void(absl::StatusOr<StoreResult>)> done_;
  Pins* const pins_;  // Deletes itself; its last reference leads to Complete().

  std::unique_ptr<grpc::ClientContext> context_ = std::make_unique<grpc::ClientContext>();
  bool started_ = false;
  std::uint64_t pass_ = 0;
  ChannelPtr channel_;
  std::unique_ptr<grpc::GenericClientAsyncReaderWriter> stream_;
  MemberCompletion<StoreStream> start_done_{this, &StoreStream::OnStart};
  MemberCompletion<StoreStream> write_done_{this, &StoreStream::OnWrite};
  MemberCompletion<StoreStream> half_close_done_{this, &StoreStream::OnHalfClose};
  MemberCompletion<StoreStream> read_done_{this, &StoreStream::OnRead};
  MemberCompletion<StoreStream> finish_done_{this, &StoreStream::OnFinish};
  grpc::Status grpc_status_;
  grpc::ByteBuffer outgoing_;
  grpc::ByteBuffer incoming_;
  Cursor at_;                    // Of the writing side.
  std::size_t first_layer_ = 0;  // Index of the current group's first layer in StoreBlock::layers.
  // Instead of these two, with an encoder:
  const StorePieces pieces_;
  bool more_;
  StorePiece next_;                 // If more_.
  std::deque<StoreChunk> encoded_;  // That were not written yet.
  absl::Status status_;

  Mutex mu_;
  bool writes_ended_ = false;  // Guarded by mu_ (EndSide).
  bool reads_ended_ = false;   // Guarded by mu_ (EndSide).
  StoreResults results_ ABSL_GUARDED_BY(mu_);
  absl::Status durable_ ABSL_GUARDED_BY(mu_) = absl::UnknownError("the daemon sent no summary");
};

}  // namespace

absl::Status CheckStore(const ClientNamespace& ns, absl::Span<const StoreBlock> blocks,
                        const StoreOptions& options) {
  std::size_t layer_count = 0;
  for (const LayerGroup& group : ns.spec.groups) {
    layer_count += group.layers.size();
    const std::uint64_t head_end = std::uint64_t{options.head_begin} + options.head_count;
    if (head_end > group.kv_heads || (options.head_count == 0 && options.head_begin != 0)) {
      return absl::InvalidArgumentError(absl::StrCat("heads ", options.head_begin, " to ", head_end,
                                                     ": the namespace has ", group.kv_heads));
    }
  }
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    const StoreBlock& block = blocks[i];
    if (block.token_count == 0 || block.token_count > ns.spec.block_tokens) {
      return absl::InvalidArgumentError(absl::StrCat(
          "block ", i, ": token_count ", block.token_count, ", want 1 to ", ns.spec.block_tokens));
    }
    if (block.key.empty()) {
      return absl::InvalidArgumentError(absl::StrCat(
          "block ", i, ": no key, want 1 to ", kBlockKeyBytesMax,
          " bytes that stand for its tokens and all before them",
          block.token_count < ns.spec.block_tokens ? "; a tail needs one as well" : ""));
    }
    if (block.layers.size() != layer_count) {
      return absl::InvalidArgumentError(absl::StrCat("block ", i, ": ", block.layers.size(),
                                                     " layers, the namespace has ", layer_count));
    }
    for (const LayerInput& layer : block.layers) {
      const auto has_memory = [](const KvView& view) {
        return view.page_tokens == 0 ? view.data != nullptr : view.pages != nullptr;
      };
      if (layer.records == nullptr && !(has_memory(layer.k) && has_memory(layer.v))) {
        return absl::InvalidArgumentError(absl::StrCat("block ", i, ": a layer without memory"));
      }
    }
  }
  return absl::OkStatus();
}

void StartStoreStream(Connection& connection, WorkerPool* encoder, const ClientNamespace& ns,
                      absl::Span<const StoreBlock> blocks, const StoreOptions& options,
                      std::chrono::system_clock::time_point deadline,
                      std::function<void(absl::StatusOr<StoreResult>)> done) {
  // Deletes itself after `done`.
  (new StoreStream(connection, encoder, ns, blocks, options, std::move(done)))->Start(deadline);
}

}  // namespace kvmill
